"""A batch is so many examples, each for itself: what mixes them is refused by name, whatever the example's size.

Functions take the model, its units h ``[B, T, 6]`` or ``[B, 6]``, and what the model was called
with.
"""
# ruff: noqa: ARG005

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.read, self.step, self.out = (nn.Linear(*n, **DOUBLE) for n in ((4, 6), (6, 6), (6, 2)))
        self.conv = nn.Conv1d(6, 6, 1, **DOUBLE)
        self.rnn = nn.RNN(6, 6, nonlinearity="relu", **DOUBLE)
        self._function = function

    def forward(self, x):
        return self._function(self, self.read(x).relu(), x)


def steps_written(m, h, x):
    out = h.new_zeros(h.shape)
    for t in range(x.shape[1]):
        out[:, t] = h[:, t]
    return m.out(out.reshape(len(x), -1).view(x.shape[1], len(x), 6))


def steps_written_first(m, h, x):
    out = h.new_zeros(x.shape[1], len(x), 6)
    for t in range(x.shape[1]):
        out[t] = h[:, t]
    return m.rnn(out)[0].transpose(0, 1)


ROWS, STEPS, PAIRS = (3, 4), (3, 5, 4), (3, 2, 4)

# name: (function, shape of the input, the operation that is named)
MIXED = {
    "a transposed reshape": (lambda m, h, x: m.out(h.reshape(6, -1).t()), ROWS, "reshape"),
    "batch for time": (lambda m, h, x: m.rnn(h.reshape(len(x), -1).view(x.shape[1], len(x), 6))[0], STEPS, "view"),
    "batch for time, summed": (lambda m, h, x: m.out(
        h.reshape(len(x), -1).view(x.shape[1], len(x), 6).sum(0)), PAIRS, "view"),
    "batch for time, returned": (lambda m, h, x: m.out(
        h.reshape(len(x), -1).view(x.shape[1], len(x), 6)), PAIRS, "view"),
    "merged and parted otherwise": (lambda m, h, x: m.out(
        h.view(-1, 6).view(x.shape[1], len(x), 6).transpose(0, 1)), STEPS, "view"),
    "time first, then batch": (lambda m, h, x: m.out(h.transpose(0, 1).reshape(len(x), -1, 6)), STEPS, "reshape"),
    "merged time first, parted batch first": (lambda m, h, x: m.out(
        h.transpose(0, 1).reshape(-1, 6).view(len(x), -1, 6)), STEPS, "view"),
    "in what was written": (steps_written, STEPS, "view"),
    "pairs of examples": (lambda m, h, x: m.out((h[:, None] - h[None]).abs()), ROWS, "sub"),
    "pairs of examples, summed": (lambda m, h, x: m.out((h[:, None] - h[None]).abs().sum(1)), ROWS, "sub"),
    "the other way round": (lambda m, h, x: m.out(h + h.flip(0)), ROWS, "flip"),
    "neighbours in the batch": (lambda m, h, x: m.out(h + h.roll(1, 0)), ROWS, "roll"),
    "the first example for all": (lambda m, h, x: m.out(h[[0] * len(x)]), ROWS, "__getitem__"),
    "the first of merged rows": (lambda m, h, x: m.out(h.view(-1, 6)[:1]), STEPS, "__getitem__"),
    "a sum of merged rows": (lambda m, h, x: m.out(h.view(-1, 6).sum(0)), STEPS, "sum"),
    "a running sum of merged rows": (lambda m, h, x: m.out(h.view(-1, 6).cumsum(0)), STEPS, "cumsum"),
    "neighbours in merged rows": (lambda m, h, x: m.out(h.view(-1, 6).diff(dim=0)), STEPS, "diff"),
}  # fmt: skip


@pytest.mark.sample(18)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", MIXED)
def test_refuses_to_mix_examples(name, size):
    function, shape, operation = MIXED[name]
    model, x = Model(function), torch.randn(shape, **DOUBLE)
    model(x)
    with pytest.raises(
        ps.UntraceableError, match=r"mixes the examples of a batch.*Keep the batch"
    ) as refusal:
        ps.trace(model, x[:size])
    assert refusal.value.operation == operation


def test_refuses_to_mix_examples_where_the_batch_is_named():
    function, shape, _ = MIXED["a transposed reshape"]
    with pytest.raises(ps.UntraceableError, match=r"'reshape'.*mixes the examples"):
        ps.trace(Model(function), torch.zeros(shape, **DOUBLE), batch_dim=0)
    assert ps.trace(Model(function), torch.zeros(shape, **DOUBLE), batch_dim=None).num_classes > 0


def test_a_dimension_that_is_named_and_is_none_of_a_batch_is_refused():
    model = Model(lambda m, h, x: m.out(h.sum(0)))
    with pytest.raises(
        ps.UntraceableError, match=r"dimension 0 .* cannot be the batch: sum needs it otherwise"
    ):
        ps.trace(model, torch.zeros(3, 4, **DOUBLE), batch_dim=0)


def test_a_loop_over_examples_makes_them_one_and_the_network_says_so():
    def row_by_row(m, h, x):
        rows = torch.zeros_like(h)
        for i in range(len(h)):
            rows[i] = h[i]
        return m.out(rows)

    network = ps.trace(Model(row_by_row), torch.zeros(3, 4, **DOUBLE))
    assert repr(network).endswith(", the input is one example)")
    with pytest.raises(ps.UntraceableError, match=r"dimension 0 .* cannot be the batch"):
        ps.trace(Model(row_by_row), torch.zeros(3, 4, **DOUBLE), batch_dim=0)


def test_one_example_that_is_a_vector_has_no_batch():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(3, **DOUBLE)
    network = ps.trace(model, x)
    assert network.call.batch_dim is None
    one = ps.paths.data_dependent_kappa(ps.trace(model, x[None]), x[None])
    torch.testing.assert_close(ps.paths.data_dependent_kappa(network, x), one)
    assert ps.paths.degrees_of_freedom(network, x) == ps.paths.degrees_of_freedom(network, x) <= 2
    before = model(x)
    ps.rescaling.balance_(network, x, criterion="activations", calibration=x)
    torch.testing.assert_close(model(x), before)
    with pytest.raises(
        ValueError, match="batch_dim=1, but the first tensor of the example input has 1 dimensions"
    ):
        ps.trace(model, x, batch_dim=1)


def test_a_vector_of_examples_that_is_turned_keeps_them():
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out = nn.Linear(1, 3, **DOUBLE), nn.Linear(3, 1, **DOUBLE)

        def forward(self, x):
            return self.out(self.read(x.t().unsqueeze(-1)).relu())

    model, x = Numbers(), torch.randn(5, **DOUBLE)
    layers = nn.Sequential(model.read, nn.ReLU(), model.out)
    known = ps.paths.data_dependent_kappa(ps.trace(layers, x[:1, None]), x[:, None])
    found = ps.paths.data_dependent_kappa(ps.trace(model, x[:1]), x)
    torch.testing.assert_close(list(found.values()), list(known.values()))


def without_rest(h):
    """Rotary embeddings turn some features, which may be all, and join the others, which may be none."""
    return torch.cat([h[..., :3], h[..., 3:]], -1)


KEPT = {
    "steps merged with the batch": (lambda m, h, x: m.out(h.view(-1, 6)).view(len(x), -1, 2), STEPS, 0),
    "time first": (lambda m, h, x: m.out(h.transpose(0, 1).reshape(-1, 6)).view(
        x.shape[1], len(x), 2).transpose(0, 1), STEPS, 0),
    "time first in the input": (lambda m, h, x: m.rnn(h)[0], (5, 3, 4), 1),
    "time first in the input, merged": (lambda m, h, x: m.rnn(
        m.step(h.view(-1, 6)).view(*x.shape[:2], 6))[0], (5, 3, 4), 1),
    "last step of merged rows": (lambda m, h, x: m.out(h.transpose(0, 1).reshape(-1, 6)[-len(x):]), STEPS, 0),
    "heads": (lambda m, h, x: m.out(h.view(len(x), -1, 2, 3).transpose(1, 2).flatten(2).sum(1)[:, :6]), STEPS, 0),
    "heads merged with the batch, and nothing joined to them": (lambda m, h, x: m.out(without_rest(
        h.view(len(x), -1, 2, 3).transpose(1, 2).reshape(-1, h.shape[1], 3)
    ).view(len(x), 2, -1, 3).transpose(1, 2).reshape(h.shape)), STEPS, 0),
    "windows": (lambda m, h, x: m.out(m.step(
        h.view(len(x), 2, 2, 6).permute(0, 2, 1, 3).reshape(-1, 2, 6)
    ).view(len(x), 2, 2, 6).permute(0, 2, 1, 3).reshape(len(x), 4, 6)), (3, 4, 4), 0),
    "channels first": (lambda m, h, x: m.out(m.conv(h.transpose(1, 2)).transpose(1, 2)), STEPS, 0),
    "copies": (lambda m, h, x: m.out(h.repeat(2, 1).view(2, len(x), 6).sum(0)), ROWS, 0),
    "copies side by side": (lambda m, h, x: m.out(h.repeat_interleave(2, 0).view(len(x), 2, 6).sum(1)), ROWS, 0),
    "written step by step": (steps_written_first, STEPS, 0),
    "one sequence": (lambda m, h, x: m.rnn(h)[0], (5, 4), None),
    "one image": (lambda m, h, x: nn.functional.conv2d(
        x.view(1, 1, *x.shape), m.out.weight.view(2, 1, 2, 3), padding=1), (6, 4), None),
}  # fmt: skip


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", KEPT)
def test_follows_the_batch(name):
    function, shape, batch = KEPT[name]
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(shape, **DOUBLE)
    network = ps.trace(model, x)
    assert network.call.batch_dim == batch
    assert (network.num_classes > 0) is (name != "one image")
    before = model(x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), before)
    if batch is not None:  # the examples of a batch are those that it treats alone
        alone = [model(one) for one in x.split(1, batch)]
        torch.testing.assert_close(
            torch.cat(alone, batch if name != "last step of merged rows" else 0), before
        )
        assert ps.trace(model, x, batch_dim=batch).num_classes == network.num_classes


class Branches(nn.Module):
    """Another way for other numbers of examples."""

    def __init__(self, function):
        super().__init__()
        self.a, self.o = nn.Linear(4, 6), nn.Linear(6, 2)
        self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6)
        self._function = function

    def forward(self, x):
        return self.o(self._function(self, self.a(x).relu()))


BRANCHES = {
    "a layer": lambda m, h: h if len(h) > 3 else m.b(h).relu(),
    "another activation": lambda m, h: h.tanh() if len(h) > 3 else h,
    "one of two weights": lambda m, h: functional.linear(h, (m.b if len(h) > 3 else m.c).weight),
    "for one alone": lambda m, h: h if len(h) > 1 else m.b(h).relu(),
    "an order": lambda m, h: h.flip(1) + h if len(h) > 3 else h,
    "zeros": lambda m, h: h * 0 if len(h) > 3 else h,
    "a sum": lambda m, h: h + h if len(h) > 3 else h,
    "a sum with weights": lambda m, h: h + m.b.bias if len(h) > 3 else h,
    "a mask": lambda m, h: h.masked_fill(m.c.bias.isnan(), 0.0) if len(h) > 3 else h,
}


@pytest.mark.parametrize("batch_dim", ["auto", 0])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_forward_pass_that_branches_on_the_number_of_examples_is_refused(name, batch_dim):
    torch.manual_seed(0)
    model = Branches(BRANCHES[name])
    with pytest.raises(ps.UntraceableError):
        ps.trace(model, torch.randn(5, 4), batch_dim=batch_dim)


NO_BRANCHES = {
    "a check": lambda m, h: h if len(h) < 100 else None,
    "an unsqueezed batch": lambda m, h: h[None][0] if len(h) > 3 else h,
    "a loop over examples": lambda m, h: torch.stack([row * 1.0 for row in h.unsqueeze(0)])[0],
}


@pytest.mark.parametrize("name", NO_BRANCHES)
def test_a_question_for_the_number_of_examples_that_changes_nothing_is_followed(name):
    torch.manual_seed(0)
    model, x = Branches(NO_BRANCHES[name]).double(), torch.randn(5, 4, dtype=torch.float64)
    network = ps.trace(model, x)
    assert network.num_classes == 6
    outputs = [model(x[:n]) for n in (1, 2, 5)]
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert all(torch.equal(model(x[:n]), y) for n, y in zip((1, 2, 5), outputs, strict=True))


class TwoViews(nn.Module):
    """Sums two inputs that stand in front of the batch for a while."""

    def __init__(self, channels):
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.b(self.a(torch.stack([x, -2 * x]).sum(0)).relu())


@pytest.mark.parametrize("examples", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_stack_of_inputs_has_no_batch_of_its_own(channels, examples):
    """With two examples, two inputs, and one or two channels, several dimensions have one size."""
    torch.manual_seed(0)
    model, x = TwoViews(channels).double(), torch.randn(examples, channels, 3, 3).double()
    network = ps.trace(model, x)
    assert (network.call.batch_dim, network.num_classes) == (0, 3)
    doubled = ps.paths.data_dependent_norm(network, torch.cat([x, x]))
    torch.testing.assert_close(doubled, ps.paths.data_dependent_norm(network, x))
