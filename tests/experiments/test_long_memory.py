"""Long memory: runs end as they should, controls change kappa as they say, and the comparison tests what it says."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import pathspace as ps
from pathspace.experiments.layers import laid_over
from pathspace.experiments.long_memory import (
    Cell,
    Setting,
    build_tables,
    chosen_rate,
    compared,
    reported_cells,
    settings,
    tuning_cells,
)
from pathspace.experiments.long_memory.training import (
    METHODS,
    PROBLEMS,
    RECURRENT,
    ChangedKappa,
    Protocol,
    Result,
    Trainer,
    compute,
)
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.recipes import load_recipe
from pathspace.experiments.report.statistics import holm, sign_test
from pathspace.experiments.settings import FIRST_TUNING_SEED

T, H, B = 20, 8, 16
RATE, SEED = 0.01, 7
SMALL = Setting("addition", T, H)
PROTOCOL = Protocol(steps_per_length=5, batch_size=B)


def advanced(method: str, steps: int, **changes: Any) -> Trainer:
    trainer = Trainer(Cell(SMALL, method, RATE, SEED), replace(PROTOCOL, **changes))
    for _ in range(steps):
        assert trainer.advance() is not None
    return trainer


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    start = dict(Trainer(Cell(SMALL, method, RATE, SEED), PROTOCOL).model.named_parameters())
    moved = dict(advanced(method, 3).model.named_parameters())
    assert all(not torch.equal(moved[name], start[name]) for name in start)


@pytest.mark.parametrize("method", ["path-muon", "balanced-adamw"])
def test_a_clipping_norm_of_0_does_not_clip(method: str) -> None:
    none, far = advanced(method, 3, clip_norm=0.0), advanced(method, 3, clip_norm=1e30)
    for one, other in zip(none.model.parameters(), far.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_adam_of_the_path_is_adam_on_the_balanced_network_without_a_metric() -> None:
    """With damping far above kappa the metric is a constant: both runs are one, but for its root."""
    one = advanced("path-adam", 5, damping=1e12, clip_norm=0.0)
    other = Trainer(
        Cell(SMALL, "balanced-adamw", RATE * 1e-6, SEED), replace(PROTOCOL, clip_norm=0.0)
    )
    for _ in range(5):
        other.advance()
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_run_ends_when_it_has_learned_diverged_or_taken_all_steps() -> None:
    setting, target = Setting("addition", 3, 2 * H), PROBLEMS["addition"].target
    protocol = replace(PROTOCOL, steps_per_length=100, test_size=64)
    threads = torch.get_num_threads()
    learned, lost, slow = (
        compute(Cell(setting, "path-muon", rate, 0), protocol) for rate in (0.03, 1e30, 1e-6)
    )
    assert torch.get_num_threads() == threads
    assert learned.steps is not None
    assert learned.error is not None
    assert learned.steps % 20 == 0
    assert learned.error < target
    assert (lost.steps, lost.error) == (None, None)
    assert slow.steps is None
    assert slow.error is not None
    assert slow.error > target


# -- controls --------------------------------------------------------------------------------------


def kappas(method: str, steps: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Kappa of a network that has moved, as the metric of a control has it, and as it is."""
    trainer = advanced("path-muon", 2)
    network = ps.trace(trainer.model, torch.zeros(1, T, 2))
    metric = ChangedKappa(
        METHODS[method], torch.randperm(H, generator=torch.Generator().manual_seed(1))
    )
    names = list(network.parameters)
    found = metric.values(network, names)
    for _ in range(steps):
        trainer.advance()
        found = metric.values(network, names)
    return dict(found), dict(ps.paths.kappa(network))


def test_a_permuted_kappa_has_its_units_in_one_other_order() -> None:
    found, kappa = kappas("permuted")
    units = torch.randperm(H, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(units, torch.arange(H))
    for name, value in kappa.items():
        wanted = value
        for dim in range(value.dim()):
            if value.shape[dim] == H:
                wanted = wanted.transpose(0, dim)[units].transpose(0, dim)
        torch.testing.assert_close(found[name], wanted)


def test_the_first_kappa_is_kept() -> None:
    (first, _), (later, now) = kappas("once"), kappas("once", 3)
    assert all(torch.equal(later[name], first[name]) for name in first)
    assert not torch.equal(now[RECURRENT], first[RECURRENT])


@pytest.mark.parametrize("method", ["recurrent-only", "input-only", "output-only"])
def test_some_parameters_alone_have_a_kappa(method: str) -> None:
    found, kappa = kappas(method)
    assert {name for name, value in found.items() if value.any()} == {*METHODS[method].of}
    assert all(torch.equal(found[name], kappa[name]) for name in METHODS[method].of)


def test_a_parameter_without_kappa_has_the_metric_of_the_balanced_network() -> None:
    trainer = advanced("recurrent-only", 1)
    factors = {
        name: trainer.optimizer.metric.state[name]["factor"]
        for name in ("readout.weight", RECURRENT)
    }  # type: ignore[attr-defined]
    torch.testing.assert_close(factors["readout.weight"], torch.ones(1, H), rtol=0.01, atol=0.0)
    assert factors[RECURRENT].amax() > 2 * factors[RECURRENT].amin()


def test_at_the_identity_the_importance_of_units_is_of_rank_one_and_rescaling_cannot_undo_it() -> (
    None
):
    """kappa'[j, k] = u_j u_k in the balanced network: scales would divide it by (s_j / s_k)^2 and leave u_j^2."""
    for seed in (3, 7, 11):
        torch.manual_seed(seed)
        model = ReluRNN(2, 1, hidden=H, start="identity-recurrent")
        network = ps.trace(model, torch.zeros(1, T, 2))
        ps.rescaling.balance_(network)
        kappa = ps.paths.kappa(network)[RECURRENT]
        u = kappa.diagonal().sqrt()
        torch.testing.assert_close(kappa, torch.outer(u, u), rtol=1e-4, atol=0.0)
        assert u.amax() / u.amin() > 2


def test_problems_ask_for_what_they_say() -> None:
    for name, (answer, constant) in {
        "addition": (lambda a, b: a + b, 1 / 6),
        "multiplication": (lambda a, b: a * b, 7 / 144),
        "subtraction": (lambda a, b: a - b, 1 / 6),
    }.items():
        x, y = PROBLEMS[name].draw(torch.Generator().manual_seed(2), 5000, 7)
        assert x.shape == (5000, 7, 2)
        halves = x[:, :3], x[:, 3:]
        assert all(bool((half[..., 1].sum(1) == 1).all()) for half in halves)
        torch.testing.assert_close(
            y, answer(*((half[..., 0] * half[..., 1]).sum(1) for half in halves))
        )
        assert float(y.var()) == pytest.approx(constant, rel=0.05)
        assert PROBLEMS[name].target == pytest.approx(0.06 * constant, rel=0.05)


# -- exact tests and choices -----------------------------------------------------------------------


def test_the_sign_test_counts_all_outcomes() -> None:
    for wins, losses in itertools.product(range(6), range(6)):
        signs = list(itertools.product((0, 1), repeat=wins + losses))
        far = abs(wins - losses)
        as_far = sum(abs(2 * sum(s) - len(s)) >= far for s in signs)
        assert sign_test(wins, losses) == pytest.approx(as_far / len(signs))


def test_holm_s_adjustment() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


SETTING = Setting("addition", 100, 64)


def result(method: str, rate: float, seed: int, steps: int | None, error: float | None) -> Result:
    return Result(Cell(SETTING, method, rate, seed), steps, error, 1.0)


def test_the_rate_of_most_successes_is_chosen_then_of_fewest_steps_then_of_the_least_error() -> (
    None
):
    some = [
        result("muon", 0.1, 0, 50, 0.0),
        result("muon", 0.1, 1, None, 0.5),
        result("muon", 0.2, 0, 90, 0.0),
        result("muon", 0.2, 1, 90, 0.0),
    ]
    assert chosen_rate(some, "muon") == 0.2
    faster = [result("muon", 0.3, seed, 80, 0.0) for seed in (0, 1)]
    assert chosen_rate([*some, *faster], "muon") == 0.3
    errors = {0.1: None, 0.2: 0.3, 0.3: 0.4}
    none = [result("muon", rate, 0, None, error) for rate, error in errors.items()]
    assert chosen_rate(none, "muon") == 0.2


def test_rates_are_chosen_on_seeds_that_are_not_reported() -> None:
    asked = Protocol(seeds=7, tuning_seeds=5, lengths=(100, 200))
    assert settings(asked) == [SETTING, Setting("addition", 200, 64)]
    tuning = tuning_cells(asked, SETTING)
    reported = reported_cells(asked, SETTING, dict.fromkeys(asked.methods, 0.01))
    assert len({cell.key for cell in (*tuning, *reported)}) == len(tuning) + len(reported)
    one, other = ({cell.seed for cell in cells} for cells in (tuning, reported))
    assert one == set(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + 5))
    assert other == set(range(7))


def test_pairs_are_tested_and_the_verdict_is_in_words() -> None:
    asked = Protocol(
        methods=("path-muon", "muon", "soap"), learning_rates=(0.1, 0.2), seeds=20, tuning_seeds=12
    )
    learns = {
        "path-muon": lambda _: 100,
        "muon": lambda _: None,
        "soap": lambda seed: 100 + 20 * (seed % 2),
    }
    tuning, reported = [], []
    for method, steps in learns.items():
        tuning += [result(method, 0.1, 1000 + s, steps(s), 0.0) for s in range(12)]
        tuning += [result(method, 0.2, 1000 + s, None, 0.0) for s in range(12)]
        reported += [result(method, 0.1, s, steps(s), 0.0) for s in range(20)]
    rows = compared(asked, tuning, reported)
    assert not rows["path-muon"].against_reference
    assert (rows["path-muon"].window, rows["muon"].window) == (1, 0)
    assert rows["path-muon"].rates_learned == [1] * 12
    assert (rows["path-muon"].median_steps, rows["muon"].median_steps) == (100, None)
    muon, soap = rows["muon"].against_reference, rows["soap"].against_reference
    assert (muon["learned"].wins, muon["learned"].losses) == (0, 20)
    assert muon["learned"].p == pytest.approx(2 * 2 * 0.5**20)  # the smaller one of two
    assert (muon["learned"].verdict, soap["learned"].verdict) == ("worse", "")
    assert (soap["steps"].wins, soap["steps"].losses) == (0, 10)
    assert soap["steps"].verdict == "worse"
    assert muon["window"].losses == 12
    (table,) = build_tables(asked, {SETTING: rows})
    assert table.rows[1].cells[1:7] == (
        "Muon on the weights",
        "0 of 24",
        "0 of 2",
        "<0.001",
        "0.1*",
        "0 of 20",
    )
    assert table.notes[0] == (
        "PathMuon learns it on more seeds than: Muon on the weights | no difference shown: SOAP on the weights."
    )
    assert (
        table.notes[1]
        == "PathMuon learns it sooner than: Muon on the weights; SOAP on the weights."
    )
    # else a sentence of Muon balanced once and Muon on the weights says "Muon; Muon"
    assert len({method.label for method in METHODS.values()}) == len(METHODS)


def test_the_recipe_has_the_sizes_that_it_needs() -> None:
    recipe = load_recipe("long-memory")
    assert next(iter(recipe.sizes)) == "small"
    full = laid_over(Protocol, recipe.layers("full"))
    assert (full.problems, full.lengths, full.hidden) == (
        tuple(PROBLEMS),
        (100, 200, 400),
        (64, 128),
    )
    assert full.seeds >= 40
