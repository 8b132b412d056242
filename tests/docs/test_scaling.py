"""The page of scaling shows what its program counted, and the counts are those of one process at any number of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scaling.md"


def test_the_table_is_what_was_counted():
    counted = [
        json.loads(line)
        for line in (ROOT / "benchmarks/results/scaling.json").read_text().splitlines()
    ]
    by = {(row["optimizer"], row["processes"]): row for row in counted}
    names = list(dict.fromkeys(row["optimizer"] for row in counted))
    shown = PAGE.read_text()
    for name in names:
        one, two, four = (by[name, processes] for processes in (1, 2, 4))
        sent = two["sent_metric_bytes"]
        cells = (
            f"{one['kept_bytes']:.1f}",
            f"{one['moved_bytes']:.0f}",
            f"{one['operations']:.0f}",
            f"{sent:.2g}",
        )
        assert f"| {name} | {' | '.join(cells)} |" in shown, name
        assert (two["sent_gradient_bytes"], four["sent_gradient_bytes"]) == (4.0, 4.0)
        assert four["sent_metric_bytes"] == sent
        # what reads no data sends nothing and does as ever
        if name not in (
            "DDPSGD",
            "DDPAdam",
            "QuasiDiagonal",
        ):
            assert sent == 0
            assert one["moved_bytes"] == two["moved_bytes"] == four["moved_bytes"]


@pytest.mark.slow
def test_who_counts_again_counts_the_same():
    done = subprocess.run(
        [sys.executable, "benchmarks/scaling.py", "--processes", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    again = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    before = [
        json.loads(line)
        for line in (ROOT / "benchmarks/results/scaling.json").read_text().splitlines()
    ]
    assert again == [row for row in before if row["processes"] == 1]
