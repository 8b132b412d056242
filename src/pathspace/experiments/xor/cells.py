"""One network on the XOR text: trained until it has learned it or its passes are spent, and looked at on the way.

Three texts are drawn from the same generator: one to train on, one to look at, which ends the
training, and one that decides nothing and is scored at the end. What a stopped command had trained
is in two files: the looks, and behind them the network, from which the training goes on as if it
had not been stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.monitor import Report, unheard
from pathspace.experiments.storage import make_folder, write_json
from pathspace.experiments.xor.protocol import STEPS, Protocol

if TYPE_CHECKING:
    from pathspace.sequences import PCNN, SequenceModel
    from pathspace.sequences.training import Training


@dataclass(frozen=True)
class Cell:
    """What is to be trained: by which steps, from which start."""

    steps: str
    seed: int

    @property
    def key(self) -> str:
        """A file name."""
        return f"{self.steps}-{self.seed}"


@dataclass(frozen=True)
class Look:
    """What one look saw: passes until then, share of wrong lines of the validation text, nats of a training line."""

    passes: int
    wrong: float
    nats: float


@dataclass(frozen=True)
class Result:
    """What became of a network.

    Attributes:
        cell: Which one.
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
        """What came out, in a line."""
        cell, last = self.cell, self.looks[-1]
        return (
            f"{cell.steps} steps, seed {cell.seed}: {last.wrong:.2%} wrong after {last.passes} passes, "
            f"{self.seconds:.0f} s"
        )

    def learned(self, protocol: Protocol) -> bool:
        """Say whether the validation text was predicted well enough at the last look."""
        return self.looks[-1].wrong < protocol.passed


def cells(protocol: Protocol) -> list[Cell]:
    """Return all networks, in the order of the table."""
    return [Cell(steps, seed) for steps in protocol.steps for seed in protocol.seeds]


def fill(protocol: Protocol, do: Callable[..., list[Result]], folder: Path) -> list[Result]:
    """Return the results of all networks, which are kept until then; see `tables`."""
    kept = make_folder(folder / "networks")
    results = do(Result, cells(protocol), partial(compute, protocol=protocol, folder=kept))
    for file in kept.iterdir():
        file.unlink()
    return results


def compute(cell: Cell, protocol: Protocol, folder: Path, report: Report = unheard) -> Result:
    """Train, or go on; the same numbers each time, on one machine and version.

    Args:
        cell: Which network.
        protocol: How.
        folder: Where networks are kept until all are done.
        report: Told after each pass how far the training is.
    """
    from pathspace.sequences.tasks import xor

    text, watched, test = texts(cell, protocol)
    mask = xor.mask(text)
    network, looks_file = folder / f"{cell.key}.safetensors", folder / f"{cell.key}.json"
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

    drawn_from = [protocol.data_seed, cell.seed] if protocol.own_texts else [protocol.data_seed]
    generators = [np.random.default_rng([*drawn_from, which]) for which in (1, 2, 3)]
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


def passes_needed(result: Result, protocol: Protocol) -> float:
    """Return the passes at the first look that was good enough, infinity where none was."""
    return result.looks[-1].passes if result.learned(protocol) else math.inf
