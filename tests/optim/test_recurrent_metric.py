"""DDPSGD on recurrent layers, whose metric is found without following a pass: as with a pass that is followed."""

import copy

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, Recurrent
from conformance import Entry, difference, power_of_two_factors, resumed, start
from pathspace.metrics import data_dependent


def made(options=None, **given):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Recurrent(hidden=6, batch_first=True, **(options or {})).double()
        x = torch.randn(9, 5, 2, dtype=torch.float64)
    given = {"lr": 0.02, "momentum": 0.9, "estimator": "signs"} | given
    return model, x, ps.optim.DDPSGD(model.parameters(), ps.trace(model, x), **given)


def train(model, optimizer, x, steps, forward=None):
    for _ in range(steps):
        optimizer.zero_grad()
        result = model(x) if forward is None else forward(model, x)
        (result - 1).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def replays(monkeypatch):
    """How many passes were followed."""
    count = []

    def counted(network, inputs, **options):
        count.append(inputs)
        return original(network, inputs, **options)

    original = data_dependent.replay
    monkeypatch.setattr(data_dependent, "replay", counted)
    return count


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharing", ["parameters", "edges"])
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "emit": "all", "bias": False}], ids=["one", "stack"]
)
def test_chains_take_the_steps_that_a_replay_gives(options, statistic, sharing, replays):
    found = []
    for short in (True, False):
        model, x, optimizer = made(options, statistic=statistic, sharing=sharing, refresh_every=2)
        if not short:
            optimizer.metric._chain = None
        found.append(train(model, optimizer, x, 5))
        assert len(replays) == (0 if short else 4)
    assert_close(*found, rtol=1e-11, atol=1e-13)


@pytest.mark.sample(1)
@pytest.mark.parametrize("examples", [0.5, 4])
def test_a_part_of_the_batch_gives_them_too(examples, replays):
    found = []
    for short in (True, False):
        model, x, optimizer = made(examples=examples)
        if not short:
            optimizer.metric._chain = None
        found.append(train(model, optimizer, x, 3))
        assert len(replays) == (0 if short else 3)
    assert_close(*found, rtol=1e-11, atol=1e-13)


def in_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).double()


def frozen(model, x):
    model.rnn.weight_hh_l0.requires_grad_(False)
    return model(x)


def for_inputs(model, x):
    return model(x.clone().requires_grad_())


def more_than_once(model, x):
    model(x[:2])
    return model(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("forward", [in_autocast, frozen, for_inputs])
def test_batches_of_other_passes_give_them_too(forward, replays):
    found = []
    for short in (True, False):
        model, x, optimizer = made()
        if not short:
            optimizer.metric._chain = None
        found.append(train(model, optimizer, x, 1, forward))
        assert len(replays) == (0 if short else 1)
    assert_close(*found, rtol=1e-11, atol=1e-13)


def test_the_last_of_several_calls_counts(replays):
    found = [train(*(m := made())[::2], m[1], 3, forward) for forward in (more_than_once, None)]
    assert not replays
    assert_close(*found, rtol=0, atol=0)


def test_a_kappa_that_needs_float64_is_computed_there():
    model, x, optimizer = made()
    model, x = model.float(), x.float()
    with torch.no_grad():
        model.out.weight.mul_(1e-22)
    optimizer = ps.optim.DDPSGD(model.parameters(), ps.trace(model, x), lr=0.01, estimator="signs")
    train(model, optimizer, x, 2)
    assert optimizer.state[model.rnn.weight_ih_l0]["data_average"].dtype == torch.float64


@pytest.mark.sample(1)
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_runs_are_bitwise_invariant_and_resume_exactly(statistic):
    options = {
        "lr": 0.02,
        "momentum": 0.9,
        "statistic": statistic,
        "estimator": "signs",
        "refresh_every": 2,
    }
    entry = Entry("signs", lambda params, network: ps.optim.DDPSGD(params, network, **options))
    case = BY_NAME["stacked rnn"]
    apart = difference(entry, case, torch.float32, power_of_two_factors(case.classes), steps=6)
    assert apart.finite
    assert apart.none
    run = start(entry, case).advance(3)
    other = resumed(run, entry, through_file=True)
    assert_close(run.advance(4).weights(), other.advance(4).weights(), rtol=0, atol=0)


def test_a_copy_follows_its_own_model(replays):
    model, x, optimizer = made()
    train(model, optimizer, x, 2)
    twin, copied = copy.deepcopy((model, optimizer))
    assert_close(train(model, optimizer, x, 2), train(twin, copied, x, 2), rtol=0, atol=0)
    assert not replays


def test_an_option_that_was_changed_is_obeyed(replays):
    model, x, optimizer = made()
    train(model, optimizer, x, 1)
    optimizer.metric.estimator = "exact"
    train(model, optimizer, x, 1)
    assert len(replays) == 1
