"""The engines of `--engine`: worker processes on this machine, or a Ray cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from pathspace.experiments.executor import Executor

ENGINES = ("local", "ray")


def executor_for(
    engine: str, processes: int | None, *, address: str = "", threads: int = 1, device: str = "cpu"
) -> Executor:
    """Return who does the runs of a command; nothing is started before it is used in a `with` statement.

    Args:
        engine: A name in `ENGINES`.
        processes: Runs at a time; None: see `runs_at_a_time`, and as many as Ray has room for.
        address: Of a Ray cluster; empty: Ray is started here, and ends with the command.
        threads: Of a run, by which processors are counted.
        device: Where runs compute; one that needs a GPU gets one of the cluster's for itself.

    Raises:
        ConfigurationError: There is no such engine, or an address without Ray.
    """
    check_engine(engine, address)
    if engine == "ray":
        from pathspace.experiments.ray_tasks import RayTasks

        return RayTasks(address, processes, threads=threads, gpus=int(device != "cpu"))
    from pathspace.experiments.executor import ThisProcess
    from pathspace.experiments.workers import Workers

    processes = processes or runs_at_a_time(threads)
    return Workers(processes) if processes > 1 else ThisProcess()  # a single process needs no helper


def runs_at_a_time(threads: int = 1) -> int:
    """Return how many runs of so many threads are done here at a time by default: two, or one without room for two."""
    return max(1, min(2, (os.cpu_count() or 1) // threads))


def check_engine(engine: str, address: str) -> None:
    """Raise a `ConfigurationError` unless there is such an engine, and it takes the address."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES, "--engine")
    if address and engine != "ray":
        raise ConfigurationError(f"--address {address} names a Ray cluster: give --engine ray, too.")
