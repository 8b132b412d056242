"""Studies: what a recipe measures besides its comparison.

A study is a function `(comparison, monitor, *, data_dir, **options)` that returns sections for the
report of the comparison. A recipe names it in its table `[study]`:

    [study]
    name = "second-term"
    [study.small]       # options of this size
    hidden = [50, 200]  # why
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import nn

import pathspace
from pathspace.experiments.compare import Comparison
from pathspace.experiments.engine import initial_state, run, steps_per_epoch
from pathspace.experiments.errors import unknown_name
from pathspace.experiments.layers import Count, Several
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import build_model
from pathspace.experiments.report import (
    NOTHING,
    Figure,
    Lines,
    Section,
    Table,
    lines_of,
    panels,
    set_log_axis,
    titled_table,
)
from pathspace.experiments.report.table import error_label
from pathspace.experiments.settings import Settings
from pathspace.experiments.storage import finite
from pathspace.experiments.tasks import build_task, check_options
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.terminal import UNHEARD, Monitor, Part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


SMALL_RATE = 1e-6  # every copy stays near the start while it is timed


@dataclass(frozen=True)
class Cost:
    """The cost of one method.

    Attributes:
        seconds: Of an epoch: the median turn, over its steps, times the steps of an epoch.
        ratio: The median of the ratios to the first method; `lower` and `upper` are their quartiles.
    """

    method: str
    seconds: float
    ratio: float
    lower: float
    upper: float


def cost(
    comparison: Comparison,
    monitor: Monitor = UNHEARD,
    *,
    rounds: Count = 15,
    steps: Count = 20,
    data_dir: Path | None = None,
) -> list[Section]:
    """Time an epoch of each method, as a ratio to the first one, SGD.

    All methods train copies of one network in one process and take turns of a few steps; in each
    round the time of a turn is divided by that of the first method's turn in the same round, and
    the figure is the median of these ratios. So what else the machine does falls on all of them
    alike. With one thread the time is the thread's own, from which other programs take less.

    Source: Path Space for Recurrent Neural Networks with ReLU Activations (2019), time per epoch.

    Args:
        comparison: Says which task, model and methods.
        monitor: Told before each round how far it is.
        rounds: Turns of every method.
        steps: Training steps of a turn.
        data_dir: Where the task looks for its data.
    """
    settings = comparison.settings
    task = build_task(settings.task, settings.task_options, data_dir=data_dir)
    costs = measure_costs(settings, task, rounds, steps, monitor)
    numbers = {
        "cost.csv": lines_of(costs),
        "cost.json": {"rounds": rounds, "steps": steps, "costs": [asdict(one) for one in costs]},
    }
    rows = [
        {
            "optimizer": METHODS[cost.method].label,
            "seconds": f"{cost.seconds:.3f}",
            f"beside {METHODS[costs[0].method].label}": f"{cost.ratio:.2f}",
            "quartiles": f"{cost.lower:.2f} to {cost.upper:.2f}",
        }
        for cost in costs
    ]
    heading = "Cost of an epoch"
    note = f"Medians over {rounds} rounds of {steps} steps a method, taken in turn; quartiles."
    return [Section(heading, titled_table(heading, rows, [note]), numbers=numbers)]


def measure_costs(
    settings: Settings, task: Task, rounds: int, steps: int, monitor: Monitor = UNHEARD
) -> list[Cost]:
    """Return the cost of every method of `settings`, in their order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            turns = {name: _turn(settings, task, name, steps) for name in settings.methods}
            for turn in turns.values():  # memory and caches
                turn()
            taken = []
            for k in range(rounds):
                monitor.advanced("cost", k / rounds, f"round {k + 1}/{rounds}")
                taken.append({name: turn() for name, turn in turns.items()})
    finally:
        torch.set_num_threads(threads)
    first = settings.methods[0]
    epoch = steps_per_epoch(settings.batch_size, task)
    costs = []
    for name in settings.methods:
        ratios = [row[name] / row[first] for row in taken]
        seconds = statistics.median(row[name] for row in taken) / steps * epoch
        # of a single round all three are its ratio
        several = ratios if rounds > 1 else 2 * ratios
        lower, middle, upper = statistics.quantiles(several, n=4, method="inclusive")
        costs.append(Cost(name, seconds, middle, lower, upper))
    return costs


def _turn(settings: Settings, task: Task, name: str, steps: int) -> Callable[[], float]:
    """Return a function that takes `steps` training steps, as runs do, and returns the seconds they took."""
    torch.manual_seed(0)
    config = settings.run_config(name, settings.starts[0], SMALL_RATE, 0, evaluate_test=False)
    state = initial_state(config, task, METHODS[name])
    model = state.model
    optimizer = state.optimizer
    clip_norm = None if METHODS[name].clips_itself else config.clip_norm
    inputs = task.train.inputs[: settings.batch_size]
    targets = task.train.targets[: settings.batch_size]
    clock = time.thread_time if settings.threads == 1 else time.perf_counter

    def turn() -> float:
        began = clock()
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
        return clock() - began

    return turn


SHORT_STEPS = {"default": "path-sgd-short", "identity": "irnn-path-sgd-short"}
RECURRENT = "rnn.weight_hh_l0"


@dataclass(frozen=True)
class Ratio:
    """The ratio of one network of H hidden units at one length T, from a start.

    Attributes:
        before: The ratio at the start; the mean over the seeds. None where a term is not finite
            even in float64, as where a network grows from step to step.
        after: The ratio after training, first seed; None where training diverged, too.
    """

    start: str
    hidden: int
    length: int
    before: float | None
    after: float | None


def second_term(
    comparison: Comparison,
    monitor: Monitor = UNHEARD,
    *,
    lengths: Several[Annotated[int, Field(ge=2)]] = (10, 20, 50, 100),
    hidden: Several[Count] = (50, 200),
    data_dir: Path | None = None,
) -> list[Section]:
    """Measure the second term of kappa beside the first one, over the length T and the number H of units.

        ratio = |kappa2(W_rec)| / |kappa1(W_rec)|      Frobenius norms, W_rec the (first) recurrent matrix

    before and after training as Path-SGD was trained in the comparison, from PyTorch's
    initialisation and from the identity start. kappa depends on T and on the weights, not on data,
    so that weights trained at one length give a ratio at every length.

    Source: B. Neyshabur, Y. Wu, R. Salakhutdinov and N. Srebro (2016), Section 5.1, who leave the
    second term out for its size.

    Args:
        comparison: Of a task and a budget, whose learning rates of `path-sgd-short` and
            `irnn-path-sgd-short` are taken; a start whose method is not among its methods is left
            out.
        monitor: Told how far each training is.
        lengths: T, each at least 2.
        hidden: H.
        data_dir: Where the task looks for its data.
    """
    methods = comparison.settings.methods
    starts = [start for start, method in SHORT_STEPS.items() if method in methods]
    if not starts:
        names = ", ".join(SHORT_STEPS.values())
        needed = f"It was not measured: it needs one of the methods {names}."
        return [Section("Second term", Table("The ratio of the terms", (), (), (needed,)))]
    rows = []
    for number, (start, units) in enumerate(product(starts, hidden)):
        part = Part(monitor, f"{start} start, H = {units}", number, len(starts) * len(hidden))
        rows += measure_ratios(comparison, start, lengths, units, data_dir, part)
    numbers = {
        "second-term.csv": lines_of(rows),
        "second-term.json": {"ratios": [asdict(row) for row in rows]},
    }
    figure = Figure("second-term.png", partial(_draw_ratios, rows))
    sections = [
        Section(f"Second term, {start} start", _ratios_table(start, rows)) for start in starts
    ]
    sections[-1] = replace(sections[-1], figure=figure, numbers=numbers)
    return sections


def measure_ratios(
    comparison: Comparison,
    start: str,
    lengths: Sequence[int],
    hidden: int,
    data_dir: Path | None,
    monitor: Monitor,
) -> list[Ratio]:
    """Return the ratios of a start at one H and every T."""
    settings = comparison.settings
    method = SHORT_STEPS[start]
    task = build_task(settings.task, settings.task_options, data_dir=data_dir)
    first = settings.starts[0]
    chosen = comparison.choices[method, first].learning_rate
    name, options = settings.model_of(method)
    options = {**options, "hidden": hidden}
    fresh = []
    for seed in range(settings.seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(name, task.input_size, task.output_size, options)
        fresh.append(ratios(model, lengths))
    before = [None if None in c else statistics.fmean(c) for c in zip(*fresh, strict=True)]
    after: list[float | None] = []
    config = settings.run_config(method, first, chosen, 0, evaluate_test=False)
    result = run(
        replace(config, model_options=options),
        task,
        listener=monitor,
        finished=lambda model: after.extend(ratios(model, lengths)),
    )
    if result.diverged_at is not None:
        after = [None] * len(lengths)
    found = zip(lengths, before, after, strict=True)
    return [Ratio(start, hidden, *each) for each in found]


def ratios(model: Any, lengths: Sequence[int]) -> list[float | None]:
    """Return |kappa2| / |kappa1| of the recurrent matrix at every length; None where one of them is not finite.

    The model is a recurrent one of `models.MODELS`, the lengths T are at least 2.
    """
    found: list[float | None] = []
    for length in lengths:
        example = torch.zeros(2, length, dtype=torch.int64)
        if model.embedding is None:
            example = torch.zeros(2, length, model.symbols)
        network = pathspace.trace(model, example)
        try:
            second = pathspace.paths.second_term(network)[RECURRENT].double()
            first = pathspace.paths.kappa(network)[RECURRENT].double()
        except FloatingPointError:
            found.append(None)
        else:
            found.append(finite((second.norm() / first.norm()).item()))
    return found


def _ratios_table(start: str, rows: Sequence[Ratio]) -> Table:
    lines: dict[int, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: (row.hidden, row.length)):
        if row.start == start:
            values = ("not finite" if v is None else f"{v:.2g}" for v in (row.before, row.after))
            cells = lines.setdefault(row.hidden, {"H": str(row.hidden)})
            cells[f"T = {row.length}"] = " > ".join(values)
    title = f"|kappa2| / |kappa1| of the recurrent matrix, {start} start: before > after training"
    note = (
        "Before: mean over the seeds. After: training as above, one seed. Not finite: training diverged, or a term "
        "exceeds float64."
    )
    return titled_table(title, list(lines.values()), [note])


def _draw_ratios(rows: Sequence[Ratio]) -> Drawing:
    starts = list(dict.fromkeys(row.start for row in rows))
    figure, axes = panels((4.2 * len(starts), 3.4), len(starts), sharey=True)
    for axis, start in zip(axes, starts, strict=True):
        for number, units in enumerate(sorted({row.hidden for row in rows})):
            chosen = [row for row in rows if (row.start, row.hidden) == (start, units)]
            lengths = [row.length for row in chosen]
            for name, style in (("before", "o--"), ("after", "o-")):
                values = [getattr(row, name) for row in chosen]
                shown = [math.nan if value is None else value for value in values]
                axis.plot(lengths, shown, style, color=f"C{number}", label=f"H = {units}, {name}")
        axis.set(title=f"{start} start", xlabel="length T", xscale="log", yscale="log")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("|kappa2| / |kappa1|, recurrent matrix")
    axes[-1].legend()
    return figure


USES = ("normalization", "steepest descent")
# measure -> the method that normalizes by it, the method that descends along it
MEASURES: dict[str, tuple[str, str]] = {
    "none": ("", "sgd"),
    "D": ("path-norm", "path-sgd"),
    "(D + M) / 2": ("ddp-norm", "ddp-sgd"),
    "(D + C) / 2": ("ddp-norm-centred", "ddp-sgd-centred"),
    "M": ("moment-norm", "diagonal-natural"),
    "M, quasi-diagonal": ("", "quasi-diagonal"),
    "M, whole": ("", "natural"),
    "C": ("batch-norm", "covariance-sgd"),
}


@dataclass(frozen=True)
class Entry:
    """One cell of the table: a measure, its use, and the method that has both.

    Attributes:
        errors: By start, the mean test error at the rate chosen from it; None where a run diverged.
        labels: The same in words, with the deviation.
        same_curve: Whether two training curves from different starts at one rate are the same to
            the last bit; None where none were compared.
        difference: The largest difference of two such curves; None if one of them diverged and the
            other did not, or none were compared.
        milliseconds: The median time of a step.
    """

    measure: str
    use: str
    method: str
    errors: dict[str, float | None]
    labels: dict[str, str]
    same_curve: bool | None
    difference: float | None
    milliseconds: float


def unification(
    comparison: Comparison, monitor: Monitor = UNHEARD, *, data_dir: Path | None = None
) -> list[Section]:
    """Arrange a comparison as the table of D16: what measures a node, times what the measure is used for.

    Each measure R of a node's incoming weights can normalize the node (SGD on w~, w = w~ / gamma~)
    or give the metric of steepest descent. For both uses: the test error from the first start and,
    at a rate of its own, from the others; whether the training curves from all starts are the same;
    the time of a step.

    Source: B. Neyshabur, R. Tomioka, R. Salakhutdinov and N. Srebro (2016), Data-Dependent Path
    Normalization in Neural Networks, Table 1.

    Args:
        comparison: With some of the methods in `MEASURES`.
        monitor: Not needed: nothing is computed.
        data_dir: Not needed.
    """
    del monitor, data_dir
    found = entries(comparison)
    heading = "By measure and use"
    if not found:
        known = ", ".join(name for pair in MEASURES.values() for name in pair if name)
        why = f"It arranges the methods {known}, and none of them was compared."
        return [Section(heading, Table("No table by measure and use", (), (), (why,)))]
    starts = comparison.settings.starts
    lines = [
        (e.measure, e.use, e.method, *e.errors.values(), e.difference, e.milliseconds)
        for e in found
    ]
    columns = ("measure", "use", "method", *starts, "difference", "milliseconds")
    numbers = {
        "unification.csv": Lines(columns, lines),
        "unification.json": {"metric": comparison.metric, "cells": [asdict(e) for e in found]},
    }
    figure = Figure("unification.png", partial(_draw_measures, comparison, found))
    return [Section(heading, _measures_table(comparison, found), figure=figure, numbers=numbers)]


def entries(comparison: Comparison) -> list[Entry]:
    """Return the cells that the comparison has methods for."""
    found = []
    for measure, methods in MEASURES.items():
        for use, method in zip(USES, methods, strict=True):
            if method in comparison.settings.methods:
                found.append(_entry(comparison, measure, use, method))
    return found


def _entry(comparison: Comparison, measure: str, use: str, method: str) -> Entry:
    best = {start: comparison.own_row(method, start) for start in comparison.settings.starts}
    largest = comparison.differences.get(method)
    runs = [run for row in comparison.rows if row.method == method for run in row.runs]
    steps = [run.step_seconds for run in runs if run.step_seconds is not None]
    return Entry(
        measure,
        use,
        method,
        errors={start: row.mean_test_error for start, row in best.items()},
        labels={start: error_label(comparison, row) for start, row in best.items()},
        same_curve=None if largest is None else largest == 0.0,
        difference=finite(largest),
        milliseconds=round(1e3 * statistics.median(steps), 3) if steps else 0.0,
    )


def _measures_table(comparison: Comparison, found: Sequence[Entry]) -> Table:
    rows = [
        {
            "use": entry.use,
            "measure": entry.measure,
            "method": METHODS[entry.method].label,
            **entry.labels,
            "same curve": {None: NOTHING, True: "yes", False: "no"}[entry.same_curve],
            "ms a step": f"{entry.milliseconds:.2f}",
        }
        for entry in sorted(found, key=lambda entry: USES.index(entry.use))
    ]
    note = (
        "D: paths; M: second moment; C: covariance of what enters a node. Errors: each start at the rate that is best "
        "from it. Same curve: whether the training losses from all starts agree to the last bit at one rate."
    )
    return titled_table(f"Test {comparison.metric}, by measure and use", rows, [note])


def _draw_measures(comparison: Comparison, found: Sequence[Entry]) -> Drawing:
    measures = sorted({entry.measure for entry in found}, key=[*MEASURES].index)
    figure, axes = panels((8.4, 3.4), len(USES), sharey=True)
    names = [measure.replace(", ", ",\n").replace(" /", "\n/") for measure in measures]
    for axis, use in zip(axes, USES, strict=True):
        cells = {entry.measure: entry for entry in found if entry.use == use}
        for number, start in enumerate(comparison.settings.starts):
            _draw_errors(axis, [cells.get(m) for m in measures], start, number)
        axis.set_xticks(range(len(measures)), names)
        axis.set(title=use, xlabel="measure", xlim=(-0.6, len(measures) - 0.4))
        axis.grid(alpha=0.25, which="both")
    if any(error for entry in found for error in entry.errors.values()):  # one is above zero
        set_log_axis(axes[0])
    axes[0].set_ylabel(f"test {comparison.metric}")
    axes[-1].legend(title="start")
    return figure


def _draw_errors(axis: Axes, cells: Sequence[Entry | None], start: str, number: int) -> None:
    """Draw the errors from a start, which is the first one or another; none where a cell is missing."""
    errors = [None if cell is None else cell.errors[start] for cell in cells]
    values = [math.nan if error is None else error for error in errors]
    style: dict[str, Any] = {"marker": "o" if number == 0 else "x", "markersize": 11 - 3 * number}
    axis.plot(range(len(cells)), values, linestyle="", color=f"C{number}", label=start, **style)


STUDIES: dict[str, Callable[..., list[Section]]] = {
    "second-term": second_term,
    "cost": cost,
    "unification": unification,
}


def check_study(name: Any, options: Mapping[str, Any], where: str) -> None:
    """Raise a `ConfigurationError` unless there is such a study and it has these options."""
    if not isinstance(name, str) or name not in STUDIES:
        raise unknown_name("study", str(name), STUDIES, where)
    check_options(STUDIES[name], options, "the study", where)


def run_study(
    name: str,
    options: Mapping[str, Any],
    comparison: Comparison,
    data_dir: Path | None,
    monitor: Monitor = UNHEARD,
) -> list[Section]:
    """Do a study of a comparison; returns sections for the report."""
    check_study(name, options, f"the study {name!r}")
    return STUDIES[name](comparison, monitor, data_dir=data_dir, **options)
