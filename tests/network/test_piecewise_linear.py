"""Differences, comparisons as gates, order, sums at places: all that is piecewise linear of degree one belongs.

Functions take the model, its units h, and what these were before their ReLU, z.
"""
# ruff: noqa: ARG005

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides
from oracles import enumerated

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    """A hidden layer of four units, a function of them and of what they were before their ReLU, and a read-out."""

    def __init__(self, function, out=4, **parts):
        super().__init__()
        self.read, self.out = nn.Linear(3, 4, **DOUBLE), nn.Linear(out, 2, **DOUBLE)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, x, *rest):
        z = self.read(x)
        return self.out(self._function(self, z.relu(), z, *rest))


class Images(nn.Module):
    """A convolution, a function of its channels, and another one."""

    def __init__(self, function, channels=2, **parts):
        super().__init__()
        self.read, self.out = nn.Conv2d(1, 2, 2, **DOUBLE), nn.Conv2d(channels, 1, 1, **DOUBLE)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, x):
        return self.out(self._function(self, self.read(x).relu()))


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape, **DOUBLE))


def signed(*shape):
    return nn.Buffer(torch.randn(*shape, **DOUBLE))


def linear():
    return nn.Linear(4, 4, **DOUBLE)


def in_place(m, h, z):
    h = h.clone()
    h -= m.l(z)
    return h.neg_().sub_(m.p)


def clamped_from_above(m, h, z):
    return h - 0.3 * z.clamp(max=0) + torch.clamp_max(m.l(z), 0.0) + z.clip(0)


def zeroed(m, h, z):
    z = z.clone()
    z[z < 0] = 0
    return z


def accumulated(m, h, z):
    total = h.new_zeros(h.shape[0], 2, 4)
    total.index_add_(1, torch.tensor([0, 1, 0]), h)
    return total


def messages(m, h, z):
    """A graph network: every edge carries what its source says to its target."""
    source, target = m.edges
    return torch.zeros_like(h).index_add(0, target, m.l(h)[source]).relu() - h


def messages_along_inputs(m, h, z, edges):
    return (
        torch.zeros_like(h).index_add(0, edges[1], h.index_select(0, edges[0]))
        + m.l(h)[edges[1][:1]]
    )


def dropped(m, h, z):
    """Stochastic depth: a whole branch is dropped, or made larger."""
    return h + m.l(h) * torch.empty(h.shape[0], 1, **DOUBLE).bernoulli_(0.5).div_(0.5)


ROW, STEPS, GRAPH = (2, 3), (2, 3, 3), (4, 3)
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
PLACES = torch.tensor([[2, 0, 1], [0, 2, 2]])
N = torch.arange(1.0, 5, **DOUBLE) - 2.5

# name: (model, shape of the input, further inputs, classes)
CASES = {
    # -- signs
    "difference": (lambda: Model(lambda m, h, z: h - m.l(h), l=linear()), ROW, (), 4),
    "difference of branches": (lambda: Model(lambda m, h, z: (m.a(h) - m.b(h)).relu(), a=linear(), b=linear()),
        ROW, (), 8),
    "centred": (lambda: Model(lambda m, h, z: h - h.mean(1, keepdim=True)), ROW, (), 1),
    "one minus": (lambda: Model(lambda m, h, z: (1 - h).relu()), ROW, (), 0),
    "minus a parameter": (lambda: Model(lambda m, h, z: (h - m.p).abs(), p=parameter(4)), ROW, (), 4),
    "parameter minus": (lambda: Model(lambda m, h, z: torch.subtract(m.p, h).relu(), p=parameter(4)), ROW, (), 4),
    "with a factor": (lambda: Model(lambda m, h, z: torch.rsub(m.l(h), h, alpha=0.3) + torch.add(h, h, alpha=-2),
        l=linear()), ROW, (), 4),
    "in place": (lambda: Model(in_place, l=linear(), p=parameter(4)), ROW, (), 4),
    "crelu": (lambda: Model(lambda m, h, z: torch.cat([z.relu(), (-z).relu()], 1), out=8), ROW, (), 4),
    "minus a weight": (lambda: Model(lambda m, h, z: h @ -m.w, w=parameter(4, 4)), ROW, (), 8),
    "negative learned scale": (lambda: Model(lambda m, h, z: (h * m.p).abs(), p=parameter(4)), ROW, (), 8),
    "signed constant": (lambda: Model(lambda m, h, z: h * N / -2), ROW, (), 4),
    "signed matrix": (lambda: Model(lambda m, h, z: (h @ m.b).relu(), b=signed(4, 4)), ROW, (), 1),
    "signed mask of weights": (lambda: Model(
        lambda m, h, z: functional.linear(h, m.w * m.b), w=parameter(4, 4), b=signed(4, 4)), ROW, (), 8),
    "lower triangle of weights": (lambda: Model(
        lambda m, h, z: functional.linear(h, m.w.tril()), w=parameter(4, 4)), ROW, (), 8),
    "upper triangle of weights, from below the diagonal": (lambda: Model(
        lambda m, h, z: functional.linear(h, m.w.triu(-2)), w=parameter(4, 4)), ROW, (), 8),
    "einsum of three": (lambda: Model(
        lambda m, h, z: torch.einsum("io,st,bsi->bto", m.w, m.b, h), w=parameter(4, 4), b=signed(3, 2)), STEPS, (), 8),
    "inner": (lambda: Model(lambda m, h, z: torch.inner(h, m.w), w=parameter(4, 4)), STEPS, (), 8),
    "product of three": (lambda: Model(
        lambda m, h, z: torch.linalg.multi_dot([h, m.w, m.v]), w=parameter(4, 4), v=parameter(4, 4)), ROW, (), 12),
    "products summed": (lambda: Model(
        lambda m, h, z: torch.linalg.vecdot(h[:, None], m.w).relu(), w=parameter(4, 4)), ROW, (), 8),
    "larger and smaller without nan": (lambda: Model(
        lambda m, h, z: torch.fmax(h, m.l(h)) - torch.fmin(z, h), l=linear()), ROW, (), 4),
    "sum without nan": (lambda: Model(lambda m, h, z: z - h.nansum(1, keepdim=True)), STEPS, (), 4),
    "products of a batch summed": (lambda: Model(
        lambda m, h, z: torch.addbmm(m.v, h[None], m.w, alpha=2), v=parameter(4), w=parameter(1, 4, 4)), ROW, (), 8),
    "lerp": (lambda: Model(lambda m, h, z: torch.lerp(h, m.l(h), 0.3), l=linear()), ROW, (), 4),
    "steps subtracted": (lambda: Model(lambda m, h, z: (h[:, 1:] - h[:, :-1]).abs()), STEPS, (), 4),
    "diff": (lambda: Model(lambda m, h, z: h.diff(dim=1).relu()), STEPS, (), 4),
    "second differences": (lambda: Model(lambda m, h, z: h.diff(2, dim=1).relu()), STEPS, (), 4),
    "no difference taken": (lambda: Model(lambda m, h, z: h.diff(0, dim=1).relu()), STEPS, (), 4),
    "no difference left": (lambda: Model(lambda m, h, z: torch.cat([h, h.diff(9, dim=1)], 1)), STEPS, (), 4),
    "fixed filter": (lambda: Images(
        lambda m, h: functional.conv2d(h, m.b, groups=2), b=signed(2, 1, 2, 1)), (2, 1, 3, 3), (), 2),
    "fixed filter over channels": (lambda: Images(
        lambda m, h: functional.conv2d(h, m.b, m.p), b=signed(2, 2, 1, 1), p=parameter(2)), (2, 1, 3, 3), (), 1),
    "bicubic": (lambda: Images(lambda m, h: functional.interpolate(h, scale_factor=1.5, mode="bicubic")),
        (2, 1, 3, 3), (), 2),
    "antialiased": (lambda: Images(lambda m, h: functional.interpolate(h, (2, 2), mode="bilinear", antialias=True)),
        (2, 1, 4, 4), (), 2),
    "area": (lambda: Images(lambda m, h: functional.interpolate(h, (2, 1), mode="area")), (2, 1, 3, 3), (), 2),
    "averages by a number of their own": (lambda: Images(
        lambda m, h: functional.avg_pool2d(h, 2, 1, 1, divisor_override=3)), (2, 1, 3, 3), (), 2),
    "rotated": (lambda: Images(lambda m, h: h.rot90(1, (2, 3)) - h), (2, 1, 3, 3), (), 2),
    # -- gates
    "own sign": (lambda: Model(lambda m, h, z: z * (z > 0)), ROW, (), 4),
    "own sign as a number": (lambda: Model(lambda m, h, z: (z >= 0).to(z.dtype) * z), ROW, (), 4),
    "leaky by where": (lambda: Model(lambda m, h, z: torch.where(z > 0, z, 0.1 * z)), ROW, (), 4),
    "zero by where": (lambda: Model(lambda m, h, z: torch.where(z > 0, z, torch.zeros_like(z))), ROW, (), 4),
    "masked by its sign": (lambda: Model(lambda m, h, z: z.masked_fill(z < 0, 0.0)), ROW, (), 4),
    "written by its sign": (lambda: Model(zeroed), ROW, (), 4),
    "clamped from above": (lambda: Model(clamped_from_above, l=linear()), ROW, (), 4),
    "sign": (lambda: Model(lambda m, h, z: z * torch.sign(z)), ROW, (), 4),
    "sign of another": (lambda: Model(lambda m, h, z: m.l(h) * (z > 0), l=linear()), ROW, (), 8),
    "both signs": (lambda: Model(lambda m, h, z: z * ((z > 0) | ~(z.flip(1) < 0))), ROW, (), 4),
    "compared": (lambda: Model(lambda m, h, z: torch.where(z > m.l(h), z, m.l(h)), l=linear()), ROW, (), 4),
    "compared with each other": (lambda: Model(lambda m, h, z: m.l(h) * (z > z.flip(1)), l=linear()), ROW, (), 6),
    "compared with one": (lambda: Model(lambda m, h, z: z * (z > 0.1)), ROW, (), 0),
    "slope by chance": (lambda: Model(lambda m, h, z: functional.rrelu(z, training=m.training)).eval(), ROW, (), 4),
    "infinite mask, then the largest": (lambda: Model(
        lambda m, h, z, k: h.masked_fill(k[..., None] < 1, -torch.inf).max(1).values), STEPS,
        (torch.tensor([[1, 1, 0], [1, 0, 0]]),), 4),
    "hardtanh without an upper bound": (lambda: Model(
        lambda m, h, z: functional.hardtanh(z, 0.0, torch.inf) - functional.hardtanh(m.l(z), -torch.inf, 0.0),
        l=linear()), ROW, (), 4),
    # -- order and sums
    "largest two": (lambda: Model(lambda m, h, z: h.topk(2, dim=1)[0].sum(1)), STEPS, (), 4),
    "sorted": (lambda: Model(lambda m, h, z: torch.sort(h, 1, descending=True).values - h), STEPS, (), 4),
    "median": (lambda: Model(lambda m, h, z: z.median(1)[0]), STEPS, (), 4),
    "second": (lambda: Model(lambda m, h, z: z.kthvalue(2, dim=1).values), STEPS, (), 4),
    "running maximum": (lambda: Model(lambda m, h, z: z.cummax(1)[0]), STEPS, (), 4),
    "cumulative sum": (lambda: Model(lambda m, h, z: h.cumsum(1)), STEPS, (), 4),
    "cumulative sum of units": (lambda: Model(lambda m, h, z: h.cumsum(-1) - h), ROW, (), 1),
    "index_add": (lambda: Model(
        lambda m, h, z: h.index_add(1, torch.tensor([0, 2]), m.l(h)[:, :2], alpha=-0.5), l=linear()), STEPS, (), 4),
    "index_add in place": (lambda: Model(accumulated), STEPS, (), 4),
    "scatter_add": (lambda: Model(lambda m, h, z: h.new_zeros(h.shape[0], 4).scatter_add(
        1, torch.tensor([[0, 1, 1, 3]]).expand(h.shape), h)), ROW, (), 3),
    "graph": (lambda: Model(messages, l=linear(), edges=nn.Buffer(EDGES)), GRAPH, (), 4),
    "graph as an input": (lambda: Model(messages_along_inputs, l=linear()), GRAPH, (EDGES,), 4),
    "scatter_add at inputs": (lambda: Model(lambda m, h, z, n: h.new_zeros(h.shape[0], 3, 4).scatter_add(
        1, n[..., None].expand(-1, -1, 4), h)), STEPS, (PLACES,), 4),
    "sums by scatter_reduce": (lambda: Model(lambda m, h, z: h.new_zeros(h.shape[0], 4).scatter_reduce(
        1, torch.tensor([[0, 1, 1, 3]]).expand(h.shape), z, "sum")), ROW, (), 3),
    "largest at inputs": (lambda: Model(lambda m, h, z, n: h.new_zeros(h.shape[0], 3, 4).scatter_reduce(
        1, n[..., None].expand(-1, -1, 4), h, "amax")), STEPS, (PLACES,), 4),
    "smallest at places, without what is there": (lambda: Model(lambda m, h, z: z.scatter_reduce(
        1, torch.tensor([[0, 1, 1, 3]]).expand(h.shape), h, "amin", include_self=False)), ROW, (), 3),
    "sums at inputs by scatter_reduce": (lambda: Model(lambda m, h, z, n: h.new_zeros(h.shape[0], 3, 4).scatter_reduce(
        1, n[..., None].expand(-1, -1, 4), h, "sum")), STEPS, (PLACES,), 4),
    "folded": (lambda: Images(lambda m, h: functional.fold(
        torch.cat([h.flatten(2)] * 2, 1), (3, 2), (2, 1))), (2, 1, 3, 3), (), 1),
    "where the largest were": (lambda: Images(
        lambda m, h: functional.max_pool2d(h, 2, return_indices=True)[0]), (2, 1, 3, 3), (), 2),
    "largest of windows with holes": (lambda: Images(
        lambda m, h: functional.max_pool2d(h, 2, 1, 1, dilation=2)), (2, 1, 4, 4), (), 2),
}  # fmt: skip


def made(name):
    build, shape, more, classes = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        inputs = tuple(
            s if isinstance(s, torch.Tensor) else torch.randn(s, **DOUBLE) for s in (shape, *more)
        )
    return model, inputs if more else inputs[0], classes


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_is_the_sum_over_its_paths_and_has_their_kappa(name):
    enumerated.check_paths(*made(name))


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", CASES)
def test_rescaling_is_bitwise_invisible(name):
    model, inputs, _ = made(name)
    enumerated.check_rescaling(model, inputs, [])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", slow_besides([*CASES][::3], CASES))
def test_optimizers_do_not_see_a_rescaling(name):
    model, inputs, classes = made(name)
    makers = [lambda p, n: ps.optim.PathSGD(p, n, lr=0.01, momentum=0.9)]
    # path space has the network's symmetries alone
    if classes and list(CASES).index(name) % 3 == 0:
        makers.append(lambda p, n: ps.optim.GSGD(p, n, lr=0.01))
    enumerated.check_rescaling(model, inputs, makers)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", CASES)
def test_the_measure_on_data_does_not_see_the_scale(name):
    model, inputs, _ = made(name)
    enumerated.check_measure(model, inputs)


@pytest.mark.parametrize("name", ["difference", "own sign", "graph", "sorted"])
def test_a_sign_that_is_lost_is_caught(name, monkeypatch):
    """The list of paths has the signs, so a difference read as a sum shows in what the model returns."""
    model, inputs, _ = made(name)
    network = ps.trace(model, inputs)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, inputs)
    flow.gates.abs_().add_(1.0)
    paths = copy.copy(paths)
    object.__setattr__(paths, "factor", paths.factor.abs())
    ours = paths.output(network.parameters, flow)
    assert not torch.allclose(ours, enumerated.call(model, inputs).reshape(ours.shape))


@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
def test_numbers_in_the_place_of_infinities_have_no_scale(fill):
    """A model may write infinities into activations and make numbers of them, which rescaling leaves as they are."""

    def function(m, h, z, mask):
        return h.masked_fill(mask[..., None] < 1, fill).nan_to_num(posinf=1.0, neginf=-1.0).sum(1)

    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    network = ps.trace(Model(function), (torch.randn(STEPS, **DOUBLE), mask))
    assert network.num_classes == 0
    assert [cut.operation for cut in network.cuts] == ["nan_to_num"]


@pytest.mark.parametrize("kind", ["amax", "amin"])
@pytest.mark.parametrize("edges", [nn.Buffer(EDGES), None], ids=["of a buffer", "of an input"])
def test_a_maximum_at_places_has_the_paths_of_a_sum(kind, edges):
    """What it returns is not written out path by path."""

    def function(kind):
        def aggregated(m, h, z, *given):
            source, target = m.edges if edges is not None else given[0]
            new = torch.zeros_like(h)
            return new.scatter_reduce_(
                0, target[:, None].expand(-1, 4), z[source], reduce=kind, include_self=False
            )

        return aggregated

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(function(kind), edges=edges)
        inputs = (torch.randn(GRAPH, **DOUBLE), *([] if edges is not None else [EDGES]))
    plain = Model(function("sum"), edges=edges)
    plain.load_state_dict(model.state_dict())
    ours, theirs = (ps.trace(m, inputs, batch_dim=None) for m in (model, plain))
    assert ours.num_classes == theirs.num_classes == 4
    for key, value in ps.paths.kappa(theirs).items():
        assert torch.equal(ps.paths.kappa(ours)[key], value)
    enumerated.check_rescaling(
        model, inputs, [lambda p, n: ps.optim.PathSGD(p, n, lr=0.01, momentum=0.9)]
    )


class Random(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.read, self.l, self.out = (nn.Linear(*n, **DOUBLE) for n in ((3, 4), (4, 4), (4, 2)))
        self._function = function

    def forward(self, x):
        return self.out(self._function(self, self.read(x).relu(), None))


@pytest.mark.parametrize(("function", "classes"), [
    (dropped, 4),
    (lambda m, h, z: h * (torch.rand_like(h) > 0.5), 4),
    (lambda m, h, z: h * torch.bernoulli(torch.full((h.shape[0], 4), 0.5, **DOUBLE)), 4),
    (lambda m, h, z: h + 0.1 * torch.randn_like(h), 0),
])  # fmt: skip
def test_random_numbers_are_inputs_and_none_are_drawn(function, classes):
    torch.manual_seed(0)
    model, x = Random(function), torch.randn(2, 3, **DOUBLE)
    before = torch.get_rng_state()
    network = ps.trace(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert network.num_classes == classes
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append(model(x))
        ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(*outputs)


REFUSED = {
    "a choice in Python": (lambda m, h, z: h if (h > 0).any() else -h, "depends on the data"),
    "elements by a comparison": (lambda m, h, z: h[h > 0], "Multiply by the mask"),
    "written from elsewhere": (lambda m, h, z: h.clone().__setitem__(z > 0, z[0]), "torch.where"),
    "difference of parameters": (lambda m, h, z: h @ (m.w - m.w.t()), "combines two parameters.*each of them"),
    "a learned threshold": (lambda m, h, z: h * (h > m.w[0]), "compares with a parameter.*buffer"),
    "joined weights": (lambda m, h, z: functional.linear(h, torch.cat([m.w, m.w])), "joined from several parameters"),
    "length": (lambda m, h, z: h.norm(dim=1, keepdim=True), "not piecewise linear"),
    "unpooled": (lambda m, h, z: functional.max_unpool1d(
        *functional.max_pool1d(h[:, None], 2, return_indices=True), 2)[:, 0], "unpool|indices"),
    "not a number": (lambda m, h, z: h.masked_fill(torch.tensor([True, False, True, True]), torch.nan), "no number"),
    "squared": (lambda m, h, z: h * h, "two activations"),
    "two weights at once": (lambda m, h, z: torch.einsum("bi,ij,jk->bk", h, m.w, m.w), "two at a time"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_is_wrong(name):
    function, message = REFUSED[name]
    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(Model(function, w=parameter(4, 4)), torch.randn(2, 3, **DOUBLE), strict=True)
