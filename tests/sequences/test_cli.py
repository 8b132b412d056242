"""The commands, end to end, in a folder of their own."""

import errno
import functools
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, load
from pathspace.sequences.cli.files import mask_after
from pathspace.sequences.cli.fit import _FitReport
from pathspace.sequences.cli.worth import baseline_bits
from pathspace.sequences.tasks import TASKS

# Most fits are to the same few texts, whose other codes take longer than the passes of the network.
baselines_once = functools.cache(baseline_bits)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pathspace.sequences.cli.fit.baseline_bits", baselines_once)

    def invoke(*arguments, status=0, input=None):
        result = CliRunner().invoke(
            app, ["sequence", *(str(argument) for argument in arguments)], input=input
        )
        assert result.exit_code == status, result.output
        return result

    return invoke


BOOK = "she sells sea shells by the sea shore; " * 30


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(BOOK)
    return path


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The file of a fit to the book."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "book.txt").write_text(BOOK)
    options = ("--units", "6", "--passes", "40", "--no-context")
    result = CliRunner().invoke(
        app, ["sequence", "fit", str(folder / "book.txt"), "-o", str(folder / "m"), *options]
    )
    assert result.exit_code == 0, result.output
    return (folder / "m").read_bytes()


class Terminal(io.BytesIO):
    def isatty(self):
        return True


def fit(run, book, *more, status=0):
    return run("fit", book, "-o", "m", "--units", 6, "--passes", 40, *more, status=status)


@pytest.mark.slow
def test_samples_of_whole_lines(run, tmp_path):
    """They begin as any sample of the seed does, and end after a line, or where --length says."""
    Path("log").write_bytes(b"".join(b"user %d logged in\r\n" % (i % 7) for i in range(60)))
    run("fit", "log", "-o", "m", "--passes", 0, "--context", "--quiet")
    three = run("sample", "m", "--lines", 3, "--seed", 1).stdout_bytes
    assert (three.count(b"\n"), three.endswith(b"\n")) == (3, True)
    longer = run("sample", "m", "--lines", 40, "--seed", 1).stdout_bytes
    assert (longer.count(b"\n"), longer.startswith(three)) == (40, True)
    short = run("sample", "m", "--lines", 3, "--seed", 1, "--length", 5).stdout_bytes
    assert short == three[:5]


def test_fit_score_sample_predict(run, book, tmp_path, monkeypatch):
    output = fit(run, book).output
    assert re.search(r"40 passes in [\d.]+ s, 6 units", output)
    assert re.search(r"validation \d\.\d+ bits/symbol, best at pass \d+", output)
    assert re.search(r"after the training part: .*context trees \d\.\d+ bits/symbol", output)
    assert "the model needs " in output
    total, each = map(
        float,
        re.match(
            r"([\d.]+) bits, ([\d.]+) bits/symbol, 1170", run("bits", "m", book).output
        ).groups(),
    )
    assert each == pytest.approx(total / 1170, abs=1e-4)
    assert 0 < each < 3
    drawn = run("sample", "m", "--length", 33, "--prompt", "she ").stdout_bytes
    assert len(drawn) == 33
    terminal = Terminal()
    monkeypatch.setattr(typer, "get_binary_stream", lambda _: terminal)
    run("sample", "m", "--length", 33, "--prompt", "she ")
    assert terminal.getvalue() == drawn + b"\n"
    assert set(drawn) <= set(book.read_bytes())
    lines = run("predict", "m", "she sells s", "--top", 3).output.splitlines()
    assert len(lines) == 3
    assert sum(float(line.split()[0]) for line in lines) <= 1.000001


def test_characters_and_a_file_for_validation(run, book, tmp_path):
    (tmp_path / "held").write_text("she sells sea shells ä")
    fit(run, book, "--text", "--validation", "held")
    assert "bits/symbol, 22 symbols" in run("bits", "m", "held").output


def test_resuming_is_the_same_as_not_stopping(run, book, tmp_path):
    fit(run, book, "--passes", 20)
    fit(run, book, "--passes", 60, "--resume")
    resumed = run("bits", "m", book).output
    fit(run, book, "--passes", 60)
    assert run("bits", "m", book).output == resumed


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--units", 7), "--units 7 is not what the model in m was begun with, 6"),
        (("--patience", 0), "--patience 0 is not what the model in m was begun with, 300"),
        (("--metric", "fb"), "--metric fb is not what the model in m was begun with, rbp"),
        (("--model", "rnn"), "--model rnn is not what the model in m was begun with, pcnn"),
        (
            ("--units", 32),
            "--units 32 is not what the model in m was begun with, 6",
        ),  # as the default says
        (("--text",), "the model in m reads bytes"),
        (("--alphabet", "more"), "symbol b'!' at position 4 is not one of the"),
    ],
)
def test_what_resuming_cannot_change_is_refused(run, book, begun, options, says):
    (book.parent / "more").write_text("sea !")
    (book.parent / "m").write_bytes(begun)
    assert (
        says in run("fit", book, "-o", "m", "--passes", 60, "--resume", *options, status=2).stderr
    )


def test_resuming_takes_the_default_metric_by_its_name(run, book):
    fit(run, book, "--no-context", "--passes", 4)
    assert "5 passes" in fit(run, book, "--resume", "--passes", 5, "--metric", "rbp").output


def test_resuming_keeps_the_text_out_of_the_file_unless_it_is_asked_for(run, log, tmp_path):
    def holds_text(*more):
        run("fit", log, "-o", "m", "--units", 4, "-q", *more)
        return b"pathspace.sequences.mixed" in (tmp_path / "m").read_bytes()

    assert not holds_text("--no-context", "--passes", 4)
    assert not holds_text("--resume", "--passes", 6)
    assert not holds_text("--resume", "--passes", 8)
    assert holds_text("--resume", "--passes", 10, "--context")


def test_resuming_predicts_what_the_fit_predicted(run, book):
    options = ("--after", "s", "--share", 0.3, "--no-context")
    fit(run, book, *options, "--passes", 20)
    fit(run, book, "--passes", 60, "--resume")
    resumed = run("bits", "m", book).output
    fit(run, book, *options, "--passes", 60)
    assert run("bits", "m", book).output == resumed


def test_resuming_holds_back_nothing_that_was_learned_in_the_place_of_a_validation_file(
    run, book, tmp_path
):
    (tmp_path / "held").write_text("she sells shells by the shore ")
    held = ("--validation", tmp_path / "held")
    fit(run, book, *held, "--passes", 10, "--no-context")
    resume = ("fit", book, "-o", "m", "--resume", "--passes", 12, "--json")
    said = " ".join(run(*resume, status=2).stderr.split())
    assert "m was begun with a --validation file: give it again, or --share 0 for none" in said
    each = json.loads(run(*resume, *held).stdout)["validation_bits_per_symbol"]
    assert each == pytest.approx(load("m").bits((tmp_path / "held").read_bytes()) / 30)
    run(*resume, "--share", 0)
    run(*resume)


@pytest.mark.parametrize(
    "first",
    [
        ("--share", 0),
        pytest.param(("--share", 0.1), marks=pytest.mark.slow),  # the default
        (),
        ("--validation", "held"),
    ],
)
def test_resuming_holds_back_no_more_than_was_held_back(run, book, tmp_path, first):
    (tmp_path / "held").write_text("she sells shells by the shore ")
    fit(run, book, *first, "--passes", 10, "--no-context")
    resume = ("fit", book, "-o", "m", "--resume", "--passes", 12, "--share")
    unseen = 0 if first and first[1] != 0.1 else 0.1
    said = " ".join(run(*resume, 0.3, status=2).stderr.split())
    assert (
        f"--share 0.3 holds back text that the model in m has learned: give at most {unseen}, "
        in said
    )
    run(*resume, unseen)
    run(*resume, 0.05 if unseen else 0)
    assert "--share 0.1 holds back text" in " ".join(run(*resume, 0.1, status=2).stderr.split())
    run(*resume, 0.3, "--validation", "held")


@pytest.mark.slow
def test_resuming_says_where_nothing_is_left_to_train(run, log):
    options = ("fit", log, "-o", "m", "--no-context", "-q")
    run(*options, "--units", 8, "--patience", 10)
    resumed = run(*options, "--resume", "--passes", 5000)
    passes = re.search(r"best at pass (\d+)", resumed.stdout)[1]
    assert (
        f"no pass was made: the validation part has not improved since pass {passes}"
        in resumed.stderr
    )
    assert "passes already: give more --passes" in run(*options, "--resume", "--passes", 3).stderr
    assert (
        "seconds already: give more --seconds" in run(*options, "--resume", "--seconds", 0).stderr
    )
    mixed = run("fit", log, "-o", "m", "-q", "--resume", "--passes", 3, "--context")
    assert (
        "no pass was made, and the network is mixed as it was: the model has made" in mixed.stderr
    )
    assert "the file has the mixture" in mixed.stdout
    run(*options, "--units", 8, "--passes", 4)
    assert "no pass" not in run(*options, "--resume", "--passes", 5).stderr


def test_an_interrupted_fit_is_saved_and_can_go_on(run, book, tmp_path, monkeypatch):
    fit(run, book, "--passes", 60, "--no-context")
    whole = run("bits", "m", book).output
    (tmp_path / "m").unlink()
    show = _FitReport.__call__

    def interrupt(report, training):
        show(report, training)
        if training.passes == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_FitReport, "__call__", interrupt)
        assert (
            "go on with --resume"
            in fit(run, book, "--passes", 60, "--no-context", status=130).output
        )
    assert "11 passes" in run("fit", book, "-o", "m", "--resume", "--passes", 11).output
    fit(run, book, "--passes", 60, "--resume")
    assert run("bits", "m", book).output == whole


def test_an_interrupted_fit_goes_on_to_the_passes_it_was_given(run, book, monkeypatch):
    show = _FitReport.__call__
    stop = 5

    def interrupt(report, training):
        show(report, training)
        if training.passes == stop:
            raise KeyboardInterrupt

    def passes(*more, status=0):
        options = ("-o", "m", "--units", 6, "--no-context", "--json")
        figures = json.loads(run("fit", book, *options, *more, status=status).stdout)
        assert figures["interrupted"] is (status == 130)
        return figures["passes"]

    monkeypatch.setattr(_FitReport, "__call__", interrupt)
    assert passes("--passes", 12, status=130) == 5
    stop = 8
    assert passes("--resume", status=130) == 8
    assert passes("--resume") == 12
    stop = 15
    assert passes("--resume", "--passes", 18, status=130) == 15
    assert passes("--resume") == 18


def test_seconds_that_are_spent_bind_no_further_fit_and_those_of_an_interrupted_one_do(
    run, book, monkeypatch
):
    def figures(*more, status=0):
        options = ("-o", "m", "--units", 6, "--no-context", "--share", 0, "--json")
        return json.loads(run("fit", book, *options, *more, status=status).stdout)

    figures("--seconds", 0.01)
    assert figures("--resume", "--passes", 200)["passes"] == 200

    def interrupt(report, training):
        report.last = training
        if training.passes == 205:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_FitReport, "__call__", interrupt)
        assert figures("--resume", "--passes", 10**6, "--seconds", 3, status=130)["passes"] == 205
    assert figures("--resume")["seconds"] >= 3


def test_a_fit_interrupted_on_a_growing_part_is_measured(run, tmp_path, monkeypatch):
    # eight passes on 2^14 symbols and more, four on twice as many
    (tmp_path / "t").write_text("she sells sea shells by the sea shore; " * 2000)
    show = _FitReport.__call__

    def interrupt(report, training):
        show(report, training)
        if training.passes in (3, 7):
            raise KeyboardInterrupt

    grow = ("fit", "t", "-o", "m", "--units", 3, "--passes", 14, "--grow", "--no-context", "--json")
    whole = json.loads(run(*grow).stdout)
    whole_bits = run("bits", "m", "t").output
    (tmp_path / "m").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(_FitReport, "__call__", interrupt)
        for passes, *more in ((3,), (7, "--resume")):
            said = json.loads(run(*grow, *more, status=130).stdout)
            assert (said["passes"], said["best_pass"]) == (passes, passes)
            held = (tmp_path / "t").read_bytes()[-7800:]
            assert said["validation_bits_per_symbol"] == pytest.approx(load("m").bits(held) / 7800)
    assert json.loads(run(*grow, "--resume").stdout)["passes"] == whole["passes"]
    assert run("bits", "m", "t").output == whole_bits


def test_progress_tells_no_look_that_has_not_been_taken():
    said = []
    report = _FitReport(lambda _, state: said.append(state), 10, None, 100, 10)
    begun = PCNN(units=3, passes=0).fit("abab").training_
    training = replace(begun, passes=1, log_likelihood=-100 * math.log(2))
    report(training)
    report(replace(training, passes=2, validation_bits=20.0))
    assert said[0].startswith("pass 1  1.0000 bits/symbol  rates")
    assert said[1].startswith("pass 2  1.0000 train 2.0000 valid bits/symbol  rates")


def test_compressed_files_come_back_and_damage_is_refused(run, book, tmp_path):
    fit(run, book)
    run("compress", "m", book)
    packed = tmp_path / "book.txt.psq"
    assert packed.stat().st_size < 1170 * 0.5
    run("decompress", "m", packed, "-o", "back")
    assert (tmp_path / "back").read_bytes() == book.read_bytes()
    content = bytearray(packed.read_bytes())
    content[-1] ^= 1
    packed.write_bytes(content)
    assert "damaged" in run("decompress", "m", packed, "-o", "other", status=2).output
    assert not (tmp_path / "other").exists()
    assert "not a file made by" in run("decompress", "m", book, "-o", "other", status=2).output


def test_a_file_is_overwritten_only_when_somebody_says_so(run, book, tmp_path, monkeypatch):
    fit(run, book, "--no-context")
    packed = tmp_path / "book.txt.psq"
    packed.write_text("mine")
    refused = run("compress", "m", book, status=2).output
    assert "book.txt.psq exists: give another --output, or --force" in refused
    monkeypatch.setattr("pathspace.sequences.cli.files._somebody_answers", lambda: True)
    assert "stays as it is" in run("compress", "m", book, status=2, input="n\n").output
    assert packed.read_text() == "mine"
    assert "Overwrite it?" in run("compress", "m", book, input="y\n").output
    run("compress", "m", book, "--force")
    (tmp_path / "back").write_text("mine")
    run("decompress", "m", packed, "-o", "back", status=2, input="n\n")
    assert (tmp_path / "back").read_text() == "mine"
    run("decompress", "m", packed, "-o", "back", "--force")
    assert (tmp_path / "back").read_bytes() == book.read_bytes()
    run("compress", "m", book, "-o", "/dev/null")


def test_a_task_is_written_over_a_file_only_when_somebody_says_so(run, tmp_path):
    file = tmp_path / "t"
    file.touch()  # with nothing to lose
    run("generate-task", "anbn", "-o", "t")
    file.write_text("mine")
    refused = run("generate-task", "anbn", "-o", "t", status=2).output
    assert "t exists: give another --output, or --force" in refused
    assert file.read_text() == "mine"
    run("generate-task", "anbn", "-o", "t", "--force")
    assert file.read_text() != "mine"


def test_a_fit_writes_over_models_alone(run, book, tmp_path):
    (tmp_path / "m").write_text("mine")
    said = " ".join(run("fit", book, "-o", "m", status=2).output.split())
    assert (
        "m holds no model that could be read, and would be lost: give another --output, or remove it"
        in said
    )
    assert (tmp_path / "m").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "m"]
    (tmp_path / "m").write_bytes(b"")
    for more in (["--no-context"], ["--context"], []):  # over nothing, a network and a mixture
        run("fit", book, "-o", "m", "--units", 3, "--passes", 2, *more)
    assert load(tmp_path / "m")


def test_ctrl_c_at_a_question_ends_a_command_as_anywhere_and_no_answer_is_no(
    run, book, tmp_path, monkeypatch
):
    fit(run, book, "--no-context")
    (tmp_path / "book.txt.psq").write_text("mine")
    monkeypatch.setattr("pathspace.sequences.cli.files._somebody_answers", lambda: True)
    said = run("compress", "m", book, status=2, input="").output  # its end, Ctrl-D
    assert "book.txt.psq stays as it is" in said

    def confirm(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None

    monkeypatch.setattr(typer, "confirm", confirm)
    run("compress", "m", book, status=130)
    assert (tmp_path / "book.txt.psq").read_text() == "mine"


def test_no_command_writes_over_what_it_reads(run, book, tmp_path):
    text = book.read_bytes()
    (tmp_path / "link").symlink_to(book)
    for arguments in (
        (book,),
        (tmp_path / "link",),
        ("other", "--validation", book),
        ("other", "--alphabet", book),
    ):
        (tmp_path / "other").write_bytes(text)
        assert "one that this command reads" in run("fit", *arguments, "-o", book, status=2).output
    assert book.read_bytes() == text
    fit(run, book, "--no-context")
    model = (tmp_path / "m").read_bytes()
    run("compress", "m", book)
    for command, file in (("compress", book), ("decompress", "book.txt.psq")):
        assert "command reads" in run(command, "m", file, "-o", "m", "--force", status=2).output
    assert (tmp_path / "m").read_bytes() == model


@pytest.mark.parametrize(
    "text",
    [
        b"she sells sea shells " * 40
        + b"by the shore, where nobody has ever bought a single one ....",
        "Füße und Öfen. " * 40 + "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    ],
)
def test_baselines_of_a_fit_are_those_of_the_held_out_part(text):
    from pathspace.sequences import baselines
    from pathspace.sequences.text import Alphabet

    held, before = text[-60:], text[:-60]
    rows = baseline_bits(held, before)
    content, seen = (part.encode() if isinstance(part, str) else part for part in (held, before))
    assert rows["bzip2"] == baselines.compressed_bits("bzip2", content, seen) / 60
    alphabet = Alphabet.of([text])
    coded = alphabet.encode(text)
    whole = baselines.context_tree_bits(coded, len(alphabet), 6)
    first = baselines.context_tree_bits(coded[:-60], len(alphabet), 6)
    assert rows["context trees"] == pytest.approx((whole - first) / 60)


def test_the_verdict_on_a_model_names_what_needs_fewer_bits():
    from pathspace.sequences.cli.worth import verdict

    others = {"bzip2": 1.0, "xz": 1.5, "context trees": 0.5}
    assert (
        verdict(0.4, others, True)[1]
        == "the model needs fewer bits than each of them: worth keeping"
    )
    assert (
        verdict(0.5, others, True)[1]
        == "the model needs no more bits than any of them: worth keeping"
    )
    said = verdict(1.2, others, True)[1]
    assert said.startswith(
        "the model needs more bits than context trees and bzip2: to compress a text together with the "
        "training part, take bzip2, or fit longer"
    )
    every = verdict(1.6, {"bzip2": 1.1, "xz": 1.2, "context trees": 1.0}, True)[1]
    assert every.startswith("the model needs more bits than context trees, bzip2 and xz: ")
    # no command compresses with context trees
    assert "than context trees: fit longer" in verdict(0.7, others, True)[1]
    assert "no-context" not in said
    assert "without --no-context" in verdict(1.2, others, False)[1]


def test_a_network_that_got_worse_is_not_to_be_fitted_longer(run, tmp_path):
    draw, notes, ends = random.Random(1).choice, ["c e g", "d f a", "g b d"], [" c", " |"]
    (tmp_path / "melody").write_text(" ".join(draw(notes) + draw(ends) for _ in range(60)))
    output = run("fit", "melody", "-o", "m", "--no-context").output
    best, passes = (
        int(re.search(f"{words}", output)[1]) for words in (r"best at pass (\d+)", r"(\d+) passes")
    )
    assert 2 * best < passes
    assert "fit with fewer --units or to more text" in output
    assert "fit longer" not in output


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "".join(
            f"10:{k // 60:02}:{k % 60:02} GET /page{k * k % 7}.html {200 + k % 2}\n"
            for k in range(200)
        )
    )
    return path


def test_no_network_got_worse_in_passes_that_were_not_looked_at(run, tmp_path):
    (tmp_path / "numbers").write_text("\n".join(map(str, range(400))))
    told = run("fit", "numbers", "-o", "m", "--passes", 1, "--no-context").output
    assert "bzip2" in told
    assert "got worse" not in told


def test_a_log_is_mixed_with_contexts(run, log, tmp_path):
    output = fit(run, log, "--context").output
    network, contexts, mixed = map(
        float,
        re.search(
            r"validation by network ([\d.]+), contexts ([\d.]+), mixed ([\d.]+)", output
        ).groups(),
    )
    assert max(contexts, mixed) < network / 2
    assert "the file has the mixture and the training text" in output
    assert "worth keeping" in output
    run("compress", "m", log)
    run("decompress", "m", "log.psq", "-o", "back")
    assert (tmp_path / "back").read_bytes() == log.read_bytes()
    assert b"GET /page" in run("sample", "m", "--length", 60).stdout_bytes
    assert run("predict", "m", "10:03:19 G", "--top", 1).output.split()[1] == "'E'"
    figures = json.loads(fit(run, log, "--context", "--json").stdout)
    assert figures["kept"] == "mixed"
    assert (
        figures["validation_bits_per_symbol"]
        == figures["validation_bits_per_symbol_by_model"]["mixed"]
    )
    # the mixture is measured, and the network goes on
    resumed = json.loads(fit(run, log, "--resume", "--passes", 50, "--json").stdout)
    assert resumed["passes"] == 50


def test_contexts_that_need_fewer_bits_than_the_mixture_are_kept(run, log, book):
    figures = json.loads(fit(run, log, "--json").stdout)
    rows = figures["validation_bits_per_symbol_by_model"]
    assert rows["contexts"] < rows["mixed"] < rows["network"]
    assert (figures["kept"], figures["validation_bits_per_symbol"]) == (
        "contexts",
        rows["contexts"],
    )
    assert load("m").silent
    assert "the file has contexts alone and the training text" in fit(run, log).output
    # its network goes on, and may be mixed yet
    resumed = json.loads(fit(run, log, "--resume", "--passes", 50, "--context", "--json").stdout)
    assert (resumed["passes"], resumed["kept"]) == (50, "mixed")
    assert json.loads(fit(run, book, "--json").stdout)["kept"] == "mixed"


def test_the_network_alone_holds_no_text(run, log, tmp_path):
    output = fit(run, log, "--no-context").output
    assert "validation by network" not in output
    assert b"pathspace.sequences.mixed" not in (tmp_path / "m").read_bytes()
    fit(run, log)
    assert b"pathspace.sequences.mixed" in (tmp_path / "m").read_bytes()


def test_without_a_validation_part_nothing_that_has_learned_by_heart_is_kept(run, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "words").write_text(
        " ".join("".join(rng.choice(list("abcd"), 4)) for _ in range(30))
    )
    options = ["-o", "m", "--share", 0, "--units", 24, "--passes", 100, "-q"]
    figures = json.loads(run("fit", "words", *options, "--json").stdout)
    rows = figures["training_bits_per_symbol_by_model"]
    assert rows["network"] < rows["contexts"]
    # a mixture would not be kept, and is not made
    assert (figures["kept"], rows.keys()) == ("contexts", {"network", "contexts"})
    output = run("fit", "words", *options).output
    assert re.search(r"network [\d.]+ \(fitted to it\), contexts [\d.]+ bits", output)
    assert "the file has contexts alone" in output
    mixed = run("fit", "words", *options, "--context", "--passes", 2).output
    assert "the file has the mixture" in mixed
    assert re.search(r"contexts [\d.]+, mixed [\d.]+ bits", mixed)


@pytest.mark.parametrize("gaining", [False, True])
def test_without_a_length_a_network_is_trained_as_long_as_contexts_gain(
    run, log, book, monkeypatch, gaining
):
    monkeypatch.setattr("pathspace.sequences.cli.gains.FIRST", 4)
    looked = []

    def bits(contexts, *_):
        looked.append(contexts.validation_bits_)
        # it gains 10 % twice, or nothing at all
        return looked[0] * (0.9 ** min(len(looked), 2) if gaining else 0.995)

    monkeypatch.setattr("pathspace.sequences.cli.gains.bits_beside", bits)
    result = run("fit", book, "-o", "m", "--units", 4, "--json")
    figures = json.loads(result.stdout)
    assert "contexts alone need" in result.stderr
    assert figures["passes"] == (16 if gaining else 4)
    assert f"after {figures['passes']} passes the network has gained 0." in result.stderr
    rows = figures["validation_bits_per_symbol_by_model"]
    assert ("mixed" in rows) is gaining
    assert f"alone need {rows['contexts']:.4f} bits/symbol" in result.stderr
    # it goes on when it is told to, and is trained as long as somebody says
    told = json.loads(run("fit", book, "-o", "m", "--resume", "--passes", 20, "--json").stdout)
    assert told["passes"] == 20
    asked = run("fit", book, "-o", "m", "--units", 4, "--passes", 6, "--json", "-q")
    assert json.loads(asked.stdout)["passes"] == 6
    assert not asked.stderr


def test_the_command_mixes_as_python_does(run, log):
    figures = json.loads(fit(run, log, "--context", "--json").stdout)
    text = log.read_bytes()
    mixed = Mixed(PCNN(units=6, connectivity=3, passes=40)).fit(text, 0.1)
    held = figures["validation_bits_per_symbol_by_model"]["mixed"] * int(len(text) * 0.1)
    assert held == pytest.approx(mixed.validation_bits_)
    assert load("m").bits(text) == pytest.approx(mixed.bits(text))


def test_compiling_is_named(run, book, monkeypatch):
    options = ("fit", book, "-o", "m", "--units", 4, "--passes", 0)
    assert "compiling" not in run(*options).stderr
    monkeypatch.setattr("pathspace.sequences.cli.console.is_compiled", lambda _: False)
    assert "compiling, once after an installation" in run(*options).stderr
    assert "compiling" not in run(*options, "-q").stderr
    assert "compiling" in run("compress", book, "-o", "packed").stderr
    # a network alone reads no contexts
    run(*options, "--no-context")
    assert "compiling" not in run("compress", "m", book, "-o", "other").stderr


def test_folds_tell_what_they_held_back_of_the_network_alone(run, log, book):
    two = ("--folds", 2, "--restarts", 2, "--ensemble", 2, "--passes", 12, "--json")
    figures = json.loads(fit(run, log, *two).stdout)
    rows = figures["training_bits_per_symbol_by_model"]
    assert (figures["kept"], figures["validation_bits_per_symbol"]) == ("contexts", None)
    held = figures["validation_bits_per_symbol_by_model"]
    assert held.keys() == {"network"}
    assert rows["contexts"] < held["network"]
    figures = json.loads(fit(run, book, *two, "--no-context").stdout)
    assert figures["validation_bits_per_symbol"] > 0


def test_the_training_figure_says_of_which_pass_it_is(run, book):
    output = run(
        "fit", book, "-o", "m", "--passes", 200, "--patience", 20, "--no-context", "-q"
    ).output
    at = int(output.split("best at pass ")[1].split()[0].rstrip(",;"))
    passes = int(output.split(" passes in ")[0].split()[-1])
    assert ("at the last pass" in output) is (at != passes)


def test_a_training_that_ends_early_says_so_in_a_line(run, tmp_path):
    file = tmp_path / "letters.txt"
    letters = np.random.default_rng(0).choice(list("abcd"), 400)
    file.write_text("".join(letters) + "abcd" * 50)
    options = (
        "--metric",
        "rutsd",
        "--damping",
        "0",
        "--units",
        "6",
        "--passes",
        "60",
        "--seed",
        "3",
    )
    result = run("fit", str(file), "-o", str(tmp_path / "it"), *options, "--no-context")
    (line,) = (line for line in result.stderr.splitlines() if "Warning" in line)
    assert line.startswith("Warning: the training ended at pass ")


def test_a_truth_of_some_symbols_is_no_truth_of_all(run, tmp_path):
    assert (
        "0.0000 bits for the symbols that others determine"
        in run("generate-task", "xor", "-o", "t").output
    )
    text = (tmp_path / "t").read_text()[:2000].rsplit("\n", 1)[0] + "\n"
    (tmp_path / "t").write_text(text)
    refused = run("baseline", "t", "t", "--depth", 1, "--task", "xor", status=2).output
    assert "leave --task out" in " ".join(refused.split())


def test_packed_files_are_not_written_over_themselves(run, book):
    run("fit", book, "-o", "m", "--passes", 2, "--no-context", "-q")
    run("compress", "m", book, "-o", "packed")
    for command, file in (("decompress", "packed"), ("compress", "packed")):
        refused = run(command, "m", file, "-o", "packed", "--force", status=2).output
        assert "one that this command reads" in " ".join(refused.split())


def test_a_network_without_a_pass_leaves_it_to_the_contexts(run, log):
    """It is not mixed with them either, which would take as long again."""
    for more in ([], ["--context"], ["--share", 0]):
        figures = json.loads(fit(run, log, "--passes", 0, "--json", *more).stdout)
        assert figures["kept"] == "contexts"
    assert figures["training_bits_per_symbol_by_model"].keys() == {"network", "contexts"}
    assert figures["training_bits_per_symbol_by_model"]["network"] is None
    for more in ([], ["--share", 0]):
        assert not re.search(r"nan|mixed", fit(run, log, "--passes", 0, *more).output)
    fit(run, log, "--passes", 20, "--resume", "--context")
    assert not load("m").silent


def test_contexts_alone_have_no_network_to_go_on_with(run, log, tmp_path):
    from pathspace.sequences import Mixed

    Mixed().fit(log.read_bytes()).save(tmp_path / "m")
    assert "contexts alone" in run("fit", log, "-o", "m", "--resume", status=2).output


@pytest.mark.parametrize("more", [("--share", 0.2), ("--validation", "book.txt")])
def test_folds_and_a_validation_part_are_refused_together(run, book, more):
    said = run("fit", book, "--folds", 2, "--restarts", 2, "--ensemble", 2, *more, status=2).stderr
    assert f"leave out {more[0]}" in " ".join(said.split())


def test_a_folder_to_validate_on_is_refused_by_its_option(run, book, tmp_path):
    assert "'--validation'" in run("fit", book, "--validation", tmp_path, status=2).output


@pytest.mark.sample(4)
@pytest.mark.parametrize("option", ["--units", "--restarts", "--ensemble", "--folds", "--jobs"])
def test_errors_name_the_option(run, book, option):
    assert f"'{option}'" in run("fit", book, option, 0, status=2).output
    assert "--ensemble is 3" in run("fit", book, "--ensemble", 3, status=2).output


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_are_written_with_their_true_code_length(run, name, tmp_path):
    output = run("generate-task", name, "-o", "t", "--seed", 5).output
    text = (tmp_path / "t").read_text()
    assert text == TASKS[name].generate(np.random.default_rng(5))
    assert f"true code length {TASKS[name].true_bits(text):.4f} bits" in output


def test_only_the_symbols_after_a_mark(run, tmp_path):
    (tmp_path / "x").write_text("01=1\n10=1\n00=0\n11=0\n" * 20)
    assert "bzip2" not in fit(run, tmp_path / "x", "--after", "=", "--share", "0.25").output
    assert "80 symbols" in run("bits", "m", "x", "--after", "=").output
    assert "one symbol" in run("bits", "m", "x", "--after", "==", status=2).output
    assert (
        "no symbol of x comes right after '?'"
        in run("bits", "m", "x", "--after", "?", status=2).output
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("01" * 40, "no symbol of x "),
        ("=1" + "01" * 40, "of the last part"),
        ("01" * 40 + "=1", "of the training part"),
    ],
)
def test_a_mark_with_nothing_after_it_is_named(run, tmp_path, text, named):
    (tmp_path / "x").write_text(text)
    said = run("fit", "x", "-o", "m", "--after", "=", status=2).output
    assert named in said
    assert "comes right after '='" in said
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(("text", "most"), [("é=1\udce9", 10), (b"01=1", 4)])
def test_marks_take_few_bytes_a_symbol(text, most):
    text = text * 20_000
    mark = "=" if isinstance(text, bytes) else "\udce9"
    tracemalloc.start()
    mask = mask_after(text, mark, Path("text"))
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < most * len(text)
    assert mask.tolist() == [False] + [symbol in (mark, ord(mark)) for symbol in text[:-1]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bytes_that_are_no_text_can_be_given_as_arguments(run, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\x01\xfe\x02" * 40)
    fit(run, tmp_path / "binary", "--after", os.fsdecode(b"\xff"))
    assert run("predict", "m", os.fsdecode(b"\xfe\x02\xff"), "--top", 1).output.endswith(
        "'\\x01'\n"
    )
    drawn = run("sample", "m", "--prompt", os.fsdecode(b"\xff\x01"), "--length", 4).stdout_bytes
    assert set(drawn) <= set(b"\xff\x01\xfe\x02")
    assert (
        "Error: --after takes one symbol"
        in run("bits", "m", tmp_path / "binary", "--after", "é", status=2).stderr
    )


def test_baselines_are_printed(run, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(TASKS["music"].generate(np.random.default_rng(seed), bars=80))
    output = run("baseline", "a", "b", "--states", 3, "--iterations", 5, "--task", "music").output
    for row in (
        "bzip2",
        "xz after training",
        "context trees",
        "HMM of 3 states",
        "sparse HMM of 3 states",
    ):
        assert row in output


@pytest.mark.parametrize(
    ("task", "says"),
    [("chess", "unknown task 'chess' in --task"), ("music", "is no text of the task music")],
)
def test_a_wrong_task_is_named_before_the_baselines(run, book, monkeypatch, task, says):
    monkeypatch.setattr("pathspace.sequences.baselines.compressed_bits", None)
    assert says in " ".join(run("baseline", book, book, "--task", task, status=2).stderr.split())


def test_mistakes_are_named_in_one_line(run, book, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"\xe4\xe4")
    assert "empty is empty" in run("fit", "empty", status=2).output
    said = run("fit", "latin", "--text", status=2).output
    assert "not UTF-8" in said
    assert "byte 0xe4 at position 0" in said
    assert "learn bytes, by fit without --text" in said  # which no other command has
    assert "unknown model" in run("fit", book, "--model", "lstm", status=2).output
    assert (
        "unknown metric 'adam' in --metric" in run("fit", book, "--metric", "adam", status=2).output
    )
    assert (
        "unknown writing 'adam' in --writing"
        in run("fit", book, "--writing", "adam", status=2).output
    )
    told = run("generate-task", "chess", "-o", "t", status=2).output
    assert "unknown task 'chess', choose from alphabet, alphabet-9, anbn, music, xor" in told
    assert (
        "give a file that `pathspace sequence fit` wrote"
        in run("bits", book, book, status=2).output
    )
    fit(run, book, "--no-context")
    (tmp_path / "other").write_text("SHE")
    assert (
        "3 of them unknown to the model (fit --alphabet FILE knows them)"
        in run("bits", "m", "other").output
    )


def test_json_has_what_the_text_says(run, book, tmp_path):
    fitted = json.loads(fit(run, book, "--json").stdout)
    assert fitted["passes"] == 40
    assert 0 < fitted["validation_bits_per_symbol"] < 3
    scored = json.loads(run("bits", "m", book, "--json").stdout)
    assert scored["symbols"] == 1170
    assert scored["bits"] == pytest.approx(1170 * scored["bits_per_symbol"])
    predicted = json.loads(run("predict", "m", "she", "--top", 2, "--json").stdout)["next"]
    assert [len(entry) for entry in predicted] == [2, 2]
    shown = run("predict", "m", "she", "--top", 2).stdout.splitlines()
    assert [repr(symbol) for symbol, _ in predicted] == [line.split(" ", 1)[1] for line in shown]
    assert "context trees" in fitted["baseline_bits_per_symbol"]
    # what is below a block says nothing
    assert all(bits > 0 for bits in fitted["baseline_bits_per_symbol"].values())
    packed = json.loads(run("compress", "m", book, "--json").stdout)
    assert packed["compressed"] == (tmp_path / packed["output"]).stat().st_size
    task = json.loads(run("generate-task", "anbn", "-o", "t", "--json").stdout)
    assert task["different"] == 3
    bits = json.loads(run("baseline", book, book, "--json").stdout)["bits"]
    assert bits["bzip2 after training"] < bits["bzip2"]


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("caf\xe9 ".encode() * 9, ["\\xa9", "\\xc3", " ", "a", "c", "f"]),
        ("caf\xe9 " * 9, [" ", "a", "c", "f", "\xe9"]),
        (["open", "shut"] * 9, ["open", "shut"]),
        ([60, 64] * 9, [60, 64]),
        ([True, False] * 9, [False, True]),
        (["\xe9".encode(), b"\xff"] * 9, ["\\xff", "\xe9"]),
        ([1.5, math.inf, -math.inf] * 9, [1.5, "inf", "-inf"]),
        ([("get", 1), ("put", b"x")] * 9, [["get", 1], ["put", "x"]]),
    ],
)
def test_json_names_symbols_of_any_kind(run, text, symbols):
    Mixed().fit(text, tokens=True if isinstance(text, list) else None).save("m")
    found = json.loads(run("predict", "m", "--json").stdout)["next"]
    assert sorted((symbol for symbol, _ in found), key=str) == sorted(symbols, key=str)


def _interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("fit.Texts.read", ("fit", "book.txt")),
        ("use.load", ("sample", "m")),
        ("use.load", ("bits", "m", "book.txt")),
        ("use.load", ("predict", "m")),
        ("lines._symbols", ("lines", "m", "book.txt")),
        ("lines._symbols", ("lines", "m", "book.txt", "--top", "2")),
        ("use.compress_bytes", ("compress", "book.txt")),
        ("use.decompress_bytes", ("decompress", "m", "book.txt", "-o", "back")),
        ("tasks.read", ("baseline", "book.txt", "book.txt")),
        ("tasks.write", ("generate-task", "anbn", "-o", "t")),
    ],
)
def test_ctrl_c_ends_each_command_with_130(run, book, tmp_path, monkeypatch, place, arguments):
    Mixed().fit(book.read_bytes()[:50]).save("m")
    monkeypatch.setattr(f"pathspace.sequences.cli.{place}", _interrupted)
    run(*arguments, status=130)
    assert {path.name for path in tmp_path.iterdir()} == {"book.txt", "m"}


def test_a_reader_that_ends_first_is_no_mistake(run, book, monkeypatch):
    Mixed().fit(book.read_bytes()[:50]).save("m")

    def closed(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("pathspace.sequences.cli.lines._Line.shown", closed)
    assert run("lines", "m", book, status=1).stderr == ""


def test_folds_and_an_alphabet_from_another_file(run, book, tmp_path):
    (tmp_path / "other").write_text("SHE SELLS")
    output = fit(
        run, book, "--folds", 2, "--restarts", 2, "--ensemble", 2, "--alphabet", tmp_path / "other"
    ).output
    assert "12 units" in output
    run("bits", "m", "other")
    assert "cannot go on" in run("fit", book, "-o", "m", "--resume", status=2).output


def test_weights_that_are_fitted_to_the_validation_part_are_named(run, book):
    two = ("--restarts", 2, "--passes", 20)
    output = fit(run, book, *two, "--ensemble", 2, "--folds", 2).output
    fitted = ", to which the weights of the merged networks are fitted, best at pass 20"
    assert re.search(rf"validation [\d.]+ bits/symbol{fitted}", output)
    assert re.search(r"training by network [\d.]+ \(fitted to it\), contexts", output)
    for more, told in (((), False), (("--ensemble", 2), True)):
        output = fit(run, book, *two, *more).output
        assert (fitted in output) is told
        assert "(fitted to it)" not in output
        assert (
            json.loads(fit(run, book, *two, *more, "--json").stdout)["fitted_to_validation"] is told
        )


def test_an_output_that_cannot_be_written_is_named_before_the_training(run, book, monkeypatch):
    monkeypatch.setattr("pathspace.sequences.estimators.SequenceModel.fit", None)
    assert "make it first" in run("fit", book, "-o", "no/where", status=2).output
    assert "is a folder" in run("fit", book, "-o", ".", status=2).output
    assert "there is no" in run("fit", book, "-o", "nothing", "--resume", status=2).output


def test_a_place_where_no_folder_can_be_made_is_named(run, book, tmp_path):
    (tmp_path / "m.checkpoint").write_text("a file")
    said = " ".join(fit_fails(run, book).split())
    assert "m.checkpoint cannot be made" in said
    assert "give another --output" in said


def fit_fails(run, book):
    return run("fit", book, "-o", "m", "--units", 3, "--passes", 2, status=2).output


def test_a_compressor_that_tells_nothing_of_a_few_symbols_is_left_out():
    assert all(bits >= 0 for bits in baseline_bits(b"e", b"caf\xe9 log line\n" * 60).values())


def test_no_baseline_needs_fewer_bits_than_none(run, tmp_path):
    (tmp_path / "long").write_bytes(b"caf\xe9 log line\n" * 60)
    (tmp_path / "short").write_bytes(b"e")
    bits = json.loads(run("baseline", "long", "short", "--json").stdout)["bits"]
    assert "bzip2" in bits
    assert all(value > 0 for value in bits.values())


def test_a_sample_beyond_all_memories_is_refused_by_its_length(run, book):
    fit(run, book, "--no-context")
    for length in (10**17, 10**23):
        said = run("sample", "m", "--length", length, status=2).stderr
        assert f"the length must be from 0 to {2**40}, got {length}" in " ".join(said.split())
    for wrong in (1e23, "12", 2.0):
        with pytest.raises(
            TypeError, match=f"the length must be a whole number, got {re.escape(repr(wrong))}"
        ):
            load("m").sample(wrong)


def test_half_a_surrogate_pair_is_written_as_its_code(run):
    PCNN(units=3, passes=2).fit("\udce9" * 20).save("m")
    assert run("sample", "m", "--length", 2).stdout == r"\udce9\udce9"
    assert json.loads(run("predict", "m", "--json").stdout)["next"] == [["\udce9", 1.0]]


def test_a_rounded_zero_has_no_sign(run, tmp_path):
    (tmp_path / "same").write_text("aaaaaaaaaaaa")
    output = fit(run, "same").output + run("bits", "m", "same").output
    assert "0.0000 bits/symbol" in output
    assert "-0" not in output


def test_a_dash_is_standard_input_and_output(book, begun, tmp_path, monkeypatch, capfdbinary):
    (tmp_path / "m").write_bytes(begun)

    def piped(*arguments):
        command = [sys.executable, "-m", "pathspace", "sequence", *arguments]
        done = subprocess.run(command, input=book.read_bytes(), capture_output=True, check=True)
        return done.stdout

    monkeypatch.chdir(tmp_path)
    inside = CliRunner().invoke(app, ["sequence", "bits", "m", "book.txt"])
    assert piped("bits", "m", "-") == inside.stdout_bytes
    (tmp_path / "packed").write_bytes(piped("compress", "m", "-", "-o", "-"))
    capfdbinary.readouterr()
    CliRunner().invoke(app, ["sequence", "decompress", "m", "packed", "-o", "-"])
    assert capfdbinary.readouterr().out == book.read_bytes()
    refused = CliRunner().invoke(app, ["sequence", "compress", "m", "-"])
    assert refused.exit_code == 2
    assert "give --output" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "m", "packed"]
