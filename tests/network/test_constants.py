"""Constants, masks, choices and products with sums: what they are to path geometry.

The oracle lists every path of the network, with its weights and its fixed factors, found by
probing: gamma_net^2 = sum over paths of the squared product, and kappa its derivative in the
squared weights.
"""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides
from oracles import enumerated

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    """A hidden layer of four units, a function of it, and a read-out."""

    def __init__(self, function, width=4, out=4, **parts):
        super().__init__()
        self.read, self.out = nn.Linear(3, width, **DOUBLE), nn.Linear(out, 2, **DOUBLE)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, x, *rest):
        return self.out(self._function(self, self.read(x).relu(), *rest))


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, **DOUBLE))


def buffer(*shape):
    return nn.Buffer(torch.rand(*shape, **DOUBLE))


def ones_above(n):
    return torch.ones(n, n, **DOUBLE).triu()


A, B, X = torch.arange(1.0, 5, **DOUBLE), torch.tensor([True, False, True, True]), torch.float64
SEQUENCE = (2, 3, 3)

# name: (model, shape of the input, further inputs, classes)
CASES = {
    "times a constant": (lambda: Model(lambda _, h: h * A), (2, 3), (), 4),
    "divided by a constant": (lambda: Model(lambda _, h: h / A), (2, 3), (), 4),
    "times a constant to the type of units": (lambda: Model(lambda _, h: h * A.to(h)), (2, 3), (), 4),
    "times a constant as units are": (lambda: Model(
        lambda _, h: h * A.float().type_as(h).expand_as(h).view_as(h)), (2, 3), (), 4),
    "times a constant to the type of inputs": (lambda: Model(lambda _, h, k: h * A.to(k) * k), (2, 3), ((2, 4),), 4),
    "plus a constant": (lambda: Model(lambda _, h: h + A), (2, 3), (), 0),
    "identity matrix": (lambda: Model(lambda _, h: h @ torch.eye(4, dtype=X)), (2, 3), (), 4),
    "permutation matrix": (lambda: Model(lambda _, h: h @ torch.eye(4, dtype=X)[[2, 0, 3, 1]]), (2, 3), (), 4),
    "matrix of ones": (lambda: Model(lambda _, h: h @ torch.ones(4, 4, **DOUBLE)), (2, 3), (), 1),
    "two blocks": (lambda: Model(lambda _, h: h @ torch.block_diag(ones_above(2), ones_above(2))), (2, 3), (), 2),
    "a sum of units": (lambda: Model(lambda _, h: (h @ A)[:, None], out=1), (2, 3), (), 1),
    "linear with a constant": (lambda: Model(
        lambda m, h: functional.linear(h, ones_above(4), m.b), b=parameter(4)), (2, 3), (), 1),
    "times a buffer": (lambda: Model(lambda m, h: h * m.b, b=buffer(4)), (2, 3), (), 4),
    "divided by a buffer": (lambda: Model(lambda m, h: h / m.b, b=buffer(4)), (2, 3), (), 4),
    "divided by a buffer in place": (lambda: Model(
        lambda m, h: h.clone().div_(m.b[:, None]), b=buffer(3)), SEQUENCE, (), 4),
    "weights divided by a buffer": (lambda: Model(
        lambda m, h: functional.linear(h, m.w / m.b), w=parameter(4, 4), b=buffer(4)), (2, 3), (), 8),
    "matrix in a buffer": (lambda: Model(lambda m, h: h @ m.b, b=buffer(4, 4)), (2, 3), (), 1),
    "computed from buffers": (lambda: Model(
        lambda m, h: h * (m.b[:4] + m.b[4:] / m.b.sum()), b=buffer(8)), (2, 3), (), 4),
    "graph convolution": (lambda: Model(lambda m, h: m.b @ h, b=buffer(3, 3)), SEQUENCE, (), 4),
    "graph convolution by einsum": (lambda: Model(
        lambda m, h: torch.einsum("uv,bvi->bui", m.b, h), b=buffer(3, 3)), SEQUENCE, (), 4),
    "adjacency as an input": (lambda: Model(lambda _, h, a: a @ h), SEQUENCE, ((2, 3, 3),), 4),
    "mask of units": (lambda: Model(lambda _, h, k: h * k), (2, 3), ((2, 4),), 4),
    "mask of steps": (lambda: Model(
        lambda _, h, k: (h * k[..., None]).sum(1) / k.sum(1, keepdim=True)), SEQUENCE, ((2, 3),), 4),
    "where": (lambda: Model(lambda m, h, k: torch.where(k > 0, h, m.l(h)), l=nn.Linear(4, 4, **DOUBLE)),
        (2, 3), ((2, 4),), 4),
    "where by a constant": (lambda: Model(lambda _, h: torch.where(B, h, h.flip(-1))), (2, 3), (), 4),
    "where or zero": (lambda: Model(lambda _, h, k: torch.where(k > 0, h, 0.0)), (2, 3), ((2, 4),), 4),
    "where or one": (lambda: Model(lambda _, h, k: torch.where(k > 0, h, 1.0)), (2, 3), ((2, 4),), 0),
    "masked_fill": (lambda: Model(lambda _, h, k: h.masked_fill(k < 0, 0.0)), (2, 3), ((2, 4),), 4),
    "masked_fill by a constant": (lambda: Model(lambda _, h: h.masked_fill(B, 0.0)), (2, 3), (), 4),
    "largest over time": (lambda: Model(lambda _, h: h.max(1).values), SEQUENCE, (), 4),
    "largest over time, by name": (lambda: Model(lambda _, h: torch.max(h, dim=1)[0]), SEQUENCE, (), 4),
    "smallest over time": (lambda: Model(lambda _, h: h.min(1)[0]), SEQUENCE, (), 4),
    "amin": (lambda: Model(lambda _, h: h.amin(1)), SEQUENCE, (), 4),
    "maxout": (lambda: Model(lambda _, h: h.view(-1, 2, 2).max(-1).values, out=2), (2, 3), (), 2),
    "minimum": (lambda: Model(lambda _, h: torch.minimum(h, h.flip(-1))), (2, 3), (), 2),
    "last valid step": (lambda: Model(
        lambda _, h, n: h[torch.arange(h.shape[0]), n - 1]), SEQUENCE, (torch.tensor([2, 3]),), 4),
    "last valid step, time first": (lambda: Model(lambda _, h, n: h.transpose(0, 1)[n - 1, torch.arange(h.shape[0])]),
        SEQUENCE, (torch.tensor([2, 3]),), 4),
    "gather": (lambda: Model(lambda _, h, n: h.gather(1, n)), (2, 3), (torch.tensor([[2, 0, 1, 1], [0, 3, 2, 1]]),), 1),
    "last valid step by gather": (lambda: Model(
        lambda _, h, n: h.gather(1, (n - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)),
        SEQUENCE, (torch.tensor([2, 3]),), 4),
    "gather by a constant": (lambda: Model(
        lambda _, h: h.gather(1, torch.tensor([[2, 0, 1, 1]]).expand(h.shape[0], 4))), (2, 3), (), 4),
    "rows of a table": (lambda: Model(
        lambda m, h, n: h + m.w[n], w=parameter(3, 4)), (2, 3), (torch.tensor([2, 0]),), 4),
    "einsum with a parameter": (lambda: Model(
        lambda m, h: torch.einsum("bi,oi->bo", h, m.w), w=parameter(4, 4)), (2, 3), (), 8),
    "einsum by heads": (lambda: Model(
        lambda m, h: torch.einsum("b...i,...io->b...o", h.view(-1, 2, 2), m.w).flatten(1), w=parameter(2, 2, 2)),
        (2, 3), (), 8),
    "matrices by heads": (lambda: Model(
        lambda m, h: (h.view(-1, 2, 1, 2) @ m.w).flatten(1), w=parameter(2, 2, 2)), (2, 3), (), 8),
    "bmm": (lambda: Model(
        lambda m, h: torch.bmm(h.view(-1, 2, 2).transpose(0, 1), m.w).transpose(0, 1).flatten(1),
        w=parameter(2, 2, 2)), (2, 3), (), 8),
    "tensordot": (lambda: Model(lambda m, h: torch.tensordot(h, m.w, 1), w=parameter(4, 4)), (2, 3), (), 8),
    "einsum that sums": (lambda: Model(lambda _, h: torch.einsum("bti->bi", h)), SEQUENCE, (), 4),
}  # fmt: skip


def made(name, seed=0):
    build, shape, more, classes = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        inputs = tuple(
            s if isinstance(s, torch.Tensor) else torch.randn(s, **DOUBLE) for s in (shape, *more)
        )
    return model, inputs if more else inputs[0], classes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_is_the_sum_over_its_paths_and_has_their_kappa(name):
    enumerated.check_paths(*made(name))


RESCALED = [name for name in CASES if name not in ("plus a constant", "where or one")]


@pytest.mark.sample(22)
@pytest.mark.parametrize("name", RESCALED)
def test_rescaling_is_bitwise_invisible(name):
    model, inputs, _ = made(name)
    enumerated.check_rescaling(model, inputs, [])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", slow_besides(RESCALED[::3], RESCALED))
def test_rescaling_is_bitwise_invisible_to_path_sgd(name):
    model, inputs, _ = made(name)
    enumerated.check_rescaling(
        model, inputs, [lambda p, n: ps.optim.PathSGD(p, n, lr=0.01, momentum=0.9)]
    )


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CASES)
def test_the_measure_on_data_does_not_see_the_scale(name):
    model, inputs, _ = made(name)
    enumerated.check_measure(model, inputs)


REFUSED = {
    "two activations": (lambda _, h: h @ h.transpose(-1, -2) @ h, (), "two activations"),
    "two parameters": (lambda m, h: h @ (m.u @ m.u), (), "two parameters"),
    "indices": (lambda _, h: h[:, h.max(1).indices], (), "indices depend on activations"),
    "argmax": (lambda _, h: h * h.argmax(-1, keepdim=True), (), "indices depend on activations"),
    "one-hot of an argmax": (
        lambda _, h: h * functional.one_hot(h.argmax(-1), h.shape[-1]),
        (),
        r"cannot trace 'one_hot' in .* \('mul' uses them\)",
    ),
    "a mask as an index": (lambda _, h, k: h[k > 0], ((2, 4),), "Multiply by the mask"),
    "an index that is not known": (
        lambda _, h, k: h[None, :, None, k.long()],
        ((2,),),
        "in a way that is not known.*arange",
    ),
    "a mask that is no number": (
        lambda _, h, k: h.masked_fill(k < 0, torch.nan),
        ((2, 4),),
        "no number",
    ),
    "random choices": (lambda _, h: h * torch.bernoulli(h), (), "draws"),
}


class Wrapper(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = nn.ModuleList([part])

    def forward(self, *inputs):
        return self.part[0](*inputs)


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_is_wrong_where_and_what_to_do(name):
    function, more, message = REFUSED[name]
    model = Wrapper(Model(function, u=parameter(4, 4)))
    inputs = tuple(torch.randn(s, **DOUBLE) for s in ((2, 3), *more))
    with pytest.raises(ps.UntraceableError, match=message) as refusal:
        ps.trace(model, inputs if more else inputs[0], strict=True)
    assert "part.0" in str(refusal.value)
    assert str(refusal.value).count(". ") >= 1  # a reason, then what to do


class Unregistered(nn.Module):
    """Layers in a plain list: the optimizer does not see them either."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(3, 4), [nn.Linear(4, 4), nn.Linear(4, 2)]

    def forward(self, x):
        for layer in self.rest[:1]:
            x = layer(self.first(x).relu())
        return self.rest[1](x)


def test_parameters_that_the_model_does_not_list_are_no_constants():
    with pytest.raises(ps.UntraceableError, match=r"linear.*does not list.*ModuleList"):
        ps.trace(Unregistered(), torch.randn(2, 3))


def test_predictions_may_be_returned_beside_the_outputs():
    class Predicts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(3, 4, **DOUBLE), nn.Linear(4, 2, **DOUBLE)

        def forward(self, x):
            logits = self.out(self.first(x).relu())
            return logits, logits.argmax(-1), logits.max(-1).indices, logits.softmax(-1).argmax(-1)

    model, x = Predicts(), torch.randn(2, 3, **DOUBLE)
    network = ps.trace(model, x)
    assert network.num_classes == 4
    assert ps.paths.data_dependent_norm(network, x, alpha=1.0).item() > 0


def test_what_is_computed_from_buffers_is_as_it_was_when_traced():
    """And the model's own buffers stay as they are, whatever is written into the copies."""
    model = Model(lambda m, h: h * m.b.mul_(2).sqrt(), b=nn.Buffer(torch.full((4,), 2.0, **DOUBLE)))
    with pytest.raises(ps.UntraceableError, match=r"sqrt|mul"):
        ps.trace(model, torch.randn(2, 3, **DOUBLE), strict=True)
    assert torch.equal(model.b, torch.full((4,), 2.0, **DOUBLE))


@pytest.mark.parametrize("change", [
    lambda b: functional.hardtanh(b, 0, 1, inplace=True), lambda b: functional.dropout(b, 0.5, True, True),
    lambda b: b.__ipow__(2),
])  # fmt: skip
def test_a_forward_pass_that_changes_a_buffer_changes_none_when_it_is_traced(change):
    model = Model(lambda m, h: h * change(m.b), b=nn.Buffer(torch.full((4,), 2.0, **DOUBLE)))
    with suppress(ps.UntraceableError):
        ps.trace(model, torch.randn(2, 3, **DOUBLE))
    assert torch.equal(model.b, torch.full((4,), 2.0, **DOUBLE))


@pytest.mark.parametrize("number", [lambda b: 1 + b, lambda b: b + 1, lambda b: 1 - b])
def test_a_learned_number_may_be_added_to_a_constant(number):
    model = Model(lambda m, h: h + number(m.b), b=parameter())
    network = ps.trace(model, torch.zeros(1, 3, **DOUBLE))
    assert network.num_classes == 0  # the number one is not rescaled, nor is what it is added to
    squares = {name: p.detach().square() for name, p in model.named_parameters()}
    hidden = squares["read.weight"].sum(1) + squares["read.bias"] + 1 + squares["b"]
    expected = (squares["out.weight"] @ hidden + squares["out.bias"]).sum()
    torch.testing.assert_close(ps.paths.squared_path_norm(network).detach(), expected)


@pytest.mark.parametrize("form", [
    lambda c, h: c.to(h), lambda c, h: c.type_as(h), lambda c, h: c.expand_as(h),
    lambda c, h: c[None].expand_as(h).view_as(h),
])  # fmt: skip
def test_a_constant_in_the_form_of_a_tensor_keeps_its_values(form):
    """It was read as an input once, so its squares were ones."""
    model = Model(lambda _, h: h * form(A, h))
    squares = {name: p.detach().square() for name, p in model.named_parameters()}
    hidden = (squares["read.weight"].sum(1) + squares["read.bias"]) * A.square()
    expected = (squares["out.weight"] @ hidden + squares["out.bias"]).sum().item()
    assert ps.paths.squared_path_norm(
        ps.trace(model, torch.zeros(2, 3, **DOUBLE))
    ).item() == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:the network has no unit class")
def test_a_constant_start_of_a_recurrence_holds_its_units_and_adds_its_square():
    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(2, 3, nonlinearity="relu", bias=False, batch_first=True, **DOUBLE)
            self.out = nn.Linear(3, 1, bias=False, **DOUBLE)

        def forward(self, x):
            return self.out(self.rnn(x, torch.full((1, len(x), 3), 0.5, **DOUBLE))[0][:, -1])

    model = Started()
    network = ps.trace(model, torch.zeros(1, 2, 2, **DOUBLE))
    assert network.num_classes == 0
    w_in, w_rec, w_out = (p.detach().square() for p in model.parameters())
    h = torch.full((3,), 0.25, **DOUBLE)
    for _ in range(2):
        h = w_in.sum(1) + w_rec @ h
    torch.testing.assert_close(ps.paths.squared_path_norm(network).detach(), (w_out @ h)[0])
