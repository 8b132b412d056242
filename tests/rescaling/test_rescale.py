"""Rescaling and balancing: the function stays, the weights move as the formulas say."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, call, mlp, of_each_kind, trace, traced
from oracles.squared import Oracle


def output(case, model, example):
    with torch.no_grad():
        return case.picked(call(model, example))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_preserves_the_function(case):
    model, network = traced(case, torch.float64)
    example = case.example(3, torch.float64)
    before, start = output(case, model, example), weights(model)
    factors = ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0))
    assert factors.shape == (case.classes,)
    assert_close(
        output(case, model, example),
        before,
        rtol=1e-11,
        atol=1e-13 * before.abs().max().item() + 1e-13,
    )
    assert case.classes == 0 or any(
        not torch.equal(p, start[name]) for name, p in model.named_parameters()
    )


@pytest.mark.sample(39)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_powers_of_two_round_nothing(case):
    model, network = traced(case, torch.float32)
    example = case.example(3)
    before, start = output(case, model, example), weights(model)
    factors = ps.rescaling.random_rescale_(network, low=2.0**-10, high=2.0**10, powers_of_two=True)
    assert torch.equal(factors, 2.0 ** factors.log2().round())
    assert ((factors >= 2.0**-10) & (factors <= 2.0**10)).all()
    assert_close(output(case, model, example), before, rtol=0, atol=0)
    ps.rescaling.rescale_(network, 1 / factors)
    assert_close(weights(model), start, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mlp", "small resnet", "tied characters"])
def test_composes(name):
    case = BY_NAME[name]
    once, twice = case.model(torch.float64), case.model(torch.float64)
    a, b = (2.0 ** torch.randint(-5, 6, (2, case.classes)).double()).unbind()
    ps.rescaling.rescale_(trace(case, once), a * b)
    network = trace(case, twice)
    ps.rescaling.rescale_(network, a)
    ps.rescaling.rescale_(network, b)
    assert_close(weights(once), weights(twice), rtol=0, atol=0)


def test_multiplies_by_target_over_source():
    model = mlp(2, 3, 2).double()
    network = ps.trace(model, torch.randn(1, 2).double())
    start = weights(model)
    factors = torch.tensor([0.5, 3.0, 7.0], dtype=torch.float64)
    row = {dict(c.bias)["0.bias"][0]: c.index for c in network.unit_classes}
    s = torch.stack([factors[row[unit]] for unit in range(3)])
    ps.rescaling.rescale_(network, factors)
    assert_close(model[0].weight.detach(), start["0.weight"] * s[:, None])
    assert_close(model[0].bias.detach(), start["0.bias"] * s)
    assert_close(model[2].weight.detach(), start["2.weight"] / s)
    assert torch.equal(model[2].bias, start["2.bias"])


def test_works_in_place_on_leaves():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    model(torch.randn(2, 3)).sum().backward()
    pointers = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    ps.rescaling.rescale_(network, torch.full((4,), 2.0))
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    "factors",
    [
        torch.ones(3),
        torch.ones(5),
        torch.ones(4, 1),
        torch.tensor([1.0, 2.0, 0.0, 1.0]),
        torch.tensor([1.0, -2.0, 1.0, 1.0]),
        torch.tensor([1.0, torch.inf, 1.0, 1.0]),
        torch.tensor([1.0, torch.nan, 1.0, 1.0]),
    ],
    ids=["too few", "too many", "wrong shape", "zero", "negative", "infinite", "not a number"],
)
def test_refuses_factors_that_are_no_rescaling(factors):
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    start = weights(model)
    with pytest.raises(ValueError, match=r"\w+"):
        ps.rescaling.rescale_(network, factors)
    assert_close(weights(model), start, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("place", "weight", "factor"),
    [
        ("0.weight", 1e20, 1e30),
        ("0.weight", 1e-20, 1e-30),
        ("2.weight", 1e20, 1e-30),
        ("2.weight", 1e-20, 1e30),
    ],
)
def test_a_weight_that_the_type_would_lose_is_named_and_nothing_is_changed(place, weight, factor):
    """It would overflow, or become zero; in float64 it does neither."""
    model, factors = mlp(3, 4, 2), torch.full((4,), factor)
    network = ps.trace(model, torch.randn(2, 3))
    with torch.no_grad():
        model.get_parameter(place)[1, 1] = weight
    start = weights(model)
    with pytest.raises(
        OverflowError, match=f"would overflow or underflow '{place}' in torch.float32"
    ):
        ps.rescaling.rescale_(network, factors)
    assert_close(weights(model), start, rtol=0, atol=0)
    assert network.rescalings["done"] == 0
    ps.rescaling.rescale_(ps.trace(model.double(), torch.randn(2, 3).double()), factors)
    expected = weight * (factor if place == "0.weight" else 1 / factor)
    assert model.get_parameter(place)[1, 1].item() == pytest.approx(expected, rel=1e-6)


def test_weights_that_are_zero_or_not_finite_are_not_lost():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    with torch.no_grad():
        model[0].weight[2] = torch.tensor([0.0, torch.inf, torch.nan])
    ps.rescaling.rescale_(network, torch.full((4,), 2.0))
    assert_close(model[0].weight[2], torch.tensor([0.0, torch.inf, torch.nan]), equal_nan=True)


def test_random_powers_of_two_take_both_bounds():
    network = ps.trace(mlp(2, 64, 1), torch.randn(1, 2))
    for low, high, drawn in (
        (0.5, 2.0, {0.5, 1.0, 2.0}),
        (0.3, 3.9, {0.5, 1.0, 2.0}),
        (4.0, 4.0, {4.0}),
    ):
        factors = ps.rescaling.random_rescale_(network, low, high, powers_of_two=True)
        assert set(factors.tolist()) == drawn
    with pytest.raises(ValueError, match=r"no power of two lies between 1\.1 and 1\.9"):
        ps.rescaling.random_rescale_(network, 1.1, 1.9, powers_of_two=True)


def test_random_factors_follow_their_generator_and_bounds():
    case = BY_NAME["mlp"]
    state = torch.get_rng_state()
    drawn = []
    for seed in (1, 1, 2):
        generator = torch.Generator().manual_seed(seed)
        _, network = traced(case)
        drawn.append(ps.rescaling.random_rescale_(network, low=0.1, high=10, generator=generator))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert all(((s >= 0.1) & (s <= 10)).all() for s in drawn)
    assert drawn[0].unique().numel() == case.classes


def test_random_factors_are_spread_over_their_range():
    model = mlp(2, 2000, 1)
    factors = ps.rescaling.random_rescale_(ps.trace(model, torch.randn(1, 2)), low=1e-3, high=1e3)
    # uniform on a logarithmic scale: a third of them in each pair of decades
    for low in (1e-3, 1e-1, 1e1):
        share = ((factors >= low) & (factors < 100 * low)).double().mean().item()
        assert share == pytest.approx(1 / 3, abs=0.06)


@pytest.mark.parametrize(("low", "high"), [(2, 1), (0, 1), (-1, 1)])
def test_random_rescaling_refuses_impossible_bounds(low, high):
    network = ps.trace(mlp(3, 4, 2), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"\w+"):
        ps.rescaling.random_rescale_(network, low=low, high=high)


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_balancing_preserves_the_function(case):
    model, network = traced(case, torch.float64)
    example = case.example(3, torch.float64)
    before = output(case, model, example)
    ps.rescaling.balance_(network)
    assert_close(output(case, model, example), before, rtol=1e-9, atol=1e-11)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.sample(21)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_balancing_forgets_the_scales(case):
    """The same weights from every rescaled start: that is what makes it a baseline."""
    (model, network), (rescaled, other) = traced(case, torch.float64), traced(case, torch.float64)
    ps.rescaling.random_rescale_(
        other, low=1e-2, high=1e2, generator=torch.Generator().manual_seed(0)
    )
    ps.rescaling.balance_(other)
    ps.rescaling.balance_(network)
    assert_close(weights(rescaled), weights(model), rtol=1e-5, atol=1e-7)


def test_balanced_units_receive_as_much_as_they_give():
    """With one hidden layer: delta_c = kappa1 of its bias, gamma_c^2 = kappa1 of its outgoing weights, halved."""
    model = mlp(3, 5, 2).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    ps.rescaling.balance_(ps.trace(model, x))
    kappa1 = Oracle(model, x).kappa1()
    assert_close(kappa1["0.bias"], kappa1["2.weight"][0] / 2)
    assert not torch.allclose(kappa1["0.bias"], torch.ones(5, dtype=torch.float64))


def test_balancing_by_powers_of_two_rounds_nothing():
    case = BY_NAME["rnn"]
    model, network = traced(case, torch.float32)
    ps.rescaling.random_rescale_(network, low=2.0**-10, high=2.0**10, powers_of_two=True)
    before = output(case, model, case.example(3))
    factors = ps.rescaling.balance_(network, powers_of_two=True)
    assert torch.equal(factors, 2.0 ** factors.log2().round())
    assert not torch.equal(factors, torch.ones_like(factors))
    assert torch.equal(output(case, model, case.example(3)), before)


def test_balancing_survives_dead_units():
    model = mlp(3, 4, 4, 2).double()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0  # nothing enters unit 1
        model[2].weight[:, 2] = 0  # nothing leaves unit 2
    x = torch.randn(5, 3, dtype=torch.float64)
    before = model(x).detach()
    ps.rescaling.balance_(ps.trace(model, x))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_close(model(x).detach(), before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", ["random", "balance"])
def test_leaves_buffers_and_outside_parameters_alone(change):
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    with torch.no_grad():
        model[3].weight.uniform_()
    network = ps.trace(model, torch.randn(2, 3), outside=["3"])
    before = copy.deepcopy(model[3].state_dict())
    function = ps.rescaling.random_rescale_ if change == "random" else ps.rescaling.balance_
    function(network)
    assert_close(model[3].state_dict(), before, rtol=0, atol=0)


def test_all_networks_of_a_model_count_its_rescalings_together_and_a_copy_by_itself():
    model = mlp(3, 4, 2)
    first = ps.trace(model, torch.randn(2, 3))
    assert first.rescalings["done"] == 0
    ps.rescaling.rescale_(ps.trace(model, torch.randn(2, 3)), torch.full((4,), 2.0))
    assert first.rescalings["done"] == 1
    _, copied = copy.deepcopy((model, first))
    assert copied.rescalings["done"] == 1
    ps.rescaling.rescale_(copied, torch.full((4,), 2.0))
    assert (first.rescalings["done"], copied.rescalings["done"]) == (1, 2)
