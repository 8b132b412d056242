"""The page of scaling shows what its program counted, and the counts are those of one process at any number of them."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scaling.md"


def test_the_table_is_what_was_counted():
    counted = [
        json.loads(line) for line in (ROOT / "benchmarks/results/scaling.json").read_text().splitlines()
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
        if name not in (
            "DDPSGD",
            "DDPAdam",
            "QuasiDiagonal",
        ):  # what reads no data sends nothing and does as ever
            assert sent == 0
            assert one["moved_bytes"] == two["moved_bytes"] == four["moved_bytes"]
