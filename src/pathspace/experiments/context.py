"""Options of a command that do not change results, but for the last bits, and its output folder.

The command line reads the options off the fields. A folder of runs is known by its `config.json`,
and no other command shares it. Commands without `--output` write to `runs/NAME`, or to the first of
`runs/NAME-2`, `runs/NAME-3` and so on that holds nothing yet; what is in the others stays.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.runner import ENGINES, Runner, Runs
from pathspace.experiments.storage import make_folder, writable_folder
from pathspace.experiments.terminal import Monitor, Shown
from pathspace.extras import install
from pathspace.tools.files import clear_leftovers, locked

CONFIGURATION = "config.json"
PAGE = "report.html"  # written last: without it the same command goes on
REPORT_FILES = ".report.json"  # the names of the files of the last report
COMMANDS = ("compare", "train", "reproduce", "sweep")

DEVICES = ("cpu", "cuda", "auto")


def option(help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a dataclass that the command line has as an option, by its own name or by these."""
    return field(default=default, metadata={"given": typer.Option(*names, help=help, **more)})


def json_option() -> Any:
    """Return the field of the option --json."""
    return option("Print the results as JSON on standard output.", "--json", default=False)


def quiet_option() -> Any:
    """Return the field of the option --quiet."""
    words = "Show no progress, only results and errors."
    return option(words, "--quiet", "-q", default=False)


@dataclass(frozen=True)
class Context:
    """Options of a command with one run; the help of each says what it is.

    Attributes:
        output: None takes the first of the numbered folders that holds nothing, or what the command
            would continue; see `taken`.
        workers, engine, address: See `EngineContext`.
    """

    output: Path | None = option(
        "Folder for runs and report; default runs/NAME, or runs/NAME-2 if that is taken, and so on."
    )
    data_dir: Path | None = option(
        "Folder with the data sets (MNIST in `mnist`); default the environment variable PATHSPACE_DATA."
    )
    device: str = option(
        f"Where runs compute: {', '.join(DEVICES)} (a GPU where there is one); may change when resuming.",
        default="cpu",
    )
    resume: bool = option(
        "Continue the stopped command of the --output folder; default the last folder.",
        "--resume",
        default=False,
    )
    fresh: bool = option("Start over, whatever the folder holds.", "--fresh", default=False)
    as_json: bool = json_option()
    quiet: bool = quiet_option()

    workers = 1
    engine = "local"
    address = ""

    @property
    def run_device(self) -> str:
        """The device of the runs. A cluster's machines may have one that this machine lacks."""
        return self.device if self.address and self.device != "auto" else chosen_device(self.device)

    def runner(self, threads: int = 1, device: str = "") -> Runner:
        """Return who does runs of so many threads; without a `device`, on `run_device`."""
        gpus = int((device or self.run_device) != "cpu")
        return Runner(self.engine, self.workers, self.address, threads, gpus)

    def shown(self) -> Shown:
        """Return what shows how far the command is."""
        return Shown(Console(stderr=True), quiet=self.quiet)

    def runs(self, output: Path, monitor: Monitor, threads: int) -> Runs:
        """Return how a command does its runs, with so many threads each."""
        data_dir = self.data_dir and self.for_jobs(self.data_dir)
        return Runs(output, monitor, data_dir, self.runner(threads), self.run_device)

    def for_jobs(self, path: Path) -> Path:
        """Return a path as jobs find it: processes of Ray work in other folders."""
        return path.absolute() if self.engine == "ray" else path

    def going_on(self, folder: Path) -> str:
        """Return the options that go on in a folder, with those that no folder keeps, as they are no settings."""
        words = ["--output", str(folder)]
        for name in ("data_dir", "device", "engine", "address"):
            value = getattr(self, name)
            if value != getattr(Context, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class EngineContext(Context):
    """Options of a command with several runs: besides, who does them, and how many at a time."""

    workers: int | None = option(
        "Runs at a time; default 2, or 1 where there are too few cores; with --engine ray all processors."
    )
    engine: str = option(
        f"Engine that does the runs: {', '.join(ENGINES)} (needs {install('ray')}).",
        default="local",
    )
    address: str = option(
        "Address of a Ray cluster, such as auto or 10.0.0.1:6379; without it, Ray is started here.",
        default="",
    )


def chosen_device(name: str) -> str:
    """Return the device that `--device` asks for; `auto` is a GPU where there is one, else the processor."""
    if name.lower() == "gpu":  # whose spelling is nearest to cpu
        raise ConfigurationError(
            f"Unknown device {name!r} in --device: choose from {', '.join(DEVICES)}. Did you mean 'cuda'?"
        )
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES, "--device")
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.get_device_module(name).is_available():
        raise ConfigurationError(
            f"--device {name}: PyTorch {torch.__version__} sees no such device here: give --device cpu, or install a "
            "PyTorch that was built for the GPU and its driver."
        )
    return name


class BusyError(ConfigurationError):
    """Another command is at work in a folder."""


@contextmanager
def taken(
    wanted: Context, name: str, goes_on: Callable[[Path], bool], check: Callable[[Path], object]
) -> Iterator[Path]:
    """Choose the folder that a command writes to, make it, and keep other commands out of it.

    Where none is given and another command was faster, it is the next one.

    Args:
        wanted: Without an output, but with `fresh`, it is a folder that holds nothing yet.
        name: Of the folder in `runs` where no output is given.
        goes_on: Says of a folder of runs whether the command would continue what was stopped there.
        check: Refuses a folder before it is made, by a `ConfigurationError`.

    Raises:
        ConfigurationError: See `check`; or it cannot be written to, or holds something that is not
            ours.
        BusyError: Another command is at work in the folder that was asked for.
    """
    if wanted.resume and wanted.fresh:
        raise ConfigurationError("--resume and --fresh contradict each other: give one of them.")
    named = wanted.output is not None or wanted.resume
    while True:
        folder = wanted.output or _choose(wanted, Path("runs") / name, goes_on)
        writable_folder(folder, "--output")
        if not wanted.fresh:
            _check_own(folder)
        check(folder)
        make_folder(folder)
        with ExitStack() as stack:
            try:
                stack.enter_context(alone_in(folder))
            except BusyError:
                if named:
                    raise
                continue
            # the faster one may be done already, and what it wrote stays
            if named or _is_free(folder, wanted, goes_on):
                yield folder
                return


def _is_free(folder: Path, wanted: Context, goes_on: Callable[[Path], bool]) -> bool:
    """Return whether a command may write to a folder that was not asked for by its name."""
    if _is_empty(folder):
        return True
    return not wanted.fresh and is_own(folder) and goes_on(folder)


def _choose(wanted: Context, default: Path, goes_on: Callable[[Path], bool]) -> Path:
    *used, free = _series(default)
    if wanted.fresh:
        return free
    own = [folder for folder in reversed(used) if is_own(folder)]
    found = [folder for folder in own if not is_busy(folder) and goes_on(folder)]
    if wanted.resume:
        found += [*own, default]
    return next(iter(found), free)


def _series(default: Path) -> Iterator[Path]:
    """Go through the numbered folders until one holds nothing."""
    numbered = (default.with_name(f"{default.name}-{number}") for number in count(2))
    for folder in chain([default], numbered):
        yield folder
        if not folder.exists() or (folder.is_dir() and _is_empty(folder) and not is_busy(folder)):
            return


def _is_empty(folder: Path) -> bool:
    return all(path.name.startswith(".") for path in folder.iterdir())


def read_content(folder: Path) -> dict[str, Any]:
    """Return what the `config.json` of a folder says.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: It is no JSON, or no object.
    """
    try:
        content = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is no object")
    return content


def is_same_content(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether two contents of `config.json` are the same, in whatever order; 1 and 1.0 are one number."""
    kept = (json.loads(json.dumps(content)) for content in (one, other))  # a tuple is a list there
    return next(kept) == next(kept)


def is_own(folder: Path) -> bool:
    """Say whether a folder holds the configuration of a command of ours."""
    try:
        content = read_content(folder)
    except (OSError, ValueError):
        return False
    return content.get("command") in COMMANDS and "versions" in content


def _check_own(folder: Path) -> None:
    """Raise a `ConfigurationError` if a folder holds something, and not the configuration of a command of ours."""
    if not folder.is_dir() or _is_empty(folder) or is_own(folder):
        return
    held = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    broken = f"; its {CONFIGURATION!r} is no configuration of runs" if CONFIGURATION in held else ""
    more = " and more" if len(held) > 3 else ""
    raise ConfigurationError(
        f"The folder {str(folder)!r} holds {', '.join(map(repr, held[:3]))}{more}, which no command of pathspace is "
        f"known to have written{broken}: give another --output, or write there all the same with --fresh."
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder, and clear it of the half-written files of those that were killed.

    Raises:
        BusyError: Another command is at work there.
    """
    with locked(folder) as held:
        if not held:
            raise BusyError(
                f"Another command is at work in the folder {str(folder)!r}: wait until it is done, or give another "
                "--output."
            )
        for each in (folder, *folder.glob("cells/"), *folder.glob("runs/*/")):
            if each.is_dir():
                clear_leftovers(each)
        yield


def is_busy(folder: Path) -> bool:
    """Say whether another command is at work in a folder."""
    with locked(folder) as held:
        return not held
