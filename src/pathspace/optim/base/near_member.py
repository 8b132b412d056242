"""Networks that are scaled far from balance, and the member of their rescaling class in which they step.

kappa of an edge u -> v transforms as (s_u / s_v)^2. With scales of 2^40 its elements leave float32 at both ends, and
those that fall below its range are lost in silence. float64 would keep them, but then this member would round
otherwise than one that float32 holds, and the two would part. So the step is taken where nothing is lost: in the member
whose scales are divided by the powers of two next to those of the gauge (see ``paths.node_mass``). Powers of two round
nothing, so the step is that of any member that float32 holds, bit by bit.

Letters: b_c the gauge of unit class c, m_c the power of two next to it, f_e = m_v / m_u for an edge e = (u -> v).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace.network import Network

_FAR = 16
"""Scales from 2^16 on, at which elements of kappa that are 2^-24 of the others come near the end of float32."""


def far_scales(network: Network, gauge: Tensor) -> Tensor | None:
    """The scales m_c of a network that is far from balance.

    Args:
        network: a traced network.
        gauge: b_c, float64 ``[num_classes]``.

    Returns:
        Powers of two, float64 ``[num_classes]``; None if no class is far, or the parameters' types have room.
    """
    types = {p.dtype for p in network.parameters.values()}
    if not gauge.numel() or not types <= {torch.float32, torch.bfloat16}:
        return None
    exponents = gauge.log2().round()
    return exponents.exp2() if float(exponents.abs().amax()) >= _FAR else None


_ROOM = 2.0**100
"""Factors between this and its inverse are multiplied with in the parameters' type."""


def _is_moderate(factors: Tensor) -> bool:
    return not factors.numel() or bool(((factors < _ROOM) & (factors > 1 / _ROOM)).all())


class Nearby:
    """The parameters of a network in the member that is near balance.

    Args:
        network: a traced network.
        scales: m_c.

    Attributes:
        parameters: name -> w_e / f_e, in memory of its own.
        names: the same by the identity of the tensor.
    """

    def __init__(self, network: Network, scales: Tensor) -> None:
        factors = {name: network.edge_factors(name, scales) for name in network.parameters}
        # products with factors that float32 does not hold are taken in float64, where 0 times a factor is 0
        self._factors = {
            name: f.to(p.device, p.dtype if _is_moderate(f) else torch.float64)
            for (name, p), f in zip(network.parameters.items(), factors.values(), strict=True)
        }
        self.parameters = {
            name: (p.detach() / self._factors[name]).to(p.dtype) for name, p in network.parameters.items()
        }
        self._lost = {
            name: (self.parameters[name].abs() < torch.finfo(p.dtype).tiny) & (p.detach() != 0)
            for name, p in network.parameters.items()
            if self._factors[name].dtype != p.dtype
        }
        for name, lost in self._lost.items():  # what is left of them has few digits
            self.parameters[name].masked_fill_(lost, 0)
        self.names = {id(p): name for name, p in self.parameters.items()}

    def stand_in(self, name: str, p: Tensor) -> Tensor:
        """The parameter in that member, with the gradient dL/dw_e f_e."""
        stand_in = self.parameters[name]
        assert p.grad is not None
        stand_in.grad = (p.grad * self._factors[name]).to(p.grad.dtype)
        return stand_in

    def bring_back(self, name: str, p: Tensor) -> None:
        """Let the parameter be what its stand-in became."""
        moved = self.parameters[name] * self._factors[name]
        lost = self._lost.get(name)
        if lost is not None:  # too small there to be kept: what has become of zero is how far they moved
            moved = torch.where(lost, moved + p, moved)
        p.copy_(moved)
