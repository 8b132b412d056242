import io
import itertools
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import optim

import pathspace as ps
from cases import OPTIMIZERS
from pathspace.experiments import invariance
from pathspace.experiments.invariance import (
    CANDIDATES,
    Candidate,
    check_all,
    print_verdicts,
    verdicts_as_json,
)
from pathspace.experiments.model_source import NETWORKS, build_network, example_loss


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_same_on_every_call_and_leave_the_random_state_alone(name: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    (one, example), (other, again) = build_network(name), build_network(name)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(example, again)
    assert torch.equal(one(example), other(again))
    assert not one.training
    assert example_loss(one(example)).ndim == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_path_sgd_keeps_its_claim_and_sgd_makes_none(name: str) -> None:
    sgd, path_sgd = check_all(["sgd", "path-sgd"], [name], steps=3)
    assert path_sgd.claimed
    assert path_sgd.report.passed
    assert not path_sgd.broken
    assert not sgd.claimed
    assert not sgd.report.passed
    assert not sgd.broken


def test_a_broken_claim_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    false_claim = Candidate(lambda model, _: optim.SGD(model.parameters(), lr=0.01), invariant=True)
    monkeypatch.setitem(invariance.CANDIDATES, "false", false_claim)
    verdicts = list(check_all(["false"], ["mlp"], steps=2))
    assert verdicts[0].broken
    stream = io.StringIO()
    print_verdicts(verdicts, Console(file=stream, width=120))
    assert "false on mlp: outputs differ by up to" in stream.getvalue()
    (values,) = verdicts_as_json(verdicts)
    assert values["claims_invariance"]
    assert not values["passed"]
    assert 0 < values["largest_output_difference"] == verdicts[0].report.largest_output_difference


@pytest.mark.parametrize("columns", [40, 80])
def test_names_and_numbers_are_whole_in_a_narrow_terminal(columns: int) -> None:
    (verdict,) = check_all(["sgd"], ["mlp"], steps=2)
    report = replace(verdict.report, largest_output_difference=1.2e15)
    stream = io.StringIO()
    print_verdicts(
        [
            replace(verdict, optimizer="path-sgd-momentum", network=name, report=report)
            for name in NETWORKS
        ],
        Console(file=stream, width=columns),
    )
    assert {"path-sgd-momentum", *NETWORKS} <= set(stream.getvalue().split())
    assert stream.getvalue().count("1.2e+15") == len(NETWORKS)


def test_what_is_no_number_is_null_in_json() -> None:
    (verdict,) = check_all(["sgd"], ["mlp"], steps=2)
    lost = replace(verdict, report=replace(verdict.report, largest_output_difference=math.inf))
    assert verdicts_as_json([lost])[0]["largest_output_difference"] is None


# Every optimizer on one network, the networks in turn; all pairs are among the documented commands
# that `make test-all` executes.
OTHERS = [name for name in CANDIDATES if name not in ("sgd", "path-sgd")]
PAIRS = list(zip(OTHERS, itertools.cycle(NETWORKS), strict=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "network"), PAIRS)
def test_every_optimizer_keeps_its_claim(name: str, network: str) -> None:
    (verdict,) = check_all([name], [network], steps=3)
    assert verdict.claimed == CANDIDATES[name].invariant
    assert verdict.report.passed == verdict.claimed


def test_every_optimizer_is_among_the_candidates() -> None:
    model, example = build_network("mlp")
    network = ps.trace(model, example)
    built = {type(candidate.build(model, network)).__name__ for candidate in CANDIDATES.values()}
    assert built >= set(OPTIMIZERS)
    assert {
        "sgd",
        "adam",
        "path-sgd",
        "path-sgd-momentum",
        "path-sgd-nesterov",
        "path-sgd-decay",
    } <= set(CANDIDATES)
    assert {"path-sgd-clipping", "path-sgd-fresh"} <= set(CANDIDATES)
