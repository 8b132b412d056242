"""The compiled recurrent layer as a function of tensors that autograd differentiates.

Letters: T steps, B sequences, D inputs, H units, N rows of packed sequences, K copies of a layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import repeat
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
    """The instructions that the kernel uses on this processor; None if it has none for it."""
    return {64: "AVX-512", 32: "AVX2"}.get(compiled.WIDTH)


def layer(
    x: Tensor,
    h0: Tensor | None,
    weights: tuple[Tensor, ...],
    batch_sizes: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One direction of one ReLU layer, or of K copies of it: all but `batch_sizes` then begins with a dimension K.

    Args:
        x: ``[T, B, D]``, or ``[N, D]`` packed.
        h0: ``[B, H]``, zero if None.
        weights: W_in ``[H, D]``, W_rec ``[H, H]`` and, if there are, two biases ``[H]``.
        batch_sizes: ``[T]``, of packed sequences.
        reverse: whether to go from the last step to the first.

    Returns:
        All states, ``[T, B, H]`` or ``[N, H]``, and the last ones, ``[1, B, H]``.
    """
    biases = () if len(weights) == 4 else (None, None)
    return _Layer.apply(x, h0, *weights, *biases, batch_sizes, reverse)  # type: ignore[return-value]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h0: Tensor | None, w_in: Tensor, w_rec: Tensor, b_in: Tensor | None,
                b_rec: Tensor | None, batch_sizes: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        steps = _Steps(x, h0, batch_sizes, reverse, w_rec)
        out = x.new_empty(*x.shape[:-1], steps.units)
        w_in_t, w_rec_t = w_in.mT.contiguous(), w_rec.mT.contiguous()
        biases = [None if bias is None else bias.contiguous() for bias in (b_in, b_rec)]

        def run(copy: int, low: int, high: int, _: int) -> None:
            compiled.forward(
                *steps.arguments(x, copy), _address(w_in_t, copy), _address(w_rec_t, copy), _address(biases[0], copy),
                _address(biases[1], copy), steps.start(copy), _address(out, copy), low, high,
            )  # fmt: skip

        _in_threads(run, steps, steps.threads())
        ctx.save_for_backward(x, h0, w_in, w_rec, b_in, b_rec, out)
        ctx.batch_sizes, ctx.reverse = batch_sizes, reverse
        ctx.set_materialize_grads(False)
        return out, _last(out, batch_sizes, reverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: PyTorch's own operations, which have one
            return _differentiable(ctx, saved[:-1], gradients)
        g_out, g_last = gradients
        x, h0, w_in, w_rec, b_in, _, out = saved
        H, D = w_in.shape[-2:]
        steps = _Steps(x, h0, ctx.batch_sizes, ctx.reverse, w_rec)
        threads, chunk = steps.threads(), max(1, min(len(steps.rows), TERMS // steps.sequences))
        if g_out is not None and g_out.stride(-1) != 1:
            g_out = g_out.contiguous()
        g_last = None if g_last is None else g_last.contiguous()
        w_in, w_rec = w_in.contiguous(), w_rec.contiguous()
        g_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        g_h0 = (
            torch.empty_like(h0, memory_format=torch.contiguous_format) if ctx.needs_input_grad[1] else None
        )  # type: ignore[arg-type]
        room = (chunk + 1) * steps.sequences
        sums = x.new_empty(steps.copies or threads, D + H + 1, H)
        scratch = x.new_empty(room * (threads if steps.copies else 1), H)
        one = _constant(1, 1, x.dtype)

        def run(copy: int, low: int, high: int, thread: int) -> None:
            total = sums[copy if steps.copies else thread]
            compiled.backward(
                *steps.arguments(x, copy), _address(w_in, copy), _address(w_rec, copy), steps.start(copy),
                _address(out, copy), (_address(g_out, copy), *steps.strides(g_out)[:3]), _address(g_last, copy),
                _address(g_x, copy), _address(g_h0, copy), tuple(_address(total, i) for i in (0, D, D + H)),
                _address(scratch, room * thread if steps.copies else (chunk + 1) * low), chunk, one.data_ptr(),
                low, high,
            )  # fmt: skip

        _in_threads(run, steps, threads)
        total = sums if steps.copies else sums[0] if threads == 1 else sums.sum(0)
        g_in, g_rec, g_bias = total[..., :D, :].mT, total[..., D:-1, :], total[..., -1, :]
        biases = (None, None) if b_in is None else (g_bias, g_bias.clone())
        return g_x, g_h0, g_in, g_rec, *biases, None, None


class _Steps:
    """What the compiled functions must know of a call: the type, sizes, steps, inputs and first states."""

    def __init__(
        self, x: Tensor, h0: Tensor | None, batch_sizes: Tensor | None, reverse: bool, w_rec: Tensor
    ) -> None:
        self.copies = len(w_rec) if w_rec.dim() == 3 else 0  # 0 for one layer without a dimension of copies
        self.size, self.units, self.inputs = x.element_size(), w_rec.shape[-1], x.shape[-1]
        if batch_sizes is None:
            self.sequences = x.shape[-2]
            self.rows, self.first = _even(x.shape[-3], self.sequences)
        else:
            self.rows = batch_sizes.numpy()
            self.sequences = int(self.rows[0])
            self.first = np.cumsum(self.rows) - self.rows
        self.packed, self._zero = batch_sizes is not None, h0 is None
        # as PyTorch does, zeros take part in the product: an infinite weight makes NaN of them
        self._start = _constant(0, self.units, x.dtype) if h0 is None else h0.contiguous()
        sizes = (self.size, self.inputs, self.units)
        self._arguments = (_UNITS[x.dtype], sizes, self.rows, self.first, int(reverse))
        self._strides = self.strides(x)

    def arguments(self, x: Tensor, copy: int) -> tuple[Any, ...]:
        """The first arguments of the compiled functions."""
        return *self._arguments, (_address(x, copy), *self._strides)

    def start(self, copy: int) -> tuple[int, int]:
        """The address of the first states, and bytes from a sequence to the next."""
        if self._zero:
            return self._start.data_ptr(), 0
        return _address(self._start, copy), self.units * self.size

    def strides(self, matrix: Tensor | None) -> tuple[int, int, int, int]:
        """Bytes from a step, a row of the states, a sequence and a number to the next."""
        if matrix is None:
            return 0, 0, 0, 0
        size, stride = self.size, matrix.stride()
        step, first = (0, size * stride[0]) if self.packed else (size * stride[-3], 0)
        return step, first, size * stride[-2], size * stride[-1]

    def threads(self) -> int:
        """How many threads are worth their start."""
        most = min(torch.get_num_threads(), self.copies or self.sequences // 4)
        if most <= 1:
            return 1
        work = max(1, self.copies) * int(self.rows.sum()) * self.units * (self.units + self.inputs)
        return max(1, min(most, work // PER_THREAD))


# A step of a small network takes a few hundred microseconds, and each array that is made anew takes some of them.
_UNITS = {torch.float32: np.float32(1), torch.float64: np.float64(1)}


@lru_cache(64)
def _even(steps: int, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of each step, and where they begin, of sequences that are all of one length; nobody writes to them."""
    return np.full(steps, sequences), np.arange(steps) * sequences


@lru_cache(64)
def _constant(value: int, count: int, dtype: torch.dtype) -> Tensor:
    """So many equal numbers, which nobody writes to."""
    return torch.full((count,), value, dtype=dtype, device="cpu")


def _differentiable(ctx: Any, saved: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> Any:
    """The gradients as PyTorch computes them from what is saved, which may be differentiated again."""
    if saved[3].dim() == 2:  # type: ignore[union-attr]
        out, last = _again(ctx, *saved)
    else:
        copies = zip(*(repeat(None) if each is None else each.unbind() for each in saved), strict=False)
        out, last = map(torch.stack, zip(*(_again(ctx, *copy) for copy in copies), strict=True))
    results = [(out, gradients[0]), (last, gradients[1])]
    results = [(value, gradient) for value, gradient in results if gradient is not None]
    wanted = [saved[i] for i in range(6) if ctx.needs_input_grad[i]]
    found = iter(
        torch.autograd.grad(
            [value for value, _ in results],
            wanted,  # type: ignore[arg-type]
            [gradient for _, gradient in results],
            create_graph=True,
            allow_unused=True,
        )
    )
    return (*(next(found) if ctx.needs_input_grad[i] else None for i in range(6)), None, None)


def _again(ctx: Any, x: Any, h0: Any, w_in: Any, w_rec: Any, b_in: Any, b_rec: Any) -> tuple[Tensor, Tensor]:
    """All states of one layer, and the last ones, by PyTorch's operations."""
    H, rows = len(w_rec), x.shape[1] if ctx.batch_sizes is None else int(ctx.batch_sizes[0])
    start = x.new_zeros(rows, H) if h0 is None else h0
    weights = [weight for weight in (w_in, w_rec, b_in, b_rec) if weight is not None]
    both = 1 + ctx.reverse  # the direction back is the second of two
    options = (weights * both, b_in is not None, 1, 0.0, False, ctx.reverse)
    hx = start.expand(both, -1, -1)
    if ctx.batch_sizes is None:
        out, last = torch.rnn_relu(x, hx, *options, False)
    else:
        out, last = torch.rnn_relu(x, ctx.batch_sizes, hx, *options)
    return out[..., -H:], last[-1:]


def _last(out: Tensor, batch_sizes: Tensor | None, reverse: bool) -> Tensor:
    """The last states of all sequences, copied, ``[1, B, H]``."""
    if batch_sizes is None:
        return out.narrow(-3, 0 if reverse else out.shape[-3] - 1, 1).clone(
            memory_format=torch.contiguous_format
        )
    if reverse:
        return out[None, : int(batch_sizes[0])].clone()
    rows = batch_sizes.numpy()
    length = np.searchsorted(-rows, -np.arange(1, rows[0] + 1), side="right")  # steps that have the sequence
    return out[None, torch.from_numpy((np.cumsum(rows) - rows)[length - 1] + np.arange(rows[0]))]


def _address(matrix: Tensor | None, index: int = 0) -> int:
    """Where one of the parts of a matrix begins; 0 if there is no matrix."""
    if matrix is None:
        return 0
    return matrix.data_ptr() + (index * matrix.stride(0) * matrix.element_size() if index else 0)


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process needs its own
    return ThreadPoolExecutor(threads, "pathspace-rnn")


def _in_threads(run: Callable[[int, int, int, int], None], steps: _Steps, threads: int) -> None:
    """Run a function of a copy, of the sequences from one to another and of a thread on equal parts of the work."""
    parts = steps.copies or steps.sequences
    bounds = [parts * i // threads for i in range(threads + 1)]

    def part(thread: int) -> None:
        low, high = bounds[thread], bounds[thread + 1]
        if not steps.copies:
            run(0, low, high, thread)
        for copy in range(low, high) if steps.copies else ():
            run(copy, 0, steps.sequences, thread)

    others = [_pool(os.getpid(), torch.get_num_threads()).submit(part, i) for i in range(1, threads)]
    part(0)
    for other in others:
        other.result()
