"""What is compared: problems, sizes of network, methods, rates and seeds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.errors import unknown_name
from pathspace.experiments.layers import (
    CONFIG,
    Count,
    NotNegative,
    Positive,
    Several,
    Share,
    known,
)
from pathspace.experiments.long_memory.methods import METHODS
from pathspace.experiments.long_memory.problems import PROBLEMS
from pathspace.experiments.settings import Seeds

NEEDS = ()
"""Packages that no other recipe needs."""


@dataclass(frozen=True, config=CONFIG)
class Protocol:
    """How the table is made.

    Attributes:
        problems: Names in `problems.PROBLEMS`.
        lengths: T of the sequences, each with each problem and size.
        hidden: H of the networks.
        methods: Names in `methods.METHODS`.
        reference: The method that all others are tested against.
        learning_rates: The grid.
        tuning_seeds: Seeds of every rate; the rate of most successes is chosen, of equals that of least steps.
        seeds: Reported seeds, which no rate was chosen on.
        steps_per_length: Most steps of a run, for every step of a sequence: 15 T.
        batch_size: B.
        warmup: The part of a run over which the rate rises.
        clip_norm: Largest norm of a gradient in a method's coordinates; 0 does not clip.
        refresh_every: Steps between two computations of kappa.
        damping: Added to kappa, as a fraction of its mean.
        test_size: Sequences that decide whether a run has learned the problem.
    """

    problems: Several[Annotated[str, known(PROBLEMS)]] = ("addition",)
    lengths: Several[Annotated[int, Field(ge=2)]] = (100,)
    hidden: Several[Count] = (64,)
    methods: Several[Annotated[str, known(METHODS)]] = tuple(METHODS)
    reference: str = "path-muon"
    learning_rates: Several[Positive] = (0.0003, 0.001, 0.003, 0.01, 0.03)
    tuning_seeds: Seeds = 12
    seeds: Seeds = 40
    steps_per_length: Count = 15
    batch_size: Count = 32
    warmup: Share = 0.05
    clip_norm: NotNegative = 1.0
    refresh_every: Count = 10
    damping: NotNegative = 0.01
    test_size: Count = 2000

    def __post_init__(self) -> None:
        if self.reference not in self.methods:
            raise unknown_name("method", self.reference, self.methods, "the setting 'reference'")
