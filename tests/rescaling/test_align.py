"""Networks aligned, compared and merged up to permutation and rescaling of their units."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, mlp, traced
from pathspace.rescaling.assignment import best_assignment
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.permutation import groups_of

NAMES = [
    *("mlp", "deep residual", "scaled residual", "siamese", "split and merge", "slices", "cnn 1d", "cnn 3d"),
    *("dense block", "reshapes", "stacked bidirectional rnn", "tied characters", "hand-written loop"),
    *("convolution transposed", "gated", "squared relu"),
]


def shuffled(network, seed=1):
    """A copy whose units are permuted at random, and rescaled."""
    other = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    values = {name: p.detach() for name, p in other.parameters.items()}
    for group in groups_of(other)[0]:
        values = group.permuted(values, torch.randperm(len(group), generator=generator))
    with torch.no_grad():
        for name, p in other.parameters.items():
            p.copy_(values[name])
    ps.rescaling.random_rescale_(other, 1 / 8, 8, generator=generator)
    return other


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_assignment_is_the_best_of_all(n):
    torch.manual_seed(n)
    values = torch.randn(n, n).double()
    best = max(
        itertools.permutations(range(n)), key=lambda order: sum(values[i, j] for i, j in enumerate(order))
    )
    assert best_assignment(values).tolist() == list(best)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_order_and_scales_are_found_again(name):
    case = BY_NAME[name]
    model, network = traced(case, torch.float64)
    assert groups_of(network)[0]
    other = shuffled(network)
    x = case.example(3, torch.float64)
    before = case.picked(call(model, x))
    assert_close(case.picked(call(other.model, x)), before)
    assert any(
        not torch.equal(p, q) for p, q in zip(model.parameters(), other.model.parameters(), strict=True)
    )
    assert ps.rescaling.equivalent(network, other)
    ps.rescaling.align_(other, to=network)
    assert_close(case.picked(call(other.model, x)), before)


@pytest.mark.sample(4)
@pytest.mark.parametrize("by", ["paths", "weights", "activations"])
@pytest.mark.parametrize("name", ["mlp", "cnn 1d", "dense block"])
def test_aligned_weights_are_those_of_the_other_network(name, by):
    case = BY_NAME[name]
    network = traced(case, torch.float64)[1]
    other = shuffled(network)
    examples = case.example(16, torch.float64) if by == "activations" else None
    done = ps.rescaling.align_(other, network, by=by, examples=examples)
    for key, p in network.parameters.items():
        assert_close(other.parameters[key], p, rtol=1e-6, atol=1e-8)
    assert done.held == 0
    assert sorted(done.order.tolist()) == list(range(network.num_classes))


def test_alignment_does_not_see_how_either_network_is_scaled():
    case = BY_NAME["mlp"]
    a = traced(case, torch.float64)[1]
    b = ps.trace(case.model(torch.float64, seed=7), case.example(3, torch.float64))
    orders = []
    for seed in (None, 3):
        one, other = copy.deepcopy(a), copy.deepcopy(b)
        if seed is not None:
            for network in (one, other):
                ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(seed))
        orders += [ps.rescaling.align_(other, one, by=by).order.tolist() for by in ("paths", "weights")]
    assert orders[:2] == orders[2:]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["mlp", "cnn 1d", "stacked rnn", "tied characters", "gated"])
def test_the_member_with_equal_norms(name):
    network = traced(BY_NAME[name], torch.float64)[1]

    def balanced(network):
        ps.rescaling.rescale_(network, equal_norm_factors(network))
        return [p.detach().clone() for p in network.parameters.values()]

    other = copy.deepcopy(network)
    ps.rescaling.random_rescale_(other)
    for p, q in zip(balanced(network), balanced(other), strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-9)
    # no rescaling has less squared weight in all
    s = torch.ones(network.num_classes, dtype=torch.float64, requires_grad=True)
    total = sum(
        (p.detach() * network.edge_factors(n, s)).square().sum() for n, p in network.parameters.items()
    )
    assert torch.autograd.grad(total, s)[0].abs().max() < 1e-6 * total


def test_tells_the_first_class_that_differs():
    case = BY_NAME["mlp"]
    network = traced(case, torch.float64)[1]
    other = shuffled(network)
    assert str(ps.rescaling.equivalent(network, other)) == "equal up to permutation and rescaling"
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.parameters["2.weight"][1, 2] += 0.1
    found = ps.rescaling.equivalent(network, shuffled(changed))
    assert not found
    assert found.where == "'linear in '0'[2]'"
    assert "not equal up to permutation and rescaling: 'linear in '0'[2]' differs by" in str(found)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.parameters["4.bias"][0] += 0.1
    assert ps.rescaling.equivalent(network, changed).where == "a weight at inputs or outputs"


def test_signs_and_buffers_are_told_apart():
    network = traced(BY_NAME["mlp"], torch.float64)[1]
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.parameters["0.weight"].neg_()
    assert not ps.rescaling.equivalent(network, other)
    network = traced(BY_NAME["batch norm"], torch.float64)[1]
    other = copy.deepcopy(network)
    ps.rescaling.random_rescale_(other)
    assert ps.rescaling.equivalent(network, other)
    next(other.model.buffers()).add_(1.0)
    assert "buffer" in ps.rescaling.equivalent(network, other).where


def test_merged_copies_of_one_network_are_that_network():
    case = BY_NAME["deep residual"]
    model, network = traced(case, torch.float64)
    x = case.example(3, torch.float64)
    before = [p.clone() for p in model.parameters()]
    merged = ps.rescaling.merge([network, shuffled(network), shuffled(network, seed=2)])
    assert_close(case.picked(call(merged, x)), case.picked(call(model, x)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_merges_better_than_the_plain_mean():
    def trained(seed):
        torch.manual_seed(seed)
        model = mlp(2, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(150):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return ps.trace(model, x)

    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (x[:, :1] * x[:, 1:]).abs()
    networks = [trained(seed) for seed in (1, 2)]
    plain = copy.deepcopy(networks[0].model)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), networks[1].model.parameters(), strict=True):
            p.add_(q).div_(2)
    losses = [(m(x) - y).square().mean().item() for m in (plain, ps.rescaling.merge(networks))]
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["batch norm", "layer norm", "cnn 2d"])
def test_what_cannot_be_permuted_keeps_its_order_and_is_told(name):
    case = BY_NAME[name]
    model, network = traced(case, torch.float64)
    other = shuffled(network)
    x = case.example(3, torch.float64)
    with pytest.warns(UserWarning, match="unit classes keep their order, beginning with"):
        done = ps.rescaling.align_(other, network)
    assert done.held
    assert_close(case.picked(call(other.model, x)), case.picked(call(model, x)))


def test_refuses_what_does_not_fit():
    a, b = (ps.trace(mlp(3, n, 2), torch.zeros(1, 3)) for n in (4, 5))
    for function in (lambda: ps.rescaling.align_(b, a), lambda: ps.rescaling.equivalent(a, b)):
        with pytest.raises(ValueError, match="expected two networks of one architecture"):
            function()
    with pytest.raises(ValueError, match="expected two networks or more to merge, got 1"):
        ps.rescaling.merge([a])
    with pytest.raises(ValueError, match="by must be one of 'paths', 'weights', 'activations', got 'kernel'"):
        ps.rescaling.align_(a, a, by="kernel")
    with pytest.raises(ValueError, match="by='activations' without examples"):
        ps.rescaling.align_(a, a, by="activations")
    with pytest.raises(ValueError, match="by='paths' with examples"):
        ps.rescaling.align_(a, a, examples=torch.zeros(2, 3))


def test_dead_units_are_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[0].weight[1:3] = 0
        model[0].bias[1:3] = 0
        model[2].weight[:, 2:4] = 0
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert ps.rescaling.equivalent(network, shuffled(network))
