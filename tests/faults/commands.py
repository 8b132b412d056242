"""The commands that write, small enough to be killed often, and what of their results must be the same bits."""

import hashlib
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from pathspace.cli import app, main
from pathspace.sequences import PCNN, Mixed, load

TASK = [
    "--task", "adding", "--batch-size", "16", "--set", "model_options.hidden=4", "--set", "task_options.length=4",
    "--set", "task_options.train_size=64", "--set", "task_options.validation_size=16",
    "--set", "task_options.test_size=16", "--set", "checkpoint_every=2",
]  # fmt: skip
FIT = ["sequence", "fit", "text", "-o", "out", "--units", "4"]
COMMANDS = {
    "train": ["train", *TASK, "--epochs", "3", "--set", "momentum=0.9", "--output", "out"],
    "compare": [
        "compare", *TASK, "--epochs", "1", "--methods", "sgd,path-sgd", "--learning-rates", "0.1,0.3", "--seeds", "1",
        "--workers", "1", "--output", "out",
    ],
    "fit": [*FIT, "--passes", "20"],
    "fit-restarts": [*FIT, "--passes", "12", "--restarts", "3", "--heat", "4", "--ensemble", "2"],
    "compress": ["sequence", "compress", "model", "text", "-o", "out", "--force"],
    "decompress": ["sequence", "decompress", "model", "packed", "-o", "out"],
    "generate-task": ["sequence", "generate-task", "anbn", "-o", "out", "--force"],
}  # fmt: skip
TEXT = "she sells sea shells by the sea shore; " * 8


def prepare(folder: Path) -> None:
    """Put what the commands read into a folder."""
    (folder / "text").write_text(TEXT)
    model = PCNN(units=3, passes=4).fit(TEXT.encode())
    model.save(folder / "model")
    CliRunner().invoke(
        app,
        [
            "sequence",
            "compress",
            str(folder / "model"),
            str(folder / "text"),
            "-o",
            str(folder / "packed"),
        ],
    )


def result(name: str, folder: Path) -> str:
    """A digest of what the command must give, however often it was killed; times may differ."""
    out, digest = folder / "out", hashlib.sha256()
    if name in ("train", "compare"):
        for file in ("curves.csv", "validation.csv"):
            digest.update((out / file).read_bytes())
    elif name.startswith("fit"):
        model = load(out)
        model = model.model if isinstance(model, Mixed) else model
        for array in (model.parameters_.w, model.parameters_.tau, model.parameters_.V0):
            digest.update(array.tobytes())
        digest.update(
            repr(
                (model.training_.passes, model.training_.tries, model.training_.best_bits)
            ).encode()
        )
    else:
        digest.update(out.read_bytes())
    return digest.hexdigest()


def litter(folder: Path) -> list[str]:
    """Names of what no finished command may leave."""
    found = (
        path
        for path in folder.rglob("*")
        if "checkpoint" in path.name or path.name.endswith(".part")
    )
    return sorted(str(path.relative_to(folder)) for path in found)


def in_child(
    folder: Path, arguments: list[str], before: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Run a command in a copy of this process; return the exit code, negative for a signal, and what it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.close(reader)
            os.chdir(folder)
            before()
            done = CliRunner().invoke(app, arguments)
            os.write(writer, (done.output + repr(done.exception)).encode()[-60_000:])
            code = done.exit_code
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        text = said.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def at_a_terminal(
    folder: Path, arguments: list[str], before: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """As `in_child`, through `main`, which handles Ctrl-C."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code: object = 99
        try:
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["pathspace", *arguments]
            before()
            main()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 98)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        text = said.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def at_changes(do: Callable[[int], None]) -> Callable[[], None]:
    """Return what calls `do` right before a process changes files, with 1 for the first time, and so on."""

    def set_up() -> None:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            writes = (
                event == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"):
                count += 1
                do(count)

        sys.addaudithook(watch)

    return set_up


def dies_at(number: int) -> Callable[[], None]:
    """Return what makes a process kill itself right before it changes files for the `number`-th time."""
    return at_changes(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == number else None)


def interrupted_at(number: int, later: int) -> Callable[[], None]:
    """Return what presses Ctrl-C at the `number`-th change of a file, and again so many changes later."""
    return at_changes(
        lambda n: os.kill(os.getpid(), signal.SIGINT) if n in (number, number + later) else None
    )


def terminated_at(number: int) -> Callable[[], None]:
    """Return what sends SIGTERM at the `number`-th change of a file."""
    return at_changes(lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == number else None)


def with_room_for(size: int) -> Callable[[], None]:
    """Return what keeps a process from writing more than `size` bytes into any file, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def moments(name: str, count: int, last: int) -> list[int]:
    """Numbers of changes of files at which to die: the first, and others at random."""
    rng = random.Random(name)
    return sorted({1, *(rng.randrange(1, last + 1) for _ in range(count - 1))})
