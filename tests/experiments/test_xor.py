"""The XOR table: what is learned, that a stopped training goes on as if nothing had been, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import call
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import laid_over
from pathspace.experiments.recipes import load_published, load_recipe

pytest.importorskip("numba")

from pathspace.experiments.xor import (
    STEPS,
    Cell,
    Look,
    Protocol,
    Result,
    build_table,
    cells,
    compute,
    notes,
    texts,
    wrong_lines,
)
from pathspace.sequences import PCNN, training
from pathspace.sequences.tasks import xor

TINY: dict[str, Any] = {
    "lines": 30,
    "length": 10,
    "units": 3,
    "passes": 9,
    "every": 3,
    "seeds": [5, 6],
}
COMMAND = ["reproduce", "xor", "--workers", "1"]
COMMAND += [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]


def tiny(**changes: Any) -> Protocol:
    return laid_over(Protocol, [("a test", {**TINY, **changes})])


def test_the_paper_s_size_is_the_paper_s() -> None:
    protocol = laid_over(Protocol, load_recipe("xor").layers("paper"))
    assert (protocol.lines, protocol.length, protocol.units, protocol.passes) == (
        10_000,
        100,
        10,
        2000,
    )
    assert len(protocol.seeds) == 8
    assert STEPS["published"] == {"damping": 1.0}
    assert len(cells(protocol)) == 16
    published = load_published("xor")
    assert published is not None
    assert [result.value for result in published.results] == [6, 4]
    assert tiny(seeds=3).seeds == (1000, 1001, 1002)


def test_the_steps_are_those_of_the_network(tmp_path: Path) -> None:
    protocol = tiny()
    results = {steps: compute(Cell(steps, 5), protocol, tmp_path) for steps in protocol.steps}
    drawn = [xor.generate(np.random.default_rng([21, k]), 30, 10) for k in (1, 2, 3)]
    for steps, result in results.items():
        model = PCNN(3, None, seed=5, metric="rbp", passes=9, **STEPS[steps])
        model.fit(drawn[0], mask=xor.mask(drawn[0]), passes=9)
        assert result.looks[-1].wrong == wrong_lines(model, drawn[1])
        assert result.looks[-1].nats == pytest.approx(
            -model.training_.log_likelihood / 30, rel=1e-12
        )
        assert result.test == wrong_lines(model, drawn[2])
        assert [look.passes for look in result.looks] == [3, 6, 9]
    assert results["published"].looks != results["ours"].looks


def test_each_seed_may_have_texts_of_its_own() -> None:
    shared, own = (tiny(own_texts=own) for own in (False, True))
    assert texts(Cell("ours", 5), shared) == texts(Cell("ours", 6), shared)
    drawn = [
        *texts(Cell("ours", 5), own),
        *texts(Cell("published", 6), own),
        *texts(Cell("ours", 5), shared),
    ]
    assert len(set(drawn)) == 9
    assert texts(Cell("published", 5), own) == texts(Cell("ours", 5), own)
    assert "of its own for each seed" in notes(own)[1]
    assert laid_over(Protocol, load_recipe("xor").layers("paper")).own_texts


def test_wrong_lines_are_counted() -> None:
    text = xor.generate(np.random.default_rng(0), 40, 10)
    model = PCNN(3, None, seed=1, passes=2).fit(text, mask=xor.mask(text))
    # by the definition: what is more probable, of 0 and 1, after each "="
    lines = text.splitlines(keepends=True)
    wrong, before = 0, ""
    for line in lines:
        head, bit = line.split("=")
        before += head + "="
        bits = [model.bits(before + guess) for guess in "01"]
        wrong += "01"[bits[1] < bits[0]] != bit[0]
        before += bit
    assert wrong_lines(model, text) == wrong / len(lines)


def test_a_stopped_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = tiny()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    whole = compute(Cell("ours", 6), protocol, tmp_path / "a")
    folder, save, saved = tmp_path / "b", PCNN.save, []

    def stops(model: PCNN, path: Any) -> None:
        if len(saved) == 1:
            raise KeyboardInterrupt
        saved.append(path)
        save(model, path)

    monkeypatch.setattr(PCNN, "save", stops)
    # when the second look is written, and its network is not
    with pytest.raises(KeyboardInterrupt):
        compute(Cell("ours", 6), protocol, folder)
    monkeypatch.setattr(PCNN, "save", save)
    assert len(json.loads((folder / "ours-6.json").read_text())) == 2
    again = compute(Cell("ours", 6), protocol, folder)
    assert (again.looks, again.test) == (whole.looks, whole.test)


@pytest.mark.filterwarnings("ignore:the training ended at pass")
def test_training_ends_where_no_direction_is_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = training.advance

    def breaks_off(state: training.Training, *rest: Any) -> Any:
        if state.passes == 4:
            raise FloatingPointError
        return advance(state, *rest)

    monkeypatch.setattr(training, "advance", breaks_off)
    protocol = tiny()
    result = compute(Cell("ours", 5), protocol, tmp_path)
    assert [look.passes for look in result.looks] == [3, 4]
    assert compute(Cell("ours", 5), protocol, tmp_path).looks == result.looks


def test_training_ends_when_the_text_is_learned(tmp_path: Path) -> None:
    protocol = tiny(passed=1.0)
    result = compute(Cell("published", 5), protocol, tmp_path)
    assert len(result.looks) == 1
    assert result.learned(protocol)
    assert result.looks[-1].passes == 3


def test_what_a_stopped_command_left_is_begun_anew_or_refused(tmp_path: Path) -> None:
    protocol = tiny()
    whole = compute(Cell("published", 5), protocol, tmp_path)
    looks, network = tmp_path / "published-5.json", tmp_path / "published-5.safetensors"
    looks.unlink()  # of a folder that was being cleared
    assert compute(Cell("published", 5), protocol, tmp_path).looks == whole.looks
    network.write_bytes(network.read_bytes()[:-9] + b"\0" * 9)
    with pytest.raises(ConfigurationError, match="delete it and start again"):
        compute(Cell("published", 5), protocol, tmp_path)


def test_the_table_counts_what_was_learned() -> None:
    protocol = tiny(steps=["ours"])
    results = [
        Result(Cell("ours", seed), (Look(3, 0.5, 0.7), Look(6, wrong, 0.1)), 0.25, 12.4)
        for seed, wrong in ((5, 0.005), (6, 0.01))
    ]
    rows = [row.cells for row in build_table(protocol, results).rows]
    assert rows[0] == ("ours", "5", "6 passes", "0.50%", "25.00%", "12")
    assert rows[1] == ("ours", "6", "–", "1.00%", "25.00%", "12")  # noqa: RUF001
    assert rows[2][2] == "1 of 2"
    assert "from 2 seeds fixed beforehand" in notes(protocol)[0]
    assert "from 1 seed fixed beforehand" in notes(replace(protocol, seeds=(5,)))[0]


@pytest.mark.usefixtures("no_pictures")
def test_networks_are_kept_until_all_are_done_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*COMMAND, "--output", str(tmp_path)]
    assert call(*command).exit_code == 0
    assert json.loads((tmp_path / "results.json").read_text())["learned"] == {
        "published": 0,
        "ours": 0,
    }
    assert len((tmp_path / "looks.csv").read_text().splitlines()) == 1 + 4 * 3
    networks = tmp_path / "networks"
    assert not list(networks.iterdir())
    (networks / "ours-5.json").write_text("[]")  # left behind

    def killed(_: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as early:
        early.setattr("pathspace.experiments.xor.make_folder", killed)
        assert call(*command, "--fresh", "--set", "units=4").exit_code == 130
    assert json.loads((tmp_path / "config.json").read_text())["protocol"]["units"] == 4
    assert not list(networks.iterdir())  # of 3 units, from which --resume would go on
    refused = call("reproduce", "xor", "--size", "paper", "--resume", "--output", str(tmp_path))
    assert "runs with other settings" in refused.stderr
