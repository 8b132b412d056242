"""Where an optimizer asks for compiled loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pathspace.network import Network

if TYPE_CHECKING:
    from pathspace.compiled.data_plan import DataPlan
    from pathspace.compiled.fused_step import FusedStep
    from pathspace.compiled.path_space_step import PathSpaceStep
    from pathspace.compiled.plan import Plan
    from pathspace.optim.base.data_metric import DataMetric
    from pathspace.optim.base.path_optimizer import PathOptimizer
    from pathspace.optim.base.path_space import PathSpaceOptimizer

_MISSING = "fused=True needs Numba: pip install 'pathspace[fused]', or leave it out"


def plan_of(network: Network, second_term: bool) -> tuple[Plan | None, str]:
    """A plan of the compiled loops for a network, or None and why there is none.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        from pathspace.compiled.plan import NoPlanError, Plan
    except ImportError as error:
        raise ImportError(_MISSING) from error
    if second_term:
        return None, "second_term=True"
    try:
        return Plan(network), ""
    except NoPlanError as error:
        return None, str(error)


def data_plan_of(optimizer: DataMetric) -> tuple[DataPlan | None, str]:
    """The same for the data-dependent metric of an optimizer.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        from pathspace.compiled.data_plan import DataPlan
    except ImportError as error:
        raise ImportError(_MISSING) from error
    why = _not_plain(optimizer.network)
    return (None, why) if why else (DataPlan(optimizer), "")


def _not_plain(network: Network) -> str:
    """Why compiled loops cannot read the parameters of a network; empty if they can."""
    parameters = network.parameters.values()
    types = {p.dtype for p in parameters}
    if types not in ({torch.float32}, {torch.float64}) or any(p.device.type != "cpu" for p in parameters):
        return "the network's parameters are not all float32, or all float64, and on the CPU"
    return "" if all(p.numel() for p in parameters) else "a parameter has no elements"


def fused_step(optimizer: PathOptimizer, plan: Plan | DataPlan, rule: str) -> FusedStep:
    """The step of a rule, ``"FusedDescent"`` or ``"FusedAdam"``, by compiled loops."""
    from pathspace.compiled import fused_step

    return getattr(fused_step, rule)(optimizer, plan)


def path_space_step(
    optimizer: PathSpaceOptimizer, *, adaptive: bool = False
) -> tuple[PathSpaceStep | None, str]:
    """The step of an optimizer in path space by compiled loops, or None and why there is none.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        from pathspace.compiled.path_space_step import PathSpaceStep
    except ImportError as error:
        raise ImportError(_MISSING) from error
    why = _not_plain(optimizer.network)
    if why:
        return None, why
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return None, "amsgrad=True"
    return PathSpaceStep(optimizer, adaptive=adaptive), ""
