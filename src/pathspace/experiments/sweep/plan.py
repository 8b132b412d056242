"""The plan of a sweep: settings as lists or ranges, and the sampler that takes points among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import numpy as np
import optuna
from pydantic import Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import LARGEST, check_setting, plain_values, problem, read_value
from pathspace.experiments.run import RunConfig
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings, settings_from

SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("none", "median")
RATE, DECAY = "learning_rate", "weight_decay"
TABLES = ("task_options", "model_options")
GRID_POINTS = 5  # of a range that does not say how many
TRIALS = 20  # points for each optimizer where they are drawn
EXAMPLE = f"--search {RATE}=1e-4:1:log, or --search damping=0.01,0.1"

REAL = {RATE, DECAY, *(item.name for item in fields(Settings) if isinstance(item.default, float))}

# What is searched is a setting of a run: these say which runs are done and how they are reported.
NOT_OF_A_RUN = {
    "task", "methods", "starts", "baselines", "seeds", "tuning_seeds", "learning_rates", "weight_decays", "tuning",
    "tuning_epochs", "verified_seeds", "shared_rates", "target_error", "checkpoint_every", "method_options",
    "method_rates", *TABLES,
}  # fmt: skip

Value = bool | int | float | Annotated[str, Field(min_length=1)]
Number = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST)]
Points = Annotated[int, Field(ge=2, le=LARGEST)]


@dataclass(frozen=True)
class Dimension:
    """One setting that is searched: some values, or a range.

    Attributes:
        name: Of a setting, of an entry `TABLE.NAME`, or `learning_rate` or `weight_decay`.
        values: What it may be; empty for a range.
        low: The least of a range; between two whole numbers there are whole numbers alone.
        high: The greatest of a range.
        log: Whether equal factors count as equal distances.
        points: Of a range, for the grid.
    """

    name: str
    values: tuple[float | int | str | bool, ...] = ()
    low: float | int = 0.0
    high: float | int = 0.0
    log: bool = False
    points: int = GRID_POINTS

    def draw(self, trial: optuna.Trial) -> Any:
        """Return the value that a trial of Optuna takes."""
        if self.values:
            return trial.suggest_categorical(self.name, self.values)
        if self._whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)

    @property
    def ends(self) -> tuple[Any, Any]:
        """The first and the last value, or the least and the greatest one."""
        return (self.values[0], self.values[-1]) if self.values else (self.low, self.high)

    @property
    def _whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def listed(self) -> Dimension:
        """Return the same with values in the place of a range, at equal distances."""
        if self.values:
            return self
        spaced = np.geomspace if self.log else np.linspace
        between = spaced(self.low, self.high, self.points).tolist()
        exact = [round(value) if self._whole else float(f"{value:.6g}") for value in between]
        return Dimension(self.name, tuple(dict.fromkeys(exact)))


@dataclass(frozen=True)
class Plan:
    """The search space, the sampler and the pruner of a sweep.

    Attributes:
        search: What is searched; the learning rate is always among it.
        sampler: A name in `SAMPLERS`: every combination, or points drawn at random, or drawn where
            earlier ones were good (Optuna's tree-structured Parzen estimator).
        trials: Points for each method and start; of the grid, all.
        prune: A name in `PRUNERS`: whether runs that are worse than most at the same step are
            ended.
    """

    search: tuple[Dimension, ...]
    sampler: str = "grid"
    trials: int = 0
    prune: str = "none"

    def grid(self) -> list[dict[str, Any]]:
        """Return all points of a grid."""
        names = [dimension.name for dimension in self.search]
        values = itertools.product(*(dimension.values for dimension in self.search))
        return [dict(zip(names, point, strict=True)) for point in values]


def plan_from(
    settings: Settings, searched: Sequence[str] = (), sampler: str = "grid", trials: int | None = None,
    prune: str = "none",
) -> Plan:  # fmt: skip
    """Read what a sweep is asked for: grids of rates and decays of the settings, unless `searched` names them."""
    _check_options(sampler, trials, prune)
    dimensions = [parse_search(text) for text in searched]
    names = [dimension.name for dimension in dimensions]
    for dimension in dimensions:
        _check_values(dimension)
        if names.count(dimension.name) > 1:
            raise ConfigurationError(f"--search names {dimension.name!r} twice: give it once.")
    if DECAY not in names and len(settings.weight_decays) > 1:
        dimensions.insert(0, Dimension(DECAY, settings.weight_decays))
    if RATE not in names:
        dimensions.insert(0, _rates(settings, sampler))
    count = TRIALS if trials is None else trials
    if sampler == "grid":
        dimensions = [dimension.listed() for dimension in dimensions]
        count = math.prod(len(dimension.values) for dimension in dimensions)
    plan = Plan(tuple(dimensions), sampler, count, prune)
    _check_corners(settings, plan)
    return plan


def _check_options(sampler: str, trials: int | None, prune: str) -> None:
    """Refuse options of a sweep that do not exist or do not go together."""
    if sampler not in SAMPLERS:
        raise unknown_name("sampler", sampler, SAMPLERS, "--sampler")
    if prune not in PRUNERS:
        raise unknown_name("pruner", prune, PRUNERS, "--prune")
    if trials is not None and trials < 1:
        raise ConfigurationError(f"The option --trials is {trials}: give 1 or more.")
    if trials is not None and sampler == "grid":
        raise ConfigurationError(
            f"The option --trials is {trials}: a grid does all of its points; give --sampler random or tpe, too."
        )


def _rates(settings: Settings, sampler: str) -> Dimension:
    """Return the rates of the settings, to be searched: the grid of all methods, or what lies between its ends."""
    rates = {name: settings.rates_of(name) for name in settings.methods}
    if len(set(rates.values())) > 1:
        apart = ", ".join(sorted(settings.method_rates.keys() & rates.keys()))
        raise ConfigurationError(
            f"The setting 'method_rates' gives {apart} a grid of its own, and a sweep has one for all methods: leave "
            f"some out by --methods, or name rates for all by --search {RATE}=..."
        )
    values = rates[settings.methods[0]]
    if sampler == "grid" or len(values) == 1:
        return Dimension(RATE, values)
    return Dimension(RATE, low=float(min(values)), high=float(max(values)), log=True)


def parse_search(text: str) -> Dimension:
    """Read one `--search`."""
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise ConfigurationError(f"--search {text!r} says nothing to search: write {EXAMPLE}.")
    known = [RATE, DECAY, *(f.name for f in fields(Settings) if f.name not in NOT_OF_A_RUN)]
    if name.partition(".")[0] not in TABLES and name not in known:
        known += [f"{table}.NAME" for table in TABLES]
        raise unknown_name("setting", name, known, "--search")
    if ":" in rest:
        return _range(name, rest.split(":"), text)
    return Dimension(name, _listed(name, rest, text))


def _listed(name: str, written: str, text: str) -> tuple[Value, ...]:
    """Return the values that a `--search` lists, each once."""
    values = read_value(written) if written.startswith("[") else written.split(",")
    if not isinstance(values, list):
        raise ConfigurationError(f"--search {text!r} is no list: write {EXAMPLE}.")
    read = tuple(read_value(one) if isinstance(one, str) else one for one in values)
    if problem(tuple[Value, ...], read) or not read:
        raise ConfigurationError(
            f"--search {text!r} needs numbers, names, true or false: write {EXAMPLE}."
        )
    if name in (RATE, DECAY) and problem(tuple[Number, ...], read):
        raise ConfigurationError(f"--search {text!r} needs numbers: write {EXAMPLE}.")
    return tuple(dict.fromkeys(read))


def _range(name: str, parts: list[str], text: str) -> Dimension:
    """Return the range that a `--search` names, from its parts between colons."""
    log = "log" in parts[2:3]
    low, high, *more = (read_value(part) for part in (*parts[:2], *parts[2 + log :]))
    points = more or [GRID_POINTS]
    numbers = not problem(tuple[Number, Number, Points], (low, high, *points))
    if not numbers or low >= high or (log and low <= 0):
        raise ConfigurationError(
            f"--search {text!r} is no range: write NAME=LOW:HIGH, with :log for equal factors and :5 for five points "
            f"of a grid, such as {EXAMPLE}."
        )
    if name in REAL:
        low, high = float(low), float(high)
    return Dimension(name, low=low, high=high, log=log, points=points[0])


def _check_values(dimension: Dimension) -> None:
    """Refuse a value that is wrong by itself, so that every run with it would fail."""
    values = dimension.values or dimension.ends
    option = f"--search {dimension.name}"
    if dimension.name in (RATE, DECAY):  # which a comparison has several of
        check_setting(Settings, f"{dimension.name}s", values, option)
    for value in values:
        check_setting(Settings, dimension.name, value, option)


def _check_corners(settings: Settings, plan: Plan) -> None:
    """Refuse a plan none of whose corners can be run: a name is wrong, not a combination here and there."""
    errors = []
    for end in (0, 1):
        point = {dimension.name: dimension.ends[end] for dimension in plan.search}
        try:
            config_of(settings, (settings.methods[0], settings.starts[0]), point, 0)
            return
        except ConfigurationError as error:
            errors.append(error)
    raise errors[0]


def config_of(
    settings: Settings, study: tuple[str, str], point: Mapping[str, Any], seed: int
) -> RunConfig:
    """Return the run at a point, of a method and start: one that looks at the validation split alone."""
    laid: dict[str, Any] = {}
    for name, value in point.items():
        table, dot, entry = name.partition(".")
        if dot:
            laid.setdefault(table, {})[entry] = value
        elif name not in (RATE, DECAY):
            laid[name] = value
    there = settings
    if laid:
        own = "the settings of the sweep", plain_values(settings)
        there = settings_from(own, ("--search", laid))
    if not 0 < point[RATE] < math.inf:
        raise ConfigurationError(f"The learning rate is {point[RATE]!r}: give a positive number.")
    if point.get(DECAY, 0) < 0:
        raise ConfigurationError(f"The weight decay is {point[DECAY]!r}: give 0 or more.")
    return there.run_config(
        *study,
        point[RATE],
        FIRST_TUNING_SEED + seed,
        evaluate_test=False,
        weight_decay=point.get(DECAY),
        epochs=there.epochs if "epochs" in point else there.tuning_epochs,
    )
