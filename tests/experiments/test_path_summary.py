"""`pathspace paths`: models by name and from files, the numbers, the picture, and errors."""

import io
import json
import re
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import pathspace as ps
from cases import half, slow_besides
from pathspace.cli import app
from pathspace.experiments.diagnosis import print_summary, summarize
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.report.reduction_figure import draw_reduction, reduction_figure

MODEL = """
import torch
from torch import nn

def alone():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))

def both():
    return alone(), torch.randn(20, 2)

def nothing():
    return 3

def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))

made = alone()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["paths", *arguments])


def test_a_built_in_network_as_json_and_picture(tmp_path: Path) -> None:
    result = call("mlp", "--json", "--picture", str(tmp_path / "mlp.png"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    # by hand: 6-12-10-4 with biases
    assert found["weights"] == 6 * 12 + 12 + 12 * 10 + 10 + 10 * 4 + 4
    assert found["classes"] == 22
    assert found["paths"] == 6 * 12 * 10 * 4 + 12 * 10 * 4 + 10 * 4 + 4
    assert (
        found["basis_paths"]
        == found["rank"]
        == found["degrees_of_freedom"]
        == found["weights"] - 22
    )
    assert found["degrees_on_data"] <= found["rank"]
    assert 0 < found["multipliers"][0] <= found["multipliers"][1] <= found["multipliers"][2]
    assert (tmp_path / "mlp.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.png"]


def test_the_table_of_a_model_in_a_file(file: Path) -> None:
    result = call(f"{file}:alone", "--input", "2")
    assert result.exit_code == 0, result.output
    assert "unit classes" in result.output
    assert "256 examples" in result.output
    assert "20 examples" in call(f"{file}:both").output


def test_what_was_not_computed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(model: nn.Module, limit: int) -> str:
        stream = io.StringIO()
        print_summary(
            "", summarize(model, torch.randn(9, 2), limit=limit)[0], Console(file=stream, width=200)
        )
        return stream.getvalue()

    def between(middle: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), middle, nn.ReLU(), nn.Linear(3, 2))

    assert "from all paths" in told(between(nn.Identity()), 20)  # 2 * 3 * 2 + 3 * 2 + 2
    assert "not computed: more than 19 paths (--limit)" in told(between(nn.Identity()), 19)
    normalized = told(between(nn.LayerNorm(3)), 20)
    assert "not written out; 'layer_norm': it divides by a statistic" in normalized
    assert "not computed: paths are not written out" in normalized
    monkeypatch.setattr("pathspace.experiments.diagnosis.LARGEST_JACOBIAN", 100)
    assert "not computed: the path-Jacobian is too large" in told(between(nn.Identity()), 20)


@pytest.mark.filterwarnings("always:the network has no unit class")
def test_a_warning_is_one_line_without_a_place_in_the_code(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\ndef build(): return torch.nn.Linear(2, 1)\n")
    result = call(f"{tmp_path / 'model.py'}:build", "--input", "2", "--quiet")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Warning: the network has no unit class")


def test_brackets_in_names_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "my [red] model.py").write_text(MODEL)
    picture = tmp_path / "a [b].png"
    result = call(f"{tmp_path / 'my [red] model.py'}:both", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    assert "my [red] model.py:both" in " ".join(result.output.split())
    assert f"Picture: {picture}" in result.output


@pytest.mark.filterwarnings("ignore:the network has no unit class")
def test_dollars_in_a_name_are_no_formula_in_the_picture() -> None:
    _, network, skeleton = summarize(nn.Linear(1, 1), torch.ones(2, 1))
    assert draw_reduction(network, skeleton, "my$_{model$.py:build").startswith(b"\x89PNG")


def test_brackets_in_the_names_of_cut_modules_are_no_markup() -> None:
    model = nn.Sequential(OrderedDict({"first": nn.Linear(2, 3), "a[red]": nn.Sigmoid()}))
    stream = io.StringIO()
    print_summary("", summarize(model, torch.randn(9, 2))[0], Console(file=stream, width=120))
    assert "in 'a[red]'" in stream.getvalue()


def test_a_module_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert call("my_model:both").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "choose from mlp, cnn"),
        (["weights.pt"], "could run code"),
        (["{file}:missing"], "has no function 'missing'"),
        (["{file}:alone"], "--input 28,28"),
        (["{file}:both", "--input", "2"], "leave out --input"),
        (["mlp", "--input", "3"], "leave out --input"),
        (["{file}"], "names no function: give one"),
        (["{file}:nothing"], "Expected an nn.Module"),
        (["{file}:made"], "is a model: give a function that returns it"),
        (
            ["{file}:images", "--input", "8"],
            "Give --input the shape of one example, such as 3,32,32",
        ),
        (["no_such_file.py:build"], "There is no file"),
        (["no_such_module:build"], "There is no module"),
        (["mlp", "--rule", "best"], "largest, cyclic, random"),
        (["mlp", "--picture", "mlp.txt"], "ends in .png"),
        (["mlp", "--input", "1,x"], "separated by commas, such as 28,28"),
        (["{file}:alone", "--input", "0"], "whole numbers"),
    ],
)
def test_errors_say_what_to_do(file: Path, arguments: list[str], says: str) -> None:
    result = call(*(argument.format(file=file) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package_of_mine", "needs the package 'no_such_package_of_mine', which is not installed"),
        ("def build(:", r"failed: SyntaxError: .*\(model.py, line 1\)"),
        ("def build(width): pass", r"failed: TypeError: .*'width'. Give a function that takes no arguments"),
        ("def build():\n  raise OSError('no such weights')", r"OSError: no such weights \(line 2 of .*model.py\)"),
        ("def build():\n  raise SystemExit('not here')", r"SystemExit: not here \(line 2 of .*model.py\)"),
        ("import torch\ndef build(): return torch.nn.Linear(3, 2)", "does not take such an example.*2 features"),
        ("import torch\ndef build(): return torch.nn.Linear(2, 2, device='meta')", "on the meta device"),
        ("import torch\ndef build(): return torch.nn.Embedding(9, 2)", "integer type.*for tokens return a pair"),
    ],
)  # fmt: skip
def test_code_that_fails_says_where(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "model.py").write_text(code + "\n")
    result = call(f"{tmp_path / 'model.py'}:build", "--input", "2")
    assert result.exit_code == 2, result.output
    assert re.search(says, result.output.replace("\n", " ")), result.output
    assert "Traceback" not in result.output


def test_a_file_may_have_dataclasses_whose_annotations_are_text(tmp_path: Path) -> None:
    lines = "from __future__ import annotations", "from dataclasses import dataclass", MODEL
    (tmp_path / "model.py").write_text(
        "\n".join((*lines, "@dataclass", "class Sizes:", "    width: int = 3"))
    )
    result = call(f"{tmp_path / 'model.py'}:both", "--json")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("source", ["sub/m.py:alone", "m:alone"])
def test_code_may_go_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "m", raising=False)
    before = [*sys.path]
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, tmp_path / "sub"):
        folder.mkdir()
    for file in (tmp_path / "sub" / "m.py", tmp_path / "m.py"):
        file.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{MODEL}")
    result = CliRunner().invoke(app, ["paths", source, "--input", "2", "--picture", "it.png"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "it.png").exists()
    assert sys.path == before


def test_what_a_model_prints_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"print('built', flush=True)\n{MODEL}")
    result = call(f"{tmp_path / 'model.py'}:both", "--json")
    assert json.loads(result.stdout)["examples"] == 20
    assert "built" in result.stderr


def test_a_model_written_for_a_single_example(tmp_path: Path) -> None:
    """As files of ONNX are whose batch is fixed at one."""
    path = tmp_path / "single.py"
    path.write_text(
        "import torch\nclass Single(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(3, 2)\n"
        "    def forward(self, x):\n"
        "        return self.b(torch.relu(self.a(x)).reshape(2, 3))\n"
        "def build():\n    return Single(), torch.ones(1, 4)\n"
        "def pair():\n    return Single(), torch.ones(2, 4)\n"
    )
    for command in ("check-scale", "paths"):
        result = CliRunner().invoke(app, [command, f"{path}:build"])
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(app, [command, f"{path}:pair"])
        assert result.exit_code == 2
        assert "the model's own forward fails" in result.output


def test_drawn_examples_have_the_type_of_the_weights(tmp_path: Path) -> None:
    model = "import torch\ndef build(): return torch.nn.Linear(2, 2, dtype=torch.float64)"
    (tmp_path / "model.py").write_text(model)
    result = call(f"{tmp_path / 'model.py'}:build", "--input", "2", "--json")
    assert result.exit_code == 0, result.output


@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize("examples", [torch.zeros(0, 2), torch.full((3, 2), torch.nan)])
def test_examples_without_finite_outputs_are_refused(examples: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match="outputs are not finite, or there are none"):
        summarize(nn.Linear(2, 2), examples)


def test_dead_units_and_multipliers_of_a_tiny_model() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0], [0.5]]))
        model[2].weight.copy_(torch.tensor([[4.0, 1.0]]))
    positive = torch.rand(30, 1) + 0.1
    summary, network, skeleton = summarize(model, positive)
    # one edge in, one out: all four weights are in the skeleton
    assert summary.multipliers is None
    assert (summary.dead_units, summary.basis_paths, summary.rank) == (0, 2, 2)
    assert summary.degrees_on_data == 1  # the function of positive inputs is one slope
    assert summarize(model, -positive)[0].dead_units == 2
    assert draw_reduction(network, skeleton, "tiny").startswith(b"\x89PNG")
    with_bias = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        with_bias[0].weight.fill_(2.0)
        with_bias[2].weight.fill_(4.0)
    # the first bias steps with 1 / (1 * 4)^2, the second with 1
    assert summarize(with_bias, positive)[0].multipliers == (1 / 16, 1 / 16, 1.0)


def test_a_network_without_a_basis_still_has_numbers() -> None:
    result = call("tied-embedding", "--json")
    found = json.loads(result.stdout)
    assert found["basis_paths"] is None
    assert found["multipliers"] is None
    assert found["degrees_of_freedom"] > 0


@pytest.mark.slow
def test_multipliers_beyond_all_numbers_are_null(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(
        "from torch import nn\n"
        "def long():\n"
        "    layers = [layer for _ in range(22) for layer in (nn.Linear(2, 2, bias=False), nn.ReLU())]\n"
        "    model = nn.Sequential(*layers, nn.Linear(2, 2))\n"
        "    for p in model.parameters():\n"
        "        p.data.fill_(1e-8)\n"
        "    return model\n"
    )
    result = call(f"{tmp_path}/deep.py:long", "--input", "2", "--json")
    assert result.exit_code == 0, result.output
    assert None in json.loads(result.stdout)["multipliers"]


def test_a_model_without_classes_is_drawn() -> None:
    network = ps.trace(nn.Linear(2, 3), torch.zeros(1, 2))
    assert draw_reduction(network, ps.paths.skeleton(network), "one layer").startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_with_many_classes_is_drawn() -> None:
    network = ps.trace(
        nn.Sequential(nn.Linear(2, 60), nn.ReLU(), nn.Linear(60, 1)), torch.zeros(1, 2)
    )
    assert draw_reduction(network, ps.paths.skeleton(network), "wide").startswith(b"\x89PNG")


def test_operations_at_which_the_network_is_cut_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    summary, network, _ = summarize(model, torch.zeros(4, 2))
    assert summary.cuts == ("'tanh' in '3'",)
    assert summary.rank == summary.degrees_of_freedom == 25 - network.num_classes == 22


def test_side_effects_are_named() -> None:
    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else -super().forward(x)

    with pytest.raises(ConfigurationError, match="depends on the data"):
        summarize(Branch(2, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("recurrent", [False, True])
def test_only_recurrent_networks_are_drawn_with_recurrent_edges(recurrent: bool) -> None:
    mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    network = ps.trace(ReluRNN(2, 1, hidden=3) if recurrent else mlp, torch.zeros(1, 4, 2))
    (legend,) = reduction_figure(network, ps.paths.skeleton(network), "").legends
    assert any("recurrent" in text.get_text() for text in legend.get_texts()) == recurrent


@pytest.mark.parametrize(
    ("layers", "units", "cuts"),
    slow_besides(
        [(1, 2, 6), (2, 60, 0), (2, 2, 1), (5, 60, 1)], half([1, 2, 5], [2, 60], [0, 1, 6])
    ),
)
@pytest.mark.sample(2)
def test_names_and_legend_of_the_picture_lie_inside_it_and_apart(
    layers: int, units: int, cuts: int
) -> None:
    inner = [part for _ in range(layers - 1) for part in (nn.Linear(units, units), nn.ReLU())]
    cutting = [nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Softmax(-1), nn.Mish()][:cuts]
    ends = [part for activation in cutting for part in (nn.Linear(units, units), activation)]
    model = nn.Sequential(nn.Linear(2, units), nn.ReLU(), *inner, *ends, nn.Linear(units, 2))
    network = ps.trace(model, torch.zeros(1, 2))
    figure = reduction_figure(
        network, ps.paths.skeleton(network), "a_folder/" * 30 + "model.py:build"
    )
    figure.draw_without_rendering()
    texts = [*figure.texts, *figure.axes[0].texts]
    boxes = [text.get_window_extent() for text in texts if text.get_text()] + [
        legend.get_window_extent() for legend in figure.legends
    ]
    whole = figure.bbox
    assert len(boxes) == 1 + 3 + layers + 1 + min(cuts, 4)
    assert sum("cut at" in text.get_text() for text in texts) == min(cuts, 4)
    for number, box in enumerate(boxes):
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1
        assert whole.y0 <= box.y0
        assert box.y1 <= whole.y1
        assert not any(box.overlaps(other) for other in boxes[:number])
