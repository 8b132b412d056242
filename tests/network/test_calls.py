"""One function called in the several ways that torch allows: arguments by name, aliases, factors of sums."""
# ruff: noqa: ARG005

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps

DOUBLE = {"dtype": torch.float64}
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), **DOUBLE)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.o = (nn.Linear(n, m, **DOUBLE) for n, m in ((3, 4), (3, 4), (4, 2)))
        self.w, self.v = (nn.Parameter(torch.randn(*n, **DOUBLE)) for n in ((4, 4), (4,)))
        self._function = function

    def forward(self, x):
        return self.o(self._function(self, self.a(x).relu(), self.b(x)))


HALVES = torch.full((4,), 0.5, **DOUBLE)
ORDER = torch.tensor([[2, 0, 3, 1]])


def product(x, y):
    return (x[:, None] @ y[:, :, None])[:, 0].expand(-1, 4)


PAIRS = {  # by name, and by position
    "add": (lambda m, h, z: torch.add(h, other=z), lambda m, h, z: h + z),
    "add, all by name": (lambda m, h, z: torch.add(other=z, input=h), lambda m, h, z: h + z),
    "sub": (lambda m, h, z: torch.sub(h, other=z, alpha=2), lambda m, h, z: h - 2 * z),
    "mul": (lambda m, h, z: torch.mul(h, other=z), lambda m, h, z: h * z),
    "mul by a parameter": (lambda m, h, z: torch.mul(input=h, other=m.v), lambda m, h, z: h * m.v),
    "mul into nothing": (lambda m, h, z: torch.mul(h, z, out=None), lambda m, h, z: h * z),
    "div": (lambda m, h, z: torch.div(input=h, other=2), lambda m, h, z: h / 2),
    "maximum": (lambda m, h, z: torch.maximum(h, other=z), lambda m, h, z: torch.maximum(h, z)),
    "max": (
        lambda m, h, z: torch.max(input=h.view(-1, 2, 2), dim=1)[0].repeat(1, 2),
        lambda m, h, z: h.view(-1, 2, 2).amax(1).repeat(1, 2),
    ),
    "clamp": (lambda m, h, z: torch.clamp(input=z, min=0), lambda m, h, z: z.relu()),
    "where": (
        lambda m, h, z: torch.where(condition=z > 0, input=h, other=z),
        lambda m, h, z: torch.where(z > 0, h, z),
    ),
    "reshape": (lambda m, h, z: torch.reshape(input=h, shape=(-1, 4)), lambda m, h, z: h.reshape(-1, 4)),
    "view": (lambda m, h, z: h.view(size=(-1, 4)), lambda m, h, z: h.view(-1, 4)),
    "roll": (lambda m, h, z: torch.roll(input=h, shifts=1, dims=-1), lambda m, h, z: h.roll(1, -1)),
    "matmul": (lambda m, h, z: torch.matmul(h, other=m.w), lambda m, h, z: h @ m.w),
    "mm": (lambda m, h, z: torch.mm(h, mat2=m.w), lambda m, h, z: h @ m.w),
    "bmm": (
        lambda m, h, z: torch.bmm(h[:, None], mat2=z[:, :, None])[:, 0].expand(-1, 4),
        lambda m, h, z: product(h, z),
    ),
    "addmm": (lambda m, h, z: torch.addmm(m.v, mat1=h, mat2=m.w), lambda m, h, z: m.v + h @ m.w),
    "addmm into nothing": (lambda m, h, z: torch.addmm(m.v, h, m.w, out=None), lambda m, h, z: m.v + h @ m.w),
    "addmm of activations": (lambda m, h, z: torch.addmm(z, h, m.w), lambda m, h, z: z + h @ m.w),
    "addmm with factors": (
        lambda m, h, z: torch.addmm(m.v, h, m.w, beta=2, alpha=0.5),
        lambda m, h, z: 2 * m.v + 0.5 * (h @ m.w),
    ),
    "addmm without a summand": (
        lambda m, h, z: torch.addmm(z, h, m.w, beta=0, alpha=3),
        lambda m, h, z: 3 * (h @ m.w),
    ),
    "baddbmm of a constant": (
        lambda m, h, z: torch.ones(1, 1, 1, **DOUBLE).baddbmm(
            batch1=h[:, None], batch2=z[:, :, None], beta=2.0, alpha=0.25
        )[:, 0].expand(-1, 4),
        lambda m, h, z: 2 + 0.25 * product(h, z),
    ),
    "addcmul": (lambda m, h, z: torch.addcmul(h, z, tensor2=m.v, value=0.5), lambda m, h, z: h + 0.5 * (z * m.v)),
    "addcmul, its value first": (
        lambda m, h, z: torch.addcmul(h, 0.5, z, m.v),
        lambda m, h, z: h + 0.5 * (z * m.v),
    ),
    "addcmul of activations": (lambda m, h, z: h.addcmul(h, z), lambda m, h, z: h + h * z),
    "lerp by a parameter": (
        lambda m, h, z: torch.lerp(h, z, weight=m.v.sigmoid()),
        lambda m, h, z: (lambda s: (1 - s) * h + s * z)(m.v.sigmoid()),
    ),
    "lerp by a constant": (lambda m, h, z: h.lerp(end=z, weight=HALVES), lambda m, h, z: HALVES * h + HALVES * z),
    "hsplit": (lambda m, h, z: torch.hsplit(h, 2)[1].repeat(1, 2), lambda m, h, z: h[:, 2:].repeat(1, 2)),
    "hsplit, by name": (
        lambda m, h, z: torch.hsplit(h, sections=2)[1].repeat(1, 2),
        lambda m, h, z: h[:, 2:].repeat(1, 2),
    ),
    "hsplit, indices one by one": (
        lambda m, h, z: h.hsplit(1, 3)[1].repeat(1, 2),
        lambda m, h, z: h[:, 1:3].repeat(1, 2),
    ),
    "vsplit, by name": (
        lambda m, h, z: torch.vsplit(h.view(-1, 2, 2).transpose(0, 1), indices=[1])[0][0].repeat(1, 2),
        lambda m, h, z: h[:, :2].repeat(1, 2),
    ),
    "dsplit": (
        lambda m, h, z: h.view(-1, 1, 4).dsplit([1])[1].sum(1).repeat(1, 2)[:, :4],
        lambda m, h, z: h[:, 1:].repeat(1, 2)[:, :4],
    ),
    "fliplr": (lambda m, h, z: h.fliplr(), lambda m, h, z: h.flip(1)),
    "flipud": (lambda m, h, z: h.t().flipud().t(), lambda m, h, z: h.flip(1)),
    "take_along_dim": (
        lambda m, h, z: torch.take_along_dim(h, indices=ORDER, dim=1),
        lambda m, h, z: h.gather(1, ORDER.expand(len(h), -1)),
    ),
    "take_along_dim of what is broadcast": (
        lambda m, h, z: h[:, None].take_along_dim(ORDER.view(1, 2, 2), -1).flatten(1),
        lambda m, h, z: h[:, None].expand(-1, 2, -1).gather(2, ORDER.view(1, 2, 2).expand(len(h), -1, -1)).flatten(1),
    ),
    "take_along_dim, flattened": (
        lambda m, h, z: torch.stack([row.take_along_dim(ORDER) for row in h.split(1)]),
        lambda m, h, z: torch.stack([row.flatten().gather(0, ORDER[0]) for row in h.split(1)]),
    ),
    "broadcast_tensors": (
        lambda m, h, z: sum(torch.broadcast_tensors(h, m.v)),
        lambda m, h, z: h + m.v.expand(h.shape),
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:\\s*This overload of addcmul is deprecated:UserWarning")
@pytest.mark.parametrize("name", PAIRS)
def test_a_call_by_name_is_that_by_position(name):
    models = [Model(function) for function in PAIRS[name]]
    networks = [ps.trace(model, X) for model in models]
    torch.testing.assert_close(*(m(X) for m in models), rtol=1e-12, atol=1e-14)
    ours, theirs = networks
    assert ours.cuts == theirs.cuts
    assert ours.num_classes == theirs.num_classes > 0
    for key, labels in theirs.edges.items():
        assert torch.equal(ours.edges[key].target, labels.target)
        assert torch.equal(ours.edges[key].source, labels.source)
    for metric in (
        lambda n: ps.paths.kappa(n, second_term=True),
        lambda n: ps.paths.data_dependent_kappa(n, X, alpha=0.5, statistic="second_moment"),
    ):
        one, other = (metric(n) for n in networks)
        assert one.keys() == other.keys()
        for key, value in other.items():
            torch.testing.assert_close(one[key], value, rtol=1e-11, atol=1e-13)


def test_a_call_that_no_rule_knows_is_a_cut():
    network = ps.trace(
        Model(
            lambda m, h, z: functional.leaky_relu(
                torch.flip(input=h, dims=(1,)), negative_slope=0.5
            )
        ),
        X,
    )
    assert not network.cuts
    cut = ps.trace(Model(lambda m, h, z: torch.mm(h, m.w, torch.float64)), X)
    assert [c.operation for c in cut.cuts] == ["mm"]


SLOPES = {
    "as an edge, too": lambda m, h, z: functional.prelu(z, m.v) * m.v,
    "the bias of a layer": lambda m, h, z: functional.prelu(h - z, m.b.bias) + z,
    "an activation": lambda m, h, z: functional.prelu(z, m.b(torch.ones(3, **DOUBLE))),
    "its size": lambda m, h, z: functional.prelu(z, m.v.abs()) * m.v,
}


@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize("name", SLOPES)
def test_a_slope_that_is_something_else_too_keeps_the_function(name):
    model = Model(SLOPES[name])
    network, before = ps.trace(model, X), model(X)
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert torch.equal(model(X), before)
