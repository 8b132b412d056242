"""Steps of two methods that take turns in one process, so that a busy machine slows both, and their figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import pathspace as ps


def timed(
    run: Callable[[], None], clock: Callable[[], float], *, cuda: bool
) -> Callable[[], float]:
    """A function that runs something and returns its seconds; on a GPU it waits for the end of it."""

    def step() -> float:
        if cuda:
            torch.cuda.synchronize()
        begin = clock()
        run()
        if cuda:
            torch.cuda.synchronize()
        return clock() - begin

    return step


def alternate(
    ours: Callable[[], float], plain: Callable[[], float], pairs: int, warmup: int = 5
) -> tuple[list[float], list[float]]:
    """Ratios of neighbouring steps, ours to plain, and the seconds of the plain ones; either goes first in turn."""
    for _ in range(warmup):
        plain()
        ours()
    ratios, seconds = [], []
    for i in range(pairs):
        if i % 2:
            theirs, mine = plain(), ours()
        else:
            mine, theirs = ours(), plain()
        seconds.append(theirs)
        ratios.append(mine / theirs)
    return ratios, seconds


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of ratios."""
    ordered, n = sorted(ratios), len(ratios)
    return {
        "ratio": round(statistics.median(ordered), 4),
        "quartiles": [round(ordered[n // 4], 4), round(ordered[3 * n // 4], 4)],
    }


def milliseconds(seconds: Sequence[float]) -> float:
    """The median, in milliseconds."""
    return round(1e3 * statistics.median(seconds), 3)


def versions() -> dict[str, str]:
    """What was measured."""
    return {"torch": torch.__version__, "pathspace": ps.__version__}


def write(figures: Any, output: Path | None) -> None:
    """Write figures to a file, whole or not at all."""
    if output is not None:
        temporary = output.with_suffix(".tmp")
        temporary.write_text(json.dumps(figures, indent=1) + "\n")
        temporary.replace(output)
