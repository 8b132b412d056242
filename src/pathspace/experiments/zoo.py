"""Small networks of every kind that the tracer knows, for checking invariance on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Case = tuple[nn.Module, Tensor]


class ConvolutionalBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip connection around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.second = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )

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

    def __init__(
        self, inputs: int, hidden: int, outputs: int, *, layers: int, bidirectional: bool
    ) -> None:
        super().__init__()
        self.rnn = nn.RNN(
            inputs,
            hidden,
            layers,
            nonlinearity="relu",
            batch_first=True,
            bidirectional=bidirectional,
        )
        self.readout = nn.Linear(hidden * (1 + bidirectional), outputs)

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


def _recurrent() -> Case:
    return LastStep(3, 10, 4, layers=1, bidirectional=False), torch.randn(8, 7, 3)


def _stacked() -> Case:
    return LastStep(3, 8, 4, layers=2, bidirectional=True), torch.randn(8, 5, 3)


def _loop() -> Case:
    return HandWrittenLoop(3, 10, 4), torch.randn(8, 7, 3)


def _tied() -> Case:
    return TiedEmbedding(12, 8), torch.randint(12, (4, 6))


NETWORKS: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "cnn": _convolutional,
    "resnet": _residual,
    "rnn": _recurrent,
    "stacked-rnn": _stacked,
    "loop": _loop,
    "tied-embedding": _tied,
}

ABOUT = {
    "mlp": "two hidden layers of ReLU units",
    "cnn": "convolutions, BatchNorm, max and average pooling",
    "resnet": "two residual blocks with BatchNorm",
    "rnn": "one ReLU layer of torch.nn.RNN, read at its last step",
    "stacked-rnn": "two bidirectional layers of the same",
    "loop": "a recurrent network written as a loop",
    "tied-embedding": "a language model whose embedding is its decoder too",
}


def build_network(name: str, seed: int = 0) -> Case:
    """Return the network called `name` in evaluation form and an example input; the same on every call.

    Args:
        name: A name in `NETWORKS`.
        seed: Decides the weights and the input. The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, example = NETWORKS[name]()
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
