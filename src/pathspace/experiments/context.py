"""Options of commands that do not change results, but for the last bits; the command line reads them off the fields."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.runner import ENGINES, Runner
from pathspace.extras import install

DEVICES = ("cpu", "cuda", "auto")
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON on standard output.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress, only results and errors.")
]


@dataclass(frozen=True)
class Context:
    """Options of a command with one run; the help of each says what it is.

    Attributes:
        output: None takes the first of the numbered folders that holds nothing, or what the command
            would continue; see `folders.taken`.
        workers, engine, address: See `EngineContext`.
    """

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Folder for runs and report; default runs/NAME, or runs/NAME-2 if that is taken, and so on.",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Folder with the data sets (MNIST in `mnist`); default the environment variable PATHSPACE_DATA.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help=f"Where runs compute: {', '.join(DEVICES)} (a GPU where there is one); may change when resuming.",
        ),
    ] = "cpu"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the stopped command of the --output folder; default the last folder.",
        ),
    ] = False
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, whatever the folder holds.")
    ] = False
    as_json: JsonOption = False
    quiet: QuietOption = False

    workers = 1
    engine = "local"
    address = ""

    @property
    def run_device(self) -> str:
        """The device of the runs. A cluster's machines may have one that this machine lacks.

        Raises:
            ConfigurationError: There is no such device here, and runs are to be done here.
        """
        return self.device if self.address and self.device != "auto" else chosen_device(self.device)

    def runner(self, threads: int = 1, device: str = "") -> Runner:
        """Return who does the runs.

        Args:
            threads: Of each run.
            device: Of each run; empty takes `run_device`. One that is no processor is one of a cluster.
        """
        gpus = int((device or self.run_device) != "cpu")
        return Runner(self.engine, self.workers, self.address, threads, gpus)

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

    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            help="Runs at a time; default 2, or 1 where there are too few cores; with --engine ray all processors.",
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help=f"Engine that does the runs: {', '.join(ENGINES)} (needs {install('ray')}).",
        ),
    ] = "local"
    address: Annotated[
        str,
        typer.Option(
            "--address",
            help="Address of a Ray cluster, such as auto or 10.0.0.1:6379; without it, Ray is started here.",
        ),
    ] = ""


def chosen_device(name: str) -> str:
    """Return the device that `--device` asks for; `auto` is a GPU where there is one, else the processor.

    Raises:
        ConfigurationError: There is no such device.
    """
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
