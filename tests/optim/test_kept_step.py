"""Steps between two refreshes, all parameters at once: the same bits, and nothing that changed is overlooked."""

import copy

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import mlp
from pathspace.optim.base.kept_step import KeptStep


def made(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = mlp(3, 6, 5, 4), torch.randn(16, 3)
    groups = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (1, 2)]
    groups[0]["lr"] = 0.03
    options = {"lr": 0.05, "refresh_every": 4, "estimator": "signs"} | options
    return model, x, ps.optim.DDPSGD(groups, ps.trace(model, x), **options)


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def taken(monkeypatch):
    """How many steps were taken by what was remembered."""
    count = []

    def counted(self):
        done = original(self)
        count.extend([1] * done)
        return done

    original = KeptStep.take
    monkeypatch.setattr(KeptStep, "take", counted)
    return count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"maximize": True},
        {"momentum": 0.5, "alpha": 1.0, "damping": 0.1},
    ],
)
def test_steps_are_those_of_the_rule_bitwise(options, taken):
    model, x, optimizer = made(**options)
    ours = train(model, optimizer, x, 9)
    assert len(taken) == 6
    model, x, optimizer = made(**options)
    optimizer._between = None
    assert_close(ours, train(model, optimizer, x, 9), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["clip_norm", "clip_step"])
def test_clipped_steps_are_left_to_the_rule(option, taken):
    model, x, optimizer = made(**{option: 1e-3})
    train(model, optimizer, x, 3)
    assert not taken


def without_a_gradient(model, optimizer):
    next(model.parameters()).grad = None


def another_state(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["kappa"].mul_(3)
    optimizer.load_state_dict(state)


def another_metric(model, optimizer):
    for state in optimizer.state.values():
        state["kappa"] = 2 * state["kappa"]


def another_entry(model, optimizer):
    p = next(iter(optimizer.state))
    optimizer.state[p] = {**optimizer.state[p], "normalizer": 7.0}


def momentum_later(model, optimizer):
    for group in optimizer.param_groups:
        group["momentum"] = 0.9


def decay_later(model, optimizer):
    optimizer.param_groups[0]["path_decay"] = 0.1


def other_rates(model, optimizer):
    optimizer.param_groups[1]["lr"] = 0.01


def a_parameter_more(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(2)


@pytest.mark.parametrize(
    "change",
    [
        without_a_gradient,
        another_state,
        another_metric,
        another_entry,
        momentum_later,
        decay_later,
        other_rates,
        a_parameter_more,
    ],
)
def test_what_changes_between_refreshes_counts(change):
    found = []
    for kept in (True, False):
        model, x, optimizer = made()
        if not kept:
            optimizer._between = None
        train(model, optimizer, x, 2)
        before = train(model, optimizer, x, 0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        change(model, optimizer)
        optimizer.step()
        optimizer.step()
        found.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
        assert any(not torch.equal(a, b) for a, b in zip(before, found[-1][: len(before)], strict=True))
    assert_close(*found, rtol=0, atol=0)


def test_a_copy_steps_for_itself():
    model, x, optimizer = made(momentum=0.9)
    train(model, optimizer, x, 2)
    twin, copied = copy.deepcopy((model, optimizer))
    assert copied._between._optimizer is copied
    ours = train(model, optimizer, x, 5)
    assert_close(ours, train(twin, copied, x, 5), rtol=0, atol=0)


def test_rules_of_their_own_are_not_replaced(taken):
    class Doubled(ps.optim.DDPSGD):
        def _advance(self, active, metrics):
            super()._advance(active, metrics)

    model, x, _ = made()
    optimizer = Doubled(model.parameters(), ps.trace(model, x), refresh_every=3, estimator="signs")
    train(model, optimizer, x, 4)
    assert not taken
