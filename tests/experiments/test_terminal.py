import io
import sys

import pytest
from rich import box
from rich.table import Table

from pathspace.cli import main
from pathspace.experiments.terminal import PlainConsole, encodable, output_console


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", "1 ± 2 \N{EN DASH} ✓ ü"),
        ("latin-1", "1 +/- 2 - ok ü"),
        ("ascii", "1 +/- 2 - ok \\xfc"),
    ],
)
def test_what_cannot_be_encoded_is_said_in_other_signs(encoding: str, shown: str) -> None:
    assert encodable("1 ± 2 \N{EN DASH} ✓ ü", encoding) == shown
    assert encodable("0.5 ± 0.1 ü", "latin-1") == "0.5 ± 0.1 ü"


def test_columns_are_as_wide_as_what_is_said_instead() -> None:
    memory = io.BytesIO()
    stream = io.TextIOWrapper(memory, encoding="ascii")
    table = Table("error", "curve", box=box.SIMPLE_HEAD)
    table.add_row("[red]0.5 ± 0.1", "✓")
    table.add_row("0.5 +/- 0.1", "ok")
    PlainConsole(file=stream, width=40).print(table)
    stream.flush()
    *_, first, second, _last = memory.getvalue().decode("ascii").splitlines()
    assert first == second
    assert "0.5 +/- 0.1" in first


def test_commands_print_their_tables_on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = io.BytesIO()
    stream = io.TextIOWrapper(memory, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "pathspace",
            "check-invariance",
            "--networks",
            "mlp",
            "--optimizers",
            "path-sgd",
            "--steps",
            "1",
        ],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    stream.flush()
    assert not ended.value.code
    assert b"0.0 ok" in memory.getvalue()
    print("\u2713", file=stream, flush=True)
    assert memory.getvalue().endswith(b"\\u2713\n")


def test_without_standard_output_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where the stream is closed
    output_console().print("a table")
