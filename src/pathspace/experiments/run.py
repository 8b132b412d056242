"""What goes into a training run, what it is while it lasts, and what comes out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn, optim


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of a run.

    Attributes:
        task: A name in `tasks.TASKS`, with its options.
        task_options: See the task.
        model: A name in `models.MODELS`, with its options.
        model_options: See the model.
        method: A name in `methods.METHODS`.
        start: A name in `starts.STARTS`.
        learning_rate: Step size of the method.
        seed: Decides initial weights, rescaling factors and batches.
        epochs: Passes over the training split.
        batch_size: Sequences per step; an incomplete last batch is left out.
        momentum: See `methods.Hyperparameters`.
        clip_norm: See `methods.Hyperparameters`.
        rescale_exponent: k; the rescaled start uses factors from 2^-k to 2^k.
        threads: Threads of PyTorch; their number changes the order of sums, hence the last bits.
        evaluate_test: Whether the test split is looked at; never while learning rates are chosen.
    """

    task: str
    task_options: Mapping[str, Any]
    model: str
    model_options: Mapping[str, Any]
    method: str
    start: str
    learning_rate: float
    seed: int
    epochs: int
    batch_size: int
    momentum: float
    clip_norm: float | None
    rescale_exponent: int
    threads: int
    evaluate_test: bool

    @property
    def key(self) -> str:
        """A file name that is the same for equal configurations and no others."""
        content = json.dumps(self.as_dict(), sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return f"{self.method}-{self.start}-{self.learning_rate:g}-{self.seed}-{digest}"

    @property
    def label(self) -> str:
        """What progress displays call the run."""
        return f"{self.method}, {self.start}, rate {self.learning_rate:g}, seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Validation:
    """Loss and error on the validation split after `step` steps."""

    step: int
    loss: float
    error: float


@dataclass
class RunState:
    """A run while it lasts; `order` follows from the rest, which goes into checkpoints."""

    model: nn.Module
    optimizer: optim.Optimizer
    step: int = 0
    seconds: float = 0.0
    diverged_at: int | None = None
    losses: list[float] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    order: Tensor | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run gave.

    Attributes:
        config: What it was asked for.
        losses: The training loss of every step's batch, before the step; up to the step that diverged.
        validations: At the start and after every epoch.
        test_error: After the last step; None when the run diverged or was not to look.
        diverged_at: The step whose loss was not finite, or None.
        seconds: Time spent in training steps, evaluation not counted.
    """

    config: RunConfig
    losses: tuple[float, ...]
    validations: tuple[Validation, ...]
    test_error: float | None
    diverged_at: int | None
    seconds: float

    @property
    def validation_score(self) -> tuple[float, float]:
        """The last validation error and, to settle ties, loss; infinite when the run diverged."""
        if self.diverged_at is not None:
            return (math.inf, math.inf)
        return (self.validations[-1].error, self.validations[-1].loss)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a number that is not finite becomes None."""
        values = asdict(self)
        for entry in values["validations"]:
            entry.update({name: _finite(entry[name]) for name in ("loss", "error")})
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunResult:
        """Undo `as_dict`."""
        validations = (
            Validation(
                entry["step"], *(math.nan if entry[n] is None else entry[n] for n in ("loss", "error"))
            )
            for entry in values["validations"]
        )
        return cls(
            config=RunConfig(**values["config"]),
            losses=tuple(values["losses"]),
            validations=tuple(validations),
            test_error=values["test_error"],
            diverged_at=values["diverged_at"],
            seconds=values["seconds"],
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
