"""What `pathspace reproduce` does: the recipe of an experiment, of several in parts, or of an engine of its own."""

from __future__ import annotations

from dataclasses import replace

from pathspace.experiments import folders
from pathspace.experiments.compare import Comparison
from pathspace.experiments.configuration import Configuration, Parts, begun
from pathspace.experiments.devices import chosen_device
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.execution import execute
from pathspace.experiments.folders import Context
from pathspace.experiments.layers import Layer
from pathspace.experiments.recipes import Recipe, load_recipe
from pathspace.experiments.report.comparison import parts_report
from pathspace.experiments.report.document import print_report, write_report
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tables import reproduce_table
from pathspace.experiments.terminal import output_console, print_json, print_line


def run_reproduce(name: str, size: str, options: Layer, context: Context) -> dict[str, Comparison]:
    """Do what `pathspace reproduce` was asked for; see there. Returns the comparisons by recipe, if any."""
    recipe = load_recipe(name)
    if recipe.engine:
        if chosen_device(context.device) != "cpu" and context.device != "auto":
            raise ConfigurationError(
                f"The recipe {name!r} computes on the processor alone: leave --device {context.device} out."
            )
        reproduce_table(recipe, size, options, context)
        return {}
    if recipe.parts:
        return _reproduce_parts(recipe, size, options, context)
    done = execute(
        _asked(recipe, size, options), context, given=bool(size or options[1]), studied=recipe
    )
    print_report(done.report, done.folder, as_json=context.as_json)
    return {name: done.comparison}


def _asked(recipe: Recipe, size: str, options: Layer) -> Configuration:
    size = size or next(iter(recipe.sizes), "")
    where, chosen = options
    if "methods" in chosen and "baselines" not in chosen:
        # Whoever picks some of a claim's methods means its baselines among them.
        kept = [
            name
            for name in settings_from(*recipe.layers(size)).baselines
            if name in chosen["methods"]
        ]
        options = where, {**chosen, "baselines": kept}
    settings = settings_from(*recipe.layers(size), options)
    return Configuration("reproduce", recipe.title, settings, recipe=recipe.name, size=size)


def _reproduce_parts(
    recipe: Recipe, size: str, options: Layer, context: Context
) -> dict[str, Comparison]:
    """Run the parts of a recipe, each in a folder of its own, and bring their results together on one page.

    Parts that are done are not done again, so the same command continues what was stopped.
    """
    asked = Parts(
        recipe.name,
        recipe.title,
        {part: _asked(load_recipe(part), size, options) for part in recipe.parts},
    )
    with begun(asked, context, given=bool(size or options[1])) as (settled, output):
        done = {}
        for part, configuration in settled.parts.items():
            known = folders.is_own(output / part)
            here = replace(
                context,
                output=output / part,
                resume=known,
                fresh=context.fresh and not known,
                chosen=lambda _folder: None,
            )
            done[part] = execute(configuration, here, given=True)
            if not context.as_json:
                print_report(done[part].report, output / part)
        comparisons = {part: each.comparison for part, each in done.items()}
        found = parts_report(comparisons, title=recipe.title, configuration=settled.as_dict())
        page = write_report(found, output)
    if context.as_json:
        results = [each.report.results for each in done.values()]
        print_json(results[0] if len(results) == 1 else results)
    else:
        print_line(output_console(), f"All parts: {page}")
    return comparisons
