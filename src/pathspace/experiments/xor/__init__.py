"""O13's text of distant XOR: how many passes networks need, by the step that the paper prints and by ours (its Fig. 3).

It has an engine of its own, because a training takes hours and is looked at on its way: `protocol` says what is done,
`cells` does it, `report` puts it into words and a picture, `command` is what the command line calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathspace.experiments.xor.protocol import Protocol, protocol_from


def check(*layers: tuple[str, Mapping[str, Any]]) -> None:
    """Raise a `ConfigurationError` unless these settings make a table."""
    protocol_from(*layers)


def reproduce(recipe: Any, size: str, options: tuple[str, Mapping[str, Any]], around: Any) -> None:
    """Train all networks; see `command.reproduce`."""
    from pathspace.experiments.xor import command  # needs packages that others do without

    command.reproduce(recipe, size, options, around)


__all__ = ["Protocol", "check", "protocol_from", "reproduce"]
