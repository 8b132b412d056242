"""What ``nn.RNN``, ``nn.RNNCell`` and ``nn.EmbeddingBag`` stand for, one small operation after the other.

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
) -> tuple[Tensor, Tensor]:
    """A stacked, bidirectional ReLU layer in evaluation form.

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

    Returns:
        The sequence of states of the last layer, and the last states of all cells.
    """
    del dropout, train
    time, per_cell = (1 if batch_first and input.dim() == 3 else 0), 2 + 2 * has_biases
    rows, last = list(input.unbind(time)), []
    for layer in range(depth):
        directions: list[list[Tensor]] = []
        for backwards in range(1 + bidirectional):
            number = layer * (1 + bidirectional) + backwards
            own = params[number * per_cell : (number + 1) * per_cell]
            h, states = start(number), []
            for x in reversed(rows) if backwards else rows:
                h = cell(x, h, *own)
                states.append(h)
            last.append(states[-1])
            directions.append(states[::-1] if backwards else states)
        rows = [torch.cat(step, -1) if bidirectional else step[0] for step in zip(*directions, strict=True)]
    return torch.stack(rows, time), torch.stack(last)


def cell(x: Tensor, h: Tensor | None, w_in: Tensor, w_rec: Tensor, *biases: Tensor | None) -> Tensor:
    """One step h' = relu(W_in x + b_in + W_rec h + b_rec); the state before it is zero if it is None."""
    z = functional.linear(x, w_in)
    if h is not None:
        z = z + functional.linear(h, w_rec)
    for bias in biases:
        if bias is not None:
            z = z + bias
    return functional.relu(z)


def bags(
    input: Tensor, weight: Tensor, *_: Any, mode: str = "mean", padding_idx: int | None = None, **__: Any
) -> Tensor:
    """Rows of a table, summed, averaged or compared over bags of one length.

    Args:
        input: indices ``[B, n]``.
        weight: the table.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: an index that is left out.
    """
    rows = functional.embedding(input, weight)
    if padding_idx is not None:
        rows = rows.masked_fill((input == padding_idx).unsqueeze(-1), 0.0)
    return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
