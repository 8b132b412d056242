"""How well members of a rescaling class bear rounding, on pretrained networks.

Each network is rounded as it is, after cross-layer equalization by hand, and after ``balance_`` by
several criteria; each with and without bias correction on the calibration examples. Reported is the
signal to noise ratio of the outputs in dB, their squared deviation from their mean over the squared
error, over test examples and over three grids: steps times 1, 1.03 and 1.06, since one grid alone
is good or bad luck.

    python benchmarks/rounding.py FOLDER                      # with the packages that rounding_models names; resumes
    python benchmarks/rounding.py FOLDER --networks mtcnn crepe
    python benchmarks/rounding.py --table

Weights are rounded to 2^bits - 1 levels with one step for a tensor or for each row, and what enters
a layer with one step for a tensor, from its range on the calibration examples. These are 32, and
256 where activations are rounded (32 for MobileNetV2): a balanced network uses the whole range of
every channel, which few examples do not show. The data are read from ``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from rounding_models import NETWORKS, Network, equalized_by_hand

RESULTS = Path(__file__).parent / "results" / "rounding.json"
EXAMPLES = 32
CALIBRATION = 32
GRIDS = (1.0, 1.03, 1.06)

# bits of a weight, whether every row has a step of its own, bits of what enters a layer
SCHEMES: dict[str, tuple[int, bool, int | None]] = {
    **{f"w{bits}": (bits, False, None) for bits in (8, 7, 6, 5, 4)},
    **{f"w{bits} row": (bits, True, None) for bits in (8, 7, 6, 5, 4)},
    "w8a8": (8, False, 8),
    "w6a8": (6, False, 8),
}

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@torch.no_grad()
def rounded(model: nn.Module, scheme: str, grid: float, calibration: Tensor) -> nn.Module:
    """A copy with rounded weights and, where the scheme says so, rounded inputs of its layers."""
    bits, by_row, of_values = SCHEMES[scheme]
    result = copy.deepcopy(model)
    for parameter in result.parameters():
        if parameter.dim() < 2:
            continue
        largest = parameter.abs().amax()
        if by_row:
            largest = parameter.abs().flatten(1).amax(1).reshape(-1, *[1] * (parameter.dim() - 1))
        step = grid * largest.clamp_min(1e-30) / (2 ** (bits - 1) - 1)
        parameter.copy_((parameter / step).round() * step)
    if of_values is not None:
        _round_inputs(result, calibration, of_values)
    return result


def _round_inputs(model: nn.Module, calibration: Tensor, bits: int) -> None:
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    ends: dict[nn.Module, tuple[float, float]] = {}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        ends[layer] = min(0.0, float(args[0].min())), max(0.0, float(args[0].max()))

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    model(calibration)
    for hook in hooks:
        hook.remove()
    for layer, (low, high) in ends.items():
        layer.register_forward_pre_hook(_rounding(low, high, bits))


def _rounding(
    low: float, high: float, bits: int
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    step = max(high - low, 1e-30) / (2**bits - 1)
    return lambda _, args: (((args[0].clamp(low, high) - low) / step).round() * step + low,)


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """All outputs side by side, ``[n, outputs]``."""
    result = model(inputs)
    parts = result if isinstance(result, (tuple, list)) else [result]
    return torch.cat([part.flatten(1).double() for part in parts], 1)


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal to noise ratio, where the signal is the deviation of each output from its mean."""
    signal, noise = (exact - exact.mean(0)).square().sum(), (found - exact).square().sum()
    return 10 * math.log10(float(signal / noise))


# -- members ---------------------------------------------------------------------------------------


def balanced(model: nn.Module, examples: Tensor, **options: Any) -> nn.Module:
    """A copy, balanced by a criterion; the function is checked."""
    result = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # factors beyond 100, and what onnx2torch does
        ps.rescaling.balance_(ps.trace(result, examples[:2]), examples[:8], **options)
    return result


def members(
    network: Network, model: nn.Module, data: Tensor
) -> dict[str, Callable[[str], nn.Module]]:
    """By name, (scheme) -> the network rescaled for it; kept where it is the same for several schemes."""
    kept: dict[Any, nn.Module] = {}

    def once(key: Any, make: Callable[[], nn.Module]) -> nn.Module:
        if key not in kept:
            begin = time.process_time()
            kept[key] = make()
            print(f"    {key}: {time.process_time() - begin:.0f} s", file=sys.stderr, flush=True)
        return kept[key]

    def for_rounding(scheme: str, calibration: Tensor | None) -> nn.Module:
        bits, by_row, of_values = SCHEMES[scheme]
        options: dict[str, Any] = {"per": "row" if by_row else "tensor", "calibration": calibration}
        if calibration is not None and of_values is not None:
            options |= {"bits": bits, "activations": of_values}
        key = (
            "rounding",
            calibration is None,
            *(options.get(k) for k in ("per", "bits", "activations")),
        )
        return once(key, lambda: balanced(model, data, criterion="rounding", **options))

    found: dict[str, Callable[[str], nn.Module]] = {"as it is": lambda _: model}
    if any(True for _ in network.pairs(model)):
        found["by hand"] = lambda _: once("by hand", lambda: equalized_by_hand(network, model))
    found["path"] = lambda _: once("path", lambda: balanced(model, data))
    found["range"] = lambda _: once("range", lambda: balanced(model, data, criterion="range"))
    found["activations"] = lambda _: once(
        "activations", lambda: balanced(model, data, criterion="activations", calibration=data)
    )
    found["rounding, kappa"] = lambda scheme: for_rounding(scheme, None)
    found["rounding, data"] = lambda scheme: for_rounding(scheme, data)
    return found


def measure(
    network: Network, folder: Path, found: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill in what is missing: scheme -> member -> {"plain" and "corrected": dB by grid}."""
    model = network.load(folder)
    test = network.inputs(EXAMPLES, False)
    exact = outputs(model, test)
    kept: dict[int, dict[str, Callable[[str], nn.Module]]] = {}
    for scheme, (_, _, of_values) in SCHEMES.items():
        count = CALIBRATION if of_values is None else network.ranges
        data = network.inputs(count, True)
        if count not in kept:
            kept[count] = members(network, model, data)
        line = found.setdefault(scheme, {})
        for name, member in kept[count].items():
            if name not in line:
                line[name] = _measured(member(scheme), scheme, data, test, exact)
                print(f"    {scheme} {name}: {_text(line[name])}", file=sys.stderr, flush=True)
                save()


def _measured(
    member: nn.Module, scheme: str, data: Tensor, test: Tensor, exact: Tensor
) -> dict[str, list[float]]:
    result: dict[str, list[float]] = {"plain": [], "corrected": []}
    for grid in GRIDS:
        one = rounded(member, scheme, grid, data)
        result["plain"].append(decibels(exact, outputs(one, test)))
        ps.rescaling.correct_biases_(one, member, data)
        result["corrected"].append(decibels(exact, outputs(one, test)))
    return result


def _text(found: dict[str, list[float]]) -> str:
    """The mean over the grids without and with bias correction, and the larger half of the two ranges."""
    means = [statistics.mean(found[kind]) for kind in ("plain", "corrected")]
    half = max(max(values) - min(values) for values in found.values()) / 2
    return f"{means[0]:.1f} / {means[1]:.1f} ± {half:.1f}"


def table(results: dict[str, Any]) -> str:
    """Tables of Markdown for each network: a step for each tensor, and the other ways to round."""
    parts = []
    for name, found in results["networks"].items():
        parts.append(f"**{NETWORKS[name].title}**")
        for chosen in (list(SCHEMES)[:5], list(SCHEMES)[5:]):
            schemes = [scheme for scheme in chosen if scheme in found]
            if schemes:
                parts.append(_part_of_table(found, schemes))
    return "\n\n".join(parts)


def _part_of_table(found: dict[str, Any], schemes: list[str]) -> str:
    lines = ["| member | " + " | ".join(schemes) + " |", "| --- " * (1 + len(schemes)) + "|"]
    for member in found[schemes[0]]:
        cells = [
            _text(found[scheme][member]) if member in found[scheme] else "" for scheme in schemes
        ]
        lines.append(f"| {member} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="where the packages with the weights are"
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--table", action="store_true", help="print the tables of a file, measure nothing"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "pathspace": ps.__version__,
        "networks": {},
    }
    if options.output.exists():
        results["networks"] = json.loads(options.output.read_text())["networks"]

    def save() -> None:
        short = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 2))
        options.output.write_text(json.dumps(short, indent=1) + "\n")

    if not options.table:
        if options.folder is None:
            parser.error("give the folder with the packages that rounding_models names")
        torch.set_num_threads(1)
        for name in options.networks:
            print(NETWORKS[name].title, file=sys.stderr, flush=True)
            measure(NETWORKS[name], options.folder, results["networks"].setdefault(name, {}), save)
    print(table(results))


if __name__ == "__main__":
    main()
