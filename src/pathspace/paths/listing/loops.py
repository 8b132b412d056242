"""``nn.RNN``, ``nn.RNNCell`` and ``nn.EmbeddingBag`` decomposed into small operations.

Letters: T time, B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def layers(
    input: Tensor,
    start: Callable[[int], Tensor | None],
    params: Sequence[Tensor],
    has_biases: bool,
    depth: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    *,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a stacked, bidirectional ReLU layer in evaluation form.

    Args:
        input: the sequence, ``[T, B, D]``, ``[B, T, D]`` or ``[T, D]``.
        start: the initial state of each cell by its number; None for zero.
        params: as ``torch.rnn_relu`` takes them; so are the other arguments.
        has_biases: whether there are two biases per cell.
        depth: layers, one on top of the other.
        dropout: nothing in evaluation form.
        train: likewise.
        bidirectional: whether a second cell of each layer runs backwards.
        batch_first: whether the batch comes before the time.
        mask: ones at the steps of each sequence and zeros after them, ``[T, B, 1]``; None if all
            are of one length.

    Returns:
        The sequence of states of the last layer, and the last states of all cells.
    """
    del dropout, train
    time = 1 if batch_first and input.dim() == 3 else 0
    per_cell = 4 if has_biases else 2
    rows = list(input.unbind(time))
    last = []
    directions = 2 if bidirectional else 1
    cells = [params[at : at + per_cell] for at in range(0, len(params), per_cell)]
    for number in range(0, depth * directions, directions):
        forwards, end = _forwards(rows, start(number), cells[number], mask)
        last.append(end)
        if bidirectional:
            backwards = _backwards(rows, start(number + 1), cells[number + 1], mask)
            last.append(backwards[0])
            rows = [torch.cat(pair, -1) for pair in zip(forwards, backwards, strict=True)]
        else:
            rows = forwards
    return torch.stack(rows, time), torch.stack(last)


def _forwards(
    rows: Sequence[Tensor], h: Tensor | None, weights: Sequence[Tensor], mask: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return the states of a cell from the first step to the last, and those at the ends of the sequences."""
    states = []
    for row in rows:
        h = cell(row, h, *weights)
        states.append(h)
    if mask is None:
        return states, states[-1]
    ends = torch.cat([mask[:-1] - mask[1:], mask[-1:]])
    return states, torch.stack([h * end for h, end in zip(states, ends, strict=True)]).sum(0)


def _backwards(
    rows: Sequence[Tensor], h: Tensor | None, weights: Sequence[Tensor], mask: Tensor | None
) -> list[Tensor]:
    """Return the states of a cell that runs from the last step to the first, in the order of the steps."""
    states = []
    for t in reversed(range(len(rows))):
        h = cell(rows[t], h, *weights)
        h = h if mask is None else h * mask[t]  # it starts at the last step
        states.append(h)
    return states[::-1]


class PackedSequences:
    """``torch.nn.utils.rnn`` on packed sequences, one small operation after the other, with all steps and a mask.

    Rows are the steps of all sequences, one step after the other, whatever the lengths are.
    """

    def __init__(self) -> None:
        self._masks: dict[int, tuple[Tensor, Tensor | None]] = {}  # by the id of the batch sizes

    def pack(
        self, x: Tensor, lengths: Tensor, batch_first: bool, *, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return rows and batch sizes; ``fixed`` says that the lengths are constants, equal for all."""
        x = x.transpose(0, 1) if batch_first else x
        steps = int(lengths[0]) if fixed else x.shape[0]
        mask = (
            None if fixed else (torch.arange(steps)[:, None] < lengths[None, :]).double()[..., None]
        )
        sizes = torch.full((steps,), x.shape[1], dtype=torch.long)
        self._masks[id(sizes)] = sizes, mask
        return x[:steps].reshape(-1, *x.shape[2:]), sizes

    def run(
        self, rows: Tensor, sizes: Tensor, start: Callable[[int], Tensor | None], *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Run ``nn.RNN`` on packed sequences; ``options`` are those of :func:`layers` from the parameters on."""
        h, last = layers(self._steps(rows, sizes), start, *options, mask=self._masks[id(sizes)][1])
        return h.reshape(-1, *h.shape[2:]), last

    def pad(
        self, rows: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sequences with ``value`` after their last steps, and their lengths."""
        x = self._steps(rows, sizes)
        steps = len(sizes)
        mask = self._masks[id(sizes)][1]
        if mask is None:
            lengths = torch.full((x.shape[1],), steps)
        else:
            lengths = mask.sum((0, 2)).long()
            wide = mask.reshape(*mask.shape[:2], *[1] * (x.dim() - 2))
            x = torch.where(wide > 0, x, value)
        if total > steps:
            rest = torch.full((total - steps, *x.shape[1:]), value, dtype=x.dtype)
            x = torch.cat([x, rest])
        return x.transpose(0, 1) if batch_first else x, lengths

    def _steps(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return rows.reshape(len(sizes), -1, *rows.shape[1:])


def cell(
    x: Tensor, h: Tensor | None, w_in: Tensor, w_rec: Tensor, *biases: Tensor | None
) -> Tensor:
    """Compute a step h' = relu(W_in x + b_in + W_rec h + b_rec); a previous state of None is zero."""
    z = functional.linear(x, w_in)
    if h is not None:
        z = z + functional.linear(h, w_rec)
    return functional.relu(sum((bias for bias in biases if bias is not None), z))


def bags(
    input: Tensor,
    weight: Tensor,
    *_: Any,
    mode: str = "mean",
    padding_idx: int | None = None,
    **__: Any,
) -> Tensor:
    """Sum, average or compare the rows of a table over bags of one length.

    Args:
        input: indices ``[B, n]``.
        weight: the table.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: an index that is left out.
    """
    rows = functional.embedding(input, weight)
    if padding_idx is not None:
        rows = rows.masked_fill((input == padding_idx).unsqueeze(-1), 0.0)
    if mode == "max":
        return rows.amax(1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)
