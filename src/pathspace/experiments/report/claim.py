"""Every method against the best baseline, with intervals, as a table and as a figure.

The best baseline of a start is the one of the least mean validation error over the reported seeds:
choosing it by test errors would favour it. Differences are paired: a seed gives the same first
weights and the same batches to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathspace.experiments.compare import Choice, Comparison, Row
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report import Table, panels, titled_table
from pathspace.experiments.report.statistics import Interval, interval_label, t_interval
from pathspace.experiments.report.table import (
    count,
    devices_note,
    digits_of,
    early_end,
    given_rates,
    numbers,
    own_grids,
    rescaled_by,
    share_label,
)
from pathspace.experiments.run import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#1f5fa8", "marker": "o"},
    {"color": "#b3400e", "marker": "D", "markerfacecolor": "white"},
    {"color": "#55752f", "marker": "s", "markerfacecolor": "white"},
)
MARKS = {"better": "good", "worse": "bad", "failed": "bad"}
WIDE = 20  # errors further apart than this factor are drawn on a logarithmic axis


@dataclass(frozen=True)
class Standing:
    """Errors of one method from one start, at the rate and decay that were chosen from it.

    Attributes:
        error: Mean test error; None where a run failed or none looked at the test split.
        against: The best baseline of this start; None for that one itself, and where every baseline
            failed.
        difference: Test error minus that of `against`, paired by seeds; None where either is
            missing.
        milliseconds: The mean over the runs of the median time of a step.
        steps: To the target error, mean over the runs; None unless all runs reached it.
        seconds: The same, in time.
        reached: How many runs reached the target.
    """

    row: Row
    choice: Choice
    error: Interval | None
    against: str | None
    difference: Interval | None
    milliseconds: Interval | None
    steps: Interval | None
    seconds: Interval | None
    reached: int

    @property
    def verdict(self) -> str:
        """`"better"`, `"worse"`, `"failed"`, or nothing where the interval of the difference holds 0."""
        if self.failure:
            return "failed"
        return {-1: "better", 0: "", 1: "worse"}[self.difference.sign if self.difference else 0]

    @property
    def failure(self) -> str:
        """The number of runs that diverged, or else that ended no better than they began; empty if none did.

        A mean over seeds that holds such a run tells of that run alone: errors of 1e34 occur.
        """
        runs, diverged = self.row.runs, self.row.diverged
        failed = sum(run.failed for run in runs)
        word = "diverged" if failed == diverged else "failed"
        return share_label(word, failed, len(runs)) if failed else ""


def standings(comparison: Comparison) -> list[Standing]:
    """Return one standing per method and start, in the order of the table, start by start."""
    settings = comparison.settings
    found = []
    for start in settings.starts:
        rows = comparison.own_rows(start)
        baselines = [row for row in rows if row.method in settings.baselines]
        # of equals the one that the settings name first
        best = best_baseline(
            sorted(baselines, key=lambda row: settings.baselines.index(row.method))
        )
        found += [_standing(comparison, row, best) for row in rows]
    return found


def best_baseline(rows: Sequence[Row]) -> Row | None:
    """Return the row of the least mean validation error; None if every one has a run that failed."""
    means = [
        math.inf
        if any(run.failed for run in row.runs)
        else math.fsum(run.validation_score[0] for run in row.runs) / len(row.runs)
        for row in rows
    ]
    least = min(means, default=math.inf)
    return rows[means.index(least)] if math.isfinite(least) else None


def _standing(comparison: Comparison, row: Row, best: Row | None) -> Standing:
    target = comparison.settings.target_error
    other = None if best is row else best
    steps = [run.steps_to(target) for run in row.runs] if target else []
    seconds = [run.seconds_to(target) for run in row.runs] if target else []
    return Standing(
        row=row,
        choice=comparison.choices[row.method, row.start],
        error=_interval(_errors(row.runs)),
        against=None if other is None else other.method,
        difference=None if other is None else paired_difference(row, other),
        milliseconds=_interval(
            [None if run.step_seconds is None else 1e3 * run.step_seconds for run in row.runs]
        ),
        steps=_interval(steps),
        seconds=_interval(seconds),
        reached=sum(step is not None for step in steps),
    )


def paired_difference(one: Row, other: Row) -> Interval | None:
    """Return the mean difference of test errors, paired by seeds; None where a run of either failed."""
    pairs = zip(_errors(one.runs), _errors(other.runs), strict=True)
    return _interval([None if a is None or b is None else a - b for a, b in pairs])


def _errors(runs: Sequence[RunResult]) -> list[float | None]:
    return [None if run.failed else run.test_error for run in runs]


def _interval(values: Sequence[float | None]) -> Interval | None:
    """Return the interval of the mean; None as soon as one value is missing: a mean of the others would flatter."""
    there = [value for value in values if value is not None]
    return t_interval(there) if there and len(there) == len(values) else None


def claim_table(comparison: Comparison) -> Table:
    """Put the standings into words."""
    methods = comparison.settings.methods
    found = sorted(standings(comparison), key=lambda one: methods.index(one.row.method))
    errors = (f"test {comparison.metric}", "against best")
    marks = [dict.fromkeys(errors, MARKS[one.verdict]) if one.verdict else {} for one in found]
    rows = [_cells(comparison, one) for one in found]
    notes = _notes(comparison, found[0].choice.tried)
    return titled_table(comparison.task_description, rows, notes, marks)


def claim_sentences(comparison: Comparison) -> list[str]:
    """Say for each start which methods are better and worse than the best baseline."""
    here: dict[str, list[Standing]] = {}
    for standing in standings(comparison):
        here.setdefault(standing.row.start, []).append(standing)
    baselines = comparison.settings.baselines
    return [_verdict(start, found, baselines) for start, found in here.items()]


def _cells(comparison: Comparison, standing: Standing) -> dict[str, str]:
    """Return the cells of a standing by the titles of their columns."""
    row = standing.row
    choice = standing.choice
    target = comparison.settings.target_error
    digits = digits_of(comparison.metric)
    is_best = standing.against is None and row.method in comparison.settings.baselines
    against = "best"
    if not is_best or standing.failure:
        against = interval_label(standing.difference, f"+{digits}")
    cells = {
        "optimizer": METHODS[row.method].label,
        "start": row.start,
        "rate": f"{row.learning_rate:g}{'*' if choice.at_edge else ''}",
        "decay": f"{row.weight_decay:g}",
        f"test {comparison.metric}": standing.failure or interval_label(standing.error, digits),
        "against best": against,
    }
    if choice.tried:
        cells["failed"] = f"{choice.failed}/{choice.tried}"
    cells["ms/step"] = interval_label(standing.milliseconds, ".2f")
    if target:
        steps = f"{standing.reached} of {len(row.runs)}"
        if standing.steps is not None:
            steps = interval_label(standing.steps, ".0f")
        cells[f"steps to {target:g}"] = steps
        cells["seconds"] = interval_label(standing.seconds, ".1f")
    return cells


def _notes(comparison: Comparison, tried: int) -> list[str]:
    """Say what a reader has to know; rates and decays were chosen by so many runs each."""
    settings = comparison.settings
    pairs = "one after the other" if settings.tuning == "in turn" else "every pair"
    notes = [
        f"Means ± half of the 95 % interval (Student's t) over {count(settings.seeds, 'seed')}, after "
        f"{count(settings.epochs, 'epoch')} of batches of {settings.batch_size}{early_end(settings)}; "
        f"{settings.schedule} schedule, "
        f"{100 * settings.warmup:g} % warm-up, clip {settings.clip_norm:g}. Against best: the difference of test "
        "errors to the best baseline of the same start, paired by seeds; the best baseline is the one of the least "
        "validation error.",
    ]
    length = count(settings.tuning_epochs or settings.epochs, "epoch")
    if tried:
        notes += [
            "Rate and decay: the same grid for every method and start (rates "
            f"{numbers(settings.learning_rates)}; decays {numbers(settings.weight_decays)}; {pairs}), "
            f"{count(tried, 'run')} of {length} on other seeds, judged on the validation split. * at the edge of the "
            "grid. The column failed counts these runs.",
            *own_grids(settings),
        ]
    else:
        notes.append(f"{given_rates(settings)} Decay: {settings.weight_decays[0]:g}.")
    notes.append(
        "A run failed if it diverged, or ended with no less validation loss than it began with."
    )
    if "rescaled" in settings.starts:
        notes.append(rescaled_by(settings))
    same = [METHODS[name].label for name, apart in comparison.differences.items() if apart == 0.0]
    if same:
        how = f"on {count(settings.verified_seeds or settings.seeds, 'seed')}"
        if settings.verified_seeds:
            how = f"checked {how} in runs of {length}; one run stands for all"
        notes.append(
            f"The same training curve from every start, to the last bit ({how}): {', '.join(same)}."
        )
    target = f"; to a validation error of {settings.target_error:g}, at the validations"
    timed = f"Time: the median step of a run, {count(settings.threads, 'thread')}"
    notes.append(f"{timed}{target if settings.target_error else ''}.")
    return notes + devices_note(comparison)


def _verdict(start: str, here: Sequence[Standing], baselines: Sequence[str]) -> str:
    best = next((s.against for s in here if s.against), None)
    if not baselines:
        return f"From the {start} start no baseline was run."
    if all(s.failure for s in here if s.row.method in baselines):
        return f"From the {start} start every baseline has a run that failed."
    if best is None:
        return f"From the {start} start there is one method only, and nothing to compare it with."
    words = {"better": "better", "worse": "worse", "": "no difference shown"}
    told = [f"{said}: {_labels(here, verdict, best) or 'none'}" for verdict, said in words.items()]
    if failed := _labels(here, "failed", best):
        told.append(f"not compared, a run failed: {failed}")
    return f"From the {start} start, against {METHODS[best].label} (the best baseline): {'; '.join(told)}."


def _labels(here: Sequence[Standing], verdict: str, best: str) -> str:
    """Name the methods but the best baseline of which a verdict holds."""
    found = [s.row.method for s in here if s.verdict == verdict and s.row.method != best]
    return ", ".join(METHODS[name].label for name in found)


def as_json(comparison: Comparison) -> list[dict[str, object]]:
    """Return the standings as plain values for JSON; intervals as [mean, low, high]."""
    return [
        {
            "method": s.row.method,
            "label": METHODS[s.row.method].label,
            "start": s.row.start,
            "learning_rate": s.row.learning_rate,
            "weight_decay": s.row.weight_decay,
            "test_error": _ends(s.error),
            "against": s.against,
            "difference": _ends(s.difference),
            "verdict": s.verdict,
            "tuning_runs": s.choice.tried,
            "tuning_failed": s.choice.failed,
            "milliseconds_per_step": _ends(s.milliseconds),
            "steps_to_target": _ends(s.steps),
            "seconds_to_target": _ends(s.seconds),
            "reached_target": s.reached,
        }
        for s in standings(comparison)
    ]


def _ends(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else interval.as_list()


def draw_claim(parts: Sequence[Comparison]) -> Figure:
    """Draw test errors with their intervals, one panel for each comparison."""
    most = max(len(part.settings.methods) for part in parts)
    figure, axes = panels((2.2 + 4.2 * len(parts), 1.3 + 0.33 * most), len(parts))
    for axis, part in zip(axes, parts, strict=True):
        _panel(axis, part)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _panel(axis: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    methods, starts = comparison.settings.methods, comparison.settings.starts
    found = standings(comparison)
    values = []
    for number, start in enumerate(starts):
        style = STYLES[number % len(STYLES)]
        here = [standing for standing in found if standing.row.start == start]
        shift = 0.28 * (number - (len(starts) - 1) / 2)
        axis.plot([], [], linestyle="", markersize=5, label=f"{start} start", **style)
        for standing in here:
            height = methods.index(standing.row.method) + shift
            if standing.error is None:
                axis.text(0.99, height, standing.failure, transform=axis.get_yaxis_transform(), ha="right", va="center",
                          color=style["color"], fontsize=7)  # fmt: skip
                continue
            mean, half = standing.error.mean, standing.error.half
            values.append(mean)
            axis.errorbar(
                mean, height, xerr=half if math.isfinite(half) else 0.0, markersize=5, **style
            )
    if values and min(values) > 0 and max(values) > WIDE * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(methods)), [METHODS[name].label for name in methods])
    axis.set_ylim(len(methods) - 0.5, -0.5)
    axis.set_xlabel(f"test {comparison.metric}, mean and 95 % interval")
    axis.set_title(comparison.task_description.split(" (")[0], fontsize=9)
    axis.grid(alpha=0.25, axis="x")
