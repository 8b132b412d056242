"""The protocol of the comparison: problems, sizes of network, methods, rates and seeds.

A problem is the sum, product or difference of two marked numbers of a long sequence. Sources: S.
Hochreiter and J. Schmidhuber (1997), in the form of Q. Le, N. Jaitly and G. Hinton (2015); the
product is theirs of 1997, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

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
from pathspace.experiments.settings import Seeds
from pathspace.experiments.tasks.adding import marked_sequences


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem, and the error below which it is learned.

    Attributes:
        answer: From the two marked numbers.
        target: A test error below this is a success: 6 % of what the best constant answer gets.
    """

    answer: Callable[[Tensor, Tensor], Tensor]
    target: float

    def draw(self, generator: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw sequences (count, length, 2) and their answers (count,)."""
        inputs, marked = marked_sequences(count, length, generator)
        return inputs, self.answer(marked[:, 0], marked[:, 1])


PROBLEMS = {
    "addition": Problem(torch.add, 0.01),
    "multiplication": Problem(torch.mul, 0.003),
    "subtraction": Problem(torch.sub, 0.01),
}


NEEDS = ()
"""Packages that no other recipe needs."""


@dataclass(frozen=True, config=CONFIG)
class Protocol:
    """The settings of the table.

    Attributes:
        problems: Names in `PROBLEMS`.
        lengths: T of the sequences, each with each problem and size.
        hidden: H of the networks.
        methods: Names in `methods.METHODS`.
        reference: The method that all others are tested against.
        learning_rates: The grid.
        tuning_seeds: Seeds of every rate; the rate of most successes is chosen, of equals that of
            least steps.
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


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem, the length T of its sequences, and the network's hidden units H."""

    problem: str
    length: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run."""

    setting: Setting
    method: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """A file name."""
        s = self.setting
        return f"{s.problem}-{s.length}-{s.hidden}-{self.method}-at-{self.rate:g}-seed-{self.seed}"
