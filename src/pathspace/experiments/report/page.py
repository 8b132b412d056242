"""The report as one HTML page that needs nothing else: no script, no font, no picture beside it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pathspace.experiments.report.table import Published, Table

TEMPLATE = "page.html.jinja"


def render(
    title: str, table: Table, figure_svg: str, configuration: dict[str, Any], published: Published | None
) -> str:
    """Return the page.

    Args:
        title: The headline.
        table: The comparison in words.
        figure_svg: An `<svg>` element, put in as it is.
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
        table=table,
        figure=Markup(figure_svg),
        configuration=json.dumps(configuration, indent=2),
        versions=configuration["versions"],
        published=published,
    )
