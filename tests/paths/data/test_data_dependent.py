"""The data-dependent measure and its kappa: brute force on explicit graphs, and numbers that are known."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, Recurrent, call, mlp, of_each_kind, trace, traced
from conformance import arbitrary_factors
from fixture_nets import NETS, load
from oracles.data import OnData
from pathspace.network import UnmatchedForwardError
from pathspace.paths.data.data_dependent import path_share
from pathspace.paths.data.edge_statistics import Seeded, products, statistics
from pathspace.paths.data.signs import Pairs, random_pairs, random_part, random_signs, sign_seeds
from pathspace.replay.replay import replay
from pathspace.squared.squares import dense

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
KNOWN = json.loads((Path(__file__).parents[2] / "data" / "data_dependent.json").read_text())
LETTER = {"second_moment": "M", "covariance": "C"}
STATISTICS = list(LETTER)
FOLLOWED = [case for case in ZOO if case.name != "rnn with a learned start"]


@pytest.fixture(params=list(NETS))
def net(request):
    return load(request.param)


def brute(net, alpha, statistic):
    inputs = np.asarray(net.net["X"]).reshape(len(net.net["X"]), -1)
    return OnData(net.graph, net.net["params"], inputs, net.net["bias"], alpha, statistic)


# --- numbers that are known -----------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize(
    ("name", "alpha"),
    [(n, a) for n in KNOWN if "ddp_kappa" in KNOWN[n] for a in KNOWN[n]["ddp_kappa"]["M"]],
)
def test_kappa_is_the_known_one(name, alpha, statistic):
    net = load(name)
    known = net.as_tensors(KNOWN[name]["ddp_kappa"][LETTER[statistic]][alpha])
    found = ps.paths.data_dependent_kappa(
        ps.trace(net.model, net.x), net.x, alpha=float(alpha), statistic=statistic
    )
    assert_close(found, known, **TIGHT)


@pytest.mark.sample(3)
def test_alpha_one_is_the_fisher_information(net):
    """D16 Theorem 2, also for convolutions; for recurrent networks it is the Fisher, not half the Hessian."""
    network = ps.trace(net.model, net.x)
    known = KNOWN[net.net["name"]]
    found = ps.paths.data_dependent_kappa(network, net.x, alpha=1.0)
    assert_close(found, net.as_tensors(known["fisher_diag_gaussian"]), **TIGHT)
    found = ps.paths.data_dependent_kappa(network, net.x, alpha=1.0, sharing="edges")
    edges = net.as_tensors(known["edgewise_second_moment"])
    # the model adds positions before it multiplies: one edge, not three
    if net.net["name"] == "conv1d":
        assert not torch.allclose(found.pop("out.weight"), edges.pop("out.weight"))
        bias = found.pop("out.bias"), edges.pop("out.bias")
        assert_close(*bias, **TIGHT)
    assert_close(found, edges, **TIGHT)


# --- brute force ----------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_norm_is_the_sum_over_the_graph(net, alpha, statistic):
    network = ps.trace(net.model, net.x)
    value = ps.paths.data_dependent_norm(network, net.x, alpha=alpha, statistic=statistic)
    assert value.item() == pytest.approx(brute(net, alpha, statistic).norm, rel=1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_kappa_is_that_of_the_graph(net, alpha, statistic):
    network = ps.trace(net.model, net.x)
    found = ps.paths.data_dependent_kappa(network, net.x, alpha=alpha, statistic=statistic)
    assert_close(found, net.as_tensors(brute(net, alpha, statistic).kappa()), **TIGHT)
    if net.net["name"] != "conv1d":
        found = ps.paths.data_dependent_kappa(
            network, net.x, alpha=alpha, statistic=statistic, sharing="edges"
        )
        assert_close(
            found, net.as_tensors(brute(net, alpha, statistic).kappa(by_edges=True)), **TIGHT
        )


def test_alpha_of_a_sum_is_a_factor_of_its_edges():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return self.out(torch.relu(torch.add(self.into(x), self.shift, alpha=3.0)))

    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(7, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    # every parameter is used once, so that edges and parameters are the same
    edges, parameters = (
        ps.paths.data_dependent_kappa(network, x, alpha=1.0, sharing=sharing)
        for sharing in ("edges", "parameters")
    )
    assert edges["shift"].sum() > 0
    assert_close(edges, parameters, **TIGHT)


def test_layer_of_torch_is_the_loop_written_by_hand():
    net = load("rnn_d2_H3_K1_T4b_last")
    rnn = Recurrent(inputs=2, hidden=3, batch_first=True).double()
    rnn.out = nn.Linear(3, 1).double()
    state = net.model.state_dict()
    names = {"rnn.weight_ih_l0": "read.0.weight", "rnn.weight_hh_l0": "step.0.weight"}
    names |= {"rnn.bias_ih_l0": "read.0.bias", "out.weight": "out.weight", "out.bias": "out.bias"}
    rnn.load_state_dict(
        {ours: state[theirs] for ours, theirs in names.items()} | {"rnn.bias_hh_l0": torch.zeros(3)}
    )
    for statistic, sharing in itertools.product(STATISTICS, ("parameters", "edges")):
        options = {"alpha": 0.4, "statistic": statistic, "sharing": sharing}
        ours = ps.paths.data_dependent_kappa(ps.trace(rnn, net.x), net.x, **options)
        theirs = ps.paths.data_dependent_kappa(ps.trace(net.model, net.x), net.x, **options)
        assert_close({n: ours[n] for n in names}, {n: theirs[t] for n, t in names.items()}, **TIGHT)


def examples_one_by_one(case, example, count):
    def one(tensor, i):
        return tensor.narrow(case.batch_dim, i, 1)

    for i in range(count):
        yield torch.utils._pytree.tree_map(lambda t, i=i: one(t, i), example)


# with statistics of what enters held, see test_normalization
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "case", of_each_kind(case for case in FOLLOWED if not case.normalizes), ids=str
)
def test_alpha_one_is_the_squared_jacobian_of_every_model(case):
    (model, network), n = traced(case, torch.float64), 3
    example = case.example(n, torch.float64)
    rows = {name: [] for name in network.parameters}
    for one in examples_one_by_one(case, example, n):
        outputs = case.picked(call(model, one)).reshape(-1)
        for output in outputs:
            slopes = torch.autograd.grad(
                output, list(network.parameters.values()), retain_graph=True, allow_unused=True
            )
            for (name, p), slope in zip(network.parameters.items(), slopes, strict=True):
                rows[name].append(torch.zeros_like(p) if slope is None else slope)
    jacobian = {name: torch.stack(r).reshape(n, -1, *r[0].shape) for name, r in rows.items()}
    second = ps.paths.data_dependent_kappa(network, example, alpha=1.0)
    assert_close(second, {name: j.square().mean(0).sum(0) for name, j in jacobian.items()}, **TIGHT)
    spread = ps.paths.data_dependent_kappa(network, example, alpha=1.0, statistic="covariance")
    assert_close(
        spread, {name: j.var(0, correction=0).sum(0) for name, j in jacobian.items()}, **TIGHT
    )


def test_a_transposed_convolution_of_turned_features_has_its_squared_jacobian():
    """Torch computes its gradients for each example, and not for all of them at once."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.ConvTranspose2d(3, 2, 3, padding=1)

        def forward(self, x):
            return self.last(self.first(x).permute(0, 3, 1, 2))

    torch.manual_seed(0)
    model, x = Turned().double(), torch.randn(3, 1, 1, 4, dtype=torch.float64)
    found = ps.paths.data_dependent_kappa(ps.trace(model, x), x, alpha=1.0)
    for name, p in model.named_parameters():
        squares = [
            torch.autograd.grad(out, p, retain_graph=True)[0] ** 2 for out in model(x).flatten()
        ]
        assert_close(found[name], sum(squares) / len(x), **TIGHT)


class Writes(nn.Module):
    """Something that writes a parameter into activations, between two layers."""

    def __init__(self, write):
        super().__init__()
        self.read, self.out = nn.Linear(4, 5), nn.Linear(5, 2)
        self.p, self.q = nn.Parameter(torch.tensor([0.7, -0.3])), nn.Parameter(torch.rand(5) + 0.5)
        self._write = write

    def forward(self, x):
        return self.out(self._write(self, self.read(x).relu()))


def into_zeros(m, h):
    z = torch.zeros(len(h), 5, dtype=h.dtype)
    z[:, 3:] = m.p
    z[:, :3] = h[:, :3] * m.q[:3]
    return z


def into_a_part(m, h):
    z = h + 0
    z[:, 3:][:] = m.p
    return z * m.q


def onto_a_part(m, h):
    z = h + 0
    z[:, 3:].add_(m.p)
    z[:, :2] *= m.q[:2]
    return z


def in_place(m, h):
    z = h + 0
    z *= m.q
    z[:, :2] += m.p
    return z


@pytest.mark.sample(2)
@pytest.mark.parametrize("write", [into_zeros, into_a_part, onto_a_part, in_place])
def test_what_is_written_in_place_has_its_edges(write):
    torch.manual_seed(0)
    model, x = Writes(write).double(), torch.randn(6, 4, dtype=torch.float64)
    network = ps.trace(model, x)
    assert {"p", "q"} <= set(network.parameters)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
    assert_close(paths.output(network.parameters, flow).reshape(6, 2), model(x), **TIGHT)
    weights = list(network.parameters.values())
    rows = [
        torch.autograd.grad(score, weights, retain_graph=True, materialize_grads=True)
        for one in x.split(1)
        for score in model(one)[0]
    ]
    slopes = {
        n: torch.stack(r).unflatten(0, (6, 2))
        for n, r in zip(network.parameters, zip(*rows, strict=False), strict=True)
    }
    expected = {name: slopes[name].square().mean(0).sum(0) for name in network.parameters}
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    assert_close(found, expected, **TIGHT)
    optimizer = ps.optim.DDPSGD(
        model.parameters(), network, lr=1.0, alpha=1.0, estimator="exact", normalization="none"
    )
    before = {name: p.detach().clone() for name, p in network.parameters.items()}
    model(x).sum().backward()
    optimizer.step()
    for name, p in network.parameters.items():
        step = torch.where(expected[name] > 1e-12, p.grad / expected[name], 0.0)
        assert_close(p.detach(), before[name] - step, rtol=1e-8, atol=1e-10)


class Casts(nn.Module):
    """Pixels that become float32, and float32 scores, as written for a model in float32."""

    def __init__(self, cast):
        super().__init__()
        self.read, self.out, self.cast = nn.Linear(4, 5), nn.Linear(5, 2), cast

    def forward(self, x):
        h = self.read(x.float() / 255 if self.cast else x / 255).relu()
        return self.out(h.to(torch.float32)).float() if self.cast else self.out(h)


def test_casts_of_the_model_fit_its_copies():
    torch.manual_seed(0)
    cast, plain = Casts(True), Casts(False)
    plain.load_state_dict(cast.state_dict())
    x = torch.randint(0, 256, (6, 4), dtype=torch.uint8)
    found = []
    for model in (cast, plain):
        network = ps.trace(model, x)
        paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
        freedom, dead = ps.paths.degrees_of_freedom(network, x), ps.paths.dead_units(network, x)
        output = paths.output(network.parameters, flow)
        generator = torch.Generator().manual_seed(1)
        ps.rescaling.random_rescale_(
            network, 2.0**60, 2.0**62, powers_of_two=True, generator=generator
        )
        kappa = ps.paths.data_dependent_kappa(network, x)  # beyond float32
        assert {value.dtype for value in kappa.values()} == {torch.float64}
        found.append((output, torch.tensor(freedom), dead, kappa))
    assert_close(found[0], found[1], rtol=1e-6, atol=0)  # x / 255 of whole numbers is float32


class Checked(nn.Module):
    """Asserts the form of its input as timm does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        torch._assert(x.shape[1] == 3, f"{x.shape[1]} features")
        return self.layers(x)


def test_assertions_are_no_operations():
    torch.manual_seed(0)
    model, x = Checked().double(), torch.randn(5, 3, dtype=torch.float64)
    theirs, ours = (
        ps.paths.data_dependent_norm(ps.trace(m, x), x, alpha=0.5).item()
        for m in (model.layers, model)
    )
    assert ours == theirs
    optimizer = ps.optim.DDPSGD(model.parameters(), ps.trace(model, x), lr=0.1)
    model(x).sum().backward()  # its own forward pass is followed
    optimizer.step()


class Repeated(nn.Module):
    """A parameter that is repeated for every example before it is used."""

    def __init__(self, use):
        super().__init__()
        self.into, self.out, self.p = nn.Linear(3, 4), nn.Linear(8, 2), nn.Parameter(torch.randn(4))
        self.use = use

    def forward(self, x):
        h = self.into(x)
        rows = self.p.expand(len(x), 4)
        h = torch.relu(self.use(h, rows))
        return self.out(torch.cat([h, rows], 1))


def beside(h, rows):
    return torch.stack([h, rows], 1).sum(1)


@pytest.mark.parametrize("use", [torch.add, torch.mul, beside])
def test_a_parameter_repeated_for_every_example_has_its_squared_jacobian(use):
    torch.manual_seed(0)
    # as many examples as units
    model, x = (
        Repeated(use).double(),
        torch.randn(4, 3, dtype=torch.float64),
    )
    found = ps.paths.data_dependent_kappa(ps.trace(model, x), x, alpha=1.0)
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for example, unit in itertools.product(range(len(x)), range(2)):
        model.zero_grad()
        model(x)[example, unit].backward()
        for name, p in model.named_parameters():
            squares[name] += p.grad**2 / len(x)
    assert_close(found, squares, **TIGHT)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_number_may_be_the_bias_of_all_units(shape):
    torch.manual_seed(0)
    model, x = mlp(3, 4, 1).double(), torch.randn(5, 3, dtype=torch.float64)
    model[0].bias = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    weights = model[0].weight, model[0].bias
    of_each = [torch.autograd.grad(z, weights, retain_graph=True) for z in model(x)[:, 0]]
    J, J0 = (torch.stack(slopes) for slopes in zip(*of_each, strict=True))
    network = ps.trace(model, x)
    metric = ps.metrics.quasi_diagonal_metric(network, x)
    assert_close(metric.diagonal["0.bias"], J0.square().mean(0), **TIGHT)
    assert_close(metric.cross["0.weight"], (J * J0.reshape(5, 1, 1)).mean(0), **TIGHT)
    optimizer = ps.optim.QuasiDiagonal(model.parameters(), network, lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()


class Started(nn.Module):
    """A loop by hand from a start that is learned, and repeated for every sequence."""

    def __init__(self):
        super().__init__()
        self.start, self.read, self.step = (
            nn.Parameter(torch.rand(2)),
            nn.Linear(3, 2),
            nn.Linear(2, 2),
        )
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        h = self.start.expand(len(x), 2)
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t]) + self.step(h))
        return self.out(h)


@pytest.mark.parametrize("n", [1, 2, 5])  # two is the number of units, too
def test_a_learned_start_of_a_loop_has_its_squared_jacobian(n):
    torch.manual_seed(3)
    model, x = Started().double(), torch.randn(n, 3, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    products = torch.zeros_like(model.step.weight)
    for output in model(x).reshape(-1):
        slopes = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        slopes = dict(zip(squares, slopes, strict=True))
        for name, slope in slopes.items():
            squares[name] += slope**2 / n
        products += slopes["step.weight"] * slopes["step.bias"][:, None] / n
    assert_close(ps.paths.data_dependent_kappa(network, x, alpha=1.0), squares, **TIGHT)
    metric = ps.metrics.quasi_diagonal_metric(network, x)
    assert_close(dict(metric.diagonal), squares, **TIGHT)
    assert metric.bias_of["step.weight"] == "step.bias"
    assert_close(metric.cross["step.weight"], products, **TIGHT)


class Placed(nn.Module):
    """What is learned of every place, of one example or of none in particular."""

    def __init__(self, *shape):
        super().__init__()
        self.p, self.into, self.out = (
            nn.Parameter(torch.zeros(shape)),
            nn.Linear(3, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        return self.out(torch.relu(self.into(x) + self.p))


@pytest.mark.sample(2)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("estimator", ["exact", "signs"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_a_parameter_of_one_example_is_that_of_none(alpha, estimator, statistic):
    torch.manual_seed(0)
    one, none = Placed(1, 5, 4).double(), Placed(5, 4).double()
    one.p.data = torch.randn(1, 5, 4, dtype=torch.float64)
    none.load_state_dict({**one.state_dict(), "p": one.p.data[0]})
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    options = {"alpha": alpha, "estimator": estimator, "statistic": statistic}
    found = ps.paths.data_dependent_kappa(ps.trace(one, x), x, **options)
    expected = ps.paths.data_dependent_kappa(ps.trace(none, x), x, **options)
    assert_close(found, {**expected, "p": expected["p"][None]}, **TIGHT)


class Masked(nn.Module):
    """Some of five steps are learned, or are a function of what is the same for all examples."""

    def __init__(self, *, computed):
        super().__init__()
        self.p, self.into, self.out = nn.Parameter(torch.randn(4)), nn.Linear(3, 4), nn.Linear(4, 2)
        self.steps, self.computed = nn.Linear(1, 4), computed

    def forward(self, x):
        if self.computed:
            return self.out(
                torch.relu(self.into(x) + self.steps(torch.arange(5.0).double()[:, None]))
            )
        mask = torch.tensor([True, False, True, False, False])[:, None]
        return self.out(torch.relu(torch.where(mask, self.into(x), self.p)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("n", [4, 5])  # examples; and steps
def test_steps_are_no_examples_where_there_are_as_many(n, computed):
    torch.manual_seed(0)
    model, x = Masked(computed=computed).double(), torch.randn(n, 5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    squares = {name: torch.zeros_like(p) for name, p in network.parameters.items()}
    for output in model(x).reshape(-1):
        slopes = torch.autograd.grad(
            output, list(network.parameters.values()), retain_graph=True, materialize_grads=True
        )
        for square, slope in zip(squares.values(), slopes, strict=True):
            square += slope**2 / n
    assert_close(ps.paths.data_dependent_kappa(network, x, alpha=1.0), squares, **TIGHT)


class Bag(nn.Module):
    """An EmbeddingBag, or the same by the rows of an embedding."""

    def __init__(self, mode, padding, whole):
        super().__init__()
        table = (
            nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding)
            if whole
            else nn.Embedding(7, 4, padding)
        )
        self.table, self.hidden, self.out = table, nn.Linear(4, 5), nn.Linear(5, 2)
        self.mode, self.padding, self.whole = mode, padding, whole

    def forward(self, x):
        rows = self.table(x)
        if not self.whole:
            rows = rows if self.padding is None else rows * (x != self.padding).unsqueeze(-1)
            rows = rows.amax(1) if self.mode == "max" else getattr(rows, self.mode)(1)
        return self.out(self.hidden(rows).relu())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mode", "padding"), [("sum", None), ("mean", None), ("max", None), ("sum", 0)]
)
def test_a_bag_is_the_rows_that_it_names(mode, padding):
    torch.manual_seed(0)
    bag, rows = (Bag(mode, padding, whole).double() for whole in (True, False))
    rows.load_state_dict(bag.state_dict())
    x = torch.randint(7, (6, 5))
    networks = [ps.trace(m, x) for m in (bag, rows)]
    for alpha, statistic in itertools.product((0.5, 1.0), STATISTICS):
        ours, theirs = (
            ps.paths.data_dependent_kappa(n, x, alpha=alpha, statistic=statistic) for n in networks
        )
        assert_close(ours, theirs, **TIGHT)
        assert ours["table.weight"].any()


@pytest.mark.parametrize("sharing", ["parameters", "edges"])
def test_a_variance_that_is_zero_is_not_its_rounding(sharing):
    """A weight between two constants has kappa 0; divided by the rounding of two equal numbers, it would jump."""
    torch.manual_seed(0)
    model, x = mlp(4, 6, 3).float(), torch.randn(50, 4)
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = 0.3  # what this unit says is always the same
    options = {"alpha": 1.0, "statistic": "covariance", "sharing": sharing}
    kappa = ps.paths.data_dependent_kappa(ps.trace(model, x), x, **options)["2.weight"]
    assert torch.equal(kappa[:, 2], torch.zeros(3))
    assert bool((kappa[:, [0, 1, 3, 4, 5]].amax(0) > 1e-4).any())
    one = ps.paths.data_dependent_kappa(ps.trace(model, x), x[:1], **options)
    assert not any(bool(value.any()) for value in one.values())


@pytest.mark.parametrize("estimator", ["exact", "signs"])
def test_the_variance_of_one_example_is_zero(estimator):
    model = mlp(4, 6, 3).double()
    network, x = ps.trace(model, torch.zeros(1, 4).double()), torch.randn(1, 4, dtype=torch.float64)
    found = ps.paths.data_dependent_kappa(
        network, x, alpha=0.25, statistic="covariance", estimator=estimator
    )
    shares, _ = path_share(network, replay(network, x), 0.25, "covariance")
    assert_close(found, {name: dense(share) for name, share in shares.items()}, **TIGHT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", of_each_kind(FOLLOWED), ids=str)
def test_norm_has_the_symmetries_of_the_function(case):
    _, network = traced(case, torch.float64)
    example = case.example(4, torch.float64)

    def norms():
        return torch.stack(
            [
                ps.paths.data_dependent_norm(network, example, alpha=a, statistic=s)
                for a in (0.0, 0.6, 1.0)
                for s in STATISTICS
            ]
        )

    before = norms()
    assert_close(before[0], ps.paths.squared_path_norm(network))
    ps.rescaling.rescale_(network, arbitrary_factors(case.classes))
    assert_close(norms(), before, rtol=1e-9, atol=0.0)


# --- as a regularizer -----------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", STATISTICS)
def test_norm_is_differentiable_in_the_parameters(statistic):
    torch.manual_seed(0)
    model, x = mlp(2, 3, 2, 1).double(), torch.randn(5, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    ps.paths.data_dependent_norm(network, x, alpha=0.4, statistic=statistic).backward()
    step = 1e-6
    for p in model.parameters():
        for index in np.ndindex(*p.shape):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    p[index] += sign * step
                    values.append(
                        ps.paths.data_dependent_norm(
                            network, x, alpha=0.4, statistic=statistic
                        ).item()
                    )
                    p[index] -= sign * step
            assert p.grad[index].item() == pytest.approx(
                (values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7
            )


def test_norm_of_half_precision_is_differentiable_through_the_data_too():
    half, x = mlp(2, 3, 1).bfloat16(), torch.randn(5, 2, dtype=torch.bfloat16)
    single = copy.deepcopy(half).float()
    for model, data in ((half, x), (single, x.float())):
        ps.paths.data_dependent_norm(ps.trace(model, data), data, alpha=1.0).backward()
    for p, known in zip(half.parameters(), single.parameters(), strict=True):
        assert known.grad.any()
        assert_close(p.grad.float(), known.grad, rtol=0.01, atol=1e-3)


def test_model_and_random_state_stay_as_they_are():
    case = BY_NAME["small resnet"]
    model = case.model().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    network, random = trace(case, model), torch.get_rng_state()
    x = case.example(4)
    ps.paths.data_dependent_norm(network, x)
    ps.paths.data_dependent_kappa(network, x, estimator="signs")
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


class Decaying(nn.Module):
    """A recurrence with a learned decay and noise: its first step multiplies zeros by the decay."""

    def __init__(self, start, noise=0.0):
        super().__init__()
        self.read, self.again, self.out = (
            nn.Linear(2, 3),
            nn.Linear(3, 3, bias=False),
            nn.Linear(3, 2),
        )
        self.decay, self.scale = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.start, self.noise = start, noise

    def forward(self, x):
        h = self.start(x)
        for t in range(x.shape[1]):
            h = self.decay * h + self.scale * (self.read(x[:, t]) + self.again(h)).relu()
        return self.out(h + self.noise * torch.randn_like(h) if self.noise else h)


@pytest.mark.parametrize("start", [
    lambda x: torch.zeros(len(x), 3, dtype=x.dtype), lambda x: x.new_zeros(len(x), 3),
    lambda x: torch.zeros_like(x[:, 0, :1]).expand(-1, 3),
], ids=["zeros", "new_zeros", "zeros_like"])  # fmt: skip
def test_a_decay_of_zeros_at_the_start(start):
    torch.manual_seed(0)
    model, x = Decaying(start).double(), torch.randn(4, 3, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    assert_close(
        ps.paths.data_dependent_kappa(network, x, alpha=0.0),
        ps.paths.kappa(network),
        rtol=1e-12,
        atol=0,
    )
    # alpha = 1: the mean over examples of the sum over outputs of (dz/dp)^2
    known = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for one in x:
        for z in model(one[None])[0]:
            slopes = torch.autograd.grad(z, list(model.parameters()), retain_graph=True)
            for value, slope in zip(known.values(), slopes, strict=True):
                value += slope.square() / len(x)
    assert_close(
        ps.paths.data_dependent_kappa(network, x, alpha=1.0), known, rtol=1e-12, atol=1e-14
    )


def test_a_model_that_draws_numbers_leaves_the_random_state_alone():
    model, x = Decaying(lambda x: x.new_zeros(len(x), 3), noise=0.1), torch.randn(4, 3, 2)
    network = ps.trace(model, x)
    optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.01)
    model(x).sum().backward()
    random = torch.get_rng_state()
    ps.paths.data_dependent_norm(network, x)
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), random)


def test_unit_measure_is_a_table():
    net = load("mlp2-3-4-2b")
    network = ps.trace(net.model, net.x)
    units = ps.paths.unit_measure(network, net.x, alpha=0.3)
    graph = brute(net, 0.3, "second_moment")
    hidden = [
        v for v in range(graph.graph.nodes) if v not in {*graph.graph.inputs, *graph.graph.outputs}
    ]
    assert_close(units.squared, torch.tensor(graph.gamma[hidden]), **TIGHT)
    assert units.net == pytest.approx(graph.norm)
    assert [line.split()[-4] for line in str(units).splitlines()[1:]] == ["3", "4"]


def test_unit_measure_knows_recurrent_units():
    model = Recurrent(batch_first=True, bidirectional=True, num_layers=2, emit="all")
    network = ps.trace(model, torch.randn(2, 4, 2))
    assert (ps.paths.unit_measure(network, torch.randn(5, 4, 2)).squared > 0).all()


# --- random signs ---------------------------------------------------------------------------------


def all_matchings(count):
    """Every way to pair examples, of an odd number with one left out."""

    def of(members):
        if len(members) < 2:
            yield []
        elif len(members) % 2:
            for i in range(len(members)):
                yield from of(members[:i] + members[i + 1 :])
        else:
            for j in range(1, len(members)):
                for rest in of(members[1:j] + members[j + 1 :]):
                    yield [(members[0], members[j]), *rest]

    result = []
    for pairs in of(list(range(count))):
        left_out = [i for i in range(count) if all(i not in pair for pair in pairs)]
        first, second = torch.tensor(pairs).t()
        result.append(Pairs(first, second, torch.tensor(left_out), count))
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "statistic", "sharing"),
    [
        ("fig2_mlp_2-2-2-1_nobias", "second_moment", "parameters"),
        ("fig2_mlp_2-2-2-1_nobias", "second_moment", "edges"),
        (
            "fig2_mlp_2-2-2-1_nobias",
            "covariance",
            "parameters",
        ),  # where no weight is shared, as with edges
        ("conv1d", "covariance", "edges"),
        ("conv1d", "covariance", "parameters"),
    ],
)
def test_signs_are_unbiased(name, statistic, sharing):
    """The mean over uncorrelated patterns of signs, and all ways to pair examples, is the exact value.

    What a pair gives depends on products of its own signs alone, so patterns that all examples
    share are enough, and the rows of a Hadamard matrix, which have these products' means.
    """
    net = load(name)
    matchings = [None] if statistic == "second_moment" else all_matchings(len(net.x))
    network = ps.trace(net.model, net.x)
    found = replay(network, net.x)
    path, psi = path_share(network, found, 0.3, statistic)
    units = [(key, i) for key, p in psi.items() for i in range(p.numel())]
    mean = dict.fromkeys(path, 0.0)
    order = 2 ** len(units).bit_length()
    patterns = [
        [(-1.0) ** (j & (k + 1)).bit_count() for k in range(len(units))] for j in range(order)
    ]
    for pattern in patterns:
        seeds = {key: torch.zeros_like(p) for key, p in psi.items()}
        for (key, i), sign in zip(units, pattern, strict=True):
            seeds[key].view(-1)[i] = sign * psi[key].view(-1)[i].sqrt()
        seeds = {key: seed.expand(found.nodes[key].value.shape) for key, seed in seeds.items()}
        for pairs in matchings:
            data = statistics(Seeded.of(found, seeds, pairs), statistic, sharing)
            mean = {
                name: mean[name] + data[name] / (len(patterns) * len(matchings)) for name in mean
            }
    exact = ps.paths.data_dependent_kappa(
        network, net.x, alpha=0.3, statistic=statistic, sharing=sharing
    )
    assert_close({name: dense(path[name]) + 0.3 * mean[name] for name in path}, exact, **TIGHT)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "statistic"), list(zip(("mlp", "rnn"), STATISTICS, strict=True)))
@pytest.mark.slow
def test_average_of_estimates_comes_near(name, statistic):
    case = BY_NAME[name]
    network, x = trace(case, case.model(torch.float64)), case.example(16, torch.float64)
    generator = torch.Generator().manual_seed(1)
    options = {"alpha": 0.7, "statistic": statistic}
    exact = ps.paths.data_dependent_kappa(network, x, **options)
    draws = [
        ps.paths.data_dependent_kappa(network, x, estimator="signs", generator=generator, **options)
        for _ in range(80)
    ]

    def error(count):
        mean = {n: torch.stack([d[n] for d in draws[:count]]).mean(0) for n in exact}
        return (
            sum((mean[n] - exact[n]).square().sum() for n in exact).sqrt()
            / sum(exact[n].square().sum() for n in exact).sqrt()
        )

    assert error(80) < 0.2
    assert error(80) < error(1)


@pytest.mark.parametrize(("outputs", "same"), [(8, "exact"), (9, "signs")])
def test_the_automatic_estimator_is_exact_up_to_eight_units(outputs, same):
    model, x = mlp(2, 3, outputs).double(), torch.randn(5, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    found = {
        kind: ps.paths.data_dependent_kappa(network, x, alpha=1.0, estimator=kind)["0.weight"]
        for kind in ("auto", "exact", "signs")
    }
    assert torch.equal(found["auto"], found[same])
    assert not torch.allclose(found["exact"], found["signs"])


def test_signs_are_drawn_again_where_kappa_is_computed_again():
    """In float64, because a member of the class has no room in float32: it must not differ by its signs."""
    model, x = mlp(2, 3, 9), torch.randn(5, 2)
    network = ps.trace(model, x)
    here = ps.paths.data_dependent_kappa(network, x, estimator="signs")
    factors = torch.full((3,), 2.0**66, dtype=torch.float64)
    ps.rescaling.rescale_(network, factors)
    far = ps.paths.data_dependent_kappa(network, x, estimator="signs")
    for name, k in far.items():
        assert k.dtype == torch.float64
        assert_close(
            k * network.edge_factors(name, factors) ** 2, here[name].double(), rtol=1e-4, atol=1e-9
        )


def test_signs_are_fair_and_independent():
    signs = random_signs((1001, 7), torch.Generator().manual_seed(0)).double()
    assert signs.shape == (1001, 7)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert signs.mean().abs() < 0.05
    assert (signs.t() @ signs / 1001 - torch.eye(7, dtype=torch.float64)).abs().max() < 0.15


@pytest.mark.parametrize("statistic", STATISTICS)
def test_seeds_of_examples_are_uncorrelated_but_in_pairs(statistic):
    """Over many draws eps^i_o eps^j_p is zero for other units, and so are products of two examples' products."""
    model, x = mlp(2, 3, 2).double(), torch.randn(7, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    found = replay(network, x)
    _, psi = path_share(network, found, 0.5, statistic)
    generator = torch.Generator().manual_seed(0)
    key = next(iter(psi))
    root = psi[key].sqrt()
    products = []
    for _ in range(400):
        seeds, pairs = sign_seeds(found, psi, statistic, generator)
        signs = (seeds[key] / root).flatten(1)
        if statistic == "second_moment":
            assert pairs is None
            assert signs.abs().eq(1).all()
        else:
            assert sorted(torch.cat([pairs.first, pairs.second, pairs.left_out]).tolist()) == list(
                range(7)
            )
            assert torch.equal(signs[pairs.first], signs[pairs.second])
            assert signs[pairs.left_out].eq(0).all()
            signs = signs[pairs.first]
        products.append(signs[:, 0] * signs[:, 1])
    products = torch.stack(products)  # of two units, by example or pair
    expected = torch.eye(products.shape[1], dtype=torch.float64)
    assert products.mean(0).abs().max() < 0.2
    assert (products.t() @ products / len(products) - expected).abs().max() < 0.2


def test_pairs_beat_signs_that_all_examples_share():
    torch.manual_seed(0)
    model, x = mlp(5, 8, 8, 3).double(), torch.randn(64, 5, dtype=torch.float64)
    network = ps.trace(model, x)
    found = replay(network, x)
    exact = statistic_of(
        ps.paths.data_dependent_kappa(network, x, alpha=1.0, statistic="covariance")
    )
    _, psi = path_share(network, found, 1.0, "covariance")
    generator = torch.Generator().manual_seed(0)
    errors = {"pairs": [], "shared": []}
    for _ in range(10):
        seeds, pairs = sign_seeds(found, psi, "covariance", generator)
        one = {key: seed[pairs.first[:1]].expand_as(seed) for key, seed in seeds.items()}
        for name, seeded in (
            ("pairs", Seeded.of(found, seeds, pairs)),
            ("shared", Seeded.of(found, one)),
        ):
            found_one = statistic_of(statistics(seeded, "covariance", "parameters"))
            errors[name].append(float((found_one - exact).norm() / exact.norm()))
    assert sum(errors["pairs"]) < 0.6 * sum(errors["shared"])


def statistic_of(values):
    return torch.cat([value.reshape(-1) for value in values.values()])


# --- what is refused ------------------------------------------------------------------------------


def test_bad_options_are_refused():
    network = ps.trace(nn.Linear(2, 1), torch.zeros(1, 2))
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        ps.paths.data_dependent_norm(network, x, alpha=1.5)
    with pytest.raises(ValueError, match="statistic must be"):
        ps.paths.data_dependent_norm(network, x, statistic="M")
    with pytest.raises(ValueError, match="sharing must be"):
        ps.paths.data_dependent_kappa(network, x, sharing="hessian")
    with pytest.raises(ValueError, match="estimator must be"):
        ps.paths.data_dependent_kappa(network, x, estimator="one")
    with pytest.raises(ValueError, match="the batch is empty"):
        ps.paths.data_dependent_norm(network, x[:0])
    with pytest.raises(ValueError, match="no tensor"):
        ps.paths.data_dependent_norm(network, None)


def test_other_shapes_than_the_traced_are_refused():
    case = BY_NAME["rnn"]
    _, network = traced(case)
    with pytest.raises(ValueError, match="trace"):
        ps.paths.data_dependent_norm(network, torch.randn(2, 7, 2))


def test_forward_that_takes_another_way_is_refused():
    long = []

    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = self.a(x).relu()
            return self.b(x).abs() if long else self.b(x)

    model = Fickle()
    network = ps.trace(model, torch.zeros(1, 2))
    long.append(True)
    with pytest.raises(UnmatchedForwardError, match="'abs'"):
        ps.paths.data_dependent_norm(network, torch.randn(3, 2))


def test_learned_start_is_refused():
    case = BY_NAME["rnn with a learned start"]
    with pytest.raises(UnmatchedForwardError, match="initial state"):
        ps.paths.data_dependent_norm(trace(case, case.model()), case.example())


def test_batch_norm_without_running_statistics_is_that_of_training():
    x, values = torch.randn(4, 2), []
    for tracks in (True, False):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, track_running_stats=tracks)
        model = nn.Sequential(nn.Linear(2, 3), norm, nn.ReLU(), nn.Linear(3, 1))
        values.append(ps.paths.data_dependent_norm(ps.trace(model, x), x).item())
    assert values[0] == values[1]


def test_modules_left_outside_are_not_followed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    network = ps.trace(model, x, outside=["2"])
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    # the first layer's ReLU is an output of the network, and what leaves the normalisation an input
    hidden = model[0](x)
    assert_close(found["0.bias"], (hidden > 0).float().mean(0))
    assert_close(found["3.weight"], model[2](hidden.relu()).square().mean(0).expand(2, 4).detach())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("where", ["returned", "inside", "in a difference", "by data"])
def test_paths_are_those_of_a_function_whatever_it_detaches(where, alpha):
    class Detached(nn.Module):
        def __init__(self, detached):
            super().__init__()
            self.first, self.second, self.detached = nn.Linear(3, 4), nn.Linear(4, 2), detached

        def forward(self, x):
            x = self.first(x).relu()
            behind = x
            if self.detached:
                behind = x.data if where == "by data" else x.detach()
            if where == "returned":
                return self.second(x), behind
            if where == "in a difference":
                return self.second(x - behind.amax(-1, keepdim=True)), x
            return self.second(behind), x

    x = torch.randn(5, 3, dtype=torch.double)
    plain = Detached(False).double()
    model = Detached(True).double()
    model.load_state_dict(plain.state_dict())
    found = [ps.trace(m, x, output=lambda r: r[0]) for m in (model, plain)]
    for measure in (
        lambda net: ps.paths.data_dependent_kappa(net, x, alpha=alpha),
        lambda net: ps.paths.data_dependent_norm(net, x, alpha=alpha),
        lambda net: dict(ps.metrics.quasi_diagonal_metric(net, x, alpha=alpha).cross),
        ps.paths.kappa,
    ):
        assert_close(measure(found[0]), measure(found[1]), rtol=1e-12, atol=0)


class MaskedAttention(nn.Module):
    """Attention that makes no mask of one that masks nothing, if it asks."""

    def __init__(self, *, asks):
        super().__init__()
        self.qkv, self.out, self.asks = nn.Linear(4, 12), nn.Linear(4, 2), asks
        self.double()

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.asks and mask.all():
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        added = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -1e4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, added[:, None]))


def test_a_mask_may_be_asked_whether_it_masks_anything():
    asking, plain = MaskedAttention(asks=True), MaskedAttention(asks=False)
    plain.load_state_dict(asking.state_dict())
    x = torch.randn(3, 5, 4, dtype=torch.double)
    some = torch.rand(3, 5) > 0.4
    some[:, 0] = True
    networks = [ps.trace(model, (x, some)) for model in (asking, plain)]
    for mask in (some, torch.ones_like(some), some):
        found, expected = (ps.paths.data_dependent_kappa(n, (x, mask), alpha=0.5) for n in networks)
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_autocast_rounds_nothing(alpha):
    case = BY_NAME["rnn"]
    network, x = trace(case, case.model()), case.example(4)
    compute = [
        lambda: ps.paths.data_dependent_norm(network, x, alpha=alpha),
        lambda: ps.paths.data_dependent_kappa(network, x, alpha=alpha, estimator="signs"),
        lambda: ps.paths.unit_measure(network, x, alpha=alpha).squared,
        lambda: dict(
            ps.metrics.quasi_diagonal_metric(network, x, alpha=alpha, estimator="signs").cross
        ),
    ]
    for function in compute:
        plain = function()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_close(function(), plain, rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharing", ["parameters", "edges"])
@pytest.mark.parametrize("name", ["mlp2-3-4-2b", "conv1d", "skip"])
def test_part_of_the_examples_stands_for_all(name, sharing):
    """The mean over all halves of a batch is what the whole batch gives, and a half is not."""
    net = load(name)
    network, n = ps.trace(net.model, net.x), len(net.x)
    found = replay(network, net.x)
    _, psi = path_share(network, found, 0.3, "second_moment")
    seeds, _ = sign_seeds(found, psi, "second_moment", torch.Generator().manual_seed(0))
    whole = statistics(Seeded.of(found, seeds), "second_moment", sharing)
    parts = [torch.tensor(part) for part in itertools.combinations(range(n), n // 2)]
    draws = [
        statistics(Seeded.of(found, seeds, None, part), "second_moment", sharing) for part in parts
    ]
    assert_close({name: sum(d[name] for d in draws) / len(draws) for name in whole}, whole, **TIGHT)
    assert any(not torch.allclose(draws[0][name], whole[name]) for name in whole)


def test_parts_are_drawn_where_there_are_many_examples():
    generator = torch.Generator().manual_seed(0)
    assert random_part(63, generator, torch.device("cpu")) is None
    part = random_part(101, generator, torch.device("cpu"))
    assert len(part) == 50 == len(part.unique())
    assert part.min() >= 0
    assert part.max() < 101
    assert not torch.equal(part, random_part(101, generator, torch.device("cpu")))
    drawn = torch.cat(
        [random_part(101, generator, torch.device("cpu")) for _ in range(400)]
    ).bincount()
    assert len(drawn) == 101  # each equally likely, 198 times: five standard deviations
    assert (drawn - 400 * 50 / 101).abs().max() < 50
    assert len(random_pairs(100, generator, torch.device("cpu")).first) == 50
    pairs = random_pairs(100, generator, torch.device("cpu"), part=True)
    assert len(pairs.first) == len(pairs.second) == 25
    assert sorted(torch.cat([pairs.first, pairs.second, pairs.left_out]).tolist()) == list(
        range(100)
    )


@pytest.mark.parametrize("batch", [8, 70])
def test_cross_products_of_a_part_are_those_of_its_examples(batch):
    """What the quasi-diagonal metric takes from a half of a batch is what the half alone gives."""
    torch.manual_seed(0)
    model, x = mlp(3, 6, 4, 2).double(), torch.randn(batch, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    part = torch.arange(batch)[::2]
    found, alone = replay(network, x), replay(network, x[part])
    _, psi = path_share(network, found, 0.3, "second_moment")
    seeds, _ = sign_seeds(found, psi, "second_moment", torch.Generator().manual_seed(0))
    few = {key: seed[part] for key, seed in seeds.items()}
    ours = products(Seeded.of(found, seeds, None, part), "0.weight", "0.bias", "second_moment")
    theirs = products(Seeded.of(alone, few), "0.weight", "0.bias", "second_moment")
    assert_close(ours, theirs, **TIGHT)


class ByName(nn.Module):
    """Its layers are called with the names of torch's arguments, or through modules."""

    def __init__(self, named):
        super().__init__()
        self.conv, self.out, self.named = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(48, 2), named

    def forward(self, x):
        if not self.named:
            return self.out(torch.relu(self.conv(x)).flatten(1))
        h = (
            F.conv2d(bias=self.conv.bias, weight=self.conv.weight, input=x, padding=1)
            .relu()
            .flatten(1)
        )
        return F.linear(h, bias=self.out.bias, weight=self.out.weight)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_layers_may_be_called_with_the_names_of_arguments(statistic):
    found = []
    for named in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, x = ByName(named).double(), torch.randn(5, 2, 4, 4, dtype=torch.float64)
        network = ps.trace(model, x)
        kappa = ps.paths.data_dependent_kappa(network, x, statistic=statistic)
        metric = ps.metrics.quasi_diagonal_metric(network, x)
        found.append((kappa, metric.diagonal, metric.cross))
    assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [4, 6])
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "emit": "all"}, {"num_layers": 2}], ids=str
)
def test_another_number_of_steps_is_refused(options, steps):
    """Fewer of them went unseen: the steps that were missing counted by their paths alone."""
    model = Recurrent(hidden=6, batch_first=True, **options).double()
    x = torch.randn(3, steps, 2, dtype=torch.float64)
    network = ps.trace(model, torch.zeros(1, 5, 2, dtype=torch.float64))
    for estimator in ("signs", "exact"):
        with pytest.raises(ValueError, match=r"number of steps|for one example"):
            ps.paths.data_dependent_kappa(network, x, estimator=estimator)
    optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.1, estimator="signs")
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"number of steps|for one example"):
        optimizer.step()
