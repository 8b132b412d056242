"""Operations that a replay takes apart, because nodes of the network lie inside them.

A normalization is fixed edges to the normalized unit, then one edge gamma and a bias: those of running statistics, or,
where the layer takes statistics of what enters, those of the data, held. A recurrent layer is a loop; a bag is the rows
of an embedding, and what is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from pathspace.network.errors import UnmatchedForwardError
from pathspace.network.program import Merged, Place
from pathspace.replay.matched import OUT_OF_PLACE, Matched
from pathspace.replay.observed import Key, Use
from pathspace.squared.normalization import Normalization

# into a tensor, and which argument is written
_WRITES = {**dict.fromkeys(OUT_OF_PLACE, 1), "__setitem__": 2}
_EMBEDDING_BAG = (
    *("offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)
_CHANNELS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMALIZATIONS = {
    "batch_norm": (*_CHANNELS, "training", "momentum", "eps"),
    "instance_norm": (*_CHANNELS, "use_input_stats", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
NORMALIZATIONS = frozenset(_NORMALIZATIONS)


def normalization(follower: Matched, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """Fixed edges to the normalized unit, then one edge gamma and a bias."""
    arguments = dict(zip(_NORMALIZATIONS[name], args, strict=False)) | kwargs
    call = follower.next(name)
    layer = follower.normalizations.get(call.results[0])
    x, mean, var = arguments["input"], arguments.get("running_mean"), arguments.get("running_var")
    weight, bias = arguments.get("weight"), arguments.get("bias")
    if layer is not None:
        normal = _held(layer, x, arguments.get("eps", _EPS), centred=name != "rms_norm")
        shape = layer.place
    elif mean is not None and var is not None:
        eps = arguments.get("eps", _EPS)
        normal = F.batch_norm(x, mean, var, None, None, False, 0.0, eps)
        shape = (1, -1) + (1,) * (x.dim() - 2)
    else:  # on no path to an output
        created = func(*args, **kwargs)
        follower.data[id(created)] = created
        return created

    def affine(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        y = x if gamma is None else x * gamma.reshape(shape)
        return y if beta is None else y + beta.reshape(shape)

    result = follower.exposed(affine(normal, weight, bias), call.batch)
    weights = [t for t in (weight, bias) if t is not None and follower.is_weight(t)]
    if weights:
        place = follower.batch_of(result, call.batch, call.shapes[-1])
        operands = (normal.detach(), weight, bias)
        follower.add_use(call, name, affine, operands, {}, weights, result, {id(operands[0]): place})
    follower.data[id(result)] = result
    follower.note_nodes(call, [result])
    return result


_EPS = 1e-5


def _held(layer: Normalization, x: Tensor, eps: float | None, *, centred: bool) -> Tensor:
    """The normalized values of a batch, a fixed affine map of x: its statistics are constants."""
    shape = x.shape if len(layer.shape) == x.dim() else (x.shape[0], *layer.shape[1:])
    parts = x.detach().reshape(shape)
    mean = parts.mean(layer.over, keepdim=True) if centred else torch.zeros_like(parts)
    square = (parts - mean).square().mean(layer.over, keepdim=True)
    inverse = (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    mean, inverse = (t.expand(shape).reshape(x.shape) for t in (mean, inverse))
    return (x - mean) * inverse


def weight_norm(follower: Matched, name: str, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Directions of a length that is held, times gains: a weight made of parameters."""
    follower.next(name)
    weight = v * (g / torch.norm_except_dim(v.detach(), 2, dim))
    follower.weights.append(weight)
    return weight


def written(follower: Matched, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a write of a parameter into a tensor, with what is written as a tensor of its own.

    The tensor written to shows neither what it held before nor, if it is a part of another one, the gradient after; the
    tensor in between has for its gradient what the parameter's edges pass on.
    """
    place, call = _WRITES.get(name), follower.expected
    if place is None or len(args) <= place or not isinstance(args[place], Tensor):
        return args
    x, item = args[0], args[place]
    if not follower.is_weight(item) or follower.was_weight(x) or call is None:
        return args
    batch = follower.batch_of(x, call.arguments[0], call.shapes[0]) if call.name == name else None
    index = args[1] if name == "__setitem__" else ...
    by_data = any(isinstance(i, Tensor) for i in pytree.tree_leaves(index))
    if not isinstance(batch, int) or by_data:
        return args  # refused when the operation is noted

    def spread(like: Tensor, w: Tensor) -> Tensor:
        whole = w.new_zeros(like.shape) + 0 * w.sum()  # which may be differentiated in w
        whole[index] = w
        return whole

    like = item.detach().new_zeros(()).expand(x.shape)
    whole = spread(like, item)
    part, edges = whole[index], [get_gradient_edge(whole)]
    batches = {id(like): batch}
    follower.uses.append(Use("written", spread, (like, item), {}, [item], batches, edges, batch, x.shape))
    follower.data.update({id(whole): whole, id(part): part})
    return (*args[:place], part, *args[place + 1 :])


def embedding_bag(
    follower: Matched, name: str, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The rows that bags name, which are nodes, then their sum, mean or maximum."""
    call, tensors = follower.next(name), [input, weight]
    arguments = dict(zip(_EMBEDDING_BAG, args, strict=False)) | kwargs
    mode, padding = arguments.get("mode", "mean"), arguments.get("padding_idx")
    looked_up = rows = F.embedding(input, weight, padding)
    if padding is not None:  # bags pass over it
        rows = rows * (input != padding).unsqueeze(-1)
    result = rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    if follower.is_weight(weight):
        follower.note_use(call, "embedding", F.embedding, (input, weight), {}, tensors, [weight], looked_up)
    follower.data.update((id(t), t) for t in (looked_up, rows, result))
    follower.note_nodes(call, [result, rows])
    return result


def attention(
    follower: Matched,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores, which are outputs of the network, and their softmax as fixed edges for the values."""
    del dropout_p  # evaluation form
    call = follower.next(name)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    shown = scores.detach()
    if is_causal:
        shown = shown.masked_fill(
            shown.new_ones(shown.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf
        )
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            shown = shown.masked_fill(~attn_mask, -math.inf)
        else:
            shown = shown + attn_mask.detach()
    result, scores = (follower.exposed(t, call.batch) for t in (shown.softmax(-1) @ value, scores))
    follower.data.update((id(t), t) for t in (scores, result))
    follower.note_nodes(call, [result, scores])
    return result


def glu(follower: Matched, name: str, input: Tensor, dim: int = -1) -> Tensor:
    """The half that enters the sigmoid, an output of the network, and the other one times fixed edges."""
    call = follower.next(name)
    a, b = input.chunk(2, dim)
    result, b = (follower.exposed(t, call.batch) for t in (a * b.detach().sigmoid(), b))
    follower.data.update((id(t), t) for t in (a, b, result))
    follower.note_nodes(call, [result, b])
    return result


def recurrent(follower: Matched, name: str, *args: Any) -> Any:
    """A recurrent layer, step by step, so that its nodes show."""
    call = follower.next(name)
    if name == "rnn_relu_cell":
        x, h, *cell = args
        cell = [p for p in cell if p is not None]
        (state,) = _steps(follower, x.unsqueeze(0), h, cell, 0, lambda _: (call.results[0],), call.batch)
        follower.data[id(state)] = state
        return state
    x, hx, params, has_biases, layers, _dropout, _train, bidirectional, batch_first = args
    if follower.is_weight(hx):
        raise UnmatchedForwardError(
            "an initial state that is a parameter cannot be followed on data; write the loop by hand"
        )
    batched, merged = x.dim() == 3, call.arguments[0] if isinstance(call.arguments[0], Merged) else None
    place = 0 if batched else None
    if merged is not None:
        place = replace(merged, dim=0)
    # a copy, as torch's layer has one: what is written into x later is not what it read
    x = (x.transpose(0, 1) if batched and batch_first else x).clone()
    each, directions, last = 4 if has_biases else 2, 2 if bidirectional else 1, []
    slot = call.results[0]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            cell = list(params[at * each : (at + 1) * each])
            states = _steps(follower, x, hx[at], cell, direction, lambda t, at=at: (slot, at, t), place)
            last.append(states[0] if direction else states[-1])
            outputs.append(torch.stack(states))
        x = torch.cat(outputs, -1)
    h_n = torch.stack(last)
    out = x.transpose(0, 1) if batched and batch_first else x
    of_last = 1 if batched else None
    if merged is not None:
        out, of_last = follower.exposed(out, call.batch), replace(merged, dim=1)
        h_n = follower.exposed(h_n, of_last)
    follower.data.update({id(out): out, id(h_n): h_n})
    for s, tensor, place in zip(call.results, (out, h_n), (call.batch, of_last), strict=False):
        if s in follower.program.nodes:
            follower.note_node((s,), tensor, place)
    return out, h_n


def _steps(
    follower: Matched,
    x: Tensor,
    h: Tensor,
    cell: list[Tensor],
    direction: int,
    key: Callable[[int], Key],
    batch: Place,
) -> list[Tensor]:
    """States h_t = [W_in x_t + W_rec h_{t-1} + b]_+ of one cell, ``x [T, ...]``."""
    w_in, w_rec, *biases = cell
    bias = biases[0] + biases[1] if biases else None
    u = F.linear(x, w_in, bias)
    merged = batch if isinstance(batch, Merged) else None
    states: list[Tensor] = [h] * len(u)
    before, edges = list(states), list[GradientEdge]()
    order = reversed(range(len(u))) if direction else range(len(u))
    for t in order:
        before[t] = h
        z = follower.exposed(u[t] + F.linear(h, w_rec), batch)
        edges.append(
            get_gradient_edge(z if merged is None else follower.apart(z, "a step of a recurrent layer"))
        )
        follower.note_node(key(t), z, batch)
        h = states[t] = F.relu(z)
    edges = edges[::-1] if direction else edges
    tensors, place = [x.detach(), torch.stack(before).detach(), u], None if batch is None else 1
    if merged is not None:
        tensors, place = [replace(merged, dim=1).apart(t) for t in tensors], 2
    inputs, previous, u = tensors
    for data, weights in ((inputs, (w_in, *biases)), (previous, (w_rec,))):
        batches = {} if place is None else {id(data): place}
        use = Use("linear", _linear, (data, *weights), {}, list(weights), batches, edges, place, u.shape)
        follower.uses.append(use)
    return states


def _linear(x: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
    return F.linear(x, weight, sum(biases[1:], biases[0]) if biases else None)


OTHERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["rnn_relu", "rnn_relu_cell"], recurrent),
    "embedding_bag": embedding_bag,
    "scaled_dot_product_attention": attention,
    "glu": glu,
    "_weight_norm": weight_norm,
}
"""Operations that are no normalizations, by their names."""
