"""A command at work in its folder: what it continues there, its runs, its report, and what it prints."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pathspace.experiments import configuration as configurations
from pathspace.experiments import folders
from pathspace.experiments.compare import Comparison, check_task_of, compare, train
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.devices import chosen_device
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.folders import PAGE
from pathspace.experiments.monitor import Shown
from pathspace.experiments.published import load_published
from pathspace.experiments.recipes import Recipe
from pathspace.experiments.report.comparison import comparison_report
from pathspace.experiments.report.document import Report, Section, write_report
from pathspace.experiments.runner import Runner
from pathspace.experiments.studies import run_study


@dataclass(frozen=True)
class Surroundings(folders.Wanted):
    """Options of every command that do not change results, but for the last bits.

    Attributes:
        data_dir: Where tasks look for data sets.
        processes: Runs at a time; None: see `runner.Runner`.
        as_json: Print the results as JSON on standard output instead of a table.
        device: Where runs compute, a name in `devices.DEVICES`.
        quiet: Show no progress.
        chosen: Told the folder once it is known.
        engine: Who does the runs, a name in `runner.ENGINES`.
        address: Of a Ray cluster; empty: none.
    """

    data_dir: Path | None = None
    processes: int | None = 1
    as_json: bool = False
    device: str = "cpu"
    quiet: bool = False
    chosen: Callable[[Path], object] = lambda _folder: None
    engine: str = "local"
    address: str = ""

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

    def runner(self, threads: int = 1) -> Runner:
        """Return who does the runs, with so many threads each; a device that is no processor is one of a cluster."""
        gpus = int(self.run_device != "cpu")
        return Runner(self.engine, self.processes, self.address, threads, gpus)


@dataclass(frozen=True)
class Done:
    """A comparison, its report, and the folder of both."""

    comparison: Comparison
    report: Report
    folder: Path


def execute(
    asked: Configuration, around: Surroundings, *, given: bool, studied: Recipe | None = None
) -> Done:
    """Do all runs, and the study of a recipe that has one, and write the report."""
    with begun(asked, around, given=given) as (configuration, output):
        comparison = _runs(configuration, output, around)
        report = comparison_report(
            comparison,
            title=configuration.title,
            configuration=configuration.as_dict(),
            published=load_published(configuration.recipe) if configuration.recipe else None,
            more=_study(studied, comparison, configuration.size, around) if studied and studied.study else (),
        )
        write_report(report, output)  # last: without it the same command goes on here
    return Done(comparison, report, output)


@contextmanager
def begun(asked: Configuration, around: Surroundings, *, given: bool) -> Iterator[tuple[Configuration, Path]]:
    """Give the folder that a command is to write to, with nobody else at work there.

    Args:
        asked: What the command was asked for.
        around: Where to write, and whether to continue.
        given: Whether any of the settings was chosen; else `--resume` takes those of the folder.

    Yields:
        What is to be run, and the folder, with no runs in it but those that are continued, or taken.

    Raises:
        ConfigurationError: The folder holds something else, or a setting does not fit this machine or the task.
    """
    around.runner(asked.settings.threads)  # refused before a folder is made

    def goes_on(folder: Path) -> bool:
        if not configurations.unfinished(folder):
            return False
        return (around.resume and not given) or configurations.is_same(folder, asked)

    def check(folder: Path) -> None:
        configuration, _ = _settle(asked, folder, around, given=given)
        check_task_of(configuration.settings, around.data_dir)  # before the results of an earlier command go

    with folders.taken(around, goes_on, check) as output:
        # Anew: another command may have been at work here while the task was loaded.
        configuration, resume = _settle(asked, output, around, given=given)
        if not resume:
            configurations.clear(output)
            configurations.write(configuration, output)
        around.chosen(output)
        if resume and not (around.resume or around.quiet):
            if configurations.unfinished(output):
                print(f"Continuing the unfinished runs in {output} (--fresh starts over).", file=sys.stderr)
            else:
                folders.say_finished(output)
        yield configuration, output


def _runs(configuration: Configuration, output: Path, around: Surroundings) -> Comparison:
    settings = configuration.settings
    with Shown(Console(stderr=True), quiet=around.quiet) as monitor:
        if configuration.seed is None:
            return compare(
                settings,
                output,
                monitor,
                data_dir=around.data_dir,
                runner=around.runner(settings.threads),
                device=around.run_device,
            )
        return train(
            settings,
            configuration.seed,
            output,
            monitor,
            data_dir=around.data_dir,
            device=around.run_device,
        )


def _study(recipe: Recipe, comparison: Comparison, size: str, around: Surroundings) -> list[Section]:
    if around.run_device != "cpu":  # which this machine may lack: the runs may have been a cluster's
        Console(stderr=True).print("The study computes on the processor.", highlight=False)
    name = recipe.study["name"]
    with Console(stderr=True, quiet=around.quiet).status(f"Studying the {name}"):
        return run_study(name, recipe.study_options(size), comparison, around.data_dir)


def _settle(
    asked: Configuration, output: Path, around: Surroundings, *, given: bool
) -> tuple[Configuration, bool]:
    """Decide what to run and whether earlier runs are continued, finished ones too."""
    if around.fresh or not (around.resume or holds_results(output)):
        return asked, False
    stored = configurations.read(output)
    # a sweep that is only resumed names no recipe
    is_its_own = stored.command == asked.command and (bool(asked.sweep) or stored.recipe == asked.recipe)
    if around.resume and not given and is_its_own:
        return stored, True
    if stored.is_same(asked):
        return stored, True
    recipe = "" if stored.sweep else stored.recipe  # named, it would ask for the recipe's own settings
    raise other_settings(output, (stored.command, recipe), unfinished=configurations.unfinished(output))


def holds_results(output: Path) -> bool:
    """Say whether a folder of ours holds runs, a table, or a report alone, whose runs somebody has deleted."""
    return configurations.is_begun(output) or (folders.is_own(output) and (output / PAGE).exists())


def other_settings(output: Path, command: Sequence[str], *, unfinished: bool) -> ConfigurationError:
    """Return the error for a folder that `command` wrote to with other settings."""
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
