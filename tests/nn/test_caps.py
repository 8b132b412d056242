"""Bounds that scale with their channels: the function is kept, and channels are free where the network was cut."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)),
        *(nn.Conv2d(4, 4, 3, groups=4), nn.Hardtanh(-0.5, 2.0)),
        *(nn.Flatten(), nn.Linear(16, 5), nn.ReLU6(), nn.Linear(5, 2)),
    ).eval()


def sequences():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU6(), nn.Linear(4, 2))


CASES = [(images, (5, 3, 6, 6), 4 + 4 + 5, ["2", "4", "7"]), (sequences, (5, 7, 3), 4, ["1"])]


@pytest.mark.parametrize(("build", "shape", "classes", "names"), CASES)
def test_the_function_is_kept_and_every_channel_is_free(build, shape, classes, names):
    model, x = build().double(), 10 * torch.randn(shape, dtype=torch.float64)
    before = model(x)
    assert ps.nn.scale_caps_(model, x) == names
    assert_close(model(x), before, rtol=0, atol=0)
    network = ps.trace(model, x)
    assert network.num_classes == classes
    assert not network.cuts
    ps.rescaling.random_rescale_(
        network, 2**-8, 2**8, powers_of_two=True, generator=torch.Generator()
    )
    assert_close(model(x), before, rtol=0, atol=0)
    for criterion in ("path", "range", "rounding"):
        ps.rescaling.balance_(network, x, criterion=criterion)
    assert_close(model(x), before)


def test_a_bound_moves_with_its_channel():
    model, x = sequences(), torch.randn(5, 7, 3)
    ps.nn.scale_caps_(model, x)
    ps.rescaling.rescale_(ps.trace(model, x), torch.tensor([2.0, 1.0, 0.5, 4.0]))
    assert_close(model[1].high.detach(), torch.tensor([12.0, 6.0, 3.0, 24.0]), rtol=0, atol=0)
    assert not model[1].high.requires_grad


def test_kappa_counts_bounds_as_biases():
    """By hand: the squared network adds the square of the bound to what enters, so both have the kappa of a unit."""
    torch.manual_seed(0)
    model, x = sequences().double(), torch.randn(5, 3, dtype=torch.float64)
    ps.nn.scale_caps_(model, x)
    network = ps.trace(model, x)
    leaving = model[2].weight.detach().square().sum(0)
    kappa = ps.paths.kappa(network)
    assert_close(kappa["1.high"], leaving)
    entering = model[0].weight.detach().square().sum(1) + model[0].bias.detach().square() + 36
    assert_close(kappa["2.weight"], entering.expand(2, 4))
    total = (leaving * entering).sum() + model[2].bias.detach().square().sum()
    assert_close(ps.paths.squared_path_norm(network).detach(), total)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_derivatives_in_bounds_are_those_on_data(alpha):
    model, x = sequences().double(), 10 * torch.randn(6, 3, dtype=torch.float64)
    ps.nn.scale_caps_(model, x)
    network = ps.trace(model, x)
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)["1.high"]
    capped = (model[0](x) > 6).double().mean(0)
    assert_close(found, capped * model[2].weight.detach().square().sum(0))
    assert all(
        bool(k.isfinite().all())
        for k in ps.paths.data_dependent_kappa(network, x, alpha=alpha).values()
    )


def test_pact_by_hand_is_traced_too():
    class Pact(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.alpha = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.second(torch.minimum(torch.relu(self.first(x)), self.alpha))

    model, x = Pact(), 5 * torch.randn(6, 3)
    network, before = ps.trace(model, x), model(x)
    assert network.num_classes == 1  # one bound ties all units that it bounds
    ps.rescaling.rescale_(network, torch.tensor([4.0]))
    assert float(model.alpha.detach()) == 8.0
    assert_close(model(x), before)


def test_invariant_training_moves_all_members_alike():
    model, x = sequences(), torch.randn(6, 3)
    ps.nn.scale_caps_(model, x, train=True)
    other = copy.deepcopy(model)
    ps.rescaling.random_rescale_(ps.trace(other, x), 0.25, 4, powers_of_two=True)
    for one in (model, other):
        optimizer = ps.optim.PathSGD(one.parameters(), ps.trace(one, x), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (10 * one(x)).square().mean().backward()
            optimizer.step()
    assert_close(model(x), other(x), rtol=1e-5, atol=1e-6)


def test_a_shared_module_is_left_alone():
    act = nn.ReLU6()
    model = nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2))
    assert ps.nn.scale_caps_(model, torch.zeros(1, 3)) == []
    assert model[1] is act


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="expected low < high, got low=2 and high=1"):
        ps.nn.Clamp(2, 1, (3,))
