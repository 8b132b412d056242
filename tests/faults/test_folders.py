"""Folders that hold what a command did not write, and commands that meet in one folder."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.experiments import context
from pathspace.tools.files import LOCK

TINY = [
    "train", "--task", "adding", "--epochs", "2", "--batch-size", "16", "--set", "model_options.hidden=4",
    "--set", "task_options.length=4", "--set", "task_options.train_size=32",
    "--set", "task_options.validation_size=16", "--set", "task_options.test_size=16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # The pictures take most of the time, and are checked elsewhere.
    monkeypatch.setattr("pathspace.experiments.report.saved", lambda _: (b"", "<svg></svg>"))
    return tmp_path


def call(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.html", "mine"),
        ("config.json", '{"mine": 1}'),
        ("config.json", "[1]"),
        ("config.json", "[" * 99_999),
        ("notes", "mine"),
    ],
)
@pytest.mark.parametrize("command", [TINY, ["reproduce", "symbols"], ["reproduce", "winner"]])
def test_a_folder_with_files_of_another_kind_is_refused(
    here: Path, command: list[str], name: str, content: str
) -> None:
    (here / "mine").mkdir()
    (here / "mine" / name).write_text(content)
    before = contents(here)
    said = call(*command, "--output", "mine", code=2).stderr
    assert f"holds '{name}', which no command of pathspace is known to have written" in said
    assert "--fresh" in said
    assert contents(here) == before


def test_fresh_writes_beside_files_of_another_kind(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes").write_text("mine")
    call(*TINY, "--output", "mine", "--fresh")
    assert (here / "mine" / "notes").read_text() == "mine"
    assert context.is_own(here / "mine")


def test_fresh_leaves_nothing_of_an_earlier_report_beside_the_new_one(here: Path) -> None:
    folder = here / "mine"
    folder.mkdir()
    for name in ("pairs.csv", "notes"):
        (folder / name).write_text("mine")
    call(*TINY, "--output", "mine", "--fresh")
    known = set(json.loads((folder / context.REPORT_FILES).read_text()))
    assert {"report.html", "results.json", "curves.png", "runs.csv"} < known
    assert {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")} == {
        *known, "config.json", "pairs.csv", "notes",
    }  # fmt: skip
    # a command of another kind had written these
    (folder / "claim.csv").write_text("earlier")
    (folder / context.REPORT_FILES).write_text(json.dumps([*known, "claim.csv", "../outside"]))
    (here / "outside").write_text("mine")
    call(*TINY, "--output", "mine", "--fresh")
    assert not (folder / "claim.csv").exists()
    assert [(folder / name).read_text() for name in ("pairs.csv", "notes")] == ["mine", "mine"]
    assert (here / "outside").read_text() == "mine"


@pytest.mark.parametrize("damaged", ["", "[", "5", "[5]", "{}"])
@pytest.mark.sample(3)
def test_a_damaged_list_of_files_is_no_obstacle(here: Path, damaged: str) -> None:
    call(*TINY, "--output", "mine")
    (here / "mine" / context.REPORT_FILES).write_text(damaged)
    call(*TINY, "--output", "mine", "--fresh")
    assert "runs.csv" in json.loads((here / "mine" / context.REPORT_FILES).read_text())


def test_finished_runs_of_other_settings_are_refused_and_the_default_folder_counts_up(
    here: Path,
) -> None:
    runs = here / "runs"
    assert "Report: runs/train/report.html" in call(*TINY).stdout
    before = contents(runs)
    said = call(*TINY, "--lr", "0.2", "--output", "runs/train", code=2).stderr
    assert "holds finished runs with other settings" in said
    assert contents(runs) == before

    assert "Report: runs/train-2/report.html" in call(*TINY, "--lr", "0.2").stdout
    assert {name: v for name, v in contents(runs).items() if "train-2" not in name} == before

    # What was stopped goes on where it was, before any new folder is begun; --resume finds it, too.
    for resume in ([], ["--resume"]):
        (runs / "train" / "report.html").unlink()
        (lost,) = (runs / "train").glob("runs/*/result.json")
        lost.unlink()
        (lost.parent / "checkpoint.pt").write_bytes(b"")  # begun, and damaged
        assert "delete it" in call(*(resume and ["train"]) or TINY, *resume, code=2).stderr
        (lost.parent / "checkpoint.pt").unlink()
        lost.write_bytes(before[str(lost)])
        assert (
            "Report: runs/train/report.html"
            in call(*(resume and ["train"]) or TINY, *resume).stdout
        )
        assert {path.name for path in runs.iterdir()} == {"train", "train-2"}

    (runs / "train-2" / "runs" / ".DS_Store").write_bytes(b"\0")
    assert "Report: " in call(*TINY, "--fresh", "--output", "runs/train-2").stdout
    assert "Report: runs/train-3/report.html" in call(*TINY, "--fresh").stdout
    assert (runs / "train" / "curves.csv").read_bytes() == before[
        str(runs / "train" / "curves.csv")
    ]


TABLE = {"command": "reproduce", "recipe": "symbols", "size": "", "protocol": {}, "versions": {}}
PARTS = {
    "command": "reproduce",
    "recipe": "winner",
    "title": "",
    "parts": {"one": {}},
    "versions": {},
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("content", [TABLE, PARTS])
@pytest.mark.parametrize(
    "command", [TINY, ["train"], ["sweep"], ["reproduce", "winner"], ["reproduce", "symbols"]]
)
def test_results_of_another_command_are_refused(
    here: Path, content: dict[str, Any], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if command[-1] == content["recipe"]:
        return
    for runs in ("execution._runs", "sweep.sweep"):
        monkeypatch.setattr(
            f"pathspace.experiments.{runs}", lambda *_, **__: pytest.fail("it runs")
        )
    for folder, file in ((here / "out", content), (here / "out" / "one", {**TABLE, "protocol": 0})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(file))
    before = contents(here)
    for more in ([], ["--resume"]):
        said = call(*command, *more, "--output", "out", code=2).stderr
        told = (
            f"holds results of `pathspace reproduce {content['recipe']}`",
            "other settings",
            "nothing to resume",
        )
        assert any(words in said for words in told), said
        assert contents(here) == before


def test_a_report_whose_runs_were_deleted_is_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(*TINY)
    monkeypatch.setattr(
        "pathspace.experiments.execution._runs", lambda *_, **__: pytest.fail("it runs")
    )
    shutil.rmtree(here / "runs" / "train" / "runs")
    before = contents(here)
    for command in ([*TINY, "--lr", "0.2"], ["reproduce", "winner"]):
        said = call(*command, "--output", "runs/train", code=2).stderr
        assert "give another --output" in said
        assert contents(here) == before


@pytest.mark.parametrize("command", [TINY, ["reproduce", "symbols"]])
def test_a_folder_in_the_place_of_the_report_is_kept(here: Path, command: list[str]) -> None:
    (here / "mine" / "report.html").mkdir(parents=True)
    said = call(*command, "--output", "mine", "--fresh", code=2).stderr
    assert "report.html' (" in said  # the system's word for it
    assert "): make room there, or choose another folder" in said
    assert [path.name for path in (here / "mine").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"momentum": -1}, "The setting 'momentum' is -1: give"),
        ({"epoch": 3}, "Unknown setting 'epoch' in 'settings': choose from"),
        ({"methods": 3}, "The setting 'methods' is 3: give a list"),
    ],
)
def test_a_mistake_in_a_configuration_is_said_with_its_file(
    here: Path, wrong: dict[str, Any], told: str
) -> None:
    call(*TINY)
    file = here / "runs" / "train" / "config.json"
    content = json.loads(file.read_text())
    content["settings"] |= wrong
    file.write_text(json.dumps(content))
    said = call("train", "--resume", "--output", "runs/train", code=2).stderr
    assert f"In 'runs/train/config.json': {told}" in said
    assert said.count("config.json") == 1


def test_equal_numbers_are_the_same_settings_for_every_command(here: Path) -> None:
    """Of a table they were, of runs 1 and 1.0 were two."""
    call(*TINY, "--lr", "1")
    file = here / "runs" / "train" / "config.json"
    content = json.loads(file.read_text())
    assert content["settings"]["learning_rates"] == [1.0]
    content["settings"]["learning_rates"] = [1]
    file.write_text(json.dumps(dict(reversed(content.items()))))
    assert (
        "Report: runs/train/report.html"
        in call(*TINY, "--lr", "1", "--output", "runs/train").stdout
    )


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_broken_configuration_needs_fresh(here: Path, more: list[str]) -> None:
    (here / "runs" / "one").mkdir(parents=True)
    (here / "runs" / "one" / "result.json").write_text("{}")
    (here / "config.json").write_text(json.dumps({"command": "train", "versions": {}}))
    said = call(*TINY, *more, "--output", ".", code=2).stderr
    assert "config.json' cannot be read ('title'): start over with --fresh" in said


def test_two_commands_do_not_meet_in_one_folder(here: Path) -> None:
    call(*TINY)
    folder = here / "runs" / "train"
    before = contents(here)
    leftover = folder / ".curves.csv.abcdefgh.part"
    leftover.write_bytes(b"half")
    with context.alone_in(folder):
        assert not leftover.exists()
        for more in ([], ["--fresh"], ["--resume"]):
            said = call(*TINY, *more, "--output", str(folder), code=2).stderr
            assert "Another command is at work in the folder" in said
        assert contents(here) == before
        (folder / "report.html").unlink()
        assert "Report: runs/train-2/report.html" in call(*TINY).stdout
    call(*TINY, "--output", str(folder))


@pytest.mark.parametrize("ended", [False, True])
def test_a_command_that_another_one_overtakes_takes_the_next_folder(
    here: Path, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathspace.experiments import configuration

    folder, load = here / "runs" / "train", configuration.check_task_of
    with ExitStack() as other:

        def overtaken(*arguments: Any) -> Any:
            if not folder.exists():  # while this one reads its data
                folder.mkdir(parents=True)
                (folder / "notes").write_text("theirs")
                if not ended:
                    other.enter_context(context.alone_in(folder))
            return load(*arguments)

        monkeypatch.setattr(configuration, "check_task_of", overtaken)
        assert "Report: runs/train-2/report.html" in call(*TINY).stdout
        assert {path.name for path in folder.iterdir()} - {LOCK} == {"notes"}
