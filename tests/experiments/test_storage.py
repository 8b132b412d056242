import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pathspace.experiments import storage
from pathspace.experiments.errors import ConfigurationError, StorageError


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    storage.write_json(path, {"a": 1})

    def fail(file: object) -> None:
        file.write(b"half of")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write_atomically(path, fail)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_content_appears_by_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    storage.write_bytes(path, b"old")
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((Path(source).read_text(), Path(target).read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    storage.write_bytes(path, b"new")
    assert seen == [("new", "old")]
    assert path.read_text() == "new"


def test_files_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        storage.write_bytes(tmp_path / "report.html", b"page")
    finally:
        os.umask(before)
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o640


def test_json_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        storage.write_json(tmp_path / "result.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [lambda values: values | {"a": 2}, lambda _: {"a": 1}, lambda values: [values], lambda _: {}],
)
def test_checked_values_come_back_or_are_named(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    file = tmp_path / "result.json"
    with pytest.raises(FileNotFoundError):
        storage.read_checked(file, dict)
    storage.write_checked(file, {"a": 1, "b": (0.1, None)})
    assert storage.read_checked(file, dict) == {"a": 1, "b": [0.1, None]}
    with pytest.raises(
        ConfigurationError, match=r"result.json' cannot be read \('c'\): delete it and"
    ):
        storage.read_checked(file, lambda values: values["c"])
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(
        ConfigurationError, match=r"result.json' cannot be read \(.*\): delete it and"
    ):
        storage.read_checked(file, dict)


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    class Full:
        def write(self, _content: object) -> int:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

        def flush(self) -> None:
            pass

    with pytest.raises(
        StorageError, match=r"Cannot write '.*checkpoint\.pt' \(File too large\): make room"
    ):
        storage.write_atomically(
            tmp_path / "checkpoint.pt", lambda _: torch.save({"a": torch.zeros(9)}, Full())
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="another"):
        storage.write_atomically(
            tmp_path / "a", lambda _: (_ for _ in ()).throw(RuntimeError("another"))
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        storage.make_folder(tmp_path / "file" / "runs")


def test_looking_whether_a_folder_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    storage.writable_folder(tmp_path / "a" / "b", "--output")
    assert not list(tmp_path.iterdir())
    storage.writable_folder(storage.make_folder(tmp_path / "a"), "--output")
    assert (tmp_path / "a").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"of --output .*choose another folder"):
        storage.writable_folder(tmp_path / "file" / "runs", "--output")
