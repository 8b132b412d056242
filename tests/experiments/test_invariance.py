import io

import pytest
import torch
from rich.console import Console
from torch import optim

from pathspace.experiments import invariance
from pathspace.experiments.invariance import CANDIDATES, Candidate, as_json, check_all, print_verdicts
from pathspace.experiments.zoo import NETWORKS, build_network, example_loss


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


@pytest.mark.parametrize("name", NETWORKS)
def test_path_sgd_keeps_its_claim_and_sgd_makes_none(name: str) -> None:
    sgd, path_sgd = check_all(["sgd", "path-sgd"], [name], steps=5)
    assert path_sgd.claimed
    assert path_sgd.report.passed
    assert not path_sgd.broken
    assert not sgd.claimed
    assert not sgd.report.passed
    assert not sgd.broken


def test_a_broken_claim_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    false_claim = Candidate(lambda model, _: optim.SGD(model.parameters(), lr=0.01), invariant=True)
    monkeypatch.setitem(invariance.CANDIDATES, "false", false_claim)
    verdicts = check_all(["false"], ["mlp"], steps=2)
    assert verdicts[0].broken
    stream = io.StringIO()
    print_verdicts(verdicts, Console(file=stream, width=120))
    assert "false on mlp: outputs differ by up to" in stream.getvalue()
    (values,) = as_json(verdicts)
    assert values["claims_invariance"]
    assert not values["passed"]


def test_every_way_of_path_sgd_is_among_the_candidates() -> None:
    assert {"sgd", "adam", "path-sgd", "path-sgd-momentum", "path-sgd-nesterov", "path-sgd-decay"} <= set(
        CANDIDATES
    )
    assert {"path-sgd-clipping", "path-sgd-stale"} <= set(CANDIDATES)
