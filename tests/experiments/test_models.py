from typing import Any

import pytest
import torch

import pathspace as ps
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.models import (
    MODELS,
    OF_IMAGES,
    OF_STREAMS,
    RESCALABLE,
    build_model,
    check_model,
    count_weights,
)


@pytest.mark.parametrize("name", sorted({*MODELS} - {*OF_IMAGES, *OF_STREAMS}))
@pytest.mark.parametrize("output", ["last", "every"])
@pytest.mark.parametrize("embedding", [0, 3])
def test_models_map_symbols_to_outputs_of_the_right_shape(name: str, output: str, embedding: int) -> None:
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
    one, other = (ps.paths.kappa(ps.trace(model, example)) for example in (symbols, torch.eye(5)[symbols]))
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
                build_model("relu-rnn", 2, 3, {"hidden": 5, "start": start, "layers": 2}).named_parameters()
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
    ("name", "options", "says"),
    [
        ("gru", {}, "Unknown model 'gru' in the setting 'model': choose from relu-rnn, tanh-rnn, lstm"),
        ("lstm", {"start": "identity"}, "Unknown option 'start'"),
        ("relu-rnn", {"start": "zero"}, "choose from default, identity, identity-recurrent"),
        ("relu-rnn", {"output": 1}, "choose from last, every"),
        ("relu-rnn", {"embedding": -1}, "a whole number from 0 on"),
        ("relu-rnn", {"layers": 0}, "a whole number from 1 on"),
        ("relu-rnn", {"layers": True}, "a whole number from 1 on"),
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
