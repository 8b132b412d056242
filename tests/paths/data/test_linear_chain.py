"""Chains of linear maps and ReLUs: the short way to the data-dependent kappa gives what the general one gives."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, half, traced
from pathspace.paths.data import chain_terms as module
from pathspace.paths.data.chain import chain_of
from pathspace.paths.data.chain_terms import chain_terms
from pathspace.paths.data.data_dependent import Request, kappa_terms
from pathspace.replay.replay import first_reading, replay


def chain(bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6, bias=bias), nn.ReLU(True), nn.Linear(6, 3)]
        return nn.Sequential(nn.Flatten(), *layers).double()


def terms_of(network, x, request, names=None):
    """What the short way gives, by the signs of one generator."""
    form = chain_of(network)
    reading = first_reading(network, x, form.layers[0].weight)
    entering, names = form.entered(reading), names or list(network.parameters)
    return chain_terms(form, entering, reading.leaves, request, torch.Generator().manual_seed(3), names, {})


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
    ours = terms_of(network, x, request)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    assert ours.path.keys() == theirs.path.keys()
    for name in names:
        assert_close(ours.data[name], theirs.data[name], rtol=1e-12, atol=1e-15)
        zero = torch.zeros_like(ours.data[name])
        assert_close(ours.kappa(name, zero, 1.0), theirs.kappa(name, zero, 1.0), rtol=1e-12, atol=0)


def test_a_wrong_mask_is_seen(monkeypatch):
    """A planted fault: gradients that pass through closed units."""
    network, x, run = ps.trace(chain(), inputs(7)), inputs(7), module._run
    request, found = Request(0.5, "second_moment", "parameters", "signs"), []

    def all_open(*args):
        seen = run(*args)
        seen.states = [h.abs() + 1 for h in seen.states]
        return seen

    for fault in (run, all_open):
        monkeypatch.setattr(module, "_run", fault)
        found.append(terms_of(network, x, request, ["1.bias"]).data["1.bias"])
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
        return self.last(self.between(self, x))


def _plain(model, x):
    return F.relu(model.first(x))


def _added_to(model, x):
    return _plain(model, x) + 0


def _detached(model, x):
    return _plain(model, x).detach()


def _in_place(model, x):
    h = _plain(model, x)
    with torch.no_grad():
        h.mul_(2)
    return h


def _reading(model, x):
    h = _plain(model, x)
    assert h.shape[0] == len(x)
    x.mean()
    return h


def _by_name(model, x):
    return F.linear(input=x - 0.5, weight=model.first.weight, bias=model.first.bias).relu()


CHAINS = [
    _plain,
    _reading,
    _by_name,
    lambda model, x: _plain(model, x.sub_(0.5)),
    lambda model, x: _plain(model, x.long().to(x.dtype)),
    lambda model, x: _plain(model, x.flip(1)[:, [0, 0, 1, 2, 3]]),
    lambda model, x: _plain(model, F.normalize(x)),
]
OTHERS = [_added_to, _detached, _in_place]


@pytest.mark.parametrize("between", [*CHAINS, *OTHERS])
def test_what_else_a_model_does_is_seen_or_makes_it_no_chain(between):
    x = 3 * inputs(4).flatten(1)
    network = ps.trace(Hand(between).double(), x)
    assert (chain_of(network) is not None) == (between in CHAINS)
    if between in CHAINS:
        request = Request(0.5, "covariance", "parameters", "signs")
        theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
        assert_close(terms_of(network, x, request).data, theirs.data, rtol=1e-12, atol=1e-15)
