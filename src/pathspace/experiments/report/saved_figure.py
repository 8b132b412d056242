"""A figure as bytes of a file and as an element of a page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def saved(figure: Figure) -> tuple[bytes, str]:
    """Return a figure as PNG, and as an SVG element to stand in a page.

    Both have the places that the PNG's layout found: to look for them takes as long as to draw.
    """
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=160)
    figure.set_layout_engine("none")
    figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]
