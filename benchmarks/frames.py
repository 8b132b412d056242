"""Which member of a rescaling class to measure a network in: the frames beside each other, on the zoo of ``safety``.

Trains as ``safety.py`` does, in each frame (see ``ps.metrics.Frame``): PathSGD and PathAdam, and
SGD on weights that ``balance_`` brought to the member once. Four rates about each rule's usual one.
Plain SGD and AdamW have no frame.

    python benchmarks/frames.py                            # the folded networks and those whose form matters
    python benchmarks/frames.py --cases folded-vgg --factors 1 --seeds 2
    python benchmarks/frames.py --table                    # of the runs that there are; trains nothing

Runs are appended to a file, one JSON line each, and those that are in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import pathspace as ps
from run_file import Run, finished, make_missing
from safety import MOMENTUM, OPTIMIZERS, middle, trained_loss, usual_rate
from safety_zoo import FOLDED, ZOO

CASES = (
    *FOLDED,
    "lenet",
    "vgg",
    "resnet-plain",
    "mobilenet-plain",
    "squeezenet",
    "mlp",
    "deep-mlp",
    "rnn-28",
)
FACTORS = (0.3, 1.0, 2.0, 3.0)
SEEDS = 10
FRAMES = {
    "balanced": ps.metrics.Frame("balanced"),
    "layers": ps.metrics.Frame("layers"),
    "measure 1/2": ps.metrics.Frame("measure", alpha=0.5),
    "measure": ps.metrics.Frame("measure", alpha=1.0),
}
PLAIN = "none"
RULES = {"SGD": ("SGD once", "PathSGD"), "AdamW": ("PathAdam",)}
"""The rules that have frames, by their plain rule."""


def _once(
    model: nn.Module, x: Tensor, frame: ps.metrics.Frame, batch: int, rate: float
) -> Optimizer:
    """SGD on the member of a frame."""
    network = ps.trace(model, x[:2])
    if frame.name == "measure":
        ps.rescaling.balance_(
            network, criterion="measure", calibration=x[:batch], alpha=frame.alpha
        )
    else:
        ps.rescaling.balance_(network, criterion="layers" if frame.name == "layers" else "path")
    return SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def maker(run: Run) -> Callable[[nn.Module, Tensor], Optimizer]:
    """A function that makes the optimizer of a run."""
    case, rule, plain = ZOO[run["case"]], run["rule"], run["plain"]
    rate = run["factor"] * usual_rate(case, plain)
    if run["frame"] == PLAIN:
        return lambda model, x: OPTIMIZERS[plain].make(model, x[:2], rate, {})
    frame = FRAMES[run["frame"]]
    if rule == "SGD once":
        return lambda model, x: _once(model, x, frame, case.batch, rate)
    return lambda model, x: OPTIMIZERS[rule].make(model, x[:2], rate, {"frame": frame})


def wanted(
    cases: Iterable[str], rules: Iterable[str], factors: Iterable[float], seed: int
) -> list[Run]:
    """The runs of a seed."""
    runs: list[Run] = []
    for case in cases:
        for factor in factors:
            for plain in rules:
                one = {"case": case, "plain": plain, "factor": factor, "seed": seed}
                runs.append({**one, "rule": plain, "frame": PLAIN})
                runs += [
                    {**one, "rule": rule, "frame": frame}
                    for rule in RULES[plain]
                    for frame in FRAMES
                ]
    return runs


def _key(run: Run) -> tuple[Any, ...]:
    return run["case"], run["rule"], run["frame"], run["factor"], run["seed"]


def _loss_of(run: Run) -> float:
    return trained_loss(ZOO[run["case"]], run["seed"], maker(run))


# -- the figures -----------------------------------------------------------------------------------


def figures(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Medians over the seeds by network, rule, frame and factor; a run that diverged counts as infinite."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for run in sorted(runs, key=_key):
        loss = math.nan if run["loss"] is None else run["loss"]
        groups.setdefault(_key(run)[:4], []).append(loss)
    found = []
    for (case, rule, frame, factor), losses in groups.items():
        loss = middle(losses)
        finite = [x for x in losses if math.isfinite(x)]
        found.append(
            {
                "case": case,
                "rule": rule,
                "frame": frame,
                "factor": factor,
                "seeds": len(losses),
                "loss": round(loss, 4) if math.isfinite(loss) else None,
                "worst": round(max(finite), 4) if finite else None,
                "not_finite": len(losses) - len(finite),
            }
        )
    return found


def table(rows: list[dict[str, Any]], rule: str, plain: str, factor: float | None) -> str:
    """Median losses of a rule by frame in Markdown, at a factor of the usual rate, or at the best of them (None)."""
    frames = [PLAIN, *FRAMES]
    lines = [
        f"| network | {plain} | " + " | ".join(FRAMES) + " |",
        "| --- " * (len(frames) + 1) + "|",
    ]
    for case in ZOO:
        if not any(
            row["case"] == case and row["rule"] == rule and factor in (None, row["factor"])
            for row in rows
        ):
            continue
        cells = []
        for frame in frames:
            name = plain if frame == PLAIN else rule
            matching = [
                r for r in rows if (r["case"], r["rule"], r["frame"]) == (case, name, frame)
            ]
            losses = [_cell(r) for r in matching if factor in (None, r["factor"])]
            cells.append(min(losses)[1] if losses else "")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> tuple[float, str]:
    if row["loss"] is None:
        return math.inf, "not finite"
    lost = f" ({row['not_finite']} of {row['seeds']} not finite)" if row["not_finite"] else ""
    return row["loss"], f"{row['loss']:.3f}{lost}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(ZOO), default=list(CASES), metavar="CASE"
    )
    parser.add_argument(
        "--rules", nargs="+", choices=list(RULES), default=list(RULES), metavar="RULE"
    )
    parser.add_argument(
        "--factors", nargs="+", type=float, default=list(FACTORS), help="of the usual rates"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/frames.jsonl"), help="the file of the runs"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the tables of the runs that there are"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = [
        run
        for seed in range(given.first, given.first + given.seeds)
        for run in wanted(given.cases, given.rules, given.factors, seed)
    ]
    if not given.table:
        make_missing(runs, given.runs, _key, _loss_of)
    done = finished(given.runs, _key)
    rows = figures(done[key] for run in runs if (key := _key(run)) in done)
    for plain in given.rules:
        for rule in RULES[plain]:
            for factor in (*sorted({row["factor"] for row in rows}), None):
                rate = (
                    "the best rate of the grid"
                    if factor is None
                    else f"{factor:g} times the usual rate"
                )
                print(f"\n{rule}, {rate}\n\n{table(rows, rule, plain, factor)}")
    if given.json is not None:
        values = {"torch": torch.__version__, "pathspace": ps.__version__, "figures": rows}
        temporary = given.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        temporary.replace(given.json)


if __name__ == "__main__":
    main()
