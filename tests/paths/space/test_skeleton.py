"""Skeletons and basis paths against walks written down one by one, and against numbers known beforehand."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, NEAR_ANOTHER, ZOO, mlp, of_each_kind, slow_besides, trace, traced
from fixture_nets import NETS, load, load_rnn
from oracles.basis import as_skeleton, best_products, fixture_edges

KNOWN = json.loads((Path(__file__).parents[2] / "data" / "path_space.json").read_text())
RULES = ["largest", "cyclic", "random"]


def by_rules(cases):
    """The usual rule on all networks, the others on every sixth by default and in turn on all of them."""
    usual, *others = RULES
    cases = list(cases)
    in_turn = [
        (case, rule)
        for n, rule in enumerate(others)
        for case in cases[n :: len(others)]
        if case.name not in NEAR_ANOTHER
    ]
    return [*of_each_kind(cases, usual), *slow_besides(in_turn[::3], in_turn)]


UNTIED = [case for case in ZOO if case.name != "tied characters"]


def choose(network, rule="largest"):
    return ps.paths.skeleton(network, rule, generator=torch.Generator().manual_seed(5))


# --- known numbers --------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(NETS))
def test_basis_paths_and_values_are_those_of_the_fixture(name):
    net, known = load(name), KNOWN["nets"][name]
    network = ps.trace(net.model, net.x)
    skeleton = as_skeleton(network, net, known["skeleton"])
    edges = fixture_edges(net)
    paths = {tuple(edges[i] for i in path) for path in known["basis"].values()}
    found = ps.paths.basis_paths(network, skeleton)
    assert set(found) == paths
    assert len(found) == len(paths) == known["rank"]
    values = ps.paths.basis_values(network, skeleton)
    for number, value in known["basis_values"].items():
        parameter, index = edges[int(number)]
        assert values[parameter][index].item() == pytest.approx(value, rel=1e-10)


def test_cyclic_rule_is_that_of_the_paper():
    model, x = load_rnn()
    skeleton = ps.paths.skeleton(ps.trace(model, x), "cyclic")
    assert skeleton.incoming == tuple(("rnn.weight_ih_l0", (j, j % 2)) for j in range(3))
    assert skeleton.outgoing == tuple(("out.weight", (j % 2, j)) for j in range(3))


# --- what a skeleton is ---------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "rule"), by_rules(ZOO), ids=str)
def test_edges_are_where_they_belong(case, rule):
    _, network = traced(case, torch.float64)
    skeleton = choose(network, rule)
    for unit_class in network.unit_classes:
        into, out_of = skeleton.incoming[unit_class.index], skeleton.outgoing[unit_class.index]
        incoming, outgoing = set(unit_class.incoming), set(unit_class.outgoing)
        assert into in incoming - set(unit_class.bias) - outgoing
        assert out_of in outgoing - incoming
        for name, index in (into, out_of):
            assert network.parameters[name][index] != 0


@pytest.mark.sample(7)
@pytest.mark.parametrize(("case", "rule"), by_rules(UNTIED), ids=str)
def test_there_are_as_many_independent_basis_paths_as_dimensions(case, rule):
    _, network = traced(case, torch.float64)
    skeleton = choose(network, rule)
    paths = ps.paths.basis_paths(network, skeleton)
    graph = skeleton.graph
    assert skeleton.incomplete == ()
    assert len(set(paths)) == len(paths) == ps.paths.degrees_of_freedom(network)
    # its backward loop takes one step to the output, and is on no path
    if case.name != "bidirectional rnn":
        assert len(paths) == graph.num_edges - network.num_classes
    counts = torch.zeros(len(paths), graph.num_edges, dtype=torch.float64)
    for row, path in zip(counts, paths, strict=True):
        for edge in path:
            row[graph.number(edge)] += 1
        # from input to output: every edge starts where the one before it ends
        numbers = [graph.number(edge) for edge in path]
        assert graph.source[numbers[0]] == graph.target[numbers[-1]] == 0
        assert all(graph.target[a] == graph.source[b] != 0 for a, b in itertools.pairwise(numbers))
    assert torch.linalg.matrix_rank(counts) == len(paths)
    assert not (counts @ graph.exponents()).any()  # no rescaling changes a value


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "case",
    [c for c in ZOO if not {"tied characters", "deep residual", "scaled residual"} & {c.name}],
    ids=str,
)
def test_largest_rule_takes_the_largest_products(case):
    _, network = traced(case, torch.float64)
    products = choose(network).products(network.parameters).abs()
    into, out_of = best_products(network)
    c = network.num_classes
    assert_close(products[1 : 1 + c], into, rtol=1e-12, atol=0)
    assert_close(products[1 + c :], out_of, rtol=1e-12, atol=0)


class Block(torch.nn.Module):
    """A stream, and a block of three layers that reads it and adds to it: one cycle of classes."""

    def __init__(self):
        super().__init__()
        self.read, self.out = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.a, self.b, self.c = (torch.nn.Linear(*n) for n in ((4, 5), (5, 3), (3, 4)))

    def forward(self, x):
        h = self.read(x).relu()
        return self.out(h + self.c(self.b(self.a(h).relu()).relu()))


def test_a_cycle_is_entered_layer_by_layer():
    """Products of the largest weights from the stream on, and of the largest ones back to it."""
    torch.manual_seed(0)
    model, x = Block().double(), torch.zeros(1, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    skeleton = ps.paths.skeleton(network)
    assert not skeleton.incomplete
    weights = {name: p.detach().abs() for name, p in network.parameters.items()}

    def best(name, before):  # of the units that a matrix leads to
        return (weights[name] * before).amax(1)

    into = [torch.ones(3, dtype=torch.float64)]
    for name in ("read.weight", "a.weight", "b.weight"):
        into.append(best(name, into[-1]))
    out_of = [weights["out.weight"].amax(0)]
    for name in ("c.weight", "b.weight"):
        out_of.append((weights[name] * out_of[-1][:, None]).amax(0))
    number = {(name, index[0]): c.index for c in network.unit_classes for name, index in c.bias}
    products = skeleton.products(network.parameters).abs()
    for name, A, B in zip(
        ("read", "a", "b"), into[1:], (out_of[0], out_of[2], out_of[1]), strict=True
    ):
        at = 1 + torch.tensor([number[f"{name}.bias", unit] for unit in range(len(A))])
        assert_close(products[at], A)
        assert_close(products[at + network.num_classes], B)


def test_other_rules_do_not():
    case = BY_NAME["mlp"]
    _, network = traced(case, torch.float64)
    largest = choose(network).products(network.parameters).abs()
    for rule in ("cyclic", "random"):
        assert choose(network, rule).products(network.parameters).abs().sum() < largest.sum()


@pytest.mark.sample(19)
@pytest.mark.parametrize("rule", ["largest", "cyclic"])
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_choice_does_not_depend_on_the_scales(case, rule):
    _, network = traced(case, torch.float64)
    before = choose(network, rule)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
    after = choose(network, rule)
    assert torch.equal(before.edges, after.edges)


def test_ties_are_broken_alike_in_every_scaling():
    """Weights of one size, as after a constant start: rounding must not choose."""
    model = mlp(3, 50, 40, 2).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign() * 0.3)
    network = ps.trace(model, torch.zeros(1, 3))
    before = choose(network)
    for seed in range(5):
        ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(choose(network).edges, before.edges)


def test_values_do_not_depend_on_the_scales():
    case = BY_NAME["skip"]
    _, network = traced(case, torch.float64)
    skeleton = choose(network)
    before = ps.paths.basis_values(network, skeleton)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
    assert_close(ps.paths.basis_values(network, skeleton), before, rtol=1e-12, atol=0)
    plain = {name: p.detach() for name, p in network.parameters.items()}
    assert not torch.allclose(plain["second.weight"], before["second.weight"])


def test_values_are_products_along_the_paths():
    case = BY_NAME["stacked bidirectional rnn"]
    _, network = traced(case, torch.float64)
    skeleton = choose(network)
    values = ps.paths.basis_values(network, skeleton)
    left_out = set(skeleton.outgoing)
    edges = [skeleton.graph.edge(e) for e in range(skeleton.graph.num_edges)]
    paths = ps.paths.basis_paths(network, skeleton)
    for (name, index), path in zip([e for e in edges if e not in left_out], paths, strict=True):
        product = math.prod(network.parameters[n][i].item() for n, i in path)
        assert values[name][index].item() == pytest.approx(product, rel=1e-12)


# --- zeros ----------------------------------------------------------------------------------------


def test_zero_weights_are_passed_over_and_dead_classes_named():
    model = mlp(3, 4, 3, 2)
    with torch.no_grad():
        model[0].weight[1] = 0  # nothing enters class 1
        model[4].weight[:, 2] = 0  # nothing leaves class 4 + 2
        model[0].weight[0, :2] = 0
    network = ps.trace(model, torch.zeros(1, 3))
    for rule in RULES:
        skeleton = choose(network, rule)
        assert skeleton.incomplete == (1, 6)
        assert skeleton.incoming[0] == ("0.weight", (0, 2))
        assert skeleton.incoming[1] is None
        assert skeleton.outgoing[6] is None
        paths = ps.paths.basis_paths(network, skeleton)
        assert not any(
            ("0.weight", (1, 0)) in path[1:] or ("4.weight", (0, 6)) in path[:-1] for path in paths
        )
        assert ps.paths.basis_values(network, skeleton)["2.bias"].isnan().tolist() == [
            False,
            False,
            True,
        ]
    assert "2 of them incomplete" in repr(skeleton)


def test_a_network_of_zeros_has_no_skeleton():
    model = mlp(3, 4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    network = ps.trace(model, torch.zeros(1, 3))
    skeleton = choose(network)
    assert skeleton.incomplete == (0, 1, 2, 3)
    assert ps.paths.basis_paths(network, skeleton) == [
        (("2.bias", (0,)),),
        (("2.bias", (1,)),),
    ]


# --- weights on no path ---------------------------------------------------------------------------


class OneStep(torch.nn.Module):
    """Two layers on one pixel, of which convolutions see the middle alone, and channels that nobody reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            torch.nn.Conv2d(1, 4, 3, padding=1),
            torch.nn.Conv2d(2, 3, 3, padding=1),
        )
        self.out = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.second(self.first(x).relu()[:, :2]).relu().flatten(1))


@pytest.mark.parametrize("rule", RULES)
def test_weights_on_no_path_have_no_part_in_it(rule):
    network = ps.trace(OneStep(), torch.zeros(1, 1, 1, 1))
    skeleton = choose(network, rule)
    chosen = [e for e in (*skeleton.incoming, *skeleton.outgoing) if e is not None]
    assert {index[2:] for name, index in chosen if name != "out.weight"} == {(1, 1)}
    assert skeleton.incomplete == (2, 3)
    listed = ps.paths.enumerate_paths(network)
    found = ps.paths.basis_paths(network, skeleton)
    assert set(found) <= set(listed.edges)
    rank = ps.paths.path_rank(ps.paths.path_jacobian(network, listed))
    assert len(found) == rank == ps.paths.degrees_of_freedom(network) == 4 + 6 + 3 + 6 + 2 - 5
    values = ps.paths.basis_values(network, skeleton)
    assert sum(int((~v.isnan()).sum()) for v in values.values()) == rank + 5  # and A_c B_c at O(c)
    expression = ps.paths.express(network, skeleton, listed)
    assert torch.equal(expression.exponents @ expression.counts, listed.counts)


# --- errors ---------------------------------------------------------------------------------------


def test_impossible_requests_are_refused():
    case = BY_NAME["mlp"]
    _, network = traced(case)
    with pytest.raises(ValueError, match="'largest', 'cyclic' or 'random'"):
        ps.paths.skeleton(network, "best")
    other = trace(BY_NAME["rnn"], BY_NAME["rnn"].model())
    with pytest.raises(ValueError, match="another network"):
        ps.paths.basis_paths(other, choose(network))
    tied = trace(BY_NAME["tied characters"], BY_NAME["tied characters"].model())
    with pytest.raises(ValueError, match="both directions"):
        ps.paths.basis_paths(tied, choose(tied))


def test_edges_chosen_by_hand_are_checked():
    case = BY_NAME["rnn"]
    _, network = traced(case)
    skeleton = choose(network)
    again = ps.paths.Skeleton.from_edges(network, skeleton.incoming, skeleton.outgoing)
    assert torch.equal(again.edges, skeleton.edges)
    assert torch.equal(again.starts, skeleton.starts)
    into, out_of = list(skeleton.incoming), list(skeleton.outgoing)
    with pytest.raises(ValueError, match="one edge for each of the 3 classes"):
        ps.paths.Skeleton.from_edges(network, into[:2], out_of)
    with pytest.raises(ValueError, match="does not enter class 0"):
        ps.paths.Skeleton.from_edges(network, [into[1], *into[1:]], out_of)
    circle = [("rnn.weight_hh_l0", (0, 1)), ("rnn.weight_hh_l0", (1, 0)), into[2]]
    with pytest.raises(ValueError, match="leads back to no input"):
        ps.paths.Skeleton.from_edges(network, circle, out_of)
    apart = ps.trace(OneStep(), torch.zeros(1, 1, 1, 1))
    corner = [("first.weight", (0, 0, 0, 0)), *[None] * 6]
    with pytest.raises(ValueError, match="on no path"):
        ps.paths.Skeleton.from_edges(apart, corner, [None] * 7)
    with pytest.raises(KeyError):
        ps.paths.Skeleton.from_edges(network, [("nothing", (0,)), *into[1:]], out_of)
