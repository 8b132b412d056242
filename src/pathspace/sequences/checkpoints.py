"""Trainings that outlive their process: a folder of checkpoints, which the same fit goes on from.

fit.json              digest of what is fitted to what, so that another fit does not go on from here
heat-0.safetensors    the training of the first seed in the heat, as a model file; in the end: end-0
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspace
from pathspace.sequences import storage
from pathspace.sequences.folds import Fold
from pathspace.sequences.text import Alphabet
from pathspace.sequences.training import Report, Settings, Training, train
from pathspace.tools.files import check_writable, clear_leftovers, locked, write_atomically

SECONDS = 30.0  # between two checkpoints: a pass that takes longer is what is lost at most
_FIT = "fit.json"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The file of one training.

    Args:
        path: where.
        alphabet: of the texts.
        settings: how it is trained.
    """

    path: Path
    alphabet: Alphabet
    settings: Settings

    def write(self, training: Training) -> None:
        """Write the training, at once or not at all."""
        content = storage.dump(storage.Stored(training, self.alphabet, self.settings, {}))
        write_atomically(self.path, lambda file: file.write(content))

    def read(self, begin: Training) -> Training:
        """Return the training that was written, or the given one if none was."""
        if not self.path.exists():
            return begin
        try:
            return storage.load(self.path).training
        except storage.ModelFileError as error:
            raise ValueError(
                f"{error}; delete it, and the same fit trains this network anew"
            ) from error


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """The checkpoints of a fit.

    Args:
        folder: where; it must exist.
        alphabet: of the texts.
    """

    folder: Path
    alphabet: Alphabet

    def claim(
        self, fit: dict[str, Any], folds: Sequence[Fold], begin: Training | None = None
    ) -> None:
        """Write down which fit the folder belongs to.

        Args:
            fit: all arguments that decide the result.
            folds: the texts.
            begin: where the fit goes on from, if it does not begin anew.

        Raises:
            ValueError: if the folder holds the checkpoints of another one.
        """
        digest = hashlib.sha256(
            json.dumps([pathspace.__version__, fit, str(self.alphabet.symbols)]).encode()
        )
        for fold in folds:
            for corpus in (fold.corpus, fold.validation):
                for array in () if corpus is None else (corpus.x, corpus.bounds, corpus.chi):
                    digest.update(repr(array.shape).encode() + array.tobytes())
        if begin is not None:
            digest.update(storage.dump(storage.Stored(begin, self.alphabet, Settings(), {})))
        file = self.folder / _FIT
        stated = json.dumps({"sha256": digest.hexdigest()})
        if is_begun(self.folder) and (not file.exists() or file.read_text() != stated):
            raise ValueError(
                f"{self.folder} holds what is left of another fit, which was stopped: repeat that command to finish "
                "it, give another --output, or start over with --fresh"
            )
        write_atomically(file, lambda opened: opened.write(stated.encode()))

    def of(self, stage: str, number: int, settings: Settings) -> Checkpoint:
        """Return the checkpoint of one training of a stage."""
        return Checkpoint(self.folder / f"{stage}-{number}.safetensors", self.alphabet, settings)


def train_kept(
    training: Training,
    fold: Fold,
    settings: Settings,
    report: Report | None,
    kept: Checkpoint | None,
) -> Training:
    """Train as `train` does, go on from a checkpoint if there is one, and write it every half minute."""
    if kept is None:
        return train(training, fold.corpus, settings, fold.validation, report)
    training = last = kept.read(training)
    written = time.monotonic()

    def reported(now: Training) -> None:
        nonlocal last, written
        last = now
        if time.monotonic() - written >= SECONDS:
            kept.write(now)
            written = time.monotonic()
        if report is not None:
            report(now)

    try:
        last = train(training, fold.corpus, settings, fold.validation, reported)
    finally:
        if last.passes > training.passes:
            kept.write(last)
    return last


def is_begun(folder: Path) -> bool:
    """Say whether a folder holds a checkpoint."""
    return any(folder.glob("*.safetensors"))


def clear(folder: Path) -> None:
    """Delete the checkpoints in a folder."""
    for path in (*folder.glob("*.safetensors"), folder / _FIT):
        path.unlink(missing_ok=True)


@contextmanager
def beside(output: Path, fresh: bool = False) -> Iterator[Path | None]:
    """Keep checkpoints in a folder beside a model file until it is written, or, beside a device, none.

    Args:
        output: the model file, which must be complete when the block ends.
        fresh: whether to delete what another fit has left there.

    Raises:
        ValueError: if another process is fitting the same file.
    """
    target = check_writable(output)
    if target is None:
        yield None
        return
    folder = target.with_name(f"{target.name}.checkpoint")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the folder of checkpoints {folder} cannot be made ({error.strerror}): give another --output"
        ) from error
    try:
        with locked(folder) as alone:
            if not alone:
                raise ValueError(
                    f"another fit is writing {output}: wait until it is done, or give another --output"
                )
            clear_leftovers(folder)
            done = False
            try:
                if fresh:
                    clear(folder)
                yield folder
                done = True
            finally:
                if done or not is_begun(folder):
                    clear(folder)
    finally:
        with suppress(OSError):  # something is left in it
            folder.rmdir()
