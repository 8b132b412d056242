"""kappa that a metric of the user's own returns: checked, brought into the frame, and in a type that holds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.gauge import powers
from pathspace.network import Network
from pathspace.paths.kernel.safe_type import RangeReport, Values, narrowed, range_report
from pathspace.squared.precision import widened


def report_of(
    given: Any,
    whose: str,
    network: Network,
    names: Sequence[str],
    far: Tensor | None,
    to_frame: Callable[[Values], Values],
) -> RangeReport:
    """Return kappa' for given values of kappa, in the parameters' types if they hold it, else in float64.

    Args:
        given: the values, by name.
        whose: how messages call them.
        network: the network.
        names: the parameters that are asked for.
        far: m_c of a network that is far from balance, see ``gauge.far_scales``.
        to_frame: moves values of the member near balance into the frame.

    Raises:
        TypeError: if it is no mapping from names to tensors of real numbers.
        ValueError: if a name is missing, a shape differs from the parameter's, or an element is
            negative.
        FloatingPointError: if an element is not finite.
    """
    parameters = network.parameters
    types = {name: widened(parameters[name]).dtype for name in names}
    kappa: Values = {}
    for name in names:
        value = _tensor_of(given, name, parameters[name], whose)
        # in float64 until all are known to fit
        wide = far is not None or value.dtype == torch.float64
        dtype = torch.float64 if wide else types[name]
        own = value.to(
            parameters[name].device, dtype, copy=True, memory_format=torch.contiguous_format
        )
        if far is not None:
            # kappa of the member near balance: m^2 kappa
            own.mul_(powers(network, name, far).square())
        kappa[name] = own
    report = range_report(to_frame(kappa), parameters, with_means=True)
    _expect_kappa(report, whose)
    may_be_narrowed = report.well_scaled and report.types() != types
    if may_be_narrowed and report.fits_all(types, zero_fits=True):
        return narrowed(report, types, parameters, with_means=True)
    return report


def _tensor_of(values: Any, name: str, parameter: Tensor, whose: str) -> Tensor:
    """Return what a mapping holds for a parameter.

    Args:
        values: the mapping.
        name: the name of the parameter.
        parameter: the parameter.
        whose: how messages call the mapping.

    Raises:
        TypeError: if it is no mapping, or holds something else than a tensor of real numbers.
        ValueError: if it lacks the name, or the tensor has another shape than the parameter.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{whose} must be a mapping from parameter names to tensors, as pathspace.paths.kappa returns, got "
            f"{type(values).__name__}"
        )
    if name not in values:
        has = ", ".join(map(repr, values)) or "none"
        raise ValueError(f"{whose} lack '{name}': return a tensor for each of names, got {has}")
    value = values[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"{whose} must be tensors, got {type(value).__name__} for '{name}'")
    if value.shape != parameter.shape:
        shapes = f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
        raise ValueError(f"{whose} must have the parameters' shapes; that of '{name}' has {shapes}")
    if not value.is_floating_point():
        raise TypeError(f"{whose} must be of a floating-point type, got {value.dtype} for '{name}'")
    return value.detach()


def _expect_kappa(report: RangeReport, whose: str) -> None:
    """Refuse values that no metric may have.

    Args:
        report: the values, and their bounds.
        whose: how messages call the values.

    Raises:
        ValueError: if an element is negative.
        FloatingPointError: if an element is not finite.
    """
    for name, bounds in report.bounds.items():
        if not all(math.isfinite(end) for pair in bounds for end in pair):
            raise FloatingPointError(
                f"{whose} are not finite for '{name}': the weights are not finite, because training diverged (lower "
                "the learning rate or clip), or the values overflow (compute them in float64)"
            )
        if any(low < 0 for low, _ in bounds):
            raise ValueError(
                f"{whose} must not be negative, and an element for '{name}' is: if rounding makes it so, return "
                "value.clamp(min=0)"
            )
