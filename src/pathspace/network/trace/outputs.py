"""The outputs of a network: values that the model returns, and values that enter the operations at which it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.network.errors import UntraceableError
from pathspace.network.program import Cut
from pathspace.network.returned import tensors_in
from pathspace.network.trace.recorder import Recorder
from pathspace.network.trace.scales import FIXED, WILD, without_repeats
from pathspace.network.trace.values import Origin, Value

Outputs = tuple[list[Value], tuple[int, ...], tuple[int | None, ...], tuple[Cut, ...]]
Kept = dict[tuple[nn.Module, str], list[Tensor]]


def kept_by(model: nn.Module) -> Kept:
    """Return the tensors in each attribute and buffer of a model's modules."""
    own = vars(nn.Module())  # torch's, of parameters, modules and hooks
    kept: Kept = {}
    for module in model.modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if name not in own:
                kept[module, name] = tensors_in(value)
    return kept


def outputs_of(
    recorder: Recorder, result: Any, returned: Any, shadow: nn.Module, before: Kept
) -> Outputs:
    """Fix the scales of the network's outputs at 1, and return the outputs.

    Args:
        recorder: what was recorded.
        result: what was picked of what the model returned.
        returned: all of that.
        shadow: the model that ran, which may have kept tensors for its next call.
        before: what it had kept before it ran.

    Returns:
        The outputs; of the picked tensors that are no states of recurrent layers, places and slots;
        and the cuts.
    """
    values = _values_of(recorder, result)
    of_units = [v for v in values if v is not None and v.kind in ("hidden", "tail")]
    counted = [o for o in _reached(recorder, _slots(values)) if o.cut is not None]
    leaves_otherwise = bool(recorder.extra_outputs or counted)
    chosen = _without_states(of_units, or_all=not leaves_otherwise)
    outputs = [v for v in chosen if v.kind == "hidden"]
    outputs += [*recorder.extra_outputs, *_entering(counted)]
    # with cuts, no parameter may be left between them
    required = recorder.strict or not counted
    if required and not outputs:
        raise _without_outputs(counted, _in_words(result, values))
    _leave_returned(recorder, returned)
    places, slots = _places(values, of_units, chosen)
    now = kept_by(shadow)
    held = _held(recorder, returned, now)
    cuts = _cuts(recorder, counted, held)
    _fix(recorder, [*outputs, *_carried(recorder, before, now), *_entering(held)])
    _note_what_enters(recorder, counted)
    return _once(outputs), places, slots, cuts


def _once(values: Iterable[Value]) -> list[Value]:
    """Return one value for each slot."""
    by_slot = {value.slot: value for value in values}
    return list(by_slot.values())


def _without_states(values: list[Value], *, or_all: bool) -> list[Value]:
    """Return the values that are no states of recurrent layers; all of them if these are none and ``or_all``."""
    chosen = [v for v in values if not v.state]
    return values if or_all and not chosen else chosen


def _entering(origins: Iterable[Origin]) -> list[Value]:
    """Return the values that enter some cuts."""
    return [value for origin in origins for value in origin.entering]


def _leave_returned(recorder: Recorder, returned: Any) -> None:
    """Leave parameters that the model returns to the plain rule, so that the result does not change."""
    for value in map(recorder.lookup, tensors_in(returned)):
        if value is not None and value.kind == "parameter":
            recorder.left.add(value.name)


def _values_of(recorder: Recorder, result: Any) -> list[Value | None]:
    """Return the values of the tensors of a result; None for constants.

    Raises:
        UntraceableError: tracing did not see how a tensor was made.
    """
    values = []
    for tensor in tensors_in(result):
        value = recorder.lookup(tensor)
        if value is None and tensor.is_meta:
            raise UntraceableError(
                "output", "", "a returned tensor was made by code that tracing cannot see"
            )
        values.append(value)
    return values


def _without_outputs(counted: Iterable[Origin], found: str) -> UntraceableError:
    """Return the error for a model whose result depends on no parameter: the first refusal, if there is one."""
    for origin in counted:
        if origin.refusal is not None:
            return origin.refusal
    why = f"no tensor that the model returns depends on its parameters ({found})"
    what = "Return tensors, tuples, lists or dicts of them, or pick the tensor with output=lambda r: ..."
    return UntraceableError("output", "", why, what)


def _places(
    values: Sequence[Value | None], of_units: Sequence[Value], chosen: Sequence[Value]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the places of the outputs among the picked tensors, and their slots; None for one without units."""
    left = {id(v) for v in of_units} - {id(v) for v in chosen}
    left |= {id(v) for v in values if v is not None and v.kind == "indices"}
    hidden = {v.slot for v in chosen if v.kind == "hidden"}
    places = []
    slots = []
    for place, value in enumerate(values):
        if id(value) in left:
            continue
        places.append(place)
        slots.append(value.slot if value is not None and value.slot in hidden else None)
    return tuple(places), tuple(slots)


def _fix(recorder: Recorder, values: Iterable[Value]) -> None:
    """Fix the scales of values at 1."""
    for value in {id(v): v for v in values}.values():
        labels = without_repeats(value.labels)
        recorder.scales.unify(labels, torch.where(labels == WILD, WILD, FIXED))


def _in_words(result: Any, values: list[Value | None]) -> str:
    if not values:
        found = "None" if result is None else f"a {type(result).__name__} without tensors"
        return f"it returns {found}"
    names = [v.name for v in values if v is not None and v.kind == "parameter"]
    if names:
        return f"it returns the parameter '{names[0]}' itself"
    return "all are constants, or functions of inputs"


def _carried(recorder: Recorder, before: Kept, now: Kept) -> list[Value]:
    """Find states that scale with their units: stored where this call read the last call's, or found none."""
    kept: list[Tensor] = []
    for place, old in before.items():
        if not old or any(id(t) in recorder.read for t in old):
            kept += now.get(place, ())
    carried = []
    for value in map(recorder.lookup, kept):
        if value is not None and value.kind == "hidden" and not value.state:
            carried.append(value)
    return carried


def _held(recorder: Recorder, returned: Any, now: Kept) -> list[Origin]:
    """Return the cuts that lead to anything the model returns or stores; the inputs of these cuts have the scale 1."""
    if all(origin.cut is None for origin in recorder.origins.values()):
        return []
    found = map(recorder.lookup, tensors_in([returned, list(now.values())]))
    return _reached(recorder, [*_slots(found), *recorder.roots])


def _cuts(recorder: Recorder, counted: Iterable[Origin], held: Iterable[Origin]) -> tuple[Cut, ...]:
    """Return all cuts, once each, with what they do."""
    counting = {origin.cut for origin in counted}
    holding = {origin.cut for origin in held}
    origins = recorder.origins.values()
    # a dictionary keeps their order
    all_cuts = dict.fromkeys(origin.cut for origin in origins if origin.cut is not None)
    return tuple(replace(cut, counts=cut in counting, holds=cut in holding) for cut in all_cuts)


def _slots(values: Iterable[Value | None]) -> list[int]:
    return [v.slot for v in values if v is not None]


def _reached(recorder: Recorder, slots: Iterable[int]) -> list[Origin]:
    """Return the origins of the inputs that lead to some slots, in the order in which they were made."""
    if not recorder.origins:
        return []
    seen = recorder.reached(slots)
    return [origin for slot, origin in recorder.origins.items() if slot in seen]


def _note_what_enters(recorder: Recorder, counted: Iterable[Origin]) -> None:
    """Remove the slots that enter a cut from its operation, unless the cut leads to an output."""
    counting = {id(origin.operation) for origin in counted}
    for origin in recorder.origins.values():
        operation = origin.operation
        if operation is not None and id(operation) not in counting:
            operation.results = (-1,) * len(operation.results)
