"""The modules that a trace leaves to the plain rule, and those that a strict trace would have to leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

from pathspace.network.errors import UntraceableError

Outside = nn.Module | type[nn.Module] | str
"""A module, a class of modules, a path, or a pattern of paths."""


def outside_names(model: nn.Module, outside: Outside | Iterable[Outside]) -> set[str]:
    """Return the paths of the modules to leave outside.

    Raises:
        ValueError: something in ``outside`` means no module of the model.
    """
    if isinstance(outside, (str, nn.Module, type)):
        outside = [outside]
    by_path = dict(model.named_modules())
    names: set[str] = set()
    for item in outside:
        chosen = _chosen(by_path, item)
        if not chosen:
            some = ", ".join(f"'{n}'" for n in list(by_path)[1:9])
            shown = item.__name__ if isinstance(item, type) else repr(item)
            raise ValueError(
                f"outside={shown} is no module of the model; its modules are {some}, ..."
            )
        names |= chosen
    return names


def _chosen(by_path: dict[str, nn.Module], item: Outside) -> set[str]:
    if isinstance(item, nn.Module):
        return {path for path, module in by_path.items() if module is item}
    if isinstance(item, type):  # the whole model is no part of itself
        return {path for path, module in by_path.items() if path and isinstance(module, item)}
    if item in by_path:
        return {item}
    return {path for path in by_path if path and fnmatchcase(path, item)}


def with_all_obstacles(
    first: UntraceableError,
    model: nn.Module,
    outside: set[str],
    attempt: Callable[[set[str]], object],
) -> UntraceableError:
    """Return the refusal of a strict trace, extended by all further refusals and by the modules to leave outside.

    Each obstacle's module is left outside, and the trace goes on to the next one.

    Args:
        first: the first refusal.
        model: the model.
        outside: paths of the modules that are left outside already.
        attempt: traces with other modules outside.

    Returns:
        ``first`` itself where it is the only one.
    """
    left = set(outside)
    refusals = [first]
    rest = _collect_obstacles(refusals, model, left, attempt)
    if len(refusals) == 1:
        return first
    added = sorted(path for path in left - outside if not _is_inside(path, left))
    advice = f"{first.advice}. " if first.advice else ""
    advice += (
        f"It is one of {len(refusals)} obstacles:\n{_told(refusals)}\nReplace them, or leave them to the plain rule:\n"
        f"outside={sorted(outside) + added}{rest}"
    )
    return type(first)(first.operation, first.module, first.reason, advice)


def _collect_obstacles(
    refusals: list[UntraceableError],
    model: nn.Module,
    left: set[str],
    attempt: Callable[[set[str]], object],
) -> str:
    """Trace again until nothing is refused, each time without the module of the last refusal.

    Further refusals are added to ``refusals``, and paths of modules to ``left``.

    Returns:
        A sentence about why it ended, if not because nothing is refused any more.
    """
    paths = {path for path, _ in model.named_modules()}
    while True:
        path = refusals[-1].module.partition(".parametrizations.")[0]
        while path in left:
            path = path.rpartition(".")[0]
        if not path or path not in paths:
            operation = refusals[-1].operation
            return f"\nThe last one ('{operation}') stands in the whole model's own forward: put it into a module"
        left.add(path)
        try:
            attempt(left)
        except UntraceableError as error:
            refusals.append(error)
        except Exception as error:
            return f"\nWithout these the trace ends in another error: {error}"
        else:
            return ""


def _is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether a module is a part of one of some others."""
    return any(path.startswith(f"{other}.") for other in others)


def _told(refusals: list[UntraceableError]) -> str:
    """Describe each operation and reason in a line, with the modules in which it occurs."""
    places: dict[tuple[str, str], list[str]] = {}
    for one in refusals:
        places.setdefault((one.operation, one.reason), []).append(
            f"'{one.module}'" if one.module else "forward"
        )
    return "\n".join(
        f"  '{op}' in {', '.join(some)}: {reason}" for (op, reason), some in places.items()
    )
