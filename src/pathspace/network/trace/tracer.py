"""From a model and an example input to a :class:`Network`."""

from __future__ import annotations

import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pathspace.network.attributes import (
    Attributes,
    forwards,
    of_classes,
    present,
    unchanged,
    watched,
)
from pathspace.network.call import Arguments, Call
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.eager import uncompiled
from pathspace.network.errors import MixedExamples, UntraceableError, WrongBatchDimension
from pathspace.network.exported import is_exported, module_of
from pathspace.network.likeness import same_arguments, same_network, same_slots
from pathspace.network.network import Network
from pathspace.network.program import Crossing, Cut, Program, told
from pathspace.network.returned import Returned
from pathspace.network.rules import MOVEMENTS, RULES
from pathspace.network.sharded import WHAT_TO_DO, shards
from pathspace.network.trace.assemble import assemble, coverage
from pathspace.network.trace.choices import Choices, whatever_the_answers
from pathspace.network.trace.drawn import random_states_kept
from pathspace.network.trace.examples import Examples
from pathspace.network.trace.functions import of_missing_values
from pathspace.network.trace.interpreter import Interpreter
from pathspace.network.trace.memory import check_memory
from pathspace.network.trace.outputs import kept_by, outputs_of
from pathspace.network.trace.outside import Outside, outside_names, with_all_obstacles
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.shadow import (
    arguments_for,
    hooks_of,
    known_hooks,
    may_change_results,
    observed,
    put_into_form_,
    shadow_of,
)
from pathspace.network.trace.values import Origin
from pathspace.squared.sharding import is_sharded


def trace(
    model: nn.Module | torch.export.ExportedProgram,
    example_input: Any,
    *,
    outside: Outside | Iterable[Outside] = (),
    batch_dim: int | str | None = "auto",
    output: Callable[[Any], Any] | None = None,
    states: Iterable[int | str] = (),
    strict: bool = False,
) -> Network:
    """Trace a model into a graph of unit classes.

    An operation that path geometry has no rule for (a softmax, a GELU, a quotient of activations)
    is a boundary: what enters it counts as an output of the network, what leaves it as an input.
    That loses symmetry and is never wrong; ``print(network)`` says where it happened.

    The model runs once, without data, on a copy; neither it nor its gradients, buffers or random
    state change. It runs in the mode that it is in, and the network goes on in that form: trace a
    model with BatchNorm in training mode if it will be trained so (docs/theory/normalization.md).

    Args:
        model: any module, or a program of ``torch.export``. ReLU, LeakyReLU, PReLU, linear and
            convolutional layers, pooling, residual sums, normalization, embeddings and ReLU
            recurrences are followed, in modules and in functional form; at any other operation the
            network is cut.
        example_input: what the model is called with: a tensor, a tuple or list of positional
            arguments, or a dict of keyword arguments. Only shapes and types are read.
        outside: what to leave to the plain rule of an optimizer: modules of the model, classes of
            modules (``nn.GELU``), paths (without what torch.compile or data parallelism add), or
            patterns of paths (``"blocks.*.norm"``, as in ``fnmatch``; ``*`` takes dots too). What
            enters such a module counts as an output of the network, what leaves it as an input.
        batch_dim: the dimension of the inputs that holds the batch; None for inputs without one;
            ``"auto"`` finds it.
        output: picks the outputs from what the model returns. By default all returned tensors are
            outputs but the last states of recurrent layers.
        states: positions or names of arguments that carry a hidden state over from earlier data.
            Such a state scales with the units that made it, and starts at zero. (``nn.RNN`` and
            ``nn.RNNCell`` know theirs.)
        strict: refuse an operation without a rule where a parameter comes after it, instead of
            cutting there; the message lists all of them, and what to write for ``outside``.

    Returns:
        The network.

    Raises:
        UntraceableError: what an operation does cannot be followed exactly (it writes where tracing
            does not see it, hands values to Python, reorders the examples of a batch), or
            ``strict`` is set and it has no rule; the message names it, its module and the reason.
        TypeError: the model is no module, or ``output`` no function.
        ValueError: the model has no parameters, something in ``outside`` is no module of it, a name
            in ``states`` no argument, ``batch_dim`` no dimension, or a parameter has not been
            initialised or is not of a real type.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> ps.trace(model, torch.zeros(1, 4))
        Network(58 weights in 4 parameters, 8 unit classes)
    """
    module = _module_to_trace(model, batch_dim)
    if output is not None and not callable(output):
        raise TypeError(
            f"output must be a function of what the model returns, such as lambda r: r[:, -1], got {output!r}"
        )
    names = outside_names(module, outside)
    if names and is_exported(module):
        raise ValueError(
            "an exported program is one graph, without modules that outside= could leave out: trace the module that "
            "was exported"
        )
    _check_whole(module)
    if isinstance(example_input, Mapping):
        example_input = dict(example_input)
    options = _Options(
        _without_data(example_input),
        frozenset(names),
        output,
        frozenset(states),
        strict,
        batch_dim,
        training={path: part.training for path, part in module.named_modules()},
    )
    plan = _Plan(
        module, example_input, names, output, frozenset(states), strict, again=Retrace(options)
    )
    network = plan.network_or_reason(batch_dim)
    network.watch()
    if not network.num_classes:
        warnings.warn(_without_classes(network), stacklevel=2)
    return network


def _module_to_trace(
    model: nn.Module | torch.export.ExportedProgram, batch_dim: int | str | None
) -> nn.Module:
    """Return the module of a model or of an exported program, without what torch.compile or data parallelism add.

    Raises:
        TypeError: if it is neither.
        ValueError: if it has no parameters, or the batch dimension is none.
    """
    module = module_of(model)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"trace needs an nn.Module or an exported program, got {type(module).__name__}; wrap a function in a module"
        )
    is_dimension = type(batch_dim) is int and batch_dim >= 0
    if not is_dimension and batch_dim not in (None, "auto"):
        raise ValueError(
            f"batch_dim must be 'auto', None or a dimension from 0 on, got {batch_dim!r}"
        )
    module = unwrapped(module)
    if next(module.parameters(), None) is None:
        raise ValueError(
            f"the model has no parameters: {type(module).__name__} cannot be trained or rescaled"
        )
    return module


def _not_read(
    recorder: Recorder, parameters: Mapping[str, nn.Parameter], outside: set[str]
) -> list[str]:
    """Return the names of parameters that the model does not read, but for those of modules left outside.

    A single number, or none, reads no units.
    """
    return [
        name
        for name, parameter in parameters.items()
        if not (parameter.numel() < 2 or id(parameter) in recorder.read or name in outside)
    ]


@dataclass(frozen=True)
class _Options:
    """The options of a trace, its example without data, and the form that the model was in."""

    example_input: Any
    outside: frozenset[str]
    output: Callable[[Any], Any] | None
    states: frozenset[int | str]
    strict: bool
    batch_dim: int | str | None
    training: Mapping[str, bool]


@dataclass(frozen=True)
class Retrace:
    """Traces a model once more in the same way; neither it nor any random state changes."""

    options: _Options

    def __call__(self, network: Network) -> tuple[Program, Call] | None:
        """Return the program and the call of a new trace, for the network to go on with; None if that is another one.

        Raises:
            Exception: of any kind, the model's own too: it cannot be traced as it is now.
        """
        with warnings.catch_warnings(), random_states_kept():
            warnings.simplefilter("ignore")
            other = self._plan(network).network(self.options.batch_dim)
        if not same_network(network, other):
            return None
        if same_arguments(network.program, other.program):
            return network.program, other.call
        return (other.program, other.call) if same_slots(network.program, other.program) else None

    def with_data(
        self, network: Network, interpreter: Callable[[Recorder], Interpreter], example: Arguments
    ) -> Network:
        """Trace an example with another interpreter, which may run the model on data meanwhile."""
        plan = replace(self._plan(network), interpreter=interpreter, example_input=example)
        with warnings.catch_warnings(), random_states_kept():
            warnings.simplefilter("ignore")
            return plan.of_one(network.call.batch_dim)

    def in_evaluation_form(self, network: Network, example: Arguments) -> Network | None:
        """Trace an example in evaluation form; None if the network was traced so.

        Raises:
            Exception: as for a call.
        """
        if not any(self.options.training.values()):
            return None
        training = dict.fromkeys(self.options.training, False)
        plan = replace(self._plan(network), example_input=example, training=training)
        with warnings.catch_warnings(), random_states_kept():
            warnings.simplefilter("ignore")
            return plan.of_one(network.call.batch_dim)

    def _plan(self, network: Network) -> _Plan:
        options = self.options
        _check_whole(network.model)
        return _Plan(
            network.model,
            options.example_input,
            set(options.outside),
            options.output,
            options.states,
            options.strict,
            training=options.training,
        )


def _without_data(example_input: Any) -> Any:
    """Return an example input of the same form whose tensors are on the meta device."""

    def without(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return torch.empty(part.shape, dtype=part.dtype, device="meta")

    # packed sequences, which a trace refuses, cannot be made of such tensors
    return pytree.tree_map(
        without, example_input, is_leaf=lambda part: isinstance(part, PackedSequence)
    )


def _example_in_words(example_input: Any) -> str:
    """Return how a message begins about an error that the model itself raises."""
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(example_input) if isinstance(t, Tensor)]
    is_pair = isinstance(example_input, (tuple, list)) and len(shapes) == 2
    without_targets = ", without the targets of a batch" if is_pair else ""
    return (
        f"the model's own forward fails on an example input with tensors of shape {', '.join(map(str, shapes))}. Give "
        f"an input that the model itself takes{without_targets}. The error:"
    )


def _of_library(error: Exception) -> bool:
    """Return whether the library raised an error itself: its message needs no introduction."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_name == "run_forward":  # arguments that the model's forward does not take
        return False
    return frame.f_globals.get("__name__", "").partition(".")[0] == "pathspace"


def _without_classes(network: Network) -> str:
    """Return the reason why nothing in a network can be rescaled."""
    lines = told(network.cuts)
    if lines:
        why = f"every unit of it enters or leaves an operation that does not scale: it is cut at {'; at '.join(lines)}"
    else:
        held = (
            "a constant, a normalization, a module outside or one that keeps it for its next call"
        )
        why = f"every unit of it is an input or an output, or held by {held}"
    return f"the network has no unit class, so nothing in it can be rescaled: {why}"


@dataclass(frozen=True)
class _Pass:
    """The results of a pass: the network, the used share of each parameter, and the movements of examples."""

    network: Network
    used: dict[str, int]
    examples: Examples


@dataclass(frozen=True)
class _Plan:
    """A trace, up to the choice of the batch dimension."""

    model: nn.Module
    example_input: Any
    outside: set[str]
    output: Callable[[Any], Any] | None
    states: frozenset[int | str]
    strict: bool = False
    choices: Choices = field(default_factory=Choices)
    tie_mixed: bool = False
    # reshapes of which the sizes may decide on unit classes
    mixing: list[str] = field(default_factory=list)
    training: Mapping[str, bool] | None = None  # of a model that was traced before: its form then
    again: Retrace | None = None  # traces the model in the same way later
    interpreter: Callable[[Recorder], Interpreter] = Interpreter

    def network_or_reason(self, batch_dim: int | str | None) -> Network:
        """Return the network, or say why there is none.

        Raises:
            UntraceableError: if an operation cannot be followed; in a strict trace with all further ones.
            Exception: as the model itself raises it, with the shapes of the example.
        """
        try:
            return self.network(batch_dim)
        except UntraceableError as error:
            if not self.strict:
                raise error.public() from None
            refusal = with_all_obstacles(
                error,
                self.model,
                self.outside,
                lambda left: replace(self, outside=left).network(batch_dim),
            )
            raise refusal.public() from None
        except (RuntimeError, IndexError) as error:
            raise type(error)(f"{_example_in_words(self.example_input)} {error}") from error
        except (ValueError, TypeError, AssertionError) as error:
            if _of_library(error):
                raise
            raise type(error)(f"{_example_in_words(self.example_input)} {error}") from error

    def network(self, batch_dim: int | str | None) -> Network:
        """Return the network, with the batch in a given dimension or in any that can be.

        Where a reshape mixes units of several classes, the model is traced with inputs of other
        sizes, too. If it takes these and has other classes then, units that are mixed share one.
        """
        network = self._of_given_sizes(batch_dim)
        if self.mixing and self._depends_on_sizes(network):
            return replace(self, tie_mixed=True)._of_given_sizes(batch_dim)
        return network

    def _depends_on_sizes(self, network: Network) -> bool:
        """Return whether one example of another size that the model takes has other unit classes."""
        batch_dim = network.call.batch_dim

        def traced(example: Any) -> Network:
            return replace(self, example_input=example).of_one(batch_dim)

        for other in with_other_sizes(traced, self.example_input, batch_dim):
            try:
                _check_edges(network, other)
            except MixedExamples:
                return True
        return False

    def _of_given_sizes(self, batch_dim: int | str | None) -> Network:
        # no hook that was registered after the first trace is watched
        _check_model(self.model, self.outside, hooks=self.training is None)

        def traced(choices: Choices) -> Network:
            plan = replace(self, choices=choices)
            return plan.with_any_batch() if batch_dim == "auto" else plan.with_batch(batch_dim)  # type: ignore[arg-type]

        return whatever_the_answers(traced, MOVEMENTS)

    def with_any_batch(self) -> Network:
        """Return the network with the first dimension that can be the batch, or without a batch."""
        problem: Exception | None = None
        mixed: MixedExamples | None = None
        for candidate in (*range(min(2, len(self._shape))), None):
            try:
                if candidate is not None:
                    return self._checked(candidate)
                if mixed is not None:  # right for a batch of this size alone
                    raise mixed.refusal
                return self._trace(None, Examples()).network
            except MixedExamples as error:
                if error.certain and self._shape[:1] == (1,):  # a batch of one
                    raise error.refusal from None
                mixed = mixed or error
            except (WrongBatchDimension, RuntimeError, IndexError) as error:
                problem = problem or error
        if isinstance(problem, WrongBatchDimension):
            raise _no_batch("no dimension of the example input can", problem, "dimension 0")
        assert problem is not None
        raise problem

    def with_batch(self, batch_dim: int | None) -> Network:
        """Return the network with the batch in a given dimension."""
        try:
            one = self._of_one(batch_dim)
            if batch_dim is not None:
                given = self._of_several(batch_dim, one)
                if given is not None:
                    _check_steps(one, given)
                    _check_edges(one.network, given.network)
                    return one.network
        except MixedExamples as error:
            raise error.refusal from None
        except WrongBatchDimension as error:
            raise _no_batch(
                f"dimension {batch_dim} of the example input cannot", error, "it"
            ) from None
        return one.network

    def _of_several(self, batch_dim: int, one: _Pass) -> _Pass | None:
        """Trace with the given number of examples; return None for a model that takes one example at a time."""
        with suppress(RuntimeError, IndexError):
            return self._trace(batch_dim, Examples(self._count(batch_dim), one.examples.moved))
        return None

    def _count(self, batch_dim: int) -> int:
        """Count the examples in the example input, but return at least two."""
        return max(2, self._shape[batch_dim])

    def _checked(self, batch_dim: int) -> Network:
        """Return the network, if it is the same with the given number of examples as with one."""
        one = self._of_one(batch_dim)
        examples = Examples(self._count(batch_dim), one.examples.moved)
        try:
            two = self._trace(batch_dim, examples)
        except MixedExamples:
            raise
        except WrongBatchDimension as error:
            if examples.merged or self._shape[batch_dim] == 1:
                raise MixedExamples(error.operation, error.module, certain=False) from None
            raise
        _check_steps(one, two)
        if one.used != two.used:
            raise WrongBatchDimension(
                "the use of parameters, which would depend on the batch size,"
            )
        _check_edges(one.network, two.network)
        return one.network

    def of_one(self, batch_dim: int | None) -> Network:
        """Return the network by a pass with one example."""
        return self._of_one(batch_dim).network

    def _of_one(self, batch_dim: int | None) -> _Pass:
        """Trace with one example; trace again if a reshape made the pass choose a wrong batch dimension."""
        examples = Examples()
        try:
            return self._trace(batch_dim, examples)
        except WrongBatchDimension:
            if not examples.doubtful:
                raise
            return self._trace(batch_dim, Examples(guessing=False))

    @property
    def _shape(self) -> torch.Size:
        """Shape of the first tensor of the example input, if there is one."""
        shapes = (t.shape for t in pytree.tree_leaves(self.example_input) if isinstance(t, Tensor))
        return next(shapes, torch.Size())

    @tables_on_the_cpu()
    def _trace(self, batch_dim: int | None, examples: Examples) -> _Pass:
        """Trace once, with so many examples in the dimension ``batch_dim``."""
        self.choices.start()
        recorder = Recorder(
            RULES, examples, strict=self.strict, choices=self.choices, tie_mixed=self.tie_mixed
        )
        interpreter = self.interpreter(recorder)
        shadow, parameters = self._shadow(recorder)
        args, kwargs = arguments_for(
            recorder, self.example_input, batch_dim, examples.count, self.states
        )
        interpreter.begin(args, kwargs)
        with observed(shadow, interpreter, self.outside):
            with uncompiled(), torch.no_grad(), interpreter:
                before = dict(shadow.named_parameters())
                kept = kept_by(shadow)
                attributes = watched(self.model, self.outside)
                held = present(shadow, attributes)
                result = _run(recorder, shadow, args, kwargs)
                _check_own(recorder, before, shadow)
                picked = result if self.output is None else self.output(result)
                interpreter.end(picked)
            outputs, places, slots, cuts = outputs_of(recorder, picked, result, shadow, kept)
            as_before = unchanged(held, present(shadow, attributes))
        outside = self._names_outside(parameters)
        unused = tuple(_not_read(recorder, before, outside))
        attributes = {place: value for place, value in attributes.items() if place in as_before}
        call = self._call(batch_dim, recorder.constants, unused, attributes)
        returned = Returned(self.output, places)
        program = self._program(recorder, slots, cuts)
        left = outside | recorder.left
        network = assemble(self.model, recorder, parameters, left, outputs, returned, call, program)
        self.mixing.extend(recorder.mixing)
        _check_types(network.parameters, torch.is_floating_point)
        return _Pass(network, coverage(recorder), examples)

    def _shadow(self, recorder: Recorder) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """Return a copy of the model without data, in the form that the trace is of, and the model's parameters."""
        if self.training is None:
            return shadow_of(self.model, recorder)
        shadow, parameters = shadow_of(self.model, recorder, known_hooks(self.model, self.outside))
        put_into_form_(shadow, self.training)
        return shadow, parameters

    def _names_outside(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Return the names of the parameters that modules left outside own."""
        owned: set[int] = set()
        for path in self.outside:
            owned.update(id(p) for p in self.model.get_submodule(path).parameters())
        return {name for name, p in parameters.items() if id(p) in owned}

    def _program(
        self, recorder: Recorder, slots: tuple[int | None, ...], cuts: tuple[Cut, ...]
    ) -> Program:
        """Return the forward pass that was recorded, without its nodes."""
        return Program(
            tuple(recorder.operations),
            slots,
            cuts=cuts,
            by_batch=frozenset(recorder.by_batch),
            crossings={slot: self._crossing(origin) for slot, origin in recorder.origins.items()},
        )

    def _crossing(self, origin: Origin) -> Crossing:
        """Return what an input of the network was computed from, with the parameters of a module left outside."""
        parameters = origin.parameters
        if origin.outside is not None:
            inside = self.model.get_submodule(origin.outside).named_parameters(
                prefix=origin.outside
            )
            parameters = (*parameters, *(name for name, _ in inside))
        return Crossing(origin.slots, parameters)

    def _call(
        self,
        batch_dim: int | None,
        constants: Set[str],
        unused: tuple[str, ...],
        attributes: Attributes,
    ) -> Call:
        """Return the record of the traced call; for the arguments see :class:`Call`."""
        values = {
            name: _tensor_at(self.model, name).detach().to("cpu", copy=True)
            for name in sorted(constants)
        }
        return Call(
            arguments=_without_data(self.example_input),
            batch_dim=batch_dim,
            states=self.states,
            outside=frozenset(self.outside),
            constants=values,
            unused=unused,
            tied=_shared_names(self.model),
            attributes=attributes,
            forwards=forwards(self.model, self.outside),
            of_classes=of_classes(self.model, self.outside),
            again=self.again,
        )


def _shared_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the further names of shared parameters, each with the first name."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    pairs = []
    for name, p in model.named_parameters(remove_duplicate=False):
        first = first_name[id(p)]
        if name != first:
            pairs.append((name, first))
    return tuple(pairs)


Result = TypeVar("Result")
_LARGE = 128


def with_other_sizes(
    function: Callable[[Any], Result], example_input: Any, batch_dim: int | None
) -> Iterator[Result]:
    """Yield what a function makes of examples of other sizes in one dimension each, and in the last two of them.

    They are three times as large. Where all of these dimensions are large, half the size is tried
    first, which costs less. Sizes with which the function fails are passed over: most models take
    inputs of their own size only, and say so in their own ways.
    """
    first = next(t for t in pytree.tree_leaves(example_input) if isinstance(t, Tensor))
    single = [(d,) for d in range(first.dim()) if d != batch_dim]
    both = [(first.dim() - 2, first.dim() - 1)] if len(single) > 2 else []
    for dims in (*both, *single):
        factors = [0.5, 3] if all(first.shape[d] >= _LARGE for d in dims) else [3]
        examples = [_resized(example_input, first.shape, dims, factor) for factor in factors]
        result = _first_result(function, examples)
        if result is not None:
            yield result


def _first_result(function: Callable[[Any], Result], examples: Iterable[Any]) -> Result | None:
    """Return what a function makes of the first example with which it does not fail; None if it does with all."""
    for example in examples:
        with suppress(Exception):
            return function(example)
    return None


def _resized(example_input: Any, shape: torch.Size, dims: Sequence[int], factor: float) -> Any:
    """Return an example without values whose tensors have some dimensions of the first tensor in another size."""

    def resized(t: Tensor) -> Tensor:
        sizes = [
            int(factor * n) if d in dims and d < len(shape) and n == shape[d] else n
            for d, n in enumerate(t.shape)
        ]
        return torch.empty(sizes, dtype=t.dtype, device="meta")

    return pytree.tree_map_only(Tensor, resized, example_input)


def _check_steps(one: _Pass, several: _Pass) -> None:
    """Refuse a forward pass that takes other steps for several examples than for one.

    Raises:
        UntraceableError: it does. Movements are not compared: all that they do shows in what
            follows.
    """
    steps = [
        [(o.name, o.module) for o in p.network.program.operations if o.name not in MOVEMENTS]
        for p in (one, several)
    ]
    differing = [b or a for a, b in zip_longest(*steps) if a != b]
    if differing:
        name, module = differing[0]
    elif one.used.keys() != several.used.keys():
        name = "forward"
        module = ""
    else:
        return
    raise UntraceableError(
        name,
        module,
        f"the forward pass takes other steps for {several.examples.count} examples than for one, so it has no single "
        "graph",
        "Trace a forward pass that does not ask for the number of examples (len(x), x.shape[0]), or leave the module "
        "that asks outside",
    )


def _check_edges(one: Network, several: Network) -> None:
    """Raise MixedExamples if some weights lie between other unit classes with several examples than with one."""
    if one.num_classes != several.num_classes:
        raise MixedExamples("forward")
    if not torch.equal(one.monomials, several.monomials):  # what the labels of products mean
        raise MixedExamples("forward")
    for name, edges in one.edges.items():
        other = several.edges[name]
        for a, b in ((edges.target, other.target), (edges.source, other.source)):
            if not torch.equal(*(torch.broadcast_tensors(a, b) if a.shape != b.shape else (a, b))):
                raise MixedExamples("forward")


def _tensor_at(model: nn.Module, name: str) -> Tensor:
    """Return a buffer, or a tensor that is a plain attribute of a module."""
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key)


def _no_batch(which: str, used: WrongBatchDimension, needed: str) -> UntraceableError:
    reason = f"{which} be the batch: {used} needs {needed} otherwise"
    advice = "Say which one is the batch with batch_dim=, or batch_dim=None if the input is a single example"
    return UntraceableError("batch", "", reason, advice)


def unwrapped(model: nn.Module) -> nn.Module:
    """Unwrap torch.compile and data parallelism: the same parameters in the same computation."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def _check_types(parameters: Mapping[str, nn.Parameter], allowed: Callable[[Tensor], bool]) -> None:
    for name, parameter in parameters.items():
        if not allowed(parameter):
            raise ValueError(
                f"parameter '{name}' is of type {parameter.dtype}: only real numbers can be rescaled. "
                "Keep tables that are not trained as buffers (register_buffer)"
            )


def _check_whole(model: nn.Module) -> None:
    """Refuse a model that is split over processes; parts that are left outside cannot be copied either."""
    for name, module in model.named_modules():
        if shards(module) or any(is_sharded(p) for p in module.parameters(recurse=False)):
            by = "FSDP" if shards(module) else "DTensor"
            raise UntraceableError(by, name, "it splits the weights over processes", WHAT_TO_DO)


def _check_model(model: nn.Module, outside: set[str], *, hooks: bool) -> None:
    _check_types(dict(model.named_parameters()), lambda p: not p.is_complex())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' has no shape yet: call the model once before tracing it")
    for name, module in model.named_modules():
        if any(name == o or name.startswith(o + ".") for o in outside):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            reason = "its code is compiled, and tracing does not see it"
            raise UntraceableError("scripted module", name, reason, "Trace the plain module")
        if hooks and any(map(may_change_results, hooks_of(module))):
            raise UntraceableError(
                "forward hook",
                name,
                "a hook can change what the module computes, and tracing does not see it",
                "Remove it first (handle.remove(), prune.remove; trace before a quantizer prepares the model), take "
                "torch.nn.utils.parametrizations.spectral_norm for the older one, or leave the module outside",
            )
    check_memory(model, tuple(f"{name}." for name in outside))


def _run(
    recorder: Recorder, shadow: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    of_numpy = getattr(sys.modules.get("numpy.random"), "get_state", tuple)
    drawn = random.getstate(), pickle.dumps(of_numpy())
    try:
        result = shadow(*args, **kwargs)
    except RuntimeError as error:
        # set_ is none of the functions that tracing sees
        if "set the storage of a tensor" in str(error):
            advice = "Write the result into a new tensor"
            recorder.refuse("it replaces the memory of a tensor", advice, operation="set_")
        _refuse_after(recorder, error)
        raise
    except Exception as error:
        _refuse_after(recorder, error)
        raise
    if recorder.escaped is not None:  # the model caught it and went on
        raise recorder.escaped
    if (random.getstate(), pickle.dumps(of_numpy())) != drawn:
        reason = "the forward pass draws numbers in Python, on which its steps may depend, so it has no single graph"
        advice = "Trace it in evaluation form (model.eval()) if only training draws, or multiply by torch.rand(()) > p"
        recorder.refuse(reason, advice, operation="random")
    return result


def _refuse_after(recorder: Recorder, error: Exception) -> None:
    """Refuse a forward pass that ends with an error, if the error comes of a refusal or of missing values."""
    if recorder.escaped is not None:
        raise recorder.escaped from None
    of_torch = isinstance(error, (RuntimeError, TypeError, ValueError, BufferError))
    if of_torch and not isinstance(error, UntraceableError) and of_missing_values(error):
        recorder.refuse(
            f"it needs values, and a trace has no data ({error})",
            "Leave the module outside that needs them",
            operation="forward",
        )


def _check_own(recorder: Recorder, before: Mapping[str, nn.Parameter], shadow: nn.Module) -> None:
    """Refuse a forward pass that gave a module another parameter."""
    for name, parameter in shadow.named_parameters():
        if before.get(name) is not parameter:
            reason = f"the forward pass replaces the parameter '{name}' by another, which no optimizer sees"
            recorder.refuse(
                reason, "Make parameters where the module is built", operation="nn.Parameter"
            )
