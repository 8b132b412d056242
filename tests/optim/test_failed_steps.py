"""A step that was refused leaves an optimizer as if it had not been asked for."""

import copy
import itertools

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import mlp
from pathspace.optim.rules import soap
from pathspace.optim.rules.soap import SOAP, soap_direction

KINDS = pytest.mark.parametrize("kind", ["DDPSGD", "DDPAdam", "QuasiDiagonal"])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def build(kind, **options):
    torch.manual_seed(1)
    model = mlp(4, 5, 3)
    network = ps.trace(model, X)
    return model, getattr(ps.optim, kind)(
        model.parameters(), network, lr=0.01, watch=False, **options
    )


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    model(X).square().mean().backward()
    if x is not None:
        optimizer.observe(x)
    optimizer.step()


def refuse_the_first_step(model, optimizer, how):
    if how == "no batch":
        with pytest.raises(RuntimeError, match="has seen no batch"):
            step(model, optimizer)
    else:
        with pytest.raises(FloatingPointError, match="not finite"):
            step(model, optimizer, X * float("nan"))


@pytest.mark.sample(2)
@KINDS
@pytest.mark.parametrize("how", ["no batch", "not finite"])
@pytest.mark.parametrize("normalization", ["refreshed", "frozen"])
def test_a_refused_first_step_is_no_first_step(kind, how, normalization):
    model, optimizer = build(kind, normalization=normalization)
    other = copy.deepcopy(model)
    refuse_the_first_step(model, optimizer, how)
    assert not any(optimizer.state.values())
    options = {"lr": 0.01, "watch": False, "normalization": normalization}
    theirs = getattr(ps.optim, kind)(other.parameters(), ps.trace(other, X), **options)
    for _ in range(2):
        step(model, optimizer, X)
        step(other, theirs, X)
    assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)


@KINDS
def test_weights_may_be_rescaled_after_a_refused_first_step(kind):
    runs = []
    for factor in (1.0, 8.0):
        model, optimizer = build(kind)
        refuse_the_first_step(model, optimizer, "no batch")
        ps.rescaling.rescale_(
            optimizer.network, torch.full((optimizer.network.num_classes,), factor)
        )
        for _ in range(3):
            step(model, optimizer, X)
        runs.append(model(X))
    assert torch.equal(*runs)


def test_a_refused_refresh_is_taken_at_the_next_step():
    runs = []
    for bad in (False, True):
        model, optimizer = build("DDPSGD", refresh_every=2)
        for i in range(4):
            if bad and i == 2:  # a refresh is due
                with pytest.raises(FloatingPointError, match="not finite"):
                    step(model, optimizer, X * float("nan"))
            step(model, optimizer, X)
        runs.append([p.detach() for p in model.parameters()])
    assert_close(*runs, rtol=0, atol=0)


def deep(factor):
    """Six layers of one class each for every unit, and an optimizer that took a step; then weights of 1e36 or so."""
    torch.manual_seed(1)
    model = mlp(4, 5, 5, 5, 5, 5, 3)
    network = ps.trace(model, X)
    ps.rescaling.rescale_(network, torch.full((network.num_classes,), factor))
    return model, network


def take_step_of_ones(model, optimizer, edges):
    """Gradients of ones in the member that was not rescaled."""
    for name, p in model.named_parameters():
        p.grad = torch.ones_like(p) / edges[name]
    optimizer.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam", "DDPSGD", "QuasiDiagonal"])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_beyond_float64_steps_are_those_of_the_balanced_network(rule, factor):
    model, network = deep(factor)
    edges = {
        n: network.edge_factors(n, torch.full((network.num_classes,), factor))
        for n in network.parameters
    }
    balance = {n: b.clone() for n, b in model.named_parameters()}
    options = {"alpha": 0.5} if rule == "QuasiDiagonal" else {}
    optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=1e-3, **options)
    model(X).square().mean().backward()
    take_step_of_ones(model, optimizer, edges)
    gauges = {name: optimizer.metric.gauge(name) for name in network.parameters}
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1e36 * edges[name] * torch.sign(balance[name]))
    with pytest.warns(UserWarning, match="running away"):
        take_step_of_ones(model, optimizer, edges)
    inverse = {name: optimizer.state[p]["factor"] for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        power = {"PathAdam": 1, "QuasiDiagonal": 0}.get(rule, 2)
        expected = gauges[name].times_(torch.ones_like(p).detach(), power)
        assert_close(inverse[name], expected)
        assert "bias" not in optimizer.state[p]  # nor products with it
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    model(X).square().mean().backward()
    take_step_of_ones(model, optimizer, edges)
    assert not all(
        torch.equal(optimizer.state[p]["factor"], inverse[n]) for n, p in model.named_parameters()
    )


@pytest.mark.parametrize("rule", ["PathSGD", "DDPSGD"])
def test_path_decay_beyond_float64_is_refused(rule):
    model, network = deep(1.0)
    optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=1e-3, path_decay=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    for p in model.parameters():
        p.data.sign_().mul_(1e36)
    before = weights(model)
    with pytest.warns(UserWarning, match="running away"), pytest.raises(FloatingPointError):
        optimizer.step()
    assert_close(weights(model), before, rtol=0, atol=0)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def large(rule, **options):
    """A network that a rule is handed in three parts, in one of which are parameters that take the plain rule."""
    torch.manual_seed(1)
    model = torch.nn.ModuleList([mlp(4, 600, 600, 600, 3), torch.nn.Linear(2, 2)])
    optimizer = ps.optim.Invariant(
        model.parameters(), ps.trace(model[0], X), rule, lr=0.01, **options
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model, optimizer


def raise_at(optimizer, monkeypatch, call):
    """Let the rule raise when it is called so often."""
    step, count = optimizer.rule.step, itertools.count(1)

    def raising():
        if next(count) == call:
            raise ValueError("so it goes")
        step()

    monkeypatch.setattr(optimizer.rule, "step", raising)


@pytest.mark.sample(2)
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor])
def test_a_rule_that_raises_between_two_parts_moves_no_weight(rule, call, monkeypatch):
    """Be it at its first step, or the first one after a state was loaded, or a group was added."""
    model, optimizer = large(rule, weight_decay=0.1)
    assert optimizer.rule is not None
    for prepare in (
        lambda: None,
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda: optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
    ):
        prepare()
        before, states = weights(model), {s for s, kept in optimizer.rule.state.items() if kept}
        with monkeypatch.context() as patched:
            raise_at(optimizer, patched, call)
            with pytest.raises(ValueError, match="so it goes"):
                optimizer.step()
        assert_close(weights(model), before, rtol=0, atol=0)
        assert {s for s, kept in optimizer.rule.state.items() if kept} == states
        optimizer.step()
        assert not any(map(torch.equal, weights(model), before))


def test_a_later_step_that_was_taken_in_part_says_so(monkeypatch):
    model, optimizer = large(torch.optim.AdamW, weight_decay=0.1)
    optimizer.step()
    before = weights(model)
    raise_at(optimizer, monkeypatch, 1)
    with pytest.raises(ValueError, match="so it goes") as caught:
        optimizer.step()
    assert_close(weights(model), before, rtol=0, atol=0)
    assert "some parameters" in caught.value.__notes__[0]


def test_a_decomposition_that_fails_at_any_step_moves_no_weight(monkeypatch):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = ps.optim.Invariant(
        model.parameters(), ps.trace(model, X), SOAP, lr=0.01, weight_decay=0.1
    )
    step(model, optimizer)
    before, count = weights(model), itertools.count(1)

    def direction(*args):
        if next(count) == 3:
            raise RuntimeError("did not converge")
        return soap_direction(*args)

    monkeypatch.setattr(soap, "soap_direction", direction)
    with pytest.raises(RuntimeError, match="converge"):
        step(model, optimizer)
    assert_close(weights(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("call", [1, 2])
def test_a_closure_that_raises_leaves_the_weights_where_they_were(call):
    """LBFGS asks for the loss elsewhere."""
    torch.manual_seed(1)
    model = mlp(4, 5, 3)
    optimizer = ps.optim.Invariant(
        model.parameters(), ps.trace(model, X), torch.optim.LBFGS, lr=0.1
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, count = weights(model), itertools.count(1)

    def closure():
        if next(count) == call:
            raise ValueError("no more data")
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="no more data"):
        optimizer.step(closure)
    assert_close(weights(model), before, rtol=0, atol=0)
