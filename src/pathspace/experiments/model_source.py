"""A model by name: one that is built in, an ONNX file, or what a function in a Python file or module returns.

The built-in networks are small ones of every kind that the tracer knows. Files of weights are not
read: unpickling one runs whatever code is in it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pathspace
from pathspace.experiments.errors import ConfigurationError
from pathspace.extras import missing_package
from pathspace.network import Network, UntraceableError

Case = tuple[nn.Module, Tensor]


class ConvolutionalBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = self._layer(channels)
        self.second = self._layer(channels)

    @staticmethod
    def _layer(channels: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, height, width) to images of the same shape."""
        return functional.relu(images + self.second(functional.relu(self.first(images))))


class HandWrittenLoop(nn.Module):
    """A recurrence written out with two linear layers that every step shares."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.enter = nn.Linear(inputs, hidden)
        self.recur = nn.Linear(hidden, hidden, bias=False)
        self.leave = nn.Linear(hidden, outputs)

    def forward(self, sequences: Tensor) -> Tensor:
        """Map sequences (B, T, D) to outputs (B, K)."""
        state = functional.relu(self.enter(sequences[:, 0]))
        for step in range(1, sequences.shape[1]):
            state = functional.relu(self.enter(sequences[:, step]) + self.recur(state))
        return self.leave(state)


class LastStep(nn.Module):
    """A recurrent layer or stack whose last step is read by a linear layer."""

    def __init__(self, inputs: int, hidden: int, outputs: int, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, nonlinearity="relu", batch_first=True, **options)
        self.readout = nn.Linear(hidden * (1 + self.rnn.bidirectional), outputs)

    def forward(self, sequences: Tensor) -> Tensor:
        """Map sequences (B, T, D) to outputs (B, K)."""
        return self.readout(self.rnn(sequences)[0][:, -1])


class TiedEmbedding(nn.Module):
    """A language model whose input and output embeddings are one matrix."""

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.rnn = nn.RNN(size, size, nonlinearity="relu", batch_first=True)
        self.readout = nn.Linear(size, words)
        self.readout.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        """Map word numbers (B, T) to scores of the next word (B, T, words)."""
        return self.readout(self.rnn(self.embedding(words))[0])


def _mlp() -> Case:
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4)
    ), torch.randn(8, 6)


def _convolutional() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    return _with_statistics(model), torch.randn(4, 2, 8, 8)


def _residual() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        ConvolutionalBlock(6), ConvolutionalBlock(6),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return _with_statistics(model), torch.randn(4, 2, 8, 8)


NETWORKS: dict[str, tuple[str, Callable[[], Case]]] = {
    "mlp": ("two hidden layers of ReLU units", _mlp),
    "cnn": ("convolutions, BatchNorm, max and average pooling", _convolutional),
    "resnet": ("two residual blocks with BatchNorm", _residual),
    "rnn": (
        "one ReLU layer of torch.nn.RNN, read at its last step",
        lambda: (LastStep(3, 10, 4), torch.randn(8, 7, 3)),
    ),
    "stacked-rnn": (
        "two bidirectional layers of the same",
        lambda: (LastStep(3, 8, 4, num_layers=2, bidirectional=True), torch.randn(8, 5, 3)),
    ),
    "loop": (
        "a recurrent network written as a loop",
        lambda: (HandWrittenLoop(3, 10, 4), torch.randn(8, 7, 3)),
    ),
    "tied-embedding": (
        "a language model whose embedding is its decoder too",
        lambda: (TiedEmbedding(12, 8), torch.randint(12, (4, 6))),
    ),
}
"""By name what a network is, and what makes it with an example."""


def build_network(name: str, seed: int = 0) -> Case:
    """Return the network called `name` in evaluation form and an example input; the same on every call.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, make = NETWORKS[name]
        model, example = make()
    return model.eval(), example


def example_loss(outputs: Tensor) -> Tensor:
    """Return the cross-entropy of outputs (..., K) against the classes 0, 1, 2, ... in turn."""
    flat = outputs.reshape(-1, outputs.shape[-1])
    return functional.cross_entropy(flat, torch.arange(len(flat)) % outputs.shape[-1])


def _with_statistics(model: nn.Module) -> nn.Module:
    # Statistics as training would leave them: with the initial 0 and 1 BatchNorm would do nothing
    # in evaluation form.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model


EXAMPLES = 256  # drawn where a model comes without any
OPEN_BATCH = 8  # examples drawn where a file leaves the batch open
MODULE = "__pathspace_model__"  # of a file; it hides no other one
_PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin")


def load_model(
    source: str, shape: Sequence[int] | None = None, seed: int = 0
) -> tuple[nn.Module, Any]:
    """Return a model and examples for it.

    Args:
        source: A name in `NETWORKS`, or `FILE.py:FUNCTION`, or `MODULE:FUNCTION`, or
            `FILE.onnx`. The function takes no arguments and returns a model, or a model and a batch
            of examples.
        shape: Of one example, without the batch dimension, for a function that returns a model
            alone; such examples are standard normal, of the type and on the device of the model's
            weights.
        seed: Decides built-in weights and drawn examples.
    """
    if source in NETWORKS:
        if shape is not None:
            raise ConfigurationError(f"{source!r} has examples of its own: leave out --input.")
        return _built_in(source, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if source.endswith(".onnx"):
            return load_onnx(Path(source), shape)
        model, examples = _made(source)
        if examples is None:
            examples = _drawn(source, model, shape)
        elif shape is not None:
            raise ConfigurationError(f"{source!r} returned examples of its own: leave out --input.")
    return model.eval(), examples


def trace_model(model: nn.Module, examples: Any) -> Network:
    """Trace a model; one whose steps are written for a batch of one, as such.

    Raises:
        UntraceableError: It cannot be traced.
    """
    try:
        return pathspace.trace(model, examples)
    except UntraceableError:
        if isinstance(examples, Tensor) and len(examples) == 1:
            with suppress(UntraceableError):
                return pathspace.trace(model, examples, batch_dim=None)
        raise


def in_words_of_commands(error: Exception, examples: Any) -> str:
    """Return the message of an error in tracing a model, with the advice of commands in place of arguments."""
    if isinstance(error, UntraceableError) and error.operation == "batch":
        return (
            f"The model does not take a batch of such examples: {error.reason}. Give --input the shape of one "
            "example, such as 3,32,32, or return a batch of examples with the model."
        )
    said = str(error)
    is_real = isinstance(examples, Tensor) and examples.is_floating_point()
    if is_real and ("Long" in said or "integer type" in said):
        return f"{said}. --input draws real numbers: for tokens return a pair (model, examples)"
    return said


def _made(source: str) -> tuple[nn.Module, Any]:
    """Return what a function of the user's makes: a model, and examples or None."""
    try:
        made = run_users(source, _factory(source))
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{source!r} needs the package {error.name!r}, which is not installed."
        ) from error
    model, examples = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"Expected an nn.Module from {source!r}, got {type(model).__name__}: return an nn.Module, or a pair of an "
            "nn.Module and a batch of examples."
        )
    return model, examples


def _drawn(source: str, model: nn.Module, shape: Sequence[int] | None) -> Tensor:
    """Return examples for a model that comes without any."""
    if shape is None:
        raise ConfigurationError(
            f"{source!r} returned a model without examples: give the shape of one example, such as "
            "--input 28,28, or return a pair (model, examples)."
        )
    examples = torch.randn(EXAMPLES, *shape)
    weight = next((p for p in model.parameters() if p.is_floating_point()), examples)
    return examples.to(weight)  # its type and device


def _built_in(name: str, seed: int) -> tuple[nn.Module, Any]:
    model, first = build_network(name, seed)
    more = [build_network(name, seed + 1 + i)[1] for i in range(-(-EXAMPLES // len(first)) - 1)]
    return model, torch.cat([first, *more])


def _factory(source: str) -> Any:
    place, colon, name = source.rpartition(":")
    if not colon:
        if source.endswith(_PICKLED):
            raise ConfigurationError(
                f"{source!r} looks like a file of weights, which is not opened because that could run code in it: give "
                "a Python file and a function in it that builds the model, FILE.py:FUNCTION."
            )
        if source.endswith(".py"):
            raise ConfigurationError(
                f"{source!r} names no function: give one that takes no arguments and returns a model, as in "
                f"{source}:build."
            )
        raise ConfigurationError(
            f"Unknown model {source!r}: choose from {', '.join(NETWORKS)}, or give FILE.py:FUNCTION or MODULE:FUNCTION."
        )
    module = module_of_file(Path(place)) if place.endswith(".py") else _from_module(place)
    factory = getattr(module, name, None)
    if isinstance(factory, nn.Module):  # which can be called, too
        raise ConfigurationError(
            f"{name!r} in {place!r} is a model: give a function that returns it."
        )
    if not callable(factory):
        raise ConfigurationError(
            f"{place!r} has no function {name!r}: give one that takes no arguments and returns a model."
        )
    return factory


def run_users(source: str, code: Callable[[], Any]) -> Any:
    """Run code of the user's, whose errors are the user's to read: the last line that is theirs, without ours.

    Raises:
        ConfigurationError: It failed; says where in the user's files.
        ModuleNotFoundError: It imports what is not installed.
    """
    try:
        return code()
    except (ConfigurationError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:  # a script ends so, and says nothing
        said = f"{type(error).__name__}: {error}"
        frames = [
            f for f in traceback.extract_tb(error.__traceback__)[1:] if f.filename != __file__
        ]
        here = [f for f in frames if not f.filename.startswith("<frozen")]
        if here and not isinstance(error, SyntaxError):  # which names its own place
            said += f" (line {here[-1].lineno} of {here[-1].filename})"
        elif isinstance(error, TypeError):
            said += ". Give a function that takes no arguments"
        raise ConfigurationError(f"{source!r} failed: {said}.") from error


def module_of_file(path: Path) -> Any:
    """Return the module that a Python file makes, with what stands beside it importable, as for a script."""
    if not path.is_file():
        raise ConfigurationError(f"There is no file {str(path)!r}: give FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(
            f"{str(path)!r} is no Python file: give one whose name ends in .py."
        )
    # where dataclasses look for it
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    with _importing_from(path.resolve().parent):
        run_users(str(path), functools.partial(spec.loader.exec_module, module))
    return module


def _from_module(name: str) -> Any:
    try:
        with _importing_from(Path.cwd()):
            return run_users(name, functools.partial(importlib.import_module, name))
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise ConfigurationError(
            f"There is no module {name!r}: give MODULE:FUNCTION or FILE.py:FUNCTION."
        ) from None


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have taken it out
            sys.path.remove(str(folder))


def load_onnx(file: Path, shape: Sequence[int] | None) -> tuple[nn.Module, Any]:
    """Return the network of a file, which onnx2torch converts, in evaluation form, and examples drawn for it.

    A `shape` of one example is for a file that leaves sizes open.
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
    examples = tuple(_numbers_for(file, value, shape) for value in inputs)
    return model.eval(), examples[0] if len(examples) == 1 else examples


def _converted(file: Path) -> tuple[nn.Module, Any]:
    """Return the network of a file, and the graph that it was made from."""
    try:
        # by name: type checks are the same where they are not installed
        onnx = import_module("onnx")
        with _torchvision_replaced():
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


@contextmanager
def _torchvision_replaced() -> Iterator[None]:
    """Let onnx2torch be imported without torchvision, which it needs for two operators of detection alone."""
    replaced = {}
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: of another version of torch
        operators = ModuleType("torchvision.ops")
        needed = ("roi_align", "nms", "box_convert")
        operators.__dict__.update(dict.fromkeys(needed, _needs_torchvision))
        package = ModuleType("torchvision")
        package.__dict__["ops"] = operators
        replaced = {"torchvision": package, "torchvision.ops": operators}
    sys.modules.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del sys.modules[name]


def _needs_torchvision(*_: Any, **__: Any) -> Tensor:
    raise ModuleNotFoundError("RoiAlign and NonMaxSuppression need torchvision: install it.")


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


def _numbers_for(file: Path, value: Any, shape: Sequence[int] | None) -> Tensor:
    """Return numbers for an input: normal ones, or zeros where it takes whole numbers."""
    form = value.type.tensor_type
    sizes = [size.dim_value if size.HasField("dim_value") else 0 for size in form.shape.dim]
    if sizes and sizes[0] < 1:
        sizes[0] = OPEN_BATCH
    if shape is not None:
        sizes = [sizes[0] if sizes else OPEN_BATCH, *shape]
    if not sizes or min(sizes) < 1:
        stated = ", ".join(size.dim_param or str(size.dim_value) for size in form.shape.dim)
        raise ConfigurationError(
            f"{str(file)!r} leaves sizes of its input {value.name!r} open ({stated}): give the shape of one example, "
            "such as --input 3,224,224."
        )
    # numbers of types in onnx.TensorProto
    real = {1: torch.float32, 10: torch.float16, 11: torch.float64}
    if form.elem_type in real:
        return torch.randn(sizes).to(real[form.elem_type])
    return torch.zeros(sizes, dtype=torch.long)
