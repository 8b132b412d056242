"""Whether `pathspace train` comes through with its defaults: every task with every method that fits it, cut short.

A run is what `pathspace train --task T --method M` does, for so many steps. It is lost where the
loss or a step is not finite, or where the loss rose above ten times its beginning and ended no
better (`RunResult.lost_at`). The exit status is 1 if any run was.

    python benchmarks/default_training.py                          # goes on where it was stopped
    python benchmarks/default_training.py --tasks digits --methods path-sgd g-sgd --steps 740
    python benchmarks/default_training.py --table                  # of the runs that there are; trains nothing

Runs are appended to a file, one JSON line each. MNIST and the texts are read from
``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.runner import load_task
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tasks import TASKS
from pathspace.experiments.tasks.task import Split, Task

STEPS, LAST, VALIDATED = 300, 20, 500
GENERATED_OR_SMALL = ("digits", "adding", "mnist", "images")


def configuration(task: str, method: str, seed: int) -> RunConfig:
    """What `pathspace train` would run.

    Raises:
        ConfigurationError: the method does not fit the task's model.
    """
    rate = METHODS[method].learning_rate
    chosen = {"task": task, "methods": [method], "starts": ["default"], "learning_rates": [rate]}
    return settings_from(("the benchmark", chosen)).run_config(
        method, "default", rate, seed, evaluate_test=False
    )


def short_run(config: RunConfig, steps: int) -> RunResult:
    """The run on the first so many batches, in more passes where there are not so many."""
    task = load_task(config.task, config.task_options, None)
    train = _first(task.train, steps * config.batch_size)
    passes = -(-steps // (len(train) // config.batch_size))
    short: Task = replace(task, train=train, validation=_first(task.validation, VALIDATED))
    return run(replace(config, epochs=passes), short)


def _first(split: Split, count: int) -> Split:
    return replace(split, inputs=split.inputs[:count], targets=split.targets[:count])


def train(wanted: list[tuple[str, str, int]], steps: int, path: Path) -> None:
    """Make the runs that are missing, one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = finished(path, steps)
    for task, method, seed in wanted:
        if (task, method, seed) in done:
            continue
        try:
            config = configuration(task, method, seed)
        except ConfigurationError:  # the method has a model of its own, or needs another one
            continue
        start = time.monotonic()
        result = short_run(config, steps)
        line = {
            "task": task,
            "method": method,
            "seed": seed,
            "wanted": steps,
            "steps": len(result.losses),
            "lost_at": result.lost_at,
            "first": _mean(result.losses[:1]),
            "last": _mean(result.losses[-LAST:]),
            "seconds": round(time.monotonic() - start, 1),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), file=sys.stderr, flush=True)


def _mean(losses: tuple[float, ...]) -> float | None:
    return round(statistics.fmean(losses), 4) if losses else None


def finished(path: Path, steps: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The runs of so many steps in a file; a last line that was cut off is none."""
    runs = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        if one["wanted"] == steps:
            runs[one["task"], one["method"], one["seed"]] = one
    return runs


def table(runs: list[dict[str, Any]], tasks: list[str]) -> str:
    """First and last losses of every seed in Markdown; a run that was lost stands in bold."""
    cells: dict[str, dict[str, list[str]]] = {}
    for one in runs:
        cell, lost = f"{one['first']} to {one['last']}", one["lost_at"]
        shown = cell if lost is None else f"**lost at {lost}: {cell}**"
        cells.setdefault(one["method"], {}).setdefault(one["task"], []).append(shown)
    lines = ["| method | " + " | ".join(tasks) + " |", "| --- " * (len(tasks) + 1) + "|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {m} | " + " | ".join("; ".join(c.get(t, ())) for t in tasks) + " |"
                for m, c in cells.items()
            ),
        ]
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(GENERATED_OR_SMALL))
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--runs", type=Path, default=Path("runs/default-training.jsonl"))
    parser.add_argument(
        "--table", action="store_true", help="print the table of the runs that there are"
    )
    given = parser.parse_args()
    wanted = [(t, m, s) for s in range(given.seeds) for t in given.tasks for m in given.methods]
    if not given.table:
        train(wanted, given.steps, given.runs)
    done = finished(given.runs, given.steps)
    runs = [done[key] for key in wanted if key in done]
    print(table(runs, given.tasks))
    sys.exit(any(one["lost_at"] is not None for one in runs))


if __name__ == "__main__":
    main()
