"""Every unit class has path mass, wherever its units are made: without it the gauge of optimizers sees no scale."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.middle, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(4))
        self._function = function
        self.double()

    def forward(self, x):
        return self.out(self._function(self, self.read(x).relu()))


WAYS = {  # units that no layer makes
    "a parameter that enters a layer": lambda m, h: h + m.middle(m.table),
    "after a ReLU": lambda m, h: h + m.middle(m.table.relu()),
    "expanded": lambda m, h: h + m.middle(m.table.expand(len(h), -1)),
    "added to zeros": lambda m, h: h + m.middle(torch.zeros_like(h) + m.table),
    "a bias of nothing": lambda m, h: (
        h + m.middle(functional.linear(0 * h, m.middle.weight, m.table))
    ),
    "joined": lambda m, h: h + m.middle(torch.cat([m.table[:2], m.table[2:]])),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_gauge_follows_rescaling(name):
    network = ps.trace(Model(WAYS[name]), X)
    before = ps.rescaling.balance.balancing_factors(network)
    factors = ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert torch.equal(ps.rescaling.balance.balancing_factors(network) * factors, before)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_made_invariant_is(name, rule):
    report = ps.rescaling.check_invariance(
        Model(WAYS[name]).float(),
        X.float(),
        lambda y: y.square().mean(),
        lambda m, n: ps.optim.Invariant(m.parameters(), n, rule, lr=0.01),
        steps=5,
        low=2.0**-6,
        high=2.0**6,
    )
    assert report.passed, report
