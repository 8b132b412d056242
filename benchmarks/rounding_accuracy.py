"""Accuracy of MobileNetV2 with a new last layer on CIFAR-10, after its weights were rounded.

The last layer is fitted to the exact features of 2,000 training images, enlarged to 96 by 96
pixels. The whole network is then rounded with one step for each tensor: as it is, equalized by
hand, and after ``balance_`` by two criteria; each with and without bias correction on 32 training
images. Grids are those of ``rounding``: steps times 1, 1.03 and 1.06.

    python benchmarks/rounding_accuracy.py FOLDER             # with the package that rounding_models names; resumes
    python benchmarks/rounding_accuracy.py --table

Reported is the share of 1,000 test images that are classified correctly, and for each member how
much more of them than after equalization by hand, with a 95 % interval over the images.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pathspace as ps
from rounding import GRIDS, balanced, rounded
from rounding_models import NETWORKS, equalized_by_hand

RESULTS = Path(__file__).parent / "results" / "rounding-accuracy.json"
SCHEMES = ("w8", "w6", "w5")
TRAIN, TEST, CALIBRATION, BATCH = 2000, 1000, 32, 100
NETWORK = NETWORKS["mobilenet"]


def labels(count: int, calibration: bool) -> Tensor:
    """Classes of the images that ``NETWORK.inputs`` returns."""
    name = "cifar10_train20k.npz" if calibration else "cifar10_test10k.npz"
    with np.load(Path(os.environ["PATHSPACE_DATA"]) / "cifar10" / name) as arrays:
        return torch.from_numpy(arrays["labels"][:count]).long()


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(batch) for batch in images.split(BATCH)])


def with_last_layer(model: nn.Module) -> nn.Module:
    """Put a layer in the place of the last one, fitted by logistic regression with weight decay."""
    classifier: Any = model.classifier
    layer = nn.Linear(1280, 10)
    classifier[1] = nn.Identity()
    features = outputs(model, NETWORK.inputs(TRAIN, True))
    targets = labels(TRAIN, True)
    mean, deviation = features.mean(0), features.std(0) + 1e-3
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    solver = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = nn.functional.cross_entropy(layer((features - mean) / deviation), targets)
        loss = loss + 0.02 * layer.weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    with torch.no_grad():
        layer.weight.div_(deviation)
        layer.bias.sub_(layer.weight @ mean)
    classifier[1] = layer
    return model


def members(model: nn.Module, data: Tensor) -> dict[str, Callable[[], nn.Module]]:
    return {
        "as it is": lambda: model,
        "by hand": lambda: equalized_by_hand(NETWORK, model),
        "range": lambda: balanced(model, data, criterion="range"),
        "rounding, data": lambda: balanced(model, data, criterion="rounding", calibration=data),
    }


def packed(right: Tensor) -> str:
    """Which images are classified correctly, as hexadecimal digits."""
    return np.packbits(right.numpy()).tobytes().hex()


def unpacked(text: str) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))[:TEST].astype(float)


def measure(folder: Path, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill in what is missing: grid -> scheme -> member -> {"plain" and "corrected": images}."""
    model = with_last_layer(NETWORK.load(folder))
    data, images = NETWORK.inputs(CALIBRATION, True), NETWORK.inputs(TEST, False)
    targets = labels(TEST, False)

    def right(one: nn.Module) -> str:
        return packed(outputs(one, images).argmax(1) == targets)

    found.setdefault("float", right(model))
    kept = {name: make() for name, make in members(model, data).items()}
    for grid in GRIDS:
        for scheme in SCHEMES:
            line = found.setdefault(str(grid), {}).setdefault(scheme, {})
            for name, member in kept.items():
                if name in line:
                    continue
                begin = time.process_time()
                one = rounded(member, scheme, grid, data)
                line[name] = {"plain": right(one)}
                ps.rescaling.correct_biases_(one, member, data)
                line[name]["corrected"] = right(one)
                save()
                seconds = time.process_time() - begin
                print(f"    {grid} {scheme} {name}: {seconds:.0f} s", file=sys.stderr, flush=True)


def table(found: dict[str, Any]) -> str:
    """Accuracy in points without and with bias correction, and the lead over equalization by hand."""
    grids = [grid for grid in map(str, GRIDS) if grid in found]
    lines = [f"float: {100 * unpacked(found['float']).mean():.1f}", ""]
    lines.append("| member | " + " | ".join(SCHEMES) + " |")
    lines.append("| --- " * (1 + len(SCHEMES)) + "|")
    for name in found[grids[0]][SCHEMES[0]]:
        cells = [_cell(found, grids, scheme, name) for scheme in SCHEMES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any], grids: list[str], scheme: str, name: str) -> str:
    parts = []
    for kind in ("plain", "corrected"):
        one, hand = (
            np.mean([unpacked(found[grid][scheme][member][kind]) for grid in grids], 0)
            for member in (name, "by hand")
        )
        half = 1.96 * (one - hand).std(ddof=1) / math.sqrt(TEST)
        lead = (
            f" ({100 * (one - hand).mean():+.1f} ± {100 * half:.1f})" if name != "by hand" else ""
        )
        parts.append(f"{100 * one.mean():.1f}{lead}")
    return " / ".join(parts)


def run(
    description: str | None,
    results: Path,
    measured: Callable[[Path, dict[str, Any], Callable[[], None]], None],
    shown: Callable[[dict[str, Any]], str],
) -> None:
    """Run the command line of a program: measure what its file of results lacks, and print the table.

    Args:
        description: the program's docstring.
        results: the file, where no other is given.
        measured: (folder with the package, results so far, save them) fills in what is missing.
        shown: results -> the table.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="where the package with the weights is"
    )
    parser.add_argument("--output", type=Path, default=results)
    parser.add_argument("--table", action="store_true", help="print the table of a file")
    options = parser.parse_args()
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    if not options.table:
        if options.folder is None:
            parser.error("give the folder with the package that rounding_models names")
        torch.set_num_threads(1)
        measured(
            options.folder,
            found,
            lambda: options.output.write_text(json.dumps(found, indent=1) + "\n"),
        )
    print(shown(found))


if __name__ == "__main__":
    run(__doc__, RESULTS, measure, table)
