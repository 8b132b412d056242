"""Where an optimizer asks for compiled loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pathspace.network import Network

if TYPE_CHECKING:
    from pathspace.fused.plan import Plan
    from pathspace.optim.fused_step import FusedStep
    from pathspace.optim.path_optimizer import PathOptimizer


def plan_of(network: Network, second_term: bool) -> tuple[Plan | None, str]:
    """A plan of the compiled loops for a network, or None and why there is none.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        from pathspace.fused.plan import NoPlanError, Plan
    except ImportError as error:
        raise ImportError(
            "fused=True needs Numba: pip install 'pathspace[fused]', or leave it out"
        ) from error
    if second_term:
        return None, "second_term=True"
    try:
        return Plan(network), ""
    except NoPlanError as error:
        return None, str(error)


def fused_step(optimizer: PathOptimizer, plan: Plan, rule: str) -> FusedStep:
    """The step of a rule, ``"FusedDescent"`` or ``"FusedAdam"``, by compiled loops."""
    from pathspace.optim import fused_step

    return getattr(fused_step, rule)(optimizer, plan)
