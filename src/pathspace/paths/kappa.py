"""kappa, the metric of Path-SGD: half the second derivative of the squared path norm (P16 Section 3).

    kappa_i  = 1/2 d^2 gamma_net^2 / dp_i^2 = kappa1_i + kappa2_i
    kappa1_i = dG / d(p_i^2)                  G(p^2) = gamma_net^2, the squared network
    kappa2_i = 2 p_i^2 d^2 G / d(p_i^2)^2

kappa1 counts every edge of a parameter by itself; kappa2 the ordered pairs of distinct edges of one parameter on
one path, twice (P16 Eq. (10) lacks that factor 2, and Eq. (11), read as a sum over pairs with e before e', lacks a
factor 4). kappa2 is zero for parameters that occur at most once on every path.

Letters: p parameter, q = p^2, G squared network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.norm import widened
from pathspace.paths.pairs import pairs_term
from pathspace.paths.safe_type import in_safe_type


def kappa(
    network: Network, second_term: bool = False, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The metric of Path-SGD for every parameter of a network.

    Args:
        network: a traced network.
        second_term: add kappa2, which is large for recurrent weights near the identity (4 (T-2)/3 times kappa1 on
            the diagonal for W_rec = I) and costs more.
        parameters: values to use instead of the model's own, by name.

    Returns:
        Parameter name -> tensor of the parameter's shape, non-negative. In the parameter's own type (float32 for
        half-precision parameters). Where that overflows, the computation is repeated in float64, and if a value
        exceeds what the type can hold, all of kappa is returned in float64.

    Raises:
        FloatingPointError: kappa is not finite even in float64.
        KeyError: ``parameters`` lacks a parameter of the network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> ps.paths.kappa(ps.trace(model, torch.zeros(1, 2)))
        {'weight': tensor([[1., 1.]]), 'bias': tensor([1.])}
    """
    if parameters is None:
        network.check_current()
    return kappa_of(network, list(network.parameters), second_term=second_term, parameters=parameters)


def kappa_of(
    network: Network,
    names: Sequence[str],
    *,
    second_term: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
    squares: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """:func:`kappa` of some parameters of a network; for ``squares`` see :func:`first_term`."""

    def compute(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first = first_term(network, given, names, squares)
        if not second_term:
            return first
        second = pairs_term(network, given)
        return {name: first[name] + second[name] for name in first}

    return in_safe_type(network, parameters, compute)


def first_term(
    network: Network,
    parameters: Mapping[str, Tensor] | None = None,
    names: Sequence[str] | None = None,
    squares: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """kappa1_i = dG/d(p_i^2), by one backward pass through the squared network.

    Args:
        network: a traced network.
        parameters: values to use instead of the model's own, by name.
        names: the parameters to return; all of the network's if None.
        squares: memory to square the parameters in, kept by the caller from one call to the next. Freeing it after
            every training step makes the allocator hand it back to the system and fetch it anew, which can cost more
            than the arithmetic.

    Returns:
        Parameter name -> tensor of the parameter's shape; inf where the type overflows.
    """
    source = network.parameters if parameters is None else parameters
    names = list(network.parameters) if names is None else names
    if network.tape.has_pullbacks:
        with torch.no_grad():
            q = {name: _square(name, source[name], squares) for name in network.parameters}
            return dict(zip(names, _own_memory(network.tape.gradient(q, network.live, names)), strict=True))
    with torch.inference_mode(False), torch.enable_grad():
        q = {name: _square(name, source[name], squares) for name in network.parameters}
        wanted = [q[name].requires_grad_() for name in names]
        gradients = torch.autograd.grad(network.squared(q), wanted, materialize_grads=True)
    return dict(zip(names, _own_memory(gradients), strict=True))


def _square(name: str, parameter: Tensor, squares: dict[str, Tensor] | None) -> Tensor:
    p = widened(parameter if not torch.is_grad_enabled() else parameter.detach())
    if squares is None:
        return p.square()
    kept = squares.get(name)
    if kept is None or kept.shape != p.shape or kept.dtype != p.dtype or kept.device != p.device:
        kept = squares[name] = torch.empty_like(p)
    square = torch.square(p, out=kept)
    return square.detach() if torch.is_grad_enabled() else square  # the old tensor may be in an old graph


def _own_memory(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Tensors that may be written to: autograd returns one tensor for two summands, and expanded ones for sums."""
    seen: set[int] = set()
    result = []
    for gradient in gradients:
        own = gradient.contiguous()
        if own.data_ptr() in seen:
            own = own.clone()
        seen.add(own.data_ptr())
        result.append(own)
    return result
