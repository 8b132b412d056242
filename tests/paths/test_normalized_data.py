"""Networks that normalize, measured on data: their statistics are held."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import RootMeanSquare
from oracles.normalization import NETWORKS, network_of

EACH = pytest.mark.parametrize("name", NETWORKS)


class Held(nn.Module):
    """A normalization whose statistics are constants to autograd."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm, n = self.norm, x.dim()
        place, parts = (1, -1) + (1,) * (n - 2), x
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            over = [d for d in range(n) if d != 1]
        elif isinstance(norm, nn.GroupNorm):
            parts, over = x.reshape(len(x), norm.num_groups, -1), (2,)
        elif isinstance(norm, nn.InstanceNorm2d):
            over = (2, 3)
        else:
            place, over = (-1,), (n - 1,)
        fixed = parts.detach()
        mean = (
            0 if isinstance(norm, (nn.RMSNorm, RootMeanSquare)) else fixed.mean(over, keepdim=True)
        )
        square = (fixed - mean).square().mean(over, keepdim=True)
        eps = getattr(norm, "eps", 1e-6)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        y = ((parts - mean) / (square + eps).sqrt()).reshape(x.shape) * norm.weight.reshape(place)
        return y if getattr(norm, "bias", None) is None else y + norm.bias.reshape(place)


@pytest.mark.sample(2)
@EACH
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_on_data_statistics_are_held(name, statistic):
    """alpha = 1 is the squared Jacobian of the outputs, example by example."""
    model, network, _ = network_of(name)
    torch.manual_seed(1)
    x = torch.randn(6, *NETWORKS[name][1], dtype=torch.float64)
    held = copy.deepcopy(model)
    for layer in ("first", "second", "third"):
        if hasattr(held, layer):
            setattr(held, layer, Held(getattr(held, layer)))
    outputs = held(x)
    assert_close(outputs, model(x), rtol=1e-9, atol=1e-11)
    weights = dict(zip(network.parameters, held.parameters(), strict=True))
    squares = {key: torch.zeros_like(p) for key, p in weights.items()}
    for k in range(outputs.shape[1]):
        rows = [
            torch.autograd.grad(outputs[i, k], list(weights.values()), retain_graph=True)
            for i in range(6)
        ]
        for key, *slopes in zip(weights, *rows, strict=True):
            J = torch.stack(slopes)
            squares[key] += (
                J.square().mean(0) if statistic == "second_moment" else J.var(0, correction=0)
            )
    options = {"alpha": 1.0, "statistic": statistic}
    assert_close(
        ps.paths.data_dependent_kappa(network, x, **options), squares, rtol=1e-9, atol=1e-11
    )
    if statistic == "second_moment":
        norm = ps.paths.data_dependent_norm(network, x, alpha=1.0)
        assert norm.item() == pytest.approx(outputs.square().mean(0).sum().item(), rel=1e-10)
        edges = ps.paths.data_dependent_kappa(network, x, alpha=0.5, sharing="edges")
        assert all(bool((k >= 0).all()) for k in edges.values())


def test_on_data_the_mean_is_that_of_the_data_dependent_measure():
    model, network, _ = network_of("batch norm")
    torch.manual_seed(1)
    x, alpha = torch.randn(6, 3, dtype=torch.float64), 0.3
    q = {name: p.detach().square() for name, p in network.parameters.items()}
    h = model.first(model.embed(x))
    r = model.second(model.inner(h.relu()))
    output = model(x)

    def mixed(z, path):
        return alpha * z.detach().square().mean(0) + (1 - alpha) * path

    h = mixed(h, q["first.weight"] + q["first.bias"])  # one feature is its own mean
    r = mixed(r, q["second.weight"] + q["second.bias"])
    expected = mixed(output, q["head.weight"] @ (h + r) + q["head.bias"])
    found = ps.paths.data_dependent_norm(network, x, alpha=alpha)
    assert found.item() == pytest.approx(expected.sum().item(), rel=1e-10)
    value = ps.paths.data_dependent_kappa(network, x, alpha=alpha)
    assert all(bool((k >= 0).all()) for k in value.values())


def test_a_normalization_on_no_path_is_passed_over():
    class Idle(nn.Module):
        def __init__(self, *, idle):
            super().__init__()
            self.idle, self.first, self.second = idle, nn.Linear(3, 4), nn.Linear(4, 2)
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            h = self.first(x).relu()
            if self.idle:
                self.norm(h)
            return self.second(h)

    values, x = [], torch.randn(5, 3)
    for idle in (True, False):
        torch.manual_seed(0)
        network = ps.trace(Idle(idle=idle), x)
        assert {"norm.weight", "norm.bias"} == set(network.outside)
        values.append(ps.paths.data_dependent_norm(network, x).item())
    assert values[0] == values[1]
