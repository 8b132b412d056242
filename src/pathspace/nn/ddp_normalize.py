"""DDP-Normalization as a reparametrization of a whole network (D16 Section 5)."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from pathspace.metrics.checks import check_not_negative, check_numbers
from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_network
from pathspace.network.network import current_values
from pathspace.network.trace.shadow import copy_of
from pathspace.network.trace.tracer import unwrapped
from pathspace.nn.ddp_function import Rule
from pathspace.nn.ddp_layers import NORMALIZED, _DDPNormalized, normalized_layers
from pathspace.paths.data.node_measure import check_options
from pathspace.squared.tape import Instruction, Tape

_PLAIN = {normalized: plain for plain, normalized in NORMALIZED.items()}
_Model = TypeVar("_Model", bound=nn.Module)


@tables_on_the_cpu()
@torch.inference_mode(False)
def ddp_normalize(
    model: _Model,
    network: Network,
    *,
    alpha: float = 0.5,
    statistic: str = "second_moment",
    centred: bool | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> _Model:
    """Return a copy of a model whose internal nodes are normalized by the data-dependent path measure.

    Every internal node v computes with w_v = w~_v / gamma~_v, where

        gamma~_v^2 = w~_v^T R_v w~_v + eps,    R_v = alpha S_v + (1 - alpha) D_v,

    S_v is the second moment M_v or the covariance C_v of what enters v, over the examples of the
    batch and, in a convolution, its positions, and D_v = diag(gamma_u^2), which is the identity
    where inputs and normalized units enter. A bias is the weight of an edge from a constant one.
    alpha = 0 is path-normalization; alpha = 1 with the covariance, centred, is BatchNorm without
    its affine parameters; what lies between is DDP-Normalization.

    The parameters keep their names and become w~; the loss no longer depends on their length. A
    layer is normalized if its units can be rescaled, so outputs are left alone. In training the
    statistics are the batch's and gradients flow through them; in evaluation they are running
    averages. The function changes (by the factors 1 / gamma~), but later :func:`fold` returns a
    plain network with the function of evaluation mode.

    Args:
        model: the model that was traced; it is not changed.
        network: its trace.
        alpha: the share of the data in the measure, from 0 to 1.
        statistic: ``"second_moment"`` or ``"covariance"``.
        centred: subtract from each node's value its mean over the batch, leaving the bias in place.
            None: if the statistic is the covariance.
        momentum: weight of the newest batch in the running averages; None for the mean of all
            batches.
        eps: added to gamma~^2.

    Returns:
        The normalized copy: an ordinary module with ordinary parameters and buffers
        (``state_dict``, ``deepcopy``).

    Raises:
        TypeError: a number is none, or the network is no traced one.
        ValueError: an argument is out of range, the network is not a trace of this model, a part of
            the network has no normalized form (recurrent layers, embeddings, BatchNorm, layers used
            twice), or nothing is left to normalize. The message names the part.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(16, 4)
        >>> normalized = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=0.5, statistic="second_moment")
        >>> normalized(x).square().sum().backward()
        >>> plain = ps.nn.fold(normalized)
        >>> torch.allclose(plain(x), normalized.eval()(x), atol=1e-6)
        True

    Source: Neyshabur, Tomioka, Salakhutdinov, Srebro 2016, "Data-Dependent Path Normalization in
    Neural Networks".
    """
    check_numbers(alpha=alpha, momentum=0.0 if momentum is None else momentum)
    check_options(alpha, statistic)
    check_not_negative(eps=eps)
    second = statistic == "second_moment"
    rule = Rule(float(alpha), second, not second if centred is None else centred, eps)
    if momentum is not None and not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be None or between 0 and 1, got {momentum}")
    model = cast("_Model", unwrapped(model))
    expect_network(network)
    if network.model is not model:
        raise ValueError(
            f"the network is not a trace of this {type(model).__name__}: call ps.trace(model, example)"
        )
    current_values(network)
    places = _places(network)
    if not places:
        raise ValueError(
            "nothing to normalize: every layer of the network is an output or has units of a fixed scale"
        )
    measures = {} if rule.alpha == 1 else _path_measures(network, places)
    normalized = copy_of(model)
    for path in places:
        measure = measures.get(path, torch.ones((), dtype=torch.float64))
        if isinstance(measure, str):
            raise ValueError(
                f"the path measure of what enters '{path}' depends on '{measure}', which is not normalized because "
                "its units have a fixed scale (an output, or a sum with an input); use alpha=1, or trace with "
                "outside= the module that holds it"
            )
        layer = normalized.get_submodule(path)
        layer.__class__ = NORMALIZED[type(layer)]
        assert isinstance(layer, _DDPNormalized)
        layer._normalize(rule, measure, momentum)
    return normalized


@torch.inference_mode(False)
def fold(model: _Model) -> _Model:
    """Return the plain network with the function that a normalized one has in evaluation mode.

    w = w~ / gamma~ and b = (b~ - mean) / gamma~, with the running statistics. The copy has plain
    layers; a centred layer without a bias gets one.

    Args:
        model: a model made by :func:`ddp_normalize`; it is not changed.

    Returns:
        A copy without normalization, in the same training mode.

    Raises:
        ValueError: the model has no normalized layer.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> ps.nn.fold(ps.nn.ddp_normalize(model, network, alpha=0.0))
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(in_features=8, out_features=2, bias=True)
        )
    """
    normalized_layers(model, "there is nothing to fold")
    plain = copy_of(model)
    for layer in normalized_layers(plain, ""):
        with torch.no_grad():
            weight, bias = layer.folded()
        trained = layer.weight.requires_grad
        biased = trained if layer.bias is None else layer.bias.requires_grad
        for name in ("ddp_measure", "running_mean", "running_statistic", "num_batches_tracked"):
            delattr(layer, name)
        del layer.ddp_rule, layer.momentum
        layer.__class__ = _PLAIN[type(layer)]  # type: ignore[assignment]
        layer.weight = nn.Parameter(weight, requires_grad=trained)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=biased)
    return plain


def _places(network: Network) -> dict[str, Instruction]:
    """Return the instructions of the layers with internal nodes in the squared network, by path."""
    users, leaf_of = _users(network.tape)
    places = {}
    for name, edges in network.edges.items():
        if not _is_internal(name, edges.target):
            continue
        path, _, short = name.rpartition(".")
        layer = network.model.get_submodule(path)
        where = f"'{path}' ({type(layer).__name__})" if path else type(layer).__name__
        if type(layer) not in NORMALIZED or short not in ("weight", "bias"):
            outside = f", or trace with outside=['{path}']" if path else ""
            raise ValueError(
                f"cannot normalize '{name}' of {where}: only nn.Linear, nn.Conv1d, nn.Conv2d and nn.Conv3d have a "
                f"normalized form. Replace the layer{outside}"
            )
        user = users[name][0]
        is_shared = len(users[name]) > 1
        if is_shared or len(user.inputs) < 2 or user.inputs[1] not in leaf_of:
            raise ValueError(
                f"{where} is used more than once (or its weight is changed or shared): {_TWICE}"
            )
        _expect_own_forward(name, path, user)
        if short == "weight":
            places[path] = user
    return places


def _users(tape: Tape) -> tuple[dict[str, list[Instruction]], dict[int, str]]:
    """Return the instructions that use each parameter, by name, and the name of the parameter in each slot."""
    leaf_of = {leaf.slot: leaf.name for leaf in tape.leaves if leaf.kind == "parameter"}
    users: dict[str, list[Instruction]] = {}
    for instruction in tape.instructions:
        for slot in instruction.inputs:
            if slot in leaf_of:
                users.setdefault(leaf_of[slot], []).append(instruction)
    return users, leaf_of


def _expect_own_forward(name: str, path: str, user: Instruction) -> None:
    """Raise ValueError unless a parameter is used by its own layer's forward."""
    kind, _, place = user.name.partition(" in ")
    if kind not in ("linear", "conv1d", "conv2d", "conv3d") or place != f"'{path}'":
        raise ValueError(
            f"'{name}' is used in '{user.name}', not by its own layer's forward: call the layer"
        )


_TWICE = "its nodes would have different statistics at every use; use a layer of its own for each"


def _is_internal(name: str, target: Tensor) -> bool:
    """Return whether the units that a parameter enters can be rescaled; outputs cannot."""
    free = target != 0
    if bool(free.any()) and not bool(free.all()):
        raise ValueError(
            f"some units that '{name}' enters are outputs (or have a fixed scale) and some are internal; "
            "make them with two layers"
        )
    return bool(free.any())


def _path_measures(network: Network, places: dict[str, Instruction]) -> dict[str, Tensor | str]:
    """Compute D, the path measure of the values that enter each normalized layer.

    A normalized node has gamma_v^2 = 1, whatever its weights; inputs and the bias node have 1 too.
    Operations between layers (pooling, sums of branches, dropout, reshaping) are those of the
    squared network: a maximum sums its window, an average of n divides by n^2, a sum adds. For a
    convolution the measure of a tap is the mean over the positions of the output, as its other
    statistics are, so taps that fall into zero padding weigh less.

    Args:
        network: a traced network.
        places: the instructions of the layers that are to be normalized, by path.

    Returns:
        Path -> D, float64, broadcastable to the weight, without the dimensions in which it is
        constant; or, where D would depend on parameters, the name of one.
    """
    path_of = {instruction.outputs: path for path, instruction in places.items()}
    q = {
        n: torch.ones(p.shape, dtype=torch.float64, device="cpu")
        for n, p in network.parameters.items()
    }
    measures: dict[str, Tensor | str] = {}

    def normalize(slots: tuple[int, ...], h: Tensor) -> Tensor:
        """Note D of a layer with the result h; return the result after normalization."""
        path = path_of.get(slots)
        if path is None:
            return h
        weight, bias = (f"{path}.{name}".lstrip(".") for name in ("weight", "bias"))
        positions = h.numel() // len(q[weight])
        # h is linear in its weights, and normalized layers before it have constant results: its
        # derivative is what enters
        found = torch.autograd.grad(h.sum() / positions, list(q.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(q, found, strict=True) if g is not None}
        others = [name for name in gradients if name not in (weight, bias)]
        measures[path] = others[0] if others else _compact(gradients[weight])
        return torch.ones_like(h)

    with torch.enable_grad():
        squared = {name: t.requires_grad_() for name, t in q.items()}
        network.tape.run(squared, network.live, mix=normalize)
    return measures


def _compact(measure: Tensor) -> Tensor:
    """Return a measure with size 1 in each dimension along which it is constant."""
    for d in range(measure.dim()):
        first = measure.narrow(d, 0, 1)
        if bool(torch.isclose(measure, first, rtol=1e-12, atol=0).all()):
            measure = first
    return measure.contiguous()
