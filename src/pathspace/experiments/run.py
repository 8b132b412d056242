"""A training run: its configuration, its state while it lasts, and its result."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from pathspace.experiments.storage import finite

if TYPE_CHECKING:
    from torch import Tensor, nn, optim

CHECKPOINT = "checkpoint.pt"
RESULT = "result.json"
"""Files in the folder of a run: of one that was stopped, and of one that is done."""
Finite = PlainSerializer(finite)
Stored = Annotated[
    float, BeforeValidator(lambda value: math.nan if value is None else value), Finite
]
"""A number that is None on disk where it is not finite."""
DROPS = {"steps": (1 / 2, 3 / 4, 7 / 8), "drop": (4 / 5, 19 / 20)}
"""The parts of a run after each of which a rate is a tenth of what it was."""
SCHEDULES = {
    "constant": "the learning rate as it is",
    "cosine": "half a period of a cosine, from the learning rate to 0",
    "steps": "a tenth after 1/2, 3/4 and 7/8 of the run",
    "drop": "the learning rate as it is, a tenth of it from 4/5 of the run on, a hundredth from 19/20 on",
}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of a run; what is not said here is as in `settings.Settings`.

    Attributes:
        method: A name in `methods.METHODS`.
        start: A name in `methods.STARTS`.
        learning_rate: Step size of the method.
        seed: Decides initial weights, rescaling factors and batches.
        momentum: For the methods that have one in this sense; Adam keeps its own two decay rates,
            and the quasi-diagonal natural gradient takes none.
        clip_norm: Largest norm of a step's gradient; None does not clip.
        threads: Threads of PyTorch; their number changes the order of sums, hence the last bits.
        evaluate_test: Whether the test split is looked at, after every epoch; never while learning
            rates are chosen.
        weight_decay: Decoupled from the gradient: every parameter times 1 - learning_rate
            weight_decay.
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
    schedule: str = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.0
    refresh_every: int = 1
    damping: float = 0.0
    rescale_factor: float = 0.0
    validate_every: int = 0
    clip_step: float = 0.0
    plain_rnn: bool = False
    stop_error: float = 0.0

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the values of what runs of earlier versions may not state."""
        return {item.name: item.default for item in fields(cls) if item.default is not MISSING}

    @property
    def key(self) -> str:
        """A file name that is the same for equal configurations and no others."""
        # Fields with a default are left out where they have it, so that a new one changes no names.
        later = self.defaults()
        values = self.as_dict().items()
        stated = {name: v for name, v in values if name not in later or v != later[name]}
        content = json.dumps(stated, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return f"{self.method}-{self.start}-{self.learning_rate:g}-{self.seed}-{digest}"

    @property
    def label(self) -> str:
        """The name of the run in progress displays."""
        decay = f", decay {self.weight_decay:g}" if self.weight_decay else ""
        return f"{self.method}, {self.start}, rate {self.learning_rate:g}{decay}, seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Validation:
    """Loss and error on the validation split after `step` steps."""

    step: int
    loss: Stored
    error: Stored


@dataclass(frozen=True)
class Epoch:
    """Errors of one pass.

    Attributes:
        step: How many steps the run had done after it.
        training: Mean over its training batches, each before its step; None, once stored, if it is
            not finite.
        test: On the test split after it; None in runs that may not look.
    """

    step: int
    training: Annotated[float | None, Finite]
    test: Annotated[float | None, Finite]


@dataclass
class RunState:
    """A run while it lasts; `order` follows from the rest, which goes into checkpoints.

    `devices` are those that have computed, in their order; the last one does.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    step: int = 0
    seconds: float = 0.0
    diverged_at: int | None = None
    losses: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    errors: float = 0.0  # of the training batches of the present epoch, added up
    order: Tensor | None = None
    carried: tuple[Tensor, ...] | None = None  # a stream's states, from one segment to the next


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        config: What it was asked for.
        losses: The training loss of every step's batch, before the step; up to the step that
            diverged.
        validations: At the start and after every epoch.
        test_error: After the last step; None when the run diverged or was not to look.
        diverged_at: The step whose loss was not finite, or None.
        seconds: Time spent in training steps, evaluation not counted.
        step_seconds: The median time of one training step: what else the machine does hardly shows
            in it. None if no step was done.
        device: Where it was computed; `"cpu, then cuda"` if it was continued elsewhere.
        kernel: What ReLU recurrent layers ran at its end (see `pathspace.nn.RNN.kernel`); None if
            there were none, or if they were told to be `torch.nn.RNN`.
        epochs: Training and test error of every epoch.
    """

    config: RunConfig
    losses: tuple[float, ...]
    validations: tuple[Validation, ...]
    test_error: float | None
    diverged_at: int | None
    seconds: float
    step_seconds: float | None = None
    device: str = "cpu"
    kernel: str | None = None
    epochs: tuple[Epoch, ...] = ()

    @property
    def validation_score(self) -> tuple[float, float]:
        """The last validation error and, to settle ties, loss; infinite when the run diverged."""
        if self.diverged_at is not None:
            return (math.inf, math.inf)
        return (self.validations[-1].error, self.validations[-1].loss)

    @property
    def failed(self) -> bool:
        """True if the run diverged or ended no better than it began, by the validation loss."""
        return (
            self.diverged_at is not None or not self.validations[-1].loss < self.validations[0].loss
        )

    @property
    def lost_at(self) -> int | None:
        """The step at which the run was lost; None for one that came through.

        A run that failed may be lost with finite numbers, too: where its loss first rose above ten
        times that of the beginning.
        """
        if self.diverged_at is not None or not self.failed:
            return self.diverged_at
        return next(
            (step for step, loss in enumerate(self.losses) if loss > 10 * self.losses[0]), None
        )

    @property
    def words(self) -> str:
        """The end of the run in a few words."""
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at}"
        error = self.validations[-1].error
        test = "" if self.test_error is None else f", test error {self.test_error:.4g}"
        return f"validation error {error:.4g}{test}, {self.seconds:.1f} s"

    def steps_to(self, error: float) -> int | None:
        """Return the step of the first validation whose error is at most `error`; None if there is none."""
        return next((v.step for v in self.validations if v.error <= error), None)

    def seconds_to(self, error: float) -> float | None:
        """Return `steps_to` times the median time of a step."""
        steps = self.steps_to(error)
        return None if steps is None or self.step_seconds is None else steps * self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a number that is not finite becomes None."""
        return TypeAdapter(RunResult).dump_python(self, mode="json")


def factor(schedule: str, warmup: float, step: int, steps: int) -> float:
    """Return what multiplies the learning rate at one step.

    .. code-block:: text

        w = round(warmup steps)
        (step + 1) / w                                     for step < w
        (1 + cos(pi (step - w) / (steps - w))) / 2         for a cosine, from then on
        10^-(how many of 1/2, 3/4, 7/8 are <= step / steps)    for steps, from then on
        10^-(how many of 4/5, 19/20 are <= step / steps)       for drop, from then on

    Args:
        schedule: A name in `SCHEDULES`.
        warmup: The part of the run, in [0, 1), over which the factor rises linearly.
        step: The number of the step, from 0.
        steps: How many steps the whole run has.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule in DROPS:
        return 0.1 ** sum(step >= drop * steps for drop in DROPS[schedule])
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / (steps - rising)))
