"""Marks in a saved state that say which optimizer and which network it belongs to.

Moments in coordinates have the names and shapes of those of plain rules, whose loaders would take
them without a word. So a saved state holds a :class:`Refusal` in the place of one entry, and the
entry itself under another name.

Groups say whether steps were taken. Tools load what a state has room for, which may be nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

NOTHING = "stateless"
"""The entry of a parameter that has no state, beside others that have one."""
BEGUN = "pathspace_begun"
"""The entry of saved groups: whether steps were taken, whose state is saved with them."""
_KEPT = "coordinate_"
"""Before the name of an entry in whose place a refusal stands."""


class Refusal(bytes):
    """A sentence in the place of an entry, at which loaders of plain rules stop.

    They make a new object of its type from an iterator, which raises. A file holds plain bytes, of
    which Adam and its kin would make a number: ``could not convert string to float: b'...'``. Both
    show the sentence.
    """

    def __new__(cls, sentence: Any) -> Refusal:
        """Make one of a sentence."""
        if not isinstance(sentence, str):
            raise ValueError(_REFUSED)
        return super().__new__(cls, sentence.encode())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return codecs.encode, (self.decode(), "latin1")

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusal:
        return self


_REFUSED = (
    "this is the state of an optimizer of pathspace, whose moments are in coordinates of the network and mean "
    "nothing to a plain rule: load it into that optimizer, made for the traced model; to go on with the plain rule, "
    "save plain_state_dict() of Invariant, PathAdam or PathRMSprop"
)


def locked(
    state: Mapping[str, Any], names: Iterable[str], *, moments: bool = False
) -> dict[str, Any]:
    """Return a state with a :class:`Refusal` under "step"; the entries in its place have another name.

    Most plain rules read "step" first. A rule without it may read any tensor at its first step.

    Args:
        state: of one parameter.
        names: the names of the rule's own entries.
        moments: whether refusals replace all tensors of a rule that has no "step".
    """
    own = [name for name in names if name in state]
    if not own:
        return dict(state)
    replaced = [name for name in own if name == "step"]
    if moments and not replaced:
        replaced = [name for name in own if isinstance(state[name], Tensor)]
    result = dict(state)
    for name in replaced:
        result[f"{_KEPT}{name}"] = state[name]
    refusal = Refusal(_REFUSED)
    for name in ("step", *replaced):
        result[name] = refusal
    return result


def unlocked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`locked`; a state without refusals is copied."""
    values = {name: value for name, value in state.items() if not isinstance(value, bytes)}
    return {name.removeprefix(_KEPT): value for name, value in values.items()}


def has_content(state: Mapping[str, Any]) -> bool:
    """Return whether a state has an entry other than empty dictionaries and the mark :data:`NOTHING`."""
    for key, value in state.items():
        is_empty = isinstance(value, dict) and not value
        if key != NOTHING and not is_empty:
            return True
    return False


def of_steps(state_dict: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a saved state without its marks, and without what a rehearsal left in it.

    Raises:
        ValueError: it was saved after steps, and is empty.
    """
    groups = state_dict["param_groups"]
    states = state_dict["state"]
    marks = [group[BEGUN] for group in groups if BEGUN in group]
    if marks and all(marks) and not any(map(has_content, states.values())):
        raise lost(kind, "nothing of it but the options arrived")
    if marks and not any(marks):
        states = _emptied(states)
    plain = [{key: value for key, value in group.items() if key != BEGUN} for group in groups]
    return {**state_dict, "state": states, "param_groups": plain}


def lost(kind: str, what: str) -> ValueError:
    """Return the error for a state of which tools loaded a part."""
    return ValueError(
        f"this state of {kind} was saved after steps, and {what}. torch.distributed.checkpoint loads what "
        "get_optimizer_state_dict made room for, which it does not do while there are gradients: call "
        "optimizer.zero_grad() before get_optimizer_state_dict"
    )


def is_locked(state: Mapping[str, Any]) -> bool:
    """Return whether a state is one that :func:`locked` has put aside."""
    return any(name.startswith(_KEPT) for name in state)


def _emptied(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return an empty dictionary for each dictionary in the states, and nothing for other entries."""
    emptied = {}
    for index, state in states.items():
        kept = {key: {} for key, value in state.items() if isinstance(value, dict)}
        if kept:
            emptied[index] = kept
    return emptied
