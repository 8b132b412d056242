from typing import Any

import pytest
import torch

import pathspace as ps
from experiments.conftest import asked
from pathspace.experiments import models
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.models import (
    MODELS,
    OF_IMAGES,
    OF_SYMBOLS,
    RESCALABLE,
    build_model,
    check_model,
    count_weights,
)
from pathspace.experiments.tasks import OWN


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted({*MODELS} - {*OF_IMAGES, *OF_SYMBOLS, OWN}))
@pytest.mark.parametrize("output", ["last", "every"])
@pytest.mark.parametrize("embedding", [0, 3])
def test_models_map_symbols_to_outputs_of_the_right_shape(
    name: str, output: str, embedding: int
) -> None:
    options = {"hidden": 6, "layers": 2, "output": output, "embedding": embedding}
    model = build_model(name, 5, 4, options)
    symbols = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(0))
    assert model(symbols).shape == ((2, 7, 4) if output == "every" else (2, 4))
    assert count_weights(name, 5, 4, options) == sum(p.numel() for p in model.parameters())
    if not embedding:
        assert torch.equal(model(symbols), model(torch.eye(5)[symbols]))
    if name in RESCALABLE:
        assert ps.trace(model, symbols).num_classes == 12 + embedding
    else:
        with pytest.raises(ps.network.UntraceableError):
            ps.trace(model, symbols, strict=True)


def test_one_hot_symbols_and_numbers_have_the_same_kappa() -> None:
    model = build_model("relu-rnn", 5, 4, {"hidden": 6, "output": "every"})
    symbols = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(0))
    one, other = (
        ps.paths.kappa(ps.trace(model, example)) for example in (symbols, torch.eye(5)[symbols])
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_known_numbers_of_weights() -> None:
    # H (D + H + 2) + K (H + 1), the gates four times
    assert count_weights("relu-rnn", 1, 10, {"hidden": 100}) == 100 * (1 + 100 + 2) + 1010
    assert count_weights("lstm", 1, 10, {"hidden": 100}) == 4 * 100 * (1 + 100 + 2) + 1010


def test_the_identity_start_keeps_what_it_has_read() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model("relu-rnn", 2, 1, {"hidden": 50, "start": "identity"})
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters["rnn.weight_hh_l0"], torch.eye(50))
    assert not parameters["rnn.bias_ih_l0"].any()
    assert not parameters["readout.bias"].any()
    assert parameters["rnn.weight_ih_l0"].std().item() == pytest.approx(0.001, rel=0.3)
    assert parameters["readout.weight"].std().item() == pytest.approx(0.001, rel=0.3)


def test_the_identity_may_stand_beside_pytorchs_input_and_output_weights() -> None:
    def parameters(start: str) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return dict(
                build_model(
                    "relu-rnn", 2, 3, {"hidden": 5, "start": start, "layers": 2}
                ).named_parameters()
            )

    default, ours = parameters("default"), parameters("identity-recurrent")
    for name, parameter in ours.items():
        if "weight_hh" in name:
            assert torch.equal(parameter, torch.eye(5))
        elif "bias" in name:
            assert not parameter.any()
        else:
            assert torch.equal(parameter, default[name])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relu-rnn", {"start": "uniform", "start_limit": 0.3}),
        ("tanh-rnn", {"start": "uniform", "start_limit": 0.3}),
        ("lstm", {"start": "uniform", "start_limit": 0.3}),
        # P16: Section 5.2, and the two of Section 5.3
        ("relu-rnn", {"start": "identity-uniform", "start_limit": 0.01}),
        ("relu-rnn", {"start": "uniform", "start_limit": 0.2, "recurrent_limit": 0.01}),
        ("lstm", {"start": "orthogonal-uniform", "start_limit": 0.01}),
    ],
)
def test_uniform_starts_fill_their_ranges(name: str, options: dict[str, Any]) -> None:
    model = build_model(name, 50, 50, {"hidden": 40, **options})
    for key, parameter in model.named_parameters():
        limit = options["start_limit"]
        if "weight_hh" in key:
            limit = options.get("recurrent_limit", limit)
            for gate in parameter.split(40):
                if options["start"].startswith("identity"):
                    assert torch.equal(gate, torch.eye(40))
                elif options["start"].startswith("orthogonal"):
                    torch.testing.assert_close(gate @ gate.T, torch.eye(40))
        if "bias" in key:
            assert not parameter.any()
        elif "weight_hh" not in key or options["start"] == "uniform":
            assert 0.9 * limit < parameter.abs().max() <= limit
            assert parameter.std().item() == pytest.approx(limit / 3**0.5, rel=0.2)


def test_the_np_rnn_is_a_relu_network_from_the_positive_definite_start() -> None:
    settings = asked({"methods": ["np-rnn-sgd"], "starts": ["default"]})
    name, options = settings.model_of("np-rnn-sgd")
    matrix = dict(build_model(name, 2, 3, options).named_parameters())["rnn.weight_hh_l0"]
    assert name == "relu-rnn"
    assert torch.linalg.eigvalsh(matrix.detach())[-1].item() == pytest.approx(1, abs=1e-5)


def test_the_positive_definite_start_keeps_one_direction_and_shrinks_all_others() -> None:
    model = build_model(
        "relu-rnn", 2, 3, {"hidden": 200, "layers": 2, "start": "positive-definite"}
    )
    parameters = dict(model.named_parameters())
    for layer in range(2):
        matrix = parameters[f"rnn.weight_hh_l{layer}"].detach()
        torch.testing.assert_close(matrix, matrix.T)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert eigenvalues[-1].item() == pytest.approx(1, abs=1e-5)
        # those of R^T R / H lie between 0 and 4 (Marchenko and Pastur), so these begin at 1 / (1 +
        # 4)
        assert eigenvalues[0].item() == pytest.approx(1 / 5, rel=0.1)
        assert eigenvalues.mean().item() == pytest.approx(2 / 5, rel=0.1)
        assert not parameters[f"rnn.bias_hh_l{layer}"].any()
        assert 0.9 * 200**-0.5 < parameters[f"rnn.weight_ih_l{layer}"].abs().max() <= 200**-0.5


def test_the_orthogonal_start_is_orthogonal_for_every_gate() -> None:
    model = build_model("lstm", 2, 3, {"hidden": 6, "layers": 2, "start": "orthogonal"})
    for key, parameter in model.named_parameters():
        if "weight_hh" in key:
            assert len(parameter.split(6)) == 4
            for gate in parameter.split(6):
                torch.testing.assert_close(gate @ gate.T, torch.eye(6))
        assert bool(parameter.any()) is ("bias" not in key)


def test_gates_of_the_chrono_start_stay_open_for_up_to_its_memory() -> None:
    model = build_model("lstm", 2, 3, {"hidden": 500, "layers": 2, "start": "chrono", "memory": 30})
    parameters = dict(model.named_parameters())
    for layer in range(2):
        of_input, of_forget, cell, output = parameters[f"rnn.bias_ih_l{layer}"].split(500)
        torch.testing.assert_close(of_input, -of_forget)
        # a state is multiplied by the sigmoid of the forget bias: that of log(t - 1) is 1 - 1/t
        steps = 1 / (1 - of_forget.sigmoid())
        assert 2 <= steps.min() < 3
        assert 29 < steps.max() <= 30.001
        assert steps.mean().item() == pytest.approx(16, rel=0.1)
        assert not cell.any()
        assert not output.any()
        assert not parameters[f"rnn.bias_hh_l{layer}"].any()
        assert parameters[f"rnn.weight_hh_l{layer}"].abs().max() <= 500**-0.5


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "lstm",
            {"start": "chrono", "memory": 1},
            "'memory' of the model 'lstm' is 1: give 2 or more",
        ),
        (
            "relu-rnn",
            {"start": "chrono"},
            "choose from default, identity, identity-recurrent, identity-uniform, positive-definite",
        ),
        (
            "gru",
            {},
            "Unknown model 'gru' in the setting 'model': choose from relu-rnn, tanh-rnn, lstm",
        ),
        (
            "lstm",
            {"start": "identity"},
            "choose from default, orthogonal, orthogonal-uniform, chrono, uniform",
        ),
        ("tanh-rnn", {"start": "identity"}, "choose from default, uniform"),
        ("mlp", {"start": "uniform"}, "Unknown option 'start'"),
        (
            "relu-rnn",
            {"start": "zero"},
            "choose from default, identity, identity-recurrent, identity-uniform, positive-definite",
        ),
        (
            "lstm",
            {"start": "uniform", "start_limit": 0},
            "'start_limit' of the model 'lstm' is 0: give more than 0",
        ),
        ("relu-rnn", {"start": "uniform", "recurrent_limit": -1}, "is -1: give 0 or more"),
        (
            "lstm",
            {"start": "uniform", "start_limit": 10**400},
            "'start_limit' of the model 'lstm' is 1000+: give",
        ),
        ("relu-rnn", {"output": 1}, "choose from last, every"),
        ("relu-rnn", {"embedding": -1}, "give 0 or more"),
        ("relu-rnn", {"layers": 0}, "give 1 or more"),
        ("relu-rnn", {"layers": True}, "a whole number"),
        ("transformer", {"gate": "relu"}, "choose from swiglu, squared-relu"),
        (
            "transformer",
            {"output": "last"},
            "Unknown value 'last' .* choose from every",
        ),
    ],
)
def test_impossible_models_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_model(name, options)


def test_the_feed_forward_network_reads_each_step_by_itself() -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    every = build_model("mlp", 5, 2, {"hidden": 6, "output": "every"})
    last = build_model("mlp", 5, 2, {"hidden": 6})
    last.load_state_dict(every.state_dict())
    assert torch.equal(last(x), last(x[:, -1:]))
    torch.testing.assert_close(every(x)[:, -1], last(x))


@pytest.mark.parametrize("gate", ["swiglu", "squared-relu"])
def test_the_transformer_sees_what_comes_before_and_not_what_follows(gate: str) -> None:
    model = build_model("transformer", 5, 4, {"hidden": 16, "layers": 2, "heads": 2, "gate": gate})
    symbols = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(0))
    scores = model(symbols)
    assert scores.shape == (2, 7, 4)
    changed = symbols.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 5
    moved = (model(changed) - scores).abs().amax(dim=(0, 2))
    assert not moved[:4].any()
    assert (moved[4:] > 1e-4).all()


@pytest.mark.parametrize("gate", ["swiglu", "squared-relu"])
def test_the_transformer_is_rescaled_without_rounding(gate: str) -> None:
    torch.manual_seed(0)
    model = build_model("transformer", 5, 4, {"hidden": 16, "layers": 2, "heads": 2, "gate": gate})
    symbols = torch.randint(5, (2, 7))
    network, scores = ps.trace(model, symbols), model(symbols)
    # by layer at least: queries and keys by pairs of dimensions, values, what a norm leaves (twice)
    assert network.num_classes >= 2 * (8 + 16 + 2 * 16)
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert torch.equal(model(symbols), scores)


def test_the_turns_of_a_rotary_embedding_see_distances_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 9, 8)
    turns = models._turns(9, 4, query)
    scores = (models._turned(query, turns) @ models._turned(key, turns).mT)[0, 0]
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-6, atol=1e-6)


def test_heads_that_do_not_part_the_width_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'hidden' .* is 20: with 4 heads, .* a multiple of 8"
    ):
        build_model("transformer", 5, 4, {"hidden": 20, "heads": 4})


def test_a_model_of_symbols_is_refused_other_tasks() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'transformer' reads symbols, .* set task to characters or words"
    ):
        asked({"task": "adding", "model": "transformer", "model_options": {"output": "every"}})
