"""Quantities on data where a reshape puts the examples in one dimension with steps, frames or windows.

The oracle is the same function without the reshape; and, for kappa from data alone, gradients of
every output.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


class Layers(nn.Module):
    """Layers that a function joins; equal seeds give equal weights."""

    def __init__(self, way, **layers):
        super().__init__()
        torch.manual_seed(0)
        for name, make in layers.items():
            setattr(self, name, make())
        self.way = way
        self.double()

    def forward(self, x):
        return self.way(self, x)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def dense():
    return {
        "a": lambda: nn.Linear(6, 4),
        "c": lambda: nn.Linear(4, 2),
        "n": lambda: nn.LayerNorm(4),
    }


def pictures():
    return {
        "a": lambda: nn.Conv2d(1, 3, 2),
        "n": lambda: nn.BatchNorm2d(3),
        "w": lambda: nn.Conv2d(3, 2, 2, bias=False),
        "c": lambda: nn.Linear(2, 2),
    }


def recurrent(cell=nn.RNN, **options):
    options = {"nonlinearity": "relu", **options}
    return {
        "r": lambda: cell(3, 4, **options),
        "c": lambda: nn.Linear(8 if "bidirectional" in options else 4, 2),
    }


def differing(**options):
    return {
        **recurrent(batch_first=True, **options),
        "a": lambda: nn.Linear(3, 3),
        "p": lambda: Learned(6, 3),
    }


def placed(m, x):
    return (m.a(x) + m.p.value).relu()


def windows(m, x, function):
    """A function of every window of three steps by itself."""
    return torch.stack([function(m, x[:, t : t + 3]) for t in range(0, x.shape[1], 3)], 1)


def carried(m, x):
    """Recurrent layers that start from units."""
    start = x[:, :1].transpose(0, 1)[..., [0, 1, 2, 0]].contiguous()
    return m.c(m.r(x, start)[0][:, -1])


def heads():
    return {
        "q": lambda: nn.Linear(6, 12),
        "c": lambda: nn.Linear(4, 2),
        "g": lambda: nn.Linear(6, 8),
    }


def embedded():
    return {
        "e": lambda: nn.Embedding(7, 4),
        "p": lambda: Learned(5, 4),
        "c": lambda: nn.Linear(4, 2),
    }


class Learned(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))


def through_a_view(m, h):
    h.view(-1, h.shape[-1]).relu_()
    return m.c(h)


def frames(m, x):
    return m.w(m.n(m.a(x)).relu()).mean((2, 3)).relu()


def attend(m, x):
    q, k, v = m.q(x).chunk(3, -1)
    return m.c(functional.scaled_dot_product_attention(q, k, v).relu())


def each(m, x, function):
    """A function of every part of the second dimension by itself."""
    return torch.stack([function(m, x[:, t]) for t in range(x.shape[1])], 1)


def last(m, x):
    return m.c(m.r(x)[0][:, -1])


def summed(m, x):
    out, h = m.r(x)
    return m.c(out.sum(1)) + h.sum(0)[:, :2]


def by_cell(m, x):
    h = x.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        h = m.r(x[:, t], h)
    return m.c(h)


CASES = {
    "steps in rows": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x.flatten(0, 1)).relu()).view(len(x), -1, 2),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "outputs in rows": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x).relu()).view(-1, 2),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "outputs in rows, times first": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x.transpose(0, 1)).relu()).reshape(-1, 2),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "examples amid others": (
        dense,
        (2, 3, 6),
        lambda m, x: m.c(m.a(x.transpose(0, 1).reshape(-1, 6)).relu()),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "outputs that leave a ReLU": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x.flatten(0, 1)).relu()).relu(),
        lambda m, x: m.c(m.a(x).relu()).relu(),
    ),
    "ReLU in place": (
        dense,
        (5, 6),
        lambda m, x: m.c(functional.relu(m.a(x.flatten(0, 1)), inplace=True)),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "ReLU in place of a view": (
        dense,
        (5, 6),
        lambda m, x: through_a_view(m, m.a(x)),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "LayerNorm": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.n(m.a(x.flatten(0, 1))).relu()),
        lambda m, x: m.c(m.n(m.a(x)).relu()),
    ),
    "a softmax in between": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x.flatten(0, 1)).softmax(-1)),
        lambda m, x: m.c(m.a(x).softmax(-1)),
    ),
    "frames": (
        pictures,
        (3, 1, 4, 4),
        lambda m, x: m.c(frames(m, x.flatten(0, 1)).view(len(x), -1, 2).sum(1)),
        lambda m, x: m.c(each(m, x, frames).sum(1)),
    ),
    "frames, times first": (
        pictures,
        (3, 1, 4, 4),
        lambda m, x: m.c(frames(m, x.transpose(0, 1).reshape(-1, 1, 4, 4)).view(3, -1, 2).sum(0)),
        lambda m, x: m.c(each(m, x, frames).sum(1)),
    ),
    "windows of a recurrent layer": (
        lambda: recurrent(batch_first=True),
        (2, 4, 3),
        lambda m, x: last(m, x.flatten(0, 1)).view(len(x), 2, 2),
        lambda m, x: each(m, x, last),
    ),
    "windows in both directions, and last states": (
        lambda: recurrent(batch_first=True, bidirectional=True),
        (2, 3, 3),
        lambda m, x: summed(m, x.flatten(0, 1)),
        lambda m, x: each(m, x, summed),
    ),
    "windows of a recurrent cell": (
        lambda: recurrent(nn.RNNCell),
        (2, 3, 3),
        lambda m, x: by_cell(m, x.flatten(0, 1)),
        lambda m, x: each(m, x, by_cell),
    ),
    "windows that differ": (
        differing,
        (6, 3),
        lambda m, x: last(m, placed(m, x).reshape(-1, 3, 3)),
        lambda m, x: windows(m, placed(m, x), last),
    ),
    "windows that differ, of two layers": (
        lambda: differing(num_layers=2),
        (6, 3),
        lambda m, x: last(m, placed(m, x).reshape(-1, 3, 3)),
        lambda m, x: windows(m, placed(m, x), last),
    ),
    "windows that differ, in both directions": (
        lambda: differing(bidirectional=True),
        (6, 3),
        lambda m, x: summed(m, placed(m, x).reshape(-1, 3, 3)),
        lambda m, x: windows(m, placed(m, x), summed),
    ),
    "windows that differ, with first states": (
        differing,
        (6, 3),
        lambda m, x: carried(m, placed(m, x).reshape(-1, 3, 3)),
        lambda m, x: windows(m, placed(m, x), carried),
    ),
    "windows of attention": (
        heads,
        (2, 3, 6),
        lambda m, x: attend(m, x.flatten(0, 1)),
        lambda m, x: each(m, x, attend),
    ),
    "a gated linear unit": (
        heads,
        (3, 6),
        lambda m, x: m.c(functional.glu(m.g(x.flatten(0, 1)))),
        lambda m, x: m.c(functional.glu(m.g(x))),
    ),
    "characters": (
        embedded,
        (5,),
        lambda m, x: m.c(m.e(x.view(-1)).relu()),
        lambda m, x: m.c(m.e(x).relu()),
    ),
    "learned places before the reshape": (
        embedded,
        (5,),
        lambda m, x: m.c((m.e(x) + m.p.value).view(-1, 4).relu()),
        lambda m, x: m.c((m.e(x) + m.p.value).relu()),
    ),
    "rows picked by a list": (
        dense,
        (5, 6),
        lambda m, x: m.c(m.a(x).relu()).transpose(0, 1)[[0, 2]],
        lambda m, x: m.c(m.a(x[:, ::2][:, :2]).relu()),
    ),
}


def traced(case, number):
    make, shape, *ways = CASES[case]
    x = normal(4, *shape)
    x = (x * 9).long().abs() % 7 if make is embedded else x
    model = Layers(ways[number], **make())
    if case.startswith("frames"):
        nn.init.uniform_(model.n.running_var, 0.5, 2.0)
    return model.eval(), x


WAYS = [(1.0, "second_moment"), (0.4, "covariance")]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize(
    ("case", "alpha", "statistic"),
    slow_besides(
        [(case, *WAYS[number % 2]) for number, case in enumerate(CASES)],
        [(case, *way) for case in CASES for way in WAYS],
    ),
)
def test_a_reshape_changes_nothing_on_data(case, alpha, statistic):
    found = []
    for number in range(2):
        model, x = traced(case, number)
        network = ps.trace(model, x)
        options = {"alpha": alpha, "statistic": statistic}
        exact = ps.paths.data_dependent_kappa(network, x, **options, estimator="exact")
        norm = ps.paths.data_dependent_norm(network, x, **options)
        found.append((model(x).flatten().sort().values, exact, norm.detach()))
    torch.testing.assert_close(*found, **TIGHT)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize("case", CASES)
def test_a_reshape_changes_nothing_of_the_squared_network(case):
    found = []
    for number in range(2):
        model, x = traced(case, number)
        network = ps.trace(model, x)
        kappa, more = ps.paths.kappa(network), ps.paths.second_term(network)
        norm, degrees = (
            ps.paths.squared_path_norm(network).detach(),
            ps.paths.degrees_of_freedom(network),
        )
        found.append((network.num_classes, kappa, more, norm, degrees))
    torch.testing.assert_close(*found, **TIGHT)


@pytest.mark.parametrize(
    "case", ["examples amid others", "frames, times first", "windows of a recurrent layer"]
)
def test_kappa_from_data_alone_is_the_mean_of_squared_gradients(case):
    model, x = traced(case, 0)
    network = ps.trace(model, x)
    squares = {name: torch.zeros_like(p) for name, p in network.parameters.items()}
    for output in model(x).flatten():
        slopes = torch.autograd.grad(output, list(network.parameters.values()), retain_graph=True)
        for square, slope in zip(squares.values(), slopes, strict=True):
            square += slope**2 / len(x)
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0, estimator="exact")
    torch.testing.assert_close(found, squares, **TIGHT)


@pytest.mark.parametrize(
    "case", ["outputs in rows, times first", "frames", "windows of a recurrent layer"]
)
def test_optimizers_step_alike(case):
    found = []
    for number in range(2):
        model, x = traced(case, number)
        network = ps.trace(model, x)
        rule = ps.optim.DDPSGD(
            model.parameters(), network, lr=0.01, alpha=0.5, seed=3, refresh_every=1
        )
        for _ in range(3):
            rule.zero_grad()
            model(x).square().mean().backward()
            rule.step()
        found.append([p.detach() for p in model.parameters()])
    # signs are drawn for units in another order: the estimates differ, but little
    torch.testing.assert_close(*found, rtol=0.05, atol=5e-3)


OF_ALL = {
    "a parameter that was repeated": (
        embedded,
        (5,),
        lambda m, x: m.c((m.e(x).view(-1, 4) + m.p.value.repeat(len(x), 1)).relu()),
    ),
    "a parameter written into a tensor": (
        embedded,
        (5,),
        lambda m, x: m.c(m.e(x).view(-1, 4).clone().add_(m.p.value[0]).relu()),
    ),
}


@pytest.mark.parametrize("case", OF_ALL)
def test_a_parameter_is_that_of_each_example(case):
    make, shape, way = OF_ALL[case]
    model, x = Layers(way, **make()), (normal(4, *shape) * 9).long().abs() % 7
    network = ps.trace(model, x)
    squares = {name: torch.zeros_like(p) for name, p in network.parameters.items()}
    for output in model(x).flatten():
        slopes = torch.autograd.grad(
            output, list(network.parameters.values()), retain_graph=True, materialize_grads=True
        )
        for square, slope in zip(squares.values(), slopes, strict=True):
            square += slope**2 / len(x)
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0, estimator="exact")
    torch.testing.assert_close(found, squares, **TIGHT)
