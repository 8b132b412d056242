"""One function written in two ways is one network: the same unit classes and kappa, also on data."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps


class Written(nn.Module):
    """Two layers, a gain and learned queries, joined as a function says; equal seeds give equal weights."""

    def __init__(self, way, hidden=8):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.z, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(hidden, 3)
        self.q, self.w = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 8))
        self.way, self.kept = way, None
        self.double()

    def forward(self, x):
        return self.way(self, x)


def h(m, x):
    return m.a(x).relu()


def gated(m, x, state):
    for t in range(x.shape[1]):
        z, new = m.z(x[:, t]).sigmoid(), h(m, x[:, t])
        state = z * new if state is None else (1 - z) * state + z * new
    return m.c(state)


def of_one_unit(m, x, state, gain):
    for t in range(x.shape[1]):
        new = h(m, x[:, t])[:, :1]
        state = new if state is None else gain(m, x[:, t]) * state + new
    return m.c(state.expand(-1, 8))


def gate_of_one_unit(m, x):
    return m.z(x)[:, :1].sigmoid()


def gain_of_one_unit(m, x):
    return m.q[0, :1]


def pooled(m, x, queries):
    return m.c((queries @ h(m, x).transpose(1, 2)).softmax(-1) @ h(m, x))


def into_first(target, part):
    target[..., : part.shape[-1]].copy_(part)
    return target


def zeros_like(x):
    return x.new_zeros(len(x), x.shape[1], 8)


def by_unit(target, source):
    for unit in range(source.shape[-1]):
        target[..., unit].add_(source[..., unit])
    return target


def by_halves(target, source):
    half = source.shape[-1] // 2
    target[..., half:].copy_(source[..., half:])
    target[..., :half].copy_(source[..., :half])
    return target


def by_another_name(target, source, name, other):
    shown = other(target)
    name(target).copy_(source)
    return shown


def cached(m, x):
    """Recur over time, with all states in one tensor that is read before it is written to."""
    states = zeros_like(x).transpose(0, 1)
    for t in range(x.shape[1]):
        before = states[t - 1]
        states[t] = (h(m, x[:, t]) + before @ m.w).relu()
    return m.c(states)


def recurrent(m, x):
    state = x.new_zeros(len(x), 8)
    states = []
    for t in range(x.shape[1]):
        state = (h(m, x[:, t]) + state @ m.w).relu()
        states.append(state)
    return m.c(torch.stack(states))


def keeping(m, x, container):
    m.kept = container(h(m, x))
    return m.c(m.kept[0])


def hooked(m, x, hook):
    y = h(m, x)
    if y.requires_grad:
        hook(y)
    return m.c(y)


def in_autocast(m, x):
    y = h(m, x)
    with torch.autocast(device_type=x.device.type, enabled=False):
        return m.c(y)


WAYS = {
    "sum(axis=)": (lambda m, x: m.c(h(m, x).sum(axis=1)), lambda m, x: m.c(h(m, x).sum(1))),
    "mean(keepdims=)": (
        lambda m, x: m.c(h(m, x).mean(1, keepdims=True)),
        lambda m, x: m.c(h(m, x).mean(1, keepdim=True)),
    ),
    "max(axis=)": (lambda m, x: m.c(h(m, x).max(axis=1)[0]), lambda m, x: m.c(h(m, x).max(1)[0])),
    "cat(axis=)": (
        lambda m, x: m.c(torch.cat([h(m, x), 2 * h(m, x)], axis=1)),
        lambda m, x: m.c(torch.cat([h(m, x), 2 * h(m, x)], 1)),
    ),
    "unbind(axis=)": (
        lambda m, x: m.c(sum(h(m, x).unbind(axis=1))),
        lambda m, x: m.c(sum(h(m, x).unbind(1))),
    ),
    "swapaxes(axis0=, axis1=)": (
        lambda m, x: m.c(h(m, torch.swapaxes(x, axis0=0, axis1=1))),
        lambda m, x: m.c(h(m, x.transpose(0, 1))),
    ),
    "movedim": (
        lambda m, x: m.c(h(m, x.movedim(0, 1))).movedim(source=1, destination=0),
        lambda m, x: m.c(h(m, x)),
    ),
    "moveaxis": (
        lambda m, x: m.c(h(m, torch.moveaxis(x, (0, 1), (1, 0)))),
        lambda m, x: m.c(h(m, x.transpose(0, 1))),
    ),
    "zeros_like(input=)": (
        lambda m, x: m.c(torch.maximum(m.a(x), torch.zeros_like(input=m.a(x)))),
        lambda m, x: m.c(h(m, x)),
    ),
    "pow(2, h)": (lambda m, x: m.c(torch.pow(2.0, h(m, x))), lambda m, x: m.c(2.0 ** h(m, x))),
    "einsum of one": (lambda m, x: m.c(torch.einsum("...ij", h(m, x))), lambda m, x: m.c(h(m, x))),
    "einsum of three": (
        lambda m, x: m.c(torch.einsum("bti,bti,bt->bti", h(m, x), m.z(x), x.sum(-1).sigmoid())),
        lambda m, x: m.c(h(m, x) * m.z(x) * x.sum(-1, keepdim=True).sigmoid()),
    ),
    "einsum of three, a weight among them": (
        lambda m, x: m.c(torch.einsum("ij,bti,bti->btj", m.w, h(m, x), m.z(x))),
        lambda m, x: m.c((h(m, x) * m.z(x)) @ m.w),
    ),
    "queries expanded over the batch": (
        lambda m, x: pooled(m, x, m.q.expand(len(x), -1, -1)),
        lambda m, x: pooled(m, x, m.q),
    ),
    "queries repeated over the batch": (
        lambda m, x: pooled(m, x, m.q.repeat(len(x), 1, 1)),
        lambda m, x: pooled(m, x, m.q),
    ),
    "bmm with a weight expanded over the batch": (
        lambda m, x: m.c(torch.bmm(h(m, x), m.w.expand(len(x), -1, -1)).relu()),
        lambda m, x: m.c((h(m, x) @ m.w).relu()),
    ),
    "a gate times the zeros of the first state": (
        lambda m, x: gated(m, x, x.new_zeros(len(x), 8)),
        lambda m, x: gated(m, x, None),
    ),
    "a gate times the zeros of a single unit": (
        lambda m, x: of_one_unit(m, x, x.new_zeros(len(x), 1), gate_of_one_unit),
        lambda m, x: of_one_unit(m, x, None, gate_of_one_unit),
    ),
    "a gain times the zeros of a single unit": (
        lambda m, x: of_one_unit(m, x, x.new_zeros(len(x), 1), gain_of_one_unit),
        lambda m, x: of_one_unit(m, x, None, gain_of_one_unit),
    ),
    "unfold(padding=)": (
        lambda m, x: m.c(
            functional.unfold(h(m, x)[:, None], (1, 3), padding=(0, 1)).transpose(1, 2)[
                ..., [0, 1, 2] * 2 + [0, 1]
            ]
        ),
        lambda m, x: m.c(
            functional.unfold(functional.pad(h(m, x)[:, None], (1, 1)), (1, 3)).transpose(1, 2)[
                ..., [0, 1, 2] * 2 + [0, 1]
            ]
        ),
    ),
    "padding of all dimensions": (
        lambda m, x: m.c(functional.pad(h(m, x), (0, 0, 0, 2, 0, 0))),
        lambda m, x: m.c(functional.pad(h(m, x), (0, 0, 0, 2))),
    ),
    "second names, in place": (
        lambda m, x: m.c(
            torch.divide(m.a(x).multiply_(3).absolute_().negative_(), 2).subtract_(m.z(x))
        ),
        lambda m, x: m.c(-(m.a(x) * 3).abs() / 2 - m.z(x)),
    ),
    "copy_ into zeros": (
        lambda m, x: m.c(x.new_zeros(len(x), x.shape[1], 8).copy_(h(m, x))),
        lambda m, x: m.c(h(m, x)),
    ),
    "copy_ into a slice": (
        lambda m, x: m.c(into_first(h(m, x).clone(), m.z(x)[..., 5:])),
        lambda m, x: m.c(torch.cat([m.z(x)[..., 5:], h(m, x)[..., 3:]], -1)),
    ),
    "copy_ of a parameter": (
        lambda m, x: m.c((h(m, x) + x.new_zeros(8).copy_(m.q[0])).relu()),
        lambda m, x: m.c((h(m, x) + m.q[0]).relu()),
    ),
    "copy_ of one unit to all": (
        lambda m, x: m.c(h(m, x) + torch.empty_like(h(m, x)).copy_(m.z(x)[..., :1])),
        lambda m, x: m.c(h(m, x) + m.z(x)[..., :1]),
    ),
    "zeros written unit by unit": (
        lambda m, x: m.c(by_unit(zeros_like(x), h(m, x))),
        lambda m, x: m.c(h(m, x)),
    ),
    "zeros written by halves": (
        lambda m, x: m.c(by_halves(zeros_like(x), h(m, x))),
        lambda m, x: m.c(h(m, x)),
    ),
    "zeros written through what detach returns": (
        lambda m, x: m.c(by_another_name(zeros_like(x), h(m, x), torch.Tensor.detach, lambda t: t)),
        lambda m, x: m.c(h(m, x)),
    ),
    "a view from before zeros were written": (
        lambda m, x: m.c(
            by_another_name(
                zeros_like(x), h(m, x), lambda t: t, lambda t: t.data.flatten(1)
            ).unflatten(1, (x.shape[1], 8))
        ),
        lambda m, x: m.c(h(m, x)),
    ),
    "inputs written into a view of zeros": (
        lambda m, x: m.c(h(m, by_halves(torch.zeros_like(x), x))),
        lambda m, x: m.c(h(m, x)),
    ),
    "states written into zeros": (cached, recurrent),
    "kept in a list": (lambda m, x: keeping(m, x, lambda y: [y]), lambda m, x: m.c(h(m, x))),
    "kept in a dict": (lambda m, x: keeping(m, x, lambda y: {0: y}), lambda m, x: m.c(h(m, x))),
    "gradients clipped by a hook": (
        lambda m, x: hooked(m, x, lambda y: y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))),
        lambda m, x: m.c(h(m, x)),
    ),
    "retain_grad": (lambda m, x: hooked(m, x, torch.Tensor.retain_grad), lambda m, x: m.c(h(m, x))),
    "autocast by the device of an input": (in_autocast, lambda m, x: m.c(h(m, x))),
    "features returned detached": (
        lambda m, x: (m.c(h(m, x)), (2 * h(m, x)).detach()),
        lambda m, x: (m.c(h(m, x)), 2 * h(m, x)),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize("name", WAYS)
def test_two_ways_to_write_a_function_give_one_network(name):
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for way in WAYS[name]:
        model = Written(way)
        y = model(x)  # as in training: what it keeps of this call is no hindrance
        network = ps.trace(model, x)
        kappa = ps.paths.kappa(network), ps.paths.data_dependent_kappa(network, x, alpha=1.0)
        found.append((network.num_classes, y, *kappa))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    classes = found[0][0]
    assert (classes > 0) == (name not in ("pow(2, h)", "features returned detached"))


class Cell(nn.Module):
    """One weight for encoder and decoder, whose first step reads a part of it on zeros."""

    def __init__(self, *, encoder_first, steps):
        super().__init__()
        self.w, self.b, self.c = (
            nn.Parameter(torch.randn(8, 14) / 3),
            nn.Parameter(torch.randn(8)),
            nn.Linear(8, 3),
        )
        self.encoder_first, self.steps = encoder_first, steps
        self.double()

    def encode(self, x):
        state = x.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            state = functional.linear(torch.cat([x[:, t], state], 1), self.w, self.b).relu()
        return state

    def decode(self, x):
        state = x.new_zeros(len(x), 8)
        for _ in range(self.steps):
            state = functional.linear(state, self.w[:, 6:], self.b).relu()
        return state

    def forward(self, x):
        order = (self.encode, self.decode) if self.encoder_first else (self.decode, self.encode)
        return self.c(sum(part(x) for part in order))


class Thrice(nn.Module):
    """A part on zeros, then the whole, then that part on units that nothing else ties."""

    def __init__(self):
        super().__init__()
        self.w, self.a, self.d, self.c = (
            nn.Parameter(torch.randn(8, 8)),
            nn.Linear(6, 8),
            nn.Linear(6, 4),
            nn.Linear(8, 3),
        )
        self.double()

    def forward(self, x):
        zeros, whole = (
            functional.linear(x.new_zeros(len(x), 4), self.w[:, :4]),
            functional.linear(self.a(x).relu(), self.w).relu(),
        )
        return self.c((zeros + whole).relu()) + functional.linear(
            self.d(x).relu(), self.w[:, :4]
        ).relu().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda e=e, s=s: Cell(encoder_first=e, steps=s) for e in (True, False) for s in (1, 3)),
        Thrice,
    ],
)
def test_parts_of_a_weight_that_are_read_on_zeros_free_no_unit(make):
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    model = make()
    x = x[:, 0] if make is Thrice else x
    before = model(x)
    network = ps.trace(model, x)
    ps.rescaling.random_rescale_(network, 0.5, 2.0, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    assert network.num_classes > 0
    edges = network.edges["w"]
    # every element is an edge of hidden units
    assert bool(((edges.target != 0) | (edges.source != 0)).all())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(5, 4), (4, 5)])
def test_antialiased_images_have_the_edges_of_torch(mode, size):
    layers = nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 1, 1, bias=False)
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = Resized(*layers, size, mode).double()
    pictures = torch.eye(63, dtype=torch.float64).reshape(63, 1, 7, 9)
    # one picture a place: what leaves it
    edges = functional.interpolate(pictures, size=size, mode=mode, antialias=True)
    norm = ps.paths.squared_path_norm(ps.trace(model, pictures[:2]))
    torch.testing.assert_close(norm.detach(), edges.square().sum())


class Resized(nn.Module):
    def __init__(self, into, out, size, mode):
        super().__init__()
        self.into, self.out, self.size, self.mode = into, out, size, mode

    def forward(self, x):
        return self.out(
            functional.interpolate(
                self.into(x).relu(), size=self.size, mode=self.mode, antialias=True
            )
        )


def test_inputs_normalized_by_their_batch_are_normalized_by_it_on_data():
    x = 10 + 5 * torch.randn(32, 6, dtype=torch.float64)
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False).double(), body).train()
    white = functional.batch_norm(x, None, None, training=True)
    found = ps.paths.data_dependent_kappa(ps.trace(model, x), x, alpha=1.0)
    expected = ps.paths.data_dependent_kappa(ps.trace(body, white), white, alpha=1.0)
    torch.testing.assert_close(
        {name.removeprefix("1."): value for name, value in found.items()}, expected
    )
    assert not model[0].running_mean.any()  # a look at the network is no step of training


class OneHot(nn.Module):
    """A network of words, whose one-hot vectors a function makes."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second, self.make = nn.Linear(5, 4), nn.Linear(4, 2), make

    def forward(self, words):
        return self.second(torch.relu(self.first(self.make(words))))


def written(words, write):
    """Write into zeros, and go on with these, not with what the function returns."""
    zeros = torch.zeros(len(words), 5, dtype=torch.float64)
    write(zeros, words.view(-1, 1), torch.ones(len(words), 1, dtype=torch.float64))
    return zeros


ONE_HOT = {
    "returned": lambda words: torch.zeros(len(words), 5, dtype=torch.float64).scatter_(
        1, words.view(-1, 1), 1.0
    ),
    "scatter_": lambda words: written(words, lambda z, w, _: z.scatter_(1, w, 1.0)),
    "scatter_ of ones": lambda words: written(words, lambda z, w, ones: z.scatter_(1, w, ones)),
    "scatter_add_": lambda words: written(words, lambda z, w, ones: z.scatter_add_(1, w, ones)),
    "masked_fill_": lambda words: written(
        words, lambda z, w, _: z.masked_fill_(w == torch.arange(5), 1.0)
    ),
    "add_": lambda words: written(words, lambda z, w, _: z.add_(w == torch.arange(5))),
}


@pytest.mark.parametrize("way", ONE_HOT)
def test_inputs_may_be_written_into_a_constant(way):
    words = torch.tensor([1, 3, 0])
    found = []
    for make in (ONE_HOT[way], lambda words: functional.one_hot(words, 5).double()):
        torch.manual_seed(0)
        network = ps.trace(OneHot(make).double(), words)
        assert network.num_classes == 4
        found.append([ps.paths.kappa(network), ps.paths.data_dependent_kappa(network, words)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
