"""`pathspace reproduce xor`: every network once, in parallel, continued where it was stopped."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.published import load_published
from pathspace.experiments.report.document import print_report, write_report
from pathspace.experiments.storage import make_folder
from pathspace.experiments.stored_cells import all_results, begun_table
from pathspace.experiments.xor.cells import Result, cells, compute
from pathspace.experiments.xor.protocol import protocol_from
from pathspace.experiments.xor.report import report
from pathspace.extras import install

if TYPE_CHECKING:
    from pathlib import Path

    from pathspace.experiments.execution import Surroundings
    from pathspace.experiments.layers import Layer
    from pathspace.experiments.recipes import Recipe

NETWORKS = "networks"  # in the folder of the table, until all are done


def reproduce(recipe: Recipe, size: str, options: Layer, around: Surroundings) -> list[Result]:
    """Train all networks and report.

    Args:
        recipe: Its title, and its settings by size.
        size: A size of the recipe; empty for the first one.
        options: Settings of the command line, laid over the recipe's.
        around: Where to write, how many processes, and whether to continue.

    Raises:
        ConfigurationError: A setting is impossible, a package is missing, or the folder holds something else.
        KeyboardInterrupt: The user stopped; the same command continues.
    """
    if find_spec("numba") is None:
        raise ConfigurationError(f"The package 'numba' is missing: {install('sequences')}.")
    begun = begun_table(recipe, size, options, around, protocol_from, others=(NETWORKS,))
    with begun as (protocol, configuration, output):
        kept = make_folder(output / NETWORKS)
        results = all_results(
            cells(protocol),
            partial(compute, protocol=protocol, folder=kept),
            output,
            around,
            read=Result.from_dict,
            told=_told,
        )
        published = load_published(recipe.name)
        found = report(
            protocol, results, title=recipe.title, configuration=configuration, published=published
        )
        write_report(found, output)
        _clear(kept)
    print_report(found, output, as_json=around.as_json)
    return results


def _clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _told(result: Result) -> str:
    last = result.looks[-1]
    return (
        f"{result.cell.steps} steps, seed {result.cell.seed}: {last.wrong:.2%} wrong after {last.passes} passes, "
        f"{result.seconds:.0f} s"
    )
