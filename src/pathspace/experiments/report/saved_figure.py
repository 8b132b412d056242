"""A figure as bytes of a file and as an element of a page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def own_style(changes: dict[Any, Any] | None = None) -> Iterator[None]:
    """Draw with Matplotlib's defaults and these changes, whatever `matplotlibrc` says: LaTeX may be missing there."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        own: dict[Any, Any] = {"font.size": 9, "svg.hashsalt": "pathspace", "svg.fonttype": "path"}
        mpl.rcParams.update(own | (changes or {}))
        yield


def as_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160)
    return png.getvalue()


def saved(figure: Figure) -> tuple[bytes, str]:
    """Return a figure as PNG, and as an SVG element to stand in a page.

    Both have the places that the PNG's layout found: to look for them takes as long as to draw.
    """
    png, svg = as_png(figure), io.StringIO()
    figure.set_layout_engine("none")
    figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return png, text[text.index("<svg") :]
