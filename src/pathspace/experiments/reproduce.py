"""What `pathspace reproduce` does: the recipe of an experiment, of several in parts, or of an engine of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from pathspace.experiments import configuration as configurations
from pathspace.experiments import folders
from pathspace.experiments.compare import Comparison, check_task_of
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.devices import chosen_device
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.execution import (
    Surroundings,
    execute,
    holds_results,
    other_settings,
)
from pathspace.experiments.folders import PAGE
from pathspace.experiments.layers import Layer
from pathspace.experiments.recipes import ENGINES, Recipe, load_recipe
from pathspace.experiments.report.comparison import parts_report
from pathspace.experiments.report.document import print_report, write_report
from pathspace.experiments.settings import settings_from
from pathspace.experiments.storage import write_json
from pathspace.experiments.terminal import output_console, print_json, print_line


def run_reproduce(name: str, size: str, options: Layer, around: Surroundings) -> dict[str, Comparison]:
    """Do what `pathspace reproduce` was asked for; see there. Returns the comparisons by recipe, if any."""
    recipe = load_recipe(name)
    if recipe.engine:
        if chosen_device(around.device) != "cpu" and around.device != "auto":
            raise ConfigurationError(
                f"The recipe {name!r} computes on the processor alone: leave --device {around.device} out."
            )
        import_module(f"{ENGINES[recipe.engine]}.command").reproduce(recipe, size, options, around)
        return {}
    if recipe.parts:
        return _reproduce_parts(recipe, size, options, around)
    done = execute(_asked(recipe, size, options), around, given=bool(size or options[1]), studied=recipe)
    print_report(done.report, done.folder, as_json=around.as_json)
    return {name: done.comparison}


def _asked(recipe: Recipe, size: str, options: Layer) -> Configuration:
    size = size or next(iter(recipe.sizes), "")
    where, chosen = options
    if "methods" in chosen and "baselines" not in chosen:
        # Whoever picks some of a claim's methods means its baselines among them.
        kept = [name for name in settings_from(*recipe.layers(size)).baselines if name in chosen["methods"]]
        options = where, {**chosen, "baselines": kept}
    settings = settings_from(*recipe.layers(size), options)
    return Configuration("reproduce", recipe.title, settings, recipe=recipe.name, size=size)


def _reproduce_parts(
    recipe: Recipe, size: str, options: Layer, around: Surroundings
) -> dict[str, Comparison]:
    """Run the parts of a recipe, each in a folder of its own, and bring their results together on one page.

    Parts that are done are not done again, so the same command continues what was stopped.
    """
    # all of them: what one refuses, as its settings or its data, is refused before hours of another
    asked = {part: _asked(load_recipe(part), size, options) for part in recipe.parts}
    parts = _Parts(recipe, asked, around, given=bool(size or options[1]))
    with folders.taken(around, parts.goes_on, parts.check) as output:
        settled = parts.settle(output)
        known = parts.begun(output)
        if around.fresh:
            folders.clear_report(output)
            for part in known:  # also those that the command may be stopped before it comes to
                configurations.clear(output / part)
                configurations.write(settled[part], output / part)
        content = configurations.parts_as_dict(recipe.name, recipe.title, settled)
        write_json(output / folders.FILE, content)
        around.chosen(output)
        done = {}
        for part, configuration in settled.items():
            here = replace(
                around,
                output=output / part,
                resume=not around.fresh and part in known,
                chosen=lambda _folder: None,
            )
            done[part] = execute(configuration, here, given=True)
            if not around.as_json:
                print_report(done[part].report, output / part)
        comparisons = {part: each.comparison for part, each in done.items()}
        page = write_report(parts_report(comparisons, title=recipe.title, configuration=content), output)
    if around.as_json:
        results = [each.report.results for each in done.values()]
        print_json(results[0] if len(results) == 1 else results)
    else:
        print_line(output_console(), f"All parts: {page}")
    return comparisons


@dataclass(frozen=True)
class _Parts:
    """What was asked of the parts of a recipe, and what a folder holds of them.

    Attributes:
        recipe: The recipe of the parts.
        asked: The configuration of each part.
        around: Where to write, and whether to continue.
        given: Whether any of the settings was chosen; else `--resume` takes those of the folder.
    """

    recipe: Recipe
    asked: dict[str, Configuration]
    around: Surroundings
    given: bool

    def begun(self, output: Path) -> set[str]:
        """Return the parts that a folder holds already."""
        return {part for part in self.recipe.parts if folders.is_own(output / part)}

    def goes_on(self, output: Path) -> bool:
        """Say whether a folder holds unfinished parts that this command continues."""
        if not self.begun(output) or (output / PAGE).exists():
            return False
        try:
            stored = configurations.read_parts(output)
        except ConfigurationError:
            return False
        return (self.around.resume and not self.given) or configurations.are_same(stored, self.asked)

    def starts_over(self, output: Path) -> bool:
        """Say whether nothing in a folder is taken over."""
        return self.around.fresh or not (self.begun(output) or holds_results(output))

    def check(self, output: Path) -> None:
        """Refuse what cannot be done before anything in a folder is changed.

        Raises:
            ConfigurationError: There is nothing to resume, or a part does not fit this machine or its task.
        """
        if self.around.resume and not self.begun(output):
            raise folders.nothing_to_resume(output)
        if not self.starts_over(output):
            return
        for configuration in self.asked.values():
            self.around.runner(configuration.settings.threads)
            check_task_of(configuration.settings, self.around.data_dir)

    def settle(self, output: Path) -> dict[str, Configuration]:
        """Return the configurations to run: those asked for, or those that the folder holds.

        Raises:
            ConfigurationError: The folder holds runs with other settings.
        """
        if self.starts_over(output):
            return self.asked
        unfinished = not (output / PAGE).exists()
        stored = configurations.read_parts(output)
        takes_stored = self.around.resume and not self.given
        if not takes_stored and not configurations.are_same(stored, self.asked):
            raise other_settings(output, ("reproduce", self.recipe.name), unfinished=unfinished)
        if not (unfinished or self.around.resume or self.around.quiet):
            folders.say_finished(output)
        return stored if takes_stored else self.asked
