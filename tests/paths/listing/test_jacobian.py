"""Path-Jacobian against autograd, its rank against the fixture and against the count of classes, dead units."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, listed, of_each_kind, trace, traced
from fixture_nets import NETS, load
from oracles.graph import enumerate_paths as oracle_paths

MANY = {
    "deep residual",
    "small resnet",
    "stacked bidirectional rnn",
    "recurrent tower",
    "paddings",
    "stacked rnn",
}
MANY |= {"pool twice", "characters", "dense block", "cnn 2d"}
COUNTED = [case for case in ZOO if case.name not in MANY and not case.normalizes]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(NETS))
def test_rank_of_the_fixtures(name):
    net = load(name)
    network = ps.trace(net.model, net.x)
    jacobian = ps.paths.path_jacobian(network)
    assert ps.paths.path_rank(jacobian) == net.net["rank"] == ps.paths.degrees_of_freedom(network)
    # each row by autograd, from a graph written down by hand
    weights = torch.tensor(net.net["params"], dtype=torch.float64, requires_grad=True)
    order = (
        ps.paths.reduction_graph(network).flatten(net.as_tensors(list(range(len(weights))))).long()
    )
    rows = []
    for path in oracle_paths(net.graph):
        value = torch.stack([weights[i] for _, _, i in path if i >= 0]).prod()
        rows.append(torch.autograd.grad(value, weights)[0][order])
    assert_close(
        torch.tensor(sorted(jacobian.tolist())), torch.tensor(sorted(torch.stack(rows).tolist()))
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", of_each_kind(COUNTED), ids=str)
def test_rank_is_weights_minus_classes(case):
    _, network = traced(case, torch.float64)
    jacobian = ps.paths.path_jacobian(network, listed(case))
    assert ps.paths.path_rank(jacobian) == ps.paths.degrees_of_freedom(network)
    used = jacobian.abs().sum(0) > 0
    assert torch.equal(used, ps.paths.used_edges(network))
    if bool(used.all()):
        assert ps.paths.degrees_of_freedom(network) == len(used) - network.num_classes
    # no path sees a rescaling: J (w * exponents) = 0
    graph = ps.paths.reduction_graph(network)
    moved = graph.flatten(network.parameters).detach()[:, None] * graph.exponents()
    assert (jacobian @ moved).abs().max() < 1e-12 if network.num_classes else True


def test_zero_weights_are_differentiated_exactly():
    net = load("mlp2-3-4-2b")
    with torch.no_grad():
        net.model.layers[1].weight.zero_()
    network = ps.trace(net.model, net.x)
    paths = ps.paths.enumerate_paths(network)
    parameters = [p.detach().requires_grad_() for p in network.parameters.values()]
    rows = torch.autograd.functional.jacobian(
        lambda *p: paths.values(dict(zip(network.parameters, p, strict=True))), tuple(parameters)
    )
    assert_close(ps.paths.path_jacobian(network, paths), torch.cat([r.flatten(1) for r in rows], 1))


def test_rank_does_not_depend_on_the_scale_of_units():
    case = BY_NAME["rnn without bias"]
    _, network = traced(case, torch.float64)
    ps.rescaling.random_rescale_(network, 1e-4, 1e4, generator=torch.Generator().manual_seed(1))
    assert ps.paths.path_rank(ps.paths.path_jacobian(network)) == ps.paths.degrees_of_freedom(
        network
    )


@pytest.mark.parametrize("name", ["mlp", "rnn without bias"])
def test_data_reach_the_generic_number(name):
    case = BY_NAME[name]
    _, network = traced(case, torch.float64)
    data = 3 * case.example(400, torch.float64)
    assert not bool(ps.paths.dead_units(network, data).any())
    assert ps.paths.degrees_of_freedom(network, data) == ps.paths.degrees_of_freedom(network)


def test_two_biases_that_add_up_are_one_degree_of_freedom():
    case = BY_NAME["rnn"]
    _, network = traced(case, torch.float64)
    data = case.example(150, torch.float64)
    assert ps.paths.degrees_of_freedom(network, data) == ps.paths.degrees_of_freedom(network) - 3


def test_dead_units_lose_their_degrees():
    model = nn.Sequential(
        nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel()))
        model[0].bias[1] = -1e3
    x = 3 * torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    network = ps.trace(model, x)
    dead = ps.paths.dead_units(network, x)
    active = model[1](model[0](x)).amax(0) > 0, model[3](model[2](model[0](x).relu())).amax(0) > 0
    assert dead.tolist() == (~torch.cat(active)).tolist()
    assert dead.sum() == 1
    # the function is that of a network without the unit
    smaller = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    with torch.no_grad():
        smaller[0].weight.copy_(model[0].weight[[0, 2, 3]])
        smaller[0].bias.copy_(model[0].bias[[0, 2, 3]])
        smaller[2].weight.copy_(model[2].weight[:, [0, 2, 3]])
        smaller[2].bias.copy_(model[2].bias)
        smaller[4].load_state_dict(model[4].state_dict())
    degrees = ps.paths.degrees_of_freedom(network, x)
    assert degrees == ps.paths.degrees_of_freedom(ps.trace(smaller, x), x)
    assert degrees <= ps.paths.degrees_of_freedom(network) - (3 + 3 - 1)


def test_a_unit_behind_dead_units_is_dead():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[2].bias.fill_(-1e6)
    x = torch.randn(20, 2)
    network = ps.trace(model, x)
    assert ps.paths.dead_units(network, x).all()
    assert ps.paths.degrees_of_freedom(network, x) == 1


def test_dead_channels_of_a_convolution():
    case = BY_NAME["batch norm"]
    model = case.model(torch.float64)
    with torch.no_grad():
        model.features[1].bias[2] = -1e4
    network = trace(case, model)
    dead = ps.paths.dead_units(network, case.example(30, torch.float64))
    channel = next(c for c in network.unit_classes if ("features.1.bias", (2,)) in c.incoming)
    assert dead[channel.index]
    assert dead.sum() < network.num_classes


def test_directions_of_weight_normalization_are_alive_with_their_units():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    model = nn.Sequential(normed, nn.ReLU(), nn.Linear(3, 2)).double()
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network = ps.trace(model, x)
    assert network.num_classes == 6  # units, and directions
    assert not ps.paths.dead_units(network, x).any()
    with torch.no_grad():
        model[0].bias[1] = -1e3
    assert ps.paths.dead_units(network, x).sum() == 2


def test_a_number_is_an_output_too():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))

        def forward(self, x):
            return self.layers(x).mean()

    model, x = Mean().double(), torch.randn(4, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    assert ps.paths.degrees_of_freedom(network, x) == 1
    assert ps.paths.fisher(network, x).shape == (13, 13)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_derivatives_are_taken_where_gradients_are_off(mode):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    network = ps.trace(model, torch.zeros(1, 2, dtype=torch.float64))
    given = {name: torch.ones_like(p) for name, p in network.parameters.items()}

    def found():
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(20, 2)
        whole = ps.paths.natural_gradient(network, x, given)
        return (
            ps.paths.degrees_of_freedom(network, x),
            ps.paths.dead_units(network, x),
            ps.paths.fisher(network, x),
            whole,
        )

    expected = found()
    with mode():
        torch.testing.assert_close(found(), expected)


def test_data_of_another_form_are_refused():
    network = ps.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    for wrong in ([torch.zeros(2, 3)], torch.zeros(3), torch.zeros(2, 3, dtype=torch.long), None):
        with pytest.raises(ValueError, match="form of the example input"):
            ps.paths.dead_units(network, wrong)
    with pytest.raises(ValueError, match=r"shape \(2, 4\), the network was traced with \(1, 3\)"):
        ps.paths.dead_units(network, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="the batch is empty"):
        ps.paths.dead_units(network, torch.zeros(0, 3))


def test_examples_do_not_meet_what_a_call_leaves_in_the_model():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out, self.state = nn.Linear(2, 3), nn.Linear(3, 2), None
            self.register_buffer("gate", torch.ones(3))

        def forward(self, x):
            y = self.read(x).relu() if self.state is None else 0 * self.state
            self.state, gated = y.detach(), y * self.gate
            self.gate = torch.zeros(3)
            return self.out(gated)

    model = Remembers()
    network = ps.trace(model, torch.zeros(1, 2))
    assert model.state is None
    assert ps.paths.degrees_of_freedom(network, torch.randn(20, 2)) == 14
