"""Functions of tests that run in several processes of one gloo group."""

import datetime
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TIMEOUT = 300  # seconds, of processes that take a few


def in_processes(count, function, folder, *args):
    """What a function of a test module returns in each process of a group.

    Args:
        count: how many processes.
        function: called as ``function(rank, folder, *args)``.
        folder: what they share, a folder of the test's own.
        args: strings.
    """
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    module = Path(function.__code__.co_filename)
    paths = [str(module.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    code = "import processes, sys; processes.run(*sys.argv[1:])"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, module.stem, function.__name__, str(folder), str(count), str(rank), *args],
            env=environment,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        codes = [run.wait(timeout=TIMEOUT) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
        (folder / "store").unlink(missing_ok=True)
    assert codes == [0] * count
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(count)]


def run(module, function, folder, count, rank, *args):
    """One of the processes."""
    torch.set_num_threads(1)
    folder = Path(folder)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=int(rank),
        world_size=int(count),
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    result = getattr(importlib.import_module(module), function)(int(rank), folder, *args)
    torch.save(result, folder / f"result-{rank}.pt")
    torch.distributed.destroy_process_group()
