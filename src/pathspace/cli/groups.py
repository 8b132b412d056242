"""Options that several commands take together: a dataclass for each group, whose fields the command line sees."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathspace.cli.options import (
    AddressOption,
    BatchOption,
    ClipStepOption,
    DataOption,
    DeviceOption,
    EngineOption,
    EpochsOption,
    FreshOption,
    JsonOption,
    MethodsOption,
    OutputOption,
    PlainOption,
    QuietOption,
    RatesOption,
    ResumeOption,
    SeedsOption,
    SetOption,
    ThreadsOption,
    WorkersOption,
    names_in,
    numbers_in,
)
from pathspace.experiments.errors import ConfigurationError

if TYPE_CHECKING:
    from pathspace.experiments.folders import Surroundings


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclasses as parameters of their own, for typer to read.

    A parameter whose annotation is a dataclass stands for one parameter for each field, with its name, annotation and
    default; the command gets the dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        p.name: p.annotation
        for p in signature.parameters.values()
        if isinstance(p.annotation, type) and is_dataclass(p.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            flat += inspect.signature(groups[name], eval_str=True).parameters.values()
        else:
            flat.append(parameter)

    def flattened(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flattened.__name__, flattened.__doc__ = command.__name__, command.__doc__
    flattened.__annotations__ = {p.name: p.annotation for p in flat}
    flattened.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]
    )
    return flattened


@dataclass(frozen=True)
class SettingOptions:
    """How networks are trained."""

    epochs: EpochsOption = None
    batch_size: BatchOption = None
    clip_step: ClipStepOption = None
    settings: SetOption = None
    threads: ThreadsOption = None
    plain_rnn: PlainOption = None

    def _by_name(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "settings"}

    def chosen(self, **more: Any) -> dict[str, Any]:
        """Return the settings that were given, with more of them by name; None stands for one that was not.

        Raises:
            ConfigurationError: A value is out of its range, or given twice; says of which option.
        """
        from pathspace.experiments.layers import check_setting, parse_settings
        from pathspace.experiments.settings import Settings

        given = {name: value for name, value in (more | self._by_name()).items() if value is not None}
        for name, value in given.items():
            check_setting(Settings, name, value, f"--{name.replace('_', '-')}")
        by_set = parse_settings(self.settings or [])
        if twice := sorted(given.keys() & by_set.keys()):
            option = twice[0].replace("_", "-")
            raise ConfigurationError(
                f"{twice[0]!r} is given by --{option} and by --set: leave one of them out."
            )
        return {**by_set, **given}


@dataclass(frozen=True)
class TableOptions(SettingOptions):
    """How networks are trained by several methods."""

    methods: MethodsOption = None
    seeds: SeedsOption = None
    learning_rates: RatesOption = None

    def _by_name(self) -> dict[str, Any]:
        return super()._by_name() | {
            "methods": names_in(self.methods, "--methods"),
            "learning_rates": numbers_in(self.learning_rates, "--learning-rates"),
        }


@dataclass(frozen=True)
class SurroundingOptions:
    """What does not change results, but for the last bits; see `commands.Surroundings`."""

    output: OutputOption = None
    data_dir: DataOption = None
    device: DeviceOption = "cpu"
    resume: ResumeOption = False
    fresh: FreshOption = False
    as_json: JsonOption = False
    quiet: QuietOption = False

    def surroundings(self, name: str, folders: list[str]) -> Surroundings:
        """Return where a command works.

        Args:
            name: Of the folder below `runs`, where no other is given.
            folders: Gets the folder once it is known, as options that go on there.
        """
        from pathspace.experiments.folders import Surroundings

        same = {field.name: getattr(self, field.name) for field in fields(SurroundingOptions)}
        return Surroundings(
            **same,
            default=Path("runs") / name,
            chosen=lambda folder: folders.append(shlex.join(["--output", str(folder), *self._not_kept()])),
        )

    def _not_kept(self) -> list[str]:
        """Return the options that going on needs and that no folder keeps, as they are no settings."""
        data_dir = ["--data-dir", str(self.data_dir)] if self.data_dir else []
        return data_dir + (["--device", self.device] if self.device != "cpu" else [])


@dataclass(frozen=True)
class EngineOptions(SurroundingOptions):
    """The same of a command that does several runs: who does them, and how many at a time."""

    workers: WorkersOption = None
    engine: EngineOption = "local"
    address: AddressOption = ""

    def surroundings(self, name: str, folders: list[str]) -> Surroundings:
        """See above.

        Raises:
            ConfigurationError: There is no such engine, the address fits none, or there are no workers.
        """
        from pathspace.experiments.runner import check_engine

        check_engine(self.engine, self.address)
        if self.workers is not None and self.workers < 1:
            raise ConfigurationError(
                f"The option --workers is {self.workers}: give a whole number from 1 on."
            )
        around = super().surroundings(name, folders)
        around = replace(around, processes=self.workers, engine=self.engine, address=self.address)
        return around.absolute() if self.engine == "ray" else around  # whose processes work in other folders

    def _not_kept(self) -> list[str]:
        engine = ["--engine", self.engine] if self.engine != "local" else []
        return super()._not_kept() + engine + (["--address", self.address] if self.address else [])
