"""Results on disk: whole files and writable folders, or an error that says what to do."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pathspace.experiments.errors import ConfigurationError, StorageError
from pathspace.tools import files

T = TypeVar("T")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file as `files.write_atomically` does, by a function that is called once with the open file.

    Raises:
        StorageError: The folder cannot be written to, or has no room. `path` is then what it was
            before.
    """
    with clear_failure(path):
        files.write_atomically(path, write)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically."""
    write_atomically(path, lambda file: file.write(content))


def finite(value: float | None) -> float | None:
    """Return a number for JSON, which has no word for one that is not finite: None stands for it."""
    return value if value is not None and math.isfinite(value) else None


def as_json(value: Any) -> bytes:
    """Return `value` as strict JSON.

    Raises:
        ValueError: `value` holds a number that is not finite: JSON has no word for it.
    """
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as `as_json` returns it, atomically."""
    write_bytes(path, as_json(value))


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a table as CSV, with empty cells for what is missing or not finite."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        # results that were read back no longer say which of the numbers that are not finite it was
        writer.writerow([finite(v) if isinstance(v, float) else v for v in row])
    return text.getvalue().encode()


def write_checked(path: Path, values: Mapping[str, Any]) -> None:
    """Write values to `path` as `write_json` does, with a checksum of the rest of it."""
    write_json(path, {**values, "checksum": _checksum(values)})


def read_checked(path: Path, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Return what `read` makes of the values that `write_checked` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigurationError: It cannot be read, is damaged, or `read` cannot do with it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("checksum", None) != _checksum(values):
            raise ValueError("its checksum does not fit")
        return read(values)
    except FileNotFoundError:
        raise
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The result {str(path)!r} cannot be read ({error}): delete it and give the command again."
        ) from error


def _checksum(values: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def remove_file(path: Path) -> None:
    """Remove a file, if there is one.

    Raises:
        StorageError: It cannot be removed, as where a folder has its name.
    """
    with clear_failure(path):
        path.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """Create a folder, and those around it, where they are missing.

    Raises:
        StorageError: It cannot be created.
    """
    with clear_failure(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def writable_folder(path: Path, where: str) -> Path:
    """Make sure that files can be written to a folder, which need not exist yet, and leave things as they were.

    A command that is refused after this leaves no empty folder behind; one that goes on calls
    `make_folder`.
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        raise ConfigurationError(
            f"Cannot write to the folder {str(path)!r} of {where} ({error.strerror}): choose another folder."
        ) from error
    return path


def picture_file(picture: Path | None) -> Path | None:
    """Return the file of the option `--picture`, wherever the code of a model goes; None where none is asked for."""
    if picture is None:
        return None
    if picture.suffix.lower() != ".png":
        raise ConfigurationError(f"--picture {str(picture)!r}: give a name that ends in .png.")
    writable_folder(picture.parent, "--picture")
    return picture.absolute()


def write_picture(file: Path, content: bytes) -> None:
    """Write the file that `picture_file` returned."""
    write_bytes(make_folder(file.parent) / file.name, content)


@contextmanager
def clear_failure(path: Path) -> Iterator[None]:
    """Turn what the system says of a file that cannot be written into a `StorageError` that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides it
        if not isinstance(cause, OSError):
            raise
        raise StorageError(
            f"Cannot write {str(path)!r} ({cause.strerror}): make room there, or choose another folder."
        ) from error
