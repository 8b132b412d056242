"""kappa as the metric of an optimizer: normalized, damped and safe to divide by.

Raw kappa has no natural unit: its mean for a recurrent matrix runs from 1e-6 to 7 over common starts, so a learning
rate for g / kappa means something else for every network. Each parameter's kappa is therefore divided by one number
c that node-wise rescaling does not change: the mean of kappa over the parameter's elements *in the balanced member*
of the rescaling class. With it a learning rate has about the size it has for SGD on the balanced network.

Letters: p parameter, e its elements (edges u -> v), b_c the gauge of unit class c (see ``paths.node_mass``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import scale_of
from pathspace.paths.node_mass import node_mass


@dataclass(frozen=True)
class Normalizer:
    """What makes kappa of one parameter comparable between networks, all unchanged by rescaling or covariant.

    Attributes:
        mean: c, the mean of kappa_e (b_v / b_u)^2: a number that rescaling does not change.
        target: 1 / b_v^2, broadcastable to the parameter, in its type; transforms as 1 / s_v^2.
        source: b_u^2, likewise; transforms as s_u^2. Their product transforms like kappa.
    """

    mean: float
    target: Tensor
    source: Tensor


def normalizers(network: Network, kappa: dict[str, Tensor]) -> dict[str, Normalizer]:
    """Normalizers of every parameter in ``kappa``.

    Args:
        network: a traced network.
        kappa: parameter name -> kappa, at the network's present parameters.

    Returns:
        Parameter name -> normalizer. The mean is 1 where kappa is zero throughout.

    Raises:
        FloatingPointError: the path mass of a unit class is not finite.
    """
    gauge = node_mass(network).gauge()
    result = {}
    for name, value in kappa.items():
        labels = network.edges[name]
        target, source = (scale_of(gauge, end) for end in (labels.target, labels.source))
        in_balance = value.double() * (target / source).square()
        mean = float(in_balance.mean())
        dtype = network.parameters[name].dtype
        result[name] = Normalizer(
            mean=mean if mean > 0 else 1.0,
            target=target.square().reciprocal().to(dtype),
            source=source.square().to(dtype),
        )
    return result


def safe_divisor_(metric: Tensor) -> Tensor:
    """Let zeros of a metric divide to zero: kappa_i = 0 implies dL/dp_i = 0, and 0/0 is defined as 0."""
    if not float(metric.amin()) > 0:
        metric.masked_fill_(metric == 0, float("inf"))
    return metric


def parameter_names(network: Network, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Names in the network of those parameters that belong to it.

    Raises:
        ValueError: none of them does.
    """
    by_id = {id(p): name for name, p in network.parameters.items()}
    parameters = list(parameters)
    names = {p: by_id[id(p)] for p in parameters if id(p) in by_id}
    if parameters and not names:
        raise ValueError(
            "none of these parameters belongs to the network: trace the model that they are the parameters of "
            "(a copied or converted model must be traced again)"
        )
    return names
