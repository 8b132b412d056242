"""A fit that dies goes on from its checkpoints, to the same bits."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace.cli import app
from pathspace.sequences import PCNN, Mixed, checkpoints, load, storage
from pathspace.sequences.checkpoints import Checkpoint
from pathspace.sequences.cli import fit as command
from pathspace.tools.files import locked

TEXT = "she sells sea shells by the sea shore; " * 8


class KilledError(BaseException):
    """Stands for the end of the process: nothing is written after it."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    return tmp_path


@pytest.fixture
def killed_after(monkeypatch):
    """Kill the process after so many passes, all networks together, and write a checkpoint every third pass."""

    write, train = Checkpoint.write, checkpoints.train

    def set_up(passes):
        done = [0]

        def dying(checkpoint, training):
            if done[0] < passes:
                write(checkpoint, training)

        def counted(*arguments):
            *rest, report = arguments

            def reported(training):
                done[0] += 1
                monkeypatch.setattr(checkpoints, "SECONDS", 0.0 if done[0] % 3 == 0 else 1e9)
                if report is not None:  # of a network that is fitted for its mixing weights alone
                    report(training)
                if done[0] == passes:
                    raise KilledError

            return train(*rest, reported)

        monkeypatch.setattr(Checkpoint, "write", dying)
        monkeypatch.setattr(checkpoints, "train", counted)

    return set_up


def fit(*more, code=0):
    arguments = ["sequence", "fit", "text", "-o", "m", "--units", "4", "--passes", "12", *more]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def network(model):
    """The network of a fit, which is mixed with contexts where that needs fewer bits."""
    return model.model if isinstance(model, Mixed) else model


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, Mixed):
        assert one.bits(TEXT.encode()) == other.bits(TEXT.encode())
    one, other = network(one), network(other)
    for name in ("w", "tau", "rho", "V0"):
        assert np.array_equal(getattr(one.parameters_, name), getattr(other.parameters_, name))
    assert one.training_.result_bits == other.training_.result_bits
    assert (one.training_.passes, one.training_.tries) == (
        other.training_.passes,
        other.training_.tries,
    )


@pytest.mark.parametrize(
    ("options", "deaths"),
    [
        ([], (5, 4)),
        (["--model", "rnn", "--prior-writing", "0.1", "--share", "0"], (5, 4)),
        (["--restarts", "4", "--heat", "4", "--ensemble", "2"], (5, 9, 10)),
        (["--restarts", "2", "--folds", "2", "--ensemble", "2"], (5, 11)),
    ],
)
@pytest.mark.sample(2)
def test_a_killed_fit_goes_on_to_the_same_bits(here, killed_after, options, deaths):
    fit(*options)
    whole = load("m")
    (here / "m").unlink()
    assert not (here / "m.checkpoint").exists()
    for death in deaths:
        killed_after(death)
        with pytest.raises(KilledError):
            fit(*options)
        assert (here / "m.checkpoint" / "fit.json").exists()
    killed_after(10**9)
    said = "".join(fit(*options).output.split())  # lines are broken where the terminal ends
    assert "m.checkpoint(--freshstartsover)" in said
    assert_same(load("m"), whole)
    assert {path.name for path in here.iterdir()} == {"text", "m"}


@pytest.mark.slow
def test_resuming_from_the_output_is_kept_too(here, killed_after):
    fit()
    fit("--passes", "30", "--resume")
    whole = load("m")
    fit("--fresh")
    killed_after(7)
    with pytest.raises(KilledError):
        fit("--passes", "30", "--resume")
    assert network(load("m")).training_.passes == 12
    killed_after(10**9)
    fit("--passes", "30", "--resume")
    assert_same(load("m"), whole)


@pytest.mark.slow
def test_what_the_output_holds_is_no_other_fit(here, monkeypatch):
    fit()
    fit("--passes", "30", "--resume")
    whole = load("m")
    fit("--fresh")
    for _ in range(2):  # the second time from the output, which has all passes
        with monkeypatch.context() as patch:
            patch.setattr(command, "mix", lambda *_, **__: _raise(KeyboardInterrupt))
            said = fit("--passes", "30", "--resume", code=130).output
        assert "m holds the network alone, --resume goes on" in said
        assert network(load("m")).training_.passes == 30
    fit("--passes", "30", "--resume")
    assert_same(load("m"), whole)


@contextmanager
def stopped_after_five_passes(monkeypatch):
    show = command._FitReport.__call__

    def interrupt(report, training):
        show(report, training)
        if training.passes == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command._FitReport, "__call__", interrupt)
        yield patch


def test_ctrl_c_twice_saves_what_resume_goes_on_from(here, monkeypatch):
    fit()
    whole = load("m")
    (here / "m").unlink()
    with stopped_after_five_passes(monkeypatch) as patch:
        patch.setattr(command, "mix", lambda *_, **__: _raise(KeyboardInterrupt))
        assert "go on with --resume" in fit(code=130).output
    assert network(load("m")).training_.passes == 5
    fit("--resume")
    assert_same(load("m"), whole)


def test_ctrl_c_while_mixing_says_what_the_file_holds(here, monkeypatch):
    fit()
    whole = load("m")
    (here / "m").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(command, "mix", lambda *_, **__: _raise(KeyboardInterrupt))
        said = fit(code=130).output
    assert "m holds the network alone, the same command goes on" in said
    fit()
    assert_same(load("m"), whole)


def test_ctrl_c_in_a_new_fit_leaves_the_model_of_another_one(here, monkeypatch):
    fit()
    whole = load("m")
    fit("--seed", "1", "--fresh")
    other = (here / "m").read_bytes()
    with stopped_after_five_passes(monkeypatch):
        said = fit("--fresh", code=130).output
    assert "m stays as it was, the same command without --fresh goes on" in said
    assert (here / "m").read_bytes() == other
    with monkeypatch.context() as patch:
        patch.setattr(command, "mix", lambda *_, **__: _raise(KeyboardInterrupt))
        said = fit(code=130).output
    assert "m stays as it was, the same command goes on to mix" in said
    assert (here / "m").read_bytes() == other
    with monkeypatch.context() as patch:  # nothing is left to train
        patch.setattr(command._FitReport, "__call__", lambda *_: _raise(AssertionError))
        fit()
    assert_same(load("m"), whole)
    assert {path.name for path in here.iterdir()} == {"text", "m"}


def test_ctrl_c_before_the_baselines_leaves_the_figures_of_the_model(here, monkeypatch):
    monkeypatch.setattr(command, "baseline_bits", lambda *_: _raise(KeyboardInterrupt))
    said = fit(code=130).output
    assert "m: 12 passes in" in said
    assert "beside it" not in said
    assert json.loads(fit("--json", code=130).stdout)["interrupted"]


def _raise(error):
    raise error


def test_another_fit_does_not_go_on_from_there(here, killed_after):
    killed_after(4)
    with pytest.raises(KilledError):
        fit()
    before = {path.name: path.read_bytes() for path in (here / "m.checkpoint").iterdir()}
    assert set(before) == {"fit.json", "end-0.safetensors"}
    killed_after(10**9)
    for more in (["--units", "5"], ["--seed", "1"], ["--damping", "2"], ["--validation", "text"]):
        said = " ".join(fit(*more, code=2).output.split())
        assert "what is left of another fit" in said
        assert "--fresh" in said
    (here / "text").write_text(TEXT[:-1] + "!")
    fit(code=2)
    assert {path.name: path.read_bytes() for path in (here / "m.checkpoint").iterdir()} == before
    assert "5 units" in fit("--units", "5", "--fresh").output
    assert not (here / "m.checkpoint").exists()


def test_a_damaged_checkpoint_is_named(here, killed_after):
    killed_after(4)
    with pytest.raises(KilledError):
        fit()
    path = here / "m.checkpoint" / "end-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    killed_after(10**9)
    said = " ".join(fit(code=2).output.split())
    assert "end-0.safetensors is damaged: its checksum does not fit; delete it" in said
    path.unlink()
    fit()


def test_a_fit_that_fails_leaves_no_folder_and_a_device_has_none(here):
    fit("--metric", "adam", code=2)
    assert {path.name for path in here.iterdir()} == {"text"}
    result = CliRunner().invoke(
        app, ["sequence", "fit", "text", "-o", "/dev/null", "--passes", "2", "--units", "3"]
    )
    assert result.exit_code == 0, result.output


def test_two_fits_of_one_file_do_not_meet(here):
    (here / "m.checkpoint").mkdir()
    with locked(here / "m.checkpoint"):
        assert "another fit is writing m" in " ".join(fit(code=2).output.split())
    fit()


def test_ctrl_c_keeps_all_restarts(here, monkeypatch):
    fit("--restarts", "2", "--heat", "0")
    whole = load("m")
    (here / "m").unlink()
    show = command._FitReport.__call__

    def interrupt(report, training):
        show(report, training)
        if report._number == 2 and training.passes == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command._FitReport, "__call__", interrupt)
        said = fit("--restarts", "2", "--heat", "0", code=130).output
    assert "the same command goes on" in said
    assert not (here / "m").exists()
    assert storage.load(here / "m.checkpoint" / "end-1.safetensors").training.passes == 5
    fit("--restarts", "2", "--heat", "0")
    assert_same(load("m"), whole)


def test_the_library_keeps_them_where_it_is_told(tmp_path):
    model = PCNN(units=3, passes=4).fit(TEXT, checkpoint=tmp_path)
    assert storage.load(tmp_path / "end-0.safetensors").training.passes == 4
    again = PCNN(units=3, passes=4).fit(TEXT, checkpoint=tmp_path)
    assert_same(again, model)
    with pytest.raises(ValueError, match="another fit"):
        PCNN(units=3, passes=5).fit(TEXT, checkpoint=tmp_path)
