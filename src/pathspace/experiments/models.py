"""The registry of models: from a task's sizes to a network that answers at the last step or at every step.

Letters: B batch, T time, D input, K output, H hidden units; of the transformer W width, H heads,
D = W / H dimensions of a head, F hidden units of an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.layers import LARGEST, Count, Natural, NotNegative, Positive, Share
from pathspace.experiments.own import make_model
from pathspace.experiments.tasks import OWN, check_options, keyword_options
from pathspace.nn import LanguageModel, RecurrentCNN

Gate = Literal["swiglu", "squared-relu"]
ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal attention with rotary embeddings."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        turns = _turns(x.shape[1], query.shape[-1] // 2, x)
        h = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True
        )
        return self.out(h.transpose(1, 2).flatten(-2))


def _turns(steps: int, pairs: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D / 2) of the angles by which each pair of dimensions is turned at each step."""
    speeds = ROTARY_BASE ** -(torch.arange(pairs, dtype=torch.float32, device=like.device) / pairs)
    angles = torch.arange(steps, dtype=torch.float32, device=like.device).unsqueeze(1) * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of dimensions (d, d + D / 2) of x, (B, H, T, D)."""
    cosines, sines = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1)


class FeedForward(nn.Module):
    """silu(g) u (SwiGLU), or relu(u)^2, between two linear maps."""

    def __init__(self, width: int, hidden: int, gate: Gate) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False) if gate == "swiglu" else None
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        up = self.up(x)
        hidden = up.relu().square() if self.gate is None else functional.silu(self.gate(x)) * up
        return self.down(hidden)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, gate: Gate) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.before_mlp, self.mlp = nn.RMSNorm(width), FeedForward(width, hidden, gate)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, W) to the same shape."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A GPT with RMSNorm, rotary embeddings and no biases, which answers at every step.

    Args:
        input_size: How many symbols there are.
        output_size: K, scores at a step.
        hidden: W, numbers that stand for a symbol; a multiple of twice the heads.
        layers: Blocks, one on top of the other.
        heads: H, of every attention.
        gate: `"swiglu"` with 8 W / 3 hidden units, or `"squared-relu"` with 4 W; as many weights.
        output: Every step is read.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        hidden: Count = 128,
        layers: Count = 4,
        heads: Count = 4,
        gate: Gate = "swiglu",
        output: Literal["every"] = "every",
    ) -> None:
        del output
        super().__init__()
        if hidden % (2 * heads):
            raise ConfigurationError(
                f"The option 'hidden' of the model 'transformer' is {hidden}: with {heads} heads, whose dimensions are "
                f"turned in pairs, give a multiple of {2 * heads}."
            )
        units = 4 * hidden if gate == "squared-relu" else 8 * round(hidden / 3)
        self.embedding = nn.Embedding(input_size, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, units, gate) for _ in range(layers))
        self.norm, self.readout = nn.RMSNorm(hidden), nn.Linear(hidden, output_size, bias=False)
        self._shorten_branches()

    @torch.no_grad()
    def _shorten_branches(self) -> None:
        """Divide what every branch adds to the stream by the root of their number, as GPT-2 does."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.div_(math.sqrt(2 * len(self.blocks)))

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (B, T) to scores (B, T, K) of what follows each."""
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


STARTS = {  # of the models that have the option
    "relu-rnn": (
        "default", "identity", "identity-recurrent", "identity-uniform", "positive-definite", "uniform"
    ),
    "tanh-rnn": ("default", "uniform"),
    "lstm": ("default", "orthogonal", "orthogonal-uniform", "chrono", "uniform"),
}  # fmt: skip
# options that say where a model starts
OF_STARTS = (
    "start",
    "start_limit",
    "recurrent_limit",
    "memory",
)
IDENTITY_DEVIATION = 0.001


class Reader(nn.Module):
    """Reads steps of numbers, or of symbols, as one-hot vectors or by an embedding; base of the models.

    Args:
        input_size: D, numbers per step, or how many symbols there are.
        embedding: Numbers that stand for a symbol; 0 reads symbols as one-hot vectors.
        output: Whether the last step is read or every one.
    """

    readout: nn.Linear

    def __init__(self, input_size: int, embedding: int, output: Literal["last", "every"]) -> None:
        super().__init__()
        self.symbols, self.output, self.width = input_size, output, embedding or input_size
        self.embedding = nn.Embedding(input_size, embedding) if embedding else None

    def vectors(self, inputs: Tensor) -> Tensor:
        """Map sequences (B, T, D), or symbols (B, T), to vectors (B, T, width)."""
        if self.embedding is not None:
            return self.embedding(inputs)
        if inputs.dim() == 2:
            return functional.one_hot(inputs, self.symbols).to(self.readout.weight.dtype)
        return inputs


class Recurrent(Reader):
    """Recurrent layers read by a linear one.

    Args:
        input_size, embedding, output: See `Reader`.
        output_size: K, numbers in an output.
        hidden: H, units per layer.
        layers: Recurrent layers, one on top of the other.
        start: A name in `STARTS`. Biases start at zero, but for `"default"` and `"chrono"`.

            * `"default"`: PyTorch's initialisation.
            * `"uniform"`: U[-r, r] for weights.
            * `"orthogonal"`: every recurrent matrix of a gate orthogonal, the rest as PyTorch
              initialises it.
            * `"orthogonal-uniform"`: the same with U[-r, r] for the rest.
            * `"chrono"`: forget gates stay open for up to T = `memory` steps, with biases log U[1,
              T-1], and input gates have their negatives; other recurrent biases zero, the rest as
              PyTorch initialises it: C. Tallec and Y. Ollivier (2018), Can recurrent neural
              networks warp time?
            * `"identity"`: the identity for recurrent weights and N(0, 0.001^2) for all others: the
              IRNN of Q. Le, N. Jaitly and G. Hinton (2015).
            * `"identity-uniform"`: the same with U[-r, r] for all others: P16, Section 5.2, with r
              = 0.01.
            * `"identity-recurrent"`: the identity, and input and output weights as PyTorch
              initialises them.
            * `"positive-definite"`: the same with 1 + R^T R / H, divided by its largest eigenvalue,
              instead of the identity, where R has entries from N(0, 1): the recurrent weights of
              the np-RNN of S. Talathi and A. Vartak (2015), Improving performance of recurrent
              neural network with ReLU nonlinearity.
        start_limit: r of the uniform starts.
        recurrent_limit: r of the recurrent weights of the start `"uniform"`; 0 takes `start_limit`.
        memory: T of the chrono start, the longest dependency that is expected, in steps.
    """

    layer: ClassVar[Callable[..., nn.RNNBase]]
    """Makes the recurrent layers."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        hidden: Count = 100,
        layers: Count = 1,
        embedding: Natural = 0,
        output: Literal["last", "every"] = "last",
        start: str = "default",
        start_limit: Positive = 0.1,
        recurrent_limit: NotNegative = 0.0,
        memory: Annotated[int, Field(ge=2, le=LARGEST)] = 100,
    ) -> None:
        super().__init__(input_size, embedding, output)
        self.rnn = self.layer(self.width, hidden, layers, batch_first=True)
        self.readout = nn.Linear(hidden, output_size)
        if start == "chrono":
            _open_gates_(self.rnn, memory)
        else:
            self._start_at(start, start_limit, recurrent_limit or start_limit)

    @torch.no_grad()
    def _start_at(self, start: str, limit: float, recurrent_limit: float) -> None:
        """Replace PyTorch's initialisation."""
        if start == "default":
            return
        for name, parameter in self.named_parameters():
            if "bias" in name:
                parameter.zero_()
            elif "weight_hh" in name and start == "uniform":
                parameter.uniform_(-recurrent_limit, recurrent_limit)
            elif "weight_hh" in name:
                for gate in parameter.split(parameter.shape[1]):
                    _start_recurrence_(gate, start)
            elif start == "uniform":
                parameter.uniform_(-limit, limit)
            elif name.startswith("embedding"):
                continue
            elif start == "identity":
                parameter.normal_(0.0, IDENTITY_DEVIATION)
            elif start.endswith("-uniform"):
                parameter.uniform_(-limit, limit)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map sequences (B, T, D), or symbols (B, T), to outputs (B, K), or (B, T, K) at every step."""
        states, _ = self.rnn(self.vectors(inputs))
        return self.readout(states if self.output == "every" else states[:, -1])


def _start_recurrence_(matrix: Tensor, start: str) -> None:
    """Fill a recurrent matrix of H by H."""
    if start.startswith("orthogonal"):
        nn.init.orthogonal_(matrix)
    elif start == "positive-definite":
        drawn = torch.randn_like(matrix)
        sure = drawn.T @ drawn / len(matrix) + torch.eye(len(matrix))
        matrix.copy_(sure / torch.linalg.eigvalsh(sure)[-1])
    else:
        nn.init.eye_(matrix)


@torch.no_grad()
def _open_gates_(lstm: nn.RNNBase, memory: int) -> None:
    """The chrono start."""
    for name, parameter in lstm.named_parameters():
        if "bias" in name:
            parameter.zero_()
        if "bias_ih" in name:  # torch's order of gates: input, forget, cell, output
            of_input, of_forget, *_ = parameter.chunk(4)
            of_forget.uniform_(1, memory - 1).log_()
            of_input.copy_(-of_forget)


class ReluRNN(Recurrent):
    """A recurrent network with ReLU units."""

    layer = staticmethod(partial(nn.RNN, nonlinearity="relu"))


class TanhRNN(Recurrent):
    """A recurrent network with tanh units, which cannot be rescaled."""

    layer = nn.RNN


class LSTM(Recurrent):
    """An LSTM, which cannot be rescaled; it has four times the recurrent weights of an RNN with as many units."""

    layer = nn.LSTM


class MLP(Reader):
    """A feed-forward network with ReLU units, which reads every step by itself.

    With one step (`task_options = { steps = 1 }` of `mnist`) it reads the whole image.

    Args:
        input_size, embedding, output: See `Reader`.
        output_size: K, numbers in an output.
        hidden: H, units per layer.
        layers: Layers of hidden units.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        hidden: Count = 100,
        layers: Count = 2,
        embedding: Natural = 0,
        output: Literal["last", "every"] = "last",
    ) -> None:
        super().__init__(input_size, embedding, output)
        widths = [self.width, *[hidden] * layers]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.readout = nn.Linear(hidden, output_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map sequences (B, T, D), or symbols (B, T), to outputs (B, K), or (B, T, K) at every step."""
        if self.output == "last":
            inputs = inputs[:, -1:]
        inputs = self.vectors(inputs)
        for layer in self.layers:
            inputs = layer(inputs).relu()
        outputs = self.readout(inputs)
        return outputs if self.output == "every" else outputs[:, 0]


def language_model(
    symbols: int,
    _output_size: int,
    *,
    hidden: Count = 200,
    layers: Count = 2,
    embedding: Count = 200,
    tied: bool = True,
    output: Literal["every"] = "every",
    embedding_dropout: Share = 0.0,
    input_dropout: Share = 0.0,
    hidden_dropout: Share = 0.0,
    output_dropout: Share = 0.0,
    weight_drop: Share = 0.0,
) -> nn.Module:
    """Return a `pathspace.nn.LanguageModel` for streams; its embedding and decoder take the plain rule."""
    del output  # a stream is predicted at every step
    return LanguageModel(
        symbols,
        embedding=embedding,
        hidden=hidden,
        layers=layers,
        tied=tied,
        embedding_dropout=embedding_dropout,
        input_dropout=input_dropout,
        hidden_dropout=hidden_dropout,
        output_dropout=output_dropout,
        weight_drop=weight_drop,
    )


def recurrent_cnn(
    channels: int,
    classes: int,
    *,
    maps: Count = 96,
    layers: Count = 5,
    unfoldings: Count = 3,
    dropout: Share = 0.0,
) -> nn.Module:
    """Return a `pathspace.nn.RecurrentCNN`."""
    return RecurrentCNN(
        channels, classes, maps=maps, layers=layers, unfoldings=unfoldings, dropout=dropout
    )


def own_model(input_size: int, output_size: int, *, file: str, digest: str) -> nn.Module:
    """Return a new model of a file of the user's; see `own`."""
    del input_size, output_size
    return make_model(file, digest)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "relu-rnn": ReluRNN,
    "tanh-rnn": TanhRNN,
    "lstm": LSTM,
    "mlp": MLP,
    "recurrent-cnn": recurrent_cnn,
    "language-model": language_model,
    "transformer": Transformer,
    OWN: own_model,
}
# Models with a path norm; the others are trained by optimizers that need no network.
RESCALABLE = ("relu-rnn", "mlp", "recurrent-cnn", "language-model", "transformer", OWN)
# What of a model the path norm leaves out.
OUTSIDE = {"language-model": ("embedding", "decoder")}
# Models that carry a state from one segment of a stream to the next; the others read every sequence
# by itself.
OF_STREAMS = ("language-model",)
# Models of symbols alone, which answer at every step.
OF_SYMBOLS = (*OF_STREAMS, "transformer")
# Models of images (B, C, H, W); the others read sequences.
OF_IMAGES = ("recurrent-cnn",)


def build_model(
    name: str, input_size: int, output_size: int, options: Mapping[str, Any]
) -> nn.Module:
    """Return the model called `name`, freshly initialised from torch's global random state."""
    check_model(name, options)
    return MODELS[name](input_size, output_size, **options)


def count_weights(name: str, input_size: int, output_size: int, options: Mapping[str, Any]) -> int:
    """Return how many weights the model has that `build_model` would return; nothing is allocated."""
    # the code of one's own model may not run without data
    with torch.device("cpu" if name == OWN else "meta"):
        model = build_model(name, input_size, output_size, options)
    return sum(p.numel() for p in model.parameters())


def options_of(name: str) -> list[str]:
    """Return the names of the options that the model takes."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS, "the setting 'model'")
    return keyword_options(MODELS[name])


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` unless `build_model` would accept the name and the options."""
    options_of(name)
    owner = f"the model {name!r}"
    check_options(MODELS[name], options, owner, f"model_options of {owner}")
    start = options.get("start", "default")
    if start not in STARTS.get(name, (start,)):
        raise unknown_name("value", str(start), STARTS[name], f"the option 'start' of {owner}")
