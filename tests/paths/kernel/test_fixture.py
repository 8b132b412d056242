"""Path norm, both terms of kappa, classes and a rescaling of six networks whose numbers are known."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from fixture_nets import NETS, NN_RNN, as_tensors, load, load_rnn

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(params=list(NETS))
def net(request):
    return load(request.param)


def test_path_norm(net):
    network = ps.trace(net.model, net.x)
    value = ps.paths.squared_path_norm(network)
    assert value.shape == ()
    assert value.item() == pytest.approx(net.net["path_norm2"], rel=1e-10)


def test_kappa(net):
    network = ps.trace(net.model, net.x)
    kappa1, kappa2 = net.as_tensors(net.net["kappa1"]), net.as_tensors(net.net["kappa2"])
    both = {name: kappa1[name] + kappa2[name] for name in kappa1}
    assert_close(dict(ps.paths.kappa(network)), kappa1, **TIGHT)
    assert_close(dict(ps.paths.second_term(network)), kappa2, **TIGHT)
    assert_close(dict(ps.paths.kappa(network, second_term=True)), both, **TIGHT)


def test_recurrent_layer():
    model, x = load_rnn()
    network = ps.trace(model, x)
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(NN_RNN["gamma2"], rel=1e-10)
    assert_close(dict(ps.paths.kappa(network)), as_tensors(NN_RNN["kappa1"]), **TIGHT)
    assert_close(dict(ps.paths.second_term(network)), as_tensors(NN_RNN["kappa2"]), **TIGHT)


def edge_name(edge):
    name, index = edge
    return f"{name}[{', '.join(str(i) for i in index)}]"


def entering(unit_class):
    return {edge_name(edge) for edge in (*unit_class.incoming, *unit_class.bias)}


def test_classes_and_their_edges(net):
    network = ps.trace(net.model, net.x)
    hidden = {name: set(edges) for name, edges in net.classes().items() if name.startswith("h")}
    assert network.num_classes == net.net["n_classes"] == len(hidden)
    assert sorted(sorted(entering(c)) for c in network.unit_classes) == sorted(
        map(sorted, hidden.values())
    )


def test_rescaling_gives_the_known_weights(net):
    network = ps.trace(net.model, net.x)
    known = net.net["rescale"]
    entered_by = {frozenset(edges): name for name, edges in net.classes().items()}
    factors = torch.ones(network.num_classes, dtype=torch.float64)
    for unit_class in network.unit_classes:
        factors[unit_class.index] = known["beta"][entered_by[frozenset(entering(unit_class))]]
    ps.rescaling.rescale_(network, factors)
    weights = {name: p.detach() for name, p in net.model.named_parameters()}
    assert_close(weights, net.as_tensors(known["params"]), **TIGHT)
