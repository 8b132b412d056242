"""The report of XOR: the table in words, and a figure after the paper's Fig. 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pathspace.experiments.published import Published
from pathspace.experiments.report.document import (
    NOTHING,
    Figure,
    Lines,
    Report,
    Section,
    Table,
    TableRow,
    published_section,
)
from pathspace.experiments.report.table import count
from pathspace.experiments.xor.cells import Result, passes_needed
from pathspace.experiments.xor.protocol import STEPS, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

COLUMNS = ("steps", "seed", "learned after", "lines wrong", "on the third text", "seconds")


def build_table(protocol: Protocol, results: Sequence[Result]) -> Table:
    """Put the results into words, a row for each network and one for all of the same steps."""
    rows = []
    for steps in protocol.steps:
        found = [result for result in results if result.cell.steps == steps]
        for number, result in enumerate(found):
            needed = passes_needed(result, protocol)
            cells = (
                steps,
                str(result.cell.seed),
                NOTHING if math.isinf(needed) else f"{needed:,.0f} passes",
                f"{result.looks[-1].wrong:.2%}",
                f"{result.test:.2%}",
                f"{result.seconds:.0f}",
            )
            rows.append(TableRow(cells, begins_method=number == 0))
        learned = sum(result.learned(protocol) for result in found)
        seconds = f"{sum(result.seconds for result in found):.0f}"
        rows.append(
            TableRow(
                (steps, "all", f"{learned} of {len(found)}", "", "", seconds), begins_method=False
            )
        )
    title = f"Distant XOR, T = {protocol.length}: learned within {protocol.passes:,} passes"
    return Table(title, COLUMNS, tuple(rows), notes(protocol))


def notes(protocol: Protocol) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the table."""
    options = "; ".join(
        f"{name}: {', '.join(f'{key} {value:g}' for key, value in STEPS[name].items())}"
        for name in protocol.steps
    )
    whose = " of its own for each seed" if protocol.own_texts else ""
    return (
        f"PCNN of {count(protocol.units, 'unit')}, each joined to all, QDH+RBP, from "
        f"{count(len(protocol.seeds), 'seed')} fixed beforehand. {options}.",
        f"Three texts of {protocol.lines:,} lines{whose}. Learned: at a look every {protocol.every} passes less than "
        f"{100 * protocol.passed:g} % of the lines of the second text are predicted wrongly; training ends there. The "
        "third text decided nothing. Seconds: of training.",
    )


def draw(protocol: Protocol, results: Sequence[Result]) -> Drawing:
    """Draw wrong lines over passes, a panel for each kind of steps and a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 3.8 * len(protocol.steps), 3.4), layout="constrained")
    axes = figure.subplots(1, len(protocol.steps), sharey=True, squeeze=False)[0]
    for axis, steps in zip(axes, protocol.steps, strict=True):
        for result in results:
            if result.cell.steps == steps:
                passes = [0, *(look.passes for look in result.looks)]
                # a start knows nothing
                wrong = [
                    50.0,
                    *(100 * look.wrong for look in result.looks),
                ]
                axis.plot(passes, wrong, linewidth=1.2, label=str(result.cell.seed))
        axis.axhline(100 * protocol.passed, color="black", linewidth=1, linestyle=(0, (3, 2)))
        axis.set(title=f"{steps} steps", xlabel="pass", ylim=(0, 55), xlim=(0, protocol.passes))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("lines wrong, %")
    axes[-1].legend(title="seed", fontsize=7)
    return figure


def as_json(
    protocol: Protocol, results: Sequence[Result], configuration: dict[str, Any]
) -> dict[str, Any]:
    """Return all numbers as plain values."""
    return {
        "learned": {
            steps: sum(r.learned(protocol) for r in results if r.cell.steps == steps)
            for steps in protocol.steps
        },
        "networks": [asdict(result) for result in results],
        "configuration": configuration,
    }


def report(
    protocol: Protocol,
    results: Sequence[Result],
    *,
    title: str,
    configuration: dict[str, Any],
    published: Published | None,
) -> Report:
    """Return the report of all networks."""
    looks = [
        (result.cell.steps, result.cell.seed, look.passes, look.wrong, look.nats)
        for result in results
        for look in result.looks
    ]
    numbers = {"looks.csv": Lines(("steps", "seed", "passes", "wrong", "nats_a_line"), looks)}
    figure = Figure("xor.png", partial(draw, protocol, results))
    sections = [
        Section("Results", build_table(protocol, results), "table.csv", figure, numbers=numbers)
    ]
    if published is not None:
        sections.append(published_section(published))
    return Report(title, sections, configuration, as_json(protocol, results, configuration))
