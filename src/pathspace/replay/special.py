"""Functions that contain nodes of the network, or that hold statistics constant in derivatives.

A normalization is made of fixed edges to the normalized unit, then an edge gamma and a bias. Its
statistics are the running ones, or those of the data, held constant. A recurrent layer is a loop.
An embedding bag is a lookup of rows and their reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import with_examples_first
from pathspace.network.errors import UnmatchedForwardError
from pathspace.replay.beside import Beside, Called, Way
from pathspace.replay.observed import Key, UseOf
from pathspace.squared.normalization import Normalization

_EMBEDDING_BAG = (
    "offsets",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)
_CHANNELS = ("input", "running_mean", "running_var", "weight", "bias")
_NORMALIZATIONS = {
    "batch_norm": (*_CHANNELS, "training", "momentum", "eps"),
    "instance_norm": (*_CHANNELS, "use_input_stats", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
_ATTENTION = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)
NORMALIZATIONS = frozenset(_NORMALIZATIONS)
_EPS = 1e-5


def normalization(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run a normalization as fixed edges to the normalized unit, then one edge gamma and a bias."""
    values = dict(zip(_NORMALIZATIONS[call.name], call.args, strict=False)) | call.kwargs
    given = {key: value for key, value in beside.owns(values).items() if value is not None}
    normal, shape = _normalized(beside, call, given, created[0])
    weight = given.get("weight")
    bias = given.get("bias")

    def affine(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
        y = x if gamma is None else x * gamma.reshape(shape)
        return y if beta is None else y + beta.reshape(shape)

    made = beside.run(affine, normal, weight, bias)
    weights = []
    for key in ("weight", "bias"):
        traced = values.get(key)
        if isinstance(traced, Tensor) and beside.is_weight(call.given[id(traced)]):
            weights.append(beside.plain(given[key]))
    if weights:
        shown = pytree.tree_map_only(Tensor, beside.plain, (normal, weight, bias))
        use = UseOf(call.name, affine, shown, {}, weights, [beside.plain(made)])
        beside.seen.uses.append(use)
    beside.bind(result, created, made)


def _normalized(
    beside: Beside, call: Called, given: dict[str, Any], created: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input of a normalization, and the shape to which gain and bias broadcast."""
    x = given["input"]
    channels = (1, -1) + (1,) * (x.dim() - 2)
    layer = _layer_of(beside, call, given, created)
    if layer is not None:
        by_root = call.name == "rms_norm"
        eps = given.get("eps", None if by_root else _EPS)
        return _held(beside, layer, x, eps, centred=not by_root), layer.place
    mean = given.get("running_mean")
    var = given.get("running_var")
    if call.name in _OF_CHANNELS and mean is not None and var is not None:
        eps = given.get("eps", _EPS)
        return beside.run(F.batch_norm, x, mean, var, None, None, False, 0.0, eps), channels
    bare = {key: value for key, value in given.items() if key not in ("weight", "bias")}
    shape = tuple(given.get("normalized_shape", ())) or channels
    return beside.run(call.func, **bare), shape


_OF_CHANNELS = ("batch_norm", "instance_norm")
"""Normalizations that may have running statistics."""


def _layer_of(
    beside: Beside, call: Called, given: dict[str, Any], created: Tensor
) -> Normalization | None:
    """Return the layer that divides by a statistic of the batch; None if running statistics are used."""
    layer = beside.network.tape.normalizations.get(beside.slot(created))
    if layer is not None or call.name != "batch_norm" or not given.get("training"):
        return layer
    # of inputs, or on no path
    x = given["input"]
    over = tuple(d for d in range(x.dim()) if d != 1)
    return Normalization(tuple(x.shape), over, (1, -1) + (1,) * (x.dim() - 2))


def _held(
    beside: Beside, layer: Normalization, x: Tensor, eps: float | None, *, centred: bool
) -> Tensor:
    """Compute the normalized values as a fixed affine map of x: its statistics are constants."""
    shape = layer.shape if 0 not in layer.over else tuple(x.shape)
    batched = beside.network.call.batch_dim is not None
    args = (x, shape, layer.over, centred, batched)
    with beside.capture.running():
        mean, square = beside.capture.whole("statistics", statistics, args, {}, "")

    def normalized(x: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        added = torch.finfo(x.dtype).eps if eps is None else eps
        inverse = (square + added).rsqrt()
        return ((x.reshape(shape) - mean) * inverse).reshape(x.shape)

    return beside.run(normalized, x, mean, square)


def statistics(
    x: Tensor, shape: tuple[int, ...], over: Sequence[int], centred: bool, batched: bool
) -> tuple[Tensor, Tensor]:
    """Compute mean and mean square of x, held constant, over all examples if dimension 0 is reduced."""
    x = x.detach()
    if 0 not in over or not batched:
        return _mean_and_square(x.reshape(shape), tuple(over), centred=centred)
    values, many = with_examples_first(x)
    if not many:
        return _mean_and_square(values, tuple(over), centred=centred)
    dims = (0, *(d + 1 for d in over))
    mean, square = _mean_and_square(values, dims, centred=centred)
    return mean[0], square[0]


def _mean_and_square(
    values: Tensor, dims: tuple[int, ...], *, centred: bool
) -> tuple[Tensor, Tensor]:
    """Compute the mean, or zeros if the values are not centred, and the mean square of the differences from it."""
    mean = values.mean(dims, keepdim=True) if centred else torch.zeros_like(values)
    square = (values - mean).square().mean(dims, keepdim=True)
    return mean, square


def weight_norm(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run weight normalization: directions, whose lengths are held constant, times gains."""

    def weight(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        return v * (g / torch.norm_except_dim(v.detach(), 2, dim))

    beside.bind(result, created, beside.run(weight, *beside.owns(call.args), **call.kwargs))


def embedding_bag(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run an embedding bag: the rows that bags name, which are nodes, then their sum, mean or maximum."""
    input, weight, *args = call.args
    arguments = dict(zip(_EMBEDDING_BAG, args, strict=False)) | call.kwargs
    mode = arguments.get("mode", "mean")
    padding = arguments.get("padding_idx")
    words, table = beside.owns((input, weight))
    looked_up = beside.run(F.embedding, words, table, padding)

    def joined(rows: Tensor) -> Tensor:
        if mode == "max":
            return rows.amax(1)
        return rows.sum(1) if mode == "sum" else rows.mean(1)

    def without_padding(rows: Tensor, words: Tensor) -> Tensor:
        return rows if padding is None else rows * (words != padding).unsqueeze(-1)

    rows = beside.run(without_padding, looked_up, words)
    if beside.is_weight(call.given[id(weight)]):
        shown_table = beside.plain(table)
        shown = (beside.plain(words), shown_table)
        results = [beside.plain(looked_up)]
        use = UseOf("embedding", F.embedding, shown, {}, [shown_table], results)
        beside.seen.uses.append(use)
    slot = beside.recorder.inside.get(beside.slot(created[0]))
    if slot is not None:
        beside.note_node(slot, rows)
    beside.bind(result, created, beside.run(joined, rows))


def attention(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run attention: its scores are outputs of the network, and their softmax weighs the values by fixed edges."""
    given = beside.owns(dict(zip(_ATTENTION, call.args, strict=False)) | call.kwargs)
    scale = given.get("scale")
    grouped = given.get("enable_gqa", False)
    causal = given.get("is_causal", False)
    query = given["query"]

    def products(query: Tensor, key: Tensor) -> Tensor:
        if grouped:
            key = _for_each_query(key, query.shape[-3])
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return query @ key.transpose(-2, -1) * factor

    def weighted(scores: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if grouped:
            value = _for_each_query(value, query.shape[-3])
        return _masked(scores.detach(), mask, causal=causal).softmax(-1) @ value

    scores = beside.run(products, query, given["key"])
    beside.note_node(beside.recorder.inside[beside.slot(created[0])], scores)
    made = beside.run(weighted, scores, given["value"], given.get("attn_mask"))
    beside.bind(result, created, made)


def _for_each_query(heads: Tensor, queries: int) -> Tensor:
    """Repeat the heads of keys or values that several heads of queries share."""
    return heads.repeat_interleave(queries // heads.shape[-3], -3)


def _masked(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Return scores with minus infinity where a mask hides one."""
    if causal:
        hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask.detach()


def glu(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run a GLU: the half that enters the sigmoid is an output of the network; the other half has fixed edges."""
    x, *dim = beside.owns(call.args)
    a, b = beside.run(torch.chunk, x, 2, *(dim or [call.kwargs.get("dim", -1)]))
    beside.note_node(beside.recorder.inside[beside.slot(created[0])], b)
    beside.bind(result, created, beside.run(lambda a, b: a * b.detach().sigmoid(), a, b))


def recurrent(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run a recurrent layer step by step, so that its nodes can be read."""
    slot = beside.slot(created[0])
    if isinstance(call.args[2], Tensor):
        raise UnmatchedForwardError(_PACKED)
    if beside.is_weight(call.given.get(id(call.args[1]))):
        raise UnmatchedForwardError(
            "an initial state that is a parameter cannot be followed on data; write the loop by hand"
        )
    x, hx, params, has_biases, layers, _dropout, _train, bidirectional, batch_first = beside.owns(
        call.args
    )
    beside.seen.starts.append(beside.plain(hx))
    turned = x.dim() == 3 and batch_first
    x = beside.run(lambda x: (x.transpose(0, 1) if turned else x).clone(), x)
    per_cell = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    last: list[Tensor] = []

    def run_cell(number: int, x: Tensor) -> Tensor:
        """Run one cell over the sequence; return its states, and remember its last one."""
        cell = list(params[number * per_cell : (number + 1) * per_cell])
        start = beside.run(torch.select, hx, 0, number)
        direction = number % directions
        states = _steps(beside, x, start, cell, direction, lambda t: (slot, number, t))
        last.append(states[0] if direction else states[-1])
        return beside.run(torch.stack, states)

    for layer in range(layers):
        numbers = range(layer * directions, (layer + 1) * directions)
        outputs = [run_cell(number, x) for number in numbers]
        x = beside.run(torch.cat, outputs, -1)
    out = beside.run(torch.transpose, x, 0, 1) if turned else x
    beside.bind(result, created, (out, beside.run(torch.stack, last)))


def recurrent_cell(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Run one step of a recurrent cell."""
    slot = beside.slot(created[0])
    x, h, *cell = beside.owns(call.args)
    sequence = beside.run(torch.unsqueeze, x, 0)
    parameters = [p for p in cell if p is not None]
    (state,) = _steps(beside, sequence, h, parameters, 0, lambda _: (slot,))
    beside.bind(result, created, state)


_PACKED = (
    "sequences are packed by their lengths, so a batch has other steps than the traced ones; for quantities on data "
    "pad them, and multiply by a mask or pick the last step, h[torch.arange(len(h)), lengths - 1]"
)


def _steps(
    beside: Beside,
    x: Tensor,
    h: Tensor,
    cell: list[Tensor],
    direction: int,
    key: Callable[[int], Key],
) -> list[Tensor]:
    """Compute states h_t = [W_in x_t + W_rec h_{t-1} + b]_+ of one cell, ``x [T, ...]``."""
    w_in, w_rec, *biases = cell

    def entering(x: Tensor) -> Sequence[Tensor]:
        bias = biases[0] + biases[1] if biases else None
        return F.linear(x, w_in, bias).unbind(0)

    def step(u: Tensor, h: Tensor) -> Tensor:
        return u + F.linear(h, w_rec)

    u = beside.run(entering, x)
    states: list[Tensor] = [h] * len(u)
    before = list(states)
    results = list(states)
    order = reversed(range(len(u))) if direction else range(len(u))
    for t in order:
        before[t] = h
        results[t] = beside.run(step, u[t], h)
        beside.note_key(key(t), results[t])
        h = beside.run(F.relu, results[t])
        states[t] = h
    shown = [beside.plain(t) for t in results]
    previous = beside.run(torch.stack, before)
    _note_use(beside, [x, w_in, *biases], shown)
    _note_use(beside, [previous, w_rec], shown)
    return states


def _note_use(beside: Beside, operands: Sequence[Tensor], results: list[Tensor]) -> None:
    """Remember the use of a matrix, and of biases, at all steps of a cell."""
    args = tuple([beside.plain(t) for t in operands])
    weights = list(args[1:])
    beside.seen.uses.append(UseOf("linear", linear, args, {}, weights, results, stacked=True))


def linear(x: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
    """Compute a linear map with any number of biases."""
    return F.linear(x, weight, sum(biases[1:], biases[0]) if biases else None)


def packed(beside: Beside, call: Called, result: Any, created: list[Tensor]) -> None:
    """Refuse packed sequences.

    Raises:
        UnmatchedForwardError: always.
    """
    del beside, call, result, created
    raise UnmatchedForwardError(_PACKED)


WAYS: dict[str, Way] = {
    **dict.fromkeys(_NORMALIZATIONS, Way(normalization, always=True)),
    "rnn_relu": Way(recurrent, always=True),
    "rnn_relu_cell": Way(recurrent_cell, always=True),
    "_pack_padded_sequence": Way(packed, always=True),
    "embedding_bag": Way(embedding_bag, always=True),
    "scaled_dot_product_attention": Way(attention, always=False),
    "glu": Way(glu, always=False),
    "_weight_norm": Way(weight_norm, always=False),
}
