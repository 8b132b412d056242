"""Embeddings: a linear map of one-hot inputs, whose every coordinate is an input node with gamma^2 = 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network.rules.linear import map_units, require_parameter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED


def embedding(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Trace a lookup in a table ``[V, d]``: gamma^2 of output k is the sum of E[v, k]^2 over v, at every position."""
    del padding_idx
    if input.is_floating_point():
        raise TypeError(
            f"expected tokens of an integer type for an embedding, got {input.dtype}: give an example input of tokens, "
            "such as torch.zeros(1, 20, dtype=torch.long)"
        )
    if max_norm is not None:
        recorder.refuse(
            "max_norm rescales the rows that are looked up, which changes the parameters"
        )
    # fixed rows, such as positions: the table's elements are biases
    if recorder.lookup(input) is None:
        return recorder.apply("__getitem__", torch.Tensor.__getitem__, weight, input)
    tokens = recorder.value(input)
    table = require_parameter(recorder, weight)
    if tokens.kind not in ("input", "buffer"):
        recorder.no_rule("the rows it looks up depend on activations")
    rows, width = table.shape
    turned = replace(table, labels=table.labels.t())
    labels = map_units(recorder, turned, width, torch.full((rows,), FIXED)).expand(
        *tokens.shape, width
    )

    def squared(_: Tensor, q: Tensor) -> Tensor:
        return q.sum(0).expand(labels.shape)

    out = recorder.emit(squared, [tokens, table], labels, dtype=weight.dtype, batch=tokens.batch)
    return recorder.note_linear(out)


def embedding_bag(
    recorder: Recorder,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Trace the sum, mean or maximum of the rows that a bag names, for bags of one length."""
    del norm_type, scale_grad_by_freq, sparse, include_last_offset
    if offsets is not None or input.dim() != 2:
        recorder.no_rule(
            "bags that are told apart by offsets have lengths that depend on the data",
            "Give the indices as one row for each example, padded with padding_idx",
        )
    if per_sample_weights is not None:
        recorder.no_rule(
            "weights of single rows are not known", "Weigh the rows of an nn.Embedding instead"
        )
    if padding_idx is not None and mode != "sum":
        recorder.no_rule(f"a {mode} without the padding depends on the data", "Use mode='sum'")
    rows = embedding(recorder, input, weight, max_norm=max_norm)
    reduction = {"sum": "sum", "mean": "mean", "max": "amax"}[mode]
    bags = recorder.apply(reduction, getattr(torch, reduction), rows, 1)
    recorder.inside[recorder.value(bags).slot] = recorder.value(rows).slot
    return bags


RULES: dict[str, Callable[..., Any]] = {"embedding": embedding, "embedding_bag": embedding_bag}
