"""What gradient flow conserves: sums by hand, and gradients of losses, which have no part along a rescaling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, INVARIANCE, Case, call, traced


def test_units_of_a_perceptron_have_what_enters_minus_what_leaves() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    result = ps.rescaling.conserved(ps.trace(model, torch.zeros(1, 3, dtype=torch.float64)))
    first, last = model[0], model[2]
    by_hand = first.weight.square().sum(1) + first.bias.square() - last.weight.square().sum(0)
    assert_close(result, by_hand.detach())


class LastStep(nn.Module):
    """A recurrent layer without biases, read at its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 3, nonlinearity="relu", bias=False, batch_first=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


def test_recurrent_weights_enter_one_unit_and_leave_another() -> None:
    model = LastStep().double()
    result = ps.rescaling.conserved(ps.trace(model, torch.zeros(1, 4, 2, dtype=torch.float64)))
    recurrent = model.rnn.weight_hh_l0.square()
    enters = model.rnn.weight_ih_l0.square().sum(1) + recurrent.sum(1)
    assert_close(result, (enters - recurrent.sum(0) - model.out.weight.square().sum(0)).detach())


@pytest.mark.parametrize("case", INVARIANCE, ids=lambda case: case.name)
def test_the_slope_along_gradient_flow_is_zero(case: Case) -> None:
    model, network = traced(case, torch.float64)
    output = call(model, case.example(5, dtype=torch.float64))
    output = output if case.output is None else case.output(output)
    (output.square().sum() + output.sum()).backward()
    weights = {name: p.detach() for name, p in network.parameters.items()}
    gradients = {name: p.grad for name, p in network.parameters.items() if p.grad is not None}

    def moved(by: float) -> Tensor:
        values = {
            name: w + by * gradients[name] if name in gradients else w
            for name, w in weights.items()
        }
        return ps.rescaling.conserved(network, values)

    # C is a quadratic form, so that its central difference is its slope
    along = torch.stack([moved(1.0), -moved(-1.0)])
    assert_close(
        along.sum(0),
        torch.zeros_like(along[0]),
        rtol=0,
        atol=float(1e-9 * (1 + along.abs().amax())),
    )
    assert float(along.abs().amax()) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "cnn 2d", "stacked rnn", "gated"])
def test_nothing_is_left_of_it_where_norms_are_equal(name: str) -> None:
    model, network = traced(BY_NAME[name], torch.float64)
    before = ps.rescaling.conserved(network).abs().amax()
    ps.rescaling.balance_(network, criterion="norm")
    largest = max(p.detach().square().sum() for p in model.parameters())
    assert float(ps.rescaling.conserved(network).abs().amax() / largest) < 1e-6
    assert before > 1e-3
