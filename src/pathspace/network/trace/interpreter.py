"""Runs a model once on tensors without data and hands every torch function to the rule of its operation.

The model that runs is a copy whose parameters and floating-point buffers live on torch's ``meta``
device: nothing is computed, the user's model, gradients, buffers and random state stay untouched,
and a trace costs about as much as the Python of one forward pass. Every torch function the copy
calls arrives in ``Interpreter.__torch_function__``, which hands it to its rule (see ``rules``), or
cuts the network there (see ``rules.boundary``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pathspace.network.errors import NoRule, UntraceableError, WrongBatchDimension
from pathspace.network.program import Operation
from pathspace.network.registered import Registration, registration_of
from pathspace.network.rules import (
    MOVEMENTS,
    ON_INPUTS,
    RULED,
    boundary,
    normalization_by_hand,
)
from pathspace.network.rules.scale_free import COMPARISONS, SIGNS, noise
from pathspace.network.trace.choices import QUESTIONS
from pathspace.network.trace.constants import SharedConstants, Views
from pathspace.network.trace.drawn import (
    DRAWN,
    RANDOM,
    draws_in_training,
    in_evaluation_form,
    keeps_zeros,
)
from pathspace.network.trace.finite import (
    ASKS,
    BEGINS,
    Given,
    answer,
    note_guard,
    note_not_finite,
    refused,
)
from pathspace.network.trace.functions import (
    ARITHMETIC,
    CHECKS,
    CHOICES,
    ENDINGS,
    METADATA,
    NORMALIZATIONS,
    OF_FORM,
    READS,
    SHAPED_FACTORIES,
    by_position,
    changes,
    fits,
    of_missing_values,
    says_meta,
    short_name,
    tensors_in,
    without_values,
)
from pathspace.network.trace.reasons import (
    DRAWS_READ,
    INDICES,
    INPUTS_READ,
    OF_DRAWS,
    OF_INPUTS,
    REASONS,
    ROUNDED,
)
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.values import Value
from pathspace.network.trace.zeros import OfBuffers, anywhere, differing
from pathspace.network.written_out import written_out


class Interpreter(TorchFunctionMode):
    """Interprets torch functions on what a recorder knows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.paused = False
        self._shared = SharedConstants()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of the call of the model that begins."""

    def end(self, result: Any) -> None:
        """Note the outputs of the call of the model."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder = self.recorder
        with recorder.running(short_name(func), func):
            try:
                return self._interpreted(args, kwargs or {})
            except (UntraceableError, WrongBatchDimension) as error:
                recorder.note_refusal(error)
                raise
            except (RuntimeError, TypeError, ValueError, BufferError) as error:
                if self.paused or not of_missing_values(error):
                    raise  # the model's own
                recorder.note_refusal(recorder.refusal(*_BY_VALUES))
                return recorder.refuse(*_BY_VALUES)

    def _interpreted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function that is running."""
        recorder = self.recorder
        name = recorder.name
        recorder.calls[name] += not self.paused
        if name in CHECKS:
            return torch.ones((), dtype=torch.bool)
        registered = registration_of(recorder.func)
        if self.paused:
            return self._unrecorded(args, kwargs, registered)
        if name in METADATA:
            return self._metadata(args, kwargs)
        if kwargs:
            args, kwargs = self._arranged(args, kwargs)
        tensors = tensors_in(args, kwargs)
        traced: list[Value | None] = []
        values: list[Value] = []
        unknown: list[Tensor] = []
        for tensor in tensors:
            recorder.read[id(tensor)] = tensor
            value = recorder.lookup(tensor)
            traced.append(value)
            if value is None:
                unknown.append(tensor)
            else:
                values.append(value)
        if unknown:
            self._note_unknown(unknown, values)
        if not values:
            return self._constant(args, kwargs)
        return self._of_values(args, kwargs, tensors, traced, registered)

    def _metadata(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the size, the type or the like of a tensor."""
        recorder = self.recorder
        if recorder.name == "device.__get__" and recorder.lookup(args[0]) is not None:
            return torch.device("cpu")  # torch.autocast knows none like meta
        return recorder.func(*args, **kwargs)

    def _arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a function in the order of its rule; refuse ``out=``."""
        name = self.recorder.name
        if name in RULED or name in SHAPED_FACTORIES:
            args, kwargs = by_position(name, args, kwargs)
        if kwargs.get("out") is not None:
            self.recorder.refuse("it writes its result into another tensor (out=)")
        return args, kwargs

    def _unrecorded(self, args: Any, kwargs: Any, registered: Registration | None) -> Any:
        """Run a function of a module left outside, without values."""
        self._check_written_outside(args, kwargs)
        function = self.recorder.func if registered is None else registered.decomposition
        return without_values(self.recorder.name, function, args, kwargs)

    def _note_unknown(self, unknown: list[Tensor], values: list[Value]) -> None:
        """Refuse tensors that tracing cannot know; remember constants that meet weights or activations."""
        recorder = self.recorder
        if any(t.is_meta for t in unknown) and peek_interpreter_stack() is not None:
            recorder.refuse(*_TRANSFORMED)
        if any(t.requires_grad for t in unknown):
            recorder.refuse(*_UNREGISTERED)
        if any(v.kind in ("hidden", "parameter") for v in values):
            recorder.constants.update(*map(self._deciding, unknown))

    def _of_values(
        self,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        traced: list[Value | None],
        registered: Registration | None,
    ) -> Any:
        """Return the result of the function that is running, if some of its tensors have values."""
        recorder = self.recorder
        name = self.recorder.name
        self._check_destination(args)
        if name in SHAPED_FACTORIES:
            return _shaped_factory(name, args, kwargs)
        if name in OF_FORM and recorder.lookup(args[0]) is None:  # a constant keeps its values
            return self._constant(*pytree.tree_map_only(Tensor, self._form_of, (args, kwargs)))
        if any(t.layout is not torch.strided for t in tensors):
            recorder.refuse(*_explain("to_sparse"))
        if registered is not None:
            known = self._of_buffers_alone(args, kwargs, traced)
            if known is not None:
                return known
        in_parts = self._in_parts(args, kwargs, registered)
        if in_parts is not None:
            begun = len(recorder.operations)
            try:
                with self:
                    return in_parts(*args, **kwargs)
            except UntraceableError:  # some of it cannot be followed: cut at all of it
                del recorder.operations[begun:]
        return self._noted(args, kwargs, tensors, traced)

    def _of_buffers_alone(self, args: Any, kwargs: Any, traced: list[Value | None]) -> Any:
        """Return the result of a function of buffers and constants alone; None if there are others or no values."""
        kinds = {value.kind for value in traced if value is not None}
        return self._of_buffers(args, kwargs) if kinds == {"buffer"} else None

    def _noted(
        self, args: Any, kwargs: Any, tensors: list[Tensor], traced: list[Value | None]
    ) -> Any:
        """Return the result of a function by its rule, and remember it."""
        recorder = self.recorder
        name = self.recorder.name
        values = [v for v in traced if v is not None]
        given = [t.shape for t in tensors]  # now: a rule may rebind its arguments
        result = None
        note = None
        if any(v.statistic is not None for v in values):
            result = normalization_by_hand.by_its_statistic(recorder, args, kwargs)
        if result is None:
            if name in normalization_by_hand.STEPS:
                note = normalization_by_hand.note_of(recorder, args, kwargs, values)
            result = self._followed(args, kwargs, traced, values)
        self._note_operation(given, result, args)
        note_not_finite(recorder, Given(args, kwargs, tensors, traced), result)
        if recorder.if_finite or name in BEGINS:
            note_guard(recorder, args, traced, result)
        if note is not None:
            recorder.bind(result, replace(recorder.value(result), statistic=note))
        return result

    def _in_parts(
        self, args: Any, kwargs: Any, registered: Registration | None
    ) -> Callable[..., Any] | None:
        """Return the function as functions that have rules; None if it is not one of those."""
        recorder = self.recorder
        name = self.recorder.name
        if registered is None:
            return written_out(name, args, kwargs, recorder.rank, strict=recorder.strict)

        def decomposed(*args: Any, **kwargs: Any) -> Any:
            try:
                return registered.decomposition(*args, **kwargs)
            except TypeError as error:
                what = "its decomposition" if registered.like is None else f"'{registered.like}'"
                raise TypeError(
                    f"'{name}' was registered as {what}, which cannot be called with the arguments of '{name}': {error}"
                ) from error

        return decomposed

    def _followed(
        self, args: Any, kwargs: Any, traced: list[Value | None], values: list[Value]
    ) -> Any:
        """Return the result of a function of tensors that have values."""
        kinds = {v.kind for v in values}
        if kinds == {"buffer"}:
            return self._followed_buffers(args, kwargs, traced)
        if "tail" in kinds or "indices" in kinds:
            return self._after_the_end(args, kwargs, values)
        if "input" in kinds and kinds <= {"input", "buffer"}:
            return self._followed_inputs(args, kwargs, kinds, traced)
        return self._by_rule_or_cut(args, kwargs, kinds, traced)

    def _followed_inputs(
        self, args: Any, kwargs: Any, kinds: set[str], traced: list[Value | None]
    ) -> Any:
        """Return the result of a function of inputs."""
        recorder = self.recorder
        name = recorder.name
        if name == "mul":
            zeros = self._of_zeros(args)
            if zeros is not None:
                return zeros  # a gate times the state that a recurrence begins with
        if name not in ON_INPUTS and name not in READS:
            return recorder.preprocess(recorder.func, args, kwargs)
        return self._by_rule_or_cut(args, kwargs, kinds, traced)

    def _followed_buffers(self, args: Any, kwargs: Any, traced: list[Value | None]) -> Any:
        """Return the result of a function of buffers, with the values that they have now if these are known."""
        real = self._of_buffers(args, kwargs)
        name = self.recorder.name
        if real is not None and (
            name not in MOVEMENTS or (name == "to" and not real.is_floating_point())
        ):
            return real
        result = self._by_rule_or_cut(args, kwargs, {"buffer"}, traced)
        if real is not None:
            pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(real), strict=True)
            self.recorder.real.update((id(t), value) for t, value in pairs if isinstance(t, Tensor))
        return result

    def _by_rule_or_cut(
        self, args: Any, kwargs: Any, kinds: set[str], traced: list[Value | None]
    ) -> Any:
        """Return the result of a function by its rule, or cut the network at it."""
        recorder = self.recorder
        try:
            return self._by_rule(args, kwargs, kinds, traced)
        except NoRule as refusal:
            # a strict trace may put it off until a parameter comes after the operation
            ends = recorder.name in ENDINGS and "hidden" in kinds and "parameter" not in kinds
            if recorder.strict and not ends:
                raise
            return boundary.cut(recorder, args, kwargs, refusal)

    def _by_rule(self, args: Any, kwargs: Any, kinds: set[str], traced: list[Value | None]) -> Any:
        """Apply the rule of an operation. Raise NoRule if it has none, or none for these arguments."""
        recorder = self.recorder
        name = recorder.name
        if "hidden" in kinds or "parameter" in kinds:
            self._check_types(args, kwargs)
        if name in NORMALIZATIONS and traced[0] is not None and traced[0].kind == "parameter":
            recorder.no_rule(
                "it normalizes a parameter: what it makes of its elements are no edges of their own"
            )
        rule = recorder.rules.get(name)
        if rule is None:
            return self._without_rule(kinds, traced)
        try:
            return rule(recorder, *args, **kwargs)
        except TypeError:
            if fits(rule, recorder, *args, **kwargs):
                raise
            return recorder.no_rule("it is called in a way that tracing has no rule for")

    def _without_rule(self, kinds: set[str], traced: list[Value | None]) -> Any:
        """Answer a question about inputs or buffers. Raise NoRule for any other operation."""
        name = self.recorder.name
        if name in READS and kinds <= {"input", "buffer"}:
            return self._read([value for value in traced if value is not None])
        return self.recorder.no_rule(*_explain(name))

    def _check_types(self, args: Any, kwargs: Any) -> None:
        """Refuse to round activations or weights to whole numbers."""
        recorder = self.recorder
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.dtype) and not argument.is_floating_point:
                (recorder.refuse if recorder.strict else recorder.no_rule)(ROUNDED)

    def _read(self, values: list[Value]) -> Any:
        """Answer a question of the model about inputs or buffers, or refuse it."""
        recorder = self.recorder
        name = recorder.name
        asks = name in ASKS
        known = answer(recorder, values[0]) if asks else None
        if known is not None and not recorder.of_data_alone(values):
            return known
        reason = INPUTS_READ
        advice = OF_INPUTS
        if recorder.drawn & recorder.reached(v.slot for v in values):
            reason = DRAWS_READ
            advice = OF_DRAWS
        of_finite = refused(recorder, values[0]) if asks else None
        if of_finite is not None:
            reason, advice = of_finite
        if name in QUESTIONS and not recorder.strict and recorder.of_data_alone(values):
            return recorder.choices.answer(UntraceableError(name, recorder.path, reason, advice))
        return recorder.no_rule(reason, advice)

    def _note_operation(self, given: list[torch.Size], result: Any, args: Any) -> None:
        """Remember an operation whose result depends on a parameter, to know the pass again by."""
        recorder = self.recorder
        # an assignment to a slice returns nothing
        created = tensors_in([result], {}) or args[:1]
        values = [value for value in map(recorder.lookup, created) if value is not None]
        if not values:
            return
        first = values[0]
        passed = _PASSED_IF_STRICT if recorder.strict else _PASSED
        if first.kind in passed or recorder.name in SIGNS:
            return
        slots = [value.slot for value in values]
        slots += [recorder.inside[slot] for slot in slots if slot in recorder.inside]
        shapes = (*given, first.shape)
        recorder.operations.append(
            Operation(recorder.name, recorder.path, first.kind, tuple(slots), shapes)
        )

    def _after_the_end(self, args: Any, kwargs: Any, values: list[Value]) -> Any:
        """Compute a function of outputs, which needs no rule as long as no parameter takes part in it."""
        recorder = self.recorder
        name = self.recorder.name
        kinds = {v.kind for v in values}
        for value in values:
            if value.kind == "indices" and kinds & {"hidden", "parameter"}:
                raise UntraceableError(value.name, value.module, f"{INDICES} ('{name}' uses them)")
            if value.refusal is not None and "parameter" in kinds:
                raise value.refusal
        if name in READS:
            recorder.refuse(*_explain(name))
        refusals = [v.refusal for v in values if isinstance(v.refusal, UntraceableError)]
        refusal = refusals[0] if refusals else NoRule(name, recorder.path, INDICES)
        return boundary.cut(recorder, args, kwargs, refusal)

    def _constant(self, args: Any, kwargs: Any) -> Any:
        """Compute a function of constants alone with real values, so that its result is known."""
        recorder = self.recorder
        name = recorder.name
        if name in RANDOM:
            return self._random(args, kwargs)
        drawn = draws_in_training(name, args, kwargs)
        if drawn:
            args, kwargs = in_evaluation_form(name, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.device, _on_cpu, (args, kwargs))
        names = frozenset([DRAWN]) if drawn else frozenset()
        if name not in SHAPED_FACTORIES:  # which take the form of a tensor, and not its values
            names |= self._buffers_read(args, kwargs)
        if name in READS and DRAWN in names:
            recorder.refuse(DRAWS_READ, OF_DRAWS)
        # before the function writes into its arguments
        differ = self._where_it_may_differ(args, kwargs, drawn=drawn) if names else None
        result = recorder.func(*args, **kwargs)
        first = args[0] if args else None
        writes = first is not None and changes(name)
        made = tensors_in([first if writes else result], {})
        self._shared.note(Views(made, name, recorder.func, args, kwargs), writes=writes)
        if names:
            self._note_buffers(made, names, differ, first, writes=writes)
        return result

    def _random(self, args: Any, kwargs: Any) -> Any:
        """Return the result of a function that draws: its numbers are inputs, as a mask is."""
        recorder = self.recorder
        if recorder.name.endswith("_") and args[0] in self._shared:
            recorder.refuse("it writes random numbers through a view", "Draw a tensor of its own")
        return noise(recorder, args, kwargs)

    def _buffers_read(self, args: Any, kwargs: Any) -> frozenset[str]:
        """Return the names of the buffers that the arguments of a function of constants were made of."""
        names = frozenset[str]()
        for constant in tensors_in(args, kwargs):
            of = self.recorder.made_of_buffers(constant)
            if of:
                names |= of.names
        return names

    def _note_buffers(
        self,
        made: list[Tensor],
        names: frozenset[str],
        differ: list[Tensor] | None,
        first: Any,
        *,
        writes: bool,
    ) -> None:
        """Remember the buffers that constants were made of, and where the constants may differ from zero.

        Args:
            made: the results of a function of constants.
            names: the buffers.
            differ: where the results may differ from zero; None if anywhere.
            first: the first argument of the function.
            writes: whether the function wrote into it.
        """
        recorder = self.recorder
        if differ is None or [t.shape for t in differ] != [t.shape for t in made]:
            differ = [anywhere(t) for t in made]
        for tensor, differs in zip(made, differ, strict=True):
            base = tensor if tensor._base is None else tensor._base
            if tensor is first and tensor in self._shared:
                _, before = recorder.written.get(id(base), (base, names))
                recorder.written[id(base)] = base, names | before
            # what a call writes itself is as it was whenever the model is called
            own = {recorder.own.get(id(tensor), "")} if writes else set()
            recorder.of_buffers[id(tensor)] = OfBuffers(tensor, differs, names - own)

    def _where_it_may_differ(self, args: Any, kwargs: Any, *, drawn: bool) -> list[Tensor] | None:
        """Return where the results of a function of constants may come to differ from zero; None: anywhere."""
        recorder = self.recorder
        name = self.recorder.name
        if drawn:
            constant = tensors_in(args, kwargs)[0]
            return [recorder.differs(constant)] if keeps_zeros(name) else None
        moves = name in MOVEMENTS and not any(
            map(recorder.made_of_buffers, tensors_in(args[1:], kwargs))
        )
        return differing(name, recorder.func, args, kwargs, recorder.differs, moves=moves)

    def _deciding(self, constant: Tensor) -> frozenset[str]:
        """Return the names of the buffers that a constant was made of, if scales depend on its values."""
        name = self.recorder.name
        chooses = not constant.is_floating_point() and name not in (
            *ARITHMETIC,
            *CHOICES,
            *COMPARISONS,
        )
        if chooses and self.recorder.buffers_in(constant, "drawn"):
            self.recorder.refuse(DRAWS_READ, OF_DRAWS)
        # numbers matter where a mask makes them zero
        if constant.is_floating_point() or name in ARITHMETIC:
            return self.recorder.buffers_in(constant, "mask")
        if name in CHOICES:
            return self.recorder.buffers_in(constant, "mask", "indices")
        return self.recorder.buffers_in(constant, "mask", "indices", "numbers")

    def _of_zeros(self, args: tuple[Any, ...]) -> Tensor | None:
        """Return zeros for a product of an input with a constant of zeros; None otherwise."""
        constant = next(
            (t for t in args if isinstance(t, Tensor) and self.recorder.lookup(t) is None), None
        )
        if constant is None or not constant.dim() or not bool(self.recorder.zeros(constant).all()):
            return None
        shape = torch.broadcast_shapes(*(t.shape for t in args))
        return torch.zeros(shape, dtype=torch.promote_types(*(t.dtype for t in args)))

    def _form_of(self, t: Tensor) -> Tensor:
        """Return a constant as it is, and a tensor of the shape and type of any other value."""
        return (
            t if self.recorder.lookup(t) is None else torch.zeros((), dtype=t.dtype).expand(t.shape)
        )

    def _of_buffers(self, args: Any, kwargs: Any) -> Any:
        """Compute a function of buffers and constants with their current values; return None if those are unknown."""
        real = self.recorder.real
        if changes(self.recorder.name):
            if args:
                real.pop(id(args[0]), None)
            return None
        if any(t.is_meta and id(t) not in real for t in tensors_in(args, kwargs)):
            return None
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: real.get(id(t), t), (args, kwargs))
        return self._constant(args, kwargs)

    def _check_destination(self, args: tuple[Any, ...]) -> None:
        """Refuse writing into a parameter, or into a constant in ways that would leave the traced value unknown."""
        recorder = self.recorder
        if not changes(recorder.name) or not isinstance(args[0], Tensor):
            return
        if recorder.lookup(args[0]) is not None:
            recorder.check_write(args[0])
            return
        known = recorder.name in recorder.rules
        if known and args[0] in self._shared:
            known = self._shared.give_values(recorder, args[0])
        if not known:
            recorder.refuse(
                "it writes into a constant in a way tracing has no rule for",
                "Build the tensor with cat or stack, or assign whole slices of it: x[:, 1:] = y",
            )

    def _check_written_outside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse that a module left outside changes an activation that entered it; a ReLU in place does no harm."""
        name = self.recorder.name
        harmless = name.rstrip("_") in ("relu", "leaky_relu")
        if harmless or not (changes(name) or kwargs.get("inplace")):
            return
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, Tensor):
            return
        value = self.recorder.lookup(target._base if target._is_view() else target)
        if value is not None and value.kind == "hidden":
            self.recorder.refuse(
                "the module is left outside, and changes in place what entered it",
                "Leave a larger module outside, one that makes the tensor itself",
            )

    def run_outside(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module left to the plain rule: its inputs are outputs of the network, its outputs are inputs."""
        recorder = self.recorder
        values = recorder.values_in(args, kwargs)
        batch = next((v.batch for v in values if v.batch is not None), None)
        entering = [v for v in values if v.kind == "hidden"]
        recorder.roots += [v.slot for v in values]
        recorder.extra_outputs += entering
        slots = tuple(v.slot for v in entering)
        recorder.operations.append(Operation("outside", recorder.path, "outside", slots))
        self.paused = True
        try:
            return recorder.as_inputs(forward, args, kwargs, batch, outside=recorder.path)
        except (RuntimeError, TypeError, ValueError) as error:
            # as torch says where values are missing, or those of packed sequences
            if not says_meta(error) and "batch_sizes" not in str(error):
                raise
            return recorder.refuse(
                f"it is left outside, but what it does depends on values, which a trace does not have ({error})",
                "Leave a larger module outside, or trace the parts around it",
                operation="outside",
            )
        finally:
            self.paused = False


def _on_cpu(device: torch.device) -> torch.device:
    """Return the CPU for the meta device: the model may have asked an empty tensor for its device."""
    return torch.device("cpu") if device == torch.device("meta") else device


def _shaped_factory(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``x.new_zeros(...)``, ``torch.zeros_like(x)`` and the like: a real constant of the right type."""
    like = args[0]
    rest = args[1:]
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "memory_format")}
    kwargs.setdefault("dtype", like.dtype)
    if name.endswith("_like"):
        return getattr(torch, name.removesuffix("_like"))(like.shape, *rest, **kwargs)
    return getattr(torch.empty(0), name)(*rest, **kwargs)


_PASSED = ("input", "buffer", "tail")
"""Kinds of values that depend on no parameter, or come after the last one."""
_PASSED_IF_STRICT = ("input", "buffer", "indices")

_TRANSFORMED = (
    "it runs inside torch.func (vmap, grad, jvp), whose tensors tracing does not see",
    "Write it out for the whole batch, or leave the module that calls torch.func outside",
)
_BY_VALUES = (
    "a size, a bound or an index in it is computed from data, and a trace has no data",
    "Take it from sizes (x.shape) or from numbers of the model, or leave the module outside",
)
_UNREGISTERED = (
    "it uses a parameter that model.parameters() does not list, or what was made of one before or lies in its memory",
    "Keep layers as attributes or in nn.ModuleList and nn.ModuleDict, parameters in nn.ParameterList, use them through "
    "self, and compute what is made of them in forward, or keep a clone()",
)


def _explain(name: str) -> tuple[str, str | None]:
    if name in READS and name not in REASONS:
        return (
            "the forward pass depends on the data it sees, so it has no single graph",
            "Trace it in evaluation form (model.eval()) if it does so in training only, or a part of the model whose "
            "steps do not depend on the data, or leave that module outside",
        )
    return REASONS.get(name, "tracing has no rule for this operation"), None
