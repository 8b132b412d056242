"""The protocol of the table: texts, sizes and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, with_config
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import (
    CONFIG,
    Count,
    Natural,
    NotNegative,
    Positive,
    Several,
    expected,
    known,
    wrong,
)

TEXTS = ("alphabet", "music", "anbn")
# Not in the paper: the alphabet without capitals after the last digit, as its true code length
# suggests.
KNOWN_TEXTS = (*TEXTS, "alphabet-9")
# What a text's length counts.
LENGTHS = {"alphabet": "lines", "alphabet-9": "lines", "music": "bars", "anbn": "blocks"}
NETWORKS = ("RNN", "CNN", "PCNN")
# The paper's names: how writing weights are stepped, then transition weights.
RULES = {"DH+FB": ("dh", "fb"), "QDH+RUTSD": ("qdh", "rutsd"), "QDH+RBP": ("qdh", "rbp")}
INVARIANT = ("QDH+RUTSD", "QDH+RBP")
# the last one not in the paper: hmmlearn's, from its own start
BASELINES = (
    "bzip2",
    "CTW",
    "HMM",
    "dense HMM",
)
ROWS = (*BASELINES, *(f"{network}, {rule}" for network in NETWORKS for rule in RULES))
# Not in the paper: several networks made one, which have learned the training and the validation
# text in turn.
MERGED = "PCNN, merged"
# What the paper says has fewer bits than what: invariant steps than backpropagation, its network
# than others.
COMPARED = (
    *((f"{network}, {rule}", f"{network}, DH+FB") for network in NETWORKS for rule in INVARIANT),
    *((f"PCNN, {rule}", f"{network}, {rule}") for network in NETWORKS[:2] for rule in INVARIANT),
    *((f"PCNN, {rule}", baseline) for baseline in BASELINES for rule in INVARIANT),
)
SEEDS_APART = 1000  # between two draws: more than the networks of one


def _even(value: int) -> int:
    if value % 2:  # half of them learn either text
        raise expected("an even number")
    return value


Text = Annotated[str, known(KNOWN_TEXTS)]
Even = Annotated[int, Field(ge=2), AfterValidator(_even)]


@with_config(ConfigDict(extra="forbid"))
class Merged(TypedDict):
    """Options of `pathspace.sequences.PCNN` for the row `MERGED`."""

    units: Count
    restarts: Even
    ensemble: Even
    heat: Natural
    passes: Count
    patience: Count
    prior_writing: NotRequired[NotNegative]
    prior_transition: NotRequired[NotNegative]


NEEDS = ("numba", "hmmlearn")
"""Packages that no other recipe needs."""


@dataclass(frozen=True, config=CONFIG)
class Protocol:
    """The settings of the table.

    Attributes:
        texts: Columns, names in `KNOWN_TEXTS`.
        rows: Rows, names in `ROWS`, or `MERGED`.
        lengths: Lines, bars or blocks of a text; one that is missing has the paper's length.
        units: Sizes of network to choose from, on the validation text; of hidden Markov model, too,
            as in the paper.
        connectivity: Edges that leave each unit, its loop included.
        passes: Passes over the training text, for each text.
        seconds: Processor time of one start of a network of one size, for each text, from its first
            pass on; passes that were undone count. No bound where a text is missing.
        patience: Passes without a better validation text after which a training ends.
        restarts: Networks of each size to choose from, for each text; 1 where a text is missing.
        heat: Passes after which the better quarter of the restarts goes on alone; 0 lets all go on.
        states: Sizes of dense hidden Markov model to choose from.
        iterations: Of both hidden Markov models.
        depths: Longest contexts of the context trees to choose from.
        merged: For each text, what the row `MERGED` takes instead of the above: see `Merged`.
        data_seed: Decides the texts.
        seed: Decides graphs and start values of the networks.
        seeds: How often everything is drawn anew, texts, graphs and start values: `data_seed` and
            the ones after it, with `seed` and the thousands after it. The table has means over
            them.
    """

    texts: Several[Text] = TEXTS
    rows: Several[Annotated[str, known((*ROWS, MERGED))]] = ROWS
    lengths: Mapping[Text, Count] = field(default_factory=dict)
    units: Several[Count] = (8, 16)
    connectivity: Count = 3
    passes: Mapping[Text, Count] = field(default_factory=lambda: dict.fromkeys(TEXTS, 100))
    seconds: Mapping[Text, Positive] = field(default_factory=dict)
    patience: Count = 300
    restarts: Mapping[Text, Count] = field(default_factory=dict)
    heat: Natural = 0
    states: Several[Count] = (8, 16)
    iterations: Count = 50
    depths: Several[Count] = (8, 16)
    merged: Mapping[Text, Merged] = field(default_factory=dict)
    data_seed: Natural = 21
    seed: Natural = 1000
    seeds: Count = 1

    def __post_init__(self) -> None:
        if min(self.units) < self.connectivity:
            raise wrong("units", self.units, f"whole numbers from {self.connectivity} on")
        for text, options in self.merged.items():
            if options["units"] < self.connectivity:
                least = f"a whole number from {self.connectivity} on"
                raise wrong(f"merged.{text}.units", options["units"], least)
            if options["ensemble"] > options["restarts"]:
                most = f"at most the {options['restarts']} of its restarts"
                raise wrong(f"merged.{text}.ensemble", options["ensemble"], most)
        wanted: dict[str, Mapping[str, object]] = {"passes": self.passes}
        if MERGED in self.rows:
            wanted["merged"] = self.merged
        for name, given in wanted.items():
            missing = [text for text in self.texts if text not in given]
            if missing:
                raise ConfigurationError(
                    f"The setting {name!r} lacks {missing[0]!r}: say what it takes."
                )

    def drawn(self, draw: int) -> Protocol:
        """Return the protocol of one draw alone, the first of which is 0."""
        return replace(
            self, data_seed=self.data_seed + draw, seed=self.seed + SEEDS_APART * draw, seeds=1
        )
