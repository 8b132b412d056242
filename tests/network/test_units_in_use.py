"""Low-rank adapters, maxout and PReLU, against brute force: their symmetry, their paths, and training."""

from itertools import chain, product

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides
from oracles.products import ONE, Weights, masses, scalings

DOUBLE = {"dtype": torch.float64}
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), **DOUBLE)


class Model(nn.Module):
    """A hidden layer by a function of named parts, and a read-out."""

    def __init__(self, function, units=3, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.o = nn.Linear(units, 2)
        self._function = function

    def forward(self, x):
        return self.o(self._function(self, x))


def added(*lists):
    return [list(chain.from_iterable(terms)) for terms in zip(*lists, strict=True)]


def grouped(units, size):
    """What leaves a maximum of neighbours: a path through any of them."""
    return [list(chain.from_iterable(units[i : i + size])) for i in range(0, len(units), size)]


def layer(*sizes, bias=True):
    return nn.Linear(*sizes, bias=bias)


# -- adapters: x W^T + b + c (x A^T) B^T, W frozen


def frozen(*sizes):
    return layer(*sizes).requires_grad_(False)


ADAPTERS = {
    "layers": lambda m, x: (m.w(x) + m.b(m.a(x))).relu(),
    "matrices": lambda m, x: (m.w(x) + x @ m.a.weight.t() @ m.b.weight.t()).relu(),
    "einsum": lambda m, x: (
        m.w(x) + torch.einsum("nr,or->no", torch.einsum("ni,ri->nr", x, m.a.weight), m.b.weight)
    ).relu(),
    "functional": lambda m, x: torch.relu(
        torch.add(m.w(x), functional.linear(functional.linear(x, m.a.weight), m.b.weight))
    ),
    "addmm": lambda m, x: torch.addmm(m.w(x), x @ m.a.weight.t(), m.b.weight.t()).relu(),
}


def adapter(way):
    parts = {"w": frozen(2, 3), "a": layer(2, 2, bias=False), "b": layer(2, 3, bias=False)}
    return Model(ADAPTERS[way], **parts)


def adapter_terms(w, x):
    return w.linear("o", added(w.linear("w", x), w.linear("b", w.linear("a", x))))


# -- maxout: the largest of pieces, which share one scale

MAXOUT = {
    "amax": lambda h: h.unflatten(-1, (3, 2)).amax(-1),
    "max": lambda h: torch.max(h.view(-1, 3, 2), dim=2)[0],
    "max, by name": lambda h: torch.max(input=h.view(-1, 3, 2), dim=2).values,
    "maximum": lambda h: torch.maximum(h[:, ::2], h[:, 1::2]),
    "max of two": lambda h: torch.max(h[:, ::2], h[:, 1::2]),
    "max_pool1d": lambda h: functional.max_pool1d(h, 2),
    "where": lambda h: torch.where(h[:, ::2] > h[:, 1::2], h[:, ::2], h[:, 1::2]),
    "sort": lambda h: h.view(-1, 3, 2).sort(-1).values[..., 1],
    "topk": lambda h: h.view(-1, 3, 2).topk(1, -1).values[..., 0],
    "least": lambda h: h.view(-1, 3, 2).amin(-1),
}


def maxout(way):
    return Model(lambda m, x: MAXOUT[way](m.a(x)), a=layer(2, 6))


def maxout_terms(w, x):
    return w.linear("o", grouped(w.linear("a", x), 2))


# -- PReLU: a slope is a number of the function, and has the scale 1

SLOPES = {
    "one for all": lambda: Model(lambda m, x: m.p(m.a(x)), a=layer(2, 3), p=nn.PReLU()),
    "one each": lambda: Model(lambda m, x: m.p(m.a(x)), a=layer(2, 3), p=nn.PReLU(3)),
    "negative": lambda: Model(lambda m, x: m.p(m.a(x)), a=layer(2, 3), p=nn.PReLU(3, init=-0.5)),
    "functional": lambda: Model(
        lambda m, x: functional.prelu(m.a(x), m.p), a=layer(2, 3), p=nn.Parameter(torch.full((3,), 0.3))
    ),
    "written out": lambda: Model(
        lambda m, x: torch.where(m.a(x) > 0, m.a(x), m.p.sigmoid() * m.a(x)), a=layer(2, 3),
        p=nn.Parameter(torch.zeros(3)),
    ),
}  # fmt: skip


def plain_terms(w, x):
    return w.linear("o", w.linear("a", x))


def both_ways(w, x):
    """What is chosen between may leave either way."""
    a = w.linear("a", x)
    return w.linear("o", added(a, a))


# the model, its paths, unit classes, and whether these are all scalings that keep the function
CASES = {
    **{
        f"adapter, {way}": (lambda way=way: adapter(way), adapter_terms, 3 + 2, True)
        for way in ADAPTERS
    },
    **{f"maxout, {way}": (lambda way=way: maxout(way), maxout_terms, 3, True) for way in MAXOUT},
    **{
        f"PReLU, {way}": (build, both_ways if "written" in way else plain_terms, 3, True)
        for way, build in SLOPES.items()
    },
}


def made(name, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CASES[name][0]().to(dtype)


def exponents(model, network):
    """Those of all parameters of the model; zeros for what is outside."""
    graph = ps.paths.reduction_graph(network)
    rows = graph.exponents().split([p.numel() for p in network.parameters.values()])
    found = dict(zip(network.parameters, rows, strict=True))
    nothing = torch.zeros(0, network.num_classes, **DOUBLE)
    return torch.cat([
        found.get(name, nothing.new_zeros(p.numel(), network.num_classes)) for name, p in model.named_parameters()
    ])  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CASES)
def test_finds_the_scalings_that_keep_the_function(name):
    model, (_, _, classes, complete) = made(name), CASES[name]
    network = ps.trace(model, X)
    found, basis = exponents(model, network), scalings(model, [X])
    assert network.num_classes == classes
    assert int(torch.linalg.matrix_rank(found)) == classes
    torch.testing.assert_close(basis @ (basis.t() @ found), found, rtol=0, atol=1e-7)
    if complete:
        assert basis.shape[1] == classes


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_masses_are_those_of_the_paths(name):
    model = made(name)
    network, weights = ps.trace(model, X), Weights(model)
    norm, first, second = masses(weights, CASES[name][1](weights, [ONE, ONE]))
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm, rtol=1e-12, atol=0
    )
    for metric, oracle in (
        (ps.paths.kappa(network), first),
        (ps.paths.second_term(network), second),
    ):
        sizes = [p.numel() for p in model.parameters()]
        for (key, p), counted in zip(model.named_parameters(), oracle.split(sizes), strict=True):
            ours = metric[key] if key in metric else torch.zeros_like(p)
            torch.testing.assert_close(ours.flatten(), counted, rtol=1e-11, atol=1e-14)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_rescaling_is_bitwise_invisible_on_data_too(name):
    model = made(name)
    network = ps.trace(model, X)

    def seen():
        on_data = (
            ps.paths.data_dependent_norm(network, X, alpha=0.5, statistic=s) for s in ("second_moment", "covariance")
        )  # fmt: skip
        return [
            t.detach().clone() for t in (model(X), ps.paths.squared_path_norm(network), *on_data)
        ]

    before = seen()
    metric = ps.paths.data_dependent_kappa(network, X, alpha=0.5, statistic="second_moment")
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert all(map(torch.equal, before, seen()))
    now = ps.paths.data_dependent_kappa(network, X, alpha=0.5, statistic="second_moment")
    for key, value in now.items():
        assert torch.equal(value * network.edge_factors(key, factors).square(), metric[key])


OPTIMIZERS = {
    "PathSGD": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.02, momentum=0.9),
    "PathAdam": lambda m, n: ps.optim.PathAdam(m.parameters(), n, lr=0.01),
    "PathMuon": lambda m, n: ps.optim.PathMuon(m.parameters(), n, lr=0.01),
    "DDPSGD": lambda m, n: ps.optim.DDPSGD(
        m.parameters(), n, lr=0.01, alpha=0.5, statistic="second_moment"
    ),
    "Invariant": lambda m, n: ps.optim.Invariant(m.parameters(), n, torch.optim.AdamW, lr=0.01),
}


RULES_IN_TURN = [
    *((name, "PathSGD") for name in CASES),
    *((name, [*OPTIMIZERS][place % 5]) for place, name in enumerate(CASES) if place % 5),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "rule"), slow_besides(RULES_IN_TURN, product(CASES, OPTIMIZERS)))
def test_optimizers_are_bitwise_invariant(name, rule):
    """Slopes and frozen weights included: the function is the same after every step."""
    report = ps.rescaling.check_invariance(
        made(name, torch.float32), X.float(), lambda y: y.square().mean(), OPTIMIZERS[rule], steps=8, low=2.0**-6,
        high=2.0**6,
    )  # fmt: skip
    assert report.passed, report


def test_slopes_are_trained_and_frozen_weights_are_not():
    for name, moves in (
        ("PReLU, one each", {"p.weight"}),
        ("adapter, layers", {"a.weight", "b.weight"}),
    ):
        model = made(name)
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        optimizer = ps.optim.PathSGD(
            [p for p in model.parameters() if p.requires_grad], ps.trace(model, X), lr=0.1
        )
        model(X).square().mean().backward()
        optimizer.step()
        changed = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
        assert moves <= changed
        assert not any(key.startswith("w.") for key in changed)
