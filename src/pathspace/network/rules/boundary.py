"""Cuts of a network: operations without a rule, between outputs and inputs of the network.

Values that enter a cut count as outputs and keep the scale 1, so in every member of a rescaling
class the operation does what it did before. Values that leave it count as inputs. That is right for
any function of tensors, whatever it does to scales (softmax, GELU, a product of activations, a
division by one), and loses no more than symmetry. Its own parameters are left to the plain rule.

A cut does not make a wrong trace right. A function that writes where tracing does not see it, hands
values to Python, or returns shapes that depend on them is refused as before.

A strict trace makes the result of such an operation a *tail*, a function of outputs. It may be
returned, and used by functions without parameters. A second pass does the same with a result whose
batch dimension is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.network.errors import MixedExamples, UntraceableError
from pathspace.network.program import Cut, Operation
from pathspace.network.trace.functions import (
    READS,
    UNSEEN,
    on_values,
    on_zeros,
    says_meta,
    with_sizes,
)
from pathspace.network.trace.recorder import NEW, Recorder
from pathspace.network.trace.scales import FIXED
from pathspace.network.trace.values import Origin, Value
from pathspace.squared.tape import Leaf


def cut(
    recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: UntraceableError
) -> Any:
    """Cut the network at a function of tensors that has no rule, and return the function's result.

    Raises:
        UntraceableError: the function does, or may do, more than to return tensors; most often
            ``refusal``.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if recorder.name in READS | UNSEEN or any(map(callable, leaves)):
        raise refusal
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    traced = [recorder.lookup(t) for t in tensors]
    result, changed = _run(recorder, args, kwargs, refusal)
    if changed:
        _check_write(recorder, changed, tensors[0], traced[0], result)
    elif any(result is t for t in tensors):  # h.real of a real tensor: nothing was done
        return result
    origin = _origin(recorder, traced, refusal)

    def bind(tensor: Tensor) -> Tensor:
        # nothing was done: a tensor of its own
        if not changed and any(tensor is t for t in tensors):
            tensor = torch.empty_like(tensor)
        value = _value(recorder, traced, tensor.shape, refusal, tensor.is_floating_point())
        if not changed:
            value = recorder.in_memory_of(value, tensor, zip(tensors, traced, strict=True))
        recorder.origins[value.slot] = origin
        return recorder.bind(tensor, value)

    return pytree.tree_map_only(Tensor, bind, result)


def cut_inside(recorder: Recorder, value: Value, dtype: torch.dtype, arguments: int = 1) -> Tensor:
    """Cut at a function without a rule inside an operation, and return what the operation reads of that function."""
    result = torch.empty(value.shape, dtype=dtype, device="meta")
    recorder.add_leaf(result, "input", batch=value.batch, examples=value.examples)
    here = _here(recorder, (True,) * arguments)
    recorder.origins[recorder.value(result).slot] = Origin((value.slot,), (value,), here)
    return result


def _here(recorder: Recorder, entering: tuple[bool, ...]) -> Cut:
    """Return a cut at the operation that is running."""
    return Cut(recorder.name, recorder.path, recorder.calls[recorder.name] - 1, entering)


def _run(
    recorder: Recorder, args: Any, kwargs: Any, refusal: UntraceableError
) -> tuple[Any, list[Tensor]]:
    """Run a function on tensors without values.

    Args:
        recorder: the state of the trace at the function.
        args: arguments of the function.
        kwargs: those by name.
        refusal: raised if the function returns no tensor, or one with values.

    Returns:
        The result, without values, and the arguments that the function wrote into.
    """
    args, kwargs = with_sizes(args, kwargs)
    # the meta device draws no random numbers
    kwargs = {key: value for key, value in kwargs.items() if not isinstance(value, torch.Generator)}
    given = _tensors_of((args, kwargs))
    stand_ins = {id(t): _without_values(recorder, t) for t in given}
    versions = {key: t._version for key, t in stand_ins.items()}
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: stand_ins[id(t)], (args, kwargs))
    try:
        result = recorder.func(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ZeroDivisionError) as error:
        # torch cannot copy from the meta device
        if recorder.name in _TO_A_DEVICE:
            return torch.empty_like(args[0]), []
        result = _result_despite(error, recorder, args, kwargs, refusal)
    created = _tensors_of(result)
    if not created or not all(t.is_meta for t in created):
        raise refusal
    written = {id(t): t for t in given if stand_ins[id(t)]._version != versions[id(t)]}
    return result, list(written.values())


_TO_A_DEVICE = ("to", "cpu", "cuda")


def _without_values(recorder: Recorder, tensor: Tensor) -> Tensor:
    """Return a tensor without values.

    The batch sizes of packed sequences keep theirs, which say what shape comes out.
    """
    if tensor.is_meta or id(tensor) in recorder.packed:
        return tensor
    return tensor.to("meta")


def _tensors_of(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _result_despite(
    error: Exception, recorder: Recorder, args: Any, kwargs: Any, refusal: UntraceableError
) -> Any:
    """Return the result, without values, of a function that failed on the meta device.

    Raises:
        UntraceableError: the function needs values on which the shape of its result may depend.
        Exception: ``error``, if the function fails with values as well.
    """
    needs_values = says_meta(error) or "fake impl" in str(error)
    run = on_values if needs_values else on_zeros
    result = run(recorder.func, args, kwargs)
    if result is not None:
        return result
    if needs_values:
        raise refusal from None
    raise error from None


def _check_write(
    recorder: Recorder, changed: list[Tensor], target: Tensor, value: Value | None, result: Any
) -> None:
    """Refuse to cut at a function that writes, but for one that writes its result into an activation of its own."""
    if value is not None and value.kind == "parameter":
        recorder.check_write(target)
    if len(changed) > 1 or changed[0] is not target or result is not target or value is None:
        recorder.refuse(
            "it writes into a tensor that it is given, and tracing has no rule for how", NEW
        )
    elif value.kind == "buffer":
        recorder.refuse(
            "it changes a buffer of the model in a way that tracing has no rule for", NEW
        )
    elif value.memory.members > 1:
        recorder.refuse(
            "it writes what is no activation of the network any more into a tensor that shares memory with another one",
            NEW,
        )


def _origin(
    recorder: Recorder, traced: Sequence[Value | None], refusal: UntraceableError
) -> Origin:
    """Return the origin of a cut's result; note the cut as an operation, by which later passes are compared."""
    entering: list[bool] = []
    hidden: list[Value] = []
    slots: list[int] = []
    parameters: set[str] = set()
    for value in traced:
        entering.append(value is not None and value.kind == "hidden")
        if value is None:
            continue
        if value.kind == "parameter":
            parameters.add(value.name)
            continue
        slots.append(value.slot)
        if value.kind == "hidden":
            hidden.append(value)
    recorder.left |= parameters
    if not hidden and not parameters:
        return Origin(tuple(slots))
    operation = None
    if not recorder.strict:
        waiting = iter(hidden)
        places = tuple([next(waiting).slot if enters else -1 for enters in entering])
        operation = Operation(recorder.name, recorder.path, "cut", places)
        recorder.operations.append(operation)
    return Origin(
        tuple(slots),
        tuple(hidden),
        _here(recorder, tuple(entering)),
        operation,
        refusal,
        parameters=tuple(sorted(parameters)),
    )


def _value(
    recorder: Recorder,
    traced: Sequence[Value | None],
    shape: torch.Size,
    refusal: UntraceableError,
    real: bool,
) -> Value:
    """Make a result an input of the network; a tail if the trace is strict or the batch dimension is unknown."""
    slot = recorder.new_slot()
    labels = torch.tensor(FIXED).expand(shape)
    batch, examples, certain = _examples(recorder, traced, shape)
    lost = any(v is not None and v.kind == "tail" for v in traced)
    if certain and not lost and not recorder.strict:
        recorder.leaves.append(Leaf(slot, "input", "", tuple(shape)))
        return Value(slot, labels, "input", "", batch, examples=examples)
    of_units = any(v is not None and v.kind in ("hidden", "tail") for v in traced)
    kind = "tail" if real and of_units else "indices"
    why: Exception = refusal if recorder.strict else MixedExamples(recorder.name, recorder.path)
    return Value(
        slot,
        labels,
        kind,
        refusal.operation,
        batch,
        module=refusal.module,
        refusal=why,
        examples=examples,
    )


def _examples(
    recorder: Recorder, traced: Sequence[Value | None], shape: torch.Size
) -> tuple[int | None, Tensor | None, bool]:
    """Return the batch dimension of a result, the pattern of the examples in it, and whether both are certain.

    A function that is not known may do anything with the examples: what it does is seen by the
    shapes that it returns for one and for two of them.
    """
    examples = recorder.examples
    examples.moved.append(("cut", recorder.path, shape))
    first = _first_with_examples(traced)
    if first is None or first.batch is None:
        return None, None, True
    batch = first.batch
    same = shape[: batch + 1] == first.shape[: batch + 1]
    if examples.count == 1:
        examples.doubtful |= not same
        return (batch if same else None), None, True
    single = examples.single()
    if single is None or len(single) != len(shape):
        return None, None, False
    grown = [d for d in range(len(shape)) if shape[d] != single[d]]
    if same and grown == [batch]:
        return batch, first.examples, True
    return _grown(grown, single)


def _first_with_examples(traced: Sequence[Value | None]) -> Value | None:
    """Return the first argument with a dimension for the examples."""
    for value in traced:
        if value is not None and value.batch is not None:
            return value
    return None


def _grown(grown: Sequence[int], single: torch.Size) -> tuple[int | None, Tensor | None, bool]:
    """Return the same from the dimensions that grow with the batch, and the shape for one example."""
    if not grown:  # one value for all examples
        return None, None, True
    if len(grown) == 1 and single[grown[0]] == 1:
        return grown[0], None, True
    return None, None, False
