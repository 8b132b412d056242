"""Chains of linear maps and ReLUs: the short way to the data-dependent kappa gives what the general one gives."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, half, traced
from pathspace.paths.data.chain_terms import chain_terms
from pathspace.paths.data.data_dependent import Request, kappa_terms
from pathspace.paths.data.node_measure import spread_of
from pathspace.replay.chain import ChainWitness, chain_of, chain_pass
from pathspace.replay.replay import replay


def chain(bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6, bias=bias), nn.ReLU(True), nn.Linear(6, 3)]
        return nn.Sequential(nn.Flatten(), *layers).double()


def followed(model, network, x, statistic="second_moment"):
    summary = functools.partial(spread_of, statistic=statistic)
    with ChainWitness(network, chain_of(network), summary, network.parameters, len(x)) as witness:
        result = model(x)
    return witness.finish(result)


NAMES = list(dict(chain().named_parameters()))


def inputs(count):
    return torch.randn(count, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    ("count", "statistic", "alpha", "bias", "sharing"),
    half([1, 2, 7, 70], ["second_moment", "covariance"], [0.3, 1.0], [True, False], ["parameters", "edges"]),
)
def test_both_terms_are_those_of_any_network(count, statistic, alpha, bias, sharing):
    part = not bias
    model, x = chain(bias), inputs(count)
    network = ps.trace(model, x)
    request, names = Request(alpha, statistic, sharing, "signs", part=part), list(network.parameters)
    seen = followed(model, network, x, statistic)
    ours = chain_terms(seen, request, torch.Generator().manual_seed(3), names)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    assert ours.path.keys() == theirs.path.keys()
    for name in names:
        assert_close(ours.data[name], theirs.data[name], rtol=1e-12, atol=1e-15)
        zero = torch.zeros_like(ours.data[name])
        assert_close(ours.kappa(name, zero, 1.0), theirs.kappa(name, zero, 1.0), rtol=1e-12, atol=0)


def test_a_wrong_mask_is_seen():
    """A planted fault: gradients that pass through closed units."""
    model, x = chain(), inputs(7)
    network = ps.trace(model, x)
    request, seen = Request(0.5, "second_moment", "parameters", "signs"), followed(model, network, x)
    found = []
    for open_units in (False, True):
        if open_units:
            seen.states = [h.abs() + 1 for h in seen.states]
        terms = chain_terms(seen, request, torch.Generator().manual_seed(3), NAMES)
        found.append(terms.data["1.bias"])
    assert not torch.allclose(*found)


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_only_chains_are_taken_for_chains(case):
    model, network = traced(case, torch.float64)
    found = chain_of(network)
    is_chain = found is not None and not found.recurrent
    names = {type(m) for m in model.modules()}
    assert is_chain <= (names <= {nn.Sequential, nn.Linear, nn.ReLU, nn.Flatten})
    assert is_chain or case.name != "mlp"


def test_movements_of_what_enters_belong_to_a_chain():
    model = chain()
    found = chain_of(ps.trace(model, inputs(2)))
    assert [cell.weight for cell in (*found.cells, found.readout)] == ["1.weight", "3.weight", "5.weight"]


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(5, 5), nn.Linear(5, 3)],  # a node without an activation
        lambda: [nn.Linear(5, 3), nn.ReLU()],
        lambda: [nn.Linear(5, 4), nn.LeakyReLU(), nn.Linear(4, 3)],
        lambda: [nn.Linear(5, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)],
        lambda: [nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)],
        lambda: [nn.ZeroPad1d(1), nn.Linear(7, 3)],
    ],
)
def test_other_layers_make_no_chain(layers):
    assert chain_of(ps.trace(nn.Sequential(*layers()).double(), inputs(2))) is None


class Hand(nn.Module):
    """Two layers by hand, with something else in between."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(5, 4), nn.Linear(4, 3), between

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.last(self.between(self, x, h))


def _nothing(*given):
    return given[2]


def _in_place(_, x, h):
    with torch.no_grad():
        h.mul_(2)
    return h


def _without_gradients(model, x, h):
    with torch.no_grad():
        return F.relu(model.first(x))


def _input_overwritten(_, x, h):
    x.zero_()
    return h


@pytest.mark.parametrize(
    "between",
    [
        lambda *_: _[2] + 0,
        lambda *_: _[2].detach(),
        lambda *_: torch.zeros_like(_[2]),
        _in_place,
        _without_gradients,
        _input_overwritten,
    ],
)
def test_a_pass_that_does_more_is_not_taken_for_the_chain(between):
    model = Hand(_nothing).double()
    x = inputs(4).flatten(1)
    network = ps.trace(model, x)
    assert followed(model, network, x) is not None
    model.between = between
    assert followed(model, network, x) is None


def test_reading_and_unrelated_operations_do_not_matter():
    def between(_, x, h):
        assert h.shape[0] == len(x)
        x.mean()
        return h

    model, x = Hand(between).double(), inputs(4).flatten(1)
    assert followed(model, ps.trace(model, x), x) is not None


@pytest.mark.parametrize(
    "before",
    [
        lambda x: x,
        lambda x: x.sub_(0.5),
        lambda x: x.long().to(x.dtype),
        lambda x: x.flip(1)[:, [0, 0, 1, 2, 3]],
        lambda x: F.normalize(x),
    ],
)
def test_what_is_done_to_inputs_is_seen(before):
    class Prepared(Hand):
        def forward(self, x):
            return self.last(F.relu(self.first(before(x))))

    x = 3 * inputs(4).flatten(1)
    network = ps.trace(Prepared(None).double(), x)
    request, names = Request(0.5, "covariance", "parameters", "signs"), list(network.parameters)
    seen = chain_pass(network, chain_of(network), x, functools.partial(spread_of, statistic="covariance"))
    ours = chain_terms(seen, request, torch.Generator().manual_seed(3), names)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    assert_close(ours.data, theirs.data, rtol=1e-12, atol=1e-15)


def test_passes_end_as_the_model_ends_them():
    """Nothing of a pass is left over: it is not broken off."""
    running = []

    class Counts(Hand):
        def forward(self, x):
            running.append(self)
            result = self.last(F.relu(self.first(x)))
            running.pop()
            return result

    x = inputs(4).flatten(1)
    network = ps.trace(Counts(None).double(), x)
    assert chain_pass(network, chain_of(network), x, lambda z, _: z) is not None
    assert not running
