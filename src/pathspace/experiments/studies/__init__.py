"""Studies: what a recipe measures besides its comparison.

A study is a module with a function `study(comparison, monitor, *, data_dir, **options)`
that returns sections for the report of the comparison. A recipe names it in its table `[study]`:

    [study]
    name = "second-term"
    [study.small]       # options of this size
    hidden = [50, 200]  # why
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import unknown_name
from pathspace.experiments.monitor import UNHEARD, Monitor
from pathspace.experiments.tasks import check_options

if TYPE_CHECKING:
    from pathspace.experiments.compare import Comparison
    from pathspace.experiments.report.document import Section

# Modules are named, not imported, so that recipes can be listed without loading PyTorch.
STUDIES = {
    "second-term": "pathspace.experiments.studies.second_term",
    "cost": "pathspace.experiments.studies.cost",
    "unification": "pathspace.experiments.studies.unification",
}


def check_study(name: Any, options: Mapping[str, Any], where: str) -> None:
    """Raise a `ConfigurationError` unless there is such a study and it has these options."""
    if not isinstance(name, str) or name not in STUDIES:
        raise unknown_name("study", str(name), STUDIES, where)
    check_options(import_module(STUDIES[name]).study, options, "the study", where)


def run_study(
    name: str,
    options: Mapping[str, Any],
    comparison: Comparison,
    data_dir: Path | None,
    monitor: Monitor = UNHEARD,
) -> list[Section]:
    """Do a study.

    Args:
        name: A name in `STUDIES`.
        options: What it takes.
        comparison: What the recipe's comparison gave.
        data_dir: Where tasks look for data sets.
        monitor: Told how far it is.

    Returns:
        Sections for the report.

    Raises:
        ConfigurationError: There is no such study, or it cannot be done.
    """
    check_study(name, options, f"the study {name!r}")
    return import_module(STUDIES[name]).study(comparison, monitor, data_dir=data_dir, **options)
