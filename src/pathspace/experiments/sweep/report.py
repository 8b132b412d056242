"""A sweep in words and a picture: the best point of every method, all points, what failed and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pathspace.experiments.methods import METHODS
from pathspace.experiments.report.document import NOTHING, Figure, Lines, Report, Section, Table, TableRow
from pathspace.experiments.report.figures import COLOURS
from pathspace.experiments.report.table import count, digits_of
from pathspace.experiments.sweep.plan import DECAY, RATE, Plan
from pathspace.experiments.sweep.trials import Sweep, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

FAILURES_SHOWN = 12
LINES = ("-", "--", ":", "-.")  # of starts
TITLES = {RATE: "rate", DECAY: "decay"}


@dataclass(frozen=True)
class Point:
    """The runs at one point of the search, one for each seed that was taken."""

    method: str
    start: str
    point: Mapping[str, Any]
    trials: tuple[Trial, ...]

    def values(self, what: str) -> list[float]:
        """Return the last validation error or loss, whichever is asked for, of the runs that came through."""
        return [v for t in self.trials if t.state == "complete" and (v := getattr(t, what)) is not None]

    def mean(self, what: str) -> float | None:
        """Return the mean of `values`; None unless every run came through: a mean of the others would flatter."""
        values = self.values(what)
        return math.fsum(values) / len(values) if len(values) == len(self.trials) else None

    @property
    def error(self) -> float | None:
        """The mean error."""
        return self.mean("error")

    @property
    def loss(self) -> float | None:
        """The mean loss."""
        return self.mean("loss")

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation of the errors over seeds; None for a single one."""
        mean, errors = self.error, self.values("error")
        if mean is None or len(errors) < 2:
            return None
        return math.hypot(*(e - mean for e in errors)) / math.sqrt(len(errors) - 1)

    def count(self, state: str) -> int:
        """How many runs ended so."""
        return sum(trial.state == state for trial in self.trials)


def points_of(found: Sweep) -> list[Point]:
    """Return the points in the order of methods, starts and trials; a point that was drawn twice is one."""
    grouped: dict[Any, dict[int, Trial]] = {}
    for trial in found.trials:
        key = trial.method, trial.start, tuple(sorted(trial.point.items()))
        grouped.setdefault(key, {})[trial.seed] = trial
    return [
        Point(trials[0].method, trials[0].start, trials[0].point, tuple(trials))
        for trials in (list(by_seed.values()) for by_seed in grouped.values())
    ]


def best_points(points: Sequence[Point]) -> list[Point]:
    """Return the point of the least mean error, then loss, of every method and start; the first one if none has any."""
    best: dict[tuple[str, str], Point] = {}
    for point in points:
        there = best.setdefault((point.method, point.start), point)
        if _score(point) < _score(there):
            best[point.method, point.start] = point
    return list(best.values())


def _score(point: Point) -> tuple[float, float]:
    error, loss = point.error, point.loss
    return (math.inf if error is None else error, math.inf if loss is None else loss)


def best_table(found: Sweep) -> Table:
    """Return the best point of every method and start."""
    best = best_points(points_of(found))
    return Table(found.task_description, _columns(found), _rows(found, best), _notes(found, best))


def points_table(found: Sweep) -> Table:
    """Return all points."""
    points = points_of(found)
    title = f"{count(len(points), 'point')}, {count(len(found.trials), 'run')}"
    return Table(title, _columns(found), _rows(found, points), ())


def failures_table(found: Sweep) -> Table | None:
    """Return the first runs that failed or were pruned, with the reasons; None if there are none."""
    lost = [trial for trial in found.trials if trial.reason]
    if not lost:
        return None
    columns = ("optimizer", "start", *_titles(found.plan), "seed", "state", "reason")
    rows = [
        (METHODS[t.method].label, t.start, *_values(found.plan, t.point), str(t.seed), t.state, t.reason)
        for t in lost[:FAILURES_SHOWN]
    ]
    more = len(lost) - len(rows)
    notes = (f"And {more} more, in trials.csv.",) if more else ()
    shown = tuple(TableRow(cells) for cells in rows)
    return Table("Runs without a result that counts, and why", columns, shown, notes)


def _titles(plan: Plan) -> list[str]:
    return [TITLES.get(dimension.name, dimension.name) for dimension in plan.search]


def _values(plan: Plan, point: Mapping[str, Any]) -> list[str]:
    return [_shown(point[dimension.name]) for dimension in plan.search]


def _shown(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _columns(found: Sweep) -> tuple[str, ...]:
    what = (f"validation {found.metric}", "validation loss", "runs", "failed", "pruned")
    shown = what if found.plan.prune != "none" else what[:-1]
    return ("optimizer", "start", *_titles(found.plan), *shown)


def _rows(found: Sweep, points: Sequence[Point]) -> tuple[TableRow, ...]:
    digits, rows, before = digits_of(found.metric), [], ("", "")
    for point in points:
        error, deviation, loss = point.error, point.deviation, point.loss
        edge = "*" if _at_edge(found.plan, point) else ""
        names = _values(found.plan, point.point)
        names[_rate_index(found.plan)] += edge
        cells = [
            METHODS[point.method].label,
            point.start,
            *names,
            NOTHING
            if error is None
            else f"{error:{digits}}" + ("" if deviation is None else f" ± {deviation:{digits}}"),
            NOTHING if loss is None else f"{loss:.4g}",
            str(len(point.trials)),
            str(point.count("failed")),
        ]
        if found.plan.prune != "none":
            cells.append(str(point.count("pruned")))
        begins = (point.method, "") != before
        before = point.method, ""
        rows.append(TableRow(tuple(cells), begins_method=begins))
    return tuple(rows)


def _rate_index(plan: Plan) -> int:
    return [dimension.name for dimension in plan.search].index(RATE)


def _at_edge(plan: Plan, point: Point) -> bool:
    """Whether the rate is the least or the greatest value of a list of several."""
    values = plan.search[_rate_index(plan)].values
    return len(values) > 1 and point.point[RATE] in (min(values), max(values))


def _notes(found: Sweep, best: Sequence[Point]) -> tuple[str, ...]:
    plan, settings = found.plan, found.settings
    how = {
        "grid": "all of a grid",
        "random": "drawn at random",
        "tpe": "drawn by TPE, where earlier ones were good",
    }
    searched = any(dimension.name == "epochs" for dimension in plan.search)
    length = "" if searched else f" after {count(settings.tuning_epochs or settings.epochs, 'epoch')}"
    notes = [
        f"The best of {count(plan.trials, 'point')} for every optimizer and start ({how[plan.sampler]}), by the mean "
        f"validation {found.metric} over {count(settings.seeds, 'seed')}{length}. "
        "The test split was not looked at: `pathspace compare` reports.",
        "A point counts only if all of its runs came through.",
    ]
    if plan.prune == "median":
        notes.append(
            "Pruned, as asked for: runs worse than the median of earlier ones, with the same seed, at the same step."
        )
    if any(_at_edge(plan, point) for point in best):
        notes.append("* at the edge of the list of rates: a wider one may do better.")
    states = [trial.state for trial in found.trials]
    if set(states) != {"complete"}:
        notes.append(
            f"Of {count(len(states), 'run')} {states.count('failed')} failed and {states.count('pruned')} were pruned; "
            "trials.csv and results.json have the reasons."
        )
    return tuple(notes)


def report(found: Sweep, *, title: str, configuration: dict[str, Any]) -> Report:
    """Return the report: the best points, all points, and what failed."""
    names = [dimension.name for dimension in found.plan.search]
    columns = ("method", "start", *names, "seed", "state", "validation_error", "validation_loss", "steps", "seconds",
               "reason")  # fmt: skip
    numbers = {"trials.csv": Lines(columns, [_line(trial, names) for trial in found.trials])}
    figure = Figure("sweep.png", partial(draw, found))
    sections = [Section("Best settings", best_table(found), "table.csv", figure, numbers=numbers)]
    lost = failures_table(found)
    if lost is not None:
        sections.append(Section("Without a result", lost))
    sections.append(Section("All points", points_table(found), printed=False))
    return Report(title, sections, configuration, as_json(found, configuration))


def _line(trial: Trial, names: Sequence[str]) -> tuple[Any, ...]:
    run = trial.result
    return (
        trial.method, trial.start, *(trial.point[name] for name in names), trial.seed, trial.state, trial.error,
        trial.loss, len(run.losses) if run else trial.pruned_at,
        f"{run.seconds:.4f}" if run else None, trial.reason,
    )  # fmt: skip


def as_json(found: Sweep, configuration: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep as plain values for JSON, with None for what is missing or not finite."""
    return {
        "task": found.task_description,
        "metric": found.metric,
        "best": [
            {
                "method": point.method,
                "label": METHODS[point.method].label,
                "start": point.start,
                "point": dict(point.point),
                "validation_error_mean": point.error,
                "validation_error_deviation": point.deviation,
                "validation_loss_mean": point.loss,
                "at_edge": _at_edge(found.plan, point),
            }
            for point in best_points(points_of(found))
        ],
        "trials": [
            {
                "method": trial.method,
                "start": trial.start,
                "point": dict(trial.point),
                "seed": trial.seed,
                "state": trial.state,
                "validation_error": trial.error,
                "validation_loss": trial.loss,
                "pruned_at": trial.pruned_at,
                "reason": trial.reason,
            }
            for trial in found.trials
        ],
        "configuration": configuration,
    }


def draw(found: Sweep) -> Drawing:
    """Draw error and loss over the rate (or what else varies): every run a dot, lines through the best means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    points, name = points_of(found), _varied(found)
    for axis, what in zip(figure.subplots(1, 2), ("error", "loss"), strict=True):
        _panel(axis, found, points, name, what)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _varied(found: Sweep) -> str:
    """Return what the horizontal axis shows: the rate, or the first number that varies where the rate does not."""
    for dimension in sorted(found.plan.search, key=lambda d: d.name != RATE):
        values = {trial.point[dimension.name] for trial in found.trials}
        if len(values) > 1 and all(type(value) in (int, float) for value in values):
            return dimension.name
    return RATE


def _panel(axis: Axes, found: Sweep, points: Sequence[Point], name: str, what: str) -> None:
    shown: list[float] = []
    for number, method in enumerate(found.settings.methods):
        colour = COLOURS[number % len(COLOURS)]
        for start, line in zip(found.settings.starts, LINES * len(found.settings.starts), strict=False):
            mine = [p for p in points if (p.method, p.start) == (method, start)]
            runs = [(p.point[name], value) for p in mine for value in p.values(what)]
            shown += [value for _, value in runs]
            axis.plot(*(zip(*runs, strict=True) if runs else ((), ())), ".", color=colour, alpha=0.5)
            best: dict[Any, float] = {}
            for p in mine:
                mean = p.mean(what)
                if mean is not None:
                    best[p.point[name]] = min(mean, best.get(p.point[name], math.inf))
            label = METHODS[method].label + (f", {start}" if len(found.settings.starts) > 1 else "")
            axis.plot(sorted(best), [best[x] for x in sorted(best)], line, color=colour, label=label)
            for state, mark in (("failed", "x"), ("pruned", "v")):
                lost = [p.point[name] for p in mine for t in p.trials if t.state == state]
                # At the upper edge, first method above: what failed has no error to be drawn at.
                heights = [0.98 - 0.025 * number] * len(lost)
                axis.plot(
                    lost, heights, mark, markersize=5, color=colour, transform=axis.get_xaxis_transform()
                )
    axis.set_ylabel(f"validation {found.metric if what == 'error' else 'loss'}")
    axis.set_xlabel(
        f"{TITLES.get(name, name).replace('rate', 'learning rate')} (dot: a run; cross: failed; triangle: pruned)"
    )
    places = [trial.point[name] for trial in found.trials]
    if places and min(places) > 0 and (name == RATE or max(places) > 10 * min(places)):
        axis.set_xlim(min(places) / 1.5, max(places) * 1.5)
        axis.set_xscale("log")
    if shown and min(shown) > 0 and (what == "loss" or found.metric != "error, %"):
        axis.set_yscale("log")
    axis.grid(alpha=0.25, which="both")
