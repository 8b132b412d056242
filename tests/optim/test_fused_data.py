"""Compiled loops of the data-dependent metric: steps are those of the general way, and what is rare is left to it."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, trace
from conformance import power_of_two_factors

pytest.importorskip("numba", reason="compiled loops need Numba")

OPTIONS = {
    "plain": {},
    "covariance": {"statistic": "covariance", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "stale": {"refresh_every": 3, "momentum": 0.9, "averaging": 0.5},
    "exact": {"estimator": "exact", "normalization": "frozen", "clip_norm": 0.5},
    "raw": {"normalization": "none", "lr": 1e-4, "maximize": True},
    # left to the general way, in part or as a whole
    "paths alone": {"alpha": 0.0},
    "data alone": {"alpha": 1.0, "damping": 0.1},
    "path decay": {"path_decay": 0.01},
    "short steps": {"clip_step": 0.1},
}
NETS = ["mlp", "rnn", "stacked rnn", "batch norm", "tied autoencoder"]


def train(name, steps=8, factors=None, rule=ps.optim.DDPSGD, change=None, dtype=torch.float64, **options):
    case = BY_NAME[name]
    model = case.model(dtype)
    network = trace(case, model)
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    outside = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    options = {"lr": 0.01, "estimator": "signs"} | options
    optimizer = rule([*model.parameters(), outside], network, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = case.loss(call(model, case.example(4, dtype, seed=step)))
        (loss + outside.square().sum()).backward()
        if change is not None and step == 4:
            change(model, optimizer)
        optimizer.step()
    if factors is not None:
        ps.rescaling.rescale_(network, 1 / factors)
    return optimizer, [p.detach() for p in (*model.parameters(), outside)]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("options", OPTIONS)
def test_runs_are_those_of_the_general_way(name, options):
    _, expected = train(name, **OPTIONS[options])
    optimizer, found = train(name, fused=True, **OPTIONS[options])
    assert optimizer.fused or options == "paths alone"
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not torch.equal(found[0], train(name, steps=0)[1][0])


@pytest.mark.parametrize("options", [{}, {"refresh_every": 3, "statistic": "covariance"}, {"power": 0.5}])
def test_runs_of_adam_are_those_of_the_general_way(options):
    _, expected = train("rnn", rule=ps.optim.DDPAdam, **options)
    optimizer, found = train("rnn", rule=ps.optim.DDPAdam, fused=True, **options)
    assert optimizer.fused
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "stacked rnn"])
def test_powers_of_two_change_no_bit(name):
    options = {"fused": True, "refresh_every": 2, "momentum": 0.9, "dtype": torch.float32}
    factors = power_of_two_factors(BY_NAME[name].classes).float()
    for p, q in zip(train(name, **options)[1], train(name, factors=factors, **options)[1], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("refresh_every", [1, 2])
@pytest.mark.parametrize("rule", ["DDPSGD", "DDPAdam"])
@pytest.mark.parametrize("name", ["mlp", "stacked rnn"])
def test_the_loops_take_the_steps(name, rule, refresh_every, monkeypatch):
    """All but the first."""
    rule = getattr(ps.optim, rule)

    def change(model, optimizer):
        monkeypatch.setattr(rule, "_advance", None)
        monkeypatch.setattr(rule, "_surveyed", None)

    train(name, rule=rule, change=change, fused=True, refresh_every=refresh_every)


def _loaded(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _cleared(model, optimizer):
    optimizer.state.clear()


def _set_anew(model, optimizer):
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            if torch.is_tensor(value):
                state[key] = 2 * value if "average" in key else value.clone()


def _without_average(model, optimizer):
    for state in optimizer.state.values():
        state.pop("data_average", None)


def _moved(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def _without_a_gradient(model, optimizer):
    next(model.parameters()).grad = None


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize(
    "change", [_loaded, _cleared, _set_anew, _without_average, _moved, _without_a_gradient]
)
def test_what_others_do_to_the_state_is_seen(change, refresh_every):
    runs = [
        train("mlp", 9, change=change, momentum=0.9, refresh_every=refresh_every, fused=fused)[1]
        for fused in (False, True)
    ]
    for ours, theirs in zip(*runs, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_zeros_and_extremes_are_left_to_the_general_way():
    runs = []
    for fused in (False, True):
        case = BY_NAME["mlp"]
        model = case.model()
        network = trace(case, model)
        last = list(model.parameters())[-2]
        with torch.no_grad():
            last[:, 1] = 0
            last.mul_(1e-12)
        optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=1e-3, fused=fused, estimator="signs")
        for step in range(4):
            optimizer.zero_grad()
            case.loss(call(model, case.example(4, seed=step))).backward()
            optimizer.step()
        runs.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*runs, strict=True):
        assert torch.isfinite(ours).all()
        assert_close(ours, theirs)


def test_a_copy_steps_for_itself():
    case = BY_NAME["mlp"]
    model = case.model()
    optimizer = ps.optim.DDPSGD(model.parameters(), trace(case, model), lr=0.01, fused=True)

    def run(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            case.loss(call(model, case.example(4, seed=step))).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    run(model, optimizer)
    twin, copied = copy.deepcopy((model, optimizer))
    assert copied.fused
    assert_close(run(model, optimizer), run(twin, copied), rtol=0, atol=0)


def test_what_the_loops_cannot_read_is_told():
    case = BY_NAME["mlp"]
    model = case.model().bfloat16()
    network = trace(case, model)
    optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.01, fused=True)
    assert not optimizer.fused
    assert "float32" in optimizer.not_fused_because
