"""Whether the states of an optimizer are still those that something was made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

States = Mapping[Any, dict[str, Any]]


class SameStates:
    """The states of all parameters, remembered by their identity; what is in them may change.

    Args:
        states: of an optimizer; None are those of no optimizer.
    """

    __slots__ = ("_identities", "_states")

    def __init__(self, states: States | None = None) -> None:
        self._states = states
        self._identities = [] if states is None else list(map(id, states.values()))

    def belong_to(self, states: States) -> bool:
        """Whether nobody put other states in their place as a whole, as loading does; costs nothing."""
        return states is self._states

    def are(self, states: States) -> bool:
        """Whether these are the same, no more and no fewer; steps between two refreshes ask each time."""
        return states is self._states and self._identities == list(map(id, states.values()))
