"""A captured pass of a model on one example, to write down its paths: which functions stay whole, and which are split.

Letters: T time, B batch, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pathspace.graph.capture import Capture, Step, plain
from pathspace.network.errors import UntraceableError
from pathspace.network.program import Cut
from pathspace.network.registered import registration_of
from pathspace.network.trace.functions import changes, short_name
from pathspace.ops.families import listed
from pathspace.ops.listing import Listing
from pathspace.ops.terms import NOT_WRITTEN
from pathspace.paths.listing.loops import PackedSequences, bags


@dataclass(frozen=True)
class Boundary:
    """A whole step at which paths end and start: a cut, or a module outside (which has no cut)."""

    cut: Cut | None = None


class Handler:
    """Decides what becomes of each torch function that the model calls."""

    def __init__(self, capture: Capture, cuts: Iterable[Cut]) -> None:
        self.capture = capture
        self._cuts = {(cut.operation, cut.number): cut for cut in cuts}
        self._names = {cut.operation for cut in cuts}
        self._calls: Counter[str] = Counter()  # of the model's own operations, by name
        self._apart = False  # functions that stand for one of the model's are running
        self._paused = False
        self._packed = PackedSequences()

    def __call__(
        self, mode: TorchFunctionMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return the result of a function, or NotImplemented to run it as it is."""
        if self._paused:
            return NotImplemented
        name = short_name(func)
        registered = registration_of(func)
        like = None
        if registered is not None and name not in self._names:
            if registered.like is None:
                with mode:
                    return registered.decomposition(*args, **kwargs)
            like = name = registered.like
        cut = self._cut_at(name)
        if cut is not None:
            return self._cut(mode, cut, func, args, kwargs)
        if name in _TAKEN_APART:
            return _TAKEN_APART[name](self, mode, func, *args, **kwargs)
        if name not in _WHOLE and like is None:
            return NotImplemented
        result = self.capture.whole(name, func, args, kwargs, None)
        return args[0].copy_(result) if changes(name) or kwargs.get("inplace") else result

    def _cut_at(self, name: str) -> Cut | None:
        if self._apart:
            return None
        number = self._calls[name]
        self._calls[name] += 1
        return self._cuts.get((name, number))

    def _cut(
        self, mode: TorchFunctionMode, cut: Cut, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if cut.operation != "glu":
            result = self.capture.whole(cut.operation, func, args, kwargs, Boundary(cut))
            return args[0].copy_(result) if changes(cut.operation) else result
        # the half that enters the sigmoid is where the network is cut, the other one goes on
        with self._taken_apart(mode):
            a, b = args[0].chunk(2, *args[1:] or [kwargs.get("dim", -1)])
            gate = self.capture.whole("sigmoid", torch.sigmoid, (b,), {}, Boundary(cut))
            return a * gate

    @contextmanager
    def _taken_apart(self, mode: TorchFunctionMode) -> Iterator[None]:
        before = self._apart
        self._apart = True
        try:
            with mode:
                yield
        finally:
            self._apart = before

    def run_outside(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module left to the plain rule: its inputs are outputs, its outputs are inputs."""
        paused = self._paused
        self._paused = True
        try:
            return self.capture.whole("outside", forward, args, kwargs, Boundary())
        finally:
            self._paused = paused

    def recurrent(self, mode: TorchFunctionMode, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``nn.RNN`` and ``nn.RNNCell``, which torch itself decomposes. A first state that is data must be zero."""
        packed = short_name(func) == "rnn_relu" and isinstance(args[2], Tensor)
        place = 2 if packed else 1
        hx = args[place]
        if self.capture.depends_on_inputs_alone(hx):
            if bool(plain(hx).any()):
                raise ValueError(
                    "a state carried over from earlier data must be zero where paths are written down"
                )
            hx = torch.zeros_like(hx)
        args = (*args[:place], hx, *args[place + 1 :])
        if not packed:
            return func(*args)
        with self._taken_apart(mode):
            return self._packed.run(*args[:2], lambda number: hx[number], *args[3:])

    def pack(
        self, mode: TorchFunctionMode, func: Any, x: Tensor, lengths: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """Return all steps of packed sequences, and a mask."""
        del func
        with self._taken_apart(mode):
            return self._packed.pack(
                x, lengths, batch_first, fixed=not self.capture.depends_on_inputs_alone(lengths)
            )

    def pad(self, mode: TorchFunctionMode, func: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Undo :meth:`pack`."""
        del func
        with self._taken_apart(mode):
            return self._packed.pad(*args)

    def normalize(self, mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``batch_norm``; refuse one without running statistics."""
        del mode
        if args[1] is None:
            why = "it has no running statistics, so what it computes depends on the other examples of a batch"
            raise UntraceableError("batch_norm", "", why, "Build it with track_running_stats=True")
        return func(*args, **kwargs)

    def bag(self, mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Tensor:
        """Run the lookup of rows in a table and their reduction."""
        del func
        with self._taken_apart(mode):
            return bags(*args, **kwargs)


_TAKEN_APART: dict[str, Callable[..., Any]] = {
    "rnn_relu": Handler.recurrent,
    "rnn_relu_cell": Handler.recurrent,
    "_pack_padded_sequence": Handler.pack,
    "_pad_packed_sequence": Handler.pad,
    "embedding_bag": Handler.bag,
    "batch_norm": Handler.normalize,
}
_WHOLE = frozenset(["layer_norm", "rms_norm", "group_norm", "diff", "rrelu", "rrelu_"])
"""Functions that are read as one step: torch would take them apart into others with other paths."""


def write_down(steps: Iterable[Step], listing: Listing) -> None:
    """Read a captured pass step by step."""
    for step in steps:
        if isinstance(step.whole, Boundary):
            _cross(step, step.whole.cut, listing)
        else:
            listed(step, listing)


def _cross(step: Step, cut: Cut | None, listing: Listing) -> None:
    """Make the inputs of a boundary outputs, and its outputs inputs."""
    tensors = step.tensors
    entering = [t for t in tensors if listing.is_unit(t)]
    if cut is not None:
        _check_cut(cut, tensors, listing)
    if cut is None or cut.counts:
        listing.entered += [node for t in entering for node in listing.before_the_end(t)]
    listing.bind_data(step.result)


def _check_cut(cut: Cut, tensors: Sequence[Tensor], listing: Listing) -> None:
    """Refuse a cut whose arguments are others than in the trace.

    Raises:
        UntraceableError: other arguments are units, or one is a parameter of the network.
    """
    entering = [listing.is_unit(t) for t in tensors]
    # of parameters that lead to no output, and are outside the network, nothing is a unit
    if entering != list(cut.entering) and (cut.counts or any(entering)):
        why = "the network was cut there, and written out the model takes another way than it did then"
        raise UntraceableError(
            cut.operation, cut.module, why, "Trace it in evaluation form (model.eval())"
        )
    if any(map(listing.is_weight, tensors)):
        raise UntraceableError(
            cut.operation, cut.module, "it takes a parameter of the network", NOT_WRITTEN
        )


def outside(handler: Handler, module: torch.nn.Module) -> None:
    """Run a module of a copy without a look inside."""
    module.forward = partial(handler.run_outside, module.forward)  # type: ignore[method-assign]
