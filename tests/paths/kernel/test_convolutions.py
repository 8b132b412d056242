"""Random networks of convolutions and pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from oracles.squared import Oracle


class Skip(nn.Module):
    """A convolution and what goes around it, so that values and gradients with other classes are added."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
        self.long, self.short = kind(channels, channels, 3, padding=1), kind(channels, channels, 1)

    def forward(self, x):
        return self.long(x) + self.short(x)


@st.composite
def image_networks(draw):
    """Convolutions, pools and what may stand between, on images that are large beside the kernels."""
    dim = draw(st.sampled_from([1, 2, 2, 2, 3]))
    shape = [draw(st.integers(9, 12 if dim == 3 else 30)) for _ in range(dim)]
    channels = before = draw(st.sampled_from([1, 2]))
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(2, 3))):
        groups, kernel = draw(st.sampled_from([1, channels])), draw(st.integers(1, 3))
        after = groups * draw(st.integers(1, 2))
        options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, kernel))}
        options |= {
            "dilation": draw(st.integers(1, 2)),
            "groups": groups,
            "bias": draw(st.booleans()),
        }
        options["padding_mode"] = draw(st.sampled_from(["zeros"] * 5 + ["circular"]))
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
        layers += [conv(channels, after, kernel, **options), nn.ReLU()]
        channels = after
        other = draw(st.sampled_from(["average", "norm", "skip", "transposed"]))
        kind = draw(st.sampled_from(["none", "none", "max", "max", "max", other]))
        if kind == "max":
            pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dim - 1]
            padding, ceil = draw(st.integers(0, 1)), draw(st.booleans())
            layers.append(
                pool(draw(st.integers(2, 3)), draw(st.integers(1, 2)), padding, ceil_mode=ceil)
            )
        elif kind == "average":
            layers.append((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dim - 1](2))
        elif kind == "norm":
            layers.append(
                (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](channels).eval()
            )
        elif kind == "skip":
            layers.append(Skip(channels, dim))
        elif kind == "transposed":
            transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dim - 1]
            layers.append(transposed(channels, channels, 2, 2))
    end = draw(st.sampled_from(["mean", "mean", "all", "linear"]))
    if end == "mean":
        layers += [(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dim - 1](1)]
    if end == "linear":
        layers += [nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)]
    return nn.Sequential(*layers), (before, *shape)


@settings(max_examples=15, deadline=None)
@given(image_networks(), st.integers(0, 2**16))
def test_kappa_is_that_of_the_squared_model(drawn, seed):
    model, shape = drawn
    torch.manual_seed(seed)
    x = torch.randn(1, *shape, dtype=torch.float64)
    model = model.double()
    try:
        model(x)
    except (RuntimeError, ValueError):
        assume(False)  # the image shrank to nothing
    assert_close(
        dict(ps.paths.kappa(ps.trace(model, x))), Oracle(model, x).kappa1(), rtol=1e-10, atol=1e-13
    )


R = nn.ReLU
READ_LAST = {
    "no bias": (lambda: (nn.Conv2d(2, 1, 2), nn.Linear(3, 4, bias=False)), (2, 3, 4)),
    "bias": (lambda: (nn.Conv2d(2, 3, 2), R(), nn.Linear(3, 4)), (2, 3, 4)),
    "length, no bias": (lambda: (nn.Conv1d(2, 3, 2), R(), nn.Linear(5, 4, bias=False)), (2, 6)),
    "length": (lambda: (nn.Conv1d(2, 3, 2), R(), nn.Linear(5, 4)), (2, 6)),
    "flattened": (lambda: (nn.Conv1d(2, 3, 2), R(), nn.Linear(5, 4, bias=False), nn.Flatten()), (2, 6)),
    "two": (lambda: (nn.Conv1d(2, 3, 2), R(), nn.Linear(5, 4, bias=False), R(), nn.Linear(4, 2)), (2, 6)),
    "padded": (lambda: (nn.Conv2d(1, 3, 3, padding=1), R(), nn.Linear(8, 4, bias=False)), (1, 8, 8)),
    "nothing after": (lambda: (nn.Conv2d(1, 3, 3, padding=1), R()), (1, 8, 8)),
    "transposed": (lambda: (nn.ConvTranspose2d(2, 1, 2), R(), nn.Linear(5, 4, bias=False)), (2, 3, 4)),
    "pooled": (
        lambda: (nn.Conv2d(1, 3, 3, padding=1), R(), nn.MaxPool2d(2), nn.Linear(4, 4, bias=False)),
        (1, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", READ_LAST)
def test_a_linear_map_may_read_the_last_dimension_of_a_convolution(name):
    layers, shape = READ_LAST[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(*layers()).double(), torch.randn(2, *shape, dtype=torch.float64)
    network, oracle = ps.trace(model, x), Oracle(model, x[:1])
    assert_close(ps.paths.squared_path_norm(network).detach(), oracle.squared_path_norm())
    assert_close(dict(ps.paths.kappa(network)), oracle.kappa1())
    assert_close(dict(ps.paths.kappa(network, second_term=True)), oracle.kappa())
    before = model(x)
    ps.rescaling.balance_(network, x)
    assert_close(model(x), before)
    model(x).square().mean().backward()
    old = {key: p.detach().clone() for key, p in model.named_parameters()}
    kappa = Oracle(model, x[:1]).kappa1()
    ps.optim.PathSGD(model.parameters(), network, lr=0.01, damping=0.0).step()
    for key, p in model.named_parameters():
        assert p.grad is not None
        moved = p.grad != 0
        # w - eta g / kappa, eta by the normalizer of the network alike for all
        quotient = ((old[key] - p.detach()) * kappa[key] / p.grad)[moved]
        assert bool(moved.any())
        assert_close(quotient, quotient[:1].expand_as(quotient), rtol=1e-6, atol=0)
