"""Networks, restarts and states beyond memory and time are refused before the work; what there is room for is not."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pathspace import memory
from pathspace.cli import app
from pathspace.sequences import PCNN, RNN, Mixed
from pathspace.sequences.baselines import HiddenMarkov
from pathspace.sequences.cost import Networks, check_networks
from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import start
from pathspace.sequences.text import Corpus
from pathspace.sequences.training import Settings, Training, train

TEXT = "she sells sea shells by the sea shore; " * 20
HUGE = 99999999999999999999


@pytest.fixture
def gigabyte(monkeypatch):
    """Let the machine have a gigabyte."""
    monkeypatch.setattr(memory, "machine_memory", lambda: 10**9)


@pytest.mark.parametrize(
    "option",
    ["restarts", "passes", "units", "jobs", "heat", "patience", "validate_every", "seed"],
)
@pytest.mark.parametrize("value", [HUGE**2, 10**400, 10**5000], ids=["40 digits", "400", "5000"])
def test_a_number_beyond_everything_is_refused(option, value):
    with pytest.raises(
        ValueError, match=rf"{option} must be at most \d+, got .*: give a smaller number"
    ):
        PCNN(**{option: value}).fit(TEXT)


@pytest.mark.parametrize(
    "options", [{"restarts": HUGE, "ensemble": HUGE}, {"folds": HUGE, "restarts": HUGE}]
)
def test_networks_without_number_are_refused(options):
    with pytest.raises(ValueError, match=f"must be at most 100000, got {HUGE}"):
        Mixed(PCNN(**options)).fit(TEXT)


@pytest.mark.parametrize("name", ["damping", "writing_damping", "reach", "prior_writing", "rate"])
def test_a_whole_number_beyond_float64_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        PCNN(**{name: 10**400}).fit(TEXT)


@pytest.mark.usefixtures("gigabyte")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"units": 1_000_000},
            "a network of 1000000 units and 4000000 edges, for 12 symbols and a text of 780",
        ),
        (
            {"units": 2000, "writing": "fisher"},
            "of memory, and 1.0 GB are there: .* the writing step qdh",
        ),
        (
            {"units": 10**12, "connectivity": None},
            "of memory, and 1.0 GB are there: give fewer units",
        ),
        (
            {"units": 20_000, "connectivity": None, "passes": 0},
            "more than a million GB|GB of memory",
        ),
        (
            {"restarts": 100_000, "units": 64},
            "the arrays of 100000 networks .*: give fewer restarts or jobs, or",
        ),
        ({"restarts": 50, "jobs": 50, "units": 8}, "the arrays of 50 networks"),
        (
            {"restarts": 90_000, "folds": 90_000, "ensemble": 90_000},
            "90000 folds of a text .* give fewer folds",
        ),
    ],
)
def test_networks_beyond_memory_are_refused_before_they_are_made(options, says, monkeypatch):
    monkeypatch.setattr(Graph, "random", None)
    monkeypatch.setattr(Graph, "full", None)
    with pytest.raises(ValueError, match=says):
        PCNN(**options).fit([TEXT] if "folds" not in options else TEXT * 3)


@pytest.mark.usefixtures("gigabyte")
def test_an_ensemble_beyond_memory_is_refused():
    corpus = TEXT * 20
    with pytest.raises(
        ValueError, match=r"the states of an ensemble of 1000 networks of 8 units .* give a smaller"
    ):
        PCNN(units=8, restarts=1000, ensemble=1000).fit(TEXT, validation=corpus)


def test_what_there_is_room_for_is_not_refused(monkeypatch):
    """The limit is that of the machine."""
    corpus = Corpus.of([np.zeros(1000, np.int64)], 60)
    networks = Networks("pcnn", "rbp", 1_000_000, 3)
    needed = networks.held(60) + networks.trained(60, 1000, 1000)
    for there, refused in ((needed * 0.99, True), (needed, False), (None, False)):
        monkeypatch.setattr(memory, "machine_memory", lambda there=there: there)
        if refused:
            with pytest.raises(ValueError, match="of memory, and"):
                check_networks(networks, corpus)
        else:
            check_networks(networks, corpus)


def test_a_pass_of_days_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: None)
    with pytest.raises(
        ValueError,
        match=r"one pass of a network .* takes at least [\d,.]+ days, and one is allowed",
    ):
        RNN(units=10**15, metric="rbp-qd").fit(TEXT)


@pytest.mark.parametrize(
    ("kind", "metric", "N", "d", "A", "T", "passes"),
    [
        ("pcnn", "rbp", 40, 40, 12, 2000, 2),
        ("pcnn", "rbp", 500, 3, 20, 100, 2),
        ("pcnn", "rbp-qd", 500, 3, 20, 100, 2),
        ("rnn", "rbp-qd", 100, 100, 20, 50, 0),
        ("rnn", "fb", 100, 3, 20, 3000, 2),
        ("pcnn", "rbp", 4, 3, 100, 10_000, 2),
        ("cnn", "rutsd", 50, 10, 20, 500, 2),
    ],
)
def test_the_estimate_of_memory_is_below_what_a_training_takes_and_not_far(
    kind, metric, N, d, A, T, passes
):
    rng = np.random.default_rng(0)
    corpus = Corpus.of([rng.integers(0, A, T)], A)
    settings = Settings(metric=metric, passes=passes)

    def run():
        graph = Graph.full(N) if d == N else Graph.random(N, d, rng)
        train(Training.begin(start(kind, "tanh", graph, corpus, rng)), corpus, settings)

    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    networks = Networks(kind, metric, N, d, passes=passes)
    assert 0.3 * peak < networks.held(A) + networks.trained(A, T, T) <= peak


@pytest.mark.usefixtures("gigabyte")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--restarts", HUGE), "restarts must be at most 100000, got 99999999999999999999"),
        (("--passes", HUGE), "passes must be at most 1000000000, got"),
        (("--units", 1_000_000), "are there: give fewer units"),
        (("--units", HUGE, "--connectivity", 0), "are there: give fewer units"),
        (("--restarts", HUGE, "--ensemble", HUGE), "must be at most 100000, got"),
        (("--restarts", HUGE, "--folds", HUGE, "--ensemble", HUGE), "must be at most 100000, got"),
    ],
)
def test_the_command_refuses_them_in_a_sentence(options, says, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    files = (str(tmp_path / "text"), "-o", str(tmp_path / "m"))
    result = CliRunner().invoke(app, ["sequence", "fit", *files, *map(str, options)])
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.usefixtures("gigabyte")
@pytest.mark.parametrize(
    ("states", "iterations", "says"),
    [
        (100_000, 100, "fewer states"),
        (HUGE, 1, "fewer states"),
        (2, HUGE, "iterations must be at most"),
    ],
)
def test_hidden_states_beyond_memory_are_refused(states, iterations, says):
    with pytest.raises(ValueError, match=says):
        HiddenMarkov(states, iterations).fit(np.zeros(100, np.int64), 2)


def test_the_memory_is_that_of_the_machine_or_of_what_bounds_it(tmp_path, monkeypatch):
    there = memory.machine_memory()
    if Path("/proc/meminfo").exists():
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert there is not None
        assert there <= total * 1.01
    for name, said in (("a", "max\n"), ("b", "1000000\n")):
        (tmp_path / name).write_text(said)
    monkeypatch.setattr(memory, "_CGROUPS", (tmp_path / "none", tmp_path / "a", tmp_path / "b"))
    assert memory.machine_memory() == 1_000_000
    monkeypatch.delattr(os, "sysconf")
    assert memory.machine_memory() == 1_000_000
    memory.check_memory(999_999, "arrays", "give less")
    with pytest.raises(
        ValueError, match=r"arrays take at least 2.0 MB of memory, and 1.0 MB are there: give less"
    ):
        memory.check_memory(2e6, "arrays", "give less")
