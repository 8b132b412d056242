"""Packed sequences: every length opens its own paths, and all of them count.

Two oracles: the list of paths found by probing (see ``oracles.enumerated``), and a graph that is
written down by hand, in which one path stands for all the lengths that open it.

Functions take the model, the states and the last states, and what the model was called with.
"""
# ruff: noqa: ARG005

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import pathspace as ps
from cases import slow_besides
from oracles import enumerated
from oracles.graph import Graph, kappa1, kappa2, squared_path_norm

DOUBLE = {"dtype": torch.float64}


class Reader(nn.Module):
    """A recurrent layer on packed sequences, and what is made of its packed states and its last ones."""

    def __init__(self, function, width=2, hidden=2, options=None, **layer):
        super().__init__()
        self.rnn = nn.RNN(2, hidden, nonlinearity="relu", batch_first=True, **layer, **DOUBLE)
        self.out = nn.Linear(width, 1, **DOUBLE)
        self.second = nn.RNN(2, 2, nonlinearity="relu", **DOUBLE) if function is twice else None
        self.options, self._function = options or {"enforce_sorted": False}, function

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, **self.options)
        return self._function(self, *self.rnn(packed, *self.starts(x)), x, lengths)

    def starts(self, _):
        return ()


class Started(Reader):
    """One whose layer begins with a learned state, the same for all sequences."""

    def __init__(self, function, **layer):
        super().__init__(function, **layer)
        self.start = nn.Parameter(torch.zeros(self.rnn.num_layers, 1, 2, **DOUBLE))

    def starts(self, x):
        return (self.start.expand(-1, len(x), -1).contiguous(),)


def both_ends(m, states, last, x, n):
    return m.out(torch.cat([last[-2], last[-1]], 1))


def mean_of_valid(m, states, last, x, n):
    padded, lengths = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
    return m.out(padded.sum(1) / lengths[:, None])


def largest(m, states, last, x, n):
    padded = pad_packed_sequence(
        states, batch_first=True, padding_value=-torch.inf, total_length=x.shape[1]
    )[0]
    return m.out(padded.amax(1))


def twice(m, states, last, x, n):
    """The states go through a ReLU as rows, and through another layer."""
    return m.out(m.second(states._replace(data=states.data.relu()))[1][-1])


def every_step(m, states, last, x, n):
    return pad_packed_sequence(
        states._replace(data=m.out(states.data)), batch_first=True, total_length=4
    )[0]


# name: (model, classes)
CASES = {
    "last state": (lambda: Reader(lambda m, y, h, x, n: m.out(h[-1])), 2),
    "last state, sorted": (lambda: Reader(lambda m, y, h, x, n: m.out(h[-1]), options={"enforce_sorted": True}), 2),
    "last state without biases": (lambda: Reader(lambda m, y, h, x, n: m.out(h[-1]), bias=False), 2),
    "from a learned start": (lambda: Started(lambda m, y, h, x, n: m.out(h[-1])), 2),
    "two layers": (lambda: Reader(lambda m, y, h, x, n: m.out(h[-1]), num_layers=2, bias=False), 4),
    "both directions": (lambda: Reader(both_ends, width=4, bidirectional=True), 4),
    "two layers, both directions": (
        lambda: Reader(both_ends, width=2, hidden=1, num_layers=2, bidirectional=True, bias=False), 4),
    "mean of valid steps": (lambda: Reader(mean_of_valid), 2),
    "mean of valid steps, both directions": (
        lambda: Reader(mean_of_valid, width=2, hidden=1, bidirectional=True), 2),
    "largest": (lambda: Reader(largest), 2),
    "two layers apart": (lambda: Reader(twice, bias=False), 4),
    "every step": (lambda: Reader(every_step), 2),
    "every step, two layers from a learned start": (lambda: Started(every_step, num_layers=2, bias=False), 4),
}  # fmt: skip


def made(name):
    build, classes = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = build(), torch.randn(3, 3, 2, **DOUBLE)
        for p in model.parameters():
            nn.init.uniform_(p, -0.4, 0.8)  # units that are alive
    lengths = torch.tensor([3, 2, 2] if model.options["enforce_sorted"] else [2, 1, 3])
    return model, (x, lengths), classes


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_is_the_sum_over_its_paths_and_has_their_kappa(name):
    enumerated.check_paths(*made(name))


@pytest.mark.parametrize("name", CASES)
def test_rescaling_is_bitwise_invisible(name):
    model, inputs, _ = made(name)
    enumerated.check_rescaling(model, inputs, [])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_besides([*CASES][::3], CASES))
def test_optimizers_do_not_see_a_rescaling(name):
    model, inputs, _ = made(name)
    enumerated.check_rescaling(model, inputs, [
        lambda p, n: ps.optim.PathSGD(p, n, lr=0.01, momentum=0.9, second_term=True),
        lambda p, n: ps.optim.GSGD(p, n, lr=0.01),
    ])  # fmt: skip


def by_hand(steps, hidden, bidirectional):
    """Every path that some length opens, once: forward states of any step are the last ones, backward of the first."""
    graph, number = Graph(), {}
    one = graph.node(is_input=True)
    below = [[graph.node(is_input=True) for _ in range(2)] for _ in range(steps)]
    out = graph.node(is_output=True)

    def edge(source, target, *key):
        graph.edge(source, target, number.setdefault(key, len(number)))

    for direction in range(1 + bidirectional):
        before = []
        for t in reversed(range(steps)) if direction else range(steps):
            now = [graph.node() for _ in range(hidden)]
            for row, target in enumerate(now):
                for column, source in enumerate(below[t]):
                    edge(source, target, "weight_ih", direction, row, column)
                for column, source in enumerate(before):
                    edge(source, target, "weight_hh", direction, row, column)
                edge(one, target, "bias_ih", direction, row)
                edge(one, target, "bias_hh", direction, row)
                if not direction or t == 0:
                    edge(target, out, "out", 0, 0, direction * hidden + row)
            before = now
    edge(one, out, "out bias", 0, 0)
    return graph, number


@pytest.mark.parametrize("bidirectional", [False, True])
def test_has_the_kappa_of_the_paths_that_its_lengths_open(bidirectional):
    model, inputs, _ = made("both directions" if bidirectional else "last state")
    graph, number = by_hand(3, 2, bidirectional)
    parameters = dict(model.named_parameters())

    def place(part, direction, *index):
        if part.startswith("out"):
            return parameters["out.bias" if "bias" in part else "out.weight"], index[
                : 1 if "bias" in part else 2
            ]
        return parameters[f"rnn.{part}_l0{'_reverse' * direction}"], index

    keys = sorted(number, key=number.__getitem__)
    weights = [place(*key)[0][place(*key)[1]].item() for key in keys]
    network = ps.trace(model, inputs)
    names = {id(p): name for name, p in network.parameters.items()}
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(
        squared_path_norm(graph, weights), rel=1e-12
    )
    first, both = ps.paths.kappa(network), ps.paths.kappa(network, second_term=True)
    for key, one, two in zip(keys, kappa1(graph, weights), kappa2(graph, weights), strict=True):
        parameter, index = place(*key)
        assert first[names[id(parameter)]][index].item() == pytest.approx(one, rel=1e-12), key
        assert both[names[id(parameter)]][index].item() == pytest.approx(one + two, rel=1e-12), key


class WholeLength(nn.Module):
    """Lengths that are the number of steps are none."""

    def __init__(self, packs):
        super().__init__()
        self.rnn, self.out = (
            nn.RNN(2, 3, 2, nonlinearity="relu", **DOUBLE),
            nn.Linear(3, 1, **DOUBLE),
        )
        self.packs = packs

    def forward(self, x):
        given = (
            pack_padded_sequence(x, [x.shape[0]] * x.shape[1], enforce_sorted=False)
            if self.packs
            else x
        )
        states, last = self.rnn(given)
        states = pad_packed_sequence(states)[0] if self.packs else states
        return self.out(states.sum(0) + last[0])


def test_constant_lengths_are_the_number_of_steps():
    torch.manual_seed(0)
    packs = WholeLength(True)
    plain = WholeLength(False)
    plain.load_state_dict(packs.state_dict())
    x = torch.randn(4, 2, 2, **DOUBLE)
    networks = [ps.trace(m, x) for m in (packs, plain)]
    assert networks[0].num_classes == networks[1].num_classes == 3
    ours, theirs = (ps.paths.kappa(n, second_term=True) for n in networks)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=0)


def test_a_sequence_of_the_batch_does_not_matter_to_the_trace():
    """What lengths and numbers of examples there are is read from data, never from the example input."""
    model, (x, lengths), _ = made("both directions")
    one = ps.paths.kappa(ps.trace(model, (x, lengths)))
    other = ps.paths.kappa(ps.trace(model, (x[:2], torch.tensor([1, 1]))))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Gated(nn.Module):
    """A gated layer, at which the network is cut, on packed sequences between two hidden layers."""

    def __init__(self, layer, sort, **options):
        super().__init__()
        self.read, self.rnn = (
            nn.Linear(2, 3, **DOUBLE),
            layer(3, 2, batch_first=True, **options, **DOUBLE),
        )
        self.hidden, self.out = nn.Linear(2, 4, **DOUBLE), nn.Linear(4, 1, **DOUBLE)
        self.sort = sort

    def forward(self, x, lengths):
        packed = pack_padded_sequence(
            self.read(x).relu(), lengths, batch_first=True, enforce_sorted=not self.sort
        )
        states, last = self.rnn(packed)
        last = last[0] if isinstance(last, tuple) else last
        padded = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0]
        return self.out(self.hidden(padded[..., :2].sum(1) + last[-1]).relu())


GATED = [
    (nn.LSTM, True, {}),
    (nn.GRU, False, {"num_layers": 2}),
    (nn.LSTM, True, {"bidirectional": True}),
]


@pytest.mark.parametrize(("layer", "sort", "options"), GATED)
def test_is_cut_at_gated_layers(layer, sort, options):
    torch.manual_seed(0)
    model, lengths = Gated(layer, sort, **options), torch.tensor([1, 3, 2] if sort else [3, 2, 1])
    inputs = torch.randn(3, 3, 2, **DOUBLE), lengths
    network = ps.trace(model, inputs)
    assert (network.num_classes, network.call.batch_dim) == (4, 0)
    assert [str(cut.operation) for cut in network.cuts] == [layer.__name__.lower()]
    assert set(network.parameters) == {
        f"{n}.{p}" for n in ("read", "hidden", "out") for p in ("weight", "bias")
    }
    enumerated.check_rescaling(model, inputs, [lambda p, n: ps.optim.PathAdam(p, n, lr=0.01)])


def test_says_that_a_layer_on_packed_sequences_cannot_stay_outside():
    inputs = torch.randn(3, 3, 2, **DOUBLE), torch.tensor([3, 2, 1])
    with pytest.raises(ps.UntraceableError, match=r"'rnn'.*left outside.*depends on values"):
        ps.trace(Gated(nn.LSTM, True), inputs, outside=["rnn"])


REFUSED = {
    "lengths in the code": (
        lambda m, x, n: m.rnn(pack_padded_sequence(x, [3, 2, 1], batch_first=True))[1][-1], "argument of forward"),
    "lengths as a list": (
        lambda m, x, n: m.rnn(pack_padded_sequence(x, n.tolist(), batch_first=True))[1][-1], "depends on the data"),
    "padded with ones": (
        lambda m, x, n: pad_packed_sequence(m.rnn(pack_padded_sequence(
            x, n, batch_first=True, enforce_sorted=False))[0], padding_value=1.0)[0], "pads with the constant 1.0"),
    "a packed argument": (lambda m, x, n: m.rnn(PackedSequence(x[0], torch.ones(3, dtype=torch.long)))[1][-1],
        "not packed in the model's own forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_is_wrong(name):
    function, message = REFUSED[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(2, 2, nonlinearity="relu", batch_first=True, **DOUBLE)

        def forward(self, x, n):
            return function(self, x, n)

    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(Model(), (torch.randn(3, 3, 2, **DOUBLE), torch.tensor([2, 1, 3])))


@pytest.mark.parametrize("given", [lambda p: p, lambda p: (p,), lambda p: {"input": p}])
def test_sequences_that_come_packed_are_to_be_packed_inside(given):
    packed = pack_padded_sequence(torch.randn(3, 2, 2, **DOUBLE), torch.tensor([3, 2]))
    with pytest.raises(
        ValueError, match=r"holds a PackedSequence.*takes the tensors, and makes it of them"
    ):
        ps.trace(nn.RNN(2, 2, nonlinearity="relu", **DOUBLE), given(packed))


def test_quantities_on_data_say_that_sequences_are_packed():
    model, inputs, _ = made("last state")
    network = ps.trace(model, inputs)
    with pytest.raises(ValueError, match=r"packed by their lengths.*pad them"):
        ps.paths.data_dependent_norm(network, inputs, alpha=0.5)
