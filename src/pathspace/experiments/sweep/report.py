"""A sweep in words and a picture: the best point of every method, all points, what failed and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pathspace.experiments.methods import METHODS
from pathspace.experiments.report import (
    LINE_COLOURS,
    Figure,
    Lines,
    Report,
    Section,
    Table,
    TableRow,
    mark_lost,
    number_label,
    panels,
    titled_table,
)
from pathspace.experiments.report.table import count, digits_of
from pathspace.experiments.sweep.plan import DECAY, RATE, Plan
from pathspace.experiments.sweep.trials import Point, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

FAILURES_SHOWN = 12
LINES = ("-", "--", ":", "-.")  # of starts
TITLES = {RATE: "rate", DECAY: "decay"}
HOW = {
    "grid": "all of a grid",
    "random": "drawn at random",
    "tpe": "drawn by TPE, where earlier ones were good",
}


def points_of(found: Sweep) -> list[Point]:
    """Return the points of a sweep; one that was drawn twice is one."""
    by_values = {(p.method, p.start, tuple(sorted(p.point.items()))): p for p in found.points}
    return list(by_values.values())


def best_points(found: Sweep) -> list[Point]:
    """Return the point of the least mean error, then loss, of every method and start; the first one if none has any."""
    grouped: dict[tuple[str, str], list[Point]] = {}
    for point in points_of(found):
        grouped.setdefault((point.method, point.start), []).append(point)
    return [min(group, key=lambda point: point.score) for group in grouped.values()]


def best_table(found: Sweep) -> Table:
    """Return the best point of every method and start."""
    best = best_points(found)
    rows = [_cells(found, point) for point in best]
    return titled_table(found.task_description, rows, _notes(found, best))


def points_table(found: Sweep) -> Table:
    """Return all points."""
    points = points_of(found)
    runs = sum(len(point.runs) for point in found.points)
    title = f"{count(len(points), 'point')}, {count(runs, 'run')}"
    return titled_table(title, [_cells(found, point) for point in points])


def failures_table(found: Sweep) -> Table | None:
    """Return the first runs that failed or were pruned, with the reasons; None if there are none."""
    lost = [(point, run) for point in found.points for run in point.runs if run.reason]
    if not lost:
        return None
    rows = [
        {**_names(point), "seed": str(run.seed), "state": run.state, "reason": run.reason}
        for point, run in lost[:FAILURES_SHOWN]
    ]
    more = len(lost) - len(rows)
    notes = (f"And {more} more, in trials.csv.",) if more else ()
    cells = tuple(TableRow(tuple(row.values())) for row in rows)
    return Table("Runs without a result that counts, and why", tuple(rows[0]), cells, notes)


def _names(point: Point) -> dict[str, str]:
    """Return the cells that say which point it is, by the titles of their columns."""
    values = {TITLES.get(name, name): _shown(value) for name, value in point.point.items()}
    return {"optimizer": METHODS[point.method].label, "start": point.start, **values}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cells(found: Sweep, point: Point) -> dict[str, str]:
    """Return the cells of a point by the titles of their columns."""
    digits = digits_of(found.metric)
    cells = _names(point)
    if _at_edge(found.plan, point):
        cells[TITLES[RATE]] += "*"
    cells[f"validation {found.metric}"] = number_label(point.mean("error"), digits, point.deviation)
    cells["validation loss"] = number_label(point.mean("loss"), ".4g")
    cells["runs"] = str(len(point.runs))
    cells["failed"] = str(point.states["failed"])
    if found.plan.prune != "none":
        cells["pruned"] = str(point.states["pruned"])
    return cells


def _at_edge(plan: Plan, point: Point) -> bool:
    """Return whether the rate is the least or the greatest value of a list of several."""
    (rates,) = [dimension.values for dimension in plan.search if dimension.name == RATE]
    return len(rates) > 1 and point.point[RATE] in (min(rates), max(rates))


def _notes(found: Sweep, best: Sequence[Point]) -> tuple[str, ...]:
    plan, settings = found.plan, found.settings
    length = f" after {count(settings.tuning_epochs or settings.epochs, 'epoch')}"
    if any(dimension.name == "epochs" for dimension in plan.search):
        length = ""
    notes = [
        f"The best of {count(plan.trials, 'point')} for every optimizer and start ({HOW[plan.sampler]}), by the mean "
        f"validation {found.metric} over {count(settings.seeds, 'seed')}{length}. "
        "The test split was not looked at: `pathspace compare` reports.",
        "A point counts only if all of its runs came through.",
    ]
    if plan.prune == "median":
        notes.append(
            "Pruned, as asked for: points whose first run was worse than the median of earlier ones at the same step."
        )
    if any(_at_edge(plan, point) for point in best):
        notes.append("* at the edge of the list of rates: a wider one may do better.")
    states = sum((point.states for point in found.points), Counter())
    if set(states) != {"complete"}:
        notes.append(
            f"Of {count(states.total(), 'run')} {states['failed']} failed and {states['pruned']} were pruned; "
            "trials.csv and results.json have the reasons."
        )
    return tuple(notes)


def report(found: Sweep, *, title: str, configuration: dict[str, Any]) -> Report:
    """Return the report: the best points, all points, and what failed."""
    names = [dimension.name for dimension in found.plan.search]
    columns = ("method", "start", *names, "seed", "state", "validation_error", "validation_loss", "steps", "seconds",
               "reason")  # fmt: skip
    runs = [(point, run) for point in found.points for run in point.runs]
    lines = [
        (point.method, point.start, *(point.point[name] for name in names), run.seed, run.state, run.error, run.loss,
         run.steps, None if run.seconds is None else f"{run.seconds:.4f}", run.reason)
        for point, run in runs
    ]  # fmt: skip
    numbers = {"trials.csv": Lines(columns, lines)}
    figure = Figure("sweep.png", partial(draw, found))
    sections = [Section("Best settings", best_table(found), "table.csv", figure, numbers=numbers)]
    lost = failures_table(found)
    if lost is not None:
        sections.append(Section("Without a result", lost))
    sections.append(Section("All points", points_table(found), printed=False))
    results = {
        "task": found.task_description,
        "metric": found.metric,
        "best": [
            {
                "method": point.method,
                "label": METHODS[point.method].label,
                "start": point.start,
                "point": dict(point.point),
                "validation_error_mean": point.mean("error"),
                "validation_error_deviation": point.deviation,
                "validation_loss_mean": point.mean("loss"),
                "at_edge": _at_edge(found.plan, point),
            }
            for point in best_points(found)
        ],
        "trials": [
            {
                "method": point.method,
                "start": point.start,
                "point": dict(point.point),
                "seed": run.seed,
                "state": run.state,
                "validation_error": run.error,
                "validation_loss": run.loss,
                "pruned_at": run.steps if run.state == "pruned" else None,
                "reason": run.reason,
            }
            for point, run in runs
        ],
        "configuration": configuration,
    }
    return Report(title, sections, configuration, results)


def draw(found: Sweep) -> Drawing:
    """Draw error and loss over the rate (or what else varies): every run a dot, lines through the best means."""
    figure, axes = panels((10.5, 4.2), 2)
    points = points_of(found)
    name = _varied(found)
    for axis, what in zip(axes, ("error", "loss"), strict=True):
        _panel(axis, found, points, name, what)
        _label_axes(axis, found, points, name, what)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _varied(found: Sweep) -> str:
    """Return what the horizontal axis shows: the rate, or the first number that varies where the rate does not."""
    for dimension in sorted(found.plan.search, key=lambda d: d.name != RATE):
        values = {point.point[dimension.name] for point in found.points}
        if len(values) > 1 and all(type(value) in (int, float) for value in values):
            return dimension.name
    return RATE


def _panel(axis: Axes, found: Sweep, points: Sequence[Point], name: str, what: str) -> None:
    """Draw error or loss over what varies: a dot for each run, and what failed or was pruned at the upper edge."""
    starts = found.settings.starts
    for number, method in enumerate(found.settings.methods):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        for place, start in enumerate(starts):
            own = [point for point in points if (point.method, point.start) == (method, start)]
            label = METHODS[method].label + (f", {start}" if len(starts) > 1 else "")
            for point in own:
                values = point.values(what)
                axis.plot([point.point[name]] * len(values), values, ".", alpha=0.5, color=colour)
            best = _best_means(own, name, what)
            line = LINES[place % len(LINES)]
            axis.plot(list(best), list(best.values()), line, label=label, color=colour)
            for state, mark in (("failed", "x"), ("pruned", "v")):
                lost = [point.point[name] for point in own if point.states[state]]
                mark_lost(axis, lost, number, mark, colour)


def _best_means(points: Sequence[Point], name: str, what: str) -> dict[Any, float]:
    """Return the least mean over seeds at every place of the horizontal axis."""
    best: dict[Any, float] = {}
    for point in points:
        mean = point.mean(what)
        if mean is not None:
            x = point.point[name]
            best[x] = min(mean, best.get(x, math.inf))
    return dict(sorted(best.items()))


def _label_axes(axis: Axes, found: Sweep, points: Sequence[Point], name: str, what: str) -> None:
    """Name both axes, and make those logarithmic that span much."""
    axis.set_ylabel(f"validation {found.metric if what == 'error' else 'loss'}")
    title = TITLES.get(name, name).replace("rate", "learning rate")
    axis.set_xlabel(f"{title} (dot: a run; cross: failed; triangle: pruned)")
    places = [point.point[name] for point in points]
    low, high = min(places, default=0), max(places, default=0)
    if low > 0 and (name == RATE or high > 10 * low):
        axis.set_xlim(low / 1.5, high * 1.5)
        axis.set_xscale("log")
    least = min((value for point in points for value in point.values(what)), default=0)
    if least > 0 and (what == "loss" or found.metric != "error, %"):
        axis.set_yscale("log")
    axis.grid(alpha=0.25, which="both")
