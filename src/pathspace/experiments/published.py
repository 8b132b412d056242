"""The numbers that papers report, one TOML file per experiment in `expected/`."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.report.table import Published, PublishedResult

KEYS = ("source", "setting", "results")
RESULT_KEYS = ("label", "value", "method", "task_options", "model_options")


def load_published(name: str) -> Published | None:
    """Return the published numbers for the recipe called `name`, or None where there are none.

    Raises:
        ConfigurationError: The file has a key that means nothing, or lacks one.
    """
    file = files("pathspace.experiments").joinpath("expected", f"{name}.toml")
    if not file.is_file():
        return None
    return parse_published(tomllib.loads(file.read_text(encoding="utf-8")), f"expected/{name}.toml")


def parse_published(content: dict[str, Any], where: str) -> Published:
    """Turn the content of a file into published numbers; `where` is the file's name for errors."""
    _check_keys(content, KEYS, where)
    results = []
    entries = content["results"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"The key 'results' in {where} is {entries!r}: give tables [[results]].")
    for entry in entries:
        _check_keys(entry, RESULT_KEYS, where, optional=("method", "task_options", "model_options"))
        value = entry["value"]
        if type(value) not in (int, float) or not abs(value) < math.inf:
            raise ConfigurationError(f"The key 'value' in {where} is {value!r}: give a number.")
        results.append(PublishedResult(**{**entry, "value": float(value)}))
    return Published(content["source"], content["setting"], tuple(results))


def _check_keys(
    content: dict[str, Any], known: tuple[str, ...], where: str, optional: tuple[str, ...] = ()
) -> None:
    for name in content:
        if name not in known:
            raise unknown_name("key", name, known, where)
    for name in known:
        if name not in content and name not in optional:
            raise ConfigurationError(f"The key {name!r} is missing in {where}: add it.")
