"""Draw the picture of the README from the table of docs/results/compare.md.

python docs/images/two_starts.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent
ROW = re.compile(r"^ *(\S+)? {2,}(balanced|rescaled) {2,}\S+ +([\d.]+) ± ([\d.]+)")
PLAIN, INVARIANT = "#b7410e", "#1f6fb2"


def errors(page: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (optimizer, start) -> test error and half of its interval, in percent."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    optimizer = ""
    for line in page.splitlines():
        match = ROW.match(line)
        if match is None:
            continue
        optimizer = match[1] or optimizer
        found[optimizer, match[2]] = float(match[3]), float(match[4])
    return found


def draw(found: dict[tuple[str, str], tuple[float, float]], path: Path) -> None:
    """Draw, for every optimizer, the errors from both starts."""
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in found))
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for place, optimizer in enumerate(optimizers):
        color = INVARIANT if optimizer.startswith("Path") else PLAIN
        for start, shift, mark in (("balanced", -0.14, "o"), ("rescaled", 0.14, "X")):
            error, half = found[optimizer, start]
            axes.errorbar(
                error, place + shift, xerr=half, fmt=mark, color=color, markersize=9, elinewidth=1.5
            )
    axes.set_yticks(range(len(optimizers)), optimizers, fontsize=13)
    axes.invert_yaxis()
    axes.set_xlim(0, 15)
    axes.tick_params(axis="x", labelsize=12)
    axes.set_xlabel("test error, % (95 % intervals of five seeds)", fontsize=12)
    axes.set_title(
        "One function, two starts:\n● balanced weights   ✖ badly scaled weights", fontsize=13
    )
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    page = (IMAGES.parent / "results" / "compare.md").read_text(encoding="utf-8")
    draw(errors(page), IMAGES / "two-starts.png")
