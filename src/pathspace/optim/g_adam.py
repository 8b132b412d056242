"""Adam in the values of basis paths.

Letters: v_e = A_u w_e B_v value of the basis path through e = (u -> v) (S19), a_e its unit, x_e =
v_e / a_e, eta lr, m and s the averages of dL/dx and its square.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from pathspace.metrics.checks import check_names, checked
from pathspace.network import Network
from pathspace.optim.base.network_optimizer import Parameters
from pathspace.optim.base.path_space import PathSpaceOptimizer, PathSpaceOptions
from pathspace.optim.rules.moments import adam_direction, begin_moments
from pathspace.rescaling.optimizer_states import Group, State


class GAdam(PathSpaceOptimizer):
    """AdamW in path space: Adam's rule for the gradient of every basis path, and the step taken exactly.

    .. code-block:: text

        m_e = beta1 m_e + (1 - beta1) dL/dx_e;   s_e = beta2 s_e + (1 - beta2) (dL/dx_e)^2
        d_e = (m_e / (1 - beta1^t)) / (sqrt(s_e / (1 - beta2^t)) + eps)
        x_e = (1 - eta weight_decay) x_e - eta d_e            for every basis path, x_e = v_e / a_e

    It is invariant like :class:`GSGD`, which explains basis paths and the skeleton. The step of a
    path does not depend on how long its gradient is, which suits coordinates of very different
    sizes.

    Args:
        params, network: see :class:`Invariant`.
        lr: learning rate eta. With ``units="balanced"`` rates that are good for Adam are good here.
        betas: decay rates of the averages m and s.
        eps: added to the root.
        weight_decay: decoupled decay of every path value, times lr.
        amsgrad: divide by the largest s so far.
        options: other options as :class:`GSGD`; ``skeleton_rate`` multiplies a_e^2 of the paths
            that consist of skeleton edges alone.

    Raises:
        ValueError, RuntimeError, FloatingPointError: as :class:`GSGD`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> optimizer = ps.optim.GAdam(model.parameters(), network, lr=1e-3, skeleton="cyclic")
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.diagnostics()["classes"]
        8
    """

    def __init__(
        self,
        params: Parameters,
        network: Network,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Unpack[PathSpaceOptions],
    ) -> None:
        defaults = checked(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        check_names(self, options, PathSpaceOptions.__annotations__)
        super().__init__(params, network, defaults, **options)

    def _direction(self, g: Tensor, group: Group, state: State) -> Tensor:
        return adam_direction(g, state, group["betas"], group["eps"], group["amsgrad"])

    def _make_room(self, g: Tensor, group: Group, state: State) -> None:
        begin_moments(g, state)
        if group["amsgrad"]:
            state.setdefault("max_exp_avg_sq", state["exp_avg_sq"].clone())
