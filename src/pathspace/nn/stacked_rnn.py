"""A stack of ReLU recurrent layers with dropout between them and weight drop on the recurrent matrices.

S19: "Path Space for Recurrent Neural Networks with ReLU Activations", 2019 (anonymous submission),
which takes its language models from Merity, Keskar, Socher, "Regularizing and Optimizing LSTM
Language Models", 2018. Letters: B batch, T time, D input, H hidden, l layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pathspace.metrics.checks import check_numbers

States = tuple[Tensor, ...]
"""The last hidden state of every layer, ``[B, H_l]`` each."""


class StackedReLURNN(nn.Module):
    r"""Recurrent layers of ReLU units, one on top of the other.

    .. code-block:: text

        h_t = relu(W_in x_t + b_in + (M o W_rec) h_{t-1} + b_rec)        M = mask / (1 - weight_drop)

    In training, weight drop draws one mask of every recurrent matrix for a whole call, and the
    other dropouts leave out the same units at all time steps of a call. None of them changes which
    weights are edges: ``trace`` sees the network without drops, in training mode too, and kappa is
    that of the undropped weights.

    Args:
        input_size: D, features that enter at each step.
        hidden_sizes: H_l, the units of every layer, the first one first.
        input_dropout: probability with which a feature of the input is left out.
        hidden_dropout: the same for what goes from one layer to the next.
        output_dropout: the same for what leaves the last layer.
        weight_drop: probability with which a recurrent weight is left out.
        bias: whether layers have biases.

    Raises:
        TypeError: ``hidden_sizes`` is one number, or a probability is none.
        ValueError: a size is not positive, there is no layer, or a probability is not in [0, 1).

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = ps.nn.StackedReLURNN(4, [8, 6], hidden_dropout=0.3, weight_drop=0.1)
        >>> outputs, states = rnn(torch.randn(2, 5, 4))
        >>> outputs.shape, [tuple(state.shape) for state in states]
        (torch.Size([2, 5, 6]), [(2, 8), (2, 6)])
        >>> ps.trace(rnn, torch.zeros(1, 5, 4))  # the units of the last layer are outputs
        Network(208 weights in 8 parameters, 8 unit classes)
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        *,
        input_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        weight_drop: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(hidden_sizes, Sequence):
            raise TypeError(
                f"hidden_sizes must be a sequence, one size per layer, got {hidden_sizes}"
            )
        sizes = [input_size, *hidden_sizes]
        if len(sizes) < 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ValueError(
                f"a stack needs a layer, and positive sizes that are whole: got {input_size} and {list(hidden_sizes)}"
            )
        check_probabilities(
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
            weight_drop=weight_drop,
        )
        self.input_size = input_size
        self.hidden_sizes = tuple(hidden_sizes)
        self.input_dropout = input_dropout
        self.hidden_dropout = hidden_dropout
        self.output_dropout = output_dropout
        self.weight_drop = weight_drop
        self.layers = nn.ModuleList(
            nn.RNN(fan_in, fan_out, nonlinearity="relu", bias=bias, batch_first=True)
            for fan_in, fan_out in pairwise(sizes)
        )

    def forward(self, inputs: Tensor, states: States | None = None) -> tuple[Tensor, States]:
        """Run the stack.

        Args:
            inputs: ``[B, T, D]``.
            states: where each layer starts, from an earlier call; zero if None.

        Returns:
            The states of the last layer, ``[B, T, H]``, and the last state of every layer.

        Raises:
            ValueError: there is not one state per layer.
        """
        if states is not None and len(states) != len(self.layers):
            raise ValueError(f"got {len(states)} states for {len(self.layers)} layers")
        x = self._drop(inputs, self.input_dropout)
        last = []
        for i, layer in enumerate(self.layers):
            start = None if states is None else states[i].unsqueeze(0)
            x, end = self._run(layer, x, start)  # type: ignore[arg-type]
            last.append(end[0])
            x = self._drop(
                x, self.hidden_dropout if i + 1 < len(self.layers) else self.output_dropout
            )
        return x, tuple(last)

    def extra_repr(self) -> str:
        """Return the dropouts that are in use."""
        names = ("input_dropout", "hidden_dropout", "output_dropout", "weight_drop")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name))

    def _drop(self, x: Tensor, p: float) -> Tensor:
        """Leave out features of x ``[B, T, H]``, each at all steps: they are the channels of ``dropout1d``."""
        # the same operations in training and in evaluation, so that a trace of either form is one
        # of both
        return F.dropout1d(x.transpose(1, 2), p, self.training).transpose(1, 2) if p else x

    def _run(self, layer: nn.RNN, x: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.weight_drop:
            return layer(x, start)
        w_in, w_rec, *biases = layer.all_weights[0]
        weights = [w_in, F.dropout(w_rec, self.weight_drop, self.training), *biases]
        if start is None:
            start = x.new_zeros(1, x.shape[0], layer.hidden_size)
        with warnings.catch_warnings():
            # cuDNN would like its weights in one piece of memory, which a fresh mask does not allow
            warnings.filterwarnings("ignore", message="RNN module weights are not part of")
            return torch.rnn_relu(x, start, weights, layer.bias, 1, 0.0, self.training, False, True)


def check_probabilities(**options: float) -> None:
    """Refuse what is no probability of being left out, in [0, 1)."""
    check_numbers(**options)
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
