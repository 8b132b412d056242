"""The squared path norm against brute force, and as a regularizer."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, of_each_kind, oracle, trace, traced


@pytest.mark.sample(27)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_equals_brute_force(case):
    model, network = traced(case, torch.float64)
    value = ps.paths.squared_path_norm(network)
    assert value.shape == ()
    assert value.item() == pytest.approx(oracle(case, model).squared_path_norm().item(), rel=1e-10)


@pytest.mark.sample(30)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_gradient_is_twice_kappa_times_weight(case):
    model, network = traced(case, torch.float64)
    ps.paths.squared_path_norm(network).backward()
    kappa1 = oracle(case, model).kappa1()
    for name, p in model.named_parameters():
        # d gamma^2 / dp = 2 p kappa1
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        assert_close(gradient, 2 * p.detach() * kappa1[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["mlp", "stacked bidirectional rnn", "small resnet", "tied characters"]
)
def test_has_second_derivatives(name):
    case = BY_NAME[name]
    model = case.model(torch.float64)
    weights = list(model.parameters())
    value = ps.paths.squared_path_norm(trace(case, model))
    first = torch.autograd.grad(value, weights, create_graph=True)
    first[0].square().sum().backward()
    expected = case.model(torch.float64)
    leaves = dict(expected.named_parameters())
    slopes = torch.autograd.grad(
        oracle(case).squared_path_norm(leaves), list(leaves.values()), create_graph=True
    )
    slopes[0].square().sum().backward()
    for p, q in zip(weights, leaves.values(), strict=True):
        assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def test_regularizes_a_loss():
    case = BY_NAME["rnn"]
    model, network = traced(case, torch.float64)
    x = case.example(3, torch.float64)
    case.loss(model(x)).backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (case.loss(model(x)) + 0.1 * ps.paths.squared_path_norm(network)).backward()
    kappa1 = oracle(case, model).kappa1()
    for name, p in model.named_parameters():
        assert_close(p.grad, alone[name] + 0.2 * p.detach() * kappa1[name])


def test_follows_the_weights():
    case = BY_NAME["mlp"]
    model, network = traced(case, torch.float64)
    before = ps.paths.squared_path_norm(network).item()
    with torch.no_grad():
        model[-1].weight.mul_(2)
        model[-1].bias.mul_(2)
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(4 * before, rel=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_is_that_of_one_example_whatever_the_batch(case):
    model = case.model(torch.float64)
    values = {
        ps.paths.squared_path_norm(trace(case, model, batch=batch)).item() for batch in (1, 5)
    }
    assert max(values) == pytest.approx(min(values), rel=1e-12)


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_single_precision_comes_close(case):
    value = ps.paths.squared_path_norm(traced(case, torch.float32)[1])
    assert value.item() == pytest.approx(oracle(case).squared_path_norm().item(), rel=1e-4)
