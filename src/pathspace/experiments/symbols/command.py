"""`pathspace reproduce symbols`: every cell once, in parallel, continued where it was stopped."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.published import load_published
from pathspace.experiments.report.document import print_report, write_report
from pathspace.experiments.stored_cells import all_results, begun_table
from pathspace.experiments.symbols.cells import Score, cells, compute
from pathspace.experiments.symbols.protocol import protocol_from
from pathspace.experiments.symbols.report import report
from pathspace.extras import install

if TYPE_CHECKING:
    from pathspace.experiments.execution import Surroundings
    from pathspace.experiments.layers import Layer
    from pathspace.experiments.recipes import Recipe


def reproduce(recipe: Recipe, size: str, options: Layer, around: Surroundings) -> list[Score]:
    """Fill the table and report.

    Args:
        recipe: Its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        around: Where to write, how many processes, and whether to continue.

    Raises:
        ConfigurationError: A setting is impossible, packages are missing, or the folder holds something else.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    missing = [name for name in ("numba", "hmmlearn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"The package {missing[0]!r} is missing: {install('experiments', 'sequences')}."
        )
    begun = begun_table(recipe, size, options, around, protocol_from)
    with begun as (protocol, configuration, output):
        scores = all_results(
            cells(protocol),
            partial(compute, protocol=protocol),
            output,
            around,
            read=Score.from_dict,
            told=_told,
        )
        published = load_published(recipe.name)
        found = report(protocol, scores, title=recipe.title, configuration=configuration, published=published)
        write_report(found, output)
    print_report(found, output, as_json=around.as_json)
    return scores


def _told(score: Score) -> str:
    size = f", size {score.cell.size}" if score.cell.size else ""
    size += f", draw {score.cell.draw}" if score.cell.draw else ""
    return f"{score.cell.row} on {score.cell.text}{size}: {score.test:.1f} bits, {score.seconds:.1f} s"
