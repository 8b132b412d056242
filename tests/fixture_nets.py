"""The networks of tests/data/path_geometry.json as PyTorch models, with the numbers known for them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from oracles.graph import Graph

DATA = json.loads((Path(__file__).parent / "data" / "path_geometry.json").read_text())
NETS = {net["name"]: net for net in DATA["nets"]}
NN_RNN = DATA["nn_rnn"][0]


class Layers(nn.Module):
    def __init__(self, *widths: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in pairwise(widths))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class Skips(nn.Module):
    """Input and first hidden layer skip to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.from_input, self.from_first = nn.Linear(2, 2, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        a = self.first(x).relu()
        return self.out(self.second(a).relu()) + self.from_input(x) + self.from_first(a)


class Loop(nn.Module):
    """Stacked recurrent layers, written by hand; one bias per layer."""

    def __init__(self, inputs: int, hidden: list[int], outputs: int, *, emit: str) -> None:
        super().__init__()
        self.read = nn.ModuleList(nn.Linear(*pair) for pair in pairwise([inputs, *hidden]))
        self.step = nn.ModuleList(nn.Linear(width, width, bias=False) for width in hidden)
        self.out, self.emit = nn.Linear(hidden[-1], outputs), emit

    def forward(self, x):
        states = [torch.zeros(x.shape[0], step.in_features, dtype=x.dtype) for step in self.step]
        emitted = []
        for t in range(x.shape[1]):
            below = x[:, t]
            for layer, (read, step) in enumerate(zip(self.read, self.step, strict=True)):
                below = states[layer] = (read(below) + step(states[layer])).relu()
            emitted.append(self.out(below))
        return emitted[-1] if self.emit == "last" else torch.stack(emitted, 1)


def loop_entry(key: tuple) -> tuple[str, tuple]:
    """Parameter name and index of a `Loop` for a key of `oracles.graph.recurrent`."""
    if key[0].startswith("out"):
        return ("out.bias" if key[0] == "out bias" else "out.weight"), key[1:]
    name = {"in": "read.{}.weight", "rec": "step.{}.weight", "bias": "read.{}.bias"}[key[0]]
    return name.format(key[1]), key[2:]


class Convolutions(nn.Module):
    """Two convolutions over three positions; the read-out sums over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 3, 3, padding=1)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        x = self.second(self.first(x).relu()).relu()
        return self.out(x[:, :, 0] + x[:, :, 1] + x[:, :, 2])


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(2, 3, nonlinearity="relu"), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][-1])


@dataclass(frozen=True)
class FixtureNet:
    """A network of the fixture: its model in float64, its data, and its numbers by the model's names."""

    net: dict
    model: nn.Module
    names: dict[str, str]  # matrix in the fixture -> parameter of the model

    @property
    def graph(self) -> Graph:
        net = self.net
        return Graph(
            net["inputs"], net["outputs"], [tuple(edge) for edge in net["edges"]], net["nodes"]
        )

    @property
    def x(self) -> Tensor:
        x = torch.tensor(self.net["X"], dtype=torch.float64)
        if isinstance(self.model, Loop):
            return x.reshape(len(x), -1, self.model.read[0].in_features)
        return x.reshape(-1, 2, 3) if isinstance(self.model, Convolutions) else x

    def loss(self, output: Tensor) -> Tensor:
        target = torch.tensor(self.net["Y"], dtype=torch.float64)
        return (output.flatten(1) - target).square().sum() / (2 * len(target))

    def as_tensors(self, values: list[float]) -> dict[str, Tensor]:
        """Numbers in the fixture's order as tensors named and shaped as the model's parameters."""
        tensors = {name: torch.full_like(p, torch.nan) for name, p in self.model.named_parameters()}
        for key, value in zip(self.net["param_names"], values, strict=True):
            matrix, index = re.fullmatch(r"(\w+)\[(.*)\]", key).groups()
            tensors[self.names[matrix]][tuple(map(int, index.split(", ")))] = value
        assert not any(tensor.isnan().any() for tensor in tensors.values())
        return tensors

    def classes(self) -> dict[str, list[str]]:
        """Class of the fixture -> the model's parameter entries that enter it, as "name[index]"."""
        entering: dict[str, list[str]] = {}
        for number, (_, target) in self.net["red"].items():
            matrix, index = re.fullmatch(
                r"(\w+)(\[.*\])", self.net["param_names"][int(number)]
            ).groups()
            entering.setdefault(target, []).append(self.names[matrix] + index)
        return entering


def _linear(*pairs: tuple[str, str, str]) -> dict[str, str]:
    return {
        key: name for weight, bias, module in pairs for key, name in _both(weight, bias, module)
    }


def _both(weight: str, bias: str, module: str):
    yield weight, f"{module}.weight"
    if bias:
        yield bias, f"{module}.bias"


_BUILD = {
    "fig2_mlp_2-2-2-1_nobias": (
        lambda: Layers(2, 2, 2, 1, bias=False),
        _linear(*((f"W{k}", "", f"layers.{k}") for k in range(3))),
    ),
    "mlp2-3-4-2b": (
        lambda: Layers(2, 3, 4, 2, bias=True),
        _linear(*((f"W{k}", f"b{k}", f"layers.{k}") for k in range(3))),
    ),
    "skip": (
        Skips,
        _linear(
            ("W0", "b0", "first"),
            ("W1", "b1", "second"),
            ("W2", "bo", "out"),
            ("S", "", "from_input"),
            ("Q", "", "from_first"),
        ),
    ),
    "rnn_d2_H3_K1_T4b_last": (
        lambda: Loop(2, [3], 1, emit="last"),
        _linear(("Win0", "b0", "read.0"), ("Wrec0", "", "step.0"), ("Wout", "bout", "out")),
    ),
    "rnn_d1_H2-2_K2_T3b_all": (
        lambda: Loop(1, [2, 2], 2, emit="all"),
        _linear(
            ("Win0", "b0", "read.0"),
            ("Wrec0", "", "step.0"),
            ("Win1", "b1", "read.1"),
            ("Wrec1", "", "step.1"),
            ("Wout", "bout", "out"),
        ),
    ),
    "conv1d": (
        Convolutions,
        _linear(("W0", "b0", "first"), ("W1", "b1", "second"), ("Wout", "bout", "out")),
    ),
}


def load(name: str) -> FixtureNet:
    """One network of the fixture by name, with its weights."""
    build, names = _BUILD[name]
    fixture = FixtureNet(NETS[name], build().double(), names)
    fixture.model.load_state_dict(fixture.as_tensors(fixture.net["params"]))
    return fixture


def as_tensors(values: dict) -> dict[str, Tensor]:
    """Nested lists as float64 tensors."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def load_rnn() -> tuple[nn.Module, Tensor]:
    """The `nn.RNN` of the fixture and its input, time first."""
    model = Rnn().double()
    model.load_state_dict(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in NN_RNN["state"].items()}
    )
    return model, torch.tensor(NN_RNN["x"], dtype=torch.float64)
