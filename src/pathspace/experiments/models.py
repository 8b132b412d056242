"""The registry of models: from a task's sizes to a network with one output per sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.tasks import check_options


class ReluRNN(nn.Module):
    """A recurrent network with ReLU units; a linear layer reads the last step.

    Args:
        input_size: D, numbers per step.
        output_size: K, numbers in the output.
        hidden: H, units per layer.
        layers: Recurrent layers, one on top of the other.
    """

    def __init__(self, input_size: int, output_size: int, *, hidden: int = 100, layers: int = 1) -> None:
        super().__init__()
        self.rnn = nn.RNN(input_size, hidden, layers, nonlinearity="relu", batch_first=True)
        self.readout = nn.Linear(hidden, output_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map sequences (B, T, D) to outputs (B, K)."""
        states, _ = self.rnn(inputs)
        return self.readout(states[:, -1])


MODELS: dict[str, Callable[..., nn.Module]] = {"relu-rnn": ReluRNN}


def build_model(name: str, input_size: int, output_size: int, options: Mapping[str, Any]) -> nn.Module:
    """Return the model called `name`, freshly initialised from torch's global random state.

    Args:
        name: A name in `MODELS`.
        input_size: D of the task.
        output_size: K of the task.
        options: What the model takes, for example `{"hidden": 64}`; all of them sizes.

    Raises:
        ConfigurationError: The name or an option is unknown, or a size is not a whole number from 1 on.
    """
    check_model(name, options)
    return MODELS[name](input_size, output_size, **options)


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` unless `build_model` would accept the name and the options."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS, "the setting 'model'")
    check_options(MODELS[name], options, f"model_options of the model {name!r}")
    for option, size in options.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigurationError(
                f"The option {option!r} of the model {name!r} is {size!r}: give a whole number from 1 on."
            )
