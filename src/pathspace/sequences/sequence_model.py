"""The base of PCNN, CNN and RNN, in scikit-learn's manner: fit, then bits, predict, sample, save.

Alphabet of this module: N units, A symbols of the alphabet the model was fitted on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from pathspace.sequences import storage
from pathspace.sequences.checkpoints import Checkpoints
from pathspace.sequences.cost import Networks, check_blend, check_count, check_folds, check_networks
from pathspace.sequences.ensembles import merge_folds
from pathspace.sequences.evaluation import code_length
from pathspace.sequences.folds import (
    Fold,
    Texts,
    alphabet_of_texts,
    as_masks,
    check_end,
    deal,
    fold_of,
    to_score,
    with_ends,
)
from pathspace.sequences.one_thread import one_thread
from pathspace.sequences.parameters import Kind, Parameters, Squash
from pathspace.sequences.passes import Metric, WritingStep
from pathspace.sequences.reader import Reader
from pathspace.sequences.restarts import Architecture, race, train_all
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.tokens import Mode
from pathspace.sequences.training import Report, Settings, Training
from pathspace.sequences.walk import Walk

_LONG_READ = 1 << 20
"""Symbols after which the uniform part of predictions is a millionth, and a text costs it no more."""


class NotFittedError(ValueError, AttributeError):
    """A model is used before `fit`."""


@dataclass(frozen=True)
class _Learned:
    """A text that a network was fitted to, without the text itself.

    Args:
        T: its symbols.
        digest: SHA-256 of their numbers.
    """

    T: int
    digest: bytes

    @classmethod
    def of(cls, corpus: Corpus) -> _Learned:
        return cls(len(corpus.x), sha256(corpus.x.tobytes()).digest())

    def begins(self, corpus: Corpus) -> bool:
        """Return whether a text is this one, or begins with it."""
        return len(corpus.x) >= self.T and _Learned.of(corpus.beginning(self.T)) == self


class SequenceModel(Reader):
    """Base of PCNN, CNN and RNN; see :class:`~pathspace.sequences.PCNN`.

    Attributes:
        told_: what a file of the model keeps beside it: options of the command that fitted it.
    """

    kind: ClassVar[Kind]
    told_: Mapping[str, Any] = MappingProxyType({})
    _begun: Mapping[str, Any] = MappingProxyType({})
    _learned: tuple[_Learned, ...] = ()

    def __init__(
        self,
        units: int = 32,
        connectivity: int | None = 3,
        *,
        metric: Metric | None = None,
        writing: WritingStep = "qdh",
        squash: Squash = "tanh",
        damping: float = 1.0,
        writing_damping: float = 1.0,
        reach: float | None = None,
        prior_writing: float = 0.0,
        prior_transition: float = 0.0,
        rate: float | None = None,
        passes: int = 1000,
        seconds: float | None = None,
        patience: int | None = 300,
        validate_every: int = 2,
        grow: bool = False,
        batch: int | None = None,
        restarts: int = 1,
        heat: int = 100,
        ensemble: int = 1,
        folds: int = 1,
        jobs: int = 1,
        seed: int = 0,
    ) -> None:
        self.units = units
        self.connectivity = connectivity
        self.metric: Metric | None = metric
        self.writing: WritingStep = writing
        self.squash: Squash = squash
        self.damping = damping
        self.writing_damping = writing_damping
        self.reach = reach
        self.prior_writing = prior_writing
        self.prior_transition = prior_transition
        self.rate = rate
        self.passes = passes
        self.seconds = seconds
        self.patience = patience
        self.validate_every = validate_every
        self.grow = grow
        self.batch = batch
        self.restarts = restarts
        self.heat = heat
        self.ensemble = ensemble
        self.folds = folds
        self.jobs = jobs
        self.seed = seed

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002 - scikit-learn's signature
        """Return the arguments of the constructor by name."""
        names = inspect.signature(type(self).__init__).parameters
        return {name: getattr(self, name) for name in names if name != "self"}

    def set_params(self, **params: Any) -> Self:
        """Set arguments of the constructor by name.

        Raises:
            ValueError: if a name is unknown.
        """
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(f"{type(self).__name__} has no argument {name!r}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({shown})"

    def _settings(self, passes: int | None = None, seconds: float | None = None) -> Settings:
        given = {"passes": passes, "seconds": seconds}
        options = self.get_params() | {
            name: value for name, value in given.items() if value is not None
        }
        options = _plain(options)
        for name, value in options.items():
            check_count(name, value)
            # no file holds it otherwise
            if name in storage.WHOLE and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
        degree = options["connectivity"]
        if degree is not None and type(degree) is not int:
            raise ValueError(
                f"connectivity must be a whole number, or None for all units, got {degree!r}"
            )
        options["metric"] = options["metric"] or ("rbp-qd" if self.kind == "rnn" else "rbp")
        return Settings(**{field.name: options[field.name] for field in fields(Settings)})

    def fit(
        self,
        text: Texts,
        validation: Texts | float | None = None,
        *,
        mask: Any = None,
        validation_mask: Any = None,
        alphabet: Any = None,
        tokens: Mode | None = None,
        end: Any = None,
        passes: int | None = None,
        seconds: float | None = None,
        resume: bool = False,
        report: Report | None = None,
        checkpoint: str | Path | None = None,
    ) -> Self:
        """Learn a text, or several.

        Args:
            text: str or bytes, or a list of them; the model begins anew with each. Or a sequence of
                other symbols (numbers, events), or a list of lists of them.
            validation: text to stop on and to choose the best by, or the share of the training
                text, from its end, to be used for that; None or 0 trains on without looking.
            mask: booleans, one for each symbol: which are to be predicted. A list of them for
                several texts.
            validation_mask: the same for the validation text.
            alphabet: symbols the model shall know beyond those of the texts.
            tokens: what a symbol is. True: each item of a list, array or column, strings too.
                "words" or "lines": those of the text. False: a character or byte; a list of strings
                is several texts. None: as False, but the items of what holds no strings, or strings
                of one character.
            end: the symbol that ends each text: the model reads it after each text, and samples
                stop before it.
            passes: instead of the constructor's; counted from the very beginning, also when
                resuming.
            seconds: likewise.
            resume: go on where the last fit, or the file the model was loaded from, has stopped.
                With the same text the result is the same, bit by bit, as if it had never stopped.
            report: called with the `Training` after each pass; with jobs, after each training.
            checkpoint: an existing folder in which to keep all trainings, each at least every half
                minute or pass. The same call with what is in it goes on there; without a budget of
                seconds the result is the same, bit by bit. Delete its files when the model is
                saved.

        Raises:
            ValueError: if there is no symbol, none is to be predicted, an argument is out of range,
                ``checkpoint`` holds another fit, or a resumed network was begun with other
                arguments.
            TypeError: if a text is no sequence of symbols, or it can be read only once.
            UnseenSymbolError: if, when resuming, a symbol is new.
            FloatingPointError: if the start values do not give the text a finite log-likelihood, or
                the first direction of all is not finite.

        Warns: RuntimeWarning: a training that was kept ended early, as its next direction was not
            finite.
        """
        settings = self._settings(passes, seconds)
        if resume:
            if self.folds > 1:
                raise ValueError(
                    "a model of several folds cannot go on: the folds it has seen differ; fit anew"
                )
            training = self._fitted()
            if alphabet is not None:
                for part in self.alphabet_.sequences(alphabet).parts:
                    # raises of a symbol that the model lacks: it gets no more
                    self.alphabet_.encode(part)
            check_end(self.alphabet_, end)
            self._check_begun()
            fold = fold_of(self.alphabet_, text, validation, mask, validation_mask)
            kept = self._kept(checkpoint, settings, [fold], training)
            done = train_all([training], [fold], [settings], report=report, kept=kept)
        else:
            # a fit that fails leaves no network of another alphabet
            vars(self).pop("training_", None)
            self.alphabet_ = alphabet_of_texts(text, validation, alphabet, tokens, end)
            folds = self._folds(text, validation, mask, validation_mask)
            self._check_cost(folds, settings)
            begun = self._arguments()
            done = [self._trained(folds, settings, report, self._kept(checkpoint, settings, folds))]
            self._begun = begun
        if done[0].broke_off:
            told = (
                "not finite: the metric is singular, or has overflowed. Raise damping, or set reach"
            )
            if not done[0].passes:
                raise FloatingPointError(f"the first direction is {told}")
            ended = (
                "a merged training ended early"
                if self.ensemble > 1
                else f"the training ended at pass {done[0].passes}"
            )
            warnings.warn(
                f"{ended}: the next direction is {told}",
                RuntimeWarning,
                stacklevel=2,
            )
        self.training_ = done[0]
        learned = _Learned.of(
            fold_of(self.alphabet_, text, validation, mask, validation_mask).corpus
        )
        self._learned = (*self._learned, learned) if resume else (learned,)
        return self

    def partial_fit(
        self,
        text: Texts,
        validation: Texts | float | None = None,
        *,
        mask: Any = None,
        validation_mask: Any = None,
        alphabet: Any = None,
        tokens: Mode | None = None,
        end: Any = None,
        passes: int = 2,
    ) -> Self:
        """Make some passes over one more text, or several, from where the network stands.

        Args:
            text: as for `fit`.
            validation: as for `fit`: with it the best of all passes is kept.
            mask: booleans, one for each symbol: which are to be predicted.
            validation_mask: the same for the validation text.
            alphabet: at the first call, symbols that the network shall know beyond those of the
                text.
            tokens: at the first call, what a symbol is.
            end: at the first call, the symbol that ends each text, as for `fit`.
            passes: how many; every other one moves the writing weights, and those between the
                transition weights.

        Raises:
            UnseenSymbolError: if a symbol is new after the first call.
            ValueError: as `fit` does; if there are an alphabet or tokens after the first call.

        Example:
            >>> from pathspace.sequences import PCNN
            >>> model = PCNN(units=4).partial_fit("abab", alphabet="abc")
            >>> model.partial_fit("acac", passes=20).bits("acac") < model.bits("bbbb")
            True
        """
        begun = hasattr(self, "training_")
        if begun and (alphabet is not None or tokens is not None):
            raise ValueError(
                "the first call of partial_fit settles the alphabet: leave alphabet and tokens out later, or fit anew"
            )
        return self.fit(
            text,
            validation,
            mask=mask,
            validation_mask=validation_mask,
            alphabet=alphabet,
            tokens=tokens,
            end=end,
            passes=passes + (self.training_.passes if begun else 0),
            resume=begun,
        )

    def _trained(
        self,
        folds: list[Fold],
        settings: Settings,
        report: Report | None = None,
        kept: Checkpoints | None = None,
    ) -> Training:
        """Return the training that is the best of all restarts, or their merged ones."""
        own = self._arguments()
        architecture = Architecture(
            self.kind, **{name: value for name, value in own.items() if name != "seed"}
        )
        seeds = [self.seed + k for k in range(self.restarts)]
        keep = max(self.ensemble, -(-self.restarts // 4)) // self.folds or 1
        ranked = race(
            architecture, seeds, folds, settings, self.jobs, self.heat, keep, report, kept=kept
        )
        if self.ensemble > 1:
            return merge_folds([found[: self.ensemble // self.folds] for found in ranked], folds)
        return ranked[0][0]

    def trained_on(
        self, fold: Fold, *, passes: int | None = None, seconds: float | None = None
    ) -> Parameters:
        """Return what the same fit would have learned from another text of the alphabet; the model stays as it is.

        Args:
            fold: the text, and what stops the training.
            passes: instead of the constructor's.
            seconds: likewise.

        Raises:
            ValueError: if the text is too short for the folds.
        """
        folds = [fold]
        if self.folds > 1:
            corpus = fold.corpus
            ends = fold.corpus.bounds[1:-1]
            parts = np.split(corpus.x, ends)
            masks = np.split(corpus.chi, ends)
            folds = deal(parts, masks, self.folds, corpus.A)
        return self._trained(folds, self._settings(passes, seconds)).result

    def has_learned(self, corpus: Corpus) -> bool:
        """Return whether the last fit was to this text, or to its beginning; a model from a file does not know."""
        return any(learned.begins(corpus) for learned in self._learned)

    def restore(self, alphabet: Alphabet, training: Training) -> None:
        """Take over what another model has learned, which was begun with the arguments of this one."""
        self.alphabet_, self.training_, self._begun = alphabet, training, self._arguments()
        self._learned = ()

    def _arguments(self) -> dict[str, Any]:
        """Return those that decide a network before it has learned anything, and nothing afterwards."""
        own = _plain(self.get_params())
        if isinstance(own["connectivity"], int) and own["connectivity"] >= own["units"]:
            own["connectivity"] = None  # which is all units, too
        return {name: own[name] for name in ("units", "connectivity", "squash", "rate", "seed")}

    def _check_begun(self) -> None:
        """Refuse to go on with other arguments than the network was begun with, which would change nothing."""
        asked = self._arguments()
        differs = [name for name, value in self._begun.items() if asked[name] != value]
        if differs:
            before, now = (
                ", ".join(f"{name}={values[name]!r}" for name in differs)
                for values in (self._begun, asked)
            )
            raise ValueError(
                f"a network that was begun with {before} cannot go on with {now}: fit anew, or set it back"
            )

    def _kept(
        self,
        folder: str | Path | None,
        settings: Settings,
        folds: list[Fold],
        begin: Training | None = None,
    ) -> Checkpoints | None:
        if folder is None:
            return None
        kept = Checkpoints(Path(folder), self.alphabet_)
        fit = {**_plain(self.get_params()), **asdict(settings), "kind": self.kind}
        del fit["jobs"]  # changes when, not what
        kept.claim(fit, folds, begin)
        return kept

    def _folds(
        self, text: Texts, validation: Texts | float | None, mask: Any, validation_mask: Any
    ) -> list[Fold]:
        """Return the texts of every fold; one fold holds back the validation text itself."""
        if not 1 <= self.ensemble <= self.restarts:
            raise ValueError(
                f"restarts must be at least 1 and ensemble between 1 and restarts, got {self.restarts} and "
                f"{self.ensemble}"
            )
        if self.folds == 1:
            fold = fold_of(self.alphabet_, text, validation, mask, validation_mask)
            if self.ensemble > 1 and fold.validation is None:
                raise ValueError(
                    "an ensemble is chosen by a validation text: give one to fit, or several folds"
                )
            return [fold]
        if self.folds < 1 or self.restarts % self.folds or self.ensemble % self.folds:
            raise ValueError(
                f"every fold has as many networks as the others: restarts and ensemble must be multiples of folds, "
                f"got {self.restarts}, {self.ensemble} and folds={self.folds}"
            )
        if validation is not None or validation_mask is not None:
            raise ValueError(
                "folds take turns as the validation text: leave out validation and validation_mask"
            )
        given = self.alphabet_.sequences(text)
        encoded = [self.alphabet_.encode(part) for part in given.parts]
        check_folds(sum(len(x) for x in encoded), self.folds)
        encoded, masks = with_ends(self.alphabet_, encoded, as_masks(mask, given))
        return deal(encoded, masks, self.folds, len(self.alphabet_))

    def _check_cost(self, folds: list[Fold], settings: Settings) -> None:
        """Refuse networks that memory has no room for, or that take days for a pass."""
        degree = self.units if self.connectivity is None else min(self.connectivity, self.units)
        networks = Networks(
            self.kind,
            settings.metric,
            self.units,
            degree,
            self.restarts,
            self.jobs,
            settings.passes,
            settings.writing,
        )
        check_networks(networks, folds[0].corpus)
        validation = folds[0].validation
        if self.ensemble > 1 and validation is not None:
            check_blend(self.ensemble // self.folds, self.units, validation)

    def _fitted(self) -> Training:
        if not hasattr(self, "training_"):
            raise NotFittedError(
                f"this {type(self).__name__} has not been fitted yet: call fit first"
            )
        return self.training_

    def check_fitted(self) -> None:
        """Raise NotFittedError if the network has not been trained yet."""
        self._fitted()

    @property
    def parameters_(self) -> Parameters:
        """The trained parameters: the best by the validation text, or the last."""
        return self._fitted().result

    def bits(self, text: Texts, mask: Any = None) -> float:
        """Return the code length of a text in bits, each prediction mixed with 1/(t+2) of the uniform one.

        The number t of symbols before it goes on from text to text of a list, so that short ones
        cost no more.

        A symbol that the model does not know costs the bits of its place and of which it is, and is
        not read.

        Raises:
            ValueError: if nothing is to be predicted.
        """
        parameters = self.parameters_
        scored = to_score(self.alphabet_, text, mask)
        if scored.corpus is None:
            return scored.escaped
        with one_thread():
            return scored.escaped + code_length(parameters, scored.corpus)

    def begin(self, length: int) -> Walk:  # noqa: ARG002 - a mixture's memory is as long
        """Return the place before the first symbol of a text."""
        return Walk(self.parameters_)

    def frozen(self) -> Walk:
        """Return a place before a text, where the predictions hardly hold any of the uniform one."""
        return Walk(self.parameters_, t=_LONG_READ, frozen=True)

    def content(self) -> bytes:
        """Return what a file of the model holds: the parameters, and the training to go on with."""
        return storage.dump(self.stored())

    def stored(self) -> storage.Stored:
        """Return what a file of the model holds."""
        options = {**self.told_, **_plain(self.get_params())}
        return storage.Stored(self._fitted(), self.alphabet_, self._settings(), options)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with Python's numbers for those of NumPy (from a grid, say), which no file of a model holds."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in options.items()
    }
