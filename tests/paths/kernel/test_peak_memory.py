"""How much memory the metric of a training step takes."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import mlp
from pathspace.optim.base import coordinates

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.sample(2)
@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize(
    "build", [lambda: mlp(64, 128, 128, 8), lambda: Convolutions()], ids=["mlp", "cnn"]
)
def test_path_sgd_keeps_at_most_two_copies_of_the_parameters(build, refresh_every):
    """One of squares, and one of their gradients."""
    sys.path.insert(0, str(BENCHMARKS))
    from step_cost import Case, peak_bytes

    case = Case(
        build,
        (16, 64) if refresh_every and build().__class__ is nn.Sequential else (16, 3, 8, 8),
        8,
        1,
    )
    most, parameters = peak_bytes(case, "PathSGD", {"refresh_every": refresh_every}, "cpu")
    least, _ = peak_bytes(case, "PathSGD", {}, "cpu", plain=True)
    assert (most - least) / parameters < 2.2


@pytest.mark.parametrize(
    ("optimizer", "most"), [("PathSGD", 1.15), ("PathAdam", 1.2), ("Invariant-RMSprop", 1.6)]
)
def test_a_refresh_takes_one_copy_of_the_parameters_and_coordinates_two_of_the_largest(
    optimizer, most, monkeypatch
):
    """Squares, and then 1 / D in their place; for a rule in coordinates these and their gradients."""
    sys.path.insert(0, str(BENCHMARKS))
    from step_cost import Case, LiveBytes, trial

    monkeypatch.setattr(coordinates, "_TOGETHER", 1)
    case, peaks = Case(lambda: mlp(64, 128, 128, 128, 8), (4, 64), 8, 1), []
    for plain in (True, False):
        measured = trial(case, optimizer, {"refresh_every": 3}, "cpu", "eager", plain=plain)
        with LiveBytes() as counted:
            measured.step()  # which measures the gauge, in float64
            counted.peak = 0
            for _ in range(4):
                measured.step()
        peaks.append(counted.peak / measured.parameters)
    assert peaks[1] - peaks[0] < most


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.out = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))
