"""A network from an ONNX file, as a module; onnx2torch converts it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.experiments.errors import ConfigurationError
from pathspace.extras import missing_package

ENDING = ".onnx"
EXAMPLES = 8
"""How many examples are drawn where the file leaves the batch open."""


def load_onnx(file: Path, shape: Sequence[int] | None) -> tuple[nn.Module, Any]:
    """Return the network of a file, in evaluation form, and examples drawn for it.

    Args:
        file: Its path.
        shape: Of one example, for a file that leaves sizes open; None takes those of the file.

    Raises:
        ConfigurationError: There is no such file, a package is missing, an operator has no
            counterpart, or a size is neither in the file nor given.
    """
    if not file.is_file():
        raise ConfigurationError(f"There is no file {str(file)!r}: give the path of an ONNX file.")
    model, graph = _converted(file)
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    if shape is not None and len(inputs) > 1:
        names = ", ".join(value.name for value in inputs)
        raise ConfigurationError(
            f"{str(file)!r} has several inputs ({names}), and --input is the shape of one: leave it out."
        )
    examples = tuple(_drawn(file, value, shape) for value in inputs)
    return model.eval(), examples[0] if len(examples) == 1 else examples


def _converted(file: Path) -> tuple[nn.Module, Any]:
    """Return the network of a file, and the graph that it was made from."""
    try:
        # by name: type checks are the same where they are not installed
        onnx = import_module("onnx")
        convert = import_module("onnx2torch").convert
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{missing_package('Reading an ONNX file', error, 'onnx')}."
        ) from error
    try:
        content = onnx.load(str(file))
    except Exception as error:  # protobuf has its own kinds
        raise ConfigurationError(f"{str(file)!r} is no ONNX file: {error}") from error
    _store_constants(content.graph)
    try:
        return convert(content), content.graph
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ConfigurationError(f"onnx2torch cannot convert {str(file)!r}: {error}") from error


def _store_constants(graph: Any) -> None:
    """Make weights of the tensors that a graph has as nodes, where onnx2torch does not look for them."""
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        (attribute,) = node.attribute
        if attribute.name != "value":
            continue
        tensor = graph.initializer.add()
        tensor.CopyFrom(attribute.t)
        tensor.name = node.output[0]
        graph.node.remove(node)


def _drawn(file: Path, value: Any, shape: Sequence[int] | None) -> Tensor:
    """Return numbers for an input: normal ones, or zeros where it takes whole numbers."""
    form = value.type.tensor_type
    sizes = [size.dim_value if size.HasField("dim_value") else 0 for size in form.shape.dim]
    if sizes and sizes[0] < 1:
        sizes[0] = EXAMPLES
    if shape is not None:
        sizes = [sizes[0] if sizes else EXAMPLES, *shape]
    if not sizes or min(sizes) < 1:
        stated = ", ".join(size.dim_param or str(size.dim_value) for size in form.shape.dim)
        raise ConfigurationError(
            f"{str(file)!r} leaves sizes of its input {value.name!r} open ({stated}): give the shape of one example, "
            "such as --input 3,224,224."
        )
    # numbers of types in onnx.TensorProto
    real = {
        1: torch.float32,
        10: torch.float16,
        11: torch.float64,
    }
    if form.elem_type in real:
        return torch.randn(sizes).to(real[form.elem_type])
    return torch.zeros(sizes, dtype=torch.long)
