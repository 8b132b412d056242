"""The numbers that papers report, one TOML file per experiment in `expected/`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from importlib.resources import files
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.report.table import PaperProtocol, Published, PublishedResult

KEYS = ("source", "setting", "results", "protocol")
RESULT_KEYS = ("label", "value", "method", "task_options", "model_options")
PROTOCOL_KEYS = ("train_size", "epochs", "seeds", "task_options")


def load_published(name: str) -> Published | None:
    """Return the published numbers for the recipe called `name`, or None where there are none.

    Raises:
        ConfigurationError: The file has a key that means nothing, or lacks one.
    """
    file = files("pathspace.experiments").joinpath("expected", f"{name}.toml")
    if not file.is_file():
        return None
    # As decimals, so that a number is printed with the zeros that the paper prints.
    content = tomllib.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    return parse_published(content, f"expected/{name}.toml")


def parse_published(content: dict[str, Any], where: str) -> Published:
    """Turn the content of a file into published numbers; `where` is the file's name for errors.

    A result without a value is a row of the paper whose number is not recorded here.
    """
    _check_keys(content, KEYS, where, optional=("protocol",))
    results = []
    for entry in _tables(content, "results", where):
        _check_keys(entry, RESULT_KEYS, where, optional=RESULT_KEYS[1:])
        value = entry.get("value")
        if value is None:
            results.append(PublishedResult(**{**entry, "value": None}))
            continue
        if not _is_number(value):
            raise ConfigurationError(f"The key 'value' in {where} is {value!r}: give a number.")
        results.append(PublishedResult(**{**entry, "value": float(value), "printed": str(value)}))
    protocols = [_protocol(entry, where) for entry in _tables(content, "protocol", where)]
    return Published(content["source"], content["setting"], tuple(results), tuple(protocols))


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float, Decimal) and math.isfinite(value)
    except OverflowError:
        return False


def _tables(content: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = content.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"The key {key!r} in {where} is {entries!r}: give tables [[{key}]].")
    return entries


def _protocol(entry: dict[str, Any], where: str) -> PaperProtocol:
    _check_keys(entry, PROTOCOL_KEYS, where, optional=PROTOCOL_KEYS)
    for name in PROTOCOL_KEYS[:3]:
        value = entry.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigurationError(
                f"The key {name!r} in {where} is {value!r}: give a whole number from 1 on."
            )
    options = entry.get("task_options", {})
    if not isinstance(options, dict):
        raise ConfigurationError(f"The key 'task_options' in {where} is {options!r}: give a table.")
    return PaperProtocol(**entry)


def _check_keys(
    content: dict[str, Any], known: tuple[str, ...], where: str, optional: tuple[str, ...] = ()
) -> None:
    for name in content:
        if name not in known:
            raise unknown_name("key", name, known, where)
    for name in known:
        if name not in content and name not in optional:
            raise ConfigurationError(f"The key {name!r} is missing in {where}: add it.")
