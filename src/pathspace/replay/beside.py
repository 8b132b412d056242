"""Capture a forward pass on one example while the model is traced once more.

The trace knows the slot of every tensor in the squared network. `Beside` runs each function that
the trace meets a second time, on the values of an example, and records the steps. So the recorded
steps tell how to compute the nodes of the network and the values that its parameters read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.graph.capture import Capture, OnBatch, unseen, wrapped
from pathspace.network.errors import UnmatchedForwardError, UntraceableError
from pathspace.network.network import Network
from pathspace.network.registered import registration_of
from pathspace.network.returned import Returned
from pathspace.network.rules import MOVEMENTS, RULED
from pathspace.network.trace.choices import Choices
from pathspace.network.trace.drawn import draws_in_training, in_evaluation_form
from pathspace.network.trace.functions import (
    CHECKS,
    METADATA,
    SHAPED_FACTORIES,
    by_position,
    changes,
    tensors_in,
)
from pathspace.network.trace.interpreter import Interpreter
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Mean, Numerator, Value
from pathspace.replay.observed import Key, Question, Seen, UseOf

_DETACHES = ("detach", "data.__get__")


@dataclass(frozen=True)
class Called:
    """A torch function that the model calls.

    Attributes:
        name: of the operation.
        func: what is called.
        args: its arguments, traced.
        kwargs: likewise.
        tensors: those among them.
        given: by the id of each, what was known of it before.
        runs: how many functions had run on the example before.
        uses: how many uses of parameters there were before.
        like: name of the operation that a registered function is like.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    given: dict[int, Value | None]
    runs: int
    uses: int
    like: str = ""


@dataclass(frozen=True)
class Way:
    """A way to run an operation on an example.

    Attributes:
        run: takes the interpreter, the call, its traced result and the tensors in it, and binds
            these.
        always: or only where nodes lie inside.
    """

    run: Callable[..., None]
    always: bool


@dataclass(frozen=True)
class Example:
    """An example to run a model on.

    Attributes:
        arguments: its tensors, in the order of the model's arguments.
        tensor: a parameter or buffer of the model by name.
        model: the model in evaluation form, for modules that are left outside.
        constant: moves a constant there, in the type of the computation.
        run: a torch function in the type of the computation.
        answer: of a question, what the batch answers.
        device: where it all is.
    """

    arguments: list[Tensor]
    tensor: Callable[[str], Tensor]
    model: torch.nn.Module
    constant: Callable[[Tensor], Tensor]
    run: Callable[[Callable[..., Any]], Callable[..., Any]]
    answer: Callable[..., bool]
    device: torch.device


class Beside(Interpreter):
    """Interprets torch functions, and runs each on an example, too.

    Args:
        recorder: of the trace.
        network: the traced network, whose slots the trace finds again.
        example: what to run on.
        ways: how operations with nodes inside, or with something that is held, are run.
    """

    def __init__(
        self, recorder: Recorder, network: Network, example: Example, ways: Mapping[str, Way]
    ) -> None:
        super().__init__(recorder)
        self._ways = ways
        self.seen = Seen()
        self.capture = Capture()
        self.network = network
        self._example = example
        self._counted = {(cut.operation, cut.number) for cut in network.program.cuts if cut.counts}
        # by the id of a traced tensor, that and the example's
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_name: dict[str, Tensor] = {}  # parameters and buffers
        self._runs = 0  # how many functions ran
        self._run_at: dict[int, int] = {}  # which of them made a tensor, by its id
        self._passed_over = False  # whether functions that run now stand for another one
        self._asked: Called | None = None
        recorder.choices = _Answers(self)

    # -- tensors of the example --------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of the call of the model that begins."""
        for tensor, value in zip(tensors_in(args, kwargs), self._example.arguments, strict=True):
            self._bind(tensor, wrapped(value))
            self.seen.inputs.append(value)

    def _bind(self, traced: Tensor, own: Tensor) -> Tensor:
        self._own[id(traced)] = traced, own
        self._run_at[id(traced)] = self._runs
        return own

    def own(self, traced: Tensor) -> Tensor:
        """Return the example's tensor for a traced one, or for a constant."""
        if id(traced) in self._own:
            return self._own[id(traced)][1]
        value = self.recorder.known(traced)
        name = self.recorder.own.get(id(traced), "")
        if value is not None and value.kind in ("parameter", "buffer"):
            name = value.name
        if name:
            return self._bind(traced, self._of_model(name))
        if traced.is_meta:
            raise UnmatchedForwardError(
                f"'{self.recorder.name}' in '{self.recorder.path}' takes a tensor that tracing did not see being made"
            )
        constant = self._example.constant(traced)
        self.seen.constants.append(constant)
        return self._bind(traced, wrapped(constant))

    def _of_model(self, name: str) -> Tensor:
        """Return a parameter or buffer, as an input of the pass."""
        if name not in self._of_name:
            with unseen():
                own = self._example.tensor(name)
            self.seen.inputs.append(own)
            self.seen.names.append(name)
            self.seen.views.add(id(own))
            self._of_name[name] = wrapped(own)
        return self._of_name[name]

    def owns(self, tree: Any) -> Any:
        """Replace traced tensors among arguments by the example's, on its device."""
        device = self._example.device
        tree = pytree.tree_map_only(Tensor, self.own, tree)
        return pytree.tree_map_only(torch.device, lambda _: device, tree)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on tensors of the example, and capture what it does."""
        with self.capture.running():
            return self._example.run(function)(*args, **kwargs)

    def plain(self, own: Tensor) -> Tensor:
        """Return the current value of a tensor of the example, without its wrapper."""
        return self.capture.current(own)

    # -- functions ---------------------------------------------------------------------------------

    def _interpreted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        name = self.recorder.name
        if self.paused or name in METADATA or name in CHECKS or name == "device.__get__":
            return super()._interpreted(args, kwargs)
        if kwargs and (name in RULED or name in SHAPED_FACTORIES):
            args, kwargs = by_position(name, args, kwargs)
        tensors = tensors_in(args, kwargs)
        given = {id(t): recorder.known(t) for t in tensors}
        call = Called(
            name, recorder.func, args, kwargs, tensors, given, self._runs, len(self.seen.uses)
        )
        self._asked = call
        registered = registration_of(call.func)
        if registered is None or registered.like is None:
            result = super()._interpreted(args, kwargs)
            self._follow(call, result)
            return result
        # the function itself runs, and not the one that it is like
        before, self._passed_over = self._passed_over, True
        try:
            result = super()._interpreted(args, kwargs)
        finally:
            self._passed_over = before
        self._follow(replace(call, like=registered.like), result)
        return result

    def _follow(self, call: Called, result: Any) -> None:
        """Run a function that was traced on the example, too."""
        if self._passed_over:
            return
        writes = result is None or (changes(call.name) and call.args)
        created = tensors_in(call.args[:1] if writes else (result,), {})
        if all(self._ran_since(t, call.runs) for t in created):
            return  # nothing is made, or functions inside made it
        del self.seen.uses[call.uses :]  # of functions inside that came to nothing
        self._runs += 1
        if draws_in_training(call.name, call.args, call.kwargs):
            args, kwargs = in_evaluation_form(call.name, call.args, call.kwargs)
            call = replace(call, args=args, kwargs=kwargs)
        made = {id(t) for t in created}
        for t in call.tensors:  # values that were seen through a write
            if id(t) not in made:
                self._note_node(t)
        self._way(call, created[0])(self, call, result, created)
        for t in created:
            self._note_node(t)

    def _way(self, call: Called, created: Tensor) -> Callable[..., None]:
        """Return the way in which a function is run on the example."""
        recorder = self.recorder
        value = self.recorder.known(created)
        slot = -1 if value is None else value.slot
        origin = recorder.origins.get(slot)
        if call.name in _DETACHES and value is not None:
            return Beside._run_detached
        if origin is not None and origin.cut is not None and slot not in recorder.inside:
            return Beside._run_cut
        if call.like:
            return Beside._run_plainly
        way = self._ways.get(call.name)
        if way is not None and (way.always or slot in recorder.inside or slot in recorder.normed):
            return way.run
        return Beside._run_plainly

    def _ran_since(self, tensor: Tensor, before: int) -> bool:
        """Return whether a traced tensor was made, or written to, after so many functions had run."""
        return id(tensor) in self._own and self._run_at[id(tensor)] > before

    def _run_plainly(self, call: Called, result: Any, created: list[Tensor]) -> None:
        """Run a function as it is, and remember it if it uses parameters."""
        args, kwargs = self.owns((call.args, call.kwargs))
        slot = self.slot(created[0])
        if slot in self.recorder.divided:
            args, kwargs = self._with_statistics_held(call, args, kwargs)
        elif slot not in self.network.tape.filled and self._subtracts_mean(call, created[0]):
            # paths do not pass it: a normalization alone reads it
            args = (args[0], self.run(Tensor.detach, args[1]))
        learned = [t for t in call.tensors if self.is_weight(call.given[id(t)])]
        if not learned or not self._is_hidden(self.recorder.known(created[0])):
            self.bind(result, created, self._run_apart(call.name, call.func, args, kwargs), args)
            return
        weights = [self.plain(self.own(t)) for t in learned]
        function = out_of_place(call.func) if changes(call.name) else call.func
        shown, options = pytree.tree_map_only(Tensor, self.plain, (args, kwargs))
        made = self._run_apart(call.name, function, args, kwargs)
        first, *_ = tensors_in([made], {})
        name = call.like or call.name
        self.seen.uses.append(UseOf(name, function, shown, options, weights, [self.plain(first)]))
        if changes(call.name):
            made = self.run(Tensor.copy_, args[0], made)
        self.bind(result, created, made, args)

    def _subtracts_mean(self, call: Called, created: Tensor) -> bool:
        """Return whether a function takes the mean of an activation from it, for a normalization by hand."""
        value = self.recorder.known(created)
        note = None if value is None else value.statistic
        if not isinstance(note, Numerator) or len(call.args) != 2:
            return False
        subtracted = self.recorder.known(call.args[1]) if isinstance(call.args[1], Tensor) else None
        return subtracted is not None and isinstance(subtracted.statistic, Mean)

    def _with_statistics_held(self, call: Called, args: Any, kwargs: Any) -> Any:
        """Detach all arguments but activations."""
        held = {id(self.own(t)) for t in call.tensors if not self._is_hidden(call.given[id(t)])}

        def detached(t: Tensor) -> Tensor:
            return self.run(Tensor.detach, t) if id(t) in held else t

        return pytree.tree_map_only(Tensor, detached, (args, kwargs))

    def _run_apart(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function, and let what it makes be no view of what it made on the way.

        A linear layer of more than two dimensions ends with a view of a product of matrices. A
        later write into the result would be followed from that product on, past the result.
        """
        before = len(self.capture.steps)
        made = self.run(function, *args, **kwargs)
        if name in MOVEMENTS or changes(name):
            return made
        views: set[int] = set()
        for step in self.capture.steps[before:]:
            if getattr(step.function, "is_view", False) or step.name == "_unsafe_view":
                views.update(id(t) for t in pytree.tree_leaves(step.result))

        def apart(t: Tensor) -> Tensor:
            return self.run(torch.clone, t) if id(self.plain(t)) in views else t

        return pytree.tree_map_only(Tensor, apart, made)

    def _run_detached(self, call: Called, result: Any, created: list[Tensor]) -> None:
        """Let a detached activation be the activation: paths are those of the function, not of its gradients."""
        del result
        self.bind_one(created[0], self.own(call.args[0]))

    def _run_cut(self, call: Called, result: Any, created: list[Tensor]) -> None:
        """Run a cut: its inputs are outputs of the network, its outputs are inputs."""
        if (call.name, self.recorder.calls[call.name] - 1) in self._counted:
            self._leave(call.tensors, call.given)
        args, kwargs = self.owns((call.args, call.kwargs))
        made = self._run_whole(
            call.name, self._example.run(call.func), args, kwargs, call.tensors, created
        )
        if changes(call.name):
            made = self.run(Tensor.copy_, args[0], made)
        self.bind(result, created, made, args)

    def _run_whole(
        self,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        given: list[Tensor],
        created: list[Tensor],
    ) -> Any:
        """Run a function without a look inside, and without gradients; on a batch, as the model calls it."""
        whole = OnBatch(function, self._batches(given), self._batches(created))
        with self.capture.running():
            return self.capture.whole(name, whole, args, kwargs, name)

    def _batches(self, tensors: Iterable[Tensor]) -> list[int | None]:
        """Return the dimensions that hold the examples of traced tensors."""
        values = map(self.recorder.known, tensors)
        return [None if value is None else value.batch for value in values]

    def _leave(self, tensors: list[Tensor], given: dict[int, Value | None]) -> None:
        for t in tensors:
            value = given[id(t)]
            if value is not None and self._is_hidden(value):
                self.leaves_as(value.slot, self.own(t))

    def leaves_as(self, slot: int, own: Tensor) -> None:
        """Set the value of an output node to what leaves the network, after an activation if there is one."""
        if (slot,) in self.seen.nodes:
            self.seen.nodes[slot,] = self.plain(own)

    def run_outside(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module left outside: its inputs are outputs of the network, its outputs are inputs."""
        tensors = tensors_in(args, kwargs)
        path = self.recorder.path
        self._leave(tensors, {id(t): self.recorder.known(t) for t in tensors})
        result = super().run_outside(forward, args, kwargs)
        module = self._example.model.get_submodule(path)
        held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        state = {name: self._of_model(f"{path}.{name}") for name in held}
        self._runs += 1
        args, kwargs = self.owns((args, kwargs))

        def run(state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return torch.func.functional_call(module, state, args, kwargs)

        created = tensors_in((result,), {})
        given = [*[torch.empty(0)] * len(state), *tensors]
        made = self._run_whole("outside", run, (state, args, kwargs), {}, given, created)
        self.bind(result, created, made, args)
        return result

    def end(self, result: Any) -> None:
        """Note the outputs of the call of the model."""
        returned = Returned(None, self.network.returned.places)(result)
        for slot, tensor in zip(self.network.program.outputs, returned, strict=True):
            if slot is not None:
                self.leaves_as(slot, self.own(tensor))

    def rename_slots(self, slots: Mapping[int, int], network: Network) -> None:
        """Go over to the slots of another network, by those that they are here."""
        self.network = network
        nodes = self.seen.nodes.items()
        self.seen.nodes = {(slots.get(slot, slot), *inside): t for (slot, *inside), t in nodes}

    def check_nodes(self) -> None:
        """Refuse a pass that did not show all nodes, or showed a weight in the place of one."""
        filled = self.network.tape.filled
        wanted = [slot for slot in self.network.program.nodes if slot in filled]
        for slot in wanted:
            if slot in self.recorder.normed:
                self._refuse_weight(slot)
        missing = sum((slot,) not in self.seen.nodes for slot in wanted)
        if missing:
            raise UnmatchedForwardError(f"the forward pass did not show {missing} nodes")

    def _refuse_weight(self, slot: int) -> None:
        """Refuse a weight that enters a cut."""
        where = next(i.name for i in self.network.tape.instructions if slot in i.outputs)
        operation, _, module = where.partition(" in ")
        raise UnmatchedForwardError(
            f"'{operation}' in {module} makes a weight that enters a cut, and what it adds there is that of no "
            f"example: leave it to the plain rule with outside=[{module}]"
        )

    # -- what they show ----------------------------------------------------------------------------

    def bind(self, result: Any, created: list[Tensor], made: Any, args: Any = ()) -> None:
        """Let traced results stand for those of the example."""
        owns = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
        if result is None:
            owns = [args[0]]
        if len(owns) != len(created):
            raise UnmatchedForwardError(
                f"'{self.recorder.name}' in '{self.recorder.path}' returns {len(owns)} tensors on data and "
                f"{len(created)} when it was traced"
            )
        for traced, own in zip(created, owns, strict=True):
            self.bind_one(traced, own)

    def bind_one(self, traced: Tensor, own: Tensor) -> None:
        """Bind one traced tensor to the example's."""
        self._bind(traced, own)
        value = self.recorder.known(traced)
        if value is not None and value.kind == "parameter" and self.recorder.name in MOVEMENTS:
            self.seen.views.add(id(self.plain(own)))

    def _note_node(self, traced: Tensor) -> None:
        value = self.recorder.known(traced)
        if value is not None:
            self.note_node(value.slot, self.own(traced))

    def note_node(self, slot: int, own: Tensor) -> None:
        """Remember a node by its first value: a ReLU in place would overwrite it."""
        if slot in self.network.program.nodes and slot in self.network.tape.filled:
            self.note_key((slot,), own)

    def note_key(self, key: Key, own: Tensor) -> None:
        """Remember a node that may be inside a recurrent layer by its first value."""
        if key[0] in self.network.tape.filled:
            self.seen.nodes.setdefault(key, self.plain(own))

    def slot(self, traced: Tensor) -> int:
        """Return the slot of a traced tensor on the tape; -1 if it has none."""
        value = self.recorder.known(traced)
        return -1 if value is None else value.slot

    def is_weight(self, value: Value | None) -> bool:
        """Return whether a value depends on parameters only."""
        return value is not None and (
            value.kind == "parameter" or value.slot in self.recorder.normed
        )

    def _is_hidden(self, value: Value | None) -> bool:
        hidden = value is not None and value.kind == "hidden"
        return hidden and not self.is_weight(value)

    def ask(self, refusal: UntraceableError) -> bool:
        """Return the answer of the data to the current question."""
        call = self._asked
        assert call is not None
        function = _QUESTIONS.get(call.name)
        if function is None:
            raise refusal
        value = self.plain(self.run(function, *self.owns(call.args)))
        question = Question(value, self._made_by(value))
        question.answer = self._example.answer(self, question)
        self.seen.questions.append(question)
        return question.answer

    def _made_by(self, value: Tensor) -> str:
        """Return the name of the step that made a value; empty if none did."""
        for step in reversed(self.capture.steps):
            if any(t is value for t in pytree.tree_leaves(step.result)):
                return step.name
        return ""


class _Answers(Choices):
    """Answers questions about inputs by the data."""

    def __init__(self, beside: Beside) -> None:
        super().__init__()
        self._beside = weakref.proxy(beside)  # which holds these answers

    def answer(self, refusal: UntraceableError) -> bool:
        """Return what the batch answers to the next question."""
        return self._beside.ask(refusal)


def out_of_place(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function that writes into a copy of its first argument, and returns the copy."""

    def operation(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x.clone()
        function(x, *args, **kwargs)
        return x

    return operation


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x


_QUESTIONS: dict[str, Callable[..., Tensor]] = {
    "__bool__": _identity,
    "is_nonzero": _identity,
    "__contains__": lambda x, y: (x == y).any(),
    "equal": lambda x, y: (x == y).all(),
    "allclose": lambda *args: torch.isclose(*args).all(),
}
