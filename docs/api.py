"""Writes docs/api.md from the docstrings: python docs/api.py."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

MODULES = (
    "pathspace",
    "pathspace.network",
    "pathspace.rescaling",
    "pathspace.paths",
    "pathspace.metrics",
    "pathspace.optim",
    "pathspace.nn",
)
PAGE = Path(__file__).with_name("api.md")


def page() -> str:
    """The API reference: every public name with its signature and its whole docstring."""
    parts = ["# API reference", "", "Written by `python docs/api.py` from the docstrings.", ""]
    seen: set[int] = set()
    for module_name in MODULES:
        module = import_module(module_name)
        parts += [f"## {module_name}", "", inspect.getdoc(module) or "", ""]
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value) or id(value) in seen:
                continue
            if module_name != "pathspace":
                seen.add(id(value))
            elif not inspect.ismodule(value):
                parts += [
                    f"* `{module_name}.{name}` is `pathspace.{value.__module__.split('.')[1]}.{name}`",
                    "",
                ]
                continue
            parts += _entry(module_name, name, value)
    return "\n".join(parts).rstrip() + "\n"


def _entry(module_name: str, name: str, value: object) -> list[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return [f"### `{module_name}.{name}`", "", f"`{value}`", ""]
    try:
        signature = str(inspect.signature(value)).replace("'", "")
    except ValueError:  # an exception that says no more than its base
        signature = "(message)"
    documentation = inspect.getdoc(value)
    if not documentation:
        raise SystemExit(f"{module_name}.{name} has no docstring")
    return [
        f"### `{module_name}.{name}`",
        "",
        f"`{name}{signature}`",
        "",
        "```text",
        documentation,
        "```",
        "",
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
