"""What is compared: problems, sizes of network, methods, rates and seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pathspace.experiments.checks import check_several
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import Layer, laid_over
from pathspace.experiments.long_memory.methods import METHODS
from pathspace.experiments.long_memory.problems import PROBLEMS
from pathspace.experiments.settings import LARGEST, check_setting

COUNTS = ("tuning_seeds", "seeds", "steps_per_length", "batch_size", "refresh_every", "test_size")
LISTS = ("problems", "lengths", "hidden", "methods", "learning_rates")


@dataclass(frozen=True)
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

    problems: tuple[str, ...] = ("addition",)
    lengths: tuple[int, ...] = (100,)
    hidden: tuple[int, ...] = (64,)
    methods: tuple[str, ...] = tuple(METHODS)
    reference: str = "path-muon"
    learning_rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01, 0.03)
    tuning_seeds: int = 12
    seeds: int = 40
    steps_per_length: int = 15
    batch_size: int = 32
    warmup: float = 0.05
    clip_norm: float = 1.0
    refresh_every: int = 10
    damping: float = 0.01
    test_size: int = 2000

    def __post_init__(self) -> None:
        _check_names("problems", self.problems, PROBLEMS)
        _check_names("methods", self.methods, METHODS)
        if self.reference not in self.methods:
            raise unknown_name("method", str(self.reference), self.methods, "the setting 'reference'")
        for name in LISTS:
            check_several(name, getattr(self, name))
        for name, least in (("lengths", 2), ("hidden", 1)):
            for value in getattr(self, name):
                _check_number(name, value, least, whole=True)
        for rate in self.learning_rates:
            _check_rate(rate)
        for name in COUNTS:
            _check_number(name, getattr(self, name), 1, whole=True)
        for name in ("seeds", "tuning_seeds"):  # beyond, reported runs have seeds that rates were chosen by
            check_setting(name, getattr(self, name))
        for name in ("warmup", "clip_norm", "damping"):
            _check_number(name, getattr(self, name), 0.0)
        if self.warmup >= 1:
            raise ConfigurationError(
                f"The setting 'warmup' is {self.warmup!r}: give a part of the run, below 1."
            )


def protocol_from(*layers: Layer) -> Protocol:
    """Lay settings over the defaults; later layers win.

    Args:
        layers: Pairs of where the settings stand, for errors, and the settings.

    Raises:
        ConfigurationError: A name is unknown or a value impossible.
    """
    return laid_over(Protocol, layers)


def _check_names(setting: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name("name", str(name), [*known], f"the setting {setting!r}")


def _check_rate(rate: Any) -> None:
    _check_number("learning_rates", rate, 0.0)
    if rate == 0:
        raise ConfigurationError("The setting 'learning_rates' has 0, by which nothing moves: leave it out.")


def _check_number(name: str, value: Any, least: float, *, whole: bool = False) -> None:
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= LARGEST:
        numbers = "whole numbers" if whole else "numbers"
        raise ConfigurationError(
            f"The setting {name!r} has {value!r}: give {numbers} from {least:g} on, at most {LARGEST:g}."
        )
