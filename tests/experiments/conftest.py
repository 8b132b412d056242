import gzip
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pathspace.experiments.engine import run
from pathspace.experiments.methods import METHODS
from pathspace.experiments.report import Report, Section, write_report
from pathspace.experiments.run import RunConfig
from pathspace.experiments.runner import Runner
from pathspace.experiments.settings import Settings, settings_from
from pathspace.experiments.tasks import build_task, corpora
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.terminal import Monitor
from pathspace.tools.processes import Processes
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


def asked(changes: Mapping[str, Any]) -> Settings:
    return settings_from(("a test", changes))


@pytest.fixture
def tiny_settings() -> Callable[..., Settings]:
    return lambda **changes: asked({**TINY, **changes})


@pytest.fixture
def tiny_task() -> Task:
    return build_task("adding", TINY["task_options"])


@pytest.fixture
def tiny_config(tiny_settings: Callable[..., Settings]) -> Callable[..., RunConfig]:
    def make(
        method: str = "sgd",
        start: str = "balanced",
        rate: float = 0.05,
        seed: int = 0,
        **changes: Any,
    ) -> RunConfig:
        if METHODS[method].normalizes:
            changes.setdefault("model", "mlp")
        return tiny_settings(**changes).run_config(method, start, rate, seed, evaluate_test=True)

    return make


class StopsAt(Monitor):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advanced(self, label: str, part: float, words: str) -> None:  # noqa: ARG002
        if words.startswith(f"step {self.step}/"):
            raise KeyboardInterrupt


def stopped(config: RunConfig, task: Task, folder: Path, step: int, **options: Any) -> None:
    """Begin a run, or go on, and stop it after a step; it has a checkpoint of that one unless others are asked for."""
    options = {"checkpoint_every": step, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathspace.experiments.engine.SECONDS_BETWEEN_REPORTS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            run(config, task, folder=folder, listener=StopsAt(step), **options)


class QuickPool(ProcessPoolExecutor):
    """Two processes that start at once; like joblib's, all of them are lost with one."""

    def __init__(self) -> None:
        super().__init__(2, mp_context=copies())

    @property
    def is_broken(self) -> bool:
        return bool(self._broken)

    def shutdown(
        self, wait: bool = True, *, cancel_futures: bool = False, kill_workers: bool = False
    ) -> None:
        if kill_workers:
            for process in list((self._processes or {}).values()):
                process.kill()
        super().shutdown(wait, cancel_futures=cancel_futures)


@pytest.fixture(scope="session")
def pools() -> Iterator[list[QuickPool]]:
    """The processes of all tests; the last pool is the one in use."""
    made: list[QuickPool] = []
    yield made
    for one in made:
        one.shutdown(kill_workers=True)


@pytest.fixture
def quick_processes(pools: list[QuickPool], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner with two processes, which start at once."""

    def pool(_self: Processes) -> QuickPool:
        if not pools or pools[-1].is_broken:
            pools.append(QuickPool())
        return pools[-1]

    monkeypatch.setattr(Processes, "_pool", pool)
    return Runner(processes=2)


@pytest.fixture(params=["this process", "two processes"])
def executor(request: pytest.FixtureRequest) -> Runner:
    return (
        Runner() if request.param == "this process" else request.getfixturevalue("quick_processes")
    )


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("PATHSPACE_DATA")
    if not folder or not (Path(folder) / "mnist").exists():
        pytest.skip("PATHSPACE_DATA does not name a folder with the real MNIST files")
    return Path(folder)


def digests(*contents: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)


CHARACTER_FILES = [b"a _ b a b _ \n b ", b"a b b a \n b a ", b"b b a _ a a b a "]
WORD_FILES = [
    b" the cat <unk> \n \n the end \n",
    b" the end \n the cat \n",
    b" cat the \n end the cat \n",
]


@pytest.fixture
def tiny_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with texts of a few symbols, and their digests in place of the known ones."""
    (tmp_path / "ptb").mkdir()
    characters, words = corpora.CHARACTERS["ptb"], corpora.WORDS["ptb"]
    for name, content in zip(characters.files, CHARACTER_FILES, strict=True):
        (tmp_path / "ptb" / name).write_bytes(gzip.compress(content))
    for name, content in zip(words.files, WORD_FILES, strict=True):
        (tmp_path / "ptb" / name).write_bytes(content)
    monkeypatch.setitem(
        corpora.CHARACTERS, "ptb", replace(characters, digests=digests(*CHARACTER_FILES))
    )
    monkeypatch.setitem(corpora.WORDS, "ptb", replace(words, digests=digests(*WORD_FILES)))
    return tmp_path


def write_sections(sections: Sequence[Section], folder: Path) -> None:
    """Write the files of some sections as those of a report."""
    write_report(Report("", sections, {"versions": {}}, {}), folder)
