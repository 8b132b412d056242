"""G-SGD: stochastic gradient descent in the values of basis paths.

S19: "Path Space for Recurrent Neural Networks with ReLU Activations", 2019; G-SGD itself is of Meng
et al., "G-SGD: Optimizing ReLU Neural Networks in its Positively Scale-Invariant Space", 2018.
Letters: v_e = A_u w_e B_v value of the basis path through e = (u -> v), a_e its unit, eta lr.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from pathspace.metrics.checks import check_names, checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.path_space import PathSpaceOptimizer, PathSpaceOptions
from pathspace.optim.rules.moments import cast_state
from pathspace.rescaling.optimizer_states import Group, State


class GSGD(PathSpaceOptimizer):
    """SGD in path space: every basis path takes a gradient step, exactly.

    .. code-block:: text

        v_e <- (1 - eta weight_decay) v_e - eta a_e^2 dL/dv_e       for every basis path

    The path values v_e are coordinates of the network's function that node-wise rescaling does not
    change. So two networks that differ by a rescaling still differ by it after every step: bitwise,
    if the factors are powers of two. In each unit class one outgoing weight, O(c), keeps its value.
    ``paths.space.frame`` has the step in terms of weights.

    With ``units="none"``, ``clamp=None`` and the cyclic skeleton this is S19's Algorithm 2, with
    the misprints corrected, if the skeleton's weights start at 1
    (:func:`pathspace.paths.skeleton_ones_` sets them).

    Momentum, Nesterov, decay and clipping act on path values and their gradients. A momentum of
    dL/dw that is mapped afterwards would be inconsistent, because the map changes at every step.

    Some weights step as in the balanced network: those at classes without a skeleton (dead units,
    tied input and output embeddings), and those next to parameters that are frozen or have a
    learning rate of 0. Parameters outside the network take the plain rule.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta.
        momentum: factor of the velocity.
        nesterov: take the step with the gradient + momentum times the velocity.
        weight_decay: decoupled decay of every path value, times lr.
        clip_norm (None): largest norm of dL/dx over all basis paths (of g, outside the network),
            where x = v / a; longer gradients are scaled down to it.
        clamp (2.0): largest factor by which a step may multiply a skeleton weight; its inverse is
            the smallest. At the factor 0 the coordinates have a singularity, and below it the
            weights that leave the class change their signs. None takes every step exactly.
        units (``"balanced"``): with ``"balanced"`` a_e is 1 for a weight of the balanced network at
            the first step, so that rates that are good for SGD are good here. With ``"none"`` a_e =
            1 for every path, the rule of the paper. Its multipliers 1 / (A_u B_v)^2 range over many
            powers of ten unless the skeleton's weights start at 1.
        skeleton_rate (0.03): with balanced units, factor of the learning rate of paths that consist
            of skeleton edges alone. These coordinates must not come near zero.
        skeleton (None): a skeleton, or the rule by which one is chosen at the first step (see
            :func:`pathspace.paths.skeleton`); None: the largest.
        seed (0): seed of the rule ``"random"``.
        maximize (False): ascend instead.

    Raises:
        ValueError: an option is out of its range, no parameter belongs to the network, or the
            skeleton is of another network.
        RuntimeError: at a step, for sparse gradients.
        FloatingPointError: at the first step, if the path mass of a class is not finite.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.GSGD(model.parameters(), network, lr=0.1, momentum=0.9)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.diagnostics()["classes"]
        8
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **options: Unpack[PathSpaceOptions],
    ) -> None:
        defaults = checked(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        if nesterov and not momentum:
            raise ValueError("nesterov needs momentum > 0")
        check_names(self, options, PathSpaceOptions.__annotations__)
        super().__init__(params, network, defaults, **options)

    def _descends(self, group: Group) -> bool:
        return not group["momentum"]

    def _direction(self, g: Tensor, group: Group, state: State) -> Tensor:
        momentum = group["momentum"]
        if not momentum:
            return g
        if "momentum_buffer" not in state:
            velocity = state["momentum_buffer"] = g.clone()
        else:
            cast_state(state, g.dtype, ("momentum_buffer",))
            velocity = state["momentum_buffer"].mul_(momentum).add_(g)
        return g.add(velocity, alpha=momentum) if group["nesterov"] else velocity

    def _make_room(self, g: Tensor, group: Group, state: State) -> None:
        if group["momentum"]:
            state.setdefault("momentum_buffer", torch.zeros_like(g))
