"""A computation on a GPU that is recorded once as a CUDA graph and then repeated by one launch.

A refresh of kappa is many small operations. On a GPU, launching them one by one takes much longer
than they run. A CUDA graph repeats exactly the same kernels on the same memory, so its results are
those of the operations themselves, to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

LARGEST = 2**28
"""Bytes of the tensors that a recorded computation may read. What it computes stays in memory between the repetitions,
and operations on larger tensors take longer than their launches."""
SWITCH = "PATHSPACE_RECORD"
"""The variable of the environment that is 1 where computations are to be recorded."""
T = TypeVar("T")


class Recording:
    """Repeats a computation that reads the same memory each time.

    The first time something is evaluated, its operations run one by one; the second time they are
    recorded; from then on one launch repeats them. They are recorded only where
    ``PATHSPACE_RECORD=1`` is in the environment, all tensors are on one GPU, and no operation waits
    for a result.

    Attributes:
        is_recorded: whether the latest evaluation was a launch of the recording.
        failure: why the computation cannot be recorded; empty if nothing speaks against it.

    Example:
        >>> import torch
        >>> from pathspace.paths.kernel.recording import Recording
        >>> x, twice = torch.ones(3), Recording()
        >>> twice([x], (), lambda: 2 * x)
        tensor([2., 2., 2.])
    """

    def __init__(self) -> None:
        self.is_recorded = False
        self.failure = ""
        self._key: Any = None
        self._kept: Any = None  # so that nothing else takes the place of what the key names
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(
        self,
        reads: Iterable[Tensor],
        decisions: tuple[Any, ...],
        evaluate: Callable[[], T],
        objects: tuple[object, ...] = (),
    ) -> T:
        """Evaluate a function, or repeat its recording.

        Args:
            reads: all tensors that the function reads and that others write. What it changes in
                them must have been written anew before the next evaluation.
            decisions: what else decides which operations it runs; compared by ``==``.
            evaluate: the function. It must not draw random numbers.
            objects: the same, compared by identity.

        Returns:
            What the function returns. Tensors in it are overwritten by the next evaluation.
        """
        reads = list(reads)
        self.is_recorded = False
        if not self._may_record(reads):
            return evaluate()
        key = (tuple(map(_place, reads)), decisions, tuple(map(id, objects)))
        if key != self._key:
            self._forget()
            self._key = key
            self._kept = reads, objects
            return evaluate()
        if self._graph is None and not self._record(reads[0].device, evaluate):
            return evaluate()
        assert self._graph is not None
        self._graph.replay()
        self.is_recorded = True
        return self._result

    def _forget(self) -> None:
        self._key = self._kept = self._graph = self._result = None

    def _may_record(self, reads: list[Tensor]) -> bool:
        if self.failure or not reads or os.environ.get(SWITCH) != "1":
            return False
        if not all(map(is_launched, reads)) or len({tensor.device for tensor in reads}) > 1:
            return False
        size = sum(tensor.numel() * tensor.element_size() for tensor in reads)
        return size <= LARGEST

    def _record(self, device: torch.device, evaluate: Callable[[], Any]) -> bool:
        """Record the computation; return whether that was possible."""
        try:
            self._graph, self._result = capture(device, evaluate)
        except RuntimeError as error:
            self.failure = str(error).partition("\n")[0]
            self._forget()
            return False
        return True


def is_launched(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are launched on a GPU, which costs more than small ones take."""
    return tensor.is_cuda


def capture(device: torch.device, evaluate: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a CUDA graph of what a function does, and where its results will be after a replay."""
    graph = torch.cuda.CUDAGraph()
    # other threads, such as those that load data, may go on working with the GPU
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = evaluate()
    return graph, result


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return a fingerprint of a tensor's memory and layout; it changes when either does."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
