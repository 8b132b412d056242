"""PathCond's member, beside an optimization over paths that are listed one by one."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, mlp, traced


def condition(network):
    """Return the weights of PathCond's member; the network is left alone."""
    other = copy.deepcopy(network)
    ps.rescaling.balance_(other, criterion="conditioning")
    return [p.detach().clone() for p in other.parameters.values()]


def divergence(kappas):
    """Compute the log-det divergence of diag(kappa) from the nearest multiple of the identity, up to a constant."""
    live = torch.cat([k.reshape(-1) for k in kappas])
    live = live[live > 0]
    return len(live) * live.sum().log() - live.log().sum()


def newton(loss, size):
    """Return log s at the minimum of a convex function, by damped steps of Newton."""
    x = torch.zeros(size, dtype=torch.float64)
    gradient = torch.ones(size)
    while gradient.abs().max() > 1e-9:
        gradient = torch.autograd.functional.jacobian(loss, x)
        step = torch.linalg.solve(torch.autograd.functional.hessian(loss, x), gradient)
        x = x - step / step.abs().max().clamp_min(1.0)
    return x


def paths_of(sizes):
    """List the paths of an MLP with biases, each a list of its edges (layer, target, source)."""
    begins = [(0, i) for i in range(sizes[0])]
    begins += [(layer, "bias") for layer in range(len(sizes) - 1)]
    paths = []
    for layer, begin in begins:
        for nodes in itertools.product(*(range(n) for n in sizes[layer + 1 :])):
            sources = (begin, *nodes)
            paths.append([(layer + k, v, sources[k]) for k, v in enumerate(nodes)])
    return paths


def by_hand(layers):
    """Return PathCond's factors of an MLP, from a list of its paths."""
    sizes = [layers[0].in_features, *(layer.out_features for layer in layers)]
    paths = paths_of(sizes)
    edges = sorted({edge for path in paths for edge in path}, key=str)
    on_path = torch.tensor([[edge in path for edge in edges] for path in paths]).double()
    first = [0, *itertools.accumulate(sizes[1:-1])]  # unit of each hidden layer
    logs = torch.zeros(len(edges), dtype=torch.float64)
    powers = torch.zeros(len(edges), first[-1], dtype=torch.float64)
    for k, (layer, target, source) in enumerate(edges):
        bias = source == "bias"
        weight = layers[layer].bias[target] if bias else layers[layer].weight[target, source]
        logs[k] = weight.detach().abs().log()
        if layer < len(layers) - 1:
            powers[k, first[layer] + target] += 1
        if layer > 0 and not bias:
            powers[k, first[layer - 1] + source] -= 1

    def loss(x):
        scaled = logs + powers @ x
        others = (on_path @ scaled)[:, None] - scaled  # a path without one of its edges
        return divergence([(on_path * (2 * others).exp()).sum(0)])

    return newton(loss, first[-1]).exp()


def test_the_member_is_that_of_the_listed_paths():
    torch.manual_seed(0)
    model = mlp(2, 3, 2, 2).double()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(torch.rand(layer.weight.shape) * 4)
    expected = by_hand(layers)
    network = ps.trace(model, torch.zeros(1, 2, dtype=torch.float64))
    factors = ps.rescaling.balance_(network, criterion="conditioning")
    assert_close(factors, expected, rtol=1e-7, atol=0)


def test_a_single_path():
    """Two weights u and v have kappa v^2 and u^2, which are equal at |u| = |v|."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    model = model.double()
    with torch.no_grad():
        model[0].weight.fill_(8.0)
        model[2].weight.fill_(-0.5)
    network = ps.trace(model, torch.ones(1, 1, dtype=torch.float64))
    assert_close(
        ps.rescaling.balance_(network, criterion="conditioning"), torch.tensor([0.25]).double()
    )
    assert model[0].weight.item() == pytest.approx(2)
    assert model[2].weight.item() == pytest.approx(-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["mlp", "deep residual", "cnn 1d", "tied characters", "gated", "layer norm"]
)
def test_every_member_is_brought_to_the_same_least_divergence(name):
    network = traced(BY_NAME[name], torch.float64)[1]
    other = copy.deepcopy(network)
    ps.rescaling.random_rescale_(other, generator=torch.Generator().manual_seed(1))
    for p, q in zip(condition(network), condition(other), strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-9)
    ps.rescaling.balance_(network, criterion="conditioning")
    kappas = ps.paths.kappa(network)
    s = torch.ones(network.num_classes, dtype=torch.float64, requires_grad=True)
    moved = [k / network.edge_factors(name, s).square() for name, k in kappas.items()]
    (gradient,) = torch.autograd.grad(divergence(moved), s)
    count = sum(k.numel() for k in kappas.values())
    assert gradient.abs().max() < 1e-6 * count


def test_dead_units_stay_where_path_balance_has_them():
    """No weight into a unit that nothing leaves has a path, and none out of a unit that nothing enters."""
    model = mlp(3, 4, 4, 2).double()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0.0, 0.0  # nothing enters
        model[4].weight[:, 2] = 0.0  # nothing leaves
    network = ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))
    path = ps.rescaling.balance_(copy.deepcopy(network))
    factors = ps.rescaling.balance_(network, torch.randn(5, 3).double(), criterion="conditioning")
    assert factors.isfinite().all()
    dead = [1, 6]
    assert_close(factors[dead], path[dead])
    alive = [0, 2, 3, 4, 5, 7]
    assert (factors[alive] / path[alive] - 1).abs().min() > 1e-4
