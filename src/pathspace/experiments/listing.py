"""What `pathspace reproduce --list` prints: recipes, the papers' tables, sizes, costs, and what of it has been run."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from pathspace.experiments.recipes import DEFAULT, Measured, Recipe, load_recipe, recipe_names

INDENT = 4
HEAD = "Costs in core-hours, as measured here or as steps times a measured step, the largest by their ratio to others."


def listing(width: int) -> list[str]:
    """Return the lines of the list; those below the title of a recipe are at most `width` wide."""
    lines = textwrap.wrap(HEAD, width)
    for name in recipe_names():
        recipe = load_recipe(name)
        lines += ["", f"{name}: {recipe.title}", *_of_paper(recipe, width)]
        sizes = list(recipe.sizes) or [DEFAULT]
        known = [recipe.measured.get(size, Measured()) for size in sizes]
        # the names, two blanks, and the costs, right-aligned
        column, most = 2 + max(map(len, sizes)), max(6, *(len(_cost(each)) for each in known))
        for size, each in zip(sizes, known, strict=True):
            lines += _of_size(size, each, column, most, width, recipe)
    return lines


def as_json() -> dict[str, Any]:
    """Return the list for machines: by recipe its title, its paper, its parts, and what is known of its sizes."""
    found = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        sizes = {
            size: asdict(recipe.measured.get(size, Measured()))
            for size in [*recipe.sizes] or [DEFAULT]
        }
        found[name] = {
            "title": recipe.title,
            "paper": recipe.paper,
            "distance": recipe.distance,
            "parts": [*recipe.parts],
            "sizes": sizes,
        }
    return found


def _of_paper(recipe: Recipe, width: int) -> list[str]:
    hanging = " " * (INDENT + 2)
    lines = _wrapped(f"paper: {recipe.paper or 'none, our own question'}", width, hanging)
    return lines + (
        _wrapped(f"distance: {recipe.distance}", width, hanging) if recipe.distance else []
    )


def _cost(known: Measured) -> str:
    return "?" if known.core_hours is None else f"{known.core_hours:,.10g}"


def _of_size(
    size: str, known: Measured, column: int, most: int, width: int, recipe: Recipe
) -> list[str]:
    if recipe.parts:  # what is known of it stands at its parts
        return _wrapped(
            f"{size:<{column}}see {', '.join(recipe.parts)}", width, " " * (INDENT + column)
        )
    run = f"docs/results/{known.page}" if known.page else "not run"
    run += f" ({known.part})" if known.part else ""
    return _wrapped(
        f"{size:<{column}}{_cost(known):>{most}}  {run}", width, " " * (INDENT + column + most + 2)
    )


def _wrapped(text: str, width: int, following: str) -> list[str]:
    # Names have hyphens; a line that ended at one would make two names of it.
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * INDENT,
        subsequent_indent=following,
        break_on_hyphens=False,
    )
