"""Bits per symbol of the last tenth of small texts, by how a mixture learns how far to trust its network.

The network, of 16 units and 150 passes, learns the first nine tenths, and so do the contexts.
Texts: "events", ids of sessions, some of which are drawn at random; "log", lines of a server;
"music", bars of the task; "ptb", the first 12,000 characters of Penn Treebank without its
separators, in $PATHSPACE_DATA.

    python benchmarks/mixing_weights.py events log music ptb
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.sequences import PCNN, Mixed
from pathspace.sequences.tasks import music


def events(count: int) -> list[str]:
    """Return event ids of sessions: fixed sequences, repeated events and random ones."""
    rng = np.random.default_rng(0)
    found: list[str] = []
    while len(found) < count:
        kind = rng.integers(4)
        if kind == 0:
            found += ["E27", "E13", "E21", "E19", "E10"] + ["E24"] * int(rng.integers(2))
        elif kind == 1:
            found += ["E9"] * int(rng.integers(1, 5)) + ["E2"]
        elif kind == 2:
            found += ["E19", "E9", "E2"] if rng.random() < 0.7 else ["E10", "E24"]
        else:
            found += ["E12"] + [f"E{rng.integers(1, 27)}"] * int(rng.integers(1, 3))
    return found[:count]


def text_of(name: str) -> Any:
    """Return the text of this name."""
    if name == "events":
        return events(1400)
    if name == "log":
        lines = (
            f"10:{k // 60:02}:{k % 60:02} GET /page{k * k % 7}.html {200 + 204 * (k % 11 == 0)}\n"
            for k in range(300)
        )
        return "".join(lines)
    if name == "music":
        return music.generate(np.random.default_rng(1), bars=400)
    path = Path(os.environ.get("PATHSPACE_DATA", "data")) / "ptb" / "ptb.char.train.txt.gz"
    with gzip.open(path, "rt") as file:
        return file.read(40_000).replace(" ", "")[:12_000]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", choices=["events", "log", "music", "ptb"])
    for name in parser.parse_args().texts:
        text = text_of(name)
        cut = len(text) * 9 // 10
        before, held = text[:cut], text[cut:]
        how: dict[str, Any] = {"tokens": isinstance(text, list), "alphabet": text}
        network = PCNN(units=16, passes=150).fit(before, **how)
        models = {
            "network": network,
            "contexts": Mixed().fit(before, **how),
            "unseen=True": Mixed(network).read(before, unseen=True),
            "read": Mixed(network).read(before),
            "fit": Mixed(PCNN(units=16, passes=150)).fit(before, **how),
        }
        told = ", ".join(
            f"{way} {model.bits(held) / len(held):.4f}" for way, model in models.items()
        )
        print(f"{name} ({cut} symbols): {told}", flush=True)


if __name__ == "__main__":
    main()
