"""How far a network is from balance, as a table, a figure and a number."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pathspace as ps
from cases import BY_NAME, mlp, traced


def network_of(*widths):
    torch.manual_seed(0)
    return ps.trace(mlp(*widths), torch.zeros(1, widths[0]))


@pytest.mark.parametrize("name", ["mlp", "cnn 1d", "layer norm", "stacked rnn"])
def test_scales_are_what_balance_divides_by(name):
    network = traced(BY_NAME[name], torch.float64)[1]
    ps.rescaling.balance_(network)
    assert ps.rescaling.imbalance(network).spread == pytest.approx(1.0, rel=1e-6)
    factors = ps.rescaling.random_rescale_(network, 1e-2, 1e2)
    found = ps.rescaling.imbalance(network)
    torch.testing.assert_close(found.scales, factors, rtol=1e-6, atol=0)
    ends = factors.log().quantile(torch.tensor([0.05, 0.95]).double()).exp()
    assert found.spread == pytest.approx((ends[1] / ends[0]).item(), rel=1e-6)


def test_says_which_layer_and_which_classes():
    network = network_of(4, 20, 20, 2)
    ps.rescaling.balance_(network)
    factors = torch.ones(40, dtype=torch.float64)
    factors[20:] = 30.0
    factors[3] = 1e4
    ps.rescaling.rescale_(network, factors)
    found = ps.rescaling.imbalance(network)
    assert [layer.name for layer in found.layers] == ["linear in '0'", "linear in '2'"]
    assert [layer.median for layer in found.layers] == pytest.approx([1.0, 30.0], rel=1e-4)
    assert found.worst[0] == ("linear in '0'[3]", pytest.approx(1e4, rel=1e-4))
    assert found.spread == pytest.approx(30.0, rel=1e-3)
    assert "linear in '2'       20        30        30        30     0" in str(found)
    assert str(found).endswith(
        "5 to 95 % of the unit classes span a factor of 30: the network is far from balance: what rounding and plain "
        "optimizers do depends on scales that the function ignores."
    )


def test_dead_units_are_counted_apart():
    network = network_of(4, 20, 2)
    with torch.no_grad():
        network.parameters["2.weight"][:, 5] = 0
        network.parameters["0.weight"][7] = 0
        network.parameters["0.bias"][7] = 0
    found = ps.rescaling.imbalance(network)
    assert found.dead == ("linear in '0'[5]", "linear in '0'[7]")
    assert found.layers[0].dead == 2
    assert not {name for name, _ in found.worst} & set(found.dead)


def test_draws_every_class():
    figure = ps.rescaling.imbalance(network_of(4, 20, 20, 2)).figure()
    drawn = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 20]
    assert len(drawn) == 2


def test_refuses_a_network_without_units():
    network = ps.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(
        ValueError, match="expected a network with unit classes, but nothing in it can be rescaled"
    ):
        ps.rescaling.imbalance(network)


MODEL = """
import torch
def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))
    return model, torch.zeros(1, 4)
"""


def test_from_the_command_line(tmp_path):
    from pathspace.cli import app

    file, saved, picture = tmp_path / "model.py", tmp_path / "weights.pt", tmp_path / "scales.png"
    file.write_text(MODEL)
    model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    network = ps.trace(model, torch.zeros(1, 4))
    ps.rescaling.balance_(network)
    ps.rescaling.random_rescale_(network, 1e-3, 1e3)
    torch.save(model.state_dict(), saved)
    words = ["check-scale", f"{file}:build", "--weights", str(saved), "--picture", str(picture)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert str(ps.rescaling.imbalance(network)) in result.output
    assert f"Picture: {picture}" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, [*words[:4], "--json"])
    assert f'"spread": {ps.rescaling.imbalance(network).spread}' in result.output


def test_the_command_says_what_is_wrong_with_weights(tmp_path):
    from pathspace.cli import app

    other, text, number = tmp_path / "other.pt", tmp_path / "text.pt", tmp_path / "number.pt"
    torch.save(nn.Linear(1, 1).state_dict(), other)
    text.write_text("no weights")
    torch.save(torch.zeros(1), number)
    word, nested = tmp_path / "word.pt", tmp_path / "nested.pt"
    word.write_text("hello")
    torch.save({"model": 3}, nested)
    cases = {
        word: "no state dict",
        nested: "no state dict",
        tmp_path / "none.pt": "no such file",
        other: "do not fit the model",
        text: "no state dict",
        number: "no state dict",
    }
    for weights, said in cases.items():
        result = CliRunner().invoke(app, ["check-scale", "mlp", "--weights", str(weights)])
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
        assert "weights_only" not in result.output


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_command_reads_weights_of_a_wrapped_model(tmp_path, prefix):
    from pathspace.cli import app

    file, plain, wrapped = (tmp_path / name for name in ("model.py", "plain.pt", "wrapped.pt"))
    file.write_text(MODEL)
    state = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2)).state_dict()
    torch.save(state, plain)
    torch.save({prefix + name: value for name, value in state.items()}, wrapped)
    words = ["check-scale", f"{file}:build", "--weights"]
    results = [CliRunner().invoke(app, [*words, str(weights)]) for weights in (plain, wrapped)]
    assert results[0].exit_code == 0
    assert results[1].output == results[0].output


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("1,3,8,8", "Give --input the shape of one example, such as 3,32,32"),
        ("7", "--input draws real numbers: for tokens return a pair (model, examples)"),
    ],
    ids=["a batch", "tokens"],
)
def test_the_command_says_what_is_wrong_with_an_input(tmp_path, shape, says):
    from pathspace.cli import app

    kind = "Conv2d(3, 4, 3)" if "," in shape else "Embedding(9, 4)"
    (tmp_path / "model.py").write_text(f"import torch\ndef build(): return torch.nn.{kind}\n")
    result = CliRunner().invoke(
        app, ["check-scale", f"{tmp_path / 'model.py'}:build", "--input", shape]
    )
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
