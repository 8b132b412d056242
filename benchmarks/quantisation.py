"""What rounding costs two trained networks, by the member of the rescaling class that is rounded.

Trains a small CNN with residuals (CIFAR-10) and a character transformer (Penn Treebank), and rounds
their weights to 8 and 4 bits, with one step for a tensor or for every row, and what enters their
layers to 8 or 6 bits, one step for a tensor. Rounded are the network as it was trained, after
``balance_`` by each criterion, and after what is done to known pairs of layers by hand; and all of
it from a badly scaled member, every unit class times a power of two from 1/16 on to 16.

    python benchmarks/quantisation.py                            # some minutes a seed; Ctrl-C, and it goes on
    python benchmarks/quantisation.py --cases cnn --seeds 1
    python benchmarks/quantisation.py --table                    # of the file that there is
    python benchmarks/quantisation.py --figure docs/images/quantisation.png

Steps are the plain ones: the largest |w| over 2^(bits - 1) - 1, and for activations the range on
256 training examples. The strength alpha "chosen" is that of the least loss on these examples, for
each rounding by itself. The data are read from ``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.experiments.tasks.task import Split, Task
from quantisation_models import CASES, Case

RESULTS = Path(__file__).parent / "results" / "quantisation.json"
CALIBRATION = 256
REACH = 16.0
ALPHAS = (0.1, 0.25, 0.5, 0.75, 0.9)
SEEDS = 3
SAME = 1e-4  # losses that differ by less belong to the same weights, but for rounding in float32

# weight bits, whether every row has a step of its own, bits of what enters a layer
SCHEMES: dict[str, tuple[int, bool, int | None]] = {
    "int8 tensor": (8, False, None),
    "int8 row": (8, True, None),
    "int4 tensor": (4, False, None),
    "int4 row": (4, True, None),
    "int8 tensor, a8": (8, False, 8),
    "int8 row, a6": (8, True, 6),
}


# -- rounding --------------------------------------------------------------------------------------


@torch.no_grad()
def rounded(model: nn.Module, scheme: str, calibration: Tensor) -> nn.Module:
    """A copy with rounded weights and, where the scheme says so, rounded inputs of its layers."""
    bits, by_row, of_values = SCHEMES[scheme]
    result = copy.deepcopy(model)
    layers = [m for m in result.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    ends = {} if of_values is None else _ends(result, layers, calibration)
    for parameter in result.parameters():
        if parameter.dim() > 1:
            size = parameter.abs()
            largest = size.flatten(1).amax(1) if by_row else size.amax()
            if by_row:
                largest = largest.reshape(-1, *[1] * (parameter.dim() - 1))
            step = largest.clamp_min(1e-30) / (2 ** (bits - 1) - 1)
            parameter.copy_((parameter / step).round() * step)
    for layer in layers if of_values is not None else ():
        layer.register_forward_pre_hook(_cut(*ends[layer], of_values or 0))
    return result


def _cut(
    low: float, high: float, bits: int
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    """What rounds the input of a layer to 2^bits values between two ends."""
    step = max(high - low, 1e-30) / (2**bits - 1)
    return lambda _, args: (((args[0].clamp(low, high) - low) / step).round() * step + low,)


def _ends(
    model: nn.Module, layers: Sequence[nn.Module], calibration: Tensor
) -> dict[nn.Module, tuple[float, float]]:
    """The least and the largest value that enters every layer, zero among them."""
    ends: dict[nn.Module, tuple[float, float]] = {}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        ends[layer] = min(0.0, float(args[0].min())), max(0.0, float(args[0].max()))

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    model(calibration)
    for hook in hooks:
        hook.remove()
    return ends


@torch.no_grad()
def loss_of(model: nn.Module, task: Task, split: Split) -> float:
    """The mean loss over a split."""
    total = 0.0
    for some in torch.arange(len(split)).split(500):
        total += float(task.loss(model(split.inputs[some]), split.targets[some])) * len(some)
    return total / len(split)


# -- members ---------------------------------------------------------------------------------------


def balanced(model: nn.Module, examples: Tensor, **options: Any) -> nn.Module:
    """A copy, balanced by a criterion; the function is checked."""
    result = copy.deepcopy(model)
    with warnings.catch_warnings():
        # factors beyond 100, from the badly scaled start
        warnings.simplefilter("ignore", UserWarning)
        ps.rescaling.balance_(ps.trace(result, examples[:2]), examples, **options)
    return result


def by_activations(model: nn.Module, calibration: Tensor, alpha: float) -> nn.Module:
    return balanced(
        model, calibration, criterion="activations", calibration=calibration, alpha=alpha
    )


def measured(model: nn.Module, case: Case, task: Task) -> dict[str, dict[str, float]]:
    """Loss by member and by rounding; "float" is that without any."""
    chosen = Split(task.train.inputs[:CALIBRATION], task.train.targets[:CALIBRATION])
    examples = chosen.inputs

    def losses(member: nn.Module) -> dict[str, float]:
        found = {
            scheme: loss_of(rounded(member, scheme, examples), task, task.test)
            for scheme in SCHEMES
        }
        return {"float": loss_of(member, task, task.test), **found}

    found = {"as it is": losses(model)}
    found["path"] = losses(balanced(model, examples))
    found["range"] = losses(balanced(model, examples, criterion="range"))
    members = {alpha: by_activations(model, examples, alpha) for alpha in ALPHAS}
    found["activations, alpha 0.5"] = losses(members[0.5])
    best = {"float": found["activations, alpha 0.5"]["float"]}
    for scheme in SCHEMES:
        tried = {a: loss_of(rounded(m, scheme, examples), task, chosen) for a, m in members.items()}
        member = members[min(tried, key=lambda alpha: tried[alpha])]
        best[scheme] = loss_of(rounded(member, scheme, examples), task, task.test)
    found["activations, alpha chosen"] = best
    for name, change in case.by_hand.items():
        member = copy.deepcopy(model)
        change(member, examples)
        found[name] = losses(member)
    return found


def run(case: Case, seed: int, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Train on a seed and measure from both starts."""
    begin = time.monotonic()
    task = case.task(None)
    model = case.trained(task, seed, steps)
    print(
        f"{case.title}: seed {seed} trained in {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    found = {"trained": measured(model, case, task)}
    network = ps.trace(model, task.train.inputs[:2])
    generator = torch.Generator().manual_seed(seed)
    ps.rescaling.random_rescale_(network, 1 / REACH, REACH, powers_of_two=True, generator=generator)
    found["badly scaled"] = measured(model, case, task)
    return found


def measure(cases: list[str], seeds: int, steps: int | None, path: Path) -> None:
    """Make the runs that a file lacks, one seed after the other, and write it after each."""
    results: dict[str, Any] = {"torch": torch.__version__, "pathspace": ps.__version__, "runs": {}}
    if path.exists():
        results["runs"] = json.loads(path.read_text())["runs"]
    for seed in range(seeds):
        for name in cases:
            runs = results["runs"].setdefault(name, [])
            if len(runs) <= seed:
                runs.append(run(CASES[name], seed, steps or CASES[name].steps))
                short = json.loads(
                    json.dumps(results), parse_float=lambda text: round(float(text), 5)
                )
                path.write_text(json.dumps(short, indent=1) + "\n")


# -- the figures -----------------------------------------------------------------------------------


def figures(results: dict[str, Any], case: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """start -> member -> rounding -> losses, one for each seed."""
    runs = results["runs"][case]
    first = runs[0]
    return {
        start: {
            member: {scheme: [one[start][member][scheme] for one in runs] for scheme in losses}
            for member, losses in members.items()
        }
        for start, members in first.items()
    }


def table(results: dict[str, Any], case: str) -> str:
    """A table of Markdown: how much rounding adds to the loss, its mean and its range over the seeds.

    Members that are the same weights from both starts stand in it once.
    """
    found = figures(results, case)
    lines = [
        "| start | member | " + " | ".join(SCHEMES) + " |",
        "| --- " * (2 + len(SCHEMES)) + "|",
    ]
    same = []
    for start, members in found.items():
        for member, losses in members.items():
            first = found["trained"][member]
            if start != "trained" and all(
                abs(a - b) < SAME for s in losses for a, b in zip(losses[s], first[s], strict=True)
            ):
                same.append(member)
                continue
            cells = []
            for scheme in SCHEMES:
                added = [a - b for a, b in zip(losses[scheme], losses["float"], strict=True)]
                mean, low, high = (
                    round(x, 3) + 0.0 for x in (statistics.mean(added), min(added), max(added))
                )
                cells.append(f"{mean:.3f} ({low:.3f} to {high:.3f})")
            lines.append(f"| {start} | {member} | " + " | ".join(cells) + " |")
    exact = statistics.mean(found["trained"]["as it is"]["float"])
    ends = f"Loss without rounding {exact:.3f}. The same from both starts: {'; '.join(same)}."
    return "\n".join([*lines, "", ends])


def draw(results: dict[str, Any], path: Path) -> None:
    """What rounding adds to the loss, a panel for each rounding, a row of panels for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(results["runs"])
    figure = Figure(
        figsize=(3.0 + 1.9 * len(SCHEMES), 0.9 + 2.6 * len(cases)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(cases), len(SCHEMES), squeeze=False)
    for row, (axes, case) in enumerate(zip(grid, cases, strict=True)):
        found = figures(results, case)
        members = list(found["trained"])
        for axis, scheme in zip(axes, SCHEMES, strict=True):
            for start, colour, shift in (
                ("trained", "#1f5f9e", 0.15),
                ("badly scaled", "#b3400e", -0.15),
            ):
                for place, member in enumerate(reversed(members)):
                    losses = found[start][member]
                    added = [
                        max(a - b, 1e-4)
                        for a, b in zip(losses[scheme], losses["float"], strict=True)
                    ]
                    axis.plot(
                        added,
                        [place + shift] * len(added),
                        ".",
                        color=colour,
                        markersize=5,
                        label=start,
                    )
            axis.set_xscale("log")
            axis.set_xlim(7e-5, 30)
            axis.tick_params(labelsize=7)
            axis.grid(axis="x", linewidth=0.3)
            axis.set_yticks(range(len(members)), list(reversed(members)) if axis is axes[0] else [])
            if axis is axes[0]:
                axis.set_ylabel(case)
            if row == 0:
                axis.set_title(scheme, fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower right", fontsize=8, ncols=2)
    figure.supxlabel(
        "what rounding adds to the test loss, nats; 0.0001 stands for less", fontsize=8
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="of training; as the case says by default")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--table", action="store_true", help="print the tables of a file, measure nothing"
    )
    parser.add_argument("--figure", type=Path, help="draw the figures of a file, measure nothing")
    options = parser.parse_args()
    if not (options.table or options.figure):
        torch.set_num_threads(1)
        measure(options.cases, options.seeds, options.steps, options.output)
    results = json.loads(options.output.read_text())
    if options.figure:
        draw(results, options.figure)
    else:
        for name in results["runs"]:
            print(f"{CASES[name].title}\n\n{table(results, name)}\n")


if __name__ == "__main__":
    main()
