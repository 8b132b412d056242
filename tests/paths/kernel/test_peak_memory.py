"""How much memory the metric of a training step takes."""

import sys

import pytest
import torch
from torch import nn

from cases import mlp


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("build", [lambda: mlp(64, 128, 128, 8), lambda: Convolutions()], ids=["mlp", "cnn"])
def test_path_sgd_keeps_at_most_two_copies_of_the_parameters(build, refresh_every):
    """One of squares, and one of their gradients."""
    sys.path.insert(0, "benchmarks")
    from step_cost import Case, peak_bytes

    case = Case(
        build, (16, 64) if refresh_every and build().__class__ is nn.Sequential else (16, 3, 8, 8), 8, 1
    )
    most, parameters = peak_bytes(case, "PathSGD", {"refresh_every": refresh_every}, "cpu")
    least, _ = peak_bytes(case, "PathSGD", {}, "cpu", plain=True)
    assert (most - least) / parameters < 2.2


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.out = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))
