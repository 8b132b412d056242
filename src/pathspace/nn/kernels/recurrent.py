"""The compiled recurrent layer as a function of tensors that autograd differentiates.

Letters: T steps, B sequences, D inputs, H units, N rows of packed sequences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.nn.kernels import compiled

TERMS = 256
"""About how many rows the sums of gradients take at once: they should still be in the processor's caches."""
PER_THREAD = 2**21
"""Multiplications that are worth another thread."""


def instructions() -> str | None:
    """Return the instructions that the kernel uses on this processor; None if it has none for it."""
    return {64: "AVX-512", 32: "AVX2"}.get(compiled.WIDTH)


def layer(
    x: Tensor,
    h0: Tensor | None,
    weights: tuple[Tensor, ...],
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run one direction of one ReLU layer.

    Args:
        x: ``[T, B, D]``, ``[B, T, D]`` with `batch_first`, or ``[N, D]`` packed.
        h0: ``[B, H]``, zero if None.
        weights: W_in ``[H, D]``, W_rec ``[H, H]`` and, if there are, two biases ``[H]``.
        batch_sizes: ``[T]``, of packed sequences.
        reverse: whether to go from the last step to the first.
        batch_first: whether sequences come before steps in `x` and in the states.

    Returns:
        All states, ``[T, B, H]``, ``[B, T, H]`` or ``[N, H]``, and the last ones, ``[1, B, H]``.
    """
    biases = () if len(weights) == 4 else (None, None)
    return _Layer.apply(x, h0, *weights, *biases, batch_sizes, reverse, batch_first)  # type: ignore[return-value]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h0: Tensor | None, w_in: Tensor, w_rec: Tensor, b_in: Tensor | None,
                b_rec: Tensor | None, batch_sizes: Tensor | None, reverse: bool, batch_first: bool,
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
        steps = _Steps(x, w_rec, batch_sizes, reverse, batch_first)
        start = steps.start(h0)
        out = steps.rows_like(x, steps.units)
        last = x.new_empty(1, steps.sequences, steps.units)
        biases = [None if bias is None else bias.contiguous() for bias in (b_in, b_rec)]

        def run(low: int, high: int, _: int) -> None:
            compiled.forward(
                steps.call(x, w_in, w_rec, start), _address(biases[0]), _address(biases[1]),
                _address(out), _address(last), low, high,
            )  # fmt: skip

        _in_threads(run, steps, steps.threads())
        ctx.save_for_backward(x, h0, w_in, w_rec, b_in, b_rec, out)
        ctx.steps = steps
        ctx.batch_sizes = batch_sizes
        ctx.reverse = reverse
        ctx.batch_first = batch_first
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        again = torch.is_grad_enabled()
        # for a second derivative, or for a batch of gradients, which has no memory
        if again or not all(g is None or torch._C._has_storage(g) for g in gradients):
            return _by_pytorch(ctx, saved[:-1], gradients, again)
        out = saved[-1]
        if any(t is not None and (t.dtype, t.device) != (out.dtype, out.device) for t in saved):
            raise RuntimeError(
                "a recurrent layer changed its type or device before its gradient was taken"
            )
        return _by_loops(ctx, saved, gradients)


class _Steps:
    """Type, sizes and steps of a call, which the compiled functions must know beside its tensors."""

    def __init__(
        self, x: Tensor, w_rec: Tensor, batch_sizes: Tensor | None, reverse: bool, batch_first: bool
    ) -> None:
        shape = x.shape
        self.size = x.element_size()
        self.units = w_rec.shape[-1]
        self.packed = batch_sizes is not None
        self.batch_first = batch_first
        if batch_sizes is None:
            T, self.sequences = (shape[-2], shape[-3]) if batch_first else (shape[-3], shape[-2])
            self.rows, first = _even(T, self.sequences)
        else:
            self.rows = batch_sizes.numpy()
            self.sequences = int(self.rows[0])
            first = np.cumsum(self.rows) - self.rows
        self._common = (
            _UNITS[x.dtype],
            (self.size, shape[-1], self.units),
            self.rows,
            first,
            int(reverse),
        )

    def call(
        self, x: Tensor, w_in: Tensor, w_rec: Tensor, start: tuple[Tensor, int]
    ) -> tuple[Any, ...]:
        """Return the first arguments of the compiled functions: sizes, and addresses with strides in bytes."""
        matrices = [
            (_address(w), self.size * w.stride(0), self.size * w.stride(1)) for w in (w_in, w_rec)
        ]
        return (
            *self._common,
            (_address(x), *self.strides(x)),
            *matrices,
            (_address(start[0]), start[1]),
        )

    def start(self, h0: Tensor | None) -> tuple[Tensor, int]:
        """Return the first states, and bytes from a sequence to the next."""
        if h0 is not None:
            return h0.contiguous(), self.units * self.size
        # zeros are multiplied like other states: an infinite weight makes NaN of them, as in PyTorch
        return _zeros(self.units, self.size), 0

    def strides(self, matrix: Tensor) -> tuple[int, int, int, int]:
        """Bytes from a step, a row of the states, a sequence and a number to the next."""
        size = self.size
        stride = matrix.stride()
        if self.packed:
            return 0, size * stride[-2], size * stride[-2], size * stride[-1]
        step, sequence = (stride[-2], stride[-3]) if self.batch_first else (stride[-3], stride[-2])
        return size * step, 0, size * sequence, size * stride[-1]

    def rows_like(self, x: Tensor, columns: int) -> Tensor:
        """Return a new matrix of so many columns in the form of the input, whose memory goes from step to step."""
        shape = (*x.shape[:-1], columns)
        if not self.batch_first:
            return x.new_empty(shape)
        B, _, _ = shape
        return x.new_empty_strided(shape, (columns, B * columns, 1))

    def threads(self) -> int:
        """Return how many threads are worth their start."""
        most = min(torch.get_num_threads(), self.sequences // 4)
        if most <= 1:
            return 1
        work = int(self.rows.sum()) * self.units * (self.units + self._common[1][1])
        return max(1, min(most, work // PER_THREAD))


# A step of a small network takes a few hundred microseconds, and each array that is made anew takes
# some of them.
_UNITS = {torch.float32: np.float32(1), torch.float64: np.float64(1)}


@lru_cache(64)
def _even(steps: int, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of each step and their starts, for sequences of one length; callers must not write to them."""
    return np.full(steps, sequences), np.arange(steps) * sequences


@lru_cache(64)
def _zeros(count: int, size: int) -> Tensor:
    """Return zeros of so many bytes each; nobody writes to them."""
    return torch.zeros(count * size, dtype=torch.uint8, device="cpu")


def _by_loops(
    ctx: Any, saved: Sequence[Any], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients as the compiled loops compute them.

    Args:
        ctx: of the layer.
        saved: the inputs of the layer, and the states.
        gradients: of the states and of the last states; None for zero.
    """
    steps = ctx.steps
    x, h0, w_in, w_rec, b_in, _, out = saved
    # the loops read the states step by step; a hook on saved tensors (torch's save_on_cpu) may have
    # laid them out in another way
    if steps.batch_first:
        out = out.transpose(0, 1)
    out = out.contiguous()
    start = steps.start(h0)
    H, D = w_in.shape
    threads = steps.threads()
    chunk = max(1, min(len(steps.rows), TERMS // steps.sequences))
    g_out, g_last = gradients
    g_out = _readable(g_out)
    if g_last is not None:
        g_last = g_last.contiguous().resolve_neg()
    strides_of_g_out = (0, 0, 0) if g_out is None else steps.strides(g_out)[:3]
    g_x = steps.rows_like(x, D) if ctx.needs_input_grad[0] else None
    g_h0 = x.new_empty(h0.shape) if ctx.needs_input_grad[1] else None
    # each thread has sums of its own
    per_thread = (threads,) if threads > 1 else ()
    g_in = x.new_empty(*per_thread, H, D)
    g_rec = x.new_empty(*per_thread, H, H)
    g_bias = x.new_empty(*per_thread, H)

    def run(low: int, high: int, thread: int) -> None:
        compiled.backward(
            steps.call(x, w_in, w_rec, start), _address(out), (_address(g_out), *strides_of_g_out),
            _address(g_last), _address(g_x), _address(g_h0), _address(g_in, thread),
            _address(g_rec, thread), _address(g_bias, thread), chunk, low, high,
        )  # fmt: skip

    _in_threads(run, steps, threads)
    if threads > 1:
        g_in = g_in.sum(0)
        g_rec = g_rec.sum(0)
        g_bias = g_bias.sum(0)
    # both biases are summands of one sum, so their gradients are equal
    biases = (None, None) if b_in is None else (g_bias, g_bias.clone())
    return g_x, g_h0, g_in, g_rec, *biases, None, None, None


def _readable(g_out: Tensor | None) -> Tensor | None:
    """Return a gradient of the states whose numbers the loops can read, the units of a state side by side."""
    if g_out is None or (g_out.stride(-1) == 1 and not g_out.is_neg()):
        return g_out
    return g_out.contiguous().resolve_neg()


@torch.enable_grad()
def _by_pytorch(
    ctx: Any, saved: Any, gradients: tuple[Tensor | None, ...], again: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients by autograd, through a second forward pass with PyTorch's operations.

    Args:
        ctx: of the layer.
        saved: the inputs of the layer.
        gradients: of the states and of the last states; None for zero.
        again: whether the gradients may be differentiated again.
    """
    # an input may have been computed from another one: views keep that part out of the gradient
    inputs: tuple[Any, ...] = tuple(None if each is None else each.view_as(each) for each in saved)
    results = _again(ctx, *inputs)
    outputs = []
    grad_outputs = []
    for value, gradient in zip(results, gradients, strict=True):
        if gradient is not None:
            outputs.append(value)
            grad_outputs.append(gradient)
    needs = ctx.needs_input_grad[:6]
    wanted = [one for one, needed in zip(inputs, needs, strict=True) if needed]
    found = iter(
        torch.autograd.grad(outputs, wanted, grad_outputs, create_graph=again, allow_unused=True)
    )
    return (*(next(found) if needed else None for needed in needs), None, None, None)


def _again(
    ctx: Any, x: Any, h0: Any, w_in: Any, w_rec: Any, b_in: Any, b_rec: Any
) -> tuple[Tensor, Tensor]:
    """Return all states of one layer, and the last ones, by PyTorch's operations."""
    H = len(w_rec)
    start = x.new_zeros(ctx.steps.sequences, H) if h0 is None else h0
    weights = [weight for weight in (w_in, w_rec, b_in, b_rec) if weight is not None]
    both = 1 + ctx.reverse  # the direction back is the second of two
    options = (weights * both, b_in is not None, 1, 0.0, False, ctx.reverse)
    hx = start.expand(both, -1, -1)
    if ctx.batch_sizes is None:
        out, last = torch.rnn_relu(x, hx, *options, ctx.batch_first)
    else:
        out, last = torch.rnn_relu(x, ctx.batch_sizes, hx, *options)
    return out[..., -H:], last[-1:]


def _address(matrix: Tensor | None, index: int = 0) -> int:
    """Return where one of the parts of a matrix begins; 0 if there is no matrix."""
    return (
        0
        if matrix is None
        else matrix.data_ptr() + index * matrix.stride(0) * matrix.element_size()
    )


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process needs its own
    return ThreadPoolExecutor(threads, "pathspace-rnn")


def _in_threads(run: Callable[[int, int, int], None], steps: _Steps, threads: int) -> None:
    """Divide the sequences among threads.

    Args:
        run: computes the sequences from the first number up to the second, as the thread with the
            third number.
        steps: of the call.
        threads: how many.
    """
    bounds = [steps.sequences * i // threads for i in range(threads + 1)]
    others = [
        _pool(os.getpid(), torch.get_num_threads()).submit(run, bounds[i], bounds[i + 1], i)
        for i in range(1, threads)
    ]
    run(0, bounds[1], 0)
    for other in others:
        other.result()
