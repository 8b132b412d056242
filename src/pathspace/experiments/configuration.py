"""The exact configuration of a command, as `config.json` in its output folder; what `--resume` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathspace.experiments import checkpoint, folders, jobs
from pathspace.experiments.compare import RUNS
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.folders import FILE, PAGE, clear_report, is_own, nothing_to_resume, read_content
from pathspace.experiments.layers import plain_values
from pathspace.experiments.runner import versions
from pathspace.experiments.selection import is_tuned
from pathspace.experiments.settings import FIRST_TUNING_SEED, Settings, settings_from
from pathspace.experiments.storage import remove_file, write_json

JOURNAL = "sweep.journal"
RUN_FILES = (jobs.RESULT, checkpoint.FILE)


@dataclass(frozen=True)
class Configuration:
    """What a command was asked for.

    Attributes:
        command: `"compare"`, `"train"`, `"reproduce"` or `"sweep"`.
        title: The headline of the report.
        settings: All settings, defaults included.
        recipe: The name of the recipe, or empty.
        size: The size of the recipe, or empty.
        seed: The one seed of `train`; None elsewhere.
        sweep: What a sweep searches, as `sweep.plan.Plan.as_dict` gives it; empty elsewhere.
    """

    command: str
    title: str
    settings: Settings
    recipe: str = ""
    size: str = ""
    seed: int | None = None
    sweep: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with seeds and versions spelled out."""
        settings = self.settings
        if self.sweep:  # none of its runs is one to report
            seeds, tuning_seeds = [], [FIRST_TUNING_SEED + i for i in range(settings.seeds)]
        else:
            seeds = list(range(settings.seeds)) if self.seed is None else [self.seed]
            tuned = self.seed is None and is_tuned(settings)
            tuning_seeds = [FIRST_TUNING_SEED + i for i in range(settings.tuning_seeds)] if tuned else []
        return {
            "command": self.command,
            "title": self.title,
            "recipe": self.recipe,
            "size": self.size,
            "seed": self.seed,
            "settings": plain_values(settings),
            "seeds": seeds,
            "tuning_seeds": tuning_seeds,
            **({"sweep": dict(self.sweep)} if self.sweep else {}),
            "versions": versions(),
        }

    def is_same(self, other: Configuration) -> bool:
        """Say whether another command was asked for the same."""
        return folders.is_same(self.as_dict(), other.as_dict())


def parts_as_dict(recipe: str, title: str, parts: Mapping[str, Configuration]) -> dict[str, Any]:
    """Return what `config.json` holds of a recipe of several parts, each in a folder of its own."""
    return {
        "command": "reproduce",
        "title": title,
        "recipe": recipe,
        "parts": {name: part.as_dict() for name, part in parts.items()},
        "versions": versions(),
    }


def write(configuration: Configuration, output: Path) -> None:
    """Write `config.json`, atomically."""
    write_json(output / FILE, configuration.as_dict())


def read(output: Path) -> Configuration:
    """Read `config.json`.

    Raises:
        ConfigurationError: There is none, it is broken, it is of a table or of several parts, or it was written by
            other versions, whose results differ.
    """
    content = _content(output)
    if "protocol" in content or "parts" in content:
        raise _other_kind(output, content)
    return _parsed(output, content)


def read_parts(output: Path) -> dict[str, Configuration]:
    """Read the parts of a recipe in `config.json`.

    Raises:
        ConfigurationError: As of `read`.
    """
    content = _content(output)
    parts = content.get("parts")
    if not isinstance(parts, dict):
        raise _other_kind(output, content)
    return {name: _parsed(output, content) for name, content in parts.items()}


def are_same(parts: Mapping[str, Configuration], asked: Mapping[str, Configuration]) -> bool:
    """Say whether the parts of a recipe are those that were asked for."""
    return parts.keys() == asked.keys() and all(parts[name].is_same(asked[name]) for name in asked)


def _content(output: Path) -> dict[str, Any]:
    try:
        return read_content(output)
    except FileNotFoundError as error:
        raise nothing_to_resume(output) from error
    except (OSError, ValueError) as error:
        raise _unreadable(output, error) from error


def _other_kind(output: Path, content: Mapping[str, Any]) -> ConfigurationError:
    command = " ".join(str(content[key]) for key in ("command", "recipe") if content.get(key))
    return ConfigurationError(
        f"The folder {str(output)!r} holds results of `pathspace {command}`: give another --output, or start over with "
        "--fresh."
    )


def _unreadable(output: Path, why: object) -> ConfigurationError:
    return ConfigurationError(f"{str(output / FILE)!r} cannot be read ({why}): start over with --fresh.")


def _parsed(output: Path, content: Any) -> Configuration:
    try:
        stored = dict(content["versions"])
        for name in ("command", "title", "recipe", "size"):
            if not isinstance(content[name], str):
                raise TypeError(f"{name!r} is {content[name]!r}")
        if not (content["seed"] is None or type(content["seed"]) is int):
            raise TypeError(f"'seed' is {content['seed']!r}")
        configuration = Configuration(
            command=content["command"],
            title=content["title"],
            settings=settings_from(("'settings'", content["settings"])),
            recipe=content["recipe"],
            size=content["size"],
            seed=content["seed"],
            sweep=dict(content.get("sweep", {})),
        )
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise ConfigurationError(f"In {str(output / FILE)!r}: {error}") from error
        raise _unreadable(output, error) from error
    for name, version in versions().items():
        if stored.get(name) != version:
            raise ConfigurationError(
                f"The runs in {str(output)!r} were begun with {name} {stored.get(name)}, but this is "
                f"{version}, which may give other results: start again with --fresh, or install "
                "the old version."
            )
    return configuration


def is_begun(output: Path) -> bool:
    """Say whether a command has done something in `output`."""
    if not is_own(output):
        return False
    content = _content(output)
    if isinstance(parts := content.get("parts"), dict):
        return any(is_own(output / part) for part in parts)
    if "protocol" in content:  # of a table, whose cells lie elsewhere
        return True
    return (output / JOURNAL).exists() or any(any((output / RUNS).glob(f"*/{name}")) for name in RUN_FILES)


def unfinished(output: Path) -> bool:
    """Say whether a command has done something in `output` and has not written its report."""
    return is_begun(output) and not (output / PAGE).exists()


def is_same(output: Path, asked: Configuration) -> bool:
    """Say whether the runs in `output` are those that were asked for, of this version."""
    try:
        return read(output).is_same(asked)
    except ConfigurationError:
        return False


def clear(output: Path) -> None:
    """Remove the runs and the report of an earlier command, and nothing else, from `output`."""
    clear_report(output)
    remove_file(output / JOURNAL)
    for folder in sorted((output / RUNS).glob("*/")):
        for name in RUN_FILES:
            remove_file(folder / name)
        if not any(folder.iterdir()):
            folder.rmdir()
