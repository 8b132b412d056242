"""The path norm of a network (P16 Section 2: Neyshabur, Wu, Salakhutdinov, Srebro 2016)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values, in_full_precision
from pathspace.squared.precision import widened


@in_full_precision
def squared_path_norm(network: Network, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """The squared path norm gamma_net^2, the sum over all paths of the product of their squared weights.

    gamma_v^2 = 1 at inputs and at the bias node; gamma_v^2 = sum over edges u -> v of gamma_u^2 w_uv^2;
    gamma_net^2 is the sum over the outputs for one example. It does not change under node-wise rescaling.
    P16 lists the initial state h_0 among the inputs; it counts as 0 here, because as ones it would destroy the
    invariance.

    A normalization by statistics of what enters divides by the mean m of the path mass over the set that it normalizes
    (docs/theory/normalization.md). m enters the value, but is held constant in the gradient, which is 2 p kappa1: so
    for such a network kappa is not the derivative of the norm.

    Args:
        network: a traced network.
        parameters: values to use instead of the model's own, by name.

    Returns:
        A 0-dim tensor, differentiable in the parameters any number of times, so it serves as a regularizer. In
        float32 it overflows to inf beyond 3e38 (long unstable recurrences); give parameters in float64 then.

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


def all_widened(source: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Some parameters, :func:`widened` and of one type: float64 if a model mixes it with others."""
    wide = {name: widened(source[name]) for name in names}
    if len({p.dtype for p in wide.values()}) > 1:
        return {name: p.double() for name, p in wide.items()}
    return wide
