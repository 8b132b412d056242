"""Invariance where kappa comes near the end of float32, and one member of a rescaling class reaches it."""

import pytest
import torch

import pathspace as ps
from cases import slow_besides
from pathspace.paths.kernel.safe_type import RangeReport

RULES = {
    "PathSGD": lambda p, n: ps.optim.PathSGD(p, n, lr=0.1, clip_norm=1.0),
    "PathSGD stale": lambda p, n: ps.optim.PathSGD(p, n, lr=0.1, clip_norm=1.0, refresh_every=2),
    "PathSGD frozen": lambda p, n: ps.optim.PathSGD(
        p, n, lr=0.1, clip_norm=1.0, normalization="frozen"
    ),
    "PathSGD raw": lambda p, n: ps.optim.PathSGD(p, n, lr=3e22, normalization="none"),
    "PathSGD power 1/2": lambda p, n: ps.optim.PathSGD(p, n, lr=0.1, power=0.5, clip_step=1.0),
    "PathAdam": lambda p, n: ps.optim.PathAdam(p, n, lr=1e-3, clip_norm=1.0),
    "PathAdam power 1/2": lambda p, n: ps.optim.PathAdam(
        p, n, lr=1e-3, power=0.5, damping=1e-3, clip_norm=1.0
    ),
}


class Growing(torch.nn.Module):
    """A recurrent layer whose path mass grows eightfold a step, while its units stay within reach."""

    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.RNN(3, 16, nonlinearity="relu", batch_first=True)
        self.out = torch.nn.Linear(16, 2)
        with torch.no_grad():
            self.rnn.weight_hh_l0.normal_(std=(8 / 16) ** 0.5)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def train(make, factors):
    torch.manual_seed(0)
    model = Growing()
    x, y = torch.randn(8, 36, 3), torch.randn(8, 2)
    network = ps.trace(model, x)
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    largest = max(float(k.max()) for k in ps.paths.kappa(network).values())
    optimizer = make(model.parameters(), network)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) / 1e12 - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if factors is not None:
        ps.rescaling.rescale_(network, 1 / factors)
    return losses, [p.detach() for p in model.parameters()], largest


def both(rule):
    factors = (
        2.0 ** torch.randint(-10, 11, (16,), generator=torch.Generator().manual_seed(1)).float()
    )
    return train(RULES[rule], None), train(RULES[rule], factors)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", RULES)
def test_bits_stay_alike_where_one_of_two_rescaled_networks_leaves_float32(rule):
    (losses, weights, fits), (theirs, their_weights, leaves) = both(rule)
    assert fits < torch.finfo(torch.float32).max < leaves
    assert losses == theirs
    assert len(set(losses)) > 1
    for ours, other in zip(weights, their_weights, strict=True):
        assert torch.equal(ours, other)


# the steps of the raw rule are too short to tell
@pytest.mark.parametrize(
    "rule",
    slow_besides(
        ["PathSGD", "PathAdam power 1/2"], [rule for rule in RULES if rule != "PathSGD raw"]
    ),
)
def test_they_would_not_if_each_chose_its_type_by_itself(rule, monkeypatch):
    monkeypatch.setattr(RangeReport, "well_scaled", True)
    (_, weights, _), (_, their_weights, _) = both(rule)
    assert any(not torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
