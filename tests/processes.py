"""Functions of tests in processes of their own, which start at once: copies of one that has loaded PyTorch already.

That one has never computed anything, so that there are no threads of PyTorch to be lost in a copy.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
from unittest import mock

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pathspace.optim.rules import newton_schulz
from pathspace.optim.rules.newton_schulz import orthogonalized

TIMEOUT = 300  # seconds, of processes that take a few
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
"""The exit codes of a process that crashed in compiled code."""


@functools.cache
def copies():
    context = multiprocessing.get_context("forkserver")
    # all that takes long to load: the first optimizer of torch asks for torch._dynamo
    context.set_forkserver_preload(
        [
            "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "pathspace.cli",
            "pathspace.optim", "pathspace.experiments.runner",
        ]
    )  # fmt: skip
    return context


def in_child(function, *args):
    """The exit code of a process that calls a function of a test module; negative for a signal."""
    (code,) = _ended([(function, *args)])
    return code


def in_processes(count, function, folder, *args):
    """What a function of a test module returns in each process of a group.

    Args:
        count: how many processes.
        function: called as ``function(rank, folder, *args)``.
        folder: what they share, a folder of the test's own.
        args: what can be pickled.
    """
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    codes = _group_codes(count, function, folder, args)
    if any(code in CRASHES for code in codes):
        # gloo aborts now and then in PyTorch's own threads ("double free or corruption"); a crash
        # of ours comes again
        codes = _group_codes(count, function, folder, args)
    assert codes == [0] * count
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(count)]


@contextlib.contextmanager
def orthogonalizations():
    """How many matrices each call of Newton-Schulz orthogonalizes, a list that grows."""
    counts = []

    def counted(matrices, count):
        counts.append(len(matrices) if matrices.dim() == 3 else 1)
        return orthogonalized(matrices, count)

    with mock.patch.object(newton_schulz, "orthogonalized", counted):
        yield counts


def _group_codes(count, function, folder, args):
    """Return the exit codes of the processes of one group."""
    # the store of the process that starts them, as torchrun has it
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        {
            "TORCHELASTIC_RUN_ID": "a test", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count), "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
        }
        for rank in range(count)
    ]  # fmt: skip
    return _ended([(_member, place, function, folder, args) for place in places])


def _member(place, function, folder, args):
    """One of the processes."""
    os.environ.update(place)
    torch.distributed.init_process_group("gloo")
    result = function(int(place["RANK"]), folder, *args)
    torch.save(result, folder / f"result-{place['RANK']}.pt")
    torch.distributed.destroy_process_group()


def _ended(calls):
    """The exit codes of processes that make these calls at the same time."""
    processes = [copies().Process(target=_called, args=call) for call in calls]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _called(function, *args):
    torch.set_num_threads(1)
    function(*args)
