"""O13's text of distant XOR: how many passes networks need, by the step that the paper prints and by ours (its Fig. 3).

A network is trained until it has learned the text or its passes are spent, and looked at on the
way. Three texts are drawn from the same generator: one to train on, one to look at, which ends the
training, and one that decides nothing and is scored at the end. What a stopped command had trained
is in two files: the looks, and behind them the network, from which the training goes on as if it
had not been stopped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import CONFIG, Count, Natural, Several, known
from pathspace.experiments.recipes import Published
from pathspace.experiments.report import (
    NOTHING,
    Figure,
    Lines,
    Section,
    Table,
    grouped_rows,
    panels,
    published_section,
)
from pathspace.experiments.report.table import count
from pathspace.experiments.storage import make_folder, write_json
from pathspace.experiments.terminal import ProgressCallback, unheard

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from pathspace.sequences import PCNN, SequenceModel
    from pathspace.sequences.training import Training


# name -> options of `pathspace.sequences.PCNN`
STEPS: dict[str, dict[str, Any]] = {
    # as printed: eps = 1 on the diagonal of the metric
    "published": {"damping": 1.0},
    # only one symbol in 200 is predicted, so a damping of 1 hides the metric
    "ours": {"damping": 1e-6, "reach": 0.1},
}
FIRST_SEED = 1000


def _spelled(seeds: Any) -> Any:
    """Return the seeds that a number of them stands for: the first ones of the default."""
    return tuple(range(FIRST_SEED, FIRST_SEED + seeds)) if type(seeds) is int else seeds


@dataclass(frozen=True, config=CONFIG)
class Protocol:
    """The settings of the table.

    Attributes:
        steps: Rows, names in `STEPS`.
        seeds: Of graphs and start values; all of them are trained by all steps. A number stands for
            the first ones of the default.
        lines: Of each of the three texts.
        length: T; a line has from T to 1.1 T bits.
        units: Of every network, each joined to all.
        passes: After which a network that has not learned it has failed.
        every: Passes between two looks at the validation text.
        passed: Share of wrong lines there below which a network has learned it.
        data_seed: Decides the texts.
        own_texts: Whether each seed has texts of its own, as the paper's runs have, or all share
            theirs.
    """

    steps: Several[Annotated[str, known(STEPS)]] = tuple(STEPS)
    seeds: Annotated[Several[Natural], BeforeValidator(_spelled)] = tuple(
        range(FIRST_SEED, FIRST_SEED + 8)
    )
    lines: Count = 10_000
    length: Annotated[int, Field(ge=10)] = 100
    units: Count = 10
    passes: Count = 2000
    every: Count = 50
    passed: Annotated[float, Field(gt=0, le=1)] = 0.01
    data_seed: Natural = 21
    own_texts: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """A network: the kind of its steps, and the seed of its start."""

    steps: str
    seed: int

    @property
    def key(self) -> str:
        """A file name."""
        return f"{self.steps}-{self.seed}"


@dataclasses.dataclass(frozen=True)
class Look:
    """A look at a network: passes until then, share of wrong lines of the validation text, nats of a training line."""

    passes: int
    wrong: float
    nats: float


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of training a network.

    Attributes:
        looks: All of them; the last one says whether it has learned the text.
        test: Share of wrong lines of the test text, by the last parameters.
        seconds: Of training, processor time of one core or a little more.
    """

    cell: Cell
    looks: tuple[Look, ...]
    test: float
    seconds: float

    @property
    def words(self) -> str:
        """The result as one line of text."""
        cell = self.cell
        last = self.looks[-1]
        found = f"{last.wrong:.2%} wrong after {last.passes} passes, {self.seconds:.0f} s"
        return f"{cell.steps} steps, seed {cell.seed}: {found}"

    def learned(self, protocol: Protocol) -> bool:
        """Say whether the validation text was predicted well enough at the last look."""
        return self.looks[-1].wrong < protocol.passed


def cells(protocol: Protocol) -> list[Cell]:
    """Return all networks, in the order of the table."""
    return [Cell(steps, seed) for steps in protocol.steps for seed in protocol.seeds]


def fill(protocol: Protocol, do: Callable[..., list[Result]], folder: Path) -> list[Result]:
    """Return the results of all networks, which are kept until then; see `execution`."""
    kept = make_folder(folder / "networks")
    results = do(Result, cells(protocol), partial(compute, protocol=protocol, folder=kept))
    for file in kept.iterdir():
        file.unlink()
    return results


def compute(
    cell: Cell, protocol: Protocol, folder: Path, report: ProgressCallback = unheard
) -> Result:
    """Train a network, or go on with what is in the folder; the same numbers each time, on one machine and version."""
    from pathspace.sequences.tasks import xor

    text, watched, test = texts(cell, protocol)
    mask = xor.mask(text)
    network = folder / f"{cell.key}.safetensors"
    looks_file = folder / f"{cell.key}.json"
    model, looks = _kept(cell, protocol, network, looks_file)

    def told(training: Training) -> None:
        seen = f", {looks[-1].wrong:.2%} of the lines wrong" if looks else ""
        words = f"pass {training.passes}/{protocol.passes}{seen}"
        report(training.passes / protocol.passes, words)

    while not looks or (looks[-1].wrong >= protocol.passed and looks[-1].passes < protocol.passes):
        passes = min((looks[-1].passes if looks else 0) + protocol.every, protocol.passes)
        model.fit(text, mask=mask, passes=passes, resume=bool(looks), report=told)
        if looks and model.training_.passes == looks[-1].passes:
            break  # its next direction is not finite
        nats = -model.training_.log_likelihood / int(mask.sum())
        looks.append(Look(model.training_.passes, wrong_lines(model, watched), nats))
        write_json(looks_file, [asdict(look) for look in looks])
        model.save(network)
    return Result(cell, tuple(looks), wrong_lines(model, test), round(model.training_.seconds, 1))


def texts(cell: Cell, protocol: Protocol) -> tuple[str, str, str]:
    """Return the texts to train on, to look at, and to score at the end."""
    import numpy as np

    from pathspace.sequences.tasks import xor

    seeds = [protocol.data_seed, *([cell.seed] if protocol.own_texts else [])]
    generators = [np.random.default_rng([*seeds, which]) for which in (1, 2, 3)]
    training, watched, test = (xor.generate(g, protocol.lines, protocol.length) for g in generators)
    return training, watched, test


def _kept(
    cell: Cell, protocol: Protocol, network: Path, looks_file: Path
) -> tuple[PCNN, list[Look]]:
    """Return what an earlier command left, or a new network."""
    from pathspace.sequences import PCNN, load

    if not (network.exists() and looks_file.exists()):
        options = {"metric": "rbp", **STEPS[cell.steps]}
        return PCNN(protocol.units, None, seed=cell.seed, passes=protocol.passes, **options), []
    try:
        model = load(network)
        assert isinstance(model, PCNN)
        looks = [Look(**look) for look in json.loads(looks_file.read_text(encoding="utf-8"))]
    except (AssertionError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"What a stopped command left in {str(network)!r} cannot be read ({error}): delete it and start again."
        ) from error
    # the looks are written first: the last one may be ahead of the network
    return model, [look for look in looks if look.passes <= model.training_.passes]


def wrong_lines(model: SequenceModel, text: str) -> float:
    """Return the share of lines whose bit after "=" is predicted wrongly."""
    from pathspace.sequences.one_thread import one_thread
    from pathspace.sequences.passes import forward
    from pathspace.sequences.tasks import xor
    from pathspace.sequences.text import Corpus

    x = model.alphabet_.encode(text)
    corpus = Corpus.of([x], len(model.alphabet_), [xor.mask(text)])
    bits = model.alphabet_.encode("01")
    with one_thread():
        pi = forward(model.parameters_, corpus).pi
    return xor.error_rate(pi[:, bits], (corpus.expected == bits[1]).astype(int))


COLUMNS = ("steps", "seed", "learned after", "lines wrong", "on the third text", "seconds")


def build_table(protocol: Protocol, results: Sequence[Result]) -> Table:
    """Put the results into words, a row for each network and one for all of the same steps."""
    rows = []
    for steps in protocol.steps:
        found = [result for result in results if result.cell.steps == steps]
        rows += [_cells(protocol, result) for result in found]
        learned = sum(result.learned(protocol) for result in found)
        seconds = sum(result.seconds for result in found)
        rows.append((steps, "all", f"{learned} of {len(found)}", "", "", f"{seconds:.0f}"))
    title = f"Distant XOR, T = {protocol.length}: learned within {protocol.passes:,} passes"
    return Table(title, COLUMNS, grouped_rows(rows), notes(protocol))


def _cells(protocol: Protocol, result: Result) -> tuple[str, ...]:
    last = result.looks[-1]
    return (
        result.cell.steps,
        str(result.cell.seed),
        f"{last.passes:,} passes" if result.learned(protocol) else NOTHING,
        f"{last.wrong:.2%}",
        f"{result.test:.2%}",
        f"{result.seconds:.0f}",
    )


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
    columns = len(protocol.steps)
    figure, axes = panels((0.8 + 3.8 * columns, 3.4), columns, sharey=True)
    for axis, steps in zip(axes, protocol.steps, strict=True):
        for result in results:
            if result.cell.steps == steps:
                passes = [0, *(look.passes for look in result.looks)]
                # a start knows nothing
                wrong = [50.0, *(100 * look.wrong for look in result.looks)]
                axis.plot(passes, wrong, linewidth=1.2, label=str(result.cell.seed))
        axis.axhline(100 * protocol.passed, color="black", linewidth=1, linestyle=(0, (3, 2)))
        axis.set(title=f"{steps} steps", xlabel="pass", ylim=(0, 55), xlim=(0, protocol.passes))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("lines wrong, %")
    axes[-1].legend(title="seed", fontsize=7)
    return figure


def sections_of(
    protocol: Protocol, results: Sequence[Result], published: Published | None
) -> tuple[list[Section], dict[str, Any]]:
    """Return the sections of the report and its numbers; see `execution`."""
    looks = [(*astuple(result.cell), *astuple(look)) for result in results for look in result.looks]
    looks_csv = Lines(("steps", "seed", "passes", "wrong", "nats_a_line"), looks)
    figure = Figure("xor.png", partial(draw, protocol, results))
    table = build_table(protocol, results)
    sections = [Section("Results", table, "table.csv", figure, numbers={"looks.csv": looks_csv})]
    if published is not None:
        sections.append(published_section(published))
    learned = {
        steps: sum(one.learned(protocol) for one in results if one.cell.steps == steps)
        for steps in protocol.steps
    }
    return sections, {"learned": learned, "networks": [asdict(result) for result in results]}
