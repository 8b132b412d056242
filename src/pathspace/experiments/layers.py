"""Settings in layers: those of a recipe, of one of its sizes, and of the command line, one over the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name

Layer = tuple[str, Mapping[str, Any]]
"""Where settings stand, for errors, and the settings."""


def laid_over(
    layers: Collection[Layer], known: Collection[str], *, lists: Collection[str], tables: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings of all layers; later ones win.

    Args:
        layers: From the first to the last.
        known: The names of all settings.
        lists: Of those that are lists; they become tuples.
        tables: Of those that are tables; they are merged.

    Raises:
        ConfigurationError: A name is unknown, or a value is no list or no table where it must be.
    """
    values: dict[str, Any] = {}
    for where, layer in layers:
        for name, value in layer.items():
            if name not in known:
                raise unknown_name("setting", name, known, where)
            if name in tables:
                if not isinstance(value, Mapping):
                    raise ConfigurationError(
                        f"The setting {name!r} in {where} is {value!r}: give a table of texts."
                    )
                values[name] = {**values.get(name, {}), **value}
                continue
            if name in lists and not isinstance(value, list | tuple):
                raise ConfigurationError(f"The setting {name!r} in {where} is {value!r}: give a list.")
            values[name] = tuple(value) if name in lists else value
    return values
