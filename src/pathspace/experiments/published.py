"""The numbers that papers report, one TOML file per experiment in `expected/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import field
from decimal import Decimal
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.layers import FILE, Count
from pathspace.experiments.settings import Settings

NOT_GIVEN = "not given"
AS_PRINTED = "-published"  # what the names of rules as printed end with


@dataclass(frozen=True, config=FILE)
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
    value: Annotated[float, Field(strict=True)] | None = None
    method: str = ""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    printed: str = ""

    @property
    def words(self) -> str:
        """The number as the paper prints it, or that it is not given."""
        return NOT_GIVEN if self.value is None else self.printed or f"{self.value:g}"


@dataclass(frozen=True, config=FILE)
class PaperProtocol:
    """A paper's training examples, epochs and seeds; None where its text does not give them.

    Attributes:
        train_size: Its training examples.
        epochs: Passes over them.
        seeds: Runs behind a number.
        task_options: It holds where the task has these options.
    """

    train_size: Count | None = None
    epochs: Count | None = None
    seeds: Count | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, config=FILE)
class Published:
    """The figures that a paper reports for an experiment.

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
        """Return the number to show beside a method under some settings; None where the paper gives none."""
        # A rule as printed is the paper's, too.
        names = (method, method.removesuffix(AS_PRINTED))
        for result in self.results:
            fits = _holds(settings.task_options, result.task_options)
            fits = fits and _holds(settings.model_options, result.model_options)
            if result.method in names and fits and result.value is not None:
                return result
        return None

    def protocol(self, settings: Settings) -> PaperProtocol:
        """Return the paper's protocol for the task options of some settings."""
        held = (each for each in self.protocols if _holds(settings.task_options, each.task_options))
        return next(held, PaperProtocol())


def _holds(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether options have the wanted values. A missing option counts as False."""
    return all(options.get(name, False) == value for name, value in wanted.items())


def load_published(name: str) -> Published | None:
    """Return the published numbers for the recipe called `name`, or None where there are none."""
    file = files("pathspace.experiments").joinpath("expected", f"{name}.toml")
    if not file.is_file():
        return None
    # As decimals, so that a number is printed with the zeros that the paper prints.
    content = tomllib.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    return Published(**{**content, "results": [_printed(entry) for entry in content["results"]]})


def _printed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with its number as a float, and as it is printed; some have no number."""
    if "value" not in entry:
        return dict(entry)
    return {**entry, "value": float(entry["value"]), "printed": str(entry["value"])}
