import gzip
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pathspace.experiments.executor import Executor, ThisProcess
from pathspace.experiments.methods import METHODS
from pathspace.experiments.run import RunConfig
from pathspace.experiments.settings import Settings, settings_from
from pathspace.experiments.tasks import build_task, corpora
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.workers import Workers
from processes import copies

# Real training, a hundredth of a second long.
TINY: dict[str, Any] = {
    "task": "adding",
    "task_options": {"length": 6, "train_size": 64, "validation_size": 32, "test_size": 32},
    "model_options": {"hidden": 6},
    "methods": ["sgd", "path-sgd", "balanced-adam"],
    "learning_rates": [0.01, 0.1],
    "seeds": 2,
    "epochs": 2,
    "batch_size": 16,
    "momentum": 0.0,
    "clip_norm": 0.0,
}


@pytest.fixture
def tiny_settings() -> Callable[..., Settings]:
    return lambda **changes: settings_from(("a test", {**TINY, **changes}))


@pytest.fixture
def tiny_task() -> Task:
    return build_task("adding", TINY["task_options"])


@pytest.fixture
def tiny_config(tiny_settings: Callable[..., Settings]) -> Callable[..., RunConfig]:
    def make(
        method: str = "sgd", start: str = "balanced", rate: float = 0.05, seed: int = 0, **changes: Any
    ) -> RunConfig:
        if METHODS[method].normalizes:
            changes.setdefault("model", "mlp")
        return tiny_settings(**changes).run_config(method, start, rate, seed, evaluate_test=True)

    return make


class Copies(Workers):
    """Workers that start at once."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        self._context = copies()


class Lasting(Copies):
    """Workers that outlast a `with` statement."""

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Workers]:
    """Two processes for all tests that let none of them die."""
    workers = Lasting(2)
    yield workers
    Workers.__exit__(workers)


@pytest.fixture(params=["this process", "two workers"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return ThisProcess() if request.param == "this process" else request.getfixturevalue("two_workers")


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("PATHSPACE_DATA")
    if not folder or not (Path(folder) / "mnist").exists():
        pytest.skip("PATHSPACE_DATA does not name a folder with the real MNIST files")
    return Path(folder)


def digests(*contents: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)


CHARACTER_FILES = [b"a _ b a b _ \n b ", b"a b b a \n b a ", b"b b a _ a a b a "]
WORD_FILES = [b" the cat <unk> \n \n the end \n", b" the end \n the cat \n", b" cat the \n end the cat \n"]


@pytest.fixture
def tiny_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with texts of a few symbols, and their digests in place of the known ones."""
    (tmp_path / "ptb").mkdir()
    characters, words = corpora.CHARACTERS["ptb"], corpora.WORDS["ptb"]
    for name, content in zip(characters.files, CHARACTER_FILES, strict=True):
        (tmp_path / "ptb" / name).write_bytes(gzip.compress(content))
    for name, content in zip(words.files, WORD_FILES, strict=True):
        (tmp_path / "ptb" / name).write_bytes(content)
    monkeypatch.setitem(corpora.CHARACTERS, "ptb", replace(characters, digests=digests(*CHARACTER_FILES)))
    monkeypatch.setitem(corpora.WORDS, "ptb", replace(words, digests=digests(*WORD_FILES)))
    return tmp_path
