"""kappa kept as factors, gradients by hand, and what they save; the values are compared in test_kappa.py."""

import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, mlp, trace, traced
from pathspace.paths.kernel.kappa import factored_first_term, first_term
from pathspace.squared import tape
from pathspace.squared.squares import Outer, Square, single_row, single_value


def test_a_map_used_once_has_an_outer_product():
    model = mlp(3, 4, 5, 2)
    found = factored_first_term(ps.trace(model, torch.zeros(1, 3)))
    assert {name: isinstance(k, Outer) for name, k in found.items()} == {
        name: name.endswith("weight") for name in found
    }
    shared = BY_NAME["tied characters"]
    dense = factored_first_term(trace(shared, shared.model()))
    assert not all(isinstance(k, Outer) for k in dense.values())


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "small resnet",
        "batch norm of vectors",
        "stacked bidirectional rnn",
        "rnn with a learned start",
        "dense block",
    ],
)
def test_common_networks_need_no_autograd(name, monkeypatch):
    case = BY_NAME[name]
    _, network = traced(case)

    def refuse(*_, **__):
        raise AssertionError("autograd was asked for a gradient")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    assert first_term(network).keys() == network.parameters.keys()


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_gradients_by_hand_are_those_of_autograd(case, monkeypatch):
    """Every instruction's own pullback against autograd of the same instruction."""
    network = trace(case, case.model(torch.float64))  # its tape is changed, which copies share
    by_hand = first_term(network)
    bare = [
        tape.Instruction(i.function, i.inputs, i.outputs, i.name, i.of_parameter, i.recurrent)
        for i in network.tape.instructions
    ]
    object.__setattr__(network.tape, "instructions", tuple(bare))
    assert_close(first_term(network), by_hand, rtol=1e-11, atol=1e-14)


def test_repeats_are_seen():
    one = torch.ones(())
    assert single_value(one.expand(2, 3)) is not None
    assert single_value(torch.ones(2, 3)) is None
    assert single_row(torch.rand(3).expand(5, 2, 3)) is not None
    assert single_row(torch.rand(2, 3)) is None
    assert single_row(torch.rand(1, 3)) is not None


def test_squares_sum_without_being_kept():
    torch.manual_seed(0)
    p = torch.randn(4, 6, dtype=torch.float64)
    assert_close(Square(p).row_sums(), p.square().sum(1))
    assert_close(Square(p).column_sums(), p.square().sum(0))
    assert Square(p.float(), dtype=torch.float64).dense().dtype == torch.float64


@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("build", [lambda: mlp(64, 128, 128, 8), lambda: Convolutions()], ids=["mlp", "cnn"])
def test_path_sgd_keeps_at_most_two_copies_of_the_parameters(build, refresh_every):
    """One of squares, and one of kappa where it has no factors and is kept for later steps."""
    sys.path.insert(0, "benchmarks")
    from step_cost import Case, peak_bytes

    case = Case(
        build, (16, 64) if refresh_every and build().__class__ is nn.Sequential else (16, 3, 8, 8), 8, 1
    )
    most, parameters = peak_bytes(case, "PathSGD", {"refresh_every": refresh_every}, "cpu")
    least, _ = peak_bytes(case, "SGD", {}, "cpu")
    assert (most - least) / parameters < 2.2


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.out = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))
