"""kappa, the metric of Path-SGD: half the second derivative of the squared path norm (P16 Section 3).

    kappa_i  = 1/2 d^2 gamma_net^2 / dp_i^2 = kappa1_i + kappa2_i
    kappa1_i = dG / d(p_i^2)                  G(p^2) = gamma_net^2, the squared network
    kappa2_i = 2 p_i^2 d^2 G / d(p_i^2)^2

kappa1 counts every edge of a parameter by itself; kappa2 the ordered pairs of distinct edges of one
parameter on one path, twice (P16 Eq. (10) lacks that factor 2, and Eq. (11), read as a sum over
pairs with e before e', lacks a factor 4). kappa2 is zero for parameters that occur at most once on
every path.

Letters: p parameter, q = p^2, G squared network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values, in_full_precision
from pathspace.paths.kernel.pairs import pairs_term
from pathspace.paths.kernel.safe_type import (
    PendingReport,
    RangeReport,
    Values,
    in_safe_type,
    own_memory,
)
from pathspace.squared.precision import squared_leaves
from pathspace.squared.sharding import from_local, local_shard, to_local
from pathspace.squared.squares import Outer, dense


def kappa(
    network: Network, second_term: bool = False, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the metric of Path-SGD for every parameter of a network.

    Args:
        network: a traced network.
        second_term: add kappa2, which is large for recurrent weights near the identity (4 (T-2)/3
            times kappa1 on the diagonal for W_rec = I) and costs more.
        parameters: values to use instead of the model's own, by name.

    Returns:
        Parameter name -> tensor of the parameter's shape, non-negative. In the parameter's own type
        (float32 for half-precision parameters; float64 for all, if a model mixes it with others).
        Where that overflows, the computation is repeated in float64, and if a value exceeds what
        the type can hold, all of kappa is returned in float64.

    Raises:
        FloatingPointError: kappa is not finite even in float64.
        KeyError: ``parameters`` lacks a parameter of the network.
        ValueError: one of ``parameters`` has another shape than the network's.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> ps.paths.kappa(ps.trace(model, torch.zeros(1, 2)))
        {'weight': tensor([[1., 1.]]), 'bias': tensor([1.])}
    """
    source = current_values(network, parameters, parts=not second_term)
    names = list(network.parameters)
    values = kappa_report(network, names, second_term=second_term, parameters=parameters).values
    parts = own_memory({name: dense(value) for name, value in values.items()})
    return {name: from_local(value, source[name]) for name, value in parts.items()}


def kappa_in_float64(network: Network) -> dict[str, Tensor]:
    """Return :func:`kappa` of the weights in float64: paths of small weights underflow in other types."""
    wide = {name: p.detach().double() for name, p in network.parameters.items()}
    return kappa(network, parameters=wide)


@in_full_precision
def kappa_report(
    network: Network,
    names: Sequence[str],
    *,
    second_term: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
    to_frame: Callable[[Values], Values] | None = None,
    recorded: Callable[[Callable[[], PendingReport]], PendingReport] | None = None,
) -> RangeReport:
    """Compute :func:`kappa` of some parameters with its bounds, of sharded ones the local shard.

    The tensors may share memory. For ``to_frame`` and ``recorded`` see
    :func:`pathspace.paths.kernel.safe_type.in_safe_type`.
    """

    def compute(source: Mapping[str, Tensor]) -> Values:
        first = squared_gradients(network, source, names)
        second = pairs_term(network, source) if second_term else {}
        return {n: dense(value) + second[n] if n in second else value for n, value in first.items()}

    return in_safe_type(network, parameters, compute, to_frame, recorded)


def squared_gradients(
    network: Network, source: Mapping[str, Tensor], names: Sequence[str]
) -> Values:
    """kappa1_i = dG/d(p_i^2) of some parameters, by one backward pass through the squared network.

    Args:
        network: a traced network.
        source: values of all of its parameters, by name.
        names: the parameters to return.

    Returns:
        Parameter name -> tensor of the parameter's shape, or the product delta_v h_u where a matrix
        is used once; inf where the type overflows. Tensors may share memory. The part in this
        process of a parameter that is split.
    """
    if not names:
        return {}
    with torch.inference_mode(False), torch.enable_grad():
        q = squared_leaves(source, network.parameters)
        maps = {name: ends for name, ends in network.tape.maps.items() if name in names}
        watched = [slot for ends in maps.values() for slot in ends]
        total, values = network.tape.run(q, network.live, watched)
        entering = dict(zip(maps, values[::2], strict=True))
        leaving = dict(zip(maps, values[1::2], strict=True))
        # matrices that one vector enters: kappa1 is a product of two vectors
        single = {n for n, h in entering.items() if h.numel() == q[n].shape[1]}
        ends = [leaving[name] if name in single else q[name] for name in names]
        gradients = torch.autograd.grad(total, ends, materialize_grads=True)
    result: Values = {}
    for name, g in zip(names, gradients, strict=True):
        if name in single:
            delta = local_shard(g.reshape(-1), q[name])
            result[name] = Outer(delta, entering[name].detach().reshape(-1))
        else:
            result[name] = to_local(g)
    return result
