"""The report of symbol sequences: the table in words, pairs of rows, and all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import mean, stdev
from typing import Any

from pathspace.experiments.published import Published
from pathspace.experiments.report.document import NOTHING, Figure, Report, Section, Table, TableRow
from pathspace.experiments.symbols.cells import Score, best, shown, texts
from pathspace.experiments.symbols.figures import draw, draw_over_time
from pathspace.experiments.symbols.pairs import as_json as pairs_as_json
from pathspace.experiments.symbols.pairs import pairs_of, pairs_table
from pathspace.experiments.symbols.protocol import BASELINES, MERGED, Protocol

BROKEN = "†"


def build_table(protocol: Protocol, scores: Sequence[Score], published: Published | None) -> Table:
    """Put the scores into words.

    Args:
        protocol: How they were made.
        scores: Of all sizes.
        published: The numbers of the paper for each text, under the text's name: the best, and those of one row, named
            as the method.
    """
    chosen = best(scores)
    rows: list[TableRow] = []
    before = ""
    for row in protocol.rows:
        group, variant = ("baseline", row) if row in BASELINES else row.split(", ")
        found = [[chosen[row, text, draw] for draw in range(protocol.seeds)] for text in protocol.texts]
        regrets = [_regret(draws) for draws in found]
        sizes = "/".join(
            ",".join(str(size or NOTHING) for size in sorted({score.cell.size for score in draws}))
            for draws in found
        )
        seconds = sum(score.seconds for score in scores if score.cell.row == row)
        shown = "" if group == before else group
        rows.append(TableRow((shown, variant, *regrets, sizes, f"{seconds:.0f}"), begins_method=bool(shown)))
        before = group
    broken = any(BROKEN in cell for row in rows for cell in row.cells)
    if published is not None:
        for name in dict.fromkeys(result.method for result in published.results):
            values = {
                result.label: f"{result.value:,.1f}"
                for result in published.results
                if result.method == name and result.value is not None
            }
            cells = (values.get(text, NOTHING) for text in protocol.texts)
            rows.append(
                TableRow(
                    ("" if name else "published", name or "the best", *cells, "", ""), begins_method=not name
                )
            )
    title = "Regret on a fresh text: bits beyond the true code length"
    columns = ("model", "variant", *protocol.texts, "size", "seconds")
    return Table(title, columns, tuple(rows), notes(protocol, published, broken=broken))


def _regret(draws: Sequence[Score]) -> str:
    bits, broken = [score.test for score in draws], BROKEN * any(score.broke_off for score in draws)
    if len(bits) == 1:
        return f"{bits[0]:,.1f}{broken}"
    return f"{mean(bits):,.1f} ± {stdev(bits):,.1f}{broken}"


def notes(protocol: Protocol, published: Published | None, *, broken: bool = False) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the table."""
    passes = ", ".join(f"{text} {protocol.passes[text]}" for text in protocol.texts)
    units, states, depths = (
        ", ".join(map(str, v)) for v in (protocol.units, protocol.states, protocol.depths)
    )
    found = [
        "A training, a validation and a test text of the same length were drawn for each column. The validation text "
        f"stopped the training and chose the size (networks {units} units, HMM as many states, dense HMM "
        f"{states}, contexts {depths}), and the test text was scored once. All rows have seen the training text.",
        f"Networks: {protocol.connectivity} edges leave a unit; at most so many passes: {passes}; "
        f"{_starts(protocol)}. The RNN takes the quasi-diagonal form of its metrics. Seconds: processor time of all "
        "sizes.",
    ]
    if protocol.seeds > 1:
        found.append(
            f"Mean ± standard deviation of {protocol.seeds} draws, each with texts, graphs and start values of its own."
        )
    if protocol.seconds:
        bounded = (text for text in protocol.texts if text in protocol.seconds)
        budgets = ", ".join(f"{text} {protocol.seconds[text]:g}" for text in bounded)
        found.append(
            f"Budget of work: at most so many processor seconds for one network of one size, from its first pass on, "
            f"with the passes that were undone: {budgets}."
        )
    if MERGED in protocol.rows:
        told = ", ".join(
            f"{text} {protocol.merged[text]['ensemble']} of {protocol.merged[text]['restarts']}"
            for text in protocol.texts
        )
        found.append(
            f"Merged: not in the paper. So many networks made one: {told}; half of them learned the training text and "
            "stopped on the validation text, the others the reverse, so that it has learned two texts where all "
            "other rows have learned one."
        )
    if broken:
        found.append(
            f"{BROKEN} the gradient overflowed and ended the training; the best parameters until then count."
        )
    if protocol.lengths:
        lengths = ", ".join(f"{text} {length}" for text, length in protocol.lengths.items())
        found.append(f"Shorter texts than the paper's: {lengths}.")
    if published is not None:
        found.append(f"Published: {published.source} {published.setting}")
    return tuple(found)


def _starts(protocol: Protocol) -> str:
    starts = [protocol.restarts.get(text, 1) for text in protocol.texts]
    if max(starts) == 1:
        return "1 start of each size"
    told = ", ".join(f"{text} {count}" for text, count in zip(protocol.texts, starts, strict=True))
    heat = f", of which the better quarter went on after {protocol.heat} passes" if protocol.heat else ""
    return f"starts of each size: {told}{heat}"


def sizes_table(protocol: Protocol, scores: Sequence[Score]) -> Table:
    """Return what every size came to."""
    lines = [
        (
            score.cell.text,
            score.cell.row,
            str(score.cell.size or NOTHING),
            f"{score.validation:,.1f}",
            f"{score.test:,.1f}",
            str(score.passes or NOTHING),
            str(score.tries or NOTHING),
            f"{score.seconds:.1f}",
            *((str(score.cell.draw),) if protocol.seeds > 1 else ()),
        )
        for text in protocol.texts
        for row in protocol.rows
        for score in sorted(scores, key=lambda score: (score.cell.draw, score.cell.size))
        if (score.cell.row, score.cell.text) == (row, text)
    ]
    columns = ("text", "model", "size", "validation", "test", "passes", "tries", "seconds")
    columns += ("draw",) if protocol.seeds > 1 else ()
    note = "Tries: passes with those that were undone. Validation chooses, test decides nothing."
    rows = tuple(TableRow(line) for line in lines)
    return Table("Bits beyond the true code length, of every size", columns, rows, (note,))


def samples(protocol: Protocol, scores: Sequence[Score]) -> tuple[tuple[str, str], ...]:
    """Return what the generator writes, and what the networks do that the validation text prefers, by text.

    Of the first draw.
    """
    chosen = best([score for score in scores if score.sample and not score.cell.draw])
    found = []
    for text in protocol.texts:
        candidates = [score for (_, of, _), score in chosen.items() if of == text]
        single = [score for score in candidates if score.cell.row != MERGED]
        found.append((f"{text}: the generator", shown(texts(text, protocol)[2])))
        for score in [
            *sorted(single, key=lambda score: score.validation)[:1],
            *(score for score in candidates if score.cell.row == MERGED),
        ]:
            found.append((f"{text}: {score.cell.row}, {score.cell.size} units", score.sample))
    return tuple(found) if chosen else ()


def as_json(
    protocol: Protocol, scores: Sequence[Score], configuration: dict[str, Any], published: Published | None
) -> dict[str, Any]:
    """Return all numbers as plain values."""
    chosen = best(scores)
    return {
        "unit": "bits beyond the true code length",
        "rows": [
            {
                "row": row,
                "text": text,
                "draw": draw,
                "size": chosen[row, text, draw].cell.size,
                "test": chosen[row, text, draw].test,
                "validation": chosen[row, text, draw].validation,
            }
            for row in protocol.rows
            for text in protocol.texts
            for draw in range(protocol.seeds)
        ],
        "pairs": pairs_as_json(pairs_of(protocol, scores)),
        "scores": [asdict(score) for score in scores],
        "published": None
        if published is None
        else {
            "source": published.source,
            "results": [{"text": r.label, "row": r.method, "value": r.value} for r in published.results],
        },
        "configuration": configuration,
    }


def report(
    protocol: Protocol,
    scores: Sequence[Score],
    *,
    title: str,
    configuration: dict[str, Any],
    published: Published | None,
) -> Report:
    """Return the report: the table, of several draws pairs of rows, and all sizes."""
    table = build_table(protocol, scores, published)
    figure = Figure("symbols.png", partial(draw, protocol, scores, published))
    sections = [Section("Results", table, "table.csv", figure, samples=samples(protocol, scores))]
    if pairs := pairs_of(protocol, scores):
        compared = pairs_table(protocol, pairs)
        sections.append(Section(compared.title, compared, "pairs.csv"))
    over_time = None
    if any(score.curve for score in scores):
        over_time = Figure("validation.png", partial(draw_over_time, protocol, scores))
    sections.append(Section("All sizes", sizes_table(protocol, scores), figure=over_time, printed=False))
    return Report(title, sections, configuration, as_json(protocol, scores, configuration, published))
