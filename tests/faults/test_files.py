"""What stands at the output's name when it is no regular file, and what dead writers leave."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.tools.files import clear_leftovers, write_atomically


def put(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


def generate(output: Path) -> object:
    return CliRunner().invoke(
        app, ["sequence", "generate-task", "anbn", "--force", "-o", str(output)]
    )


def device(folder: Path, name: str, minor: int) -> Path:
    """A copy of a device of /dev, because whoever may harm that one may make copies."""
    if os.geteuid() != 0:
        return Path("/dev") / name
    path = folder / name
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("this root may make no devices, and none but a copy is risked")
    return path


def test_a_device_is_written_to_and_stays_a_device(tmp_path: Path) -> None:
    null = device(tmp_path, "null", 3)
    assert generate(null).exit_code == 0
    assert stat.S_ISCHR(null.stat().st_mode)
    assert not list(tmp_path.glob(".*"))


def test_a_full_device_is_named(tmp_path: Path) -> None:
    full = device(tmp_path, "full", 7)
    result = generate(full)
    assert result.exit_code == 2
    assert f"{full} cannot be written (No space left on device): make room" in result.stderr
    assert stat.S_ISCHR(full.stat().st_mode)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    put(pipe, b"content")
    reader.join()
    assert read == [b"content"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_can_be_the_output() -> None:
    code = "from pathlib import Path; from tests.faults.test_files import put; put(Path('/dev/stdout'), b'here')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (found.stdout, found.stderr) == (b"here", b"")


@pytest.mark.slow
def test_on_standard_output_stands_nothing_but_the_output(tmp_path: Path) -> None:
    log, model, packed = (str(tmp_path / name) for name in ("log", "model", "packed"))
    Path(log).write_text("GET /page 200\n" * 40)
    fit = ("fit", log, "--passes", "2", "--units", "4", "-q")
    assert CliRunner().invoke(app, ["sequence", *fit, "-o", model]).exit_code == 0
    Path(packed).write_bytes(sequence("compress", model, log, "-o", "/dev/stdout").stdout)
    found = sequence("decompress", model, packed, "-o", "/dev/stdout")
    assert found.stdout == Path(log).read_bytes()
    assert b"/dev/stdout: 560 bytes" in found.stderr
    # a mixture, which is saved twice: before and after it has read the text
    Path(model).write_bytes(sequence(*fit, "-o", "/dev/stdout", "--context", "--json").stdout)
    assert "560 symbols" in CliRunner().invoke(app, ["sequence", "bits", model, log]).stdout


def sequence(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "pathspace", "sequence", *arguments]
    return subprocess.run(command, capture_output=True, check=True)


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, dangling = tmp_path / "far" / "model", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"old")
    link.symlink_to(target)
    dangling.symlink_to("far/new")
    put(link, b"new")
    put(dangling, b"made")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert target.read_bytes() == b"new"
    assert (tmp_path / "far" / "new").read_bytes() == b"made"
    assert generate(link).exit_code == 0
    assert link.is_symlink()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        put(link, b"round and round")


def test_an_older_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")
    path.chmod(0o604)
    put(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    put(tmp_path / ("n" * 255), b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


def test_what_dead_writers_left_is_cleared_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    dead, other, alike = (
        tmp_path / name for name in (".model.abcdefgh.part", ".other.abcdefgh.part", ".model.part")
    )
    for path in (dead, other, alike):
        path.write_bytes(b"half")

    def while_writing(file: object) -> None:
        assert not dead.exists()
        (mine,) = (p for p in tmp_path.glob(".model.*.part") if p != alike)
        clear_leftovers(tmp_path)
        assert mine.exists()

    write_atomically(tmp_path / "model", while_writing)
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.part"}


def test_a_missing_and_a_protected_folder_are_named_before_the_work(tmp_path: Path) -> None:
    result = generate(tmp_path / "no" / "where")
    assert result.exit_code == 2
    assert "make it first" in " ".join(result.stderr.split())
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert "cannot be written" in " ".join(generate(tmp_path / "t").stderr.split())
        tmp_path.chmod(0o700)
