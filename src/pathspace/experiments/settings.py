"""The settings of a comparison: defaults, the task's preset, a recipe, the command line, in this order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.methods import MAIN_METHODS, method
from pathspace.experiments.models import check_model
from pathspace.experiments.run import RunConfig
from pathspace.experiments.starts import check_start
from pathspace.experiments.tasks import check_task, preset

# Final runs use the seeds 0, 1, 2, ...; learning rates are chosen on others, so that no reported run was
# selected.
FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class Settings:
    """What is compared, and with which budget; the same for every method.

    Attributes:
        task: A name in `tasks.TASKS`.
        task_options: What the task's `build` takes.
        model: A name in `models.MODELS`.
        model_options: What the model takes.
        methods: Names in `methods.METHODS`, in the order of the table.
        starts: Names in `starts.STARTS`; differences are measured against the first one.
        seeds: Runs per row of the table.
        tuning_seeds: Runs per learning rate while the rate is chosen.
        learning_rates: The grid, the same for every method and start.
        epochs: Passes over the training split.
        batch_size: Sequences per step.
        momentum: See `methods.Hyperparameters`.
        clip_norm: Largest norm of a step's gradient; 0 does not clip.
        rescale_exponent: k; the rescaled start uses powers of two from 2^-k to 2^k.
        checkpoint_every: Steps between checkpoints.
        threads: Threads of PyTorch in every run.
    """

    task: str = "digits"
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "relu-rnn"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = MAIN_METHODS
    starts: tuple[str, ...] = ("balanced", "rescaled")
    seeds: int = 3
    tuning_seeds: int = 1
    learning_rates: tuple[float, ...] = (1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    epochs: int = 10
    batch_size: int = 32
    momentum: float = 0.0
    clip_norm: float = 0.0
    rescale_exponent: int = 5
    checkpoint_every: int = 200
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("seeds", "tuning_seeds", "epochs", "batch_size", "checkpoint_every", "threads"):
            _require(name, getattr(self, name), _is_whole(getattr(self, name), 1), "a whole number from 1 on")
        _require(
            "rescale_exponent", self.rescale_exponent, _is_whole(self.rescale_exponent, 0), "a whole number"
        )
        _require(
            "momentum", self.momentum, _is_real(self.momentum) and 0 <= self.momentum < 1, "one in [0, 1)"
        )
        _require("clip_norm", self.clip_norm, _is_real(self.clip_norm) and self.clip_norm >= 0, "0 or more")
        rates = self.learning_rates
        good = len(rates) > 0 and all(_is_real(rate) and rate > 0 for rate in rates)
        _require("learning_rates", list(rates), good, "one or more positive numbers")
        for name in ("methods", "starts"):
            chosen = getattr(self, name)
            _require(name, list(chosen), len(chosen) > 0, "at least one")
            _require(name, list(chosen), len(set(chosen)) == len(chosen), "each one once")
        for name in self.methods:
            method(name)
        for name in self.starts:
            check_start(name, "the setting 'starts'")
        check_model(self.model, self.model_options)
        check_task(self.task, self.task_options)

    def run_config(
        self, method: str, start: str, learning_rate: float, seed: int, *, evaluate_test: bool
    ) -> RunConfig:
        """Return the configuration of one run of this comparison."""
        return RunConfig(
            task=self.task,
            task_options=dict(self.task_options),
            model=self.model,
            model_options=dict(self.model_options),
            method=method,
            start=start,
            learning_rate=learning_rate,
            seed=seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            momentum=self.momentum,
            clip_norm=self.clip_norm or None,
            rescale_exponent=self.rescale_exponent,
            threads=self.threads,
            evaluate_test=evaluate_test,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `settings_from` reads back."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def settings_from(*layers: tuple[str, Mapping[str, Any]]) -> Settings:
    """Lay settings over the defaults and the preset of the task, later ones over earlier ones.

    Args:
        layers: Pairs of where the settings stand, for errors, and their names and values. The tables
            `task_options` and `model_options` are merged entry by entry.

    Raises:
        ConfigurationError: A name is unknown or a value impossible.
    """
    known = [item.name for item in fields(Settings)]
    task = Settings.task
    for where, layer in layers:
        for name in layer:
            if name not in known:
                raise unknown_name("setting", name, known, where)
        task = layer.get("task", task)
    if not isinstance(task, str):
        raise ConfigurationError(f"The setting 'task' is {task!r}: give the name of one task.")
    merged: dict[str, Any] = {"task": task}
    for where, layer in (("the preset", preset(task)), *layers):
        for name, value in layer.items():
            if name.endswith("_options"):
                if not isinstance(value, Mapping):
                    raise ConfigurationError(f"The setting {name!r} in {where} is {value!r}: give a table.")
                merged[name] = {**merged.get(name, {}), **value}
            elif name in ("methods", "starts", "learning_rates"):
                if not isinstance(value, list | tuple):
                    raise ConfigurationError(f"The setting {name!r} in {where} is {value!r}: give a list.")
                merged[name] = tuple(value)
            else:
                merged[name] = value
    return Settings(**merged)


def _require(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ConfigurationError(f"The setting {name!r} is {value!r}: give {expected}.")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
