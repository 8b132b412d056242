"""Logarithmic axes: of learning rates, with ticks at those that were tried, and of losses and errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def set_rate_axis(axis: Axes, rates: Collection[float], most: int = 6) -> None:
    """Make the horizontal axis one of learning rates.

    Args:
        axis: What the rates are drawn in.
        rates: Those of the grid, at least one.
        most: As many ticks find room; of more rates every second, third ... has one.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    # The limits first: a grid of one rate leaves nothing for the scale to adapt to.
    axis.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(sorted(set(rates)), nbins=most))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axis.xaxis.set_minor_locator(NullLocator())


def set_log_axis(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers as they are written where it spans less than two decades.

    Args:
        axis: What all curves are drawn in.
    """
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:  # by default 2 is written as 2 x 10^0, and there may be one tick or none
        axis.yaxis.set_major_locator(AutoLocator() if high < 5 * low else LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
