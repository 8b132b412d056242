"""The settings of a comparison: defaults, the task's preset, a recipe, the command line, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from pathspace.experiments import models, tasks
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import (
    CONFIG,
    Count,
    Layer,
    Natural,
    NotNegative,
    Positive,
    Several,
    Share,
    Some,
    expected,
    known,
    laid_over,
    wrong,
)
from pathspace.experiments.methods import (
    MAIN_METHODS,
    METHODS,
    NO_BASIS,
    SKELETON_ONES,
    check_start,
    method,
)
from pathspace.experiments.models import RESCALABLE, check_model, options_of
from pathspace.experiments.run import SCHEDULES, RunConfig
from pathspace.experiments.tasks import check_task, preset

# Final runs use the seeds 0, 1, 2, ...; learning rates are chosen on others, so that no reported
# run was selected.
FIRST_TUNING_SEED = 1000
# Of no use where no rate is chosen for a row of a table, as in a single run and a sweep.
OF_A_TABLE = (
    "tuning",
    "tuning_seeds",
    "shared_rates",
    "verified_seeds",
    "target_error",
    "baselines",
)


def _zero_or_from_one(value: float) -> float:
    if 0 < value < 1:
        raise expected("0, or 1 or more")
    return value


Seeds = Annotated[int, Field(ge=1, le=FIRST_TUNING_SEED)]
# of far more, a system may give none, and torch ends the process
Threads = Annotated[int, Field(ge=1, le=1024)]
Factor = Annotated[float, Field(ge=0), AfterValidator(_zero_or_from_one)]


@dataclass(frozen=True, config=CONFIG)
class Settings:
    """Methods, task, model and budget of a comparison; the same for every method.

    Attributes:
        task: A name in `tasks.TASKS`.
        task_options: What the task takes.
        model: A name in `models.MODELS`.
        model_options: What the model takes.
        method_options: By name of a method, options of the model for this method alone, laid over
            `model_options`.
        methods: Names in `methods.METHODS`, in the order of the table.
        starts: Names in `methods.STARTS`; differences are measured against the first one.
        shared_rates: Whether another start, where it prefers a rate of its own, runs at the first
            start's rate too.
        seeds: Runs per row of the table.
        tuning_seeds: Runs per learning rate while the rate is chosen.
        learning_rates: The grid, the same for every start and method but those of `method_rates`.
        method_rates: By name of a method, a grid of its own, of as many rates: for rules of another
            unit.
        weight_decays: The grid of decoupled weight decays, the same for every method and start; the
            first one is what runs outside the grid take.
        tuning: `"grid"` tries every pair of learning rate and decay; `"one standard error"`, too,
            and takes the least rate that several seeds do not tell from the best; `"in turn"` tries
            every rate with the first decay, then the other decays with the best rate.
        tuning_epochs: Passes over the training split while rate and decay are chosen; 0 is as many
            as `epochs`, as are those of a preset or recipe that exceed the `epochs` of a command.
        epochs: Passes over the training split.
        schedule: A name in `run.SCHEDULES`.
        warmup: The part of a run, in [0, 1), over which the learning rate rises linearly.
        batch_size: Sequences per step.
        momentum: See `run.RunConfig`.
        clip_norm: Largest norm of a step's gradient; 0 does not clip.
        clip_step: Longest step, before the learning rate and on balanced weights, of the methods
            that have such a bound (see `pathspace.optim.PathSGD`); 0 sets none.
        refresh_every: Steps between two computations of kappa, for the methods that use it.
        damping: What they add to kappa, as a fraction of its mean.
        rescale_exponent: k; the rescaled start uses powers of two from 2^-k to 2^k.
        rescale_factor: f; if it is not 0, the rescaled start uses any numbers from 1/f to f
            instead.
        verified_seeds: 0 does every run. Otherwise runs that an exact symmetry makes the same to
            the last bit are done once, after runs of the length of tuning runs, with the chosen
            rates and so many seeds, have shown that they are the same.
        validate_every: Steps between validations, besides those after every epoch; 0 makes no
            others.
        baselines: The methods that the others are to beat: the report compares each of them with
            the best of these.
        target_error: The report says how long every method takes to this validation error; 0 leaves
            that out.
        stop_error: A run ends with the first epoch after which its validation error is below it; 0
            ends none early.
        checkpoint_every: Steps between checkpoints.
        threads: Threads of PyTorch in every run.
        plain_rnn: Whether ReLU recurrent layers are `torch.nn.RNN`, not `pathspace.nn.RNN`, which
            is equal to rounding.
    """

    task: str = "digits"
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "relu-rnn"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    methods: Several[str] = MAIN_METHODS
    starts: Several[str] = ("balanced", "rescaled")
    shared_rates: bool = True
    seeds: Seeds = 3
    tuning_seeds: Seeds = 1
    learning_rates: Several[Positive] = (1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    method_rates: Mapping[str, Several[Positive]] = field(default_factory=dict)
    weight_decays: Several[NotNegative] = (0.0,)
    tuning: Literal["grid", "one standard error", "in turn"] = "grid"
    tuning_epochs: Natural = 0
    epochs: Count = 10
    schedule: Annotated[str, known(SCHEDULES, "schedule")] = "constant"
    warmup: Share = 0.0
    batch_size: Count = 32
    momentum: Share = 0.0
    clip_norm: NotNegative = 0.0
    clip_step: NotNegative = 0.0
    refresh_every: Count = 10
    damping: NotNegative = 0.1
    rescale_exponent: Natural = 5
    rescale_factor: Factor = 0.0
    verified_seeds: Annotated[int, Field(ge=0, le=FIRST_TUNING_SEED)] = 0
    validate_every: Natural = 0
    baselines: Some[str] = ()
    target_error: NotNegative = 0.0
    stop_error: NotNegative = 0.0
    checkpoint_every: Count = 200
    threads: Threads = 1
    plain_rnn: bool = False

    def __post_init__(self) -> None:
        if not set(self.baselines) <= set(self.methods):
            raise wrong("baselines", self.baselines, "some of the methods")
        for name in self.methods:
            method(name)
        for name in self.method_options:
            method(name, "the setting 'method_options'")
        for name in self.method_rates:
            method(name, "the setting 'method_rates'")
            self._check_rates_of(name)
        bounded = [name for name in METHODS if METHODS[name].clips_steps]
        if self.clip_step and set(bounded).isdisjoint(self.methods):
            raise ConfigurationError(
                f"None of the methods {', '.join(self.methods)} has a bound clip_step (the option --clip-step): leave "
                f"it out, or choose from {', '.join(bounded)}."
            )
        for name in self.starts:
            check_start(name, "the setting 'starts'")
        for name in self.methods:
            self._check_model_of(name)
        # a method may bring its own model, which ignores what it does not take
        check_model(self.model, self.model_options)
        check_task(self.task, self.task_options)

    def rates_of(self, name: str) -> tuple[float, ...]:
        """Return the learning rates that a method is tried with."""
        return self.method_rates.get(name, self.learning_rates)

    def model_of(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return the model that a method trains, and its options.

        A model that the method brings along gets those options of the settings that it takes; but
        for `start`, which is one of the settings' own model: the identity says nothing to an LSTM
        beside ReLU networks.
        """
        chosen = method(name)
        model = chosen.model or self.model
        common = dict(self.model_options)
        if model != self.model:
            kept = set(options_of(model)) - set(models.OF_STARTS)
            common = {option: value for option, value in common.items() if option in kept}
        return model, {**common, **chosen.model_options, **self.method_options.get(name, {})}

    def _check_rates_of(self, name: str) -> None:
        rates = self.method_rates[name]
        wanted = len(self.learning_rates)
        if name in self.methods and len(rates) != wanted:  # all get the same number of tuning runs
            first = max(0, len(rates) - wanted) // 2
            example = [f"{rate:g}" for rate in rates[first : first + wanted]]
            example += ["..."] * (len(example) < wanted)
            raise ConfigurationError(
                f"The setting 'method_rates' has a grid of {len(rates)} for {name!r}, and learning_rates one of "
                f"{wanted}: give as many, such as `--set 'method_rates.{name}=[{', '.join(example)}]'`, or leave the "
                "method out by --methods."
            )

    def _unreadable(self, model: str) -> str:
        """Say why a model cannot read what the task has, and what to do; nothing if it can."""
        if (model == tasks.OWN) != (self.task == tasks.OWN):
            return (
                f"The model {model!r} does not go with the task {self.task!r}: a file of your own brings both, as "
                "`pathspace compare FILE.py`, and methods with a model of theirs have to be left out."
            )
        if (model in models.OF_IMAGES) != (self.task in tasks.OF_IMAGES):
            kind = "images" if self.task in tasks.OF_IMAGES else "sequences"
            return (
                f"The model {model!r} cannot read the {kind} of the task {self.task!r}: choose another task or "
                "model."
            )
        if model in models.OF_SYMBOLS and self.task not in tasks.OF_SYMBOLS:
            return (
                f"The model {model!r} reads symbols, and those of the task {self.task!r} are none: set task to "
                f"{' or '.join(tasks.OF_SYMBOLS)}."
            )
        stream = self.task_options.get("stream", False) is True
        if (model in models.OF_STREAMS) == stream:
            return ""
        if stream:
            other = models.OF_STREAMS[0]
            return f"The model {model!r} carries no state along a stream: set model to {other!r}."
        return f"The model {model!r} reads streams alone: set task_options.stream to true."

    def _check_model_of(self, name: str) -> None:
        """Refuse a method with a model that it cannot train, or not on this task or from these starts."""
        model, options = self.model_of(name)
        if unreadable := self._unreadable(model):
            raise ConfigurationError(unreadable)
        check_model(model, options)
        self._check_trains(name, model)
        ends_alone = options.get("output") != "every"
        if self.task not in tasks.OF_SYMBOLS and (options.get("embedding") or not ends_alone):
            raise ConfigurationError(
                f"The sequences of the task {self.task!r} are numbers, answered at their end: leave out "
                "model_options.embedding, which is of symbols, and model_options.output."
            )
        centred = method(name).normalizes.get("statistic") == "covariance"
        # one value for each node
        if centred and self.batch_size == 1 and ends_alone:
            raise ConfigurationError(
                f"The method {name!r} takes the variance of a batch, and the batch size is 1: give 2 or more."
            )
        self._check_starts(name, model)

    def _check_trains(self, name: str, model: str) -> None:
        refuses = method(name).refuses
        if model not in refuses:
            return
        others = [m for m in models.MODELS if m not in refuses and not self._unreadable(m)]
        remedy = f", or set model to one that it can train: {', '.join(others)}" if others else ""
        raise ConfigurationError(
            f"The method {name!r} cannot train the model {model!r}: {refuses[model]}. "
            f"Choose another method{remedy}."
        )

    def _check_starts(self, name: str, model: str) -> None:
        if model not in RESCALABLE and self.starts != ("default",):
            raise ConfigurationError(
                f"The method {name!r} trains the model {model!r}, whose units cannot be rescaled: set starts to "
                "['default'], or leave the method out."
            )
        if SKELETON_ONES in self.starts and model in NO_BASIS:
            raise ConfigurationError(
                f"The model {model!r} has no skeleton: {NO_BASIS[model]}. Leave {SKELETON_ONES!r} out of the starts, "
                "or set another model."
            )

    def run_config(
        self,
        method: str,
        start: str,
        learning_rate: float,
        seed: int,
        *,
        evaluate_test: bool,
        weight_decay: float | None = None,
        epochs: int = 0,
    ) -> RunConfig:
        """Return the configuration of one run of this comparison.

        Without a weight decay it has the first one of the grid, and without epochs those of the settings.
        """
        model, model_options = self.model_of(method)
        own = {
            "task_options": dict(self.task_options),
            "model": model,
            "model_options": model_options,
            "method": method,
            "start": start,
            "learning_rate": learning_rate,
            "seed": seed,
            "epochs": epochs or self.epochs,
            "clip_norm": self.clip_norm or None,
            "clip_step": self.clip_step if METHODS[method].clips_steps else 0.0,
            "evaluate_test": evaluate_test,
            "weight_decay": self.weight_decays[0] if weight_decay is None else weight_decay,
        }
        shared = [item.name for item in fields(RunConfig) if item.name not in own]
        return RunConfig(**{name: getattr(self, name) for name in shared}, **own)


def settings_from(*layers: Layer) -> Settings:
    """Lay settings over the defaults and the preset of the task, later ones over earlier ones.

    Args:
        layers: Pairs of where the settings stand, for errors, and their names and values. Tables
            are merged entry by entry, and so are the options of one method.
    """
    task: Any = Settings.task
    for _, layer in layers:
        task = layer.get("task", task)
    if not isinstance(task, str):
        raise ConfigurationError(f"The setting 'task' is {task!r}: give the name of one task.")
    laid: list[Layer] = []
    tuning_epochs: Any = 0
    for where, layer in (("the preset", preset(task)), *layers):
        own = layer
        given = "epochs" in layer and "tuning_epochs" not in layer
        if given and _exceeds(tuning_epochs, layer["epochs"]):
            own = {**layer, "tuning_epochs": 0}  # those were of longer runs
        tuning_epochs = own.get("tuning_epochs", tuning_epochs)
        laid.append((where, own))
    return laid_over(Settings, laid)


def _exceeds(value: Any, other: Any) -> bool:
    return isinstance(value, int) and isinstance(other, int) and value > other


def refuse_unused(names: Iterable[str], given: Mapping[str, Any], sentence: str) -> None:
    """Raise a `ConfigurationError` for a setting of the command line that would change nothing."""
    for name in names:
        if name in given:
            raise ConfigurationError(sentence.format(name))
