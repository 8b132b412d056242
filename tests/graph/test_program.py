"""Captured steps of one example, run on all examples of a batch, against the model itself."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from pathspace.graph.capture import Capture, plain, wrapped
from pathspace.graph.program import Program, on_examples


class Writing(nn.Module):
    """Writes through views, into zeros, and casts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = torch.relu_(self.a(x)) * 1.0
        h.view(-1, 2, 4)[:, 0].mul_(2.0)
        z = torch.zeros(len(x), 8, dtype=x.dtype)
        z[:, 4:] = self.p
        z[:, ::2] += h[:, :4]
        return self.b(z + h) * torch.tensor(2.0).to(x.dtype)


def program_of(model, x, wanted=lambda result, _: [result]):
    capture, example = Capture(), x[:1].clone()
    state = {name: p.detach() for name, p in model.named_parameters()}
    own, given = {name: wrapped(p) for name, p in state.items()}, wrapped(example)
    with capture.running():
        result = plain(functional_call(model, own, (given,)))
    shown = wanted(result, capture)
    program = Program(capture.steps, [example, *state.values()], [], shown, shown)
    return program, program.refer(shown)


def test_all_examples_have_the_values_and_gradients_of_the_model():
    torch.manual_seed(0)
    model, x = Writing().double(), torch.randn(5, 6, dtype=torch.float64)
    program, (ref,) = program_of(model, x)
    program.seal()
    parameters = list(model.parameters())
    values = on_examples(program, [x.unsqueeze(1), *parameters], [0, *[None] * len(parameters)])
    assert values.differs(ref)
    assert_close(values[ref].squeeze(1), model(x), rtol=1e-14, atol=1e-14)
    slopes = torch.autograd.grad(values[ref].square().sum(), parameters)
    assert_close(
        slopes, torch.autograd.grad(model(x).square().sum(), parameters), rtol=1e-12, atol=1e-12
    )


def test_values_that_examples_share_have_a_gradient_for_each():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.rand(3, dtype=torch.float64))

        def forward(self, x):
            return (self.p * 2) * x

    model, x = Shared(), torch.randn(4, 3, dtype=torch.float64)

    def twice(result, capture):
        return [result, next(step.result for step in capture.steps if step.name == "mul")]

    program, (result, shared) = program_of(model, x, twice)
    values = on_examples(program, [x.unsqueeze(1), model.p], [0, None])
    assert values[shared].shape == (4, 3)
    (slopes,) = torch.autograd.grad(values[result].sum(), [values[shared]])
    assert_close(slopes, x)


def test_a_tensor_that_no_step_made_is_refused():
    """The values of one example would stand for all."""
    capture, x = Capture(), torch.ones(1, 2)
    given, other = wrapped(x), wrapped(torch.ones(2))
    with capture.running():
        made = plain(given + other)
    with pytest.raises(RuntimeError, match="no captured step made"):
        Program(capture.steps, [x], [], [made])
