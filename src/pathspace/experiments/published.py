"""The numbers that papers report, one TOML file per experiment in `expected/`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources import files
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.methods import METHODS
from pathspace.experiments.settings import Settings

KEYS = ("source", "setting", "pairs", "results", "protocol")
RESULT_KEYS = ("label", "value", "method", "task_options", "model_options")
PROTOCOL_KEYS = ("train_size", "epochs", "seeds", "task_options")
NOT_GIVEN = "not given"
AS_PRINTED = "-published"  # what the names of rules as printed end with


@dataclass(frozen=True)
class PublishedResult:
    """A number that a paper reports.

    Attributes:
        label: What the paper calls the method, with the setting where it reports several.
        value: The number, in the unit of the task's metric; None where the text does not give it.
        method: The name in `methods.METHODS` of the same method here, or empty.
        task_options: The number stands beside ours only where the task has these options.
        model_options: Likewise the model.
        printed: The number as the paper prints it, with its last zeros.
    """

    label: str
    value: float | None
    method: str = ""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    printed: str = ""

    @property
    def words(self) -> str:
        """The number as the paper prints it, or that it is not given."""
        return NOT_GIVEN if self.value is None else self.printed or f"{self.value:g}"


@dataclass(frozen=True)
class PaperProtocol:
    """What a paper trained on, for how long and how often; None where the text does not give it.

    Attributes:
        train_size: Its training examples.
        epochs: Passes over them.
        seeds: Runs behind a number.
        task_options: It holds where the task has these options.
    """

    train_size: int | None = None
    epochs: int | None = None
    seeds: int | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """What a paper reports for an experiment.

    Attributes:
        source: The paper and the table.
        setting: What to know before comparing: its epochs, sizes, protocol.
        results: The numbers.
        protocols: What they were obtained with; the first one that holds counts.
        pairs: Methods that the paper compares: the first of two against the second.
    """

    source: str
    setting: str
    results: tuple[PublishedResult, ...]
    protocols: tuple[PaperProtocol, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> tuple[PublishedResult, ...]:
        """The numbers, each once: one that stands beside several methods of ours is written down for each of them."""
        first: dict[str, PublishedResult] = {}
        for result in self.results:
            first.setdefault(result.label, result)
        return tuple(first.values())

    def result(self, settings: Settings, method: str) -> PublishedResult | None:
        """The number that belongs beside a method under some settings; None where none is given."""
        # A rule as printed is the paper's, too.
        names = (method, method.removesuffix(AS_PRINTED))
        for result in self.results:
            fits = _holds(settings.task_options, result.task_options)
            fits = fits and _holds(settings.model_options, result.model_options)
            if result.method in names and fits and result.value is not None:
                return result
        return None

    def protocol(self, settings: Settings) -> PaperProtocol:
        """What the paper did where the task has the options of some settings."""
        held = (each for each in self.protocols if _holds(settings.task_options, each.task_options))
        return next(held, PaperProtocol())


def _holds(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether options have the wanted values; what is not among them has its default, which is no match but False."""
    return all(options.get(name, False) == value for name, value in wanted.items())


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

    A result without a value is a row of the paper whose number its text does not give.
    """
    _check_keys(content, KEYS, where, optional=("pairs", "protocol"))
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
    pairs = _pairs(content.get("pairs", []), where)
    return Published(content["source"], content["setting"], tuple(results), tuple(protocols), pairs)


def _pairs(entries: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(entries, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in entries
    ):
        raise ConfigurationError(
            f"The key 'pairs' in {where} is {entries!r}: give a list of pairs of methods, [[first, second], ...]."
        )
    for name in (name for pair in entries for name in pair):
        if name not in list(METHODS):
            raise unknown_name("method", name, METHODS, where)
    return tuple((first, second) for first, second in entries)


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
