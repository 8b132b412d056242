"""The path norm of a network (P16 Section 2: Neyshabur, Wu, Salakhutdinov, Srebro 2016)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values, in_full_precision
from pathspace.squared.precision import all_widened
from pathspace.squared.tape import Sums, raised


@in_full_precision
def squared_path_norm(network: Network, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the squared path norm gamma_net^2, the sum over all paths of the product of their squared weights.

    gamma_v^2 = 1 at inputs and at the bias node; gamma_v^2 = sum over edges u -> v of gamma_u^2
    w_uv^2; gamma_net^2 is the sum over the outputs for one example. It does not change under
    node-wise rescaling. P16 lists the initial state h_0 among the inputs; it counts as 0 here,
    because as ones it would destroy the invariance.

    A normalization by statistics of what enters divides by the mean m of the path mass over the set
    that it normalizes (docs/theory/normalization.md). m enters the value, but is held constant in
    the gradient, which is 2 p kappa1: so for such a network kappa is not the derivative of the
    norm.

    Args:
        network: a traced network.
        parameters: values to use instead of the model's own, by name.

    Returns:
        A 0-dim tensor, differentiable in the parameters any number of times, so it serves as a
        regularizer. In float32 it overflows to inf beyond 3e38 (long unstable recurrences); give
        parameters in float64 then.

    Raises:
        KeyError: ``parameters`` lacks a parameter of the network.
        ValueError: one of ``parameters`` has another shape than the network's.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 3.0)
        >>> ps.paths.squared_path_norm(ps.trace(model, torch.zeros(1, 2))).item()
        18.0
    """
    source = current_values(network, parameters, parts=True)
    squared = {name: p.square() for name, p in all_widened(source, network.parameters).items()}
    return network.squared(squared)


def path_norm(
    network: Network, p: float = 2.0, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the L^p norm of the path vector, which has the product of the weights along a path for every path.

    |Phi|_p = (sum over all paths of |prod_e w_e|^p)^(1/p), by one pass through the squared network with |w|^p in the
    place of squares. Fixed edges of weight c (an average over n values has 1/n) count as |c|^p, maxima, shared weights
    and recurrences as in :func:`squared_path_norm`, whose root this is for p = 2. For p = 1 it bounds the Lipschitz
    constant of a plain ReLU network, with inputs measured by their largest entry and outputs by the sum of theirs.
    Rescaling does not change it.

    A normalization by statistics of what enters divides each path by the root of m, the mean of
    squared path mass (docs/theory/normalization.md), whatever p is. m is held constant in
    derivatives.

    Args:
        network: a traced network.
        p: a finite number, at least 1.
        parameters: values to use instead of the model's own, by name.

    Returns:
        A 0-dim float64 tensor, differentiable in the parameters; where the norm is 0, its gradient
        is taken as 0. Powers of small or large weights leave the range of float64 for p in the
        dozens.

    Raises:
        ValueError: p is less than 1 or not finite; one of ``parameters`` has another shape than the
            network's.
        KeyError: ``parameters`` lacks a parameter of the network.
        RuntimeError: a parameter was split over processes.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, -3.0)
        >>> ps.paths.path_norm(ps.trace(model, torch.zeros(1, 2)), p=1).item()
        6.0
    """
    if not (isinstance(p, (int, float)) and 1 <= p < math.inf):
        raise ValueError(f"p must be a finite number of at least 1, got {p!r}")
    source = current_values(network, parameters)
    weights = {name: source[name].double() for name in network.parameters}
    return _norm(network, float(p), weights)


@in_full_precision
def _norm(network: Network, p: float, weights: Mapping[str, Tensor]) -> Tensor:
    """Return |Phi|_p of some weights."""
    inverses = {
        slot: value.pow(p / 2) for slot, value in inverse_statistics(network, weights).items()
    }
    powers = {name: raised(value, p) for name, value in weights.items()}
    total = network.tape.run(powers, network.live, sums=Sums(power=p, held=inverses))[0]
    # the root has no slope at 0
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1.0).pow(1 / p), 0.0)


@in_full_precision
@torch.no_grad()
def inverse_statistics(network: Network, weights: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return 1/m of every statistic that a network divides by, by slot of the squared network.

    Args:
        network: a traced network.
        weights: of all of its parameters, by name.
    """
    if not network.tape.divides:
        return {}
    noted: dict[int, Tensor] = {}
    squares = {name: value.detach().square() for name, value in weights.items()}
    network.tape.run(squares, network.live, sums=Sums(noted=noted))
    return noted
