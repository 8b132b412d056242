"""What stands after the last parameter is free: it changes nothing of the network whose outputs enter it."""
# ruff: noqa: ARG005

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from oracles import enumerated

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    """Two heads, and what is made of them."""

    def __init__(self, function=lambda a, b, *_: (a, b)):
        super().__init__()
        self.body, self.first, self.second = (
            nn.Linear(*n, **DOUBLE) for n in ((3, 4), (4, 2), (4, 2))
        )
        self.after, self._function = nn.Linear(2, 1, **DOUBLE), function

    def forward(self, x, *rest):
        h = self.body(x).relu()
        return self._function(self.first(h), self.second(h), *rest)


X, LABELS, WANTED = torch.randn(3, 3, **DOUBLE), torch.tensor([0, 1, 1]), torch.rand(3, 2, **DOUBLE)
BOTH, SUM = (lambda a, b, *_: (a, b)), (lambda a, b, *_: a + b)

# name: (function, what enters it, further inputs)
ENDINGS = {
    "sigmoid": (lambda a, b: torch.sigmoid(a + b), SUM, ()),
    "tanh times a constant": (lambda a, b: 2.0 * torch.tanh(a + b).squeeze(-1), SUM, ()),
    "two heads": (lambda a, b: (a, functional.softplus(b) + 1e-3), BOTH, ()),
    "normalized": (lambda a, b: functional.normalize(a + b, dim=1), SUM, ()),
    "clamped": (lambda a, b: (a + b).clamp(-1, 1), SUM, ()),
    "probability and decision": (lambda a, b: (a.sigmoid(), (b.sigmoid() > 0.5).double()), BOTH, ()),
    "moved": (lambda a, b: (a.sigmoid().cpu().to("cpu", torch.float32), b.exp().round().long()), BOTH, ()),
    "all products of two outputs": (lambda a, b: a @ b.t() / 0.1, BOTH, ()),
    "a gate": (lambda a, b: a.sigmoid() * b, BOTH, ()),
    "a ratio": (lambda a, b: a / (1 + b.exp()), BOTH, ()),
    "a loss": (lambda a, b, y: functional.cross_entropy(a + b, y), SUM, (LABELS,)),
    "a loss and a measure": (lambda a, b, y: (functional.cross_entropy(a, y), (b.argmax(1) == y).double().mean(), b),
        BOTH, (LABELS,)),
    "a loss, and what enters it": (lambda a, b, y: {"loss": functional.mse_loss(a, y), "logits": b}, BOTH, (WANTED,)),
    "a loss written out": (lambda a, b, y: ((a - y) ** 2).mean() + b.exp().mean(), lambda a, b, y: (a - y, b),
        (WANTED,)),
}  # fmt: skip


def made(name):
    function, enters, more = ENDINGS[name]
    torch.manual_seed(0)
    model = Model(function)
    plain = Model(enters)
    plain.load_state_dict(model.state_dict())
    return model, plain, (X, *more)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ENDINGS)
def test_the_network_is_that_of_what_enters(name):
    model, plain, inputs = made(name)
    ours, theirs = ps.trace(model, inputs), ps.trace(plain, inputs)
    assert ours.num_classes == theirs.num_classes == 4
    assert ours.outside == theirs.outside
    kappas = [ps.paths.kappa(n, second_term=True) for n in (ours, theirs)]
    assert all(torch.equal(kappas[0][key], kappas[1][key]) for key in kappas[1])
    paths = [ps.paths.enumerate_paths(n) for n in (ours, theirs)]
    assert len(paths[0]) == len(paths[1])
    flow = ps.paths.activity(ours, inputs)
    torch.testing.assert_close(
        paths[0].output(ours.parameters, flow), flow.outputs, rtol=1e-12, atol=1e-12
    )
    known = (paths[0].factor * paths[0].values(ours.parameters)).square().sum().item()
    assert ps.paths.squared_path_norm(ours).item() == pytest.approx(known, rel=1e-12)


@pytest.mark.parametrize("name", ENDINGS)
def test_rescaling_is_bitwise_invisible(name):
    model, _, inputs = made(name)
    network, before = ps.trace(model, inputs), enumerated.call(model, inputs)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    after = enumerated.call(model, inputs)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(t) for t in (before, after)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["sigmoid", "probability and decision", "a gate", "a loss",
    "a loss and a measure"])  # fmt: skip
def test_the_measure_on_data_is_that_of_what_enters(name):
    model, plain, inputs = made(name)
    ours, theirs = (
        ps.paths.data_dependent_norm(
            ps.trace(m, inputs, strict=True), inputs, alpha=0.5, statistic="second_moment"
        ).item()
        for m in (model, plain)
    )
    assert ours == pytest.approx(theirs, rel=1e-12)


INSIDE = {
    "sigmoid": (lambda m, a, b: m.after(a.sigmoid()), "'sigmoid'.*not positively homogeneous"),
    "a product": (lambda m, a, b: m.after((a * b).relu()), "'mul'.*two activations"),
    "a gate": (lambda m, a, b: m.after(a + b.sigmoid() * a), "'sigmoid'"),
    "softmax": (lambda m, a, b: a.softmax(1) @ m.after.weight.t(), "'softmax'"),
    "clamp": (lambda m, a, b: m.after(functional.relu6(a)), "'(relu6|hardtanh)'"),
    "a decision": (lambda m, a, b: a if bool((a.sigmoid() > 0.5).any()) else b, "depends on the data"),
    "a choice": (lambda m, a, b: m.after(a * a.argmax(1, keepdim=True)), "indices depend on activations"),
}  # fmt: skip


class Inside(Model):
    def forward(self, x):
        h = self.body(x).relu()
        return self._function(self, self.first(h), self.second(h))


@pytest.mark.parametrize("name", INSIDE)
def test_a_parameter_that_comes_after_it_is_refused(name):
    function, message = INSIDE[name]
    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(Inside(function), X, strict=True)
