"""S19 Theorem 1: every path value is a product of integer powers of basis values."""

import itertools

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, in_turn, listed, of_each_kind, slow_besides, trace, traced
from fixture_nets import NETS, load

MANY = {
    "deep residual",
    "small resnet",
    "stacked bidirectional rnn",
    "recurrent tower",
    "paddings",
    "stacked rnn",
}
MANY |= {"pool twice", "characters", "dense block", "cnn 2d"}
SIGNED = {"tied characters", "tied autoencoder"}
SHOWN = [case for case in ZOO if case.name not in MANY | SIGNED and not case.normalizes]


RULES = ["largest", "cyclic", "random"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "rule"),
    slow_besides(in_turn(NETS, RULES, everywhere=["skip"]), itertools.product(NETS, RULES)),
)
def test_paths_of_the_fixtures_in_terms_of_a_basis(name, rule):
    net = load(name)
    network = ps.trace(net.model, net.x)
    check(network, rule)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", of_each_kind(SHOWN), ids=str)
def test_paths_in_terms_of_a_basis(case):
    check(traced(case, torch.float64)[1], "largest", listed(case))


def check(network, rule, paths=None):
    skeleton = ps.paths.skeleton(network, rule, generator=torch.Generator().manual_seed(0))
    paths = paths or ps.paths.enumerate_paths(network)
    found = ps.paths.express(network, skeleton, paths)
    assert len(found.edges) == ps.paths.degrees_of_freedom(network)
    assert torch.equal(found.exponents @ found.counts, paths.counts)
    weights = paths.reduction.flatten(network.parameters).detach()
    basis = weights.pow(found.counts).prod(1)
    assert_close(
        basis, paths.reduction.flatten(ps.paths.basis_values(network, skeleton))[found.edges]
    )
    assert_close(found.values(basis), paths.values(network.parameters).detach(), rtol=1e-10, atol=0)
    # independent, so the exponents are the only ones
    assert torch.linalg.matrix_rank(found.counts.double()) == len(found.edges)


def test_weights_that_are_zero_have_no_negative_powers():
    case = BY_NAME["rnn without bias"]
    model = case.model(torch.float64)
    with torch.no_grad():
        model.rnn.weight_hh_l0.zero_()
    network = trace(case, model)
    paths = ps.paths.enumerate_paths(network)
    found = ps.paths.express(network, ps.paths.skeleton(network), paths)
    basis = paths.reduction.flatten(network.parameters).detach().pow(found.counts).prod(1)
    assert bool((basis == 0).any())
    assert_close(found.values(basis), paths.values(network.parameters).detach())


def test_a_class_without_a_skeleton_edge_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    with torch.no_grad():
        model[2].weight[0, 1] = 0
    network = ps.trace(model, torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"linear in '0'\[1\]"):
        ps.paths.express(network, ps.paths.skeleton(network), ps.paths.enumerate_paths(network))


def test_what_was_listed_for_another_network_is_refused():
    """Of the same parameters, but other shapes: it gave a table of other weights."""
    network, other = (
        ps.trace(
            torch.nn.Sequential(torch.nn.Linear(2, h), torch.nn.ReLU(), torch.nn.Linear(h, 1)),
            torch.zeros(1, 2),
        )
        for h in (3, 4)
    )
    skeleton, paths = ps.paths.skeleton(network), ps.paths.enumerate_paths(other)
    with pytest.raises(ValueError, match="paths was made for another network"):
        ps.paths.express(network, skeleton, paths)
    with pytest.raises(ValueError, match="paths was made for another network"):
        ps.paths.path_jacobian(network, paths)
    with pytest.raises(ValueError, match="graph was written out for another network"):
        ps.paths.enumerate_paths(network, graph=ps.paths.unroll(other))
