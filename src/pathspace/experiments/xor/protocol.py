"""What is trained on the XOR text: steps, seeds, and how often they are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pathspace.experiments.checks import check_several, check_whole, is_real
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
        own_texts: Whether each seed has texts of its own, as the paper's runs have, or all share theirs.
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
    own_texts: bool = False

    def __post_init__(self) -> None:
        for name in self.steps:
            if not isinstance(name, str) or name not in STEPS:
                raise unknown_name("name", str(name), STEPS, "the setting 'steps'")
        for name in ("steps", "seeds"):
            check_several(name, getattr(self, name))
        for seed in self.seeds:
            check_whole("seeds", seed, 0)
        numbers = (("lines", 1), ("length", 10), ("units", 1), ("passes", 1), ("every", 1), ("data_seed", 0))
        for name, least in numbers:
            check_whole(name, getattr(self, name), least)
        if not isinstance(self.own_texts, bool):
            raise ConfigurationError(f"The setting 'own_texts' is {self.own_texts!r}: give true or false.")
        if not is_real(self.passed) or not 0 < self.passed <= 1:
            raise ConfigurationError(f"The setting 'passed' is {self.passed!r}: give a share in (0, 1].")


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
    return laid_over(Protocol, spelled)
