"""What the commands of the command line do, once their options are read."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from pathspace.experiments import configuration as configurations
from pathspace.experiments import folders, invariance
from pathspace.experiments.compare import Comparison, check_task_of, compare, train
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.devices import chosen_device
from pathspace.experiments.engine import check_parts
from pathspace.experiments.engines import executor_for
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.executor import Executor
from pathspace.experiments.folders import PAGE
from pathspace.experiments.layers import Layer, read_value
from pathspace.experiments.live import monitor
from pathspace.experiments.processes import ALONE, Processes
from pathspace.experiments.published import Published, load_published
from pathspace.experiments.recipes import ENGINES, Recipe, load_recipe
from pathspace.experiments.report import (
    build_table,
    claim_table,
    conclusion,
    pairs_of,
    pairs_table,
    print_table,
    write_parts,
    write_report,
)
from pathspace.experiments.report.files import as_json
from pathspace.experiments.settings import OF_A_TABLE, refuse_unused, settings_from
from pathspace.experiments.storage import write_json
from pathspace.experiments.studies import run_study
from pathspace.experiments.terminal import output_console, print_json, print_line
from pathspace.progress import shown

COMPARE_TITLE = "The same network from two starts of the same function"


@dataclass(frozen=True)
class Surroundings(folders.Wanted):
    """Options of every command that do not change results, but for the last bits.

    Attributes:
        data_dir: Where tasks look for data sets.
        processes: Runs at a time; None: see `engines.executor_for`.
        as_json: Print the results as JSON on standard output instead of a table.
        device: Where runs compute, a name in `devices.DEVICES`.
        quiet: Show no progress.
        chosen: Told the folder once it is known.
        engine: Who does the runs, a name in `engines.ENGINES`.
        address: Of a Ray cluster; empty: none.
        joined: The processes that do a run together, for `train`.
    """

    data_dir: Path | None = None
    processes: int | None = 1
    as_json: bool = False
    device: str = "cpu"
    quiet: bool = False
    chosen: Callable[[Path], object] = lambda _folder: None
    engine: str = "local"
    address: str = ""
    joined: Processes = ALONE

    def absolute(self) -> Surroundings:
        """Return the same with folders that any process finds."""
        output, data_dir = (path and path.absolute() for path in (self.output, self.data_dir))
        return replace(self, output=output, data_dir=data_dir, default=self.default.absolute())

    @property
    def run_device(self) -> str:
        """Where runs compute. A cluster's machines may have what this one has not.

        Raises:
            ConfigurationError: There is no such device here, and runs are to be done here.
        """
        return self.device if self.address and self.device != "auto" else chosen_device(self.device)

    def executor(self, threads: int) -> Executor:
        """Return who does the runs, with so many threads each."""
        return executor_for(
            self.engine, self.processes, address=self.address, threads=threads, device=self.run_device
        )


@dataclass(frozen=True)
class Done:
    """A comparison, what it was asked for, the folder of its report, and what a study of it found."""

    comparison: Comparison
    configuration: Configuration
    folder: Path
    found: Sequence[RenderableType] = ()


def run_compare(options: Layer, around: Surroundings) -> Comparison:
    """Do what `pathspace compare` was asked for; see there."""
    asked = Configuration("compare", COMPARE_TITLE, settings_from(options))
    done = _execute(asked, around, given=bool(options[1]))
    _print([done], around)
    return done.comparison


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
    done = _execute(_asked(recipe, size, options), around, given=bool(size or options[1]), studied=recipe)
    _print([done], around)
    console = Console(stderr=True) if around.as_json else output_console()
    for part in done.found:
        console.print(part, highlight=False)
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

    Parts that are done are not done again until the whole is, so the same command continues what was stopped.
    """
    # all of them: what one refuses, as its settings or its data, is refused before hours of another
    asked = {part: _asked(load_recipe(part), size, options) for part in recipe.parts}
    given = bool(size or options[1])

    def is_begun(output: Path) -> bool:
        return any(folders.is_own(output / part) for part in recipe.parts)

    def goes_on(output: Path) -> bool:
        if not is_begun(output) or (output / PAGE).exists():
            return False
        try:
            return (around.resume and not given) or configurations.are_same(
                configurations.read_parts(output), asked
            )
        except ConfigurationError:
            return False

    def begins(output: Path) -> bool:
        return around.fresh or not (is_begun(output) or _holds_results(output))

    def check(output: Path) -> None:
        if around.resume and not is_begun(output):
            raise folders.nothing_to_resume(output)
        for each in asked.values() if begins(output) else ():
            around.executor(each.settings.threads)
            check_task_of(each.settings, around.data_dir)

    with folders.taken(around, goes_on, check) as output:
        unfinished = not (output / PAGE).exists()
        if not begins(output):
            stored = configurations.read_parts(output)
            if around.resume and not given:
                asked = stored
            elif not configurations.are_same(stored, asked):
                raise _other_settings(output, ("reproduce", recipe.name), unfinished=unfinished)
        resumes = not around.fresh and (around.resume or unfinished)
        known = {part for part in recipe.parts if folders.is_own(output / part)}
        folders.clear_report(output)
        if around.fresh:
            for part in known:  # also those that the command may be stopped before it comes to
                configurations.clear(output / part)
                configurations.write(asked[part], output / part)
        content = configurations.parts_as_dict(recipe.name, recipe.title, asked)
        write_json(output / folders.FILE, content)
        around.chosen(output)
        done = {}
        for part, configuration in asked.items():
            here = replace(
                around, output=output / part, resume=resumes and part in known, chosen=lambda _folder: None
            )
            done[part] = _execute(configuration, here, given=True)
            if not around.as_json:
                _print([done[part]], here)
        comparisons = {part: each.comparison for part, each in done.items()}
        page = write_parts(comparisons, output, title=recipe.title, configuration=content)
    if around.as_json:
        _print(list(done.values()), around)
    else:
        print_line(output_console(), f"All parts: {page}")
    return comparisons


def _study(
    recipe: Recipe, comparison: Comparison, size: str, output: Path, around: Surroundings
) -> list[RenderableType]:
    if around.run_device != "cpu":  # which this machine may lack: the runs may have been a cluster's
        Console(stderr=True).print("The study computes on the processor.", highlight=False)
    name = recipe.study["name"]
    with Console(stderr=True, quiet=around.quiet).status(f"Studying the {name}"):
        return run_study(name, recipe.study_options(size), comparison, output, around.data_dir)


def run_train(
    method: str,
    start: str,
    learning_rate: float,
    seed: int,
    options: Layer,
    around: Surroundings,
    *,
    given: bool,
) -> Comparison:
    """Do what `pathspace train` was asked for; see there. `given`: whether any of the settings was chosen."""
    where, values = options
    one = {
        "methods": [method],
        "starts": [start],
        "learning_rates": [learning_rate],
        "seeds": 1,
        "tuning_seeds": 1,
    }
    refuse_unused(
        (*one, *OF_A_TABLE, "method_rates", "tuning_epochs"),
        values,
        "A single run has no setting {!r}: leave it out, and choose by --method, --start, --lr and --seed.",
    )
    settings = settings_from((where, {**values, **one}))
    if len(settings.weight_decays) > 1:
        raise ConfigurationError(
            "A single run has one weight decay: give one, such as --set weight_decays=[0.1]."
        )
    asked = Configuration("train", f"One run of {method} from the {start} start", settings, seed=seed)
    done = _execute(asked, around, given=given or bool(values))
    _print([done], around)
    return done.comparison


def run_check_invariance(
    optimizers: Sequence[str] | None,
    networks: Sequence[str] | None,
    *,
    steps: int,
    seed: int,
    as_json: bool,
    quiet: bool = False,
) -> bool:
    """Do what `pathspace check-invariance` was asked for; None stands for all. Says whether every claim held."""
    optimizers, networks = optimizers or list(invariance.CANDIDATES), networks or list(invariance.NETWORKS)
    for kind, asked, known in (
        ("optimizer", optimizers, invariance.CANDIDATES),
        ("network", networks, invariance.NETWORKS),
    ):
        for name in asked:
            if name not in known:
                raise unknown_name(kind, name, known, f"--{kind}s")
    import torch

    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for each other
    whole, done = len(optimizers) * len(networks), 0
    with shown("checked", Console(stderr=True), quiet=quiet) as show:

        def told(verdict: invariance.Verdict) -> None:
            nonlocal done
            done += 1
            show(done / whole, f"{done}/{whole}, {verdict.optimizer} on {verdict.network}")

        verdicts = invariance.check_all(optimizers, networks, steps=steps, seed=seed, told=told)
    if as_json:
        print_json(invariance.as_json(verdicts))
    else:
        invariance.print_verdicts(verdicts, output_console())
    return not any(verdict.broken for verdict in verdicts)


def _execute(
    asked: Configuration, around: Surroundings, *, given: bool, studied: Recipe | None = None
) -> Done:
    """Do all runs, and the study of a recipe that has one, and write the report."""
    with begun(asked, around, given=given) as (configuration, output, resume):
        comparison = _runs(configuration, output, around, resume=resume)
        found = (
            _study(studied, comparison, configuration.size, output, around)
            if studied and studied.study
            else []
        )
        # last: without it the same command goes on here
        write_report(
            comparison,
            output,
            title=configuration.title,
            configuration=configuration.as_dict(),
            published=_published(configuration),
        )
    return Done(comparison, configuration, output, found)


@contextmanager
def begun(
    asked: Configuration, around: Surroundings, *, given: bool
) -> Iterator[tuple[Configuration, Path, bool]]:
    """Give the folder that a command is to write to, with nobody else at work there.

    Args:
        asked: What the command was asked for.
        around: Where to write, and whether to continue.
        given: Whether any of the settings was chosen; else `--resume` takes those of the folder.

    Yields:
        What is to be run, the folder, and whether earlier runs are continued.

    Raises:
        ConfigurationError: The folder holds something else, or a setting does not fit this machine or the task.
    """
    around.executor(asked.settings.threads)  # refused before a folder is made

    def goes_on(folder: Path) -> bool:
        if not configurations.unfinished(folder):
            return False
        return (around.resume and not given) or configurations.is_same(folder, asked)

    def check(folder: Path) -> None:
        configuration, _ = _settle(asked, folder, around, given=given)
        check_task_of(configuration.settings, around.data_dir)  # before the results of an earlier command go
        for name in configuration.settings.methods:
            check_parts(configuration.settings.batch_size, name, around.joined.count)

    with folders.taken(around, goes_on, check) as output:
        # Anew: another command may have been at work here while the task was loaded.
        configuration, resume = _settle(asked, output, around, given=given)
        if not resume:
            configurations.clear(output)
            configurations.write(configuration, output)
        around.chosen(output)
        if resume and not (around.resume or around.quiet):
            print(f"Continuing the unfinished runs in {output} (--fresh starts over).", file=sys.stderr)
        yield configuration, output, resume


def _runs(configuration: Configuration, output: Path, around: Surroundings, *, resume: bool) -> Comparison:
    display, watcher = monitor(Console(stderr=True), quiet=around.quiet)
    with display:
        if configuration.seed is None:
            return compare(
                configuration.settings,
                output,
                watcher,
                data_dir=around.data_dir,
                resume=resume,
                executor=around.executor(configuration.settings.threads),
                device=around.run_device,
            )
        return train(
            configuration.settings,
            configuration.seed,
            output,
            watcher,
            data_dir=around.data_dir,
            resume=resume,
            device=around.run_device,
            processes=around.joined,
        )


def _settle(
    asked: Configuration, output: Path, around: Surroundings, *, given: bool
) -> tuple[Configuration, bool]:
    """Decide what to run and whether to continue earlier runs."""
    unfinished = configurations.unfinished(output)
    if around.fresh or not (around.resume or _holds_results(output)):
        return asked, False
    stored = configurations.read(output)
    # a sweep that is only resumed names no recipe
    is_its_own = stored.command == asked.command and (bool(asked.sweep) or stored.recipe == asked.recipe)
    if around.resume and not given and is_its_own:
        return stored, True
    if stored.is_same(asked):
        return stored, around.resume or unfinished
    recipe = "" if stored.sweep else stored.recipe  # named, it would ask for the recipe's own settings
    raise _other_settings(output, (stored.command, recipe), unfinished=unfinished)


def _holds_results(output: Path) -> bool:
    """Say whether a folder of ours holds runs, a table, or a report alone, whose runs somebody has deleted."""
    return configurations.is_begun(output) or (folders.is_own(output) and (output / PAGE).exists())


def _other_settings(output: Path, command: Sequence[str], *, unfinished: bool) -> ConfigurationError:
    if not unfinished:
        return ConfigurationError(
            f"The folder {str(output)!r} holds finished runs with other settings: give another --output, or start "
            "over with --fresh."
        )
    words = ["pathspace", *filter(None, command), "--resume", "--output", str(output)]
    return ConfigurationError(
        f"The folder {str(output)!r} holds unfinished runs with other settings: continue those by "
        f"`{shlex.join(words)}`, give another --output, or start over with --fresh."
    )


def _published(configuration: Configuration) -> Published | None:
    return load_published(configuration.recipe) if configuration.recipe else None


def _print(done: Sequence[Done], around: Surroundings) -> None:
    """Print the results: as JSON, one object or the list of the parts; or as a table and the place of the page."""
    if around.as_json:
        values = [
            as_json(each.comparison, each.configuration.as_dict(), _published(each.configuration))
            for each in done
        ]
        print_json(values[0] if len(values) == 1 else values)
        return
    for each in done:
        comparison, published = each.comparison, _published(each.configuration)
        claims = comparison.settings.baselines and comparison.choices
        console = output_console(150 if claims else 120)
        if claims:
            print_table(claim_table(comparison), console, published)
        else:
            print_table(build_table(comparison, published), console, published)
            for sentence in conclusion(comparison):
                console.print(sentence, highlight=False, markup=False)
        if pairs := pairs_of(comparison, published):
            print_table(pairs_table(comparison, pairs), console)
        print_line(console, f"Report: {each.folder / PAGE}")


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Read `--set NAME=VALUE` options; the values as `layers.read_value` takes them.

    Raises:
        ConfigurationError: There is no equals sign.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {assignment!r} has no value: write --set NAME=VALUE.")
        value = read_value(text)
        table, dot, option = name.partition(".")
        if dot:
            options = settings.setdefault(table, {})
            if not isinstance(options, dict):
                raise ConfigurationError(
                    f"{table!r} is given both as a value and as a table: give one of them."
                )
            options[option] = value
        else:
            earlier = settings.get(name)
            if isinstance(earlier, dict) and isinstance(value, dict):
                value = {**earlier, **value}
            settings[name] = value
    return settings
