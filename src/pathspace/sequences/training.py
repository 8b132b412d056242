"""Training: writing and transition steps in turn, rates that steer themselves, stopping on a validation text.

Alphabet of this module: N units; a *pass* is one step that was kept, of w or of (tau, rho, V0).

    try the step; if the log-likelihood falls or is not finite, undo it, halve that rate, try the same direction
    again; if it rises, keep it and multiply the rate by 1.1. Rates start at 1/N. w comes first: with the start
    values, where all w but the always-on unit's are zero, the transition metric would be singular.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_args

import numpy as np

from pathspace.sequences.batches import Batches
from pathspace.sequences.evaluation import code_length
from pathspace.sequences.growing import growing_parts
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.passes import (
    Forward,
    Metric,
    WritingStep,
    activities,
    forward,
    transition_direction,
    writing_direction,
)
from pathspace.sequences.prior import Prior
from pathspace.sequences.text import Corpus

_RISE = 1.1
_FALL = 0.5
_TRIES = 60
# where `reach` bounds every step, a rate would rise for ever, beyond all numbers
_HIGHEST = 2.0**_TRIES


def _number(value: Any) -> float:
    """Return a number, and NaN, which is in no range, of anything else."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # a whole number beyond float64
        return math.inf


@dataclass(frozen=True)
class Settings:
    """Options of a training.

    Args:
        metric: "rbp", "rutsd", "rbp-qd", "rutsd-qd", "fb" or "bp" for the transition steps.
        writing: "qdh", "dh", "fisher" or "bp" for the writing steps.
        damping: eps of the transition metric.
        writing_damping: factor of eps_y, the damping of the writing metric: the frequency of y plus
            2.2e-16.
        reach: most that a transition step may change what a symbol adds to a unit; None: no bound.
        prior_writing: precision of a Gaussian prior of the writing weights, 0 for none.
        prior_transition: precision of a Gaussian prior of the transition weights, around the start
            values.
        passes: stop after this many passes.
        seconds: stop after about this many seconds of training, or never if None.
        patience: stop when the validation has not improved for this many passes, or never if None.
        validate_every: passes between two looks at the validation text; there is one more at the
            end.
        grow: begin on parts of a long text, which double; see `growing_parts`. No look is taken at
            the validation text before the whole is reached.
        batch: how many texts each two steps are made on, see `Batches`; None: all.

    Raises:
        ValueError: if a name is unknown or a number out of range.
    """

    metric: Metric = "rbp"
    writing: WritingStep = "qdh"
    damping: float = 1.0
    writing_damping: float = 1.0
    reach: float | None = None
    prior_writing: float = 0.0
    prior_transition: float = 0.0
    passes: int = 1000
    seconds: float | None = None
    patience: int | None = 300
    validate_every: int = 2
    grow: bool = False
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise ValueError(f"unknown metric {self.metric!r}, choose from {get_args(Metric)}")
        if self.writing not in get_args(WritingStep):
            raise ValueError(
                f"unknown writing step {self.writing!r}, choose from {get_args(WritingStep)}"
            )
        for name in ("damping", "writing_damping", "prior_writing", "prior_transition"):
            if not 0 <= _number(getattr(self, name)) < math.inf:
                raise ValueError(
                    f"{name} must be at least 0 and finite, got {getattr(self, name)!r}"
                )
        if self.reach is not None and not 0 < _number(self.reach) < math.inf:
            raise ValueError(
                f"reach must be above 0 and finite, or None for no bound, got {self.reach!r}"
            )
        self._check_end()
        self._check_batch()

    def _check_end(self) -> None:
        """Refuse bounds of the training that are out of range."""
        for name, none in (("seconds", "no bound"), ("patience", "no end of it")):
            value = getattr(self, name)
            if value is not None and not _number(value) >= 0:
                raise ValueError(f"{name} must be at least 0, or None for {none}, got {value!r}")
        if self.passes < 0 or self.validate_every < 1:
            raise ValueError("passes must be at least 0 and validate_every at least 1")

    def _check_batch(self) -> None:
        """Refuse batches that are no number of texts, or of a text that grows."""
        if self.batch is None:
            return
        if type(self.batch) is not int or self.batch < 1:
            raise ValueError(
                f"batch must be a whole number of at least 1, or None for all texts, got {self.batch!r}"
            )
        if self.grow:
            raise ValueError("batches of texts do not grow: leave out batch or grow")

    def is_over(self, training: Training, *, validated: bool) -> bool:
        """Return whether the passes, the seconds or the patience of a training are spent.

        Args:
            training: where it stands.
            validated: whether looks are taken at a validation text: without them there is nothing
                to lose patience with.
        """
        if training.passes >= self.passes:
            return True
        if self.seconds is not None and training.seconds >= self.seconds:
            return True
        if not validated or self.patience is None:
            return False
        return training.passes - training.best_pass >= max(self.patience, self.validate_every)


@dataclass(frozen=True, eq=False)
class Training:
    """State of a training: all that is needed to go on exactly as if it had never stopped.

    Args:
        model: the parameters after the last pass.
        rate_w: rate of the next writing step.
        rate_tau: rate of the next transition step.
        passes: passes so far; even: a writing step is next.
        tries: passes over the text so far, those undone included.
        seconds: training time so far.
        log_likelihood: of the training text, in nats, NaN before the first pass; while the training
            is on a part or a batch of the text, of that, as if the rest were as long a symbol.
        best: the parameters with the shortest validation text at a scheduled look, or None without
            validation.
        centre: the start values, where a prior pulls to, or None without one.
        best_bits: length of the validation text in bits under them, infinite before the first look.
        best_pass: the pass that made them.
        validation_bits: length of the validation text at the last look of this training, NaN before
            its first; shorter than `best_bits` where a training has ended between two scheduled
            looks with its best parameters.
        broke_off: whether it, or one of those that were merged, ended because the next direction is
            not finite; files do not say so.
    """

    model: Parameters
    rate_w: float
    rate_tau: float
    passes: int = 0
    tries: int = 0
    seconds: float = 0.0
    log_likelihood: float = math.nan
    best: Parameters | None = None
    centre: Parameters | None = None
    best_bits: float = math.inf
    best_pass: int = 0
    validation_bits: float = math.nan
    broke_off: bool = False

    @classmethod
    def begin(cls, model: Parameters, rate: float | None = None) -> Training:
        """Return a training at its beginning; the rates are 1/N unless given.

        Raises:
            ValueError: the rate is not above 0, or not finite.
        """
        first = 1 / model.units if rate is None else _number(rate)
        if not 0 < first < math.inf:
            raise ValueError(
                f"rate must be above 0 and finite, or None for one by the number of units, got {rate!r}"
            )
        return cls(model, first, first)

    @property
    def result(self) -> Parameters:
        """The parameters to keep."""
        return self.model if self.best is None or self._ends_best else self.best

    @property
    def result_bits(self) -> float:
        """Length of the validation text in bits under them, infinite before the first look."""
        return self.validation_bits if self._ends_best else self.best_bits

    @property
    def result_pass(self) -> int:
        """The pass that made them."""
        return self.passes if self._ends_best else self.best_pass

    @property
    def _ends_best(self) -> bool:
        return self.validation_bits < self.best_bits


Report = Callable[[Training], None]


class _Memory:
    """Two sets of states: those of the parameters in force, and those of the step on trial."""

    def __init__(self) -> None:
        self.a = Buffers()
        self.trial_a = Buffers()
        self.pi = Buffers()
        self.trial_pi = Buffers()
        self.back = Buffers()
        self.validation = Buffers()

    def keep(self, new_activities: bool) -> None:
        if new_activities:
            self.a, self.trial_a = self.trial_a, self.a
        self.pi, self.trial_pi = self.trial_pi, self.pi


def advance(
    training: Training,
    state: Forward,
    corpus: Corpus,
    settings: Settings,
    memory: _Memory,
    prior: Prior | None = None,
) -> tuple[Training, Forward]:
    """Make one pass: find the direction, then the largest rate on the ladder that does not lose.

    Raises:
        FloatingPointError: if the direction is not finite, as with a singular metric without
            damping.
    """
    model = training.model
    writing = training.passes % 2 == 0
    # a direction that is not finite is told of below
    with np.errstate(all="ignore"):
        if writing:
            direction = writing_direction(
                model, corpus, state, settings.writing, settings.writing_damping, prior
            )
            rate = training.rate_w
        else:
            direction = transition_direction(
                model, corpus, state, settings.metric, settings.damping, memory.back, prior
            )
            rate = training.rate_tau
    if not direction.is_finite:
        raise FloatingPointError(f"the direction of pass {training.passes} is not finite")
    tries = 0
    before = state.log_likelihood - (prior.penalty(model) if prior else 0.0)
    while tries < _TRIES:
        tries += 1
        with np.errstate(all="ignore"):
            trial = training.model.moved(direction, rate, settings.reach)
            a = state.a if writing else activities(trial, corpus, memory.trial_a)
            trial_state = forward(trial, corpus, a, memory.trial_pi)
            after = trial_state.log_likelihood - (prior.penalty(trial) if prior else 0.0)
        # a NaN compares false
        if after >= before:
            if after > before:
                rate = max(rate, min(rate * _RISE, _HIGHEST))
            model = trial
            state = trial_state
            memory.keep(new_activities=not writing)
            break
        rate *= _FALL
    moved = replace(
        training,
        model=model,
        passes=training.passes + 1,
        tries=training.tries + tries,
        log_likelihood=state.log_likelihood,
    )
    if writing:
        return replace(moved, rate_w=rate), state
    return replace(moved, rate_tau=rate), state


def _look(training: Training, validation: Corpus | None, memory: _Memory) -> Training:
    """Look at the validation text; keep the parameters if it has become shorter."""
    if validation is None:
        return replace(training, best=None, best_pass=training.passes)
    bits = code_length(training.model, validation, memory.validation)
    training = replace(training, validation_bits=bits)
    if bits < training.best_bits:
        training = replace(training, best=training.model, best_bits=bits, best_pass=training.passes)
    return training


def _last_look(
    training: Training, validation: Corpus | None, memory: _Memory, every: int | None = None
) -> Training:
    """Look at the validation text where a training ends, so that no pass is lost.

    What the scheduled looks have kept stays, with which the training goes on as if it had never
    stopped.

    Args:
        training: where it ends.
        validation: the text, or None.
        memory: for the states.
        every: passes between two scheduled looks, of which the last pass may have had one; None if
            it had none.
    """
    if validation is None:
        return training
    if every and training.passes % every == 0 and not math.isnan(training.validation_bits):
        return training
    return replace(
        training, validation_bits=code_length(training.model, validation, memory.validation)
    )


def _again(training: Training, validation: Corpus, memory: _Memory) -> Training:
    """Return the training with the length of this validation text; another one than before starts its own record."""
    bits = code_length(training.result, validation, memory.validation)
    if bits == training.best_bits:
        return training
    return replace(training, best=training.result, best_bits=bits, best_pass=training.passes)


def looked(training: Training, validation: Corpus | None) -> Training:
    """Return a training that was stopped with a look at its validation text, which parts of a text have not had."""
    if validation is not None and training.best is None:
        training = _again(training, validation, _Memory())
    return _last_look(training, validation, _Memory())


def _compile(model: Parameters, corpus: Corpus, settings: Settings) -> None:
    """Make a pass of each kind over a symbol, so that no budget of seconds pays for the compiler."""
    t = int(corpus.positions[0])
    tiny = Corpus.of([corpus.x[t : t + 1]], corpus.A)
    state = forward(model, tiny)
    with np.errstate(all="ignore"):
        writing_direction(model, tiny, state, settings.writing, settings.writing_damping)
        transition_direction(model, tiny, state, settings.metric, settings.damping)
    code_length(model, tiny)


def train(
    training: Training,
    corpus: Corpus,
    settings: Settings,
    validation: Corpus | None = None,
    report: Report | None = None,
) -> Training:
    """Train until the passes, the time or the patience is spent, or a direction is not finite.

    Args:
        training: where to begin, or to go on.
        corpus: training text.
        settings: how to train; passes and seconds count from the very beginning of the training.
        validation: text to stop on, or None.
        report: called after each pass.

    Raises:
        FloatingPointError: if the start values do not give the text a finite log-likelihood.
    """
    _compile(training.model, corpus, settings)
    prior = None
    if settings.prior_writing or settings.prior_transition:
        centre = training.model if training.centre is None else training.centre
        training = replace(training, centre=centre)
        prior = Prior.around(centre, settings.prior_writing, settings.prior_transition)
    began = time.perf_counter() - training.seconds
    for part, end in growing_parts(corpus) if settings.grow else ():
        if training.passes >= min(end, settings.passes):
            continue
        on_part = replace(settings, passes=min(end, settings.passes))
        share = len(corpus.expected) / len(part.expected)
        told = None if report is None else _report_of_part(report, share)
        trained = _train_on(part, training, on_part, None, told, prior, began)
        training = _scaled(trained, share)
    return _train_on(corpus, training, settings, validation, report, prior, began)


def _report_of_part(report: Report, share: float) -> Report:
    """Return a report for a training on a part of the text, as of the whole."""

    def told(training: Training) -> None:
        report(_scaled(training, share))

    return told


def _scaled(training: Training, share: float) -> Training:
    return replace(training, log_likelihood=share * training.log_likelihood)


def _train_on(
    corpus: Corpus,
    training: Training,
    settings: Settings,
    validation: Corpus | None,
    report: Report | None,
    prior: Prior | None,
    began: float,
) -> Training:
    """Train on a text, or a part of one, until the passes, the time or the patience is spent."""
    memory = _Memory()
    training = replace(training, broke_off=False)
    if training.passes == 0:
        # a fit of no pass may have looked at another text, whose length is no record to beat
        begun = replace(training, best=None, best_bits=math.inf, validation_bits=math.nan)
        training = _look(begun, validation, memory)
    # contexts may be asked for alone, of a text that is too long to train on
    if training.passes == settings.passes == 0:
        return training
    state = forward(training.model, corpus, activities(training.model, corpus, memory.a), memory.pi)
    if not math.isfinite(state.log_likelihood):
        raise FloatingPointError(
            "the log-likelihood of the training text is not finite at the start"
        )
    if training.passes > 0:
        training = _resumed(training, state, validation, memory)
    batches = Batches(corpus, settings.batch)
    now = corpus
    share = 1.0
    while not settings.is_over(training, validated=validation is not None):
        if batches.at(training.passes) is not now:
            now = batches.at(training.passes)
            share = len(corpus.expected) / len(now.expected)
            a = activities(training.model, now, memory.a)
            state = forward(training.model, now, a, memory.pi)
        own_prior = None if prior is None else prior.scaled(1 / share)
        try:
            training, state = advance(training, state, now, settings, memory, own_prior)
            training = _scaled(training, share)
        except FloatingPointError:
            return replace(_look(training, validation, memory), broke_off=True)
        if training.passes % settings.validate_every == 0:
            training = _look(training, validation, memory)
        training = replace(training, seconds=time.perf_counter() - began)
        if report is not None:
            report(training)
    training = _last_look(training, validation, memory, settings.validate_every)
    if now is not corpus:
        training = replace(training, log_likelihood=forward(training.model, corpus).log_likelihood)
    return training


def _resumed(
    training: Training, state: Forward, validation: Corpus | None, memory: _Memory
) -> Training:
    """Return a training that goes on, with the code lengths of the texts that it is given now."""
    # the look at the end of what goes on here is none of its schedule
    training = replace(training, log_likelihood=state.log_likelihood, validation_bits=math.nan)
    if validation is not None:
        return _again(training, validation, memory)
    if training.best is None:
        return training
    # by a validation text that is no longer given
    return replace(training, best=None, best_bits=math.inf, best_pass=training.passes)
