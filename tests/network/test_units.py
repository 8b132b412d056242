"""Unit classes: their edges, their ties over time, space and skip connections."""

import numpy as np
import pytest
import torch

import pathspace as ps
from cases import BY_NAME, ZOO, of_each_kind, trace, traced


def test_an_operation_called_twice_by_one_module_makes_classes_of_two_names():
    class Thrice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.ones(1, 1) for _ in range(3)])

        def forward(self, x):
            for weight in self.weights[:2]:
                x = torch.nn.functional.linear(x, weight).relu()
            return torch.nn.functional.linear(x, self.weights[2])

    network = ps.trace(Thrice(), torch.zeros(1, 1))
    assert [c.name for c in network.unit_classes] == ["linear[0]", "linear (2)[0]"]


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_are_numbered_named_and_consistent(case):
    model, network = traced(case)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert isinstance(network.unit_classes, tuple)
    assert [c.index for c in network.unit_classes] == list(range(network.num_classes))
    names = [c.name for c in network.unit_classes]
    assert len(set(names)) == len(names)
    for unit_class in network.unit_classes:
        incoming, bias = unit_class.incoming, unit_class.bias
        assert incoming
        for edges in (incoming, unit_class.outgoing, bias):
            assert isinstance(edges, tuple)
            assert len(set(edges)) == len(edges)
            for name, index in edges:
                assert len(index) == len(shapes[name])
                assert all(0 <= i < n for i, n in zip(index, shapes[name], strict=True))
        assert set(bias) <= set(incoming)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "case", of_each_kind(case for case in ZOO if case.name != "tied characters"), ids=str
)
def test_edges_say_how_every_weight_scales(case):
    """Weight *= s_target / s_source, read from the edges alone, is what `rescale_` does.

    Tied embeddings have a test of their own: there a weight may be divided by one scale twice.
    """
    model, network = traced(case, torch.float64)
    exponent = torch.zeros(network.num_classes)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for unit_class in network.unit_classes:
        for p in model.parameters():
            p.data.fill_(1.0)
        exponent.zero_()[unit_class.index] = 1
        ps.rescaling.rescale_(network, 2.0 ** exponent.double())
        entering, leaving = set(unit_class.incoming), set(unit_class.outgoing)
        for name, p in model.named_parameters():
            for index, value in np.ndenumerate(p.detach().numpy()):
                edge = (name, index)
                assert value == 2.0 ** ((edge in entering) - (edge in leaving))
    model.load_state_dict(weights, strict=False)


def edges(name, *indices):
    return {(name, index) for index in indices}


def test_of_a_small_perceptron():
    network = trace(BY_NAME["mlp on sequences"], BY_NAME["mlp on sequences"].model())
    for row in range(4):
        (unit,) = (c for c in network.unit_classes if ("0.bias", (row,)) in c.bias)
        assert set(unit.bias) == edges("0.bias", (row,))
        assert set(unit.incoming) - set(unit.bias) == edges(
            "0.weight", (row, 0), (row, 1), (row, 2)
        )
        assert set(unit.outgoing) == edges("2.weight", (0, row), (1, row))


def test_of_a_recurrent_layer():
    network = trace(BY_NAME["rnn"], BY_NAME["rnn"].model())
    for row in range(3):
        (unit,) = (c for c in network.unit_classes if ("rnn.bias_ih_l0", (row,)) in c.bias)
        recurrent_in = edges("rnn.weight_hh_l0", *((row, k) for k in range(3)))
        incoming = set(unit.incoming) - set(unit.bias)
        assert incoming == edges("rnn.weight_ih_l0", (row, 0), (row, 1)) | recurrent_in
        recurrent_out = edges("rnn.weight_hh_l0", *((j, row) for j in range(3)))
        assert set(unit.outgoing) == edges("out.weight", (0, row), (1, row)) | recurrent_out
        assert set(unit.bias) == edges("rnn.bias_ih_l0", (row,)) | edges("rnn.bias_hh_l0", (row,))


def test_of_a_convolution_with_a_flattened_read_out():
    case = BY_NAME["cnn 1d"]
    _, network = traced(case)
    for channel in range(3):
        (unit,) = (c for c in network.unit_classes if ("0.bias", (channel,)) in c.bias)
        taps = ((channel, i, k) for i in range(2) for k in range(3))
        assert set(unit.incoming) - set(unit.bias) == edges("0.weight", *taps)
        # two positions are left after pooling, flattened channel by channel
        columns = (2 * channel, 2 * channel + 1)
        assert set(unit.outgoing) == edges(
            "4.weight", *((row, k) for row in range(2) for k in columns)
        )


def test_channels_added_by_a_skip_are_one_class():
    case = BY_NAME["deep residual"]
    _, network = traced(case)
    (stream,) = (c for c in network.unit_classes if ("embed.bias", (1,)) in c.bias)
    assert {("blocks.0.2.bias", (1,)), ("blocks.1.2.bias", (1,)), ("blocks.2.2.bias", (1,))} < set(
        stream.bias
    )
    assert ("head.weight", (0, 1)) in stream.outgoing
    assert ("blocks.1.0.weight", (4, 1)) in stream.outgoing


def test_normalised_channels_are_scaled_by_the_normalisation_alone():
    """The running mean is fixed, so the units before it keep their scale; gain and shift carry the class."""
    case = BY_NAME["batch norm"]
    _, network = traced(case)
    (unit,) = (c for c in network.unit_classes if ("features.1.bias", (2,)) in c.bias)
    assert set(unit.bias) == edges("features.1.bias", (2,))
    assert set(unit.incoming) - set(unit.bias) == edges("features.1.weight", (2,))
    assert set(unit.outgoing) == edges(
        "features.4.weight", *((o, 2, i, j) for o in range(4) for i in range(3) for j in range(3))
    )


def test_tied_embeddings_scale_inversely():
    """Column d of the matrix enters the network at one end and leaves it at the other."""
    case = BY_NAME["tied characters"]
    model, network = traced(case, torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    factors = torch.tensor([2.0, 4.0, 16.0], dtype=torch.float64)
    ps.rescaling.rescale_(network, factors)
    change = {name: p.detach() / before[name] for name, p in model.named_parameters()}
    s = change["embedding.weight"][0]  # scale of each embedding dimension, in the network's order
    assert set(torch.log2(s).abs().tolist()) == {1.0, 2.0, 4.0}
    assert (change["embedding.weight"] == s).all()
    # the hidden state that it is multiplied with has the inverse scale
    assert (change["rnn.bias_hh_l0"] == 1 / s).all()
    assert (change["rnn.weight_hh_l0"] == s / s[:, None]).all()
    assert (change["rnn.weight_ih_l0"] == 1 / (s * s[:, None])).all()
    assert (change["out.bias"] == 1).all()


def test_dead_weights_belong_to_a_class_or_stay():
    """A reversed recurrent matrix that one step never uses must not be scaled wrongly later."""
    case = BY_NAME["bidirectional rnn"]
    model, network = traced(case, torch.float64)
    assert ps.paths.kappa(network)["rnn.weight_hh_l0_reverse"].abs().max() == 0
    long = case.example(2, torch.float64)
    every = model.rnn(long)[0]
    before = model.out(every[:, 0])
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0))
    # the first step's output has gone through the reversed matrix
    torch.testing.assert_close(model.out(model.rnn(long)[0][:, 0]), before, rtol=1e-9, atol=1e-11)
