"""Files that are either complete or absent, whatever happens while they are written.

A file is written under a temporary name beside it, `.NAME.*.part`, and renamed. What a killed
process leaves there is cleared by the next one that writes a file of that name, or by
`clear_leftovers`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where leftovers stay
    fcntl = None

SUFFIX = ".part"
LOCK = ".lock"
# characters of the name in the temporary one, which must not be too long for the file system
_KEPT = 100


def write_atomically(
    path: Path,
    write: Callable[[IO[bytes]], object],
    *,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a file under a temporary name beside it, then rename it; its permissions stay what they were.

    A symbolic link stays, and what it names is written. Devices and pipes are written to as they
    are.

    Args:
        path: The final file; an older one is replaced in one step.
        write: Called once with the open binary file.
        check: Called with the temporary file once it is complete. What it raises is raised, and a
            file that was there before is then untouched. Devices and pipes are not checked.

    Raises:
        OSError: It cannot be written, and the error names it. A file that was there before is then
            untouched.
    """
    try:
        _write_atomically(path, write, check)
    except OSError as error:
        if error.filename is None:  # the system names no file where a disk is full
            error.filename = str(path)
        raise


def _write_atomically(
    path: Path,
    write: Callable[[IO[bytes]], object],
    check: Callable[[Path], object] | None,
) -> None:
    target = check_writable(path)
    if target is None:
        with path.open("wb") as file:
            write(file)
        return
    clear_leftovers(target.parent, target.name)
    descriptor, temporary = _temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            # else a crash of the machine may leave the new name on an empty file
            os.fsync(file.fileno())
            if check is not None:
                check(temporary)
            # mkstemp makes the file private; results are for sharing, as far as the user's umask
            # allows.
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
            temporary.chmod(mode)
            if os.name == "nt":  # Windows renames no open file
                file.close()
            os.replace(temporary, target)  # noqa: PTH105 (the atomic rename, named for what it is)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> Path | None:
    """Return the regular file that `path` stands for, or None where it is a device or a pipe.

    Raises:
        OSError: It cannot be written: it is a folder, it or its folder is protected, or its folder
            is missing.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    target = Path(os.path.realpath(path))
    # A stream behind /dev/stdout may have no name that could be replaced.
    if not stat.S_ISREG(mode) or (path.exists() and not target.exists()):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return None
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    for needed in (target.parent, target):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(needed))
    return target


def clear_leftovers(folder: Path, name: str = "") -> None:
    """Remove temporary files whose writers are dead: those of the file `name`, or all in the folder."""
    leftover = re.compile(rf"\.{re.escape(name[:_KEPT]) or '.*'}\.\w{{8}}{re.escape(SUFFIX)}")
    for found in folder.iterdir():
        # A writer holds a lock as long as it lives; whoever gets the lock is alone with the file.
        if leftover.fullmatch(found.name) and found.is_file() and not found.is_symlink():
            with suppress(OSError), found.open("rb") as file:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, until the end of the block or of the process; says whether nobody else had."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    except OSError:  # a protected folder, or a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        # while it is held: whoever waits for it looks again
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def _temporary(target: Path) -> tuple[int, Path]:
    """Make a temporary file and lock it, so that nobody takes it for a leftover."""
    while True:
        name = target.name[:_KEPT]
        descriptor, made = tempfile.mkstemp(prefix=f".{name}.", suffix=SUFFIX, dir=target.parent)
        with suppress(OSError):  # a file system without locks, where nobody clears up
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(made)
        os.close(descriptor)  # somebody was clearing up just then


def _umask() -> int:
    # it can only be read by setting it; other threads may make files meanwhile
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
