"""The table of O13 for symbol sequences: baselines, and three networks in three metrics, on three texts.

It has an engine of its own, because its models are no torch modules: `protocol` says what is done, `cells` does it,
`report` puts it into words and a picture, `command` is what the command line calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathspace.experiments.symbols.protocol import Protocol, protocol_from


def check(*layers: tuple[str, Mapping[str, Any]]) -> None:
    """Raise a `ConfigurationError` unless these settings make a table."""
    protocol_from(*layers)


def reproduce(recipe: Any, size: str, options: tuple[str, Mapping[str, Any]], around: Any) -> None:
    """Fill the table; see `command.reproduce`."""
    from pathspace.experiments.symbols import command  # needs packages that others do without

    command.reproduce(recipe, size, options, around)


__all__ = ["Protocol", "check", "protocol_from", "reproduce"]
