"""Long memory from identity-like starts, where PathMuon is ahead of its rivals balanced once.

Every cell is a run of a method at a rate from a seed; see `training`. All methods see the same
seeds, hence the same starts and batches, so every test is one of pairs. The report has a table in
words for each setting, and one figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathspace.experiments.long_memory.training import (
    METHODS,
    Cell,
    Protocol,
    Result,
    Setting,
    compute,
)
from pathspace.experiments.recipes import Published
from pathspace.experiments.report import (
    NOTHING,
    Figure,
    Lines,
    Section,
    Table,
    grouped_rows,
    number_label,
    set_rate_axis,
)
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test
from pathspace.experiments.settings import FIRST_TUNING_SEED
from pathspace.experiments.storage import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COLUMNS = (
    "metric", "method", "tuning runs", "window", "p of the window", "rate", "learned it", "p of what learned it",
    "median steps", "p of the steps", "diverged",
)  # fmt: skip
"""Of the file; a table has "p" for each p."""
COLOURS = {"muon": "#0072b2", "muon-hidden": "#cc79a7", "soap": "#d55e00", "adamw": "#009e73"}
CONTROLS = ("#000000", "#7f7f7f", "#cc79a7", "#e69f00", "#56b4e9")
LINES = {"path": "-", "balanced once": (0, (4, 1.5)), "the weights": (0, (1, 1.5)), "control": "-"}


MEASURED = {
    "learned": ("learns it on more seeds than", "on fewer than"),
    "steps": ("learns it sooner than", "later than"),
    "window": ("learns it at more rates than", "at fewer than"),
}
"""What methods are compared by, and the words for more and fewer."""


def settings(protocol: Protocol) -> list[Setting]:
    """Return all settings, in the order of the tables."""
    forms = product(protocol.lengths, protocol.hidden, protocol.problems)
    return [Setting(problem, length, hidden) for length, hidden, problem in forms]


def tuning_cells(protocol: Protocol, setting: Setting) -> list[Cell]:
    """Return the runs by which the rates of a setting are chosen."""
    rates = sorted(protocol.learning_rates)
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + protocol.tuning_seeds)
    return [Cell(setting, *each) for each in product(protocol.methods, rates, seeds)]


def reported_cells(protocol: Protocol, setting: Setting, rates: Mapping[str, float]) -> list[Cell]:
    """Return the runs that are reported, of every method at its rate."""
    each = product(protocol.methods, range(protocol.seeds))
    return [Cell(setting, method, rates[method], seed) for method, seed in each]


def by_rate(results: Sequence[Result], method: str) -> dict[float, list[Result]]:
    """Return all runs of a method by their rate."""
    found: dict[float, list[Result]] = {}
    for result in results:
        if result.cell.method == method:
            found.setdefault(result.cell.rate, []).append(result)
    return dict(sorted(found.items()))


def chosen_rate(results: Sequence[Result], method: str) -> float:
    """Return the rate with the most successful runs.

    Ties go to the fewest steps, a failure counting as all; where no run learned, to the least
    median error.
    """

    def order(item: tuple[float, list[Result]]) -> tuple[float, ...]:
        rate, runs = item
        steps = [run.steps for run in runs if run.steps is not None]
        errors = [math.inf if run.error is None else run.error for run in runs]
        return -len(steps), sum(steps), statistics.median_high(errors), rate

    return min(by_rate(results, method).items(), key=order)[0]


def fill(
    protocol: Protocol,
    do: Callable[..., list[Result]],
    folder: Path,  # noqa: ARG001
) -> dict[Setting, dict[str, Row]]:
    """Return the rows of all settings, choosing rates before the reported runs; see `execution`."""
    rows = {}
    of_protocol = partial(compute, protocol=protocol)
    for setting in settings(protocol):
        tuning = do(Result, tuning_cells(protocol, setting), of_protocol)
        rates = {method: chosen_rate(tuning, method) for method in protocol.methods}
        reported = do(Result, reported_cells(protocol, setting, rates), of_protocol)
        rows[setting] = compared(protocol, tuning, reported)
    return rows


@dataclass(frozen=True)
class Against:
    """Pairs of runs with the same seed in which a method, or else the reference, is better.

    Attributes:
        p: Of the exact sign test (for successes McNemar's), adjusted by Holm for all methods of the
            setting.
    """

    wins: int
    losses: int
    p: float

    @property
    def verdict(self) -> str:
        """Say "better", "worse" or "" of the method."""
        if self.p >= LEVEL:
            return ""
        return "better" if self.wins > self.losses else "worse"


@dataclass(frozen=True)
class Row:
    """The row of one method.

    Attributes:
        tuning: By rate how many runs learned the problem, on seeds that are not reported.
        rates_learned: For each of these seeds at how many rates it learned the problem.
        window: At how many rates at least half of the tuning runs learned it.
        learned: How many of the runs at the chosen rate learned it.
        median_steps: Their median steps; None where it is that of a run that never learned.
        against_reference: By what is compared, "learned", "steps" and "window"; empty for the
            reference.
        reported: The runs at the chosen rate.
    """

    rate: float
    tuning: Mapping[str, int]
    rates_learned: Sequence[int]
    window: int
    learned: int
    runs: int
    median_steps: float | None
    against_reference: Mapping[str, Against]
    reported: Sequence[Mapping[str, Any]]


def compared(
    protocol: Protocol, tuning: Sequence[Result], reported: Sequence[Result]
) -> dict[str, Row]:
    """Return the rows of a setting by method."""
    rows = {}
    measures: dict[str, dict[str, Sequence[float]]] = {what: {} for what in MEASURED}
    for method in protocol.methods:
        runs = [run for run in reported if run.cell.method == method]
        steps = [math.inf if run.steps is None else run.steps for run in runs]
        rows[method] = _row(by_rate(tuning, method), runs, steps)
        measures["learned"][method] = [math.isfinite(step) for step in steps]
        measures["steps"][method] = [-step for step in steps]  # never: minus infinity
        measures["window"][method] = rows[method].rates_learned
    for what, values in measures.items():
        for method, test in _against(values, protocol.reference).items():
            against = {**rows[method].against_reference, what: test}
            rows[method] = replace(rows[method], against_reference=against)
    return rows


def _row(
    tuning: Mapping[float, Sequence[Result]], runs: Sequence[Result], steps: Sequence[float]
) -> Row:
    """Return the row of a method, not compared yet; `steps` are infinite where a run never learned."""
    reported = [
        {"rate": run.cell.rate, "seed": run.cell.seed, "steps": run.steps, "error": run.error}
        for run in runs
    ]
    tried = {rate: [run.steps is not None for run in some] for rate, some in tuning.items()}
    return Row(
        rate=runs[0].cell.rate,
        tuning={f"{rate:g}": sum(learned) for rate, learned in tried.items()},
        rates_learned=[sum(of_seed) for of_seed in zip(*tried.values(), strict=True)],
        window=sum(2 * sum(learned) >= len(learned) for learned in tried.values()),
        learned=sum(map(math.isfinite, steps)),
        runs=len(runs),
        median_steps=finite(statistics.median(steps)),
        against_reference={},
        reported=reported,
    )


def _against(values: Mapping[str, Sequence[float]], reference: str) -> dict[str, Against]:
    """Return each method but the reference against it, by values of pairs, of which the greater is better."""
    signs: dict[str, tuple[int, int]] = {}
    for method in values:
        if method == reference:
            continue
        pairs = list(zip(values[method], values[reference], strict=True))
        signs[method] = (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    adjusted = holm([sign_test(*each) for each in signs.values()])
    tests = zip(signs.items(), adjusted, strict=True)
    return {method: Against(*each, p) for (method, each), p in tests}


def build_tables(protocol: Protocol, rows: Mapping[Setting, Mapping[str, Row]]) -> list[Table]:
    """Put the comparison into words, a table for each setting; the last one has the notes."""
    tables = []
    columns = tuple("p" if column.startswith("p of") else column for column in COLUMNS)
    for setting, found in rows.items():
        title = (
            f"{setting.problem.capitalize()}, T = {setting.length}, H = {setting.hidden}: learned in "
            f"{protocol.steps_per_length * setting.length:,} steps"
        )
        cells = grouped_rows(_cells(protocol, *item) for item in found.items())
        tables.append(Table(title, columns, cells, tuple(_verdicts(protocol, found))))
    last = tables[-1]
    return [*tables[:-1], replace(last, notes=(*last.notes, *notes(protocol)))]


def _cells(protocol: Protocol, name: str, row: Row) -> tuple[str, ...]:
    rates = protocol.learning_rates
    p = {what: _p(test.p) for what, test in row.against_reference.items()}
    edge = len(rates) > 1 and row.rate in (min(rates), max(rates))
    return (
        METHODS[name].group,
        METHODS[name].label,
        f"{sum(row.tuning.values())} of {len(rates) * protocol.tuning_seeds}",
        f"{row.window} of {len(rates)}",
        p.get("window", NOTHING),
        f"{row.rate:g}{'*' * edge}",
        f"{row.learned} of {row.runs}",
        p.get("learned", NOTHING),
        number_label(row.median_steps, ",.0f"),
        p.get("steps", NOTHING),
        str(sum(run["error"] is None for run in row.reported)),
    )


def _p(value: float) -> str:
    if value < 0.001:
        return "<0.001"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _verdicts(protocol: Protocol, rows: Mapping[str, Row]) -> list[str]:
    """Say against which methods the reference stands out, and in what."""
    reference = METHODS[protocol.reference].label
    sentences = []
    for what, (more, fewer) in MEASURED.items():
        found: dict[str, list[str]] = {"worse": [], "better": [], "": []}
        for name, row in rows.items():
            if row.against_reference:
                found[row.against_reference[what].verdict].append(METHODS[name].label)
        parts = [f"{more}: {'; '.join(found['worse']) or 'none'}"]
        parts += [f"{fewer}: {'; '.join(found['better'])}"] if found["better"] else []
        parts += [f"no difference shown: {'; '.join(found[''])}"] if found[""] else []
        sentences.append(f"{reference} {' | '.join(parts)}.")
    return sentences


def notes(protocol: Protocol) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the tables."""
    rates = ", ".join(f"{rate:g}" for rate in sorted(protocol.learning_rates))
    return (
        "A run starts from the identity, with PyTorch's input and output weights and zero biases; every step draws a "
        f"fresh batch of {protocol.batch_size}; cosine after {100 * protocol.warmup:g} % warm-up, clip "
        f"{protocol.clip_norm:g}, no decay, kappa every {protocol.refresh_every} steps, damping {protocol.damping:g}. "
        f"Learned: {protocol.test_size:,} test sequences have an error below 0.01 (multiplication 0.003), 6 % of what "
        "the best constant answer gets.",
        f"Tuning runs: how many of the runs learned it, {protocol.tuning_seeds} seeds at each rate ({rates}). Window: "
        "rates at which at least half of them did. Rate: the one of most successes, of equals of fewest steps; * at "
        f"the edge of the grid. All else: {protocol.seeds} other seeds at that rate; median steps over all of them, "
        "a failure being later than any success.",
        f"p: exact, against {METHODS[protocol.reference].label}, paired by seeds, adjusted for all methods of the "
        "table (Holm): McNemar's test for what learned it; the sign test for which learned it sooner, and for which "
        "learned it at more rates (tuning seeds).",
    )


def sections_of(
    protocol: Protocol,
    rows: Mapping[Setting, Mapping[str, Row]],
    published: Published | None,  # noqa: ARG001
) -> tuple[list[Section], dict[str, Any]]:
    """Return the tables of all settings, which are one CSV file, and the numbers; see `execution`."""
    tables = build_tables(protocol, rows)
    sections = [Section(table.title, table) for table in tables]
    lines = [
        (*asdict(setting).values(), *row.cells)
        for setting, table in zip(rows, tables, strict=True)
        for row in table.rows
    ]
    figure = Figure("long-memory.png", partial(draw, protocol, rows))
    numbers = {"table.csv": Lines(("problem", "T", "H", *COLUMNS), lines)}
    sections[0] = replace(sections[0], figure=figure, numbers=numbers)
    found = [
        {**asdict(setting), "methods": {name: asdict(row) for name, row in of_setting.items()}}
        for setting, of_setting in rows.items()
    ]
    return sections, {"settings": found, "reference": protocol.reference}


def draw(protocol: Protocol, rows: Mapping[Setting, Mapping[str, Row]]) -> Drawing:
    """Draw a line of two panels for each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.6 + 3.4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    rates = sorted(protocol.learning_rates)
    for (setting, found), (left, right) in zip(rows.items(), axes, strict=True):
        most = protocol.steps_per_length * setting.length
        for name, row in found.items():
            style = _style(protocol, name)
            steps = sorted(run["steps"] for run in row.reported if run["steps"] is not None)
            learned = [k / row.runs for k in range(len(steps) + 1)]
            label = METHODS[name].label
            left.step(
                [0, *steps, most], [*learned, learned[-1]], where="post", label=label, **style
            )
            shares = [learned / protocol.tuning_seeds for learned in row.tuning.values()]
            right.plot(rates, shares, marker="o", markersize=3, **style)
        left.set_title(f"{setting.problem}, T = {setting.length}, H = {setting.hidden}")
        left.set(xlabel="step", ylabel="reported runs that have learned it", xlim=(0, most))
        set_rate_axis(right, rates)
        right.set(xlabel="learning rate", ylabel="tuning runs that learned it")
        for axis in (left, right):
            axis.set_ylim(-0.03, 1.03)
            axis.grid(alpha=0.25)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _style(protocol: Protocol, name: str) -> dict[str, Any]:
    method = METHODS[name]
    line = LINES[method.group]
    if method.group == "control":
        controls = [other for other in protocol.methods if METHODS[other].group == "control"]
        colour = CONTROLS[controls.index(name)]
        return {"color": colour, "linewidth": 1.0, "linestyle": line}
    width = 2.2 if name == protocol.reference else 1.4
    alpha = 0.5 if 0 < method.power < 1 else 1.0
    return {"color": COLOURS[method.rule], "linewidth": width, "linestyle": line, "alpha": alpha}
