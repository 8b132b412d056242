"""What is trained on the XOR text: steps, seeds, and how often they are looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import Layer, laid_over

# name -> options of `pathspace.sequences.PCNN`
STEPS: dict[str, dict[str, Any]] = {
    "published": {"damping": 1.0},  # as printed: eps = 1 on the diagonal of the metric
    "ours": {
        "damping": 1e-6,
        "reach": 0.1,
    },  # only one symbol in 200 is predicted, so a damping of 1 hides the metric
}
LISTS = ("steps", "seeds")


@dataclass(frozen=True)
class Protocol:
    """How the table is made.

    Attributes:
        steps: Rows, names in `STEPS`.
        seeds: Of graphs and start values; all of them are trained by all steps.
        lines: Of each of the three texts.
        length: T; a line has from T to 1.1 T bits.
        units: Of every network, each joined to all.
        passes: After which a network that has not learned it has failed.
        every: Passes between two looks at the validation text.
        passed: Share of wrong lines there below which a network has learned it.
        data_seed: Decides the texts.
    """

    steps: tuple[str, ...] = tuple(STEPS)
    seeds: tuple[int, ...] = tuple(range(1000, 1008))
    lines: int = 10_000
    length: int = 100
    units: int = 10
    passes: int = 2000
    every: int = 50
    passed: float = 0.01
    data_seed: int = 21

    def __post_init__(self) -> None:
        for name in self.steps:
            if not isinstance(name, str) or name not in STEPS:
                raise unknown_name("name", str(name), STEPS, "the setting 'steps'")
        for name in LISTS:
            values = getattr(self, name)
            if not values or any(value in values[:k] for k, value in enumerate(values)):
                raise ConfigurationError(
                    f"The setting {name!r} is {list(values)!r}: give at least one, each once."
                )
        for seed in self.seeds:
            _check_whole("seeds", seed, 0)
        for name, least in (
            *(("lines", 1), ("length", 10), ("units", 1), ("passes", 1), ("every", 1), ("data_seed", 0)),
        ):
            _check_whole(name, getattr(self, name), least)
        if (
            not isinstance(self.passed, int | float)
            or isinstance(self.passed, bool)
            or not 0 < self.passed <= 1
        ):
            raise ConfigurationError(f"The setting 'passed' is {self.passed!r}: give a share in (0, 1].")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def protocol_from(*layers: Layer) -> Protocol:
    """Lay settings over the defaults; later layers win.

    Args:
        layers: Pairs of where the settings stand, for errors, and the settings. A number n of `seeds` stands for the
            first n of the default ones.

    Raises:
        ConfigurationError: A name is unknown or a value impossible.
    """
    first = Protocol.seeds[0]
    spelled = [
        (
            where,
            {
                name: tuple(range(first, first + value)) if name == "seeds" and type(value) is int else value
                for name, value in layer.items()
            },
        )
        for where, layer in layers
    ]
    return Protocol(**laid_over(spelled, [item.name for item in fields(Protocol)], lists=LISTS))


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"The setting {name!r} has {value!r}: give whole numbers from {least} on.")
