"""An axis of learning rates: logarithmic, its ticks at rates that were tried."""

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
