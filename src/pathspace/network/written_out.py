"""Functions of torch that hold several operations, written as these, so that a trace follows them.

Letters: B batch, L queries, S keys, E features, h heads, d features of a head.
"""

from __future__ import annotations

import functools
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
    """Decompose ``F.multi_head_attention_forward`` of queries ``[L, B, E]``; the batch keeps its dimension.

    Raises:
        NoRule: its keys or values are given, or it has no batch.
    """
    del embed_dim_to_check, training, is_causal, dropout_p
    if query.dim() != 3 or static_k is not None or static_v is not None:
        name = "multi_head_attention_forward"
        raise NoRule(name, "", REASONS[name])
    weights: Any = in_proj_weight
    if use_separate_proj_weight or in_proj_weight is None:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = _projections(query, key, value, weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:  # one more key, which is learned
        k = torch.cat([k, bias_k.expand(-1, k.shape[1], -1)])
        v = torch.cat([v, bias_v.expand(-1, v.shape[1], -1)])
    # [L, B, E] -> [B, h, L, d]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    if add_zero_attn:
        k = F.pad(k, (0, 0, 0, 1))
        v = F.pad(v, (0, 0, 0, 1))
    mask = _mask(key_padding_mask, attn_mask, q, k)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    result = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return result, None
    shown = _weights_of_values(q, k, mask)
    return result, shown.mean(1) if average_attn_weights else shown


def _weights_of_values(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax of the scores, by which attention weighs values."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _projections(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None
) -> Sequence[Tensor]:
    """Return queries, keys and values, by one weight for all three or by one for each."""
    if isinstance(weights, Tensor):
        if query is key is value:
            return F.linear(query, weights, bias).chunk(3, -1)
        weights = weights.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    triples = zip((query, key, value), weights, biases, strict=True)
    return [F.linear(x, weight, b) for x, weight, b in triples]


def _mask(padding: Tensor | None, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the summand of scores ``[B, h, L, S]``."""
    parts = []
    if padding is not None:
        parts.append(_added(padding, q.dtype)[:, None, None])
    if mask is not None:
        mask = _added(mask, q.dtype)
        parts.append(mask if mask.dim() == 2 else mask.view(*q.shape[:3], mask.shape[-1]))
    more = [k.shape[2] - part.shape[-1] for part in parts]  # keys that no mask is of
    parts = [F.pad(part, (0, n)) if n else part for part, n in zip(parts, more, strict=True)]
    return sum(parts[1:], parts[0]) if parts else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of numbers, from a mask that says which scores are left out."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Decompose ``F.bilinear`` ``[..., I], [..., J] -> [..., O]``: a linear map of all products of two features."""
    products = input1.unsqueeze(-1) * input2.unsqueeze(-2)
    return F.linear(products.flatten(-2), weight.flatten(1), bias)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Decompose ``F.scaled_dot_product_attention`` with a learned mask, such as a bias of relative positions."""
    del dropout_p, is_causal
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = (
        query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    )
    return (scores + attn_mask).softmax(-1) @ value


def sum_with_product(
    input: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Decompose ``addmm``, ``addmv`` and ``baddbmm``: beta b + alpha x y."""
    product = x @ y if alpha == 1 else alpha * (x @ y)
    if beta == 0:  # b is not read
        return product
    return (input if beta == 1 else beta * input) + product


def sum_with_products(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Decompose ``addbmm``: beta b + alpha sum_k x_k y_k."""
    summed = (batch1 @ batch2).sum(0)
    product = summed if alpha == 1 else alpha * summed
    if beta == 0:  # b is not read
        return product
    return (input if beta == 1 else beta * input) + product


def addcmul(input: Tensor, *factors: Any, value: Any = 1, **named: Tensor) -> Tensor:
    """Decompose ``torch.addcmul``: b + value x y, element by element.

    The value may be the first factor, as in old torch.
    """
    value, x, y = (value, *factors, *named.values())[-3:]
    return input + (x * y if value == 1 else value * (x * y))


def split_along(dim: int) -> Callable[..., Any]:
    """Decompose ``hsplit``, ``vsplit`` or ``dsplit`` into a number of parts, or at indices."""

    def parts(input: Tensor, *at: Any, **named: Any) -> Any:
        places = [*at, *named.values()]
        return input.tensor_split(
            places if len(places) > 1 else places[0], min(dim, input.dim() - 1)
        )

    return parts


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Decompose ``torch.broadcast_tensors``."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)


def in_pairs(equation: str, operands: Sequence[Tensor], rank: Callable[[Tensor], int]) -> Tensor:
    """Decompose ``einsum`` of more than two tensors into pairs: activations first, and the parameter last."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "".join(sorted(c for c in set(given) - {","} if given.count(c) == 1))
    left = sorted(zip(given.split(","), operands, strict=True), key=lambda one: rank(one[1]))
    letters, product = left.pop(0)
    while left:
        other, factor = left.pop(0)
        needed = result + "".join(side for side, _ in left)
        out = "".join(dict.fromkeys(c for c in letters + other if c in needed)) if left else result
        product = torch.einsum(f"{letters},{other}->{out}", product, factor)
        letters = out
    return product


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Decompose ``take_along_dim`` into ``gather`` with sizes of one repeated."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    sizes = [max(pair) for pair in zip(input.shape, indices.shape, strict=True)]
    sizes[dim] = -1
    return input.expand(sizes).gather(dim, indices.expand(sizes))


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Decompose ``F.normalize``."""
    return input / input.norm(p, dim, keepdim=True).clamp_min(eps)


def with_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Decompose ``var_mean`` or ``std_mean`` into the function and a mean."""

    def both(
        input: Tensor,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        divisor = {"unbiased": unbiased} if correction is None else {"correction": correction}
        return spread(input, dim, keepdim=keepdim, **divisor), input.mean(dim, keepdim)

    return both


SUMS = ("addmm", "addmv", "baddbmm")
_STATISTICS = {
    "normalize": normalize,
    "var_mean": with_mean(torch.var),
    "std_mean": with_mean(torch.std),
}
WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "bilinear": bilinear,
    "multi_head_attention_forward": multi_head_attention,
    **dict.fromkeys(SUMS, sum_with_product),
    "addcmul": addcmul,
    "lerp": lambda input, end, weight: (1 - weight) * input + weight * end,
    "take_along_dim": take_along_dim,
    "fliplr": lambda input: input.flip(1),
    "flipud": lambda input: input.flip(0),
    "hsplit": split_along(1),
    "vsplit": split_along(0),
    "dsplit": split_along(2),
    "broadcast_tensors": broadcast_tensors,
    "fmax": torch.maximum,
    "fmin": torch.minimum,
    "vecdot": lambda x, y, *, dim=-1: (x * y).sum(dim),
    "multi_dot": lambda tensors: functools.reduce(torch.matmul, tensors),
    "nansum": torch.sum,
    "normalize": normalize,
    "var_mean": with_mean(torch.var),
    "std_mean": with_mean(torch.std),
    "addbmm": sum_with_products,
}


def written_out(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rank: Callable[[Tensor], int],
    *,
    strict: bool = False,
) -> Callable[..., Any] | None:
    """Return the decomposition of a function, if it has one.

    Args:
        name: its name.
        args: its arguments.
        kwargs: those by name.
        rank: 0 for an activation, 1 for what depends on no parameter, 2 for a parameter.
        strict: whether functions that multiply activations are left as they are.
    """
    if name == "einsum":
        return _einsum_in_pairs(args, rank)
    if strict and name not in (*SUMS, *_STATISTICS):
        return None
    if name in _STATISTICS and not (args and rank(args[0]) == 0):
        return None
    if name != "scaled_dot_product_attention":
        return WRITTEN_OUT.get(name)
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    is_learned = mask is not None and rank(mask) != 1
    return attention if is_learned else None


def _einsum_in_pairs(
    args: Sequence[Any], rank: Callable[[Tensor], int]
) -> Callable[..., Any] | None:
    """Return the decomposition of an einsum of more than two tensors; None if it has none."""
    equation = args[0]
    if not isinstance(equation, str) or "..." in equation:
        return None
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    parameters = sum(rank(t) == 2 for t in operands)
    if len(operands) < 3 or parameters > 1:  # between two parameters are units
        return None
    return lambda *_: in_pairs(equation, operands, rank)
