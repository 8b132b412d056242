"""The options of ``balance_`` that belong to some of its criteria, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pathspace.rescaling.activations import STATISTICS, Statistic
from pathspace.rescaling.criteria import CRITERIA
from pathspace.rescaling.frames import check_alpha
from pathspace.rescaling.rounding import PER, Per, Scheme


@dataclass(frozen=True)
class Options:
    """Options of criteria, as ``balance_`` takes them; None where one is not given."""

    calibration: Any = None
    alpha: float | None = None
    statistic: Statistic | None = None
    bits: int | None = None
    per: Per | None = None
    activations: bool | int | None = None

    def scheme(self) -> Scheme:
        """Return how the network is rounded, for the criterion "rounding"."""
        activations = self.activations
        if isinstance(activations, bool):
            activations = 8 if activations else None
        bits = 8 if self.bits is None else self.bits
        return Scheme(bits, self.per or "tensor", activations, self.calibration)


_OWNERS = {
    "calibration": ("activations", "rounding", "measure"),
    "alpha": ("activations", "measure"),
    "statistic": ("activations",),
    "bits": ("rounding",),
    "per": ("rounding",),
    "activations": ("rounding",),
}
"""The criteria that take each option."""


def check_options(criterion: Any, options: Options, example: Any) -> None:
    """Refuse an unknown criterion, and options that it does not take.

    Raises:
        ValueError: the criterion is unknown, does not take an option, or needs another one; or an
            option is out of its range.
    """
    if criterion not in CRITERIA:
        raise ValueError(
            f"criterion must be one of {', '.join(map(repr, CRITERIA))}, got {criterion!r}"
        )
    for field in fields(options):
        given = getattr(options, field.name) is not None
        owners = _OWNERS[field.name]
        if given and criterion not in owners:
            named = " and ".join(map(repr, owners))
            raise ValueError(
                f"{field.name} is an option of criterion={named}, not of {criterion!r}"
            )
    if criterion == "measure":
        check_alpha(options.alpha)
        if options.alpha is not None and options.calibration is None and example is None:
            raise ValueError(
                f"alpha={options.alpha} is a share of the data: give example_input or calibration"
            )
    if criterion == "activations":
        _check_activations(options)
    if criterion == "rounding":
        _check_rounding(options)


def _check_activations(options: Options) -> None:
    alpha = options.alpha
    statistic = options.statistic
    if options.calibration is None:
        raise ValueError(
            "criterion='activations' measures the values of units on data: give calibration, a batch as the model is "
            "called with it, or take criterion='range', which needs none"
        )
    if alpha is not None and not (isinstance(alpha, (int, float)) and 0 < alpha <= 1):
        raise ValueError(
            f"alpha must be in (0, 1], got {alpha!r}; criterion='range' looks at weights alone"
        )
    if statistic is not None and statistic not in STATISTICS:
        raise ValueError(
            f"statistic must be one of {', '.join(map(repr, STATISTICS))}, got {statistic!r}"
        )


def _check_rounding(options: Options) -> None:
    if options.per is not None and options.per not in PER:
        raise ValueError(f"per must be one of {', '.join(map(repr, PER))}, got {options.per!r}")
    _check_bits("bits", options.bits)
    activations = options.activations
    if activations is None or activations is False:
        return
    if activations is not True:
        _check_bits("activations", activations)
    if options.calibration is None:
        raise ValueError(
            "activations=... needs the ranges of values on data: give calibration, a batch as the model is called "
            "with it"
        )


def _check_bits(name: str, bits: Any) -> None:
    if bits is None:
        return
    if not isinstance(bits, int) or isinstance(bits, bool) or not 2 <= bits <= 32:
        raise ValueError(f"{name} must be a whole number of bits from 2 to 32, got {bits!r}")
