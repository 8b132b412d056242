"""Steps in path space by compiled loops against the steps that the optimizers take without them."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, mlp, trace

pytest.importorskip("numba", reason="compiled loops need Numba")

from pathspace.compiled import path_space_step as fused_path_space

RULES = [ps.optim.GSGD, ps.optim.GAdam]
# nodes at the ends of a tensor by row, by column and by both; biases, buffers, inverse scales, links of skeletons
NAMES = [
    "mlp",
    "cnn 2d",
    "convolution transposed",
    "deep residual",
    "small resnet",
    "stacked bidirectional rnn",
    "tied characters",
]
OPTIONS = {
    "plain": (ps.optim.GSGD, {}),
    "maximizing, clipped": (ps.optim.GSGD, {"maximize": True, "clip_norm": 0.02}),
    "momentum, decay": (ps.optim.GSGD, {"momentum": 0.9, "weight_decay": 0.1, "skeleton": "cyclic"}),
    "everything": (
        ps.optim.GSGD,
        {
            "lr": 0.005,
            "momentum": 0.5,
            "nesterov": True,
            "weight_decay": 0.05,
            "clip_norm": 0.1,
            "skeleton": "random",
        },
    ),
    "clamped": (ps.optim.GSGD, {"lr": 0.1, "clamp": 1.000001, "skeleton_rate": 1.0}),
    "raw": (ps.optim.GSGD, {"units": "none", "lr": 1e-4, "clamp": None}),
    "Adam": (ps.optim.GAdam, {}),
    "Adam, everything": (
        ps.optim.GAdam,
        {
            "lr": 0.003,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "clip_norm": 0.05,
            "clamp": 1.01,
            "skeleton": "cyclic",
        },
    ),
    "Adam, maximizing": (ps.optim.GAdam, {"maximize": True, "units": "none", "lr": 1e-4}),
}


def train(name, rule, *, fused, steps=6, change=None, seen=None, **options):
    """The optimizer and the weights after some steps, of the network and of a parameter outside it."""
    case = BY_NAME[name]
    model = case.model(torch.float64)
    outside = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    network = trace(case, model)
    optimizer = rule([*model.parameters(), outside], network, fused=fused, **{"lr": 0.01, **options})
    for step in range(steps):
        if change is not None:
            change(step, model, optimizer)
        optimizer.zero_grad()
        loss = case.loss(call(model, case.example(4, torch.float64, seed=step)))
        (loss + (outside - 1).square().sum()).backward()
        if seen is not None:
            seen(step, model)
        optimizer.step()
    assert optimizer.fused == fused
    return optimizer, [p.detach() for p in (*model.parameters(), outside)]


def same(name, rule, **options):
    """Train by both ways, and compare weights and counts."""
    expected, found = (train(name, rule, fused=fused, **options) for fused in (False, True))
    assert_close(found[1], expected[1], rtol=1e-12, atol=1e-13)
    ours, theirs = found[0].diagnostics(), expected[0].diagnostics()
    assert (ours["clamped"], ours["flipped"]) == (theirs["clamped"], theirs["flipped"])
    _, start = train(name, rule, fused=True, steps=0)
    assert not torch.equal(found[1][0], start[0])
    return ours


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS)
def test_runs_are_those_without_loops(name, options):
    rule, given = OPTIONS[options]
    found = same(name, rule, **given)
    if options == "clamped" and name != "tied characters":  # whose classes cannot move
        assert found["clamped"] > 0


def test_signs_that_flip_are_counted():
    found = same("mlp", ps.optim.GSGD, lr=10.0, clamp=None, skeleton_rate=1.0, steps=3)
    assert found["flipped"] > 0


def _first_dead(step, model, optimizer):
    """A class without paths, then a weight of the skeleton that is set to zero."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    with torch.no_grad():
        if step == 0:
            weights[1][:, 0] = 0
        if step == 2:
            name, index = optimizer.skeleton.incoming[1]
            model.get_parameter(name)[index] = 0
        if step == 4:
            name, index = optimizer.skeleton.outgoing[2]
            model.get_parameter(name)[index] = 0


@pytest.mark.parametrize("clamp", [2.0, None])
@pytest.mark.parametrize("rule", RULES)
def test_weights_that_are_zero(rule, clamp):
    same("mlp", rule, change=_first_dead, clamp=clamp)


def _coming_and_going(step, model):
    parameters = list(model.parameters())
    if step % 3 == 1:
        parameters[0].grad = None
    if step % 3 == 2:
        parameters[-1].grad = None


def _groups_apart(step, model, optimizer):
    """A group of its own for one matrix, whose options change."""
    if step == 0:
        p = optimizer.param_groups[0]["params"].pop(2)
        optimizer.add_param_group({"params": [p], "lr": 0.004, "weight_decay": 0.5})
    if step == 3:
        optimizer.param_groups[1]["lr"] = 0.0
    if step == 4:
        optimizer.param_groups[1]["lr"] = torch.tensor(0.002)


def _memory_moved(step, model, optimizer):
    del optimizer
    if step == 3:
        for p in model.parameters():
            p.data = p.data.clone()


def _moments_set_anew(step, model, optimizer):
    del model
    for state in optimizer.state.values():
        if step == 2:
            for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & state.keys():
                state[key] = state[key].clone()
        if step == 4:
            state.pop("momentum_buffer", None)
            state.pop("exp_avg", None)


def _skeleton_chosen_anew(step, model, optimizer):
    del model
    if step == 2:
        optimizer.choose_skeleton("cyclic")
    if step == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize(
    "change",
    [_groups_apart, _memory_moved, _moments_set_anew, _skeleton_chosen_anew],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("rule", RULES)
def test_what_changes_between_steps_is_seen(rule, change):
    options = {"momentum": 0.5} if rule is ps.optim.GSGD else {}
    same("mlp", rule, change=change, **options)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_may_come_and_go(rule):
    same("stacked rnn", rule, seen=_coming_and_going, steps=9)


def test_a_planted_fault_is_seen(monkeypatch):
    whole = fused_path_space._links
    monkeypatch.setattr(fused_path_space, "_links", lambda found: whole(found)[:0])
    with pytest.raises(AssertionError, match="not close"):
        same("mlp", ps.optim.GSGD)


@pytest.mark.parametrize("rule", RULES)
def test_the_loops_take_the_steps(monkeypatch, rule):
    """All but the first."""
    model, x = mlp(3, 5, 4, 2), torch.randn(4, 3)
    optimizer = rule(model.parameters(), ps.trace(model, x), fused=True, clip_norm=1.0)
    _advance(model, x, optimizer, 1)
    monkeypatch.setattr(rule, "_advance", None)
    before = copy.deepcopy(model.state_dict())
    _advance(model, x, optimizer, 3)
    assert all(not torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("rule", RULES)
def test_steps_that_the_loops_cannot_take_are_left_to_the_optimizer(rule):
    """A gradient that lies otherwise in memory, and a parameter outside the network of another type."""
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        model, x = mlp(3, 5, 4, 2), torch.randn(4, 3)
        outside = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = rule([*model.parameters(), outside], ps.trace(model, x), lr=0.01, fused=fused)
        for step in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step == 2:
                model[0].weight.grad = model[0].weight.grad.t().contiguous().t()
            if step == 4:
                outside.grad = torch.ones_like(outside)
            if step == 6:
                model.double()
                x = x.double()
            optimizer.step()
        runs.append([p.detach() for p in (*model.parameters(), outside)])
    assert_close(*runs, rtol=1e-4, atol=1e-6)


def test_why_there_are_no_loops():
    model, x = mlp(3, 4, 2), torch.randn(2, 3)
    network = ps.trace(model, x)
    assert ps.optim.GSGD(model.parameters(), network).not_fused_because == "fused=False"
    adam = ps.optim.GAdam(model.parameters(), network, amsgrad=True, fused=True)
    assert not adam.fused
    assert adam.not_fused_because == "amsgrad=True"
    half = mlp(3, 4, 2).bfloat16()
    optimizer = ps.optim.GSGD(half.parameters(), ps.trace(half, x.bfloat16()), fused=True)
    assert not optimizer.fused
    assert "float32" in optimizer.not_fused_because


@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_from_one_kind_to_the_other(rule):
    expected = None
    options = {"momentum": 0.9} if rule is ps.optim.GSGD else {}
    for kinds in [(False, False), (False, True), (True, False), (True, True)]:
        torch.manual_seed(0)
        model, x = mlp(3, 5, 4, 2).double(), torch.randn(4, 3, dtype=torch.float64)
        network, state = ps.trace(model, x), None
        for fused in kinds:
            optimizer = rule(model.parameters(), network, lr=0.01, fused=fused, **options)
            if state is not None:
                optimizer.load_state_dict(state)
            _advance(model, x, optimizer, 4)
            state = optimizer.state_dict()
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        expected = found if expected is None else expected
        assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_copy_has_memory_of_its_own():
    model, x = mlp(3, 5, 4, 2), torch.randn(4, 3)
    optimizer = ps.optim.GSGD(model.parameters(), ps.trace(model, x), momentum=0.9, lr=0.01, fused=True)
    _advance(model, x, optimizer, 3)
    twin, copied = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    _advance(twin, x, copied, 4)
    assert copied.fused
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    _advance(model, x, optimizer, 4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_autograd_and_the_network_notice():
    model, x = mlp(3, 4, 2), torch.randn(4, 3)
    optimizer = ps.optim.GSGD(model.parameters(), ps.trace(model, x), lr=0.01, fused=True)
    _advance(model, x, optimizer, 2)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match="trace the model again"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_rows_longer_and_matrices_taller_than_a_block(rule):
    """In float32, where sums are as exact as without the loops."""
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5000, 7), nn.ReLU(), nn.Linear(7, 900), nn.ReLU(), nn.Linear(900, 2))
        x = torch.randn(4, 5000)
        optimizer = rule(model.parameters(), ps.trace(model, x), lr=1e-3, clip_norm=1.0, fused=fused)
        _advance(model, x, optimizer, 3)
        runs.append([p.detach() for p in model.parameters()])
    assert_close(*runs, rtol=1e-4, atol=1e-6)


def _advance(model, x, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
