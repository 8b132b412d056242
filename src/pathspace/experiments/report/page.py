"""The report as one HTML page that needs nothing else: no font, no picture, no script but the one in the page.

The script sorts tables and switches curves; without it all of them are shown. The policy in the page's head forbids
every use of the network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pathspace.experiments.folders import PAGE
from pathspace.experiments.published import Published
from pathspace.experiments.report.switchable import Curves
from pathspace.experiments.report.table import Table
from pathspace.experiments.storage import write_text

TEMPLATE = "page.html.jinja"
LEGEND = {
    "same": "the same curve as from the first start, to the last bit",
    "differs": "another curve",
    "good": "error not told apart from the best, or below the best baseline",
    "bad": "error above it, intervals apart, or diverged",
}


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        heading: What it is called.
        table: Its table.
        svg: A picture below the table, put in as it is; empty for none.
        curves: Curves above the table, to be switched on and off.
        samples: Texts below the picture, each with its heading.
    """

    heading: str
    table: Table
    svg: str = ""
    curves: Curves | None = None
    samples: tuple[tuple[str, str], ...] = ()


def write_page(
    output: Path,
    title: str,
    sections: Sequence[Section],
    configuration: dict[str, Any],
    published: Published | None = None,
    conclusions: Sequence[str] = (),
) -> Path:
    """Write the page, after all other files of a report: who finds it finds the rest.

    Args:
        output: An existing folder.
        title: The headline.
        sections: Tables and pictures, the most important first.
        configuration: The exact configuration, printed at the end.
        published: The numbers of a paper, if there are any.
        conclusions: What was found, in sentences, to stand on top.

    Returns:
        The file.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    used = {mark for section in sections for row in section.table.rows for mark in row.marks.values()}
    source = files("pathspace.experiments.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(source).render(
        title=title,
        sections=sections,
        legend={mark: words for mark, words in LEGEND.items() if mark in used},
        conclusions=conclusions,
        safe=Markup,
        configuration=json.dumps(configuration, indent=2),
        versions=configuration["versions"],
        published=published,
    )
    write_text(output / PAGE, page)
    return output / PAGE
