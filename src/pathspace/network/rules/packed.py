"""Packed sequences: ``pack_padded_sequence``, ``nn.RNN`` on what it returns, ``pad_packed_sequence``.

Rows of a packed sequence are the steps of all examples, one step after the other: ``[T * B, ...]``.
Lengths that are inputs open and close steps as a mask does, so all T steps count: the states of a
recurrent layer are those of the padded sequence, and its last forward state may be that of any
step. Lengths that are constants, alike for all examples, are the number of steps.

Sequences that are not sorted by their lengths are put in order and back. All examples are alike in
the squared network, so a permutation of them changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pathspace.network.trace.parameter_uses import repeats
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import WILD
from pathspace.network.trace.values import Value, apart


@dataclass(frozen=True)
class Packed:
    """Facts about packed sequences, found by their batch sizes.

    Attributes:
        batch_sizes: the tensor that travels with the rows.
        examples: B.
        any_length: whether the lengths are inputs.
    """

    batch_sizes: Tensor
    examples: int
    any_length: bool

    def steps(self, rows: Tensor) -> Tensor:
        """Reshape rows ``[T * B, ...]`` to ``[T, B, ...]``."""
        return rows.reshape(-1, self.examples, *rows.shape[1:])


def pack(
    recorder: Recorder, input: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Trace ``pack_padded_sequence``, without its sorting."""
    x = recorder.as_units(input)
    of_lengths = recorder.lookup(lengths)
    if x.labels.dim() < 2:
        raise RuntimeError(f"{recorder.where()}: packs a tensor of {x.labels.dim()} dimensions")
    if x.batch not in (None, 0 if batch_first else 1):
        recorder.wrong_batch()
    steps, examples = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    if of_lengths is None:
        counts = lengths.tolist()
        if len(counts) != examples:
            raise RuntimeError(
                f"{recorder.where()}: {len(counts)} lengths for {examples} sequences"
            )
        if len(set(counts)) > 1:
            recorder.refuse(
                "its lengths stand in the code, one for each example of a batch",
                "Make the lengths an argument of forward, a tensor",
            )
        steps = counts[0]
    elif of_lengths.kind not in ("input", "buffer"):
        recorder.refuse("its lengths depend on activations, so the network has no single graph")

    def rows(t: Tensor) -> Tensor:
        t = t.transpose(0, 1) if batch_first else t
        return t[:steps].reshape(steps * examples, *t.shape[2:])

    data = recorder.emit(rows, [x], rows(x.labels), dtype=input.dtype, batch=0, kind=x.kind)
    sizes = torch.full((steps,), examples, dtype=torch.long)
    recorder.packed[id(sizes)] = Packed(sizes, examples, of_lengths is not None)
    return data, sizes


def pad(
    recorder: Recorder,
    rows: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Trace ``pad_packed_sequence``, without its sorting: zeros after the last step."""
    packed = packed_of(recorder, batch_sizes)
    x = recorder.as_units(rows)
    if padding_value != 0 and not math.isinf(padding_value):
        recorder.refuse(
            f"it pads with the constant {padding_value}, which does not scale with the units beside it",
            "Pad with zeros or with an infinity",
        )
    steps = len(batch_sizes)

    def padded(t: Tensor) -> Tensor:
        t = packed.steps(t)
        more = t.new_zeros(1).expand(total_length - steps, *t.shape[1:])
        t = torch.cat([t, more]) if total_length > steps else t
        return t.transpose(0, 1) if batch_first else t

    # zeros beyond the longest sequence fit every scale
    labels = padded(recorder.scales.resolve(x.labels) - WILD) + WILD
    batch = 0 if batch_first else 1
    out = recorder.emit(padded, [x], labels, dtype=rows.dtype, batch=batch, kind=x.kind)
    if not packed.any_length:
        return out, torch.full((packed.examples,), steps, dtype=torch.long)
    lengths = torch.empty(packed.examples, dtype=torch.long, device="meta")
    return out, recorder.add_leaf(lengths, "input", batch=0)


def packed_of(recorder: Recorder, batch_sizes: Tensor) -> Packed:
    """Return the recorded facts about the sequences with these batch sizes."""
    packed = recorder.packed.get(id(batch_sizes))
    if packed is None:
        recorder.refuse(
            "it takes sequences that were not packed in the model's own forward",
            "Pack them there, from a padded tensor and lengths that are arguments of forward",
        )
    return packed


def in_order(recorder: Recorder, x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Trace ``x.index_select(dim, index)`` if it only permutes the examples; return None otherwise."""
    of_index = recorder.lookup(index)
    value = recorder.lookup(x)
    dim %= x.dim()
    if of_index is None:
        whole = index.dim() == 1 and index.tolist() == list(range(x.shape[dim]))
    elif not of_index.order:
        return None
    elif value is None:  # a constant, such as a start of zeros
        whole = bool((x == x.narrow(dim, 0, 1)).all())
        return x.clone() if whole else None
    else:
        # what left a cut does not say where it has its one example; a learned start is repeated for
        # all examples
        alike = x.shape[dim] == recorder.examples.count == 1 or (
            value.kind == "parameter" and repeats(value.labels, dim)
        )
        whole = value.batch == dim or (value.batch is None and alike)
    if not whole or value is None:
        return None
    return recorder.bind(torch.empty(value.shape, dtype=x.dtype, device="meta"), apart(value))


def scatter_in_place(
    recorder: Recorder, x: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """Trace ``scatter_`` of inputs, such as one-hot vectors, and as ``torch.nn.utils.rnn`` inverts a permutation."""
    of_index = recorder.lookup(index)
    is_order = of_index is not None and of_index.order
    if is_order and of_index is not None and recorder.lookup(x) is None and x.dim() == 1:
        slot = recorder.new_slot()
        inverse = Value(slot, of_index.labels, "input", batch=of_index.batch, order=True)
        return recorder.bind(x, inverse)
    args = (x, dim, index, *rest)
    if any(value.kind not in ("input", "buffer") for value in recorder.values_in(args, named)):
        recorder.refuse(
            "it writes to places that tracing does not follow", "Use scatter_add or index_add"
        )
    return recorder.preprocess(recorder.func, args, named)


RULES: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": pad,
    "scatter_": scatter_in_place,
}
