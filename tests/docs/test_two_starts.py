"""The picture of the README is drawn from the table that it links to."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_shows_the_rows_of_the_table(tmp_path: Path) -> None:
    drawing: dict[str, Any] = runpy.run_path(str(DOCS / "images" / "two_starts.py"))
    found = drawing["errors"]((DOCS / "results" / "compare.md").read_text(encoding="utf-8"))
    starts = {"balanced", "rescaled"}
    optimizers = ["SGD", "Path-SGD", "AdamW", "Path-Adam", "Muon", "PathMuon"]
    assert set(found) == {(optimizer, start) for optimizer in optimizers for start in starts}
    assert found["SGD", "rescaled"] == (10.20, 1.80)
    drawing["draw"](found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
