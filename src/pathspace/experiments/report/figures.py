"""Figures as bytes of a file and as an element of a page, and the axes that several of them have."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ to colour-blind eyes too (Okabe and Ito), and as many more as the recipe with
# most methods needs.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31", "#7f7f7f", "#5e3c99",
    "#7fbc41", "#a50026", "#01665e", "#b7a7e0", "#d6c600",
)  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "pathspace",
    "svg.fonttype": "path",
}


def saved(draw: Callable[[], Figure]) -> tuple[bytes, str]:
    """Draw a figure; returns it as a PNG file, and as an SVG element to stand in a page.

    It is drawn with Matplotlib's defaults and `STYLE`, whatever `matplotlibrc` says: LaTeX may be
    missing there.
    """
    import matplotlib as mpl

    png, svg = io.BytesIO(), io.StringIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = draw()
        figure.savefig(png, format="png", dpi=160)
        # Both have the places that the PNG's layout found: to look for them takes as long as to
        # draw.
        figure.set_layout_engine("none")
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return png.getvalue(), text[text.index("<svg") :]


def set_rate_axis(axis: Axes, rates: Collection[float], most: int = 6) -> None:
    """Make the horizontal axis one of learning rates, with ticks at those that were tried.

    Args:
        axis: The axes that the rates are drawn in.
        rates: Those of the grid, at least one.
        most: As many ticks find room; of more rates every second, third ... has one.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    # The limits first: a grid of one rate leaves nothing for the scale to adapt to.
    axis.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(sorted(set(rates)), nbins=most))
    axis.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axis.xaxis.set_minor_locator(NullLocator())


def set_log_axis(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers as they are written where it spans less than two decades."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:  # by default 2 is written as 2 x 10^0, and there may be one tick or none
        axis.yaxis.set_major_locator(
            AutoLocator() if high < 5 * low else LogLocator(subs=(1.0, 2.0, 5.0))
        )
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
