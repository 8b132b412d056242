"""The oracles against the known numbers, and against each other on random networks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from cases import ZOO, call, mlp, oracle
from fixture_nets import NETS, NN_RNN, Loop, as_tensors, load, load_rnn, loop_entry
from oracles import graph
from oracles.squared import Oracle

TIGHT = {"rtol": 1e-12, "atol": 1e-14}


@pytest.mark.parametrize("name", NETS)
def test_enumeration_gives_the_known_numbers(name):
    net = load(name)
    weights = net.net["params"]
    assert len(graph.enumerate_paths(net.graph)) == net.net["n_paths"]
    assert graph.squared_path_norm(net.graph, weights) == pytest.approx(
        net.net["path_norm2"], rel=1e-12
    )
    assert graph.kappa1(net.graph, weights) == pytest.approx(net.net["kappa1"], rel=1e-12)
    assert graph.kappa2(net.graph, weights) == pytest.approx(
        net.net["kappa2"], rel=1e-10, abs=1e-12
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NETS)
def test_squared_forward_gives_the_known_numbers(name):
    net = load(name)
    computed = Oracle(net.model, net.x[:1])
    assert computed.squared_path_norm().item() == pytest.approx(net.net["path_norm2"], rel=1e-12)
    assert_close(computed.kappa1(), net.as_tensors(net.net["kappa1"]), **TIGHT)
    assert_close(computed.kappa2(), net.as_tensors(net.net["kappa2"]), rtol=1e-10, atol=1e-12)
    assert computed.symmetries() == net.net["n_classes"]


@pytest.mark.parametrize("name", NETS)
def test_models_of_the_fixture_compute_its_function(name):
    net = load(name)
    output = net.model(net.x)
    loss = net.loss(output)
    loss.backward()
    assert_close(
        output.flatten(1), torch.tensor(net.net["f"], dtype=torch.float64), rtol=1e-10, atol=1e-12
    )
    assert loss.item() == pytest.approx(net.net["loss"], rel=1e-12)
    gradient = {name: p.grad for name, p in net.model.named_parameters()}
    assert_close(gradient, net.as_tensors(net.net["grad"]), rtol=1e-10, atol=1e-12)


def test_squared_forward_knows_the_recurrent_layer():
    model, x = load_rnn()
    computed = Oracle(model, x[:, :1])
    assert computed.squared_path_norm().item() == pytest.approx(NN_RNN["gamma2"], rel=1e-12)
    for term, value in (("kappa1", computed.kappa1()), ("kappa2", computed.kappa2())):
        assert_close(value, as_tensors(NN_RNN[term]), rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.booleans(), st.integers(0, 2**16))
def test_enumeration_and_squared_forward_agree_on_layers(widths, bias, seed):
    torch.manual_seed(seed)
    model = mlp(*widths, bias=bias).double()
    paths, number = graph.layered(widths, bias=bias)
    modules = [module for module in model if hasattr(module, "weight")]
    weights = [0.0] * len(number)
    for key, index in number.items():
        module = modules[(key[2] if key[0] == "weight" else key[1]) - 1]
        weights[index] = (
            module.weight[key[3:]] if key[0] == "weight" else module.bias[key[2]]
        ).item()
    computed = Oracle(model, torch.zeros(1, widths[0]))
    assert computed.squared_path_norm().item() == pytest.approx(
        graph.squared_path_norm(paths, weights), rel=1e-12
    )
    kappa1 = computed.kappa1()
    named = {p: name for name, p in model.named_parameters()}
    for key, index in number.items():
        module = modules[(key[2] if key[0] == "weight" else key[1]) - 1]
        p, at = (module.weight, key[3:]) if key[0] == "weight" else (module.bias, key[2:])
        assert kappa1[named[p]][at].item() == pytest.approx(
            graph.kappa1(paths, weights)[index], rel=1e-12
        )


@settings(max_examples=15, deadline=None)
@given(
    hidden=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    steps=st.integers(1, 4),
    emit=st.sampled_from(["last", "all"]),
    seed=st.integers(0, 2**16),
)
def test_enumeration_and_squared_forward_agree_on_loops(hidden, steps, emit, seed):
    torch.manual_seed(seed)
    model = Loop(1, hidden, 2, emit=emit).double()
    paths, number = graph.recurrent(1, hidden, 2, steps, emit=emit)
    entries = {index: loop_entry(key) for key, index in number.items()}
    state = dict(model.named_parameters())
    weights = [state[entries[index][0]][entries[index][1]].item() for index in range(len(number))]
    computed = Oracle(model, torch.zeros(1, steps, 1))
    for ours, theirs in (
        (computed.kappa1(), graph.kappa1(paths, weights)),
        (computed.kappa2(), graph.kappa2(paths, weights)),
    ):
        for index, (name, at) in entries.items():
            assert ours[name][at].item() == pytest.approx(theirs[index], rel=1e-9, abs=1e-12)


# with its mean held, a normalization looks as if the units before it could be rescaled, too
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [case for case in ZOO if not case.normalizes], ids=str)
def test_zoo_states_the_number_of_its_symmetries(case):
    assert oracle(case).symmetries() == case.classes


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_zoo_runs_with_any_batch_size(case):
    model = case.model()
    for batch in (1, 4):
        output = call(model, case.example(batch))
        assert torch.isfinite(case.picked(output)).all()
        assert torch.isfinite(case.loss(output))
