"""The reduction graph against the fixture's own list of classes and against a rescaling of the weights."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, traced
from fixture_nets import NETS, load

EXACT = {"rtol": 1e-12, "atol": 0}


@pytest.mark.parametrize("name", list(NETS))
def test_edges_and_classes_are_those_of_the_fixture(name):
    net = load(name)
    graph = ps.paths.reduction_graph(ps.trace(net.model, net.x))
    assert (graph.num_edges, graph.num_classes) == (len(net.net["params"]), net.net["n_classes"])
    # classes are numbered differently: an edge is told by which edges share its ends
    number_of = {}  # class of the fixture -> node here
    # position in the fixture, by name and index
    weights = net.as_tensors(list(range(graph.num_edges)))
    for place, number in enumerate(graph.flatten(weights).tolist()):
        for end, node in zip(
            net.net["red"][str(int(number))], (graph.source, graph.target), strict=True
        ):
            here = int(node[place])
            assert (here > 0) == end.startswith("h")
            if here:
                assert number_of.setdefault(end, here) == here
    assert len(set(number_of.values())) == graph.num_classes


@pytest.mark.sample(30)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_exponents_say_what_a_rescaling_does(case):
    _model, network = traced(case, torch.float64)
    graph = ps.paths.reduction_graph(network)
    before = graph.flatten(network.parameters).detach()
    factors = ps.rescaling.random_rescale_(
        network, 0.5, 2.0, generator=torch.Generator().manual_seed(3)
    )
    after = graph.flatten(network.parameters).detach()
    logs = torch.cat([torch.zeros(1, dtype=torch.float64), factors.log()])
    target, source = (
        (logs[nodes.abs()] * nodes.sign()).sum(0)
        for nodes in map(graph.factors, (graph.target, graph.source))
    )
    assert_close(after, before * torch.exp(target - source), rtol=1e-12, atol=1e-15)


def test_numbers_and_edges_are_inverse():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(9, 2))
    graph = ps.paths.reduction_graph(ps.trace(model, torch.zeros(1, 2, 4)))
    for number in range(graph.num_edges):
        name, index = graph.edge(number)
        assert graph.number((name, index)) == number
        marked = torch.zeros(graph.num_edges)
        marked[number] = 1
        assert graph.unflatten(marked)[name][index] == 1
    for wrong in (("0.weight", (0, 2, 0)), ("nothing", (0,)), ("0.bias", ())):
        with pytest.raises(KeyError):
            graph.number(wrong)
    with pytest.raises(IndexError):
        graph.edge(graph.num_edges)


def test_a_self_loop_begins_and_ends_in_its_class():
    net = load("rnn_d2_H3_K1_T4b_last")
    graph = ps.paths.reduction_graph(ps.trace(net.model, net.x))
    loop = graph.number(("step.0.weight", (1, 1)))
    assert int(graph.source[loop]) == int(graph.target[loop]) > 0
    assert not graph.exponents()[loop].any()
    assert graph.bias[graph.number(("read.0.bias", (1,)))]
    assert not graph.bias[loop]


@pytest.mark.parametrize("wrong", [lambda w: w.T, lambda w: w.reshape(-1), lambda w: w[:, :1]])
def test_tensors_of_another_shape_than_the_parameters_are_refused(wrong):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    network = ps.trace(model, torch.zeros(1, 2))
    paths, weights = ps.paths.enumerate_paths(network), dict(network.parameters)
    weights["0.weight"] = wrong(weights["0.weight"])
    for use in (paths.values, paths.reduction.flatten):
        with pytest.raises(ValueError, match=r"'0.weight' has shape \(.*\), not \(3, 2\)"):
            use(weights)
