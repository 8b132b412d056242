import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import optim

import command_line
import pathspace
from command_line import call
from pathspace.cli import main
from processes import in_child

TINY = ["--task", "adding", "--epochs", "2", *command_line.TINY]
COMPARE = [
    "compare", *TINY, "--methods", "sgd,path-sgd", "--seeds", "2", "--learning-rates", "0.01,0.1", "--workers", "1",
]  # fmt: skip


def test_version_and_help() -> None:
    assert call("--version").stdout.strip() == f"pathspace {pathspace.__version__}"
    listed = call("--help").stdout
    for command in (
        "compare",
        "train",
        "reproduce",
        "sweep",
        "check-invariance",
        "check-scale",
        "paths",
    ):
        assert command in listed
        text = call(command, "--help").stdout
        assert "Examples:" in text
        assert f"  pathspace {command}" in text


def test_commands_started_by_torchrun_say_where_a_loop_for_several_processes_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = call("train", *TINY, "--output", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "torchrun started 2 processes, and `pathspace train` runs in one" in refused.stderr
    assert "docs/trainers.md" in refused.stderr
    assert not list(tmp_path.iterdir())


SEQUENCE = (
    "fit",
    "sample",
    "bits",
    "lines",
    "predict",
    "compress",
    "decompress",
    "generate-task",
    "baseline",
)


def test_each_sequence_command_is_named_here() -> None:
    lines = call("sequence", "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(SEQUENCE)


@pytest.mark.parametrize("command", [(), ("sequence",), *(("sequence", name) for name in SEQUENCE)])
def test_help_has_examples(command: tuple[str, ...]) -> None:
    text = call(*command, "--help").stdout
    assert "Examples:\n" in text
    assert f"\n    {' '.join(('pathspace', *command))} " in text


@pytest.mark.parametrize("command", [(), ("sequence",)])
def test_commands_are_listed_by_whole_sentences(command: tuple[str, ...]) -> None:
    lines = call(*command, "--help").stdout.partition("Commands:\n")[2].splitlines()
    assert len(lines) >= 7
    assert all(re.fullmatch(r"  [a-z-]+ +\S.*[^.]\.", line) for line in lines), lines


@pytest.mark.parametrize("command", ["compare", "train"])
def test_all_methods_are_listed_by_groups_with_a_line_for_each(command: str) -> None:
    from pathspace.experiments.methods import GROUPS, METHODS

    lines = call(command, "--list").stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == list(METHODS)
    assert all(len(line.split()) > 2 for line in lines if line.startswith("  "))
    assert [line for line in lines if line and not line.startswith(" ")] == [
        f"{title}:" for title in GROUPS
    ]
    assert max(map(len, lines)) <= 110


def test_optimizers_and_networks_of_check_invariance_are_listed() -> None:
    from pathspace.experiments.invariance import CANDIDATES
    from pathspace.experiments.model_source import NETWORKS

    lines = call("check-invariance", "--list").stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(names) == sorted([*CANDIDATES, *NETWORKS])
    assert ["path-sgd-momentum", "PathSGD(lr=0.02,", "momentum=0.9)"] in [
        line.split() for line in lines
    ]


@pytest.mark.usefixtures("no_pictures")
def test_compare_writes_its_report_and_says_where(tmp_path: Path) -> None:
    result = call(*COMPARE, "--output", str(tmp_path / "runs"))
    assert result.exit_code == 0, result.output
    assert f"Report: {tmp_path / 'runs' / 'report.html'}" in result.stdout
    assert "Path-SGD" in result.stdout
    assert "validation split" in result.stdout
    assert "Training with the chosen rates" in result.stderr
    assert re.search(r"8/8  .*, 100 %, .* about \d+:\d\d left\n", result.stderr)
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {
        "report.html", "curves.png", "table.csv", "runs.csv", "curves.csv", "epochs.csv", "validation.csv",
        "results.json", "config.json", "runs", ".report.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "runs" / "config.json").read_text())
    assert config["settings"]["methods"] == ["sgd", "path-sgd"]
    assert config["seeds"] == [0, 1]


@pytest.mark.usefixtures("no_pictures")
def test_json_is_all_that_stands_on_standard_output(tmp_path: Path) -> None:
    result = call(*COMPARE, "--learning-rates", "0.01", "--output", str(tmp_path), "--json")
    content = json.loads(result.stdout)
    assert {row["method"] for row in content["rows"]} == {"sgd", "path-sgd"}
    shown = [row["largest_difference"] for row in content["rows"] if row["method"] == "path-sgd"]
    assert shown == [None, 0.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["compare", "--methods", "sgd,lion"],
            "Unknown method 'lion' in --methods: choose from sgd, adam, adamw",
        ),
        (["compare", "--methods", ","], "The option --methods is empty"),
        (
            ["compare", "--task", "chess"],
            "Unknown task 'chess' in --task: choose from digits, mnist, adding",
        ),
        (["compare", "--seeds", "0"], "The option --seeds is 0: give 1 or more"),
        (["compare", "--set", "seeds=0"], "The setting 'seeds' is 0: give 1 or more"),
        (["compare", "--batch-size", "0"], "The option --batch-size is 0"),
        (["train", "--epochs", "0"], "The option --epochs is 0"),
        (
            ["train", "--epochs", "1", "--set", "epochs=2"],
            "'epochs' is given by --epochs and by --set: leave",
        ),
        (["train", "--threads", "0"], "The option --threads is 0"),
        (["train", "--threads", "100000"], "The option --threads is 100000: give at most 1024"),
        (["train", "--clip-step=-1"], "The option --clip-step is -1.0: give 0 or more"),
        (
            ["train", "--method", "sgd", "--clip-step", "1"],
            "(the option --clip-step): leave it out, or choose from",
        ),
        (
            ["compare", "--learning-rates", "fast"],
            "--learning-rates is 'fast': give numbers separated by commas",
        ),
        (["compare", "--learning-rates=-1"], "--learning-rates is [-1.0]: give more than 0 each"),
        (["train", "--lr", "1e300"], "--lr is 1e+300: give a positive number, at most 1e+30"),
        (["compare", "--set", "epoch=3"], "Unknown setting 'epoch' in the command line"),
        (["compare", "--set", "epochs"], "write --set NAME=VALUE"),
        (["compare", "--workers", "0"], "--workers is 0"),
        (
            ["compare", "--batch-size", "5000"],
            "batch size 5000 exceeds the 1197 training sequences",
        ),
        (["compare", "--set", "model_options.hidden=0"], "'hidden' of the model 'relu-rnn' is 0"),
        (["compare", "--set", "schedule=[1]"], "'schedule' is [1]: give a name"),
        (["compare", "--set", "methods=[[1]]"], "'methods' is [[1]]: give a name each"),
        (["compare", "--seeds", "3000000000"], "--seeds is 3000000000: give at most 1000"),
        (
            ["compare", "--set", "task=characters", "--set", "task_options.dataset=[1]"],
            "Unknown value '[1]'",
        ),
        (["train", "--set", "task_options.read=2020-01-01"], "Unknown value '2020-01-01'"),
        (["compare", "--resume", "--fresh"], "--resume and --fresh contradict each other"),
        (["compare", "--resume"], "There is nothing to resume in"),
        (
            ["train", "--set", 'methods=["adam"]'],
            "A single run has no setting 'methods': leave it out, and choose by --method, --start, --lr and --seed",
        ),
        *(
            (
                ["train", "--set", given],
                f"A single run has no setting '{given.partition('=')[0]}': leave it out",
            )
            for given in (
                "target_error=0.1",
                'tuning="in turn"',
                "verified_seeds=1",
                "tuning_epochs=2",
            )
        ),
        (
            ["sweep", "digits", "--set", "tuning_seeds=2"],
            "A sweep has no setting 'tuning_seeds': leave it out; --seeds is the runs of each point",
        ),
        (
            ["sweep", "digits", "--set", 'baselines=["sgd"]'],
            "A sweep has no setting 'baselines': leave it out",
        ),
        (
            ["train", "--set", "weight_decays=[0.1, 0.2]"],
            "A single run has one weight decay: give one",
        ),
        (["train", "--method", "lion"], "Unknown method 'lion' in --method: "),
        (["train", "--method", "path-sdg"], "Did you mean 'path-sgd'?"),
        (
            ["train", "--start", "nowhere"],
            "Unknown start 'nowhere' in --start: choose from default, balanced",
        ),
        (["train", "--lr", "-1"], "The option --lr is -1: give a positive number"),
        (["train", "--lr", "nan"], "The option --lr is nan: give a positive number"),
        (["train", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
        (
            ["reproduce", "nothing"],
            "Unknown recipe 'nothing' in reproduce: choose from adding, char-lm, cost, ddp, digits",
        ),
        (["reproduce", "adding", "--size", "huge"], "Unknown size 'huge'"),
        (
            ["check-invariance", "--optimizers", "lion"],
            "Unknown optimizer 'lion' in --optimizers: choose from sgd",
        ),
        (
            ["train", *TINY, "--start", "rescaled", "--set", "rescale_exponent=200"],
            "The setting 'rescale_exponent' is 200, which the weights' type cannot hold: give a smaller",
        ),
        (
            ["train", *TINY, "--start", "rescaled", "--set", "rescale_exponent=2000"],
            "The setting 'rescale_exponent' is 2000, which the weights' type cannot hold: give a smaller",
        ),
        (
            ["train", *TINY, "--start", "rescaled", "--set", "rescale_factor=1e300"],
            "The setting 'rescale_factor' is 1e+300, which the weights' type cannot hold: give a smaller",
        ),
        (["paths", "rnn", "--input", "nan"], "The option --input is 'nan': give whole numbers"),
        (
            ["paths", "m.py:build", "--input", "1e9,1e9,1e9"],
            "The option --input is '1e9,1e9,1e9': give a shape that fits into memory",
        ),
        (["paths", "rnn", "--input", "8,inf"], "The option --input is '8,inf': give whole numbers"),
        (
            ["check-invariance", "--networks", "gpt"],
            "Unknown network 'gpt' in --networks: choose from mlp",
        ),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("compare", "--output", str(tmp_path / "file" / "runs"))
    assert result.exit_code == 2
    assert "choose another folder" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--resume"],
        ["train", *TINY, "--batch-size", "65"],
        ["train", "--task", "mnist", "--data-dir", "nowhere"],
        ["reproduce", "symbols", "--resume"],
        ["reproduce", "winner", "--resume"],
    ],
)
def test_a_command_that_is_refused_leaves_no_folder_behind(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments, "--output", "new/runs").exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_pictures")
def test_a_full_disk_keeps_the_runs_and_the_way_to_go_on_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathspace.tools import files

    def full(source: Path, target: Path) -> None:
        if target.name == "curves.png":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Path(source).rename(target)

    arguments = ["train", *TINY, "--output", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full)
        result = call(*arguments)
    assert result.exit_code == 2
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("Error"))
    assert f"Cannot write '{tmp_path}/curves.png' (No space left on device): make room" in said
    assert said.endswith(
        f"Finished runs are kept; then continue with: pathspace train --resume --output {tmp_path}"
    )
    assert list(tmp_path.glob("runs/*/result.json"))
    assert [path.name for path in tmp_path.glob(".*")] == [".report.json"]
    assert call("train", "--resume", "--output", str(tmp_path)).exit_code == 0


def test_mnist_without_data_names_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = call("compare", "--task", "mnist", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "--data-dir" in result.stderr
    assert "pip install -e '.[download]' in a clone" in result.stderr


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_that_is_not_there_is_named_and_takes_no_earlier_results_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ["train", *TINY, "--output", str(tmp_path / "runs")]
    assert call(*train).exit_code == 0
    page = (tmp_path / "runs" / "report.html").read_text()
    config = (tmp_path / "runs" / "config.json").read_text()
    missing = str(tmp_path / "nowhere")
    other = ["train", "--task", "mnist", "--output", str(tmp_path / "runs"), "--fresh"]
    given = call(*other, "--data-dir", missing)
    assert (given.exit_code, given.stdout) == (2, "")
    assert f"There is no folder '{missing}', which --data-dir names" in given.stderr
    monkeypatch.setenv("PATHSPACE_DATA", missing)
    assert f"There is no folder '{missing}', which PATHSPACE_DATA names" in call(*other).stderr
    assert (tmp_path / "runs" / "report.html").read_text() == page
    assert (tmp_path / "runs" / "config.json").read_text() == config
    assert list((tmp_path / "runs").glob("runs/*/result.json"))


def test_the_list_of_recipes_keeps_names_and_sizes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    listed = call("reproduce", "--list").stdout
    assert listed == call("reproduce").stdout
    assert max(map(len, listed.splitlines())) <= 110
    sizes = [line for line in listed.splitlines() if line.startswith(" ")]
    assert max(map(len, sizes)) <= 70
    words = listed.replace(",", " ").split()
    assert {"winner-characters", "paper-cifar100-160", "paper-98-permuted"} <= set(words)


def test_the_list_of_recipes_is_there_for_machines() -> None:
    listed = json.loads(call("reproduce", "--list", "--json").stdout)
    assert json.loads(call("reproduce", "--json").stdout) == listed
    assert listed["adding"]["sizes"]["paper-100"] == {
        "core_hours": 2,
        "page": "adding.md",
        "part": "",
    }
    assert listed["winner"]["parts"] == ["winner-mnist", "winner-characters", "winner-adding"]
    assert "default" in listed["digits"]["sizes"]


@pytest.mark.usefixtures("no_pictures")
def test_reproduce_lists_recipes_and_sets_published_numbers_beside_ours(tmp_path: Path) -> None:
    listed = call("reproduce").stdout
    for name in ("adding", "digits", "mnist-rows"):
        assert name in listed
    result = call(
        "reproduce", "adding", "--seeds", "1", "--epochs", "1", "--workers", "1", "--output", str(tmp_path),
        "--set", "task_options.length=6", "--set", "task_options.train_size=128",
        "--methods", "path-sgd", "--learning-rates", "0.1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "RNN-Path, T = 750" in result.stdout
    assert "Neyshabur et al. 2016" in result.stdout
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["recipe"], config["size"]) == ("adding", "small")
    assert "RNN-Path, T = 750" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()  # as if it had been stopped
    for asked in (("adding", "--size", "paper-100"), ("mnist-rows",)):
        other = call("reproduce", *asked, "--resume", "--output", str(tmp_path))
        assert other.exit_code == 2
        assert "continue those by `pathspace reproduce adding --resume" in other.stderr


@pytest.mark.usefixtures("no_pictures")
def test_some_methods_of_a_claim_keep_the_baselines_among_them(tmp_path: Path) -> None:
    result = call(
        "reproduce", "winner-adding", "--methods", "sgd,path-soap", "--learning-rates", "0.01", "--seeds", "2",
        "--workers", "1", "--output", str(tmp_path),
        "--set", "task_options.length=4", "--set", "task_options.train_size=128", "--set", "validate_every=1",
        "--set", "weight_decays=[0]", "--set", "model_options.hidden=4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "against best" in result.stdout
    settings = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert settings["methods"] == ["sgd", "path-soap"]
    assert settings["baselines"] == ["sgd"]


def curves(folder: Path) -> str:
    return (folder / "curves.csv").read_text() + (folder / "validation.csv").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_train_reports_one_run(tmp_path: Path) -> None:
    arguments = [
        "train",
        *TINY,
        "--method",
        "path-sgd",
        "--start",
        "rescaled",
        "--lr",
        "0.05",
        "--seed",
        "3",
    ]
    result = call(*arguments, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Path-SGD" in result.stdout
    assert "Report: " in result.stdout
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert len(lines) == 1 + 8
    assert lines[1].startswith("path-sgd,rescaled,0.05,0.0,3,0,")


def test_a_run_that_diverges_names_the_step_and_exits_with_1(tmp_path: Path) -> None:
    arguments = [
        "train",
        *TINY,
        "--method",
        "sgd",
        "--lr",
        "1e20",
        "--set",
        "clip_norm=0",
        "--json",
    ]
    arguments += ["--output", str(tmp_path)]
    results = [call(*arguments), call("train", "--resume", "--output", str(tmp_path))]
    (row,) = (tmp_path / "runs.csv").read_text().splitlines()[1:]
    step = row.split(",")[9]
    for result in results:
        assert result.exit_code == 1
        said = result.stderr.splitlines()[-1]
        assert said.startswith(f"Error: The loss or the step was not finite after {step} steps")
        assert "lower --lr than 1e+20" in said
        assert "--set clip_norm=1" in said
    assert json.loads(results[0].stdout)["rows"][0]["diverged"] == 1
    assert "diverged" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("rule", "start", "says"),
    [
        ("g-sgd-published", "default", ", or the start that the rule presumes, skeleton-ones."),
        ("g-sgd-published", "skeleton-ones", "1e+20."),
        ("path-sgd-published", "default", "1e+20."),
    ],
)
def test_no_bound_is_proposed_for_a_rule_that_takes_none(
    rule: str, start: str, says: str, tmp_path: Path
) -> None:
    arguments = ["train", *TINY, "--method", rule, "--start", start, "--lr", "1e20", "--quiet"]
    result = call(*arguments, "--set", "clip_norm=0", "--output", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith(says)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", [["compare", *TINY[:2]], ["reproduce", "adding"]])
def test_when_every_run_diverged_the_exit_code_is_1(command: list[str], tmp_path: Path) -> None:
    few = [*TINY[2:4], "--set", "batch_size=16", *TINY[6:]]
    few += [
        "--methods",
        "sgd",
        "--seeds",
        "1",
        "--set",
        "starts=['default']",
        "--workers",
        "1",
        "--quiet",
    ]
    arguments = [*command, *few]
    lost = call(*arguments, "--learning-rates", "1e20", "--output", str(tmp_path / "one"))
    assert lost.exit_code == 1, lost.output
    said = lost.stderr.splitlines()[-1]
    assert said.startswith("Error: Every run was lost, at rates of 1e+20")
    assert said.endswith("Give lower --learning-rates.")  # the gradient was clipped already
    assert (tmp_path / "one" / "report.html").exists()  # which says so, too
    both = call(*arguments, "--learning-rates", "1e20,0.01", "--output", str(tmp_path / "two"))
    assert (both.exit_code, both.stderr) == (0, "")


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_is_lost_with_finite_numbers_exits_with_1_too(tmp_path: Path) -> None:
    arguments = ["train", *TINY, "--method", "sgd", "--lr", "3", "--quiet"]
    result = call(*arguments, "--output", str(tmp_path))
    losses = [
        float(line.split(",")[6]) for line in (tmp_path / "curves.csv").read_text().splitlines()[1:]
    ]
    (row,) = (tmp_path / "runs.csv").read_text().splitlines()[1:]
    assert row.split(",")[9] == ""  # it did not diverge
    step = next(step for step, loss in enumerate(losses) if loss > 10 * losses[0])
    assert result.exit_code == 1
    assert (
        f"its loss rose above ten times the first one at step {step}: give a lower --lr than 3"
        in result.stderr
    )


@pytest.mark.usefixtures("no_pictures")
def test_a_bound_on_the_step_mends_a_rate_that_diverges_and_is_what_the_error_proposes(
    tmp_path: Path,
) -> None:
    arguments = [
        "train",
        *TINY,
        "--method",
        "path-sgd",
        "--lr",
        "1e8",
        "--set",
        "clip_norm=0",
        "--quiet",
    ]
    diverged = call(*arguments, "--output", str(tmp_path / "one"))
    assert diverged.exit_code == 1
    (said,) = diverged.stderr.splitlines()
    assert "give a lower --lr than 1e+08, or a bound: --clip-step" in said
    bounded = call(*arguments, "--clip-step", "1e-9", "--output", str(tmp_path / "two"))
    assert (bounded.exit_code, bounded.stderr) == (0, "")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["path-sgd-short", "diagonal-natural"])
def test_a_bound_on_the_step_stands_in_the_place_of_the_clipping_norm(
    name: str, tmp_path: Path
) -> None:
    """Of methods whose steps the clipping norm bounds."""
    arguments = ["train", *TINY, "--method", name, "--quiet"]
    for where, more in {
        "plain": [],
        "long": ["--clip-step", "1"],
        "short": ["--clip-step", "1e-9"],
    }.items():
        result = call(*arguments, *more, "--output", str(tmp_path / where))
        assert (result.exit_code, result.stderr) == (0, "")
    plain, long, short = (
        (tmp_path / w / "curves.csv").read_text() for w in ("plain", "long", "short")
    )
    assert plain == long != short  # the task's clipping norm is 1


@pytest.mark.usefixtures("no_pictures")
def test_the_backend_of_a_notebook_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Matplotlib cannot be imported where that package is missing
    monkeypatch.setenv("MPLBACKEND", "module://a_notebook_s.backend_inline")
    monkeypatch.setattr(sys, "argv", ["pathspace", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["MPLBACKEND"] == "agg"


def test_ctrl_c_before_a_command_begins_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathspace.cli.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("no_pictures")
def test_quiet_commands_print_results_alone(tmp_path: Path) -> None:
    result = call("train", *TINY, "--quiet", "--output", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Report: " in result.stdout
    checked = call(
        "check-invariance", "--optimizers", "sgd", "--networks", "mlp", "--steps", "1", "--quiet"
    )
    assert (checked.exit_code, checked.stderr) == (0, "")


# Three epochs of four steps with a checkpoint every third: the second one falls due in the middle
# of an epoch.
STOPPED = [
    *TINY, "--method", "path-sgd", "--epochs", "3", "--set", "checkpoint_every=3", "--set", "momentum=0.9",
]  # fmt: skip


def resumes_to_the_same_curves(folder: Path, whole: Path) -> bool:
    assert not (folder / "report.html").exists(), "the run was over too soon to be stopped"
    resumed = call("train", "--resume", "--output", str(folder))
    assert resumed.exit_code == 0, resumed.output
    assert call("train", *STOPPED, "--output", str(whole)).exit_code == 0
    return curves(folder) == curves(whole)


@pytest.mark.usefixtures("no_pictures")
def test_a_stopped_run_resumes_to_the_same_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathspace.experiments import checkpoint

    save, steps = checkpoint.save, []

    def save_and_stop(folder: Path, config: Any, state: Any) -> None:
        save(folder, config, state)
        steps.append(state.step)
        if len(steps) == 1:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_stop)
        stopped = call("train", *STOPPED, "--output", str(folder), "--data-dir", str(tmp_path))
    assert stopped.exit_code == 130
    again = (
        f"pathspace train --resume --output {folder} --data-dir {tmp_path}"  # which no folder keeps
    )
    assert stopped.stderr.endswith(f"Stopped. Continue with: {again}\n")
    assert "Traceback" not in stopped.output
    assert steps[-1] < 12
    assert resumes_to_the_same_curves(folder, tmp_path / "whole")


def killed(*arguments: str) -> None:
    """A command that kills its process where the second checkpoint is due: three steps are lost."""
    from pathspace.experiments import checkpoint
    from pathspace.experiments.run import CHECKPOINT

    save = checkpoint.save

    def save_or_die(folder: Path, config: Any, state: Any) -> None:
        if (folder / CHECKPOINT).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder, config, state)

    checkpoint.save = save_or_die
    call(*arguments)


@pytest.mark.slow  # faults/kills.py kills the same command at other moments
@pytest.mark.usefixtures("no_pictures")
def test_a_killed_run_resumes_to_the_same_curves(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    assert in_child(killed, "train", *STOPPED, "--output", str(folder)) == -signal.SIGKILL
    assert list(folder.glob("runs/*/checkpoint.pt"))
    assert resumes_to_the_same_curves(folder, tmp_path / "whole")


@pytest.mark.usefixtures("no_pictures")
def test_unfinished_runs_are_continued_or_protected(tmp_path: Path) -> None:
    arguments = [*COMPARE, "--set", "starts=['balanced']", "--output", str(tmp_path)]
    assert call(*arguments).exit_code == 0
    before = curves(tmp_path)
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    for more in ([], ["--quiet"]):
        same = call(*arguments, *more)
        assert same.exit_code == 0
        assert ("was finished already" in same.stderr) == (not more)
        assert "Report: " in same.stdout
        assert {path: path.stat().st_mtime_ns for path in done} == done
    (tmp_path / "report.html").unlink()  # as if the command had been killed before its end
    (lost,) = (tmp_path / "runs").glob("sgd-balanced-0.01-1000-*/result.json")
    lost.unlink()

    other = call(*arguments, "--seeds", "3")
    assert other.exit_code == 2
    assert "holds unfinished runs with other settings" in other.stderr
    assert "pathspace compare --resume" in other.stderr

    again = call(*arguments)
    assert again.exit_code == 0
    assert "Continuing the unfinished runs" in again.stderr
    assert curves(tmp_path) == before

    longer = call(*arguments, "--resume", "--seeds", "3")
    assert longer.exit_code == 2
    assert "holds finished runs with other settings: give another --output" in longer.stderr

    (tmp_path / "report.html").unlink()
    assert call(*arguments, "--seeds", "1", "--fresh").exit_code == 0
    assert curves(tmp_path) != before


@pytest.mark.usefixtures("no_pictures")
def test_a_command_that_did_not_begin_leaves_nothing_to_continue(tmp_path: Path) -> None:
    refused = call(*COMPARE, "--output", str(tmp_path), "--batch-size", "65")
    assert refused.exit_code == 2
    assert call("train", *TINY, "--output", str(tmp_path)).exit_code == 0


@pytest.mark.usefixtures("no_pictures")
def test_runs_of_other_versions_are_not_mixed_in(tmp_path: Path) -> None:
    arguments = ["train", *TINY, "--output", str(tmp_path)]
    assert call(*arguments).exit_code == 0
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(config))
    result = call("train", "--resume", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "begun with torch 1.0" in result.stderr


def test_check_invariance_prints_a_table_and_json() -> None:
    arguments = [
        "check-invariance",
        "--optimizers",
        "sgd,path-sgd",
        "--networks",
        "mlp,rnn",
        "--steps",
        "3",
    ]
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "Every optimizer that claims invariance kept it, bitwise." in result.stdout
    verdicts = json.loads(call(*arguments, "--json").stdout)
    assert [(v["optimizer"], v["network"], v["passed"]) for v in verdicts] == [
        ("sgd", "mlp", False), ("path-sgd", "mlp", True), ("sgd", "rnn", False), ("path-sgd", "rnn", True),
    ]  # fmt: skip


def test_a_broken_claim_of_invariance_has_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathspace.experiments import invariance

    claim = invariance.Candidate(
        lambda model, _: optim.SGD(model.parameters(), lr=0.01), invariant=True
    )
    monkeypatch.setitem(invariance.CANDIDATES, "sgd", claim)
    result = call("check-invariance", "--optimizers", "sgd", "--networks", "mlp", "--steps", "2")
    assert result.exit_code == 1
    assert "sgd on mlp: outputs differ" in result.stdout


def test_the_way_to_go_on_names_what_no_folder_keeps() -> None:
    from pathspace.experiments.context import Context, EngineContext

    runs = Path("my runs")
    assert Context().going_on(runs) == "--output 'my runs'"
    assert Context(device="auto").going_on(runs) == "--output 'my runs' --device auto"
    ray = EngineContext(data_dir=Path("data"), engine="ray", address="10.0.0.1:6379")
    more = "--data-dir data --engine ray --address 10.0.0.1:6379"
    assert ray.going_on(runs) == f"--output 'my runs' {more}"
