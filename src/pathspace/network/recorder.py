"""Runs a model once on tensors without data and records its squared network and its scales.

The model that runs is a copy whose parameters and floating-point buffers live on torch's ``meta`` device: nothing
is computed, the user's model, gradients, buffers and random state stay untouched, and a trace costs about as much
as the Python of one forward pass. Every torch function the copy calls arrives in ``Recorder.__torch_function__``,
which hands it to the rule of that operation (see ``rules``) or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError, WrongBatchDimension
from pathspace.network.parameter_uses import ParameterUses
from pathspace.network.program import Operation
from pathspace.network.reasons import BOUNDED, REASONS, SIGNED
from pathspace.network.scales import FIXED, WILD, Scales
from pathspace.network.tape import Instruction, Leaf, Pullback
from pathspace.network.values import Value


class Recorder(TorchFunctionMode):
    """Interprets torch functions on values; one object per trace."""

    def __init__(self, rules: dict[str, Callable[..., Any]], movements: Collection[str]) -> None:
        super().__init__()
        self.rules = rules
        self.movements = movements  # operations that mean the same for inputs as for activations
        self._viewed: dict[int, Any] = {}  # constants that have views
        self.scales = Scales()
        self.leaves: list[Leaf] = []
        self.instructions: list[Instruction] = []
        self.uses = ParameterUses(self.scales)
        self.numeric: dict[str, Tensor] = {}  # real data of the parameters, for checks of sign
        self.extra_outputs: list[Value] = []  # what flows into parts left outside
        self.unit_values: list[Value] = []  # values of units, right after their ReLU
        self.linear_values: list[Value] = []  # values of linear maps, for classes without a ReLU
        self.activated: list[Value] = []  # what enters an activation
        self.operations: list[Operation] = []  # the operations that depend on a parameter, in their order
        self.paused = False
        self.module_path: list[str] = []
        self._values: dict[int, tuple[Tensor, Value]] = {}  # keeps the tensors alive, so that ids stay unique
        self._slots = 0

    # -- values -----------------------------------------------------------------------------------------------

    def new_slot(self) -> int:
        """A fresh slot of the squared network."""
        self._slots += 1
        return self._slots - 1

    def bind(self, tensor: Tensor, value: Value) -> Tensor:
        """From now on ``tensor`` has this value."""
        self._values[id(tensor)] = (tensor, value)
        return tensor

    def known(self, tensor: Any) -> Value | None:
        """The value of a tensor, or None for a constant and for what is no tensor."""
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None else None

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor; a constant becomes a leaf of the squared network."""
        known = self.known(tensor)
        if known is not None:
            return known
        if tensor.is_meta:
            self.refuse("an untraced tensor", "it was made by code that tracing does not see")
        data = tensor.detach().clone()
        slot = self.new_slot()
        self.leaves.append(Leaf(slot, "constant", shape=tuple(data.shape), data=data))
        labels = torch.where(
            data == 0, WILD, FIXED
        )  # a constant zero fits every scale: the start of a recurrence
        return Value(slot, labels, kind="input")

    def add_leaf(self, tensor: Tensor, kind: str, name: str = "", batch: int | None = None) -> Tensor:
        """Bind a tensor to a new leaf: an input, a parameter or a buffer."""
        slot = self.new_slot()
        self.leaves.append(Leaf(slot, kind, name, tuple(tensor.shape)))
        if kind == "parameter":
            index = torch.arange(tensor.numel()).reshape(tensor.shape)
            self.uses.shapes[name] = tensor.shape
            return self.bind(tensor, Value(slot, index, "parameter", name))
        fixed = torch.zeros((), dtype=torch.long).expand(tensor.shape)
        return self.bind(tensor, Value(slot, fixed, kind, name, batch))

    def emit(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Value],
        labels: Tensor,
        *,
        name: str,
        dtype: torch.dtype,
        batch: int | None = None,
        kind: str = "hidden",
        parameter: str = "",
        pullback: Pullback | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Record ``function`` of the squared inputs and return the (empty) tensor it makes.

        With ``forward`` goes a pullback that reads no more of the result than its shape.
        """
        slot = self.new_slot()
        of_parameter = kind == "parameter"
        slots = tuple(v.slot for v in inputs)
        instruction = Instruction(
            function,
            slots,
            (slot,),
            self.where(name),
            of_parameter,
            pullback=pullback,
            forward=forward,
            shape=tuple(labels.shape) if forward is not None else None,
        )
        self.instructions.append(instruction)
        tensor = torch.empty(labels.shape, dtype=dtype, device="meta")
        return self.bind(tensor, Value(slot, labels, kind, parameter, batch))

    def emit_many(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Value],
        results: Sequence[Value],
        *,
        name: str,
        dtype: torch.dtype,
        recurrent: bool = False,
        pullback: Pullback | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, ...]:
        """Record a function with several results; ``results`` have their slots already."""
        made, used = tuple(v.slot for v in results), tuple(v.slot for v in inputs)
        of_parameter = results[0].kind == "parameter"
        self.instructions.append(
            Instruction(function, used, made, self.where(name), of_parameter, recurrent, pullback, forward)
        )
        return tuple(self.bind(torch.empty(v.shape, dtype=dtype, device="meta"), v) for v in results)

    def as_units(self, tensor: Tensor) -> Value:
        """The value of a tensor; a parameter in the place of activations is made of edges from the bias node."""
        value = self.value(tensor)
        if value.kind != "parameter":
            return value
        made = self.scales.fresh(value.labels.numel(), self.where("parameter")).reshape(value.shape)
        self.uses.add(value, made, torch.full_like(made, FIXED), bias=True)
        return Value(value.slot, self.scales.resolve(made))

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
        return self.rules[name](self, name, func, *args, **kwargs)

    # -- messages ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """Path of the module that is running; empty for the model itself."""
        return self.module_path[-1] if self.module_path else ""

    def where(self, name: str) -> str:
        """The operation and the module that is running."""
        return f"{name} in '{self.path}'" if self.path else name

    def refuse(self, operation: str, reason: str, advice: str | None = None) -> Any:
        """Raise UntraceableError for the module that is running."""
        raise UntraceableError(operation, self.path, reason, advice)

    def refuse_negative(self, operation: str, value: Value) -> None:
        """Fixed and learned scales must not be negative."""
        data = self.numeric[value.name]
        if bool((data.flatten()[value.labels] if value.kind == "parameter" else data).lt(0).any()):
            self.refuse(operation, f"the scale '{value.name}' has negative elements: {SIGNED}")

    def wrong_batch(self, name: str) -> Any:
        """The batch dimension turned out to be another one."""
        raise WrongBatchDimension(self.where(name))

    # -- the mode ---------------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = short_name(func)
        if name in METADATA:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            self.refuse(name, "it writes its result into another tensor (out=)")
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(id(t) in self._values for t in tensors):
            return self._constant(name, func, args, kwargs)
        self._check_destination(name, args)
        values = [self._values[id(t)][1] for t in tensors if id(t) in self._values]
        for value in values:
            if value.kind == "tail" and name not in _TAIL_MOVES:
                raise UntraceableError(value.name, value.module, f"{BOUNDED} ('{name}' uses its result)")
        if name in _SHAPED_FACTORIES:
            return self._shaped_factory(name, args, kwargs)
        rule = self.rules.get(name)
        kinds = {v.kind for v in values}
        if (
            kinds <= {"input", "buffer"}
            and "input" in kinds
            and name not in self.movements
            and name not in _READS
        ):
            return self.preprocess(func, args, kwargs, values)
        if rule is not None:
            known = self._values
            batches = tuple([known[id(t)][1].batch if id(t) in known else None for t in tensors])
            result = rule(self, name, func, *args, **kwargs)
            self._note_operation(name, batches, result, args)
            return result
        reason, advice = _explain(name)
        return self.refuse(name, reason, advice)

    def _note_operation(
        self, name: str, batches: tuple[int | None, ...], result: Any, args: tuple[Any, ...]
    ) -> None:
        if isinstance(result, Tensor):
            made = [result]
        else:  # an assignment to a slice returns nothing
            made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)] or args[:1]
        values = [self._values[id(t)][1] for t in made if id(t) in self._values]
        if values and values[0].kind not in ("input", "buffer"):
            slots, first = tuple([v.slot for v in values]), values[0]
            self.operations.append(Operation(name, self.path, first.kind, batches, slots, first.batch))

    def _constant(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function of constants only: computed for real, so that its values are known."""
        if name in _RANDOM:
            self.refuse(name, "it draws random numbers, so the network differs from one pass to the next")
        # the model may have asked an empty tensor for its device
        args, kwargs = pytree.tree_map_only(torch.device, _real_device, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor._is_view():
                self._viewed[id(tensor._base)] = tensor._base
        return result

    def _check_destination(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuse writing into a constant in ways that would leave the traced value unknown."""
        writes = (
            name == "__setitem__" or (name.endswith("_") and not name.startswith("__")) or name in _AUGMENTED
        )
        if not writes or not isinstance(args[0], Tensor) or self.known(args[0]) is not None:
            return
        if args[0]._is_view() or id(args[0]) in self._viewed or name not in self.rules:
            self.refuse(
                name,
                "it writes into a constant through a view, or in a way tracing has no rule for",
                "Build the tensor with cat or stack, or assign whole slices of it: x[:, 1:] = y",
            )

    def _shaped_factory(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``x.new_zeros(...)``, ``torch.zeros_like(x)``: a real constant of the right type."""
        like, rest = args[0], args[1:]
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "memory_format")}
        kwargs.setdefault("dtype", like.dtype)
        if name.endswith("_like"):
            return getattr(torch, name.removesuffix("_like"))(like.shape, *rest, **kwargs)
        return getattr(torch.empty(0), name)(*rest, **kwargs)

    def preprocess(self, func: Callable[..., Any], args: Any, kwargs: Any, values: list[Value]) -> Any:
        """A fixed function of the inputs alone (centring, one-hot, ...): its result is an input of the network."""
        batch = next((v.batch for v in values if v.batch is not None), None)
        return self._as_inputs(func, args, kwargs, batch)

    def _as_inputs(self, func: Callable[..., Any], args: Any, kwargs: Any, batch: int | None) -> Any:
        """Run a function without recording it; its results are inputs of the network."""
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs)
        )
        paused, self.paused = self.paused, True
        try:
            result = func(*args, **kwargs)
        finally:
            self.paused = paused

        def bind(tensor: Tensor) -> Tensor:
            keeps = batch is not None and tensor.dim() > batch and tensor.shape[batch] == 1
            return self.add_leaf(tensor, "input", batch=batch if keeps else None)

        return pytree.tree_map_only(Tensor, bind, result)

    def run_outside(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module left to the plain rule: what enters it is an output of the network, what leaves it an input."""
        batch, entering = None, []
        for tensor in pytree.tree_leaves((args, kwargs)):
            value = self.known(tensor)
            if value is not None:
                batch = value.batch if batch is None else batch
                if value.kind == "hidden":
                    entering.append(value)
        self.extra_outputs += entering
        slots, batches = tuple(v.slot for v in entering), tuple(v.batch for v in entering)
        self.operations.append(Operation("outside", self.path, "outside", batches, slots, batch))
        return self._as_inputs(forward, args, kwargs, batch)


def _real_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


_AUGMENTED = frozenset(["__iadd__", "__imul__", "__isub__", "__itruediv__"])
_NAMES: dict[Any, str] = {}


def short_name(func: Callable[..., Any]) -> str:
    """The operation's own name: ``relu`` for torch.relu, F.relu and Tensor.relu alike."""
    name = _NAMES.get(func)
    if name is None:
        full = resolve_name(func) or getattr(func, "__name__", str(func))
        parts = full.split(".")
        name = ".".join(parts[-2:]) if parts[-1] == "__get__" else parts[-1]
        _NAMES[func] = name
    return name


METADATA = frozenset(
    [
        "size",
        "dim",
        "ndim.__get__",
        "shape.__get__",
        "dtype.__get__",
        "device.__get__",
        "layout.__get__",
        "numel",
        "nelement",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_cuda.__get__",
        "is_nested.__get__",
        "is_sparse.__get__",
        "is_meta.__get__",
        "requires_grad.__get__",
        "is_leaf.__get__",
        "grad_fn.__get__",
        "get_device",
        "is_cpu.__get__",
        "_set_grad_enabled",
        "__len__",
        "is_quantized.__get__",
        "is_mkldnn.__get__",
        "names.__get__",
        "element_size",
        "is_tensor",
        "is_storage",
        "_parse_to",
        "_has_compatible_shallow_copy_type",
        "is_grad_enabled",
        "flatten_parameters",
        "storage_offset",
        "type_as_dtype",
        "__hash__",
        "requires_grad_",
    ]
)
_TAIL_MOVES = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "float",
        "to",
        "contiguous",
    ]
)
_SHAPED_FACTORIES = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"]
)
_RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
    ]
)
_READS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__contains__",
        "equal",
        "allclose",
        "is_nonzero",
        "__array__",
        "cpu_item",
        "nonzero",
        "masked_select",
        "unique",
    ]
)


def _explain(name: str) -> tuple[str, str | None]:
    if name in _READS:
        return (
            "the forward pass depends on the data it sees, so it has no single graph",
            "Trace a part of the model whose steps do not depend on the data, or leave that module outside",
        )
    return REASONS.get(name, "tracing has no rule for this operation"), None
