"""The program that counts branches and nodes counts them right."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

PROGRAM: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[1] / "benchmarks" / "readability.py")
)


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("return 1", 1),
        ("if a: return 1", 2),
        ("return a and b or c", 3),
        ("return [x for x in a if x for y in x]", 4),
        ("return 1 if a else 2 if b else 3", 3),
        ("for x in a:\n  try: g()\n  except E: pass", 3),
        ("match a:\n  case 1: pass\n  case _: pass", 3),
        ("def g():\n  if a: return 1\nreturn g", 1),
    ],
)
def test_branches_are_counted(body: str, complexity: int) -> None:
    indented = body.replace("\n", "\n ")
    (function, *_) = PROGRAM["functions"](ast.parse(f"def f():\n {indented}"))
    assert PROGRAM["complexity"](function) == complexity


def test_lines_with_code_are_counted(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file.py").write_text(
        '"""Text."""\n\n# why\nx = (\n    1\n)\n\n\ndef f():\n    """Text."""\n'
    )
    folder = PROGRAM["measure"](tmp_path, 12)["one"]
    assert (folder.lines, folder.functions, folder.complex_functions) == (4, 1, [])
