"""The metric of one parameter, and what its state keeps of it from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pathspace.optim.base.path_metric import Gauge
from pathspace.squared.squares import Outer


@dataclass(slots=True)
class Metric:
    """What the gradient of a parameter is divided by: values / normalizer."""

    values: Any  # a tensor, or an Outer where the optimizer is ``factored``; zeros replaced by infinity
    normalizer: float
    folded: Tensor | None = None  # the product of both factors, where one is a number, once it is known


def check_places(states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Refuse a model that was moved after the optimizer had taken steps; the first parameter tells.

    Raises:
        RuntimeError: it was.
    """
    p, state = next(iter(states.items()), (None, {}))
    gauge = state.get("gauge_rows")
    if p is not None and gauge is not None and gauge.device != p.device:
        raise RuntimeError(
            f"the parameters are on {p.device} and the optimizer's state is on {gauge.device}: the model was moved "
            "after the optimizer had taken steps; let the state follow with "
            "optimizer.load_state_dict(optimizer.state_dict())"
        )


def keep(state: dict[str, Any], metric: Metric) -> None:
    """Keep a metric until the next is due."""
    state["age"] = 1
    if isinstance(metric.values, Outer):
        state["kappa_rows"], state["kappa_columns"] = (
            _alone(metric.values.rows),
            _alone(metric.values.columns),
        )
        state.pop("kappa", None)
    else:
        state["kappa"] = _alone(metric.values)
        state.pop("kappa_rows", None)


def drop(state: dict[str, Any]) -> None:
    """Let a kept metric go before the next one is computed, so that there are never two of them in memory."""
    for key in ("kappa", "kappa_rows", "kappa_columns"):
        if key in state:
            del state[key]
            state["age"] = 0


def forget_start(state: dict[str, Any]) -> None:
    """Let go of what belongs to a first step that was refused: the weights may be others when it is taken."""
    if "normalizer" not in state:
        for key in ("gauge_rows", "gauge_columns", "scales"):
            state.pop(key, None)


def _alone(t: Tensor) -> Tensor:
    """The tensor, without the rest of what it is a part of: one step of a sequence must not keep all of them."""
    return t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t


def kept(state: dict[str, Any]) -> Metric:
    """The metric that was kept."""
    if "kappa_rows" in state:
        return Metric(Outer(state["kappa_rows"], state["kappa_columns"]), state["normalizer"])
    return Metric(state["kappa"], state["normalizer"])


def gauge_of(state: dict[str, Any]) -> Gauge:
    """The gauge that a parameter's state keeps from the first step."""
    return Gauge(state["gauge_rows"], state["gauge_columns"])
