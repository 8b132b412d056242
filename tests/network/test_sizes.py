"""Unit classes hold for inputs of all sizes that a model takes, or for the only size that it takes.

The oracle is a rescaled copy of the model, on images and sequences of other sizes than the traced
ones.
"""

import copy

import pytest
import torch
from torch import nn

import pathspace as ps
from pathspace.network.rules.movement import groups

DOUBLE = {"dtype": torch.float64}


class Mixed(nn.Module):
    """Two pointwise convolutions, and a movement of channels and positions between them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 1, **DOUBLE), nn.Conv2d(8, 2, 1, **DOUBLE)
        self._function = function

    def forward(self, x):
        return self.b(self._function(self.a(x).relu()))


MIXED = {
    "positions as channels": lambda h: h.flatten(2).transpose(1, 2).reshape(h.shape),
    "channels last read as first": lambda h: h.permute(0, 2, 3, 1).reshape(h.shape),
    "by view": lambda h: h.permute(0, 2, 3, 1).contiguous().view(h.shape),
    "flat between": lambda h: h.permute(0, 2, 3, 1).flatten(1).unflatten(1, h.shape[1:]),
    "turned image": lambda h: h.transpose(1, 2).reshape(h.shape),
    "half of them": lambda h: torch.cat(
        [h[:, :4], h[:, 4:].permute(0, 2, 3, 1).reshape(h[:, 4:].shape)], 1
    ),
}
KEPT = {  # with the number of classes
    "there and back": (lambda h: h.flatten(2).transpose(1, 2).transpose(1, 2).reshape(h.shape), 8),
    "groups of channels": (
        lambda h: h.view(len(h), 2, 4, *h.shape[2:]).transpose(1, 2).reshape(h.shape),
        8,
    ),
    "flat and back": (lambda h: h.flatten(1).view(h.shape), 8),
    "windows": (
        lambda h: h.view(*h.shape[:2], h.shape[2] // 2, 2, h.shape[3]).flip(3).reshape(h.shape),
        8,
    ),
}


def moved(model, network, sizes, channels=3):
    """How much outputs for images of some sizes move by a rescaling of the network, which is made on a copy."""
    rescaled, own = copy.deepcopy((model, network))
    generator = torch.Generator().manual_seed(1)
    ps.rescaling.random_rescale_(own, 2**-4, 2**4, True, generator)
    worst = 0.0
    for size in sizes:
        y = torch.randn(2, channels, *size, **DOUBLE)
        before, after = model(y).detach(), rescaled(y).detach()
        worst = max(worst, float((after - before).abs().max() / before.abs().max()))
    return worst


@pytest.mark.sample(7)
# images of 128 are halved, smaller ones are enlarged
@pytest.mark.parametrize("size", [(2, 2), (2, 4), (4, 4), (6, 6), (128, 128)])
@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_channels_and_positions_has_classes_of_all_sizes(name, size):
    model = Mixed(MIXED[name])
    network = ps.trace(model, torch.randn(2, 3, *size, **DOUBLE))
    assert network.num_classes >= 1
    assert moved(model, network, [(2, 2), (2, 4), (4, 4), (6, 4), (8, 8)]) == 0


@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_channels_apart_loses_nothing(name):
    function, classes = KEPT[name]
    model = Mixed(function)
    network = ps.trace(model, torch.randn(2, 3, 4, 4, **DOUBLE))
    assert network.num_classes == classes
    assert moved(model, network, [(4, 4), (2, 6), (8, 8)]) == 0


def test_a_large_image_is_enlarged_where_its_half_is_refused():
    """Thirds of a side of 129 are whole, halves are not."""

    class Thirds(Mixed):
        def forward(self, x):
            if x.shape[2] % 3:
                raise ValueError("the image has no thirds")
            return super().forward(x)

    model = Thirds(MIXED["positions as channels"])
    network = ps.trace(model, torch.zeros(1, 3, 129, 129, **DOUBLE))
    assert network.num_classes == 1


def test_a_model_of_one_size_keeps_the_classes_of_that_size():
    """Where no other size is taken, a mixture of given numbers of units is as it was traced."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 12, **DOUBLE),
        nn.ReLU(),
        nn.Unflatten(1, (3, 4)),
        Turned(),
        nn.Linear(12, 2, **DOUBLE),
    )
    network = ps.trace(model, torch.randn(5, 3, **DOUBLE))
    assert network.num_classes == 12
    x = torch.randn(5, 3, **DOUBLE)
    before = model(x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), before)


class Turned(nn.Module):
    def forward(self, h):
        return h.transpose(1, 2).reshape(len(h), 2, 6).flatten(1)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 3, 4), (2, 12), [([0], 1), ([1, 2], 1)]),
        ((2, 12), (2, 3, 4), [([0], 1), ([1], 2)]),
        ((4, 8), (8, 2, 2), [([0, 1], 3)]),
        ((1, 4, 1, 6), (2, 2, 6), [([1], 2), ([3], 1)]),
        ((2, 3), (3, 2), [([0, 1], 2)]),
        ((5,), (5, 1), [([0], 1)]),
    ],
)
def test_a_reshape_is_split_into_the_smallest_ones(before, after, expected):
    assert groups(torch.Size(before), torch.Size(after)) == expected
