"""The stack and the language model against loops written out, and what of them is in the geometry."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from oracles.squared import Oracle

DROPS = {"input_dropout": 0.3, "hidden_dropout": 0.4, "output_dropout": 0.2, "weight_drop": 0.3}


def stack(**options):
    torch.manual_seed(0)
    return ps.nn.StackedReLURNN(3, [4, 5], **options).double()


def language_model(**options):
    torch.manual_seed(0)
    options = {"embedding": 4, "hidden": 5, "layers": 2, **options}
    return ps.nn.LanguageModel(7, **options).double()


def alive(model):
    """The same model without dead units: positive weights, and inputs that are positive."""
    for p in model.parameters():
        p.data.abs_().add_(0.01)
    return model


def by_hand(rnn, x, states=None):
    """relu(W_in x_t + b_in + W_rec h_{t-1} + b_rec), one step and one layer after the other."""
    ends = []
    for i, layer in enumerate(rnn.layers):
        w_in, w_rec, b_in, b_rec = layer.parameters()
        h = torch.zeros(x.shape[0], w_rec.shape[0], dtype=x.dtype) if states is None else states[i]
        steps = []
        for t in range(x.shape[1]):
            h = (x[:, t] @ w_in.T + b_in + h @ w_rec.T + b_rec).relu()
            steps.append(h)
        x = torch.stack(steps, 1)
        ends.append(h)
    return x, ends


@pytest.mark.parametrize("carried", [False, True])
def test_stack_is_the_recurrence(carried):
    rnn, x = stack(**DROPS).eval(), torch.randn(2, 6, 3, dtype=torch.float64)
    states = tuple(torch.rand(2, n, dtype=torch.float64) for n in (4, 5)) if carried else None
    outputs, ends = rnn(x, states)
    expected, expected_ends = by_hand(rnn, x, states)
    assert_close(outputs, expected)
    assert_close(list(ends), expected_ends)


def test_segments_with_carried_states_are_one_sequence():
    model, tokens = language_model().eval(), torch.randint(7, (2, 9))
    whole, _ = model(tokens)
    first, states = model(tokens[:, :4])
    second, _ = model(tokens[:, 4:], states)
    assert_close(torch.cat([first, second], 1), whole)
    assert not torch.allclose(model(tokens[:, 4:])[0], second)


def test_backpropagation_ends_at_the_start_of_a_segment():
    model, tokens = alive(language_model(tied=False)).eval(), torch.arange(7).unsqueeze(0)
    _, states = model(tokens[:, :4])
    assert not any(state.requires_grad for state in states)
    scores, _ = model(tokens[:, 4:], states)
    scores.square().sum().backward()
    assert model.embedding.weight.grad.any(1).tolist() == [False] * 4 + [True] * 3


def test_weight_drop_takes_weights_out_and_scales_the_others():
    rnn = stack(weight_drop=0.5).train()
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    before = copy.deepcopy(rnn.state_dict())
    torch.manual_seed(3)
    outputs, _ = rnn(x)
    outputs.square().sum().backward()
    gradients = [layer.weight_hh_l0.grad for layer in rnn.layers]
    # a weight that was left out has no gradient; the run is that of the others, twice as large
    masked = copy.deepcopy(rnn).eval()
    for layer, gradient in zip(masked.layers, gradients, strict=True):
        kept = gradient != 0
        assert 0.2 < kept.double().mean() < 0.8
        layer.weight_hh_l0.data *= 2 * kept
    assert_close(masked(x)[0], outputs)
    assert_close(rnn.state_dict(), before, rtol=0, atol=0)
    assert not torch.equal(rnn(x)[0], outputs)  # another mask at the next call


@pytest.mark.parametrize("name", ["input_dropout", "hidden_dropout", "output_dropout"])
def test_dropouts_leave_out_the_same_units_at_all_steps(name):
    rnn = alive(stack(**{name: 0.5})).train()
    entered = []
    for layer in rnn.layers:
        layer.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    outputs, _ = rnn(torch.rand(40, 6, 3, dtype=torch.float64) + 0.1)
    for place, x in (
        ("input_dropout", entered[0]),
        ("hidden_dropout", entered[1]),
        ("output_dropout", outputs),
    ):
        out = x == 0
        if place == name:
            assert 0.3 < out.double().mean() < 0.7
            assert torch.equal(out, out[:, :1].expand_as(out))
            assert not torch.equal(out[0], out[1]) or not torch.equal(out[0], out[2])
        else:
            assert not out.any()
    if name == "input_dropout":  # what is kept is divided by 1 - p
        assert (entered[0][entered[0] > 0] > 0.2).all()


@pytest.mark.parametrize("bias", [True, False])
def test_weight_drop_takes_tied_and_parametrized_weights(bias):
    """The parameters of such a layer are fewer than its weights, or stand in another order."""
    torch.manual_seed(0)
    dropped, plain = (
        ps.nn.StackedReLURNN(4, [4, 4], weight_drop=p, bias=bias).double().eval()
        for p in (0.4, 0.0)
    )
    plain.load_state_dict(dropped.state_dict())
    for rnn in (dropped, plain):
        rnn.layers[0].weight_ih_l0 = rnn.layers[0].weight_hh_l0
        nn.utils.parametrizations.weight_norm(rnn.layers[1], "weight_ih_l0")
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    assert_close(dropped(x)[0], plain(x)[0])
    dropped.train()(x)[0].square().sum().backward()
    assert all(p.grad is not None for p in dropped.parameters())


def test_embedding_dropout_leaves_out_whole_tokens():
    model = language_model(embedding_dropout=0.5).train()
    tokens = torch.arange(7).repeat(2, 3)
    x = model.embedding(tokens)
    zero = (x == 0).all(-1)
    assert torch.equal(zero[0, :7], zero[1, 7:14])
    assert zero.any()
    assert not zero.all()
    assert torch.equal((x == 0).any(-1), zero)
    assert_close(x[~zero], 2 * functional.embedding(tokens, model.embedding.weight)[~zero])


def test_tied_weights_are_one_parameter():
    model = language_model(layers=3, hidden=6)
    assert model.decoder.weight is model.embedding.weight
    assert model.rnn.hidden_sizes == (6, 6, 4)
    free = language_model(layers=3, hidden=6, tied=False)
    assert free.rnn.hidden_sizes == (6, 6, 6)
    again = language_model(layers=3, hidden=6)
    again.load_state_dict(model.state_dict())
    assert again.decoder.weight is again.embedding.weight


# --- geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_the_geometry_is_that_of_the_stack_without_drops(training):
    rnn = stack(**DROPS).train(training)
    state = torch.get_rng_state()
    network = ps.trace(rnn, torch.zeros(1, 6, 3, dtype=torch.float64))
    assert torch.equal(torch.get_rng_state(), state)
    assert network.num_classes == 4  # the last layer's units are outputs, whose scale is fixed
    plain = copy.deepcopy(rnn).eval()
    example = torch.zeros(1, 6, 3, dtype=torch.float64)
    oracle = Oracle(plain, example, call=lambda m, x: m(x), output=lambda out: out[0])
    assert_close(ps.paths.squared_path_norm(network), oracle.squared_path_norm())
    assert_close(ps.paths.kappa(network, second_term=True), oracle.kappa())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_states", [False, True])
def test_embedding_and_decoder_outside_leave_the_stack(training, with_states):
    model = language_model(embedding_dropout=0.3, **DROPS).train(training)
    tokens = torch.randint(7, (3, 6))
    example = (tokens, model(tokens)[1]) if with_states else tokens
    whole = ps.trace(model, example, outside=["embedding", "decoder"])
    alone = ps.trace(model.rnn, torch.zeros(1, 6, 4, dtype=torch.float64))
    assert set(whole.outside) == {"embedding.weight", "decoder.bias"}
    assert whole.num_classes == alone.num_classes == 5
    assert_close(
        {name.removeprefix("rnn."): value for name, value in ps.paths.kappa(whole).items()},
        ps.paths.kappa(alone),
    )


def test_everything_inside_ties_the_two_ends():
    model = language_model(layers=1)
    network = ps.trace(model, torch.randint(7, (2, 5)))
    assert network.num_classes == 4
    assert not network.outside


def trained(model, make_optimizer, factors=None, steps=20):
    """Scores along the way of a run with drops, segments and carried states."""
    network = ps.trace(model.rnn, torch.zeros(1, 4, 4))
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    optimizer = make_optimizer(model.parameters(), network)
    stream, states, seen = torch.arange(200).reshape(2, 100).remainder(7), None, []
    for step in range(steps):
        torch.manual_seed(step)
        part = stream[:, 4 * step : 4 * step + 5]
        scores, states = model(part[:, :-1], states)
        optimizer.zero_grad()
        functional.cross_entropy(scores.flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        seen.append(scores.detach())
    return torch.stack(seen)


@pytest.mark.parametrize("optimizer", ["PathSGD", "PathAdam"])
def test_training_with_drops_does_not_see_the_scale(optimizer):
    def make(parameters, network):
        return getattr(ps.optim, optimizer)(parameters, network, lr=0.01)

    model = language_model(embedding_dropout=0.2, layers=3, **DROPS).float()
    factors = 2.0 ** torch.randint(-6, 7, (10,))
    ours, rescaled = (
        trained(copy.deepcopy(model), make),
        trained(copy.deepcopy(model), make, factors),
    )
    assert torch.isfinite(ours).all()
    assert not torch.equal(ours[0], ours[-1])
    assert torch.equal(ours, rescaled)

    def sgd(parameters, network):
        return torch.optim.SGD(parameters, lr=0.01)

    assert not torch.allclose(
        trained(copy.deepcopy(model), sgd), trained(copy.deepcopy(model), sgd, factors), rtol=1e-3
    )


def test_embedding_and_decoder_take_the_plain_rule():
    model = language_model()
    other = copy.deepcopy(model)
    network = ps.trace(model.rnn, torch.zeros(1, 4, 4, dtype=torch.float64))
    path = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    tokens = torch.randint(7, (2, 5))
    for m, optimizer in ((model, path), (other, plain)):
        functional.cross_entropy(
            m(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        same = torch.equal(p, other.get_parameter(name))
        assert same == (not name.startswith("rnn."))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ps.nn.StackedReLURNN(3, []), "needs a layer"),
        (lambda: ps.nn.StackedReLURNN(3, [4, 0]), "positive sizes"),
        (
            lambda: ps.nn.StackedReLURNN(3, [4], weight_drop=1.0),
            r"weight_drop must be in \[0, 1\), got 1.0",
        ),
        (lambda: ps.nn.StackedReLURNN(3, [4.5]), r"whole: got 3 and \[4.5\]"),
        (lambda: ps.nn.StackedReLURNN("3", [4]), "whole: got 3"),
        (lambda: ps.nn.LanguageModel(0), "vocabulary must be a whole number, at least 1, got 0"),
        (
            lambda: ps.nn.LanguageModel("5"),
            "vocabulary must be a whole number, at least 1, got '5'",
        ),
        (lambda: ps.nn.LanguageModel(5, layers=0), "layers must be"),
        (lambda: ps.nn.LanguageModel(5, embedding_dropout=-0.1), "embedding_dropout must be"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_what_is_no_number_is_named():
    with pytest.raises(TypeError, match="weight_drop must be a number"):
        ps.nn.StackedReLURNN(3, [4], weight_drop="0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dropout must be a number, got None"):
        ps.nn.RecurrentCNN(1, 2, dropout=None)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="hidden_sizes must be a sequence, one size per layer, got None"
    ):
        ps.nn.StackedReLURNN(3, None)  # type: ignore[arg-type]


def test_number_of_states():
    with pytest.raises(ValueError, match="got 1 states for 2 layers"):
        stack()(torch.zeros(1, 2, 3).double(), (torch.zeros(1, 4).double(),))


def test_dropped_weights_of_any_module_are_edges():
    class DropConnect(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = functional.linear(
                x, functional.dropout(self.first.weight, 0.5, self.training)
            ).relu()
            return self.second(x)

    model = DropConnect()
    kappas = [
        ps.paths.kappa(ps.trace(model.train(mode), torch.zeros(1, 3))) for mode in (True, False)
    ]
    assert_close(kappas[0], kappas[1])
    assert set(kappas[0]) == {"first.weight", "second.weight", "second.bias"}


@pytest.mark.parametrize("training", [False, True])
def test_a_trace_of_either_form_can_be_followed_on_data(training):
    model, tokens = (
        language_model(embedding_dropout=0.3, **DROPS).train(training),
        torch.randint(7, (3, 6)),
    )
    network = ps.trace(model, tokens, outside=["embedding", "decoder"])
    found = ps.paths.data_dependent_kappa(network, tokens, alpha=0.5)
    plain = language_model()
    plain.load_state_dict(model.state_dict())
    network = ps.trace(plain, tokens, outside=["embedding", "decoder"])
    assert_close(found, ps.paths.data_dependent_kappa(network, tokens, alpha=0.5))
