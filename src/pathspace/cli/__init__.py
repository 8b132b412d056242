"""The command `pathspace`; nothing heavy is imported until a command needs it, so that help comes at once."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from importlib import import_module
from typing import Annotated

from pathspace.extras import install

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"Error: the command line needs the package {error.name!r}: {install('experiments')}"
    ) from error

from pathspace.cli import networks, training
from pathspace.cli.options import BROKEN, INTERRUPTED, TERMINATED, WRONG_USE, clear_errors

TRACEBACK = "PATHSPACE_TRACEBACK"
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Train ReLU and recurrent networks in a geometry that does not depend on how their weights are scaled.

    \b
    Examples:
      pathspace compare
      pathspace train --task mnist --data-dir data --method path-muon --epochs 5
      pathspace check-invariance --networks rnn
      pathspace sequence fit log.txt -o log.safetensors
    """,
)


def main() -> None:
    """Run the command line."""
    # what a terminal cannot show, it shows as its code
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ["MPLBACKEND"] = (
        "agg"  # figures are files; the backend of a notebook may be missing here
    )
    interrupts = _Interrupts()
    # else it is ignored: in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupts)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupts.terminate)
    try:
        app()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            ended.code = interrupts.code
        raise
    except KeyboardInterrupt:  # while typer is not there yet, or no longer
        sys.exit(interrupts.code)
    except Exception as error:
        if mended := _mendable(error):
            typer.echo(f"Error: {mended}", err=True)
            sys.exit(WRONG_USE)
        if os.environ.get(TRACEBACK):
            raise
        said = " ".join(str(error).split())
        typer.echo(
            f"Error: {type(error).__name__}: {said}\nThis is a mistake in pathspace and not in your command. Please "
            f"report it, with what the command prints with {TRACEBACK}=1 set.",
            err=True,
        )
        sys.exit(BROKEN)


def _mendable(error: Exception) -> str:
    """Say what to do about memory or a disk that is full; nothing of other errors."""
    # torch has errors of its own for memory: of the processor, told by their words alone, and of a
    # GPU
    without = (
        any(words in str(error) for words in OUT_OF_MEMORY)
        or type(error).__name__ == "OutOfMemoryError"
    )
    if without or isinstance(error, MemoryError):
        return "There is not enough memory for this: make it smaller, or give fewer workers."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Cannot write to {error.filename or 'standard output'} ({error.strerror}): make room there."
    return ""


class _Interrupts:
    """Ctrl-C: the first interrupts what is being done, another one, while that is being put away, ends it quietly.

    Attributes:
        code: The exit code of what was interrupted.
    """

    def __init__(self) -> None:
        self._heard, self.code = False, INTERRUPTED

    def __call__(self, _number: int, _frame: object) -> None:
        if not self._heard:
            self._heard = True
            raise KeyboardInterrupt
        if sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # the cursor that a progress bar has hidden
        os._exit(self.code)

    def terminate(self, number: int, frame: object) -> None:
        """Take SIGTERM, which schedulers send some time before they kill, for Ctrl-C."""
        self.code = TERMINATED
        # such as a run's, which ends with a checkpoint
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:
            self(number, frame)


def _print_version(wanted: bool) -> None:
    if wanted:
        import pathspace

        typer.echo(f"pathspace {pathspace.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


# for the list of commands, where a longer first sentence of a docstring would be cut
for command, short_help in (
    (training.compare, "Compare optimizers from two starts of the same function."),
    (training.train, "Train one network once, with checkpoints."),
    (training.reproduce, "Run a published experiment, beside the published numbers."),
    (training.sweep, "Search learning rates, and other settings, of optimizers."),
):
    app.command(short_help=short_help)(command)
app.command(
    "check-invariance", short_help="Check which optimizers train alike from a rescaled start."
)(networks.check_invariance)
app.command(short_help="Tell how far the units of a model are from balance.")(networks.check_scale)
app.command(short_help="Count paths, basis paths and dead units of a model.")(networks.paths)


@app.command(
    "sequence",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def sequence(context: typer.Context) -> None:
    """Learn, sample, score and compress symbol sequences."""
    # Handed on as a whole: its imports are too heavy to pay for in every other command.
    with clear_errors("sequence", extra="sequences"):
        import_module("pathspace.sequences.cli").app(
            args=context.args, prog_name="pathspace sequence"
        )
