"""`pathspace reproduce long-memory`: rates chosen on seeds of their own, then the reported runs, setting by setting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pathspace.experiments.long_memory.cells import (
    Result,
    Setting,
    compute,
    reported_cells,
    settings,
    tuning_cells,
)
from pathspace.experiments.long_memory.comparison import Row, chosen_rates, compared
from pathspace.experiments.long_memory.protocol import protocol_from
from pathspace.experiments.long_memory.report import report
from pathspace.experiments.report.document import print_report, write_report
from pathspace.experiments.stored_cells import all_results, begun_table

if TYPE_CHECKING:
    from pathspace.experiments.execution import Surroundings
    from pathspace.experiments.layers import Layer
    from pathspace.experiments.recipes import Recipe


def reproduce(recipe: Recipe, size: str, options: Layer, around: Surroundings) -> dict[Setting, list[Row]]:
    """Do all runs and report.

    Args:
        recipe: Its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        around: Where to write, how many processes, and whether to continue.

    Raises:
        ConfigurationError: A setting is impossible, or the folder holds something else.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    rows: dict[Setting, list[Row]] = {}
    begun = begun_table(recipe, size, options, around, protocol_from)
    with begun as (protocol, configuration, output):
        do = partial(
            all_results,
            compute=partial(compute, protocol=protocol),
            output=output,
            around=around,
            read=Result.from_dict,
            told=_told,
        )
        for setting in settings(protocol):
            tuning = do(tuning_cells(protocol, setting))
            reported = do(reported_cells(protocol, setting, chosen_rates(protocol, tuning)))
            rows[setting] = compared(protocol, setting, tuning, reported)
        found = report(protocol, rows, title=recipe.title, configuration=configuration)
        write_report(found, output)
    print_report(found, output, as_json=around.as_json)
    return rows


def _told(result: Result) -> str:
    cell, steps = result.cell, result.outcome.steps
    where = f"{cell.setting.problem}, T = {cell.setting.length}, H = {cell.setting.hidden}"
    how = "did not learn it" if steps is None else f"learned it in {steps} steps"
    return f"{cell.method} at {cell.rate:g}, seed {cell.seed} ({where}): {how}, {result.seconds:.0f} s"
