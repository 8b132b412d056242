"""`pathspace sweep`: seeds times rates times optimizers, and any other setting, on one page.

`plan` says what is searched, `trials` lets Optuna draw points and does their runs, `report` puts
them into words and a picture. A sweep looks at the validation split alone, on the seeds that
`compare` chooses rates by: what it finds is for `compare` to report.
"""

from __future__ import annotations

from collections.abc import Sequence

from pathspace.experiments.configuration import Configuration, begun
from pathspace.experiments.context import Context
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import Layer, plain_values
from pathspace.experiments.recipes import Recipe, load_recipe, recipe_names
from pathspace.experiments.report import print_report, write_report
from pathspace.experiments.settings import OF_A_TABLE, Settings, refuse_unused, settings_from
from pathspace.experiments.sweep.plan import Plan, plan_from
from pathspace.experiments.sweep.report import report
from pathspace.experiments.sweep.trials import Sweep, sweep
from pathspace.experiments.tasks import TASKS


def run_sweep(
    name: str,
    size: str,
    options: Layer,
    context: Context,
    *,
    search: Sequence[str] | None = None,
    sampler: str | None = None,
    trials: int | None = None,
    prune: str | None = None,
) -> Sweep:
    """Do what `pathspace sweep` was asked for; see there."""
    recipe, title, settings = _settings(name, size, options)
    plan = plan_from(settings, search or (), sampler or "grid", trials, prune or "none")
    asked = Configuration(
        "sweep", title, settings, recipe=recipe, size=size, sweep=plain_values(plan)
    )
    given = bool(name or options[1] or search or sampler or trials or prune)
    with begun(asked, context, given=given) as (configuration, output):
        with context.shown() as monitor:
            runs = context.runs(output, monitor, configuration.settings.threads)
            found = sweep(configuration.settings, Plan(**configuration.sweep), runs)
        told = report(found, title=configuration.title, configuration=configuration.as_dict())
        write_report(told, output)
    print_report(told, output, as_json=context.as_json)
    return found


def _settings(name: str, size: str, options: Layer) -> tuple[str, str, Settings]:
    """Return the recipe's name, if it is one, the title of the page, and the settings."""
    where, chosen = options
    refuse_unused(
        OF_A_TABLE,
        chosen,
        "A sweep has no setting {!r}: leave it out; --seeds is the runs of each point.",
    )
    if "epochs" in chosen and "tuning_epochs" not in chosen:  # a sweep has runs of one length alone
        options = where, {**chosen, "tuning_epochs": 0}
    if name in recipe_names():
        recipe = load_recipe(name)
        _check_is_comparison(recipe)
        if "methods" in chosen and "baselines" not in chosen:
            options = where, {**options[1], "baselines": []}  # a sweep compares nothing
        return name, f"Sweep: {recipe.title}", settings_from(*recipe.layers(size), options)
    if name and name not in TASKS:
        known = dict.fromkeys([*recipe_names(), *TASKS])
        raise unknown_name("recipe or task", name, known, "sweep")
    if size:
        raise ConfigurationError(
            f"--size {size} is of a recipe: name one, such as `pathspace sweep adding`."
        )
    layers = [("sweep", {"task": name}), options] if name else [options]
    settings = settings_from(*layers)
    return "", f"Sweep of the task {settings.task}", settings


def _check_is_comparison(recipe: Recipe) -> None:
    """Refuse a recipe of several parts, or of an engine of its own."""
    if not (recipe.parts or recipe.engine):
        return
    other = "another recipe, or a task"
    if recipe.parts:
        other = f"one of its parts: {', '.join(recipe.parts)}"
    raise ConfigurationError(
        f"The recipe {recipe.name!r} is not one comparison of optimizers, which can be swept: give {other}."
    )
