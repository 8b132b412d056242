"""Functions of torch that hold several operations, written as these, so that a trace and a replay follow them.

Letters: B batch, L queries, S keys, E features, h heads, d features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.errors import NoRule
from pathspace.network.trace.reasons import REASONS


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` of queries ``[L, B, E]``, which keeps the batch a dimension of its own.

    Raises:
        NoRule: it has options beyond projections and masks.
    """
    del embed_dim_to_check, training, is_causal, dropout_p
    more = (bias_k, bias_v, static_k, static_v)
    if query.dim() != 3 or add_zero_attn or any(t is not None for t in more):
        name = "multi_head_attention_forward"
        raise NoRule(name, "", REASONS[name])
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    if use_separate_proj_weight or in_proj_weight is None:
        projected = _projections((query, key, value), separate, in_proj_bias)
    elif query is key is value:
        projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        projected = _projections((query, key, value), in_proj_weight.chunk(3), in_proj_bias)
    # [L, B, E] -> [B, h, L, d]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in projected)
    mask = _mask(key_padding_mask, attn_mask, q, k)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    result = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return result, None
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    shown = (scores if mask is None else scores + mask).softmax(-1)
    return result, shown.mean(1) if average_attn_weights else shown


def _projections(inputs: Sequence[Tensor], weights: Sequence[Any], bias: Tensor | None) -> list[Tensor]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _mask(padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to scores ``[B, h, L, S]``."""
    parts = []
    if padding is not None:
        parts.append(_added(padding, q.dtype)[:, None, None])
    if mask is not None:
        mask = _added(mask, q.dtype)
        parts.append(mask if mask.dim() == 2 else mask.view(*q.shape[:3], k.shape[2]))
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of numbers, of one that says what is left out."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


WRITTEN_OUT: dict[str, Callable[..., Any]] = {"multi_head_attention_forward": multi_head_attention}
