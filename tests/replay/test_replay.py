"""A forward pass on data by captured steps: as the model is now, and as the batch has it."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pathspace as ps
from cases import mlp
from pathspace.replay.replay import replay

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def outputs(network, x):
    return list(replay(network, x).nodes.values())[-1].value.flatten(1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))
        self.size = 2

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.size + self.shift)


def test_later_weights_and_buffers_are_seen():
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert_close(outputs(network, x), model(x), **TIGHT)
    with torch.no_grad():
        model.a.weight.mul_(2)
        model.shift += 1
    assert_close(outputs(network, x[:2]), model(x[:2]), **TIGHT)
    assert_close(outputs(network, x), model(x), **TIGHT)


def test_a_batch_is_run_without_the_code_of_the_model():
    calls = []

    class Counting(nn.Sequential):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    model, x = Counting(*mlp(3, 4, 2)).double(), torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    outputs(network, x)
    before = len(calls)
    assert_close(outputs(network, 2 * x), model(2 * x), **TIGHT)
    assert len(calls) == before + 1  # the one above


def test_a_batch_may_lie_otherwise_in_memory_than_one_example():
    """What is a view for one example needs a copy for several: their channels are last in memory."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(6, 2)

        def forward(self, x):
            h = self.a(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
            h = torch.nn.functional.avg_pool2d(h, 2).relu()
            return self.b(h.flatten(1))

    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(3, 2, 6, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert_close(outputs(network, x), model(x), **TIGHT)


class Backwards(nn.Module):
    def forward(self, x):
        return x.flip(1)


def test_an_activation_may_read_the_input():
    torch.manual_seed(0)
    model = nn.Sequential(Backwards(), nn.PReLU(3), nn.Linear(3, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert_close(outputs(network, x), model(x), **TIGHT)


class Asks(nn.Module):
    """Takes a factor that its inputs decide on."""

    def __init__(self, question):
        super().__init__()
        self.a, self.b, self.question = nn.Linear(3, 4), nn.Linear(4, 2), question

    def forward(self, x, mask):
        h = torch.relu(self.a(x))
        return self.b(h * (0.5 if self.question(mask) else 2.0))


class Skips(Asks):
    def forward(self, x, mask):
        h = torch.relu(self.a(x))
        return self.b(h.masked_fill(mask, 0.0) if self.question(mask) else h)


MASKS = [
    torch.zeros(3, 4, dtype=torch.bool),
    torch.eye(3, 4).bool(),
    torch.ones(3, 4, dtype=torch.bool),
]


def test_an_answer_with_other_operations_is_refused():
    model, x = Skips(torch.any).double(), torch.randn(3, 3, dtype=torch.float64)
    network = ps.trace(model, (x, MASKS[0]))
    assert_close(outputs(network, (x, MASKS[1])), model(x, MASKS[1]), **TIGHT)
    with pytest.raises(
        ps.network.UnmatchedForwardError, match="'linear' where tracing met 'masked_fill'"
    ):
        replay(network, (x, MASKS[0]))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_questions_have_the_answer_of_the_batch(order):
    torch.manual_seed(0)
    model, x = Asks(torch.all).double(), torch.randn(3, 3, dtype=torch.float64)
    network = ps.trace(model, (x, MASKS[0]))
    for mask in (MASKS[i] for i in order):
        assert_close(outputs(network, (x, mask)), model(x, mask), **TIGHT)


def test_a_question_that_examples_answer_differently_is_refused():
    model, x = Asks(lambda mask: mask.sum() > 0).double(), torch.randn(3, 3, dtype=torch.float64)
    network = ps.trace(model, (x, MASKS[0]))
    some = MASKS[0].clone()
    some[0, 0] = True
    with pytest.raises(ps.network.UnmatchedForwardError, match="for some examples of the batch"):
        replay(network, (x, some))
    assert_close(outputs(network, (x, MASKS[2])), model(x, MASKS[2]), **TIGHT)


class Writes(nn.Module):
    """Writes into zeros, which vmap does not do."""

    def forward(self, h):
        z = torch.zeros(len(h), 4, dtype=h.dtype)
        z[:, :2] = h[:, 2:]
        return z.sigmoid()


def test_a_module_outside_runs_for_each_example_where_it_cannot_for_all():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Writes(), nn.Linear(4, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    network = ps.trace(model, x, outside=["2"])
    each = torch.cat([model(one) for one in x.split(1)])
    assert_close(outputs(network, x), each, **TIGHT)


class Cleared(nn.Module):
    """A linear layer of three dimensions, into a part of whose result the model writes."""

    def __init__(self, form: str, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=bias).double()
        self.last = nn.Linear(2, 3, bias=False).double()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.first.weight, self.first.bias
        if self.form == "layer":
            h = self.first(x)
        elif self.form == "function":
            h = nn.functional.linear(x, weight, bias)
        else:
            h = x @ weight.t() if bias is None else x @ weight.t() + bias
        h[..., 1:2] = 0
        return self.last(h)


@pytest.mark.sample(5)
@pytest.mark.parametrize("form", ["layer", "function", "product"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 3), (4, 2, 3, 3)])
def test_a_write_into_a_part_of_a_result_is_followed(
    form: str, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = Cleared(form, bias), torch.randn(shape, dtype=torch.float64)
    network = ps.trace(model, x)
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    expected = {name: torch.zeros_like(p) for name, p in network.parameters.items()}
    for output in model(x).flatten():
        for name, p in network.parameters.items():
            expected[name] += torch.autograd.grad(output, p, retain_graph=True)[0].square() / len(x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
