"""The errors that users of the experiments are meant to read."""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigurationError(ValueError):
    """Something that was asked for cannot be done: says what is wrong, where, and what to do."""


class StorageError(ConfigurationError):
    """Results could not be written: a disk is full, or a folder is no longer there."""


def unknown_name(kind: str, name: str, known: Iterable[str], where: str) -> ConfigurationError:
    """Return the error for a name that no registry holds.

    Args:
        kind: What the name stands for, for example `"method"`.
        name: The unknown name.
        known: The known names, in the order to print them in.
        where: The option or file that holds the name.
    """
    names = [*known]
    nearest = "".join(
        f" Did you mean {other!r}?" for other in get_close_matches(str(name), names, 1)
    )
    return ConfigurationError(
        f"Unknown {kind} {name!r} in {where}: choose from {', '.join(names)}.{nearest}"
    )
