"""Where geometry by step wins: long memory from identity-like starts, PathMuon against its rivals balanced once.

It has an engine of its own, because its runs are many and small: `copies` computes networks from many seeds at once,
`rules` and `training` train them, `protocol` and `cells` say what is done, `comparison` tests it, `report` and `figure`
show it, `command` is what the command line calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathspace.experiments.long_memory.protocol import Protocol, protocol_from


def check(*layers: tuple[str, Mapping[str, Any]]) -> None:
    """Raise a `ConfigurationError` unless these settings make a comparison."""
    protocol_from(*layers)


def reproduce(recipe: Any, size: str, options: tuple[str, Mapping[str, Any]], around: Any) -> None:
    """Do all runs and report; see `command.reproduce`."""
    from pathspace.experiments.long_memory import command  # loads PyTorch

    command.reproduce(recipe, size, options, around)


__all__ = ["Protocol", "check", "protocol_from", "reproduce"]
