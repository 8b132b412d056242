"""The registry of tasks.

A task is a module with a function `build(*, data_dir, **options) -> Task` and a dictionary
`PRESET`: the settings that `pathspace compare --task NAME` starts from. A new task is such a file
and one line in `TASKS`.
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
    "digits": "pathspace.experiments.tasks.digits",
    "mnist": "pathspace.experiments.tasks.mnist",
    "adding": "pathspace.experiments.tasks.adding",
    "characters": "pathspace.experiments.tasks.characters",
    "words": "pathspace.experiments.tasks.words",
    "images": "pathspace.experiments.tasks.images",
    OWN: "pathspace.experiments.own",
}
OF_IMAGES = ("images",)
OF_SYMBOLS = ("characters", "words")


def build_task(
    name: str, options: Mapping[str, Any] | None = None, *, data_dir: Path | None = None
) -> Task:
    """Load or generate the data of a task.

    Args:
        name: A name in `TASKS`.
        options: What the task's `build` takes, for example `{"steps": 784}` for `mnist`.
        data_dir: The folder with the data sets; see each task for what it looks for.

    Raises:
        ConfigurationError: The name or an option is unknown, a value is impossible, or the data is
            not there.
    """
    check_task(name, options or {})
    return _module(name).build(data_dir=data_dir, **(options or {}))


def check_task(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` unless there is such a task and it has these options."""
    owner = f"the task {name!r}"
    check_options(_module(name).build, options, owner, f"task_options of {owner}")


def preset(name: str) -> dict[str, Any]:
    """Return the settings that the task called `name` starts from."""
    return dict(_module(name).PRESET)


def check_options(function: Any, options: Mapping[str, Any], owner: str, where: str) -> None:
    """Raise a `ConfigurationError` for the first option that `function` does not take, or whose value is impossible.

    Args:
        function: A function or class; its keyword-only parameters but `data_dir` are the options,
            and their types say what values may be.
        options: What somebody wants to pass.
        owner: Whose options these are, for the error.
        where: Where the options stand, for the error.
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
