"""Runs that are kept in a file, one JSON line each, so that a benchmark of hours can be stopped and goes on."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def finished(path: Path, key: Callable[[Run], Any]) -> dict[Any, Run]:
    """The runs in a file by their keys; a last line that was cut off is none."""
    runs = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:
            continue
        runs[key(run)] = run
    return runs


def make_missing(
    wanted: Iterable[Run],
    path: Path,
    key: Callable[[Run], Any],
    loss_of: Callable[[Run], float],
    digits: int = 4,
) -> None:
    """Make the runs that are not in the file, and say how long it will take.

    Args:
        wanted: settings of each run, to which ``loss`` (None if it is not finite) and ``seconds``
            are added.
        path: the file, which is appended to.
        key: what tells one run from another.
        loss_of: trains.
        digits: of the loss that is kept.
    """
    done = finished(path, key)
    missing = [run for run in wanted if key(run) not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for i, run in enumerate(missing, 1):
        start = time.monotonic()
        loss = loss_of(run)
        kept = round(loss, digits) if math.isfinite(loss) else None
        with path.open("a") as file:
            file.write(
                json.dumps({**run, "loss": kept, "seconds": round(time.monotonic() - start, 2)})
                + "\n"
            )
        left = (time.monotonic() - begin) / i * (len(missing) - i)
        told = ", ".join(f"{name} {value}" for name, value in run.items())
        print(
            f"{i}/{len(missing)}, {left / 60:.0f} min left: {told}: {loss:.4f}",
            file=sys.stderr,
            flush=True,
        )
