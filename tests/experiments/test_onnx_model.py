"""`pathspace check-scale FILE.onnx`: files that onnx writes, converted by onnx2torch."""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli import app
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.model_source import load_onnx


@pytest.fixture
def onnx():
    """The package; onnx2torch is there too, and torchvision need not be."""
    reason = "needs onnx and onnx2torch: pip install -e '.[onnx]'"
    if importlib.util.find_spec("onnx2torch") is None:
        pytest.skip(reason)
    return pytest.importorskip("onnx", reason=reason)


@pytest.fixture
def written(onnx, tmp_path):
    """Write an MLP 4-8-3 as an ONNX file; returns the file, and the same as a module."""
    from onnx import TensorProto, helper, numpy_helper

    def write(batch="batch", features=4, *, as_nodes=False):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
        weights = [numpy_helper.from_array(np.array(value), name) for name, value in arrays.items()]
        nodes = [
            helper.make_node("Gemm", ["x", "0.weight", "0.bias"], ["a"], transB=1),
            helper.make_node("Relu", ["a"], ["h"]),
            helper.make_node("Gemm", ["h", "2.weight", "2.bias"], ["y"], transB=1),
        ]
        if as_nodes:
            constants = [
                helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in weights
            ]
            nodes, weights = [*constants, *nodes], []
        ends = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size])]
            for name, size in (("x", features), ("y", 3))
        ]
        graph = helper.make_graph(nodes, "mlp", *ends, weights)
        file = tmp_path / "mlp.onnx"
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8),
            file,
        )
        return file, model

    return write


@pytest.mark.parametrize("as_nodes", [False, True])
def test_a_file_has_the_scales_of_its_module(written, as_nodes):
    file, model = written(as_nodes=as_nodes)
    loaded, examples = load_onnx(file, None)
    assert torch.equal(loaded(examples), model(examples))
    found = ps.rescaling.imbalance(ps.trace(loaded, examples))
    assert torch.allclose(found.scales, ps.rescaling.imbalance(ps.trace(model, examples)).scales)


def test_the_command_reads_it(written):
    file, _ = written(features="features")
    open_size = CliRunner().invoke(app, ["check-scale", str(file)])
    assert open_size.exit_code == 2
    assert "give the shape of one example" in open_size.output
    given = CliRunner().invoke(app, ["check-scale", str(file), "--input", "4"])
    assert given.exit_code == 0, given.output
    assert "span a factor of" in given.output
    wrong = CliRunner().invoke(app, ["check-scale", str(file), "--input", "5"])
    assert wrong.exit_code == 2
    assert "5 features enter a weight for 4" in wrong.output


def test_says_what_is_no_onnx_file(onnx, tmp_path):
    file = tmp_path / "text.onnx"
    file.write_text("no network\n" * 9)
    with pytest.raises(ConfigurationError, match="is no ONNX file"):
        load_onnx(file, None)


def test_says_what_is_missing(monkeypatch, tmp_path):
    with pytest.raises(ConfigurationError, match="There is no file"):
        load_onnx(tmp_path / "none.onnx", None)
    file = tmp_path / "some.onnx"
    file.touch()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigurationError, match=r"needs the package 'onnx'.*\.\[onnx\]"):
        load_onnx(file, None)


def test_an_input_of_another_size_is_the_user_s_mistake(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef build(): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())\n"
    )
    result = CliRunner().invoke(app, ["check-scale", f"{file}:build", "--input", "5"])
    assert result.exit_code == 2
    assert "mistake in pathspace" not in result.output
