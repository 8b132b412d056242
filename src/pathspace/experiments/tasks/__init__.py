"""The registry of tasks.

A task is a function `NAME(*, data_dir, **options) -> Task` of a module. The module's dictionary
`PRESETS` has under this name the settings that `pathspace compare --task NAME` starts from. A new
task is such a function, its preset, and one line in `TASKS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import problem

if TYPE_CHECKING:
    from pathspace.experiments.tasks.task import Task

OWN = "own"  # of a file of the user's, which `pathspace compare FILE.py` names
# Modules are named, not imported, so that the command line can list the tasks without loading
# PyTorch.
TASKS = {
    "digits": "pathspace.experiments.tasks.task",
    "mnist": "pathspace.experiments.tasks.images",
    "adding": "pathspace.experiments.tasks.task",
    "characters": "pathspace.experiments.tasks.texts",
    "words": "pathspace.experiments.tasks.texts",
    "images": "pathspace.experiments.tasks.images",
    OWN: "pathspace.experiments.own",
}
OF_IMAGES = ("images",)
OF_SYMBOLS = ("characters", "words")


def build_task(
    name: str, options: Mapping[str, Any] | None = None, *, data_dir: Path | None = None
) -> Task:
    """Load or generate the data of a task; its options are those of its function."""
    check_task(name, options or {})
    return getattr(_module(name), name)(data_dir=data_dir, **(options or {}))


def check_task(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` unless there is such a task and it has these options."""
    owner = f"the task {name!r}"
    check_options(getattr(_module(name), name), options, owner, f"task_options of {owner}")


def preset(name: str) -> dict[str, Any]:
    """Return the settings that the task called `name` starts from."""
    return dict(_module(name).PRESETS[name])


def check_options(function: Any, options: Mapping[str, Any], owner: str, where: str) -> None:
    """Raise a `ConfigurationError` for the first option that `function` does not take, or whose value is impossible.

    The keyword-only parameters of a function or class but `data_dir` are its options, and their types
    say what values may be. For the error, `owner` is whose they are, and `where` where they stand.
    """
    known = keyword_options(function)
    called = function.__init__ if isinstance(function, type) else function
    hints = get_type_hints(called, include_extras=True)
    for name, value in options.items():
        if name not in known:
            raise unknown_name("option", name, known, where)
        if get_origin(hints[name]) is Literal and value not in get_args(hints[name]):
            choices = map(str, get_args(hints[name]))
            raise unknown_name("value", str(value), choices, f"the option {name!r} of {owner}")
        wanted = problem(hints[name], value)
        if wanted:
            raise ConfigurationError(f"The option {name!r} of {owner} is {value!r}: give {wanted}.")


def keyword_options(function: Any) -> list[str]:
    """Return the names of the keyword-only parameters of a function or class; where data lies is no option."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "data_dir"]


def _module(name: str) -> Any:
    if name not in TASKS:
        raise unknown_name("task", name, TASKS, "--task")
    return import_module(TASKS[name])
