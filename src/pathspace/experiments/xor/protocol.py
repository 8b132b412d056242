"""What is trained on the XOR text: steps, seeds, and how often they are looked at."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.layers import CONFIG, Count, Natural, Several, known

# name -> options of `pathspace.sequences.PCNN`
STEPS: dict[str, dict[str, Any]] = {
    "published": {"damping": 1.0},  # as printed: eps = 1 on the diagonal of the metric
    "ours": {
        "damping": 1e-6,
        "reach": 0.1,
    },  # only one symbol in 200 is predicted, so a damping of 1 hides the metric
}
FIRST_SEED = 1000


def _spelled(seeds: Any) -> Any:
    """Return the seeds that a number of them stands for: the first ones of the default."""
    return tuple(range(FIRST_SEED, FIRST_SEED + seeds)) if type(seeds) is int else seeds


NEEDS = ("numba",)
"""Packages that no other recipe needs."""


@dataclass(frozen=True, config=CONFIG)
class Protocol:
    """How the table is made.

    Attributes:
        steps: Rows, names in `STEPS`.
        seeds: Of graphs and start values; all of them are trained by all steps. A number stands for
            the first ones of the default.
        lines: Of each of the three texts.
        length: T; a line has from T to 1.1 T bits.
        units: Of every network, each joined to all.
        passes: After which a network that has not learned it has failed.
        every: Passes between two looks at the validation text.
        passed: Share of wrong lines there below which a network has learned it.
        data_seed: Decides the texts.
        own_texts: Whether each seed has texts of its own, as the paper's runs have, or all share
            theirs.
    """

    steps: Several[Annotated[str, known(STEPS)]] = tuple(STEPS)
    seeds: Annotated[Several[Natural], BeforeValidator(_spelled)] = tuple(
        range(FIRST_SEED, FIRST_SEED + 8)
    )
    lines: Count = 10_000
    length: Annotated[int, Field(ge=10)] = 100
    units: Count = 10
    passes: Count = 2000
    every: Count = 50
    passed: Annotated[float, Field(gt=0, le=1)] = 0.01
    data_seed: Natural = 21
    own_texts: bool = False
