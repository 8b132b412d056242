"""What goes into the table: texts, sizes, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pathspace.experiments.checks import check_whole, is_real
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import Layer, laid_over

TEXTS = ("alphabet", "music", "anbn")
# Not in the paper: the alphabet without capitals after the last digit, as its true code length suggests.
KNOWN_TEXTS = (*TEXTS, "alphabet-9")
# What a text's length counts.
LENGTHS = {"alphabet": "lines", "alphabet-9": "lines", "music": "bars", "anbn": "blocks"}
NETWORKS = ("RNN", "CNN", "PCNN")
# The paper's names: how writing weights are stepped, then transition weights.
RULES = {"DH+FB": ("dh", "fb"), "QDH+RUTSD": ("qdh", "rutsd"), "QDH+RBP": ("qdh", "rbp")}
INVARIANT = ("QDH+RUTSD", "QDH+RBP")
BASELINES = (
    "bzip2",
    "CTW",
    "HMM",
    "dense HMM",
)  # the last one not in the paper: hmmlearn's, from its own start
ROWS = (*BASELINES, *(f"{network}, {rule}" for network in NETWORKS for rule in RULES))
# Not in the paper: several networks made one, which have learned the training and the validation text in turn.
MERGED = "PCNN, merged"
# What the paper says has fewer bits than what: invariant steps than backpropagation, its network than others.
COMPARED = (
    *((f"{network}, {rule}", f"{network}, DH+FB") for network in NETWORKS for rule in INVARIANT),
    *((f"PCNN, {rule}", f"{network}, {rule}") for network in NETWORKS[:2] for rule in INVARIANT),
    *((f"PCNN, {rule}", baseline) for baseline in BASELINES for rule in INVARIANT),
)
# What it takes, and the least of it (of units, the connectivity); of the priors, any number from 0 on.
MERGED_OPTIONS = {"units": 1, "restarts": 2, "ensemble": 2, "heat": 0, "passes": 1, "patience": 1}
PRIORS = ("prior_writing", "prior_transition")
SEEDS_APART = 1000  # between two draws: more than the networks of one


@dataclass(frozen=True)
class Protocol:
    """How the table is made.

    Attributes:
        texts: Columns, names in `KNOWN_TEXTS`.
        rows: Rows, names in `ROWS`, or `MERGED`.
        lengths: Lines, bars or blocks of a text; one that is missing has the paper's length.
        units: Sizes of network to choose from, on the validation text; of hidden Markov model, too, as in the paper.
        connectivity: Edges that leave each unit, its loop included.
        passes: Passes over the training text, for each text.
        seconds: Processor time of one start of a network of one size, for each text, from its first pass on; passes
            that were undone count. No bound where a text is missing.
        patience: Passes without a better validation text after which a training ends.
        restarts: Networks of each size to choose from, for each text; 1 where a text is missing.
        heat: Passes after which the better quarter of the restarts goes on alone; 0 lets all go on.
        states: Sizes of dense hidden Markov model to choose from.
        iterations: Of both hidden Markov models.
        depths: Longest contexts of the context trees to choose from.
        merged: For each text, what the row `MERGED` takes instead of the above: names in `MERGED_OPTIONS`, `PRIORS`.
        data_seed: Decides the texts.
        seed: Decides graphs and start values of the networks.
        seeds: How often everything is drawn anew, texts, graphs and start values: `data_seed` and the ones after it,
            with `seed` and the thousands after it. The table has means over them.
    """

    texts: tuple[str, ...] = TEXTS
    rows: tuple[str, ...] = ROWS
    lengths: Mapping[str, int] = field(default_factory=dict)
    units: tuple[int, ...] = (8, 16)
    connectivity: int = 3
    passes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TEXTS, 100))
    seconds: Mapping[str, float] = field(default_factory=dict)
    patience: int = 300
    restarts: Mapping[str, int] = field(default_factory=dict)
    heat: int = 0
    states: tuple[int, ...] = (8, 16)
    iterations: int = 50
    depths: tuple[int, ...] = (8, 16)
    merged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data_seed: int = 21
    seed: int = 1000
    seeds: int = 1

    def __post_init__(self) -> None:
        check_whole("connectivity", self.connectivity, 1)
        for name, known in (("texts", KNOWN_TEXTS), ("rows", (*ROWS, MERGED))):
            _check_names(getattr(self, name), known, name)
        for name in ("lengths", "passes", "restarts"):
            _check_names(tuple(getattr(self, name)), KNOWN_TEXTS, name, may_be_empty=name != "passes")
            for value in getattr(self, name).values():
                check_whole(name, value, 1)
        _check_names(tuple(self.seconds), KNOWN_TEXTS, "seconds", may_be_empty=True)
        for value in self.seconds.values():
            _check_number("seconds", value)
        _check_names(tuple(self.merged), KNOWN_TEXTS, "merged", may_be_empty=True)
        for text in self.merged:
            self._check_merged(text)
        for name, least in (("units", self.connectivity), ("states", 1), ("depths", 1)):
            if not getattr(self, name):
                raise ConfigurationError(f"The setting {name!r} is empty: give at least one size.")
            for value in getattr(self, name):
                check_whole(name, value, least)
        for name, least in (
            ("patience", 1),
            ("heat", 0),
            ("iterations", 1),
            ("data_seed", 0),
            ("seed", 0),
            ("seeds", 1),
        ):
            check_whole(name, getattr(self, name), least)
        wanted = {"passes": self.passes} | ({"merged": self.merged} if MERGED in self.rows else {})
        for name, given in wanted.items():
            missing = [text for text in self.texts if text not in given]
            if missing:
                raise ConfigurationError(f"The setting {name!r} lacks {missing[0]!r}: say what it takes.")

    def _check_merged(self, text: str) -> None:
        where, options = f"merged.{text}", self.merged[text]
        if not isinstance(options, Mapping):
            raise ConfigurationError(f"The setting {where!r} is {options!r}: give a table.")
        for name in MERGED_OPTIONS:
            if name not in options:
                raise ConfigurationError(f"The setting {where!r} lacks {name!r}: say what it takes.")
        for name, value in options.items():
            if name in MERGED_OPTIONS:
                least = self.connectivity if name == "units" else MERGED_OPTIONS[name]
                check_whole(f"{where}.{name}", value, least)
                if name in ("restarts", "ensemble") and value % 2:  # half of them learn either text
                    raise ConfigurationError(
                        f"The setting '{where}.{name}' has {value}: give an even number."
                    )
            elif name in PRIORS:
                if value != 0:  # none
                    _check_number(f"{where}.{name}", value)
            else:
                raise unknown_name("option", str(name), (*MERGED_OPTIONS, *PRIORS), f"the setting {where!r}")
        if options["ensemble"] > options["restarts"]:
            raise ConfigurationError(
                f"The setting '{where}.ensemble' has {options['ensemble']}: give at most the {options['restarts']} of "
                "its restarts."
            )

    def drawn(self, draw: int) -> Protocol:
        """Return the protocol of one draw alone, the first of which is 0."""
        return replace(self, data_seed=self.data_seed + draw, seed=self.seed + SEEDS_APART * draw, seeds=1)


def protocol_from(*layers: Layer) -> Protocol:
    """Lay settings over the defaults; later layers win, and tables are merged.

    Args:
        layers: Pairs of where the settings stand, for errors, and the settings.

    Raises:
        ConfigurationError: A name is unknown or a value impossible.
    """
    return laid_over(Protocol, layers)


def _check_names(
    names: tuple[str, ...], known: tuple[str, ...], where: str, *, may_be_empty: bool = False
) -> None:
    if not names and not may_be_empty:
        raise ConfigurationError(f"The setting {where!r} is empty: give at least one of {', '.join(known)}.")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise unknown_name("name", str(name), known, f"the setting {where!r}")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"The setting {where!r} is {list(names)!r}: give each one once.")


def _check_number(name: str, value: Any) -> None:
    if not is_real(value) or not value > 0:
        raise ConfigurationError(f"The setting {name!r} has {value!r}: give positive numbers.")
