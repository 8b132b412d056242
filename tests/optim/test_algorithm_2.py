"""G-SGD without units from a skeleton of ones: S19's Algorithm 2, against matrices and lists of paths."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, mlp, traced
from oracles import algorithm_2 as s19
from oracles.basis import PathValues
from pathspace.experiments.methods import METHODS
from pathspace.experiments.settings import Settings

D = torch.float64
RAW = {"skeleton": "cyclic", "units": "none", "clamp": None}


class Recurrent(nn.Module):
    """One ReLU recurrent layer that is read at the last step."""

    def __init__(self, inputs, hidden, outputs, *, bias=False):
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, nonlinearity="relu", batch_first=True, bias=bias)
        self.out = nn.Linear(hidden, outputs, bias=bias)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Stack(nn.Module):
    """Three ReLU recurrent layers with biases."""

    def __init__(self):
        super().__init__()
        self.rnn = ps.nn.StackedReLURNN(3, [4, 5, 4])
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def matrices(model):
    rnn = model.rnn
    return tuple(p.detach().clone() for p in (rnn.weight_ih_l0, rnn.weight_hh_l0, model.out.weight))


def data(*shape, outputs, batch=8):
    return torch.randn(batch, *shape, dtype=D), torch.randn(batch, outputs, dtype=D)


def half_mean_square(model, x, y):
    return (model(x) - y).square().mean() / 2


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_ones_are_on_the_skeleton_and_nowhere_else(case):
    _, network = traced(case, D)
    graph = ps.paths.reduction_graph(network)
    before = graph.flatten(network.parameters).detach().clone()
    known = ps.paths.skeleton(network, "cyclic")
    chosen = ps.paths.skeleton_ones_(network)
    on = torch.zeros(graph.num_edges, dtype=torch.bool)
    for edge in (*known.incoming, *known.outgoing):
        if edge is not None:
            on[graph.number(edge)] = True
    after = graph.flatten(network.parameters).detach()
    assert torch.equal(after, torch.where(on, 1.0, before))
    again = ps.paths.skeleton(network, "cyclic")
    assert (chosen.incoming, chosen.outgoing) == (known.incoming, known.outgoing)
    assert (again.incoming, again.outgoing) == (known.incoming, known.outgoing)


def test_the_start_is_the_cyclic_one_of_algorithm_1():
    model = Recurrent(3, 7, 4).to(D)
    w_in, w_rec, w_out = matrices(model)
    ps.paths.skeleton_ones_(ps.trace(model, torch.zeros(1, 5, 3, dtype=D)))
    m_in, m_out = s19.masks(w_in, w_out)
    wanted = (torch.where(m_in == 1, 1.0, w_in), w_rec, torch.where(m_out == 1, 1.0, w_out))
    assert all(map(torch.equal, matrices(model), wanted))


def test_a_skeleton_of_ones_may_be_any():
    model = mlp(3, 5, 4, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    largest = ps.paths.skeleton(network)
    assert ps.paths.skeleton_ones_(network, largest) is largest
    drawn = ps.paths.skeleton_ones_(network, "random", torch.Generator().manual_seed(3))
    for chosen in (largest, drawn):
        for name, index in (*chosen.incoming, *chosen.outgoing):
            assert network.parameters[name][index] == 1
    assert bool((drawn.products(network.parameters) == 1).all())


def test_other_things_than_skeletons_are_refused():
    model = mlp(3, 5, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    other = ps.paths.skeleton(ps.trace(mlp(3, 4, 2), torch.zeros(1, 3)))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="skeleton was chosen for another network"):
        ps.paths.skeleton_ones_(network, other)
    with pytest.raises(ValueError, match="rule must be 'largest', 'cyclic' or 'random'"):
        ps.paths.skeleton_ones_(network, "ones")
    with pytest.raises(TypeError, match="needs a traced network"):
        ps.paths.skeleton_ones_(model)
    assert all(map(torch.equal, before, model.parameters()))


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 5, 3), (4, 3, 5)])
def test_from_ones_the_raw_rule_is_algorithm_2(sizes):
    inputs, hidden, outputs = sizes
    model = Recurrent(inputs, hidden, outputs).to(D)
    network = ps.trace(model, torch.zeros(1, 5, inputs, dtype=D))
    ps.paths.skeleton_ones_(network)
    rate = 0.01
    optimizer = ps.optim.GSGD(model.parameters(), network, lr=rate, **RAW)
    weights = matrices(model)
    x, y = data(5, inputs, outputs=outputs)
    for _ in range(20):
        wanted = s19.path_step(weights, rate, x, y)
        optimizer.zero_grad()
        half_mean_square(model, x, y).backward()
        optimizer.step()
        weights = s19.algorithm_2(weights, rate, x, y)
        assert_close(s19.values(weights), wanted, rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(matrices(model), weights, strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not torch.equal(weights[0].diagonal(), torch.ones(min(inputs, hidden), dtype=D))


def test_algorithm_2_needs_outgoing_ones():
    """From another start it is no step in path space, and the raw rule is one still."""
    model = Recurrent(3, 4, 2).to(D)
    network = ps.trace(model, torch.zeros(1, 5, 3, dtype=D))
    optimizer = ps.optim.GSGD(model.parameters(), network, lr=1e-4, **RAW)
    x, y = data(5, 3, outputs=2)
    weights = matrices(model)
    wanted = s19.path_step(weights, 1e-4, x, y)
    half_mean_square(model, x, y).backward()
    optimizer.step()
    assert_close(s19.values(matrices(model)), wanted, rtol=1e-9, atol=1e-12)
    printed = s19.values(s19.algorithm_2(weights, 1e-4, x, y))
    assert (printed - wanted).norm() > 0.1 * (wanted - s19.values(weights)).norm()


BUILDS = {
    "recurrent with biases": lambda: (Recurrent(3, 5, 2, bias=True), (4, 3)),
    "stack": lambda: (Stack(), (4, 3)),
    "mlp": lambda: (mlp(3, 6, 5, 2), (3,)),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 3, 3),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * 9, 2),
        ),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.sample(2)
def test_from_ones_basis_paths_take_gradient_steps_and_multipliers_are_one(name):
    model, shape = BUILDS[name]()
    model = model.to(D)
    x, y = data(*shape, outputs=2)
    network = ps.trace(model, x)
    skeleton = ps.paths.skeleton_ones_(network)
    assert torch.equal(
        skeleton.products(network.parameters), torch.ones(1 + 2 * network.num_classes, dtype=D)
    )
    optimizer = METHODS["g-sgd-published"].build(
        model,
        network,
        Settings().run_config("g-sgd-published", "default", 0.001, 0, evaluate_test=False),
    )
    paths = PathValues(network, skeleton)
    for _ in range(3):
        optimizer.zero_grad()
        half_mean_square(model, x, y).backward()
        wanted = paths.now() - 0.001 * paths.gradient()
        optimizer.step()
        assert_close(paths.now(), wanted, rtol=1e-9, atol=1e-12)


def train(start, rate, steps=30):
    """The losses of the raw rule on a small sequence task, in float32; up to the step that is not finite."""
    torch.manual_seed(1)
    model = Recurrent(4, 24, 3, bias=True)
    x = torch.randn(96, 10, 4)
    y = x.mean(1)[:, :3].argmax(1)
    network = ps.trace(model, x[:1])
    if start == "ones":
        ps.paths.skeleton_ones_(network)
    optimizer = ps.optim.GSGD(model.parameters(), network, lr=rate, **RAW)
    losses = []
    for step in range(steps):
        batch = slice(32 * (step % 3), 32 * (step % 3) + 32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        losses.append(loss.item())
        loss.backward()
        if not math.isfinite(losses[-1]):
            break
        try:
            optimizer.step()
        except FloatingPointError:
            return [*losses, math.nan]
    return losses


@pytest.mark.parametrize("rate", [0.05, 0.01])
def test_from_ones_the_raw_rule_trains_at_rates_at_which_it_diverges_from_pytorchs_start(rate):
    assert not max(train("default", rate)) < 1e3
    losses = train("ones", rate)
    assert len(losses) == 30
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])
