"""Forward passes of a traced model on data: the values of its nodes, and the values that its parameters read.

The pass is captured once, on one example (see ``beside``): in evaluation form, without dropout,
with BatchNorm as it was traced. Its steps then run on every batch, on all examples at once. The
pass is captured again for another device, type or shape of an example, and when the model asks a
question about its inputs that has another answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pathspace.graph.program import Program, Ref, Values, on_examples
from pathspace.network.eager import uncompiled
from pathspace.network.errors import (
    MixedExamples,
    UnmatchedForwardError,
    UntraceableError,
    WrongBatchDimension,
)
from pathspace.network.exported import expect_evaluation_form
from pathspace.network.network import Network, current_values
from pathspace.network.program import Operation
from pathspace.network.trace.functions import PLAIN
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.replay.arguments import Given, misfit
from pathspace.replay.beside import Beside, Example
from pathspace.replay.observed import Key, Node, Question, Use, UseOf
from pathspace.replay.special import WAYS
from pathspace.squared.precision import AtLeast, widened

Found = TypeVar("Found")
_MOST_PASSES = 8
"""The most captured passes that a network keeps, for batches of other forms and types."""


@dataclass
class Replay:
    """A forward pass on data.

    Attributes:
        nodes: the network's nodes.
        uses: where parameters are used.
        leaves: the parameters that ran, by name; they share the model's memory.
        count: the number of examples n.
        views: ids of tensors that are rearranged parameters.
    """

    nodes: dict[Key, Node]
    uses: list[Use]
    leaves: dict[str, Tensor]
    count: int
    views: set[int]


def replay(
    network: Network,
    inputs: Any,
    *,
    differentiable: bool = False,
    wide: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> Replay:
    """Run the traced model on a batch.

    Args:
        network: a traced network.
        inputs: what the model is called with: a tensor, a tuple or list of positional arguments, or
            a dict of keyword arguments, or :class:`Arguments`; of the traced shapes, but for the
            number of examples.
        differentiable: nodes keep their part of the graph, which leads to the model's own
            parameters.
        wide: run in float64.
        parameters: values to run with instead of the model's own, by name.

    Returns:
        What was found.

    Raises:
        UnmatchedForwardError: the forward pass is not the traced one, or cannot be followed on
            data.
        ValueError: the inputs are of another form than the example that the network was traced
            with.
    """
    with torch.inference_mode(False), torch.enable_grad():
        batch = Batch.of(
            network, inputs, differentiable=differentiable, wide=wide, parameters=parameters
        )
        found = captured(batch, _CapturedPass.of)
        values = batch.run(found.program, found.names)
        if not all(batch.agrees(values, question) for question in found.questions):
            _passes(network).clear()  # the model would take another way
            found = captured(batch, _CapturedPass.of)
            values = batch.run(found.program, found.names)
        return found.on_batch(values, batch, differentiable=differentiable)


def doubled(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64, if it holds numbers that can be."""
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass
class Batch:
    """A batch on which a pass runs, and the values of the model.

    Attributes:
        network: the traced network.
        given: the arguments, and where they have their examples.
        tensors: parameters and buffers by name.
        leaves: the network's parameters among them.
        cast: into the type of the computation.
        wider: that type, if it is wider than the model's.
    """

    network: Network
    given: Given
    tensors: dict[str, Tensor]
    leaves: dict[str, Tensor]
    cast: Callable[[Tensor], Tensor]
    wider: torch.dtype | None

    @staticmethod
    def of(
        network: Network,
        inputs: Any,
        *,
        differentiable: bool = False,
        wide: bool = False,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Prepare a batch with the values of the model; arguments are those of :func:`replay`."""
        current_values(network)
        cast = doubled if wide else widened
        given = Given.of(network, inputs, cast)
        tensors: dict[str, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        for path, parameter in network.model.named_parameters():
            name = network.names_by_id.get(id(parameter))  # parts may have been wrapped since
            if name is None:
                tensors[path] = nn.Parameter(cast(parameter).detach(), requires_grad=False)
                continue
            value = parameter if parameters is None else parameters[name]
            p = cast(value)  # in the graph of a parameter of half precision
            if not (differentiable and parameter.requires_grad and value is parameter):
                p = nn.Parameter(p.detach())
            tensors[path] = p
            leaves[name] = p
        for name, buffer in network.model.named_buffers():
            tensors[name] = cast(buffer.detach())
        widest = max((p.dtype for p in leaves.values()), key=lambda dtype: torch.finfo(dtype).bits)
        as_traced = all(p.dtype == network.parameters[n].dtype for n, p in leaves.items())
        return Batch(network, given, tensors, leaves, cast, None if as_traced else widest)

    @property
    def key(self) -> Any:
        """Key of the batches that share one captured pass."""
        call = self.given.call
        form = pytree.tree_structure((call.args, call.kwargs))
        shapes = tuple([(t.dtype, t.device, *t.shape) for t in self.given.example()])
        options = tuple([_option_key(option) for option in self.given.options])
        types = tuple([(p.dtype, p.device) for p in self.leaves.values()])
        return form, shapes, options, types

    def run(self, program: Program, names: list[str]) -> Values:
        """Run captured steps on all examples."""
        tensors = [self.tensor(name) for name in names]
        given, dims = self.given.for_vmap()
        with _random_kept(self.leaves):
            return on_examples(program, [*given, *tensors], [*dims, *[None] * len(tensors)])

    def example(self) -> Example:
        """Return the example beside which the model is traced."""
        device = next(iter(self.leaves.values())).device

        def answer(beside: Beside, question: Question) -> bool:
            # on the whole batch, by what was captured so far
            program = Program(
                beside.capture.steps, beside.seen.inputs, beside.seen.constants, [question.value]
            )
            asked = _QuestionOfPass(program.refer(question.value), question.made_by, answer=False)
            return self.answer(self.run(program, beside.seen.names), asked)

        def run(function: Callable[..., Any]) -> Callable[..., Any]:
            return function if self.wider is None else AtLeast(self.wider).of(function)

        return Example(
            self.given.example(),
            lambda name: self.tensor(name).detach(),
            _outside(self.network),
            lambda t: self.cast(t.detach().clone().to(device)),
            run,
            answer,
            device,
        )

    def tensor(self, name: str) -> Tensor:
        """Return a parameter, a buffer, or a tensor that is a plain attribute of a module."""
        if name in self.tensors:
            return self.tensors[name]
        path, _, key = name.rpartition(".")  # a plain attribute
        return self.cast(getattr(self.network.model.get_submodule(path), key))

    def agrees(self, values: Values, question: _QuestionOfPass) -> bool:
        """Return whether a question of the model has the answer with which its steps were captured."""
        return self.answer(values, question) == question.answer

    def answer(self, values: Values, question: _QuestionOfPass) -> bool:
        """Return the answer of the batch to a question."""
        value = values[question.value] if isinstance(question.value, Ref) else question.value
        answers = value.bool()
        some = bool(answers.any())
        every = bool(answers.all())
        if some == every or not answers.numel():
            return some
        # examples differ: any() and all() of a batch are those of its examples
        if question.made_by == "any":
            return True
        if question.made_by == "all":
            return False
        raise UnmatchedForwardError(
            "the model's code asks something of its inputs that is so for some examples of the batch and not for "
            "others: make its steps independent of the data, or ask with any() or all()"
        )


@dataclass(frozen=True)
class _QuestionOfPass:
    """A question of the model about its inputs, see :class:`Question`; ``value`` is its place in the program."""

    value: Any
    made_by: str
    answer: bool


@dataclass(frozen=True)
class _UseOfPass:
    """A use of parameters, see :class:`UseOf`, with places in the program instead of tensors."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    weights: list[Any]
    results: list[Any]
    stacked: bool

    @staticmethod
    def of(use: UseOf, refer: Callable[[Any], Any]) -> _UseOfPass:
        """Make a captured use, with references in place of tensors."""
        args, kwargs, weights, results = refer((use.args, use.kwargs, use.weights, use.results))
        return _UseOfPass(use.name, use.function, args, kwargs, weights, results, use.stacked)


@dataclass(frozen=True)
class _CapturedPass:
    """A captured pass: its steps, and the places of nodes, uses and questions in them.

    Attributes:
        program: the steps.
        names: names of the parameters and buffers that are inputs of the program, in their order.
        nodes: places of the nodes, by key.
        uses: where parameters are used.
        views: places of rearranged parameters.
        questions: the model's questions about its inputs.
    """

    program: Program
    names: list[str]
    nodes: dict[Key, Any]
    uses: list[_UseOfPass]
    views: list[Any]
    questions: list[_QuestionOfPass]

    @staticmethod
    def of(beside: Beside) -> _CapturedPass:
        """Make the pass that was captured beside a trace."""
        seen = beside.seen
        # gradients are taken at nodes and at results of uses, so each example has its own
        own = list(seen.nodes.values())
        for use in seen.uses:
            own += use.results
        others: list[Any] = [(use.args, use.kwargs, use.weights) for use in seen.uses]
        others += [question.value for question in seen.questions]
        wanted = [*own, *(t for t in pytree.tree_leaves(others) if isinstance(t, Tensor))]
        program = Program(beside.capture.steps, seen.inputs, seen.constants, wanted, own)
        refer = program.refer
        found = _CapturedPass(
            program=program,
            names=seen.names,
            nodes={key: refer(t) for key, t in seen.nodes.items()},
            uses=[_UseOfPass.of(use, refer) for use in seen.uses],
            views=refer([t for t in wanted if id(t) in seen.views]),
            questions=[
                _QuestionOfPass(refer(q.value), q.made_by, q.answer) for q in seen.questions
            ],
        )
        program.seal()
        return found

    def on_batch(self, values: Values, batch: Batch, *, differentiable: bool) -> Replay:
        """Return nodes and uses from the values of a run on a batch."""
        nodes = {}
        for key, ref in self.nodes.items():
            value = values[ref]
            if not value.requires_grad:
                raise UnmatchedForwardError(
                    "a node of the network has no gradient on data: its values were rounded, or computed without one"
                )
            nodes[key] = Node(value if differentiable else value.detach(), get_gradient_edge(value))
        # uses without a gradient, as under no_grad, add nothing to derivatives
        differentiable_uses = [
            use for use in self.uses if all(values[ref].requires_grad for ref in use.results)
        ]
        uses = [self._use(values, use, batch) for use in differentiable_uses]
        views = {id(values[ref]) for ref in self.views if isinstance(ref, Ref)}
        return Replay(
            nodes,
            uses,
            batch.leaves,
            batch.given.count,
            views | {id(p) for p in batch.leaves.values()},
        )

    def _use(self, values: Values, use: _UseOfPass, batch: Batch) -> Use:
        """Return a use of parameters on a batch."""
        results = [values[ref] for ref in use.results]
        weights = [values[ref] for ref in use.weights]
        weight_ids = {id(w) for w in weights}
        data: list[Tensor] = []

        def value(ref: Ref) -> Tensor:
            t = values[ref]
            if id(t) in weight_ids:
                return t
            t = t.detach()
            if values.differs(ref):
                data.append(t)
            return t

        args, kwargs = pytree.tree_map_only(Ref, value, (use.args, use.kwargs))
        shape = results[0].shape
        if use.stacked:
            # [n, ...] for each step -> [n, steps, ...]
            shape = torch.Size([shape[0], len(results), *shape[1:]])
        edges = [get_gradient_edge(t) for t in results]
        function = use.function if batch.wider is None else AtLeast(batch.wider).of(use.function)
        return Use(use.name, function, args, kwargs, weights, data, edges, shape)


def _option_key(option: Any) -> Any:
    """Return a hashable key of an argument that is no tensor."""
    return repr(option) if isinstance(option, PLAIN) else id(option)


def _outside(network: Network) -> nn.Module:
    """Copy the model for its modules left outside, in evaluation form; parameters are not copied."""
    if not network.call.outside:
        return network.model
    shared = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in network.model.parameters()
    }
    return evaluation_form_of(network.model, dict(shared))


def _passes(network: Network) -> dict[Any, Any]:
    """Return the captured passes of the network in its current state."""
    call, passes = network.__dict__.get("_passes", (None, {}))
    if call is not network.call:  # something was switched in the model
        passes = {}
        network.__dict__["_passes"] = network.call, passes
    return passes


def captured(batch: Batch, of: Callable[[Beside], Found]) -> Found:
    """Return the captured pass for a batch, from the cache if one of its form is there.

    Args:
        batch: the batch.
        of: makes the result from what was captured; it is part of the key of the cache.
    """
    passes = _passes(batch.network)
    key = batch.key, of
    if key not in passes:
        if len(passes) >= _MOST_PASSES:
            passes.clear()
        # the key has the ids of the options, so these must stay alive
        passes[key] = of(_capture(batch)), batch.given.options
    return passes[key][0]


def _capture(batch: Batch) -> Beside:
    """Trace the network's model once more, with an example of the batch beside it."""
    network = batch.network
    assert network.call.again is not None
    expect_evaluation_form(network.model)
    try:
        with _random_kept(batch.leaves), uncompiled():
            example = batch.given.without_data()
            evaluated = network.call.again.in_evaluation_form(network, example)
            if evaluated is not None:
                _check_same_names(network, evaluated)
            beside, other = _captured_beside(batch, network)
            slots = _slots_of(network, other)
            if any(ours != theirs for theirs, ours in slots.items()):
                beside, _ = _captured_beside(batch, other)
                beside.rename_slots(slots, network)
    except (RuntimeError, TypeError, IndexError) as error:
        if why := misfit(network, batch.given.call):
            raise ValueError(f"{why} ({error})") from error
        raise
    except (UntraceableError, MixedExamples, WrongBatchDimension) as error:
        raise UnmatchedForwardError(f"{_ANOTHER_WAY} ({error})") from error
    beside.check_nodes()
    return beside


def _captured_beside(batch: Batch, like: Network) -> tuple[Beside, Network]:
    """Capture a pass on an example in the slots of a network; return it, and the network that it is of."""
    made = list[Beside]()
    own = batch.example()

    def interpreter(recorder: Recorder) -> Beside:
        made.append(Beside(recorder, like, own, WAYS))
        return made[-1]

    again = batch.network.call.again
    assert again is not None
    other = again.with_data(batch.network, interpreter, batch.given.without_data())
    return made[-1], other


def _slots_of(network: Network, other: Network) -> dict[int, int]:
    """Return the slots of a network by those of a pass that does the same operations.

    They are others if the pass makes more or less of its inputs, such as of a mask that masks
    nothing.

    Raises:
        UnmatchedForwardError: the pass does other operations.
    """
    _check_same_names(network, other)
    slots: dict[int, int] = {}
    for traced, now in zip(network.program.operations, other.program.operations, strict=True):
        count_now = _count_of_tensors(now)
        count_traced = _count_of_tensors(traced)
        # a mask may be there or not
        more = 1 if now.name == _MAY_BE_MASKED else 0
        takes_others = abs(count_now - count_traced) > more
        if takes_others or len(now.results) != len(traced.results):
            raise UnmatchedForwardError(
                f"'{now.name}' in '{now.module}' takes and returns {count_now} tensors, and {count_traced} when it was "
                "traced: the number of steps must be the traced one; trace the model with such an input"
            )
        slots.update(zip(now.results, traced.results, strict=True))
    outputs = [None if slot is None else slots.get(slot, slot) for slot in other.program.outputs]
    if list(network.program.outputs) != outputs:
        raise UnmatchedForwardError(f"{_ANOTHER_WAY}: it returns other tensors")
    return slots


def _count_of_tensors(operation: Operation) -> int:
    """Return how many tensors an operation takes and returns; the last of its shapes is that of a result."""
    return len(operation.shapes) - 1 + len(operation.results)


def _check_same_names(network: Network, other: Network) -> None:
    for traced, now in zip_longest(network.program.operations, other.program.operations):
        if traced is None or now is None or traced.name != now.name:
            names = [f"'{o.name}'" if o is not None else "the end" for o in (now, traced)]
            where = f" in '{now.module}'" if now is not None else ""
            raise UnmatchedForwardError(
                f"{_ANOTHER_WAY}{where}: {names[0]} where tracing met {names[1]}. What is computed on data runs it "
                "in evaluation form: trace it in that form (model.eval()), or make its steps independent of the data"
            )


_MAY_BE_MASKED = "scaled_dot_product_attention"
_ANOTHER_WAY = "the model's code takes another way than when it was traced"


def _random_kept(leaves: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Leave torch's random state as it is: the model may draw numbers of its own."""
    devices = sorted({p.device.index for p in leaves.values() if p.device.type == "cuda"})
    return torch.random.fork_rng(devices=devices)
