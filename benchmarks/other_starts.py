"""Whether geometry by step beats balancing once elsewhere than in long memory: eight starts that promised it.

Each start (``other_starts_scenes``) is trained by SGD, AdamW and Muon: on the weights as they are,
balanced once (``ps.rescaling.balance_``), and with kappa in every step, at power 1 (``power 1/2``
is there, too; ``measure`` and ``layers`` are other members that ``balance_`` leads to, measured on
the first batch). Batches, clipping (norm 1, each in its own coordinates), the schedule (5 %
warm-up, cosine) and the way to a rate are the same for all: four rates on two tuning seeds, the one
of the least median test loss; then twelve other seeds at that rate. A figure is the test loss.

A method is called better or worse than its rule balanced once where an exact sign test over the
twelve pairs says so, adjusted by Holm's method for all comparisons of the table; a run that
diverged loses to every other.

    python benchmarks/other_starts.py --json benchmarks/results/other-starts.json     # hours on one core; it goes on
    python benchmarks/other_starts.py --scenes fixup merged --rules Muon --seeds 4
    python benchmarks/other_starts.py --table                                # of the runs that there are

Runs are appended to a file, one JSON line each, and those that are in it are not repeated. Images
are read from ``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import pathspace as ps
from other_starts_scenes import SCENES, Scene
from pathspace.experiments.report.statistics import LEVEL, holm, sign_test
from pathspace.experiments.run import factor
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.rescaling.criteria import Criterion
from run_file import Run, finished, make_missing

RATES = {
    "SGD": (0.01, 0.03, 0.1, 0.3),
    "AdamW": (0.001, 0.003, 0.01, 0.03),
    "Muon": (0.001, 0.003, 0.01, 0.03),
}
METHODS = ("weights", "balanced", "power 1", "power 1/2", "measure", "layers")
ONCE: dict[str, Criterion] = {"balanced": "path", "measure": "measure", "layers": "layers"}
"""The criterion of ``balance_`` for the methods that change the weights once."""
TUNING_SEEDS, FIRST_TUNING_SEED, SEEDS = 2, 1000, 12
CLIP, WARMUP, MOMENTUM, DAMPING = 1.0, 0.05, 0.9, 0.01

# scene, rule, method, rate -> seed -> loss
Losses = dict[tuple[str, str, str, float], dict[int, float]]


def _optimizer(
    rule: str, method: str, model: nn.Module, example: Tensor, rate: float, first: Tensor
) -> Optimizer:
    params = list(model.parameters())
    if method in ONCE:
        data = first if method == "measure" else None
        ps.rescaling.balance_(ps.trace(model, example), criterion=ONCE[method], calibration=data)
    if method in (*ONCE, "weights"):
        if rule == "SGD":
            return SGD(params, lr=rate, momentum=MOMENTUM)
        return (
            AdamW(params, lr=rate, weight_decay=0.0)
            if rule == "AdamW"
            else MuonAdamW(params, lr=rate)
        )
    network = ps.trace(model, example)
    metric = ps.metrics.Path(power=0.5 if method == "power 1/2" else 1.0, damping=DAMPING)
    if rule == "Muon":
        return ps.optim.PathMuon(params, network, lr=rate, clip_norm=CLIP, metric=metric)
    if rule == "AdamW":
        return ps.optim.PathAdam(params, network, lr=rate, clip_norm=CLIP, metric=metric)
    return ps.optim.PathSGD(
        params, network, lr=rate, momentum=MOMENTUM, clip_norm=CLIP, metric=metric
    )


def final_loss(scene: Scene, rule: str, method: str, rate: float, seed: int) -> float:
    """The test loss after training; infinite if training diverged."""
    torch.manual_seed(seed)
    model = scene.make(seed)
    kept = scene.kept(model)
    first = scene.batch(torch.Generator().manual_seed(seed))[0]
    optimizer = _optimizer(rule, method, model, scene.test()[0][:2], rate, first)
    plain = method in (*ONCE, "weights")
    generator = torch.Generator().manual_seed(seed)
    for step in range(scene.steps):
        x, y = scene.batch(generator)
        loss = scene.loss(model(x), y)
        if not math.isfinite(loss.item()):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        if plain:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor("cosine", WARMUP, step, scene.steps)
        try:
            optimizer.step()
        except FloatingPointError:
            return math.inf
        with torch.no_grad():
            for p, mask in kept.items():
                p.mul_(mask)
    with torch.no_grad():
        x, y = scene.test()
        loss = float(scene.loss(model(x), y))
    return loss if math.isfinite(loss) else math.inf


# -- the runs --------------------------------------------------------------------------------------


def _key(run: Run) -> tuple[Any, ...]:
    return run["scene"], run["rule"], run["method"], run["rate"], run["seed"]


def train(wanted: list[Run], path: Path) -> None:
    """Make the runs that are missing."""
    make_missing(
        wanted,
        path,
        _key,
        lambda run: final_loss(
            SCENES[run["scene"]], run["rule"], run["method"], run["rate"], run["seed"]
        ),
        digits=6,
    )


def losses_of(path: Path) -> Losses:
    """The losses in a file."""
    losses: Losses = {}
    for run in finished(path, _key).values():
        place = losses.setdefault((run["scene"], run["rule"], run["method"], run["rate"]), {})
        place[run["seed"]] = math.inf if run["loss"] is None else run["loss"]
    return losses


def chosen_rate(losses: Losses, scene: str, rule: str, method: str, tuning: range) -> float | None:
    """The rate of the least median loss on the tuning seeds; None while runs are missing."""
    medians = {}
    for rate in RATES[rule]:
        found = losses.get((scene, rule, method, rate), {})
        if any(seed not in found for seed in tuning):
            return None
        medians[rate] = statistics.median(found[seed] for seed in tuning)
    return min(medians, key=medians.__getitem__)


# -- the figures -----------------------------------------------------------------------------------


def figures(
    losses: Losses,
    scenes: list[str],
    rules: list[str],
    methods: list[str],
    tuning: range,
    seeds: range,
) -> list[dict[str, Any]]:
    """Every method at its rate, tested against its rule balanced once."""
    rows = []
    for scene in scenes:
        for rule in rules:
            found = {m: _reported(losses, scene, rule, m, tuning, seeds) for m in methods}
            balanced = _reported(losses, scene, rule, "balanced", tuning, seeds)
            for method, row in found.items():
                if row is None or balanced is None:
                    continue
                row = {"scene": scene, "rule": rule, "method": method, **row}
                if method != "balanced":
                    pairs = list(zip(row["losses"], balanced["losses"], strict=True))
                    wins, defeats = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
                    row |= {"wins": wins, "defeats": defeats, "p": sign_test(wins, defeats)}
                rows.append(row)
    compared = [row for row in rows if "p" in row]
    for row, adjusted in zip(compared, holm([row["p"] for row in compared]), strict=True):
        row["adjusted"] = adjusted
        row["verdict"] = (
            "" if adjusted >= LEVEL else "better" if row["wins"] > row["defeats"] else "worse"
        )
    return rows


def _reported(
    losses: Losses, scene: str, rule: str, method: str, tuning: range, seeds: range
) -> dict[str, Any] | None:
    rate = chosen_rate(losses, scene, rule, method, tuning)
    found = {} if rate is None else losses.get((scene, rule, method, rate), {})
    if any(seed not in found for seed in seeds):
        return None
    values = [found[seed] for seed in seeds]
    edge = rate in (min(RATES[rule]), max(RATES[rule]))
    return {"rate": rate, "edge": edge, "losses": values, "median": statistics.median(values)}


def table(rows: list[dict[str, Any]], methods: list[str]) -> str:
    """Median test losses in Markdown, with wins of twelve pairs and p against the rule balanced once."""
    lines = ["| start | rule | " + " | ".join(methods) + " |", "| --- " * (len(methods) + 2) + "|"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        edge = r"\*" if row["edge"] else ""
        text = f"{row['median']:.4f} at {row['rate']:g}{edge}"
        if "p" in row:
            text += f" ({row['wins']} of {len(row['losses'])}, p {_p(row['adjusted'])})"
            text = f"**{text}, {row['verdict']}**" if row["verdict"] else text
        cells.setdefault((row["scene"], row["rule"]), {})[row["method"]] = text
    for (scene, rule), by_method in cells.items():
        lines.append(
            f"| {scene} | {rule} | " + " | ".join(by_method.get(m, "") for m in methods) + " |"
        )
    return "\n".join(lines)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "losses": [_finite(v) for v in row["losses"]], "median": _finite(row["median"])}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenes", nargs="+", choices=list(SCENES), default=list(SCENES), metavar="SCENE"
    )
    parser.add_argument(
        "--rules", nargs="+", choices=list(RATES), default=list(RATES), metavar="RULE"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS[:3], metavar="METHOD"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="reported ones")
    parser.add_argument("--tuning-seeds", type=int, default=TUNING_SEEDS, help="of each rate")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/other-starts.jsonl"), help="the file of the runs"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the runs that there are"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tuning, seeds = (
        range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + given.tuning_seeds),
        range(given.seeds),
    )
    if not given.table:
        for scene in given.scenes:
            some = [
                {"scene": scene, "rule": r, "method": m} for r in given.rules for m in given.methods
            ]
            train(
                [
                    {**one, "rate": rate, "seed": seed}
                    for one in some
                    for rate in RATES[one["rule"]]
                    for seed in tuning
                ],
                given.runs,
            )
            losses = losses_of(given.runs)
            chosen = [
                {**one, "rate": chosen_rate(losses, scene, one["rule"], one["method"], tuning)}
                for one in some
            ]
            train([{**one, "seed": seed} for one in chosen for seed in seeds], given.runs)
    rows = figures(losses_of(given.runs), given.scenes, given.rules, given.methods, tuning, seeds)
    print(table(rows, given.methods))
    if given.json is not None:
        temporary = given.json.with_suffix(".tmp")
        values = {
            "torch": torch.__version__,
            "pathspace": ps.__version__,
            "figures": [_plain(row) for row in rows],
        }
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        temporary.replace(given.json)


if __name__ == "__main__":
    main()
