"""The second term of kappa beside the first one, over the length T and the number H of units.

    ratio = |kappa2(W_rec)| / |kappa1(W_rec)|      Frobenius norms, W_rec the recurrent matrix of the (first) layer

before and after training, from PyTorch's initialisation and from the identity start. kappa depends
on T and on the weights, not on data, so that weights trained at one length give a ratio at every
length.

Source: B. Neyshabur, Y. Wu, R. Salakhutdinov and N. Srebro (2016), Section 5.1, who leave the
second term out for its size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

import pathspace
from pathspace.experiments.compare import Comparison
from pathspace.experiments.engine import run
from pathspace.experiments.layers import Count, Several
from pathspace.experiments.models import build_model
from pathspace.experiments.monitor import UNHEARD, Monitor, Part
from pathspace.experiments.report.document import Figure, Lines, Section, Table, TableRow
from pathspace.experiments.storage import finite
from pathspace.experiments.tasks import build_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

METHODS = {"default": "path-sgd-short", "identity": "irnn-path-sgd-short"}
RECURRENT = "rnn.weight_hh_l0"


@dataclass(frozen=True)
class Ratio:
    """The ratio of one network at one length.

    Attributes:
        start: `"default"` or `"identity"`.
        hidden: H.
        length: T.
        before: The ratio at the start; the mean over the seeds. None where a term is not finite
            even in float64, as where a network grows from step to step.
        after: The ratio after training, first seed; None where training diverged, too.
    """

    start: str
    hidden: int
    length: int
    before: float | None
    after: float | None


def study(
    comparison: Comparison,
    monitor: Monitor = UNHEARD,
    *,
    lengths: Several[Annotated[int, Field(ge=2)]] = (10, 20, 50, 100),
    hidden: Several[Count] = (50, 200),
    data_dir: Path | None = None,
) -> list[Section]:
    """Measure the ratios, training every network as Path-SGD was trained in the comparison.

    Args:
        comparison: Of a task and a budget, whose learning rates of `path-sgd-short` and
            `irnn-path-sgd-short` are taken; a start whose method is not among its methods is left
            out.
        monitor: Told how far each training is.
        lengths: T, each at least 2.
        hidden: H.
        data_dir: Where the task looks for its data.
    """
    starts = [start for start, method in METHODS.items() if method in comparison.settings.methods]
    if not starts:
        needed = f"It was not measured: it needs one of the methods {', '.join(METHODS.values())}."
        return [Section("Second term", Table("The ratio of the terms", (), (), (needed,)))]
    networks = [(start, units) for start in starts for units in hidden]
    rows = []
    for number, (start, units) in enumerate(networks):
        part = Part(monitor, f"{start} start, H = {units}", number, len(networks))
        rows += measure(comparison, start, lengths, units, data_dir, part)
    values = [asdict(row) for row in rows]
    numbers = {
        "second-term.csv": Lines(tuple(values[0]), [tuple(one.values()) for one in values]),
        "second-term.json": {"ratios": values},
    }
    figure = Figure("second-term.png", partial(_draw, rows))
    sections = [Section(f"Second term, {start} start", _table(start, rows)) for start in starts]
    sections[-1] = replace(sections[-1], figure=figure, numbers=numbers)
    return sections


def measure(
    comparison: Comparison,
    start: str,
    lengths: Sequence[int],
    hidden: int,
    data_dir: Path | None,
    monitor: Monitor,
) -> list[Ratio]:
    """Return the ratios of a start at one H and every T."""
    settings, method = comparison.settings, METHODS[start]
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

    Args:
        model: A recurrent model of `models.MODELS` that reads symbols or numbers.
        lengths: T, each at least 2.
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


def _table(start: str, rows: Sequence[Ratio]) -> Table:
    cells: dict[int, list[str]] = {}
    for row in sorted(rows, key=lambda row: (row.hidden, row.length)):
        if row.start == start:
            values = ("not finite" if v is None else f"{v:.2g}" for v in (row.before, row.after))
            cells.setdefault(row.hidden, [str(row.hidden)]).append(" > ".join(values))
    lines = tuple(TableRow(tuple(line)) for line in cells.values())
    title = f"|kappa2| / |kappa1| of the recurrent matrix, {start} start: before > after training"
    note = (
        "Before: mean over the seeds. After: training as above, one seed. Not finite: training diverged, or a term "
        "exceeds float64."
    )
    columns = ("H", *(f"T = {length}" for length in sorted({row.length for row in rows})))
    return Table(title, columns, lines, (note,))


def _draw(rows: Sequence[Ratio]) -> Drawing:
    from matplotlib.figure import Figure

    starts = list(dict.fromkeys(row.start for row in rows))
    figure = Figure(figsize=(4.2 * len(starts), 3.4), layout="constrained")
    axes = figure.subplots(1, len(starts), sharey=True, squeeze=False)[0]
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
