"""Weight normalization, w = g v / |v|: the gain carries the scale of a row, and the length of v is free.

In the squared network w^2 = g^2 v^2 / m, with m the sum of v^2 over what is normalized together,
held in derivatives. Here paths are counted one by one, and which diagonal scalings keep the
function is found by brute force.
"""

import copy
import itertools
import warnings

import pytest
import torch
from same_bits import rescaled_unseen
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

import pathspace as ps
from cases import slow_besides
from oracles.products import scalings

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hooks(layer, dim=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(layer, dim=dim)


class Written(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, g, v):
        over = [d for d in range(v.dim()) if d != self.dim]
        return v * (g / v.square().sum(over, keepdim=self.dim is not None).sqrt())

    def right_inverse(self, v):
        over = [d for d in range(v.dim()) if d != self.dim]
        return v.square().sum(over, keepdim=self.dim is not None).sqrt(), v


def by_hand(layer, dim=0):
    return parametrize.register_parametrization(layer, "weight", Written(dim))


def with_random_values(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2 + 0.2)
    return model


def mlp(norm=parametrizations.weight_norm, dim=0):
    """One plain layer, then two with weight normalization."""
    return with_random_values(
        nn.Sequential(
            *(nn.Linear(3, 4), nn.ReLU(), norm(nn.Linear(4, 5), dim=dim), nn.ReLU()),
            norm(nn.Linear(5, 2), dim=dim),
        )
    )


NAMES = {
    parametrizations.weight_norm: (
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    ),
    by_hooks: ("weight_g", "weight_v"),
}
BOTH = pytest.mark.parametrize("norm", NAMES, ids=["parametrization", "hooks"])
DIMS = pytest.mark.parametrize("dim", [0, 1, None])


def paths(model, norm, dim):
    """Every path from an input or the bias node to an output: its weights by name and place, and the product of 1/m."""
    gain, direction = NAMES[norm]

    def layer(number, normed):
        """The edges [(source, target, weights, factor)] of a layer; the source None is the bias node."""
        bias = model.get_parameter(f"{number}.bias")
        edges = [(None, row, [(f"{number}.bias", (row,))], 1.0) for row in range(len(bias))]
        v = model.get_parameter(f"{number}.{direction if normed else 'weight'}").detach()
        for row, column in itertools.product(*map(range, v.shape)):
            if not normed:
                edges.append((column, row, [(f"{number}.weight", (row, column))], 1.0))
                continue
            together = v.square() if dim is None else v.square().select(dim, (row, column)[dim])
            place = {0: (row, 0), 1: (0, column), None: ()}[dim]
            weights = [(f"{number}.{gain}", place), (f"{number}.{direction}", (row, column))]
            edges.append((column, row, weights, 1 / together.sum().item()))
        return edges

    found = [
        (row, weights, factor)
        for source, row, weights, factor in layer(0, False)
        if source is not None
    ]
    found += [
        (row, weights, factor) for source, row, weights, factor in layer(0, False) if source is None
    ]
    for number in (2, 4):
        edges, before = layer(number, True), found
        found = [(row, weights, factor) for source, row, weights, factor in edges if source is None]
        for source, row, weights, factor in edges:
            found += [(row, [*w, *weights], f * factor) for unit, w, f in before if unit == source]
    return [(weights, factor) for _, weights, factor in found]


def by_paths(model, norm, dim):
    """The squared path norm, and kappa = dG/dp^2 with every m held."""
    squares = {name: p.detach().square() for name, p in model.named_parameters()}
    total, kappa = 0.0, {name: torch.zeros_like(q) for name, q in squares.items()}
    for weights, factor in paths(model, norm, dim):
        mass = factor
        for name, place in weights:
            mass *= squares[name][place].item()
        total += mass
        for name, place in weights:
            kappa[name][place] += mass / squares[name][place]
    return total, kappa


@BOTH
@DIMS
def test_norm_and_kappa_are_those_of_the_paths_one_by_one(norm, dim):
    model = mlp(norm, dim)
    network = ps.trace(model, X)
    total, kappa = by_paths(model, norm, dim)
    assert not network.outside
    assert not network.cuts
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(total, rel=1e-12)
    assert_close(ps.paths.kappa(network), kappa, **TIGHT)
    # no path meets a weight twice
    assert_close(ps.paths.kappa(network, second_term=True), kappa, **TIGHT)


@DIMS
def test_all_diagonal_scalings_that_keep_the_function_are_found(dim):
    model = mlp(dim=dim)
    network = ps.trace(model, X)
    assert (
        network.num_classes == scalings(mlp(by_hand, dim), [torch.randn(12, 3).double()]).shape[1]
    )
    # each layer has one scale in front, or one for every unit if the columns have gains; and the
    # lengths of v
    assert network.num_classes == {0: 1 + 1 + 5 + 2, 1: 4 + 1 + 4 + 5, None: 1 + 1 + 1 + 1}[dim]


@BOTH
@DIMS
@pytest.mark.sample(3)
def test_rescaling_is_bitwise_invisible(norm, dim):
    model = mlp(norm, dim)
    network = ps.trace(model, X)

    assert bool((rescaled_unseen(model, network, X) != 1).all())


OPTIMIZERS = {
    "PathSGD": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.05, momentum=0.9),
    "second term": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.05, second_term=True),
    "DDPSGD": lambda m, n: ps.optim.DDPSGD(m.parameters(), n, lr=0.05, alpha=0.5),
    "Invariant": lambda m, n: ps.optim.Invariant(m.parameters(), n, torch.optim.AdamW, lr=0.01),
    "PathMuon": lambda m, n: ps.optim.PathMuon(m.parameters(), n, lr=0.01),
}
EACH_RULE = pytest.mark.parametrize("rule", OPTIMIZERS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("norm", "rule"),
    slow_besides(
        [
            *((norm, "PathSGD") for norm in NAMES),
            *(([*NAMES][place % 2], rule) for place, rule in enumerate(OPTIMIZERS)),
        ],
        itertools.product(NAMES, OPTIMIZERS),
    ),
)
def test_optimizers_are_bitwise_invariant(norm, rule):
    report = ps.rescaling.check_invariance(
        mlp(norm).float(), X.float(), lambda y: y.square().mean(), OPTIMIZERS[rule], steps=10
    )
    assert report.passed, report


def test_kappa_on_data_holds_the_lengths():
    """At alpha = 1 it is the mean square of every output's derivative, in v that of g v / m^(1/2) with m held."""
    model = mlp()
    network = ps.trace(model, X)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def held(number, h):
        g, v = (leaves[f"{number}.{name}"] for name in NAMES[parametrizations.weight_norm])
        return functional.linear(
            h, v * (g / v.detach().norm(dim=1, keepdim=True)), leaves[f"{number}.bias"]
        )

    h = functional.linear(X, leaves["0.weight"], leaves["0.bias"]).relu()
    y = held(4, held(2, h).relu())
    assert torch.equal(y, model(X)) or torch.allclose(y, model(X), rtol=1e-13)
    expected = {name: torch.zeros_like(p) for name, p in leaves.items()}
    for output in y.flatten():
        for name, slope in zip(
            leaves,
            torch.autograd.grad(output, list(leaves.values()), retain_graph=True),
            strict=True,
        ):
            expected[name] += slope.square() / len(X)
    assert_close(
        ps.paths.data_dependent_kappa(network, X, alpha=1.0), expected, rtol=1e-10, atol=1e-12
    )


def test_balancing_keeps_the_function_and_undoes_a_rescaling():
    model = mlp()
    network, before = ps.trace(model, X), model(X)
    ps.rescaling.balance_(network)
    assert_close(model(X), before, rtol=1e-10, atol=1e-12)
    balanced = copy.deepcopy(model.state_dict())
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    ps.rescaling.balance_(network)
    assert_close(model.state_dict(), balanced, rtol=1e-10, atol=1e-12)


def test_what_lists_paths_refuses_it_by_name():
    model = mlp()
    network = ps.trace(model, X)
    for refused in (
        lambda: ps.optim.GSGD(model.parameters(), network, lr=0.1),
        lambda: ps.paths.enumerate_paths(network),
        lambda: ps.paths.activity(network, X),
        lambda: ps.paths.data_dependent_kappa(network, X, alpha=0.5, sharing="edges"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"_weight_norm|sharing="):
            refused()
    names = [
        f"{number}.{name}" for number in (2, 4) for name in NAMES[parametrizations.weight_norm]
    ]
    left = ps.trace(model, X, outside=["2.parametrizations.weight", "4.parametrizations.weight"])
    assert set(left.outside) >= set(names)
    ps.optim.GSGD(model.parameters(), left, lr=0.1)


def test_a_loop_has_one_gain_and_one_direction():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out = nn.Linear(1, 4), nn.Linear(4, 2)
            self.step = parametrizations.weight_norm(nn.Linear(4, 4, bias=False))

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                h = torch.relu(self.read(x[:, t : t + 1]) + self.step(h))
            return self.out(h)

    model = with_random_values(Loop())
    network = ps.trace(model, X)
    assert network.num_classes == 1 + 4  # all units share one scale
    report = ps.rescaling.check_invariance(
        model.float(), X.float(), lambda y: y.square().mean(), OPTIMIZERS["PathSGD"], steps=10
    )
    assert report.passed, report


def test_a_direction_of_zeros_passes_nothing():
    model = mlp()
    with torch.no_grad():
        model[2].parametrizations.weight.original1[0] = 0.0
    network = ps.trace(model, X)
    kappa = ps.paths.kappa(network)
    assert all(bool(torch.isfinite(k).all()) for k in kappa.values())
    assert not bool(kappa["2.parametrizations.weight.original0"][0].any())


class Tokens(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.last = first, nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last((h[0] if isinstance(h, tuple) else h).relu())


ELSEWHERE = {
    "embedding": (nn.Embedding(7, 4), "weight", torch.tensor([[1, 2, 3], [0, 6, 1]])),
    "bilinear": (nn.Bilinear(3, 3, 4), "weight", (X[:2].float(), X[2:4].float())),
    "recurrent": (
        nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
        "weight_hh_l0",
        torch.randn(2, 5, 3),
    ),
    "attention": (
        nn.MultiheadAttention(4, 2, batch_first=True),
        "in_proj_weight",
        (torch.randn(2, 3, 4),) * 3,
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_operations_that_do_not_know_such_a_weight_are_cut(name):
    layer, weight, x = ELSEWHERE[name]
    layer = parametrizations.weight_norm(copy.deepcopy(layer), weight)
    model = Tokens(layer) if not isinstance(x, tuple) else layer
    args = x if isinstance(x, tuple) else (x,)

    def seen():
        result = model(*args)
        return result[0] if isinstance(result, tuple) else result

    network, before = ps.trace(model, x), seen()
    assert network.cuts
    assert network.num_classes
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(seen(), before)
    assert all(bool(torch.isfinite(k).all()) for k in ps.paths.kappa(network).values())


@pytest.mark.parametrize("name", ["embedding", "recurrent"])
def test_on_data_such_a_weight_is_to_be_left_outside_of_a_cut(name):
    layer, weight, x = ELSEWHERE[name]
    model = Tokens(parametrizations.weight_norm(copy.deepcopy(layer), weight))
    with pytest.raises(
        ps.network.UnmatchedForwardError, match=r"enters a cut.*outside=\['"
    ) as refused:
        ps.paths.data_dependent_kappa(ps.trace(model, x), x)
    named = str(refused.value).split("outside=['")[1].split("']")[0]
    assert ps.paths.data_dependent_kappa(ps.trace(model, x, outside=[named]), x)


OTHERS = {
    "orthogonal": parametrizations.orthogonal,
    "spectral": parametrizations.spectral_norm,
    "by hand": by_hand,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_other_parametrizations_are_cuts(name, training):
    """What they make of a weight counts as fixed edges; the units around them stay right."""
    plain = (
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    model = with_random_values(nn.Sequential(*plain))
    model[2] = OTHERS[name](model[2])
    model.train(training)
    network = ps.trace(model, X)
    assert {cut.module for cut in network.cuts} == {"2.parametrizations.weight.0"}
    for parameter in (n for n, _ in model.named_parameters() if "parametrizations" in n):
        # where it is divided by a number, it has edges of fixed scales
        labels = network.edges.get(parameter)
        assert parameter in network.outside or not bool(labels.target.any() or labels.source.any())
    assert network.num_classes >= 4  # those behind it, between two plain layers
    model.eval()
    before = model(X)
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(model(X), before)


# --- convolutions


def image(dim, transposed=False, groups=1, norm=parametrizations.weight_norm):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    conv = norm(kind(4, 4, 2, groups=groups), dim=dim)
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return with_random_values(
        nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), conv, nn.ReLU(), *pool, nn.Linear(4, 2))
    )


IMAGES = [
    pytest.param(0, False, 1, 1 + 4 + 4, id="rows"),
    pytest.param(0, False, 2, 2 + 4 + 4, id="rows, two groups"),
    pytest.param(0, False, 4, 4 + 4 + 4, id="depthwise"),
    pytest.param(1, False, 1, 4 + 1 + 4, id="columns"),
    pytest.param(1, False, 2, 4 + 2, id="columns, two groups"),
    pytest.param(2, False, 2, 2 + 1 + 2, id="taps"),
    pytest.param(None, False, 1, 1 + 1 + 1, id="whole"),
    pytest.param(0, True, 2, 4 + 2 + 4, id="transposed, columns"),
    pytest.param(1, True, 1, 1 + 4 + 4, id="transposed, rows"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dim", "transposed", "groups", "classes"), IMAGES)
def test_convolutions(dim, transposed, groups, classes):
    model = image(dim, transposed, groups)
    x = torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    network = ps.trace(model, x)
    assert network.num_classes == classes
    more = torch.randn(4, 1, 3, 3).double()
    assert scalings(image(dim, transposed, groups, by_hand), [more], seeds=32).shape[1] == classes
    before = model(x)
    norm = ps.paths.squared_path_norm(network)
    q = {name: p.detach().square().requires_grad_() for name, p in model.named_parameters()}
    g, v = (q[f"2.{name}"] for name in NAMES[parametrizations.weight_norm])
    over = [d for d in range(4) if d != dim]
    w = v * g / v.detach().sum(over, keepdim=True)
    conv = functional.conv_transpose2d if transposed else functional.conv2d
    z = functional.conv2d(torch.ones_like(x[:1]), q["0.weight"], q["0.bias"])
    z = conv(z, w, q["2.bias"], groups=groups)
    z = z.sum((2, 3)) / z[0, 0].numel() ** 2
    total = functional.linear(z, q["6.weight"], q["6.bias"]).sum()
    assert norm.item() == pytest.approx(total.item(), rel=1e-12)
    kappa = dict(zip(q, torch.autograd.grad(total, list(q.values())), strict=True))
    assert_close(ps.paths.kappa(network), kappa, **TIGHT)
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(model(x), before)
    report = ps.rescaling.check_invariance(
        model.float(), x.float(), lambda y: y.square().mean(), OPTIMIZERS["PathSGD"], steps=5
    )
    assert report.passed, report
