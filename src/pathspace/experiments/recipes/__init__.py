"""Recipes: experiments as short TOML files, each a difference to the defaults with the reason on every line.

    title = "What the report is called"
    [settings]          # see settings.Settings
    epochs = 400        # why
    [sizes.small]       # settings that make it small enough for a laptop; the first size is the default
    epochs = 3          # why

A key `paper` names the table of the paper that a recipe is after, `distance` says how its runs
differ from the paper's protocol, and tables `[measured.SIZE]` say what is known of a size:
`core_hours` of the whole, as measured or as steps times a measured step; `page`, the file in
`docs/results` with what it printed; `part`, how much was run where that is not the whole.
`pathspace reproduce --list` shows them. The size of a recipe without sizes is called `default`.

A table `[study]` names what is measured besides the comparison (see `studies`).

A recipe can also be a list of others, run one after the other with one table each and one picture:

    title = "What the page is called"
    parts = ["one", "another"]  # why these; sizes are those that all of them have

A key `engine` names who runs a recipe that is no comparison of optimizers (see `ENGINES`). Numbers
that a paper reports stand in `expected/` under the same name. A new recipe is such a file and
nothing else.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from pathspace.experiments.errors import unknown_name
from pathspace.experiments.layers import FILE, Count, Layer

if TYPE_CHECKING:
    from pathspace.experiments.settings import Settings

DEFAULT = "default"  # what the one size of a recipe without sizes is called

# Engines are named, not imported, so that recipes can be listed without loading what they need; see
# `execution`.
ENGINES = {
    "long-memory": "pathspace.experiments.long_memory",
    "symbols": "pathspace.experiments.symbols",
    "xor": "pathspace.experiments.xor",
}
NEEDED = {"symbols": ("numba", "hmmlearn"), "xor": ("numba",)}
"""By engine the packages that no other recipe needs."""
INDENT = 4  # columns, in the list of recipes
HEAD = "Costs in core-hours, as measured here or as steps times a measured step, the largest by their ratio to others."


@dataclass(frozen=True, config=FILE)
class Measured:
    """Cost and page of one size of a recipe.

    Attributes:
        core_hours: What it costs; None if that was never measured.
        page: The file in `docs/results` that has what it printed; empty if it was never run.
        part: How much of it was run; empty for all.
    """

    core_hours: Annotated[float, Field(gt=0)] | None = None
    page: str = ""
    part: str = ""


@dataclass(frozen=True, config=FILE)
class Recipe:
    """An experiment to reproduce.

    Attributes:
        name: The file's name.
        title: The headline of its report.
        settings: Settings of all sizes.
        sizes: Settings of each size, laid over the common ones.
        study: The name of a study and, by size, its options; empty where there is none.
        parts: The recipes that this one consists of; it has no settings of its own then.
        engine: Who runs it, a name in `ENGINES`; empty for a comparison of optimizers.
        paper: The table of the paper that it is after; empty where there is none.
        distance: How its runs differ from the paper's protocol; empty where there is no paper.
        measured: What is known of each size; a size that is missing was never run.
    """

    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    study: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    engine: str = ""
    paper: str = ""
    distance: str = ""
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def layers(self, size: str) -> list[Layer]:
        """Return what `settings_from` takes for one size; an empty name stands for the first one."""
        where = f"recipes/{self.name}.toml"
        if not size and self.sizes:
            size = next(iter(self.sizes))
        if size and size not in self.sizes:
            raise unknown_name(
                "size", size, self.sizes or ("(no sizes)",), f"--size of the recipe {self.name!r}"
            )
        return [(where, self.settings), *([(where, self.sizes[size])] if size else [])]

    def study_options(self, size: str) -> Mapping[str, Any]:
        """Return the options of the study for one size."""
        return self.study.get(size, {})


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    folder = files("pathspace.experiments").joinpath("recipes")
    return sorted(
        item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")
    )


def load_recipe(name: str) -> Recipe:
    """Read a recipe; the sizes of one with parts are those that all parts have."""
    if name not in recipe_names():
        raise unknown_name("recipe", name, recipe_names(), "reproduce")
    file = files("pathspace.experiments").joinpath("recipes", f"{name}.toml")
    recipe = Recipe(name=name, **tomllib.loads(file.read_text(encoding="utf-8")))
    if not recipe.parts:
        return recipe
    first, *others = (load_recipe(part).sizes for part in recipe.parts)
    common = {size: {} for size in first if all(size in sizes for sizes in others)}
    return replace(recipe, sizes=common)


def listing(width: int) -> list[str]:
    """Return the lines of the list; those below the title of a recipe are at most `width` wide."""
    lines = textwrap.wrap(HEAD, width)
    for name, recipe in listing_as_json().items():
        lines += ["", f"{name}: {recipe['title']}"]
        lines += _wrapped(f"paper: {recipe['paper'] or 'none, our own question'}", width, 2)
        if recipe["distance"]:
            lines += _wrapped(f"distance: {recipe['distance']}", width, 2)
        # the names, two blanks, and the costs, right-aligned
        name_width = 2 + max(map(len, recipe["sizes"]))
        costs = {
            size: "?" if known["core_hours"] is None else f"{known['core_hours']:,.10g}"
            for size, known in recipe["sizes"].items()
        }
        cost_width = max(6, *map(len, costs.values()))
        for size, known in recipe["sizes"].items():
            if recipe["parts"]:  # what is known of it stands at its parts
                parts = f"{size:<{name_width}}see {', '.join(recipe['parts'])}"
                lines += _wrapped(parts, width, name_width)
                continue
            run = f"docs/results/{known['page']}" if known["page"] else "not run"
            run += f" ({known['part']})" if known["part"] else ""
            row = f"{size:<{name_width}}{costs[size]:>{cost_width}}  {run}"
            lines += _wrapped(row, width, name_width + cost_width + 2)
    return lines


def listing_as_json() -> dict[str, Any]:
    """Return the list for machines: by recipe its title, its paper, its parts, and what is known of its sizes."""
    found = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        sizes = {
            size: asdict(recipe.measured.get(size, Measured()))
            for size in [*recipe.sizes] or [DEFAULT]
        }
        known = {key: getattr(recipe, key) for key in ("title", "paper", "distance")}
        found[name] = {**known, "parts": [*recipe.parts], "sizes": sizes}
    return found


def _wrapped(text: str, width: int, hanging: int) -> list[str]:
    """Wrap an indented text; its further lines hang by some columns more."""
    # Names have hyphens; a line that ended at one would make two names of it.
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * INDENT,
        subsequent_indent=" " * (INDENT + hanging),
        break_on_hyphens=False,
    )


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
    """A paper's training examples, epochs and seeds where a task has some options; None where its text gives none."""

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
    for result in content["results"]:
        if "value" in result:
            result["printed"] = str(result["value"])
            result["value"] = float(result["value"])
    return Published(**content)
