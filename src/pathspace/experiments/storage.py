"""Files that are either complete or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pathspace.experiments.errors import ConfigurationError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name beside `path`, then rename it to `path`.

    Args:
        path: The final file; an older one is replaced in one step.
        write: Called once with the open binary file.

    Raises:
        OSError: The folder cannot be written to. `path` is then what it was before.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave the new name on an empty file
        # mkstemp makes the file private; results are for sharing, as far as the user's umask allows.
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)  # noqa: PTH105 (the atomic rename, named for what it is)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as strict JSON, atomically.

    Raises:
        ValueError: `value` holds a number that is not finite: JSON has no word for it.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def writable_folder(path: Path, where: str) -> Path:
    """Create a folder for results where it is missing, and make sure that files can be written to it.

    Args:
        path: The folder.
        where: The option it came from, for the error.

    Raises:
        ConfigurationError: The folder cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write to the folder {str(path)!r} of {where} ({error.strerror}): choose another folder."
        ) from error
    return path


def _umask() -> int:
    # The umask can only be read by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
