"""Attention in one call: ``scaled_dot_product_attention``, taken apart as it is written out by hand.

Scores are products of queries and keys, whose scales are inverse to each other by the dimension of
a head. At their softmax the network is cut, and what comes out of it weighs the values as an input
does: their scales go on by the dimension of a head into the output projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.boundary import cut_inside
from pathspace.network.trace.reasons import REASONS
from pathspace.network.trace.recorder import Recorder


def attention(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Trace softmax(q k^T / sqrt(d)) v. Masks open and close paths, and every path that a mask can open counts.

    (A mask that is learned is a summand of the scores: see ``written_out``.)
    """
    del dropout_p, is_causal
    operands = (query, key, value)
    _check_operands(recorder, operands)
    if recorder.strict or (attn_mask is not None and recorder.rank(attn_mask) != 1):
        recorder.no_rule(REASONS[recorder.name])
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        repeat = torch.Tensor.repeat_interleave
        key = recorder.apply("repeat_interleave", repeat, key, groups, -3)
        value = recorder.apply("repeat_interleave", repeat, value, groups, -3)
    turned = recorder.apply("transpose", torch.Tensor.transpose, key, -2, -1)
    products = recorder.apply("matmul", torch.matmul, query, turned)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = recorder.value(recorder.apply("mul", torch.mul, products, factor))
    weights = cut_inside(recorder, scores, query.dtype, len(operands))
    result = recorder.apply("matmul", torch.matmul, weights, value)
    recorder.inside[recorder.value(result).slot] = scores.slot
    return result


def _check_operands(recorder: Recorder, operands: Sequence[Tensor]) -> None:
    """Refuse queries, keys or values that are no activations, and examples that attend to each other."""
    values = [recorder.lookup(t) for t in operands]
    for value in values:
        if value is not None and value.batch is not None and value.batch >= value.labels.dim() - 2:
            recorder.wrong_batch()
    if any(value is None or value.kind != "hidden" for value in values):
        recorder.no_rule(REASONS[recorder.name])


RULES: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": attention}
