"""A step that was refused leaves an optimizer as if it had not been asked for."""

import copy

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import mlp

KINDS = pytest.mark.parametrize("kind", ["DDPSGD", "DDPAdam", "QuasiDiagonal"])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def build(kind, **options):
    torch.manual_seed(1)
    model = mlp(4, 5, 3)
    network = ps.trace(model, X)
    return model, getattr(ps.optim, kind)(model.parameters(), network, lr=0.01, watch=False, **options)


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
        ps.rescaling.rescale_(optimizer.network, torch.full((optimizer.network.num_classes,), factor))
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


@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam", "DDPSGD"])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_beyond_float64_steps_are_those_of_the_balanced_network(rule, factor):
    model, network = deep(factor)
    edges = {
        n: network.edge_factors(n, torch.full((network.num_classes,), factor)) for n in network.parameters
    }
    balance = {n: b.clone() for n, b in model.named_parameters()}
    optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=1e-3)
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
        power = 1 if rule == "PathAdam" else 2
        expected = gauges[name].times_(torch.ones_like(p).detach(), power)
        assert_close(inverse[name], expected)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    model(X).square().mean().backward()
    take_step_of_ones(model, optimizer, edges)
    assert not all(torch.equal(optimizer.state[p]["factor"], inverse[n]) for n, p in model.named_parameters())
