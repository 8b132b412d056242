"""The cost of an epoch by each method, as a ratio to the first one, SGD.

All methods train copies of one network in one process and take turns of a few steps; in each round
the time of a turn is divided by that of the first method's turn in the same round, and the figure
is the median of these ratios. So what else the machine does falls on all of them alike. With one
thread the time is the thread's own, from which other programs take less.

Source: Path Space for Recurrent Neural Networks with ReLU Activations (2019), time per epoch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from pathspace.experiments.compare import Comparison
from pathspace.experiments.engine import initial_state, steps_per_epoch
from pathspace.experiments.layers import Count
from pathspace.experiments.methods import METHODS
from pathspace.experiments.monitor import UNHEARD, Monitor
from pathspace.experiments.report.document import Lines, Section, Table, TableRow
from pathspace.experiments.settings import Settings
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task

SMALL_RATE = 1e-6  # every copy stays near the start while it is timed


@dataclass(frozen=True)
class Cost:
    """The cost of one method.

    Attributes:
        method: A name in `methods.METHODS`.
        seconds: Of an epoch: the median turn, over its steps, times the steps of an epoch.
        ratio: The median of the ratios to the first method.
        lower: Their lower quartile.
        upper: Their upper quartile.
    """

    method: str
    seconds: float
    ratio: float
    lower: float
    upper: float


def study(
    comparison: Comparison,
    monitor: Monitor = UNHEARD,
    *,
    rounds: Count = 15,
    steps: Count = 20,
    data_dir: Path | None = None,
) -> list[Section]:
    """Time the methods of a comparison.

    Args:
        comparison: Says which task, model and methods.
        monitor: Told before each round how far it is.
        rounds: Turns of every method.
        steps: Training steps of a turn.
        data_dir: Where the task looks for its data.
    """
    settings = comparison.settings
    task = build_task(settings.task, settings.task_options, data_dir=data_dir)
    costs = measure(settings, task, rounds, steps, monitor)
    values = [asdict(cost) for cost in costs]
    numbers = {
        "cost.csv": Lines(tuple(values[0]), [tuple(one.values()) for one in values]),
        "cost.json": {"rounds": rounds, "steps": steps, "costs": values},
    }
    rows = [
        TableRow(
            (
                METHODS[cost.method].label,
                f"{cost.seconds:.3f}",
                f"{cost.ratio:.2f}",
                f"{cost.lower:.2f} to {cost.upper:.2f}",
            )
        )
        for cost in costs
    ]
    heading = "Cost of an epoch"
    columns = ("optimizer", "seconds", f"beside {METHODS[costs[0].method].label}", "quartiles")
    note = f"Medians over {rounds} rounds of {steps} steps a method, taken in turn; quartiles."
    return [Section(heading, Table(heading, columns, tuple(rows), (note,)), numbers=numbers)]


def measure(
    settings: Settings, task: Task, rounds: int, steps: int, monitor: Monitor = UNHEARD
) -> list[Cost]:
    """Return the cost of every method of `settings`, in their order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            turns = {name: _turn(settings, task, name, steps) for name in settings.methods}
            for turn in turns.values():  # memory and caches
                turn()
            taken = []
            for k in range(rounds):
                monitor.advanced("cost", k / rounds, f"round {k + 1}/{rounds}")
                taken.append({name: turn() for name, turn in turns.items()})
    finally:
        torch.set_num_threads(threads)
    first, epoch = settings.methods[0], steps_per_epoch(settings.batch_size, task)
    costs = []
    for name in settings.methods:
        ratios = [row[name] / row[first] for row in taken]
        seconds = statistics.median(row[name] for row in taken) / steps * epoch
        # of a single round all three are its ratio
        several = ratios if rounds > 1 else 2 * ratios
        lower, middle, upper = statistics.quantiles(several, n=4, method="inclusive")
        costs.append(Cost(name, seconds, middle, lower, upper))
    return costs


def _turn(settings: Settings, task: Task, name: str, steps: int) -> Callable[[], float]:
    """Return a function that takes `steps` training steps, as runs do, and returns the seconds they took."""
    torch.manual_seed(0)
    config = settings.run_config(name, settings.starts[0], SMALL_RATE, 0, evaluate_test=False)
    state = initial_state(config, task, METHODS[name])
    model, optimizer = state.model, state.optimizer
    clip_norm = None if METHODS[name].clips_itself else config.clip_norm
    inputs, targets = (t[: settings.batch_size] for t in (task.train.inputs, task.train.targets))

    clock = time.thread_time if settings.threads == 1 else time.perf_counter

    def turn() -> float:
        began = clock()
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
        return clock() - began

    return turn
