"""Settings in layers: those of a recipe, of one of its sizes, and of the command line, one over the other."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Layer = tuple[str, Mapping[str, Any]]
"""Where settings stand, for errors, and the settings."""
Laid = TypeVar("Laid", bound="DataclassInstance")


def laid_over(protocol: type[Laid], layers: Collection[Layer]) -> Laid:
    """Return the settings of all layers over the defaults; later ones win.

    Args:
        protocol: A dataclass of settings. Those with a tuple as default are lists, and become tuples; those with a
            factory are tables, and are merged.
        layers: From the first to the last.

    Raises:
        ConfigurationError: A name is unknown, or a value is no list or no table where it must be.
    """
    known = {item.name: item for item in fields(protocol)}
    values: dict[str, Any] = {}
    for where, layer in layers:
        for name, value in layer.items():
            if name not in known:
                raise unknown_name("setting", name, known, where)
            if known[name].default_factory is not MISSING:
                if not isinstance(value, Mapping):
                    raise ConfigurationError(
                        f"The setting {name!r} in {where} is {value!r}: give a table of texts."
                    )
                values[name] = {**values.get(name, {}), **value}
            elif isinstance(known[name].default, tuple):
                if not isinstance(value, list | tuple):
                    raise ConfigurationError(f"The setting {name!r} in {where} is {value!r}: give a list.")
                values[name] = tuple(value)
            else:
                values[name] = value
    return protocol(**values)


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `--set NAME=VALUE` options; the values as `read_value` takes them.

    Raises:
        ConfigurationError: There is no equals sign.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {assignment!r} has no value: write --set NAME=VALUE.")
        value = read_value(text)
        table, dot, option = name.partition(".")
        if dot:
            options = settings.setdefault(table, {})
            if not isinstance(options, dict):
                raise ConfigurationError(
                    f"{table!r} is given both as a value and as a table: give one of them."
                )
            options[option] = value
        else:
            earlier = settings.get(name)
            if isinstance(earlier, dict) and isinstance(value, dict):
                value = {**earlier, **value}
            settings[name] = value
    return settings


def read_value(text: str) -> Any:
    """Read a value of the command line: as in TOML, but .5 and 1. are numbers, too, and a bare word is a string.

    Those numbers may stand in a list of numbers.
    """
    text = text.strip()
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        json.dumps(value)
        return value
    # no setting is a date, which is TOML, too, or has 5,000 digits
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        if text.startswith("[") and text.endswith("]"):
            value = list(map(float, text[1:-1].split(",")))
            return value if all(map(math.isfinite, value)) else text
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def plain_values(settings: DataclassInstance) -> dict[str, Any]:
    """Return settings as plain values for JSON, which can be laid over the defaults again."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(settings).items()}
