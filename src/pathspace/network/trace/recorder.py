"""The state of a trace: values of tensors, the squared network so far, uses of parameters.

Rules (see ``rules``) read and write it; the interpreter (see ``interpreter``) decides which rule
runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import MixedExamples, NoRule, UntraceableError, WrongBatchDimension
from pathspace.network.program import Operation
from pathspace.network.trace.choices import Choices
from pathspace.network.trace.drawn import DRAWN
from pathspace.network.trace.examples import Examples, along
from pathspace.network.trace.functions import (
    changes,
    says_meta,
    short_name,
    tensors_in,
    with_sizes,
    without_values,
)
from pathspace.network.trace.parameter_uses import ParameterUses, index_of
from pathspace.network.trace.reasons import INPUTS_READ, OF_INPUTS, ROUNDED
from pathspace.network.trace.scales import FIXED, WILD, Scales
from pathspace.network.trace.values import Origin, Value, View, common_kind, identity, put
from pathspace.network.trace.zeros import OfBuffers, anywhere
from pathspace.squared.tape import Instruction, Leaf


class Recorder:
    """The state of a trace; one object per trace.

    Args:
        rules: the rule of every operation, for rules that are written in terms of others.
        examples: how many there are in a batch, and where they are.
        strict: whether an operation without a rule ends the network.
        choices: the answers to questions about inputs.
        tie_mixed: whether units that a reshape mixes share a scale.
    """

    def __init__(
        self,
        rules: Mapping[str, Callable[..., Any]],
        examples: Examples,
        *,
        strict: bool,
        choices: Choices,
        tie_mixed: bool = False,
    ) -> None:
        self.rules = rules
        self.examples = examples
        self.strict = strict
        self.choices = choices
        self.tie_mixed = tie_mixed
        # reshapes by which units of several classes come to places that sizes decide
        self.mixing: list[str] = []
        self.scales = Scales()
        self.leaves: list[Leaf] = []
        self.instructions: list[Instruction] = []
        self.uses = ParameterUses(self.scales)
        # values of buffers and their views, by the id of the empty tensor
        self.real: dict[int, Tensor] = {}
        # constants made of buffers, by id
        self.of_buffers: dict[int, OfBuffers] = {}
        # names of the buffers that were written into memory with views, by the id of its owner
        self.written: dict[int, tuple[Tensor, frozenset[str]]] = {}
        # names of the buffers themselves, by the id of the copy
        self.own: dict[int, str] = {}
        # what each buffer holds: a mask, indices, numbers, a single number, or random draws
        self.kinds: dict[str, str] = {DRAWN: "drawn"}
        # names of buffers whose values decided on scales
        self.constants: set[str] = set()
        # what flows into modules left outside
        self.extra_outputs: list[Value] = []
        # by slot, the origins of inputs that the network itself had a part in
        self.origins: dict[int, Origin] = {}
        # slots of all that enters modules left outside
        self.roots: list[int] = []
        # tensors that operations took, by id
        self.read: dict[int, Tensor] = {}
        # parameters that an operation without a rule takes
        self.left: set[str] = set()
        # how often an operation was called, by name
        self.calls: Counter[str] = Counter()
        # values of units, right after their ReLU
        self.unit_values: list[Value] = []
        # slots of weights made of a gain and a direction
        self.normed: set[int] = set()
        # slots of normalizations that the model writes itself
        self.divided: set[int] = set()
        # slot of a bag -> slot of its rows
        self.inside: dict[int, int] = {}
        # values of linear maps, for classes without a ReLU
        self.linear_values: list[Value] = []
        # values that enter an activation
        self.activated: list[Value] = []
        # the operations that depend on a parameter, in their order
        self.operations: list[Operation] = []
        # by slot, single values that are known if all activations are finite
        self.if_finite: dict[int, bool | int] = {}
        # by slot, values that may not be finite (see trace.finite)
        self.not_finite: dict[int, Any] = {}
        # slots of values that are finite again, and the buffers by whose values they are
        self.finite_again: dict[int, frozenset[str]] = {}
        # slots of random numbers
        self.drawn: set[int] = set()
        # the first refusal that the model's own code could catch
        self.escaped: Exception | None = None
        # packed sequences, by the id of their batch sizes (see rules.packed)
        self.packed: dict[int, Any] = {}
        # modules that normalize inputs by statistics of the batch
        self.by_batch: set[str] = set()
        self.module_path: list[str] = []
        # operations that run, the innermost last
        self._running: list[tuple[str, Callable[..., Any]]] = []
        # keeps the tensors alive, so that ids stay unique
        self._values: dict[int, tuple[Tensor, Value, tuple[int, int]]] = {}
        # the first values of tensors that were written to, by id
        self._overwritten: dict[int, Value] = {}
        self._slots = 0

    # -- values ------------------------------------------------------------------------------------

    def new_slot(self) -> int:
        """Return a new slot of the squared network."""
        self._slots += 1
        return self._slots - 1

    def bind(self, tensor: Tensor, value: Value) -> Tensor:
        """Set the value of ``tensor``."""
        if id(tensor) in self._values:
            self._overwritten.setdefault(id(tensor), self._values[id(tensor)][1])
        self._values[id(tensor)] = (tensor, value, _memory(tensor))
        return tensor

    def lookup(self, tensor: Any) -> Value | None:
        """Return the value of a tensor, or None for a constant and for anything that is no tensor."""
        entry = self._values.get(id(tensor))
        if entry is None:
            return None
        _, value, memory = entry
        if memory != _memory(tensor) and value.kind != "input":
            self._replaced(value, memory[0] == _memory(tensor)[0])
        return value if value.version == value.memory.version else self._after_writes(tensor, value)

    def known(self, tensor: Any) -> Value | None:
        """Return the last known value of a tensor, without applying later writes; for callers that only watch."""
        entry = self._values.get(id(tensor))
        return None if entry is None else entry[1]

    def values_in(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Value]:
        """Return the values of those tensors among arguments that have one, in order."""
        return [v for t in tensors_in(args, kwargs) if (v := self.lookup(t)) is not None]

    def all_values(self) -> Iterator[Value]:
        """Return the current values of all tensors."""
        return (value for _, value, _ in self._values.values())

    def overwritten_values(self) -> Iterable[Value]:
        """Return the values that tensors had before they were written to for the first time."""
        return self._overwritten.values()

    def rank(self, tensor: Tensor) -> int:
        """Return 0 for an activation, 1 for a value that depends on no parameter, 2 for a parameter."""
        value = self.lookup(tensor)
        return 1 if value is None else {"hidden": 0, "parameter": 2}.get(value.kind, 1)

    def value(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; a constant becomes a leaf of the squared network."""
        value = self.lookup(tensor)
        if value is not None:
            return value
        if tensor.is_meta:
            self.refuse(
                "it was made by code that tracing does not see", operation="an untraced tensor"
            )
        data = tensor.detach().clone()
        slot = self.new_slot()
        self.leaves.append(Leaf(slot, "constant", shape=tuple(data.shape), data=data))
        return Value(slot, torch.where(self.zeros(tensor).cpu(), WILD, FIXED), kind="input")

    def zeros(self, constant: Tensor) -> Tensor:
        """Return where a constant is zero for any values of buffers.

        Zeros fit every scale, as the start of a recurrence does.
        """
        return (constant == 0) & ~self.differs(constant)

    def differs(self, constant: Tensor) -> Tensor:
        """Return where a constant may become different from zero. Masks do not change, as they are watched."""
        of = self.made_of_buffers(constant)
        unsure = of is not None and self.buffers_in(
            constant, "indices", "numbers", "single", "drawn"
        )
        return of.differs if of is not None and unsure else constant != 0

    def made_of_buffers(self, constant: Tensor) -> OfBuffers | None:
        """Return the facts about a constant that was made of buffers."""
        of = self.of_buffers.get(id(constant))
        base = constant._base if constant._is_view() else constant
        if id(base) not in self.written:
            return of
        names = self.written[id(base)][1] | (of.names if of else frozenset())
        return OfBuffers(constant, anywhere(constant), names)

    def buffers_in(self, constant: Tensor, *kinds: str) -> frozenset[str]:
        """Return the names of the buffers of some kinds that a constant was made of."""
        of = self.made_of_buffers(constant)
        return frozenset(n for n in (of.names if of else ()) if self.kinds[n] in kinds)

    def copy_buffer(self, buffer: Tensor, name: str) -> Tensor:
        """Return a copy of a buffer on the CPU whose values a trace may use, as the model may write into the buffer."""
        own = buffer.detach().to("cpu", copy=True)
        self.of_buffers[id(own)] = OfBuffers(own, anywhere(own), frozenset({name}))
        self.own[id(own)] = name
        self.kinds[name] = _kind_of_buffer(own)
        return own

    def add_leaf(
        self,
        tensor: Tensor,
        kind: str,
        name: str = "",
        batch: int | None = None,
        examples: Tensor | None = None,
    ) -> Tensor:
        """Bind a tensor to a new leaf: an input, a parameter or a buffer."""
        slot = self.new_slot()
        self.leaves.append(Leaf(slot, kind, name, tuple(tensor.shape)))
        if kind == "parameter":
            self.uses.shapes[name] = tensor.shape
            value = Value(slot, index_of(tensor.shape), "parameter", name)
            value.memory.parameter = name
            return self.bind(tensor, value)
        fixed = torch.zeros((), dtype=torch.long).expand(tensor.shape)
        return self.bind(tensor, Value(slot, fixed, kind, name, batch, examples=examples))

    def check_write(self, target: Tensor) -> None:
        """Refuse writing into the memory of a parameter: every forward pass would change it once more."""
        value = self.lookup(target)
        if value is not None and value.memory.parameter:
            self.refuse(f"it changes the parameter '{value.memory.parameter}' in place", NEW)

    def _replaced(self, value: Value, by_set: bool) -> None:
        what = f"the parameter '{value.name}'" if value.kind == "parameter" else "a tensor"
        operation = "set_" if by_set else "swap_tensors"
        self.refuse(f"it replaces the memory of {what}", NEW, operation=operation)

    def check_type(self, target: Tensor, written: Value) -> None:
        """Refuse writing activations into a tensor of whole numbers, which rounds them without a word."""
        if written.kind != "input" and not target.dtype.is_floating_point:
            self.refuse(f"{ROUNDED}: it writes them into a tensor of type {target.dtype}")

    def write(self, target: Tensor, source: Tensor) -> Tensor:
        """Set the value of ``target`` to that of ``source``, and update all values that share its memory."""
        old = self.value(target)
        new = self.value(source)
        if old.memory.members == 1:
            return self.bind(target, new)
        memory = old.memory
        memory.write(None if old.view is None else memory.elements(old.view), new)
        return self.bind(target, replace(new, memory=memory, view=old.view, version=memory.version))

    def _note_write(self, target: Tensor, before: Value) -> None:
        """Let whatever shares memory with a tensor see that an operation wrote into it."""
        memory = before.memory
        if memory.members > 1:
            new = self.value(target)
            memory.write(None if before.view is None else memory.elements(before.view), new)
            self.bind(target, replace(new, memory=memory, view=before.view, version=memory.version))

    def in_memory_of(
        self, value: Value, tensor: Tensor, given: Iterable[tuple[Tensor, Value | None]]
    ) -> Value:
        """Return a result's value in the memory of an argument, if it lies there; nobody knows in what order."""
        memory = tensor.untyped_storage()._cdata
        for t, of in given:
            if of is None or t is tensor or not t.is_meta:
                continue
            if t.untyped_storage()._cdata == memory:
                of.memory.share(of)
                return replace(value, memory=of.memory, view=None, version=of.version)
        return value

    def write_elements(self, target: Tensor, part: View, source: Value) -> None:
        """Replace some elements of a tensor that shares memory."""
        old = self.value(target)
        view = old.view
        if view is None:
            self.refuse(
                "it writes into a tensor that may share memory with another one",
                "Write into a clone()",
            )
        old.memory.write(part(old.memory.elements(view)), source)

    def _after_writes(self, tensor: Tensor, value: Value) -> Value:
        """Return the value of a tensor after writes into memory that it shares."""
        memory = value.memory
        if memory.unsure > value.version or (value.view is None and memory.version > value.version):
            self.refuse(
                "a tensor is used that may share memory with one that was changed in place",
                "Write h = h + x in the place of h += x, or change a clone()",
                operation="in-place operation",
            )
        assert memory.owner is not None
        assert value.view is not None
        if not memory.changed(value.view, value.version):
            value = replace(value, version=memory.version)
            self.bind(tensor, value)
            return value
        owner = memory.owner
        like = self.scales.resolve(memory.owner.labels)
        for elements, new in memory.pending:
            labels = like.reshape(-1).clone()
            labels[elements] = self.scales.resolve(new.labels)
            like = labels.reshape(owner.shape)
            batch, examples = self.examples.written(owner, elements, new)
            created = Value(
                self.new_slot(), like, common_kind((owner, new)), batch=batch, examples=examples
            )
            self.emit_many(
                put(elements), [owner, new], [created], name="in-place write", dtype=tensor.dtype
            )
            owner = created
        memory.owner = owner
        memory.pending = []
        batch, examples = self._examples_seen(value)
        seen = Value(
            self.new_slot(), value.view(like), owner.kind, batch=batch,
            memory=memory, view=value.view, version=memory.version, examples=examples,
        )  # fmt: skip
        self.emit_many(value.view, [owner], [seen], name="view after a write", dtype=tensor.dtype)
        self.bind(tensor, seen)
        return seen

    def _examples_seen(self, value: Value) -> tuple[int | None, Tensor | None]:
        """Return the batch dimension of a view after a write, and the pattern of the examples in it."""
        owner = value.memory.owner
        assert owner is not None
        assert value.view is not None
        if value.batch is not None or owner.batch is None or not value.memory.constant:
            return value.batch, value.examples
        places = self.examples.places(owner)  # a constant that activations were written into
        if places is None:
            return None, None
        result = along(value.view(places))
        if result is None:
            return self.mixes()
        return result[0], self.examples.pattern(result[1])

    def emit(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Value],
        labels: Tensor,
        *,
        dtype: torch.dtype,
        name: str | None = None,
        batch: int | None = None,
        kind: str = "hidden",
        parameter: str = "",
        form: Any = None,
        fixed: bool = False,
        statistic: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Record ``function`` of the squared inputs and return the (empty) tensor it makes.

        For ``form``, ``fixed`` and ``statistic`` see :class:`pathspace.squared.tape.Instruction`.
        """
        result = Value(self.new_slot(), labels, kind, parameter, batch)
        created = self.emit_many(function, inputs, [result], dtype=dtype, name=name, form=form)[0]
        if fixed or statistic is not None:
            self.instructions[-1] = replace(self.instructions[-1], fixed=fixed, statistic=statistic)
        return created

    def emit_many(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Value],
        results: Sequence[Value],
        *,
        dtype: torch.dtype,
        name: str | None = None,
        recurrent: bool = False,
        form: Any = None,
    ) -> tuple[Tensor, ...]:
        """Record a function with several results; ``results`` have their slots already."""
        if self.examples.count > 1:
            results = [
                replace(v, examples=self._examples_of(name, inputs, v.batch, v.shape))
                if v.examples is None
                else v
                for v in results
            ]
        created = tuple(v.slot for v in results)
        used = tuple(v.slot for v in inputs)
        of_parameter = results[0].kind == "parameter"
        where = self.where(name)
        self.instructions.append(
            Instruction(
                function,
                used,
                created,
                where,
                of_parameter,
                recurrent,
                form,
                tuple(results[0].shape),
            )
        )
        return tuple(
            self.bind(torch.empty(v.shape, dtype=dtype, device="meta"), v) for v in results
        )

    def _examples_of(
        self, name: str | None, inputs: Sequence[Value], batch: int | None, shape: torch.Size
    ) -> Tensor | None:
        """Return the pattern of the examples in a result with this batch dimension, from the values it reads."""
        if self.examples.count == 1 or batch is None or batch >= len(shape):
            return None
        known = [value.examples for value in inputs if value.examples is not None]
        patterns = [pattern for pattern in known if len(pattern) == shape[batch]]
        if not patterns:
            return None
        first = patterns[0]
        if not all(torch.equal(pattern, first) for pattern in patterns):
            self.mixes(name)
        return first

    def as_units(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; a parameter in the place of activations becomes edges from the bias node."""
        value = self.value(tensor)
        if value.kind != "parameter":
            return value
        created = self.scales.fresh(value.labels.numel(), self.where("parameter"))
        created = created.reshape(value.shape)
        self.uses.add(value, created, torch.full_like(created, FIXED), bias=True)
        labels = self.scales.resolve(created)
        units = self.emit(identity, [value], labels, name="parameter", dtype=tensor.dtype)
        return self.value(self.note_unit(units))

    def made_of(self, source: Tensor, count: int) -> Tensor:
        """Return labels of units that weights make of others.

        They are new where anything enters: W 0 = 0 for every W.
        """
        zero = bool((self.scales.resolve(source) == WILD).all())
        return torch.full((count,), WILD) if zero else self.scales.fresh(count, self.where())

    def note_unit(self, tensor: Tensor) -> Tensor:
        """Remember that this tensor holds unit values (after a ReLU)."""
        self.unit_values.append(self.value(tensor))
        return tensor

    def note_linear(self, tensor: Tensor) -> Tensor:
        """Remember that this tensor holds the values of a linear map."""
        self.linear_values.append(self.value(tensor))
        return tensor

    def apply(self, name: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Interpret one more operation, for rules that are written in terms of others."""
        with self.running(name, func):
            return self.rules[name](self, *args, **kwargs)

    @contextmanager
    def running(self, name: str, func: Callable[..., Any]) -> Iterator[None]:
        """Return a context manager in which an operation runs, perhaps inside another one."""
        self._running.append((name, func))
        try:
            yield
        finally:
            self._running.pop()

    @property
    def name(self) -> str:
        """Name of the operation that is running: what messages and unit classes are called by."""
        return self._running[-1][0]

    @property
    def func(self) -> Callable[..., Any]:
        """The function of the operation that is running."""
        return self._running[-1][1]

    def preprocess(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the result of a fixed function of the inputs alone (centring, one-hot, ...) an input of the network."""
        batch = next((v.batch for v in self.values_in(args, kwargs) if v.batch is not None), None)
        target = args[0] if args and changes(self.name) else None
        before = self.lookup(target)
        try:
            result = self.as_inputs(func, args, kwargs, batch)
            return self._written(target, before, result) if isinstance(target, Tensor) else result
        except (NotImplementedError, TypeError) as error:
            if not says_meta(error) and "__format__" not in str(error):
                raise  # the model's own
            return self.refuse(INPUTS_READ, OF_INPUTS, operation=short_name(func))

    def _written(self, target: Tensor, before: Value | None, result: Any) -> Any:
        """Note that a function of inputs wrote into its first argument, and return the function's result."""
        # into a constant, which has values of its own
        if isinstance(result, Tensor) and result is not target:
            return self.write(target, result)
        if before is not None:
            self._note_write(target, before)
        return result

    def as_inputs(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        batch: int | None,
        outside: str | None = None,
    ) -> Any:
        """Run a function, or the module at the path `outside`, unrecorded; its results are inputs of the network."""
        given = [(t, self.lookup(t)) for t in tensors_in(args, kwargs)]
        traced = [value for _, value in given if value is not None]
        batched = next((value for value in traced if value.batch == batch), None)
        args, kwargs = with_sizes(args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        name = short_name(func)
        result = without_values(name, func, args, kwargs)

        def in_memory(tensor: Tensor) -> Tensor:
            self.examples.moved.append((outside or name, self.path, tensor.shape))
            bound = self._bind_input(tensor, batch, batched)
            return self.bind(bound, self.in_memory_of(self.value(bound), bound, given))

        result = pytree.tree_map_only(Tensor, in_memory, result)
        slots = [value.slot for value in traced]
        if not self.drawn.isdisjoint(slots):
            self.note_drawn(result)
        of_units = any(value.kind == "hidden" for value in traced)
        if of_units or self.origins or outside is not None:
            self._note_origin(result, Origin(tuple(slots), outside=outside))
        return result

    def _note_origin(self, result: Any, origin: Origin) -> None:
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.origins[self._values[id(tensor)][1].slot] = origin

    def _bind_input(self, tensor: Tensor, batch: int | None, batched: Value | None) -> Tensor:
        """Make a result an input, and find out whether it has the examples where its argument has them.

        Args:
            tensor: the result of a function of inputs.
            batch: the dimension in which an argument has the examples, if it is known.
            batched: that argument.
        """
        if batch is None or batched is None or tensor.dim() <= batch:
            return self.add_leaf(tensor, "input")
        examples = self.examples
        same_sizes = tensor.shape[: batch + 1] == batched.shape[: batch + 1]
        if examples.count > 1:
            if not (same_sizes and self._grows_with_examples(tensor, batch)):
                return self.add_leaf(tensor, "input")
            return self.add_leaf(tensor, "input", batch=batch, examples=batched.examples)
        if tensor.shape[batch] != 1:
            return self.add_leaf(tensor, "input")
        if not same_sizes:  # this may be another dimension of size 1
            examples.doubtful = True
            if not examples.guessing:
                return self.add_leaf(tensor, "input")
        return self.add_leaf(tensor, "input", batch=batch)

    def _grows_with_examples(self, tensor: Tensor, dim: int) -> bool:
        """Return whether a dimension is n times as large for n examples as the pass with one example found it."""
        single = self.examples.single()
        if single is None or len(single) != tensor.dim():
            return True  # that pass says nothing of it
        return tensor.shape[dim] == self.examples.count * single[dim]

    def note_drawn(self, drawn: Any) -> Any:
        """Remember that tensors hold random numbers, for what is said of a question about them."""
        self.drawn.update(v.slot for v in self.values_in((drawn,), {}))
        return drawn

    def reached(self, slots: Iterable[int], until: Collection[int] = ()) -> set[int]:
        """Return all slots from which these were computed, through cuts and functions of inputs, up to some slots."""
        read = {slot: i.inputs for i in self.instructions for slot in i.outputs}
        seen: set[int] = set()
        left = list(slots)
        while left:
            slot = left.pop()
            if slot in seen:
                continue
            seen.add(slot)
            if slot in until:
                continue
            left += read.get(slot, ())
            if slot in self.origins:
                left += self.origins[slot].slots
        return seen

    def of_data_alone(self, values: Iterable[Value]) -> bool:
        """Return whether no parameter takes part in some values."""
        learned = {leaf.slot for leaf in self.leaves if leaf.kind == "parameter"}
        learned |= {slot for slot, origin in self.origins.items() if origin.cut is not None}
        return not learned & self.reached(v.slot for v in values)

    # -- messages ----------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Path of the module that is running; empty for the model itself."""
        return self.module_path[-1] if self.module_path else ""

    def where(self, name: str | None = None) -> str:
        """Return the operation and the module that are running."""
        name = name or self.name
        return f"{name} in '{self.path}'" if self.path else name

    def refuse(
        self, reason: str, advice: str | None = None, *, operation: str | None = None
    ) -> NoReturn:
        """Raise UntraceableError for what is running: what the operation does would not be exact."""
        raise self.refusal(reason, advice, operation=operation)

    def no_rule(self, reason: str, advice: str | None = None) -> NoReturn:
        """Raise NoRule for what is running: the network is cut there, unless the trace is strict."""
        raise self._refusal(NoRule, reason, advice)

    def refusal(
        self, reason: str, advice: str | None = None, *, operation: str | None = None
    ) -> UntraceableError:
        """Return the error that :meth:`refuse` raises."""
        return self._refusal(UntraceableError, reason, advice, operation)

    def note_refusal(self, error: Exception) -> None:
        """Remember a refusal that leaves for the model's own code, which may catch it and go on."""
        if len(self._running) <= 1 and self.escaped is None:
            self.escaped = error

    def _refusal(
        self,
        kind: type[UntraceableError],
        reason: str,
        advice: str | None,
        operation: str | None = None,
    ) -> UntraceableError:
        _, inside, weight = self.path.rpartition(".parametrizations.")
        if inside:
            name = weight.partition(".")[0]
            reason = f"it computes '{name}' from other parameters, so its elements are no edges of their own"
            advice = None
        return kind(operation or self.name, self.path, reason, advice)

    def wrong_batch(self, operation: str | None = None) -> NoReturn:
        """Raise an error: the chosen batch dimension is wrong."""
        raise WrongBatchDimension(operation or self.name, self.path)

    def mixes(self, operation: str | None = None) -> NoReturn:
        """Raise an error: the operation moved elements of one example to the place of another's."""
        raise MixedExamples(operation or self.name, self.path)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return a fingerprint of a tensor's storage; rules never write into it, so only a replacement changes it."""
    try:
        return tensor._cdata, tensor._version
    except RuntimeError:  # made in inference mode
        return tensor._cdata, 0


def _kind_of_buffer(values: Tensor) -> str:
    """Return what a buffer holds: a single number, numbers, a mask or indices."""
    if values.numel() < 2:
        return "single"
    if values.is_floating_point():
        return "numbers"
    return "mask" if values.dtype == torch.bool else "indices"


NEW = "Write the result into a new tensor"
