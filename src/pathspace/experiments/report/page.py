"""The report as one HTML page that needs nothing else: no script, no font, no picture beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pathspace.experiments.report.table import Published, Table

TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Section:
    """A heading, a table, and an `<svg>` element above it, put in as it is; or no picture."""

    heading: str
    table: Table
    svg: str = ""


def render(
    title: str, sections: Sequence[Section], configuration: dict[str, Any], published: Published | None
) -> str:
    """Return the page.

    Args:
        title: The headline.
        sections: Tables and pictures, the most important first.
        configuration: The exact configuration, printed at the end.
        published: The numbers of a paper, if there are any.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files("pathspace.experiments.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        title=title,
        sections=[(section.heading, section.table, Markup(section.svg)) for section in sections],
        configuration=json.dumps(configuration, indent=2),
        versions=configuration["versions"],
        published=published,
    )
