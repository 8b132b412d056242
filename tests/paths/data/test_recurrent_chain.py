"""Recurrent layers with a readout: the short way to the data-dependent kappa gives what the general one gives."""

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, half, traced
from pathspace.paths.data import edge_statistics
from pathspace.paths.data.chain_terms import chain_terms
from pathspace.paths.data.data_dependent import Request, kappa_terms
from pathspace.replay.chain import chain_of, chain_pass
from pathspace.replay.replay import replay


class Reader(nn.Module):
    """``nn.RNN`` and a readout of what ``read`` takes from what it returns."""

    def __init__(self, read, readout_bias=True, **options):
        super().__init__()
        self.rnn = nn.RNN(4, 5, nonlinearity="relu", **options)
        self.out, self.read = nn.Linear(5, 3, bias=readout_bias), read

    def forward(self, x):
        return self.out(self.read(*self.rnn(x)))


def every(out, last):
    return out


def last_of_first(out, last):
    return out[:, -1]


def last_state(out, last):
    return last[-1]


def made(read, count, steps, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Reader(read, **options).double()
        shape = (count, steps, 4) if options.get("batch_first") else (steps, count, 4)
        x = torch.randn(shape, dtype=torch.float64)
    return model, x, ps.trace(model, x, batch_dim=0 if options.get("batch_first") else 1)


def followed(network, x):
    return chain_pass(network, chain_of(network), x)


FORMS = [
    (last_of_first, {"batch_first": True}),
    (every, {"num_layers": 2, "bias": False}),
    (last_state, {"num_layers": 3, "readout_bias": False}),
    (every, {"batch_first": True}),
]


SIZES = [(0.5, 7, 6), (1.0, 7, 6), (0.3, 70, 3), (0.5, 1, 2), (0.5, 4, 1)]  # alpha, examples, steps


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("form", "sharing", "statistic", "sizes"),
    half(FORMS, ["parameters", "edges"], ["second_moment", "covariance"], SIZES),
)
def test_both_terms_are_those_of_any_network(form, sharing, statistic, sizes):
    (read, options), (alpha, count, steps) = form, sizes
    _, x, network = made(read, count, steps, **options)
    request, names = (
        Request(alpha, statistic, sharing, "signs", part=True),
        list(network.parameters),
    )
    seen = followed(network, x)
    ours = chain_terms(seen, request, torch.Generator().manual_seed(3), names)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    for name in names:
        assert_close(ours.data[name], theirs.data[name], rtol=1e-12, atol=1e-15)
        zero = torch.zeros_like(ours.data[name])
        assert_close(ours.kappa(name, zero, 1.0), theirs.kappa(name, zero, 1.0), rtol=1e-12, atol=0)
        assert ours.data[name].is_contiguous()
    assert len({t.data_ptr() for t in ours.data.values()}) == len(names)


def test_what_cudnn_says_of_weights_in_several_pieces_of_memory_is_kept_from_the_user(monkeypatch):
    run = torch.rnn_relu

    def as_on_a_gpu(*args):
        warnings.warn(
            "RNN module weights are not part of single contiguous chunk of memory. This means they need to be "
            "compacted at every call, possibly greatly increasing memory usage.",
            stacklevel=2,
        )
        return run(*args)

    monkeypatch.setattr(torch, "rnn_relu", as_on_a_gpu)
    _, x, network = made(every, 6, 5, num_layers=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seen = followed(network, x)
    assert seen is not None
    assert len(seen.states) == 2
    assert said == []


def test_nodes_whose_weight_is_below_all_numbers_have_no_signs_drawn():
    model, x, network = made(last_state, 5, 40)
    with torch.no_grad():
        model.rnn.weight_hh_l0.mul_(1e-6)
    request, names = Request(0.5, "second_moment", "parameters", "signs"), list(network.parameters)
    ours = chain_terms(followed(network, x), request, torch.Generator().manual_seed(3), names)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    for name in names:
        assert_close(ours.data[name], theirs.data[name], rtol=1e-12, atol=0)


def test_examples_are_taken_a_few_at_a_time(monkeypatch):
    _, x, network = made(every, 6, 3)
    seen, found = followed(network, x), []
    for chunk in (2**19, 50):
        monkeypatch.setattr(edge_statistics, "CHUNK", chunk)
        request = Request(0.5, "covariance", "parameters", "signs")
        terms = chain_terms(
            seen, request, torch.Generator().manual_seed(3), list(network.parameters)
        )
        found.append(terms.data)
    assert_close(*found, rtol=1e-13, atol=1e-16)


def test_a_wrong_gate_is_seen():
    """A planted fault: gradients that pass through closed units."""
    _, x, network = made(every, 6, 3)
    seen, found = followed(network, x), []
    for open_units in (False, True):
        if open_units:
            seen.states = [h.abs() + 1 for h in seen.states]
        request = Request(1.0, "second_moment", "parameters", "signs")
        terms = chain_terms(seen, request, torch.Generator().manual_seed(3), ["rnn.bias_ih_l0"])
        found.append(terms.data["rnn.bias_ih_l0"])
    assert not torch.allclose(*found)


# -- which networks, and which passes --------------------------------------------------------------


@pytest.mark.parametrize("case", ZOO, ids=str)
@pytest.mark.sample(30)
def test_only_recurrent_layers_with_a_readout_are_taken_for_them(case):
    found = chain_of(traced(case, torch.float64)[1])
    assert (found is not None) == (case.name in RECOGNISED)


RECOGNISED = [
    "rnn",
    "rnn without bias",
    "rnn time first",
    "rnn every step",
    "stacked rnn",
    "stacked rnn with dropout",
    "rnn final state",
]


def test_what_is_read_is_told_apart():
    forms = [
        (every, True),
        (last_of_first, False),
        (last_state, False),
        (lambda out, _: out[:, 0], None),
    ]
    forms += [(lambda out, _: torch.relu(out), None), (lambda out, _: out[:, 1:], None)]
    forms += [(lambda out, _: out.flip(2)[:, -1], None), (lambda _, last: last[0], False)]
    for read, expected in forms:
        found = chain_of(made(read, 3, 4, batch_first=True)[2])
        assert (found and found.every) is expected
    stacked = made(lambda _, last: last[0], 3, 4, num_layers=2)[2]
    assert chain_of(stacked) is None
    assert chain_of(made(lambda _, last: last.sum(0), 3, 4)[2]) is None


def test_movements_of_what_enters_belong_to_it():
    model, x, _ = made(last_of_first, 3, 4, batch_first=True)
    whole = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 4)), model)
    network = ps.trace(whole, x)
    seen = followed(network, x)
    assert torch.equal(seen.x, x.transpose(0, 1))


class Hand(nn.Module):
    """A recurrent layer and a readout, with something else in between."""

    def __init__(self, between, layers=1):
        super().__init__()
        self.rnn = nn.RNN(4, 5, layers, nonlinearity="relu", dropout=0.5 if layers > 1 else 0)
        self.out, self.between = nn.Linear(5, 3), between

    def forward(self, x):
        return self.out(self.between(self, x))


def _plain(model, x):
    return model.rnn(x)[0][-1]


def _from_a_state(model, x):
    return model.rnn(x, x.new_ones(1, x.shape[1], 5))[0][-1]


def _another_step(model, x):
    return model.rnn(x)[0][0]


def _scaled(model, x):
    return model.rnn(x)[0][-1] * 1


def _detached(model, x):
    return model.rnn(x)[0].detach()[-1]


def _in_place(model, x):
    h = model.rnn(x)[0]
    with torch.no_grad():
        h.mul_(2)
    return h[-1]


def _input_overwritten(model, x):
    h = model.rnn(x)[0][-1]
    x.zero_()
    return h


def _without_gradients(model, x):
    with torch.no_grad():
        return model.rnn(x)[0][-1]


def _twice(model, x):
    model.rnn(x)
    return model.rnn(x)[0][-1]


def _fewer_steps(model, x):
    return model.rnn(x[1:])[0][-1]


def _fewer_examples(model, x):
    return model.rnn(x[:, 1:])[0][-1]


def _rounded(model, x):
    return model.rnn(x.int().double())[0][-1]


def _centred(model, x):
    return model.rnn(x.sub_(x.mean(0)))[0][-1]


@pytest.mark.parametrize("between", [_plain, _fewer_steps, _rounded, _centred])
def test_what_is_done_to_inputs_is_seen(between):
    x = 3 * torch.randn(6, 4, 4, dtype=torch.float64)
    network = ps.trace(Hand(between).double(), x, batch_dim=1)
    request, names = Request(0.5, "covariance", "parameters", "signs"), list(network.parameters)
    seen = chain_pass(network, chain_of(network), x)
    ours = chain_terms(seen, request, torch.Generator().manual_seed(3), names)
    theirs = kappa_terms(network, replay(network, x), request, torch.Generator().manual_seed(3))
    assert_close(ours.data, theirs.data, rtol=1e-12, atol=1e-15)


def test_a_state_that_is_given_with_the_data_is_left_to_a_replay():
    class Given(Hand):
        def forward(self, x, h):
            return self.out(self.rnn(x, h)[0][-1])

    x, h = torch.randn(6, 4, 4, dtype=torch.float64), torch.zeros(1, 4, 5, dtype=torch.float64)
    network = ps.trace(Given(None).double(), (x, h), batch_dim=1)
    assert chain_pass(network, chain_of(network), (x, h)) is not None
    assert chain_pass(network, chain_of(network), (x, h + 1)) is None
