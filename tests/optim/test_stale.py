"""Steps between two computations of kappa: found once, and the same bit by bit as when they are looked up anew."""

import copy

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import BY_NAME, call, trace
from pathspace.optim.base.path_optimizer import PathOptimizer
from pathspace.optim.base.stale import Stale

OPTIONS = {
    "plain": (ps.optim.PathSGD, {}),
    "momentum": (ps.optim.PathSGD, {"momentum": 0.9, "nesterov": True, "clip_norm": 0.5}),
    "path decay": (ps.optim.PathSGD, {"path_decay": 1e-3, "damping": 0.01}),
    "Adam": (ps.optim.PathAdam, {}),
}


def _nothing(step, model, optimizer):
    del step, model, optimizer


def _loaded(step, model, optimizer):
    del model
    if step == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _cleared(step, model, optimizer):
    del model
    if step == 6:
        optimizer.state.clear()


def _kept_set_anew(step, model, optimizer):
    """Another metric in the state is the one that counts."""
    del model
    if step == 6:
        for state in optimizer.state.values():
            for key in {"kappa", "kappa_rows"} & state.keys():
                state[key] = 2 * state[key]
    if step == 7:
        for state in optimizer.state.values():
            if "normalizer" in state:
                state["normalizer"] *= 3


def _gradients_missing(step, model, optimizer):
    del optimizer
    if step in (3, 6, 7):
        next(model.parameters()).grad = None


def _refreshed_sooner(step, model, optimizer):
    del model
    if step == 6:
        optimizer.refresh_every = 2


CHANGES = [_nothing, _loaded, _cleared, _kept_set_anew, _gradients_missing, _refreshed_sooner]


def train(name, options, change):
    rule, given = OPTIONS[options]
    case = BY_NAME[name]
    model = case.model()
    outside = nn.Parameter(torch.ones(2))
    optimizer = rule([*model.parameters(), outside], trace(case, model), lr=0.02, refresh_every=4, **given)
    for step in range(11):
        optimizer.zero_grad()
        loss = case.loss(call(model, case.example(4, torch.float32, seed=step)))
        (loss + outside.square().sum()).backward()
        change(step, model, optimizer)
        optimizer.step()
    return [p.detach() for p in (*model.parameters(), outside)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_that_look_everything_up(options, change, monkeypatch):
    found = train("rnn", options, change)
    monkeypatch.setattr(Stale, "holds", lambda *_: False)
    assert all(torch.equal(p, q) for p, q in zip(found, train("rnn", options, change), strict=True))
    monkeypatch.undo()
    if change is not _nothing:  # which does something
        plain = train("rnn", options, _nothing)
        same = all(torch.equal(p, q) for p, q in zip(found, plain, strict=True))
        assert same == (change is _loaded)


def test_a_step_finds_what_the_one_before_found(monkeypatch):
    """The first step computes kappa, the second looks it up, the others do neither until it is due."""
    looked, now = [], [0]
    whole = PathOptimizer._metrics

    def counted(self, *given):
        looked.append(now[0])
        return whole(self, *given)

    monkeypatch.setattr(PathOptimizer, "_metrics", counted)
    case = BY_NAME["mlp"]
    model = case.model()
    optimizer = ps.optim.PathSGD(model.parameters(), trace(case, model), lr=0.02, refresh_every=5)
    for now[0] in range(8):
        optimizer.zero_grad()
        case.loss(call(model, case.example(4))).backward()
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        assert any(not torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert looked == [0, 1, 5, 6]


def test_nothing_holds_a_metric_that_the_state_has_dropped():
    case = BY_NAME["mlp"]
    model = case.model()
    optimizer = ps.optim.PathSGD(model.parameters(), trace(case, model), lr=0.02, refresh_every=2)
    case.loss(call(model, case.example(4))).backward()
    optimizer.step()
    optimizer.step()
    assert optimizer._stale is not None
    assert copy.deepcopy((model, optimizer))[1]._stale is None
    optimizer.step()
    assert optimizer._stale is None
