"""PCNN, CNN and RNN in scikit-learn's manner: fit, then bits, predict, sample, save.

Alphabet of this module: N units, A symbols of the alphabet the model was fitted on.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits

from . import storage
from .ensembles import fit_blend
from .evaluation import code_length
from .merging import merge_parameters
from .parameters import Kind, Parameters, Squash
from .passes import Metric, WritingStep, forward
from .restarts import Architecture, Fold, race, train_all
from .text import Alphabet, Corpus, Text
from .training import Report, Settings, Training
from .walk import Walk, sample

Texts = Text | Sequence[Text]


class NotFittedError(ValueError, AttributeError):
    """A model is used before `fit`."""


def _as_list(text: Texts) -> list[Text]:
    return [text] if isinstance(text, str | bytes) else list(text)


def _as_masks(mask: ArrayLike | Sequence[ArrayLike] | None, text: Texts) -> list[np.ndarray] | None:
    if mask is None:
        return None
    masks = [mask] if isinstance(text, str | bytes) else list(mask)  # type: ignore[arg-type]
    return [np.asarray(part, dtype=bool) for part in masks]


class SequenceModel:
    """What PCNN, CNN and RNN share; see `PCNN`."""

    kind: ClassVar[Kind]

    def __init__(
        self,
        units: int = 32,
        connectivity: int | None = 3,
        *,
        metric: Metric | None = None,
        writing: WritingStep = "qdh",
        squash: Squash = "tanh",
        damping: float = 1.0,
        reach: float | None = None,
        prior_writing: float = 0.0,
        prior_transition: float = 0.0,
        rate: float | None = None,
        passes: int = 1000,
        seconds: float | None = None,
        patience: int | None = 300,
        validate_every: int = 2,
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
        self.reach = reach
        self.prior_writing = prior_writing
        self.prior_transition = prior_transition
        self.rate = rate
        self.passes = passes
        self.seconds = seconds
        self.patience = patience
        self.validate_every = validate_every
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
        return Settings(
            metric=self.metric or ("rbp-qd" if self.kind == "rnn" else "rbp"),
            writing=self.writing,
            damping=self.damping,
            reach=self.reach,
            prior_writing=self.prior_writing,
            prior_transition=self.prior_transition,
            passes=self.passes if passes is None else passes,
            seconds=self.seconds if seconds is None else seconds,
            patience=self.patience,
            validate_every=self.validate_every,
        )

    def _corpora(
        self, text: Texts, validation: Texts | float | None, mask: Any, validation_mask: Any
    ) -> tuple[Corpus, Corpus | None]:
        texts, masks = _as_list(text), _as_masks(mask, text)
        encoded = [self.alphabet_.encode(part) for part in texts]
        A = len(self.alphabet_)
        if validation is None or validation == 0:
            return Corpus.of(encoded, A, masks), None
        if isinstance(validation, int | float):
            return _split(encoded, masks, float(validation), A)
        held = [self.alphabet_.encode(part) for part in _as_list(validation)]
        return Corpus.of(encoded, A, masks), Corpus.of(held, A, _as_masks(validation_mask, validation))

    def fit(
        self,
        text: Texts,
        validation: Texts | float | None = None,
        *,
        mask: Any = None,
        validation_mask: Any = None,
        alphabet: Text | None = None,
        passes: int | None = None,
        seconds: float | None = None,
        resume: bool = False,
        report: Report | None = None,
    ) -> Self:
        """Learn a text, or several.

        Args:
            text: str or bytes, or a list of them; the model begins anew with each.
            validation: text to stop on and to choose the best by, or the share of the training text, from its
                end, to be used for that; None or 0 trains on without looking.
            mask: booleans, one for each symbol: which are to be predicted. A list of them for several texts.
            validation_mask: the same for the validation text.
            alphabet: symbols the model shall know beyond those of the texts.
            passes: instead of the constructor's; counted from the very beginning, also when resuming.
            seconds: likewise.
            resume: go on where the last fit, or the file the model was loaded from, has stopped. With the same
                text the result is the same, bit by bit, as if it had never stopped.
            report: called with the `Training` after each pass; with jobs, after each training.

        Raises:
            ValueError: if there is no symbol, none is to be predicted, or an argument is out of range.
            UnseenSymbolError: if, when resuming, a symbol is new.
            FloatingPointError: if a direction is not finite.
        """
        settings = self._settings(passes, seconds)
        if resume:
            if self.folds > 1:
                raise ValueError(
                    "a model of several folds cannot go on: the folds it has seen differ; fit anew"
                )
            training = self._fitted()
            fold = Fold(*self._corpora(text, validation, mask, validation_mask))
            done = train_all([training], [fold], [settings], report=report)
        else:
            parts = _as_list(text)
            if validation is not None and not isinstance(validation, int | float):
                parts = parts + _as_list(validation)
            self.alphabet_ = Alphabet.of([part for part in [*parts, alphabet] if part is not None])
            folds = self._folds(text, validation, mask, validation_mask)
            architecture = Architecture(self.kind, self.units, self.connectivity, self.squash, self.rate)
            seeds = [self.seed + k for k in range(self.restarts)]
            keep = max(self.ensemble, -(-self.restarts // 4)) // self.folds or 1
            ranked = race(architecture, seeds, folds, settings, self.jobs, self.heat, keep, report)
            done = ranked[0]
            if self.ensemble > 1:
                done = [_merged([found[: self.ensemble // self.folds] for found in ranked], folds)]
        self.training_ = done[0]
        return self

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
            fold = Fold(*self._corpora(text, validation, mask, validation_mask))
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
        if validation is not None:
            raise ValueError(
                "folds take turns as the validation text: give all texts for training, and none else"
            )
        encoded = [self.alphabet_.encode(part) for part in _as_list(text)]
        return _dealt(encoded, _as_masks(mask, text), self.folds, len(self.alphabet_))

    def _fitted(self) -> Training:
        if not hasattr(self, "training_"):
            raise NotFittedError(f"this {type(self).__name__} has not been fitted yet: call fit first")
        return self.training_

    @property
    def parameters_(self) -> Parameters:
        """The trained parameters: the best by the validation text, or the last."""
        return self._fitted().result

    def bits(self, text: Texts, mask: Any = None) -> float:
        """Return the code length of a text in bits, each prediction mixed with 1/(t+2) of the uniform one.

        Raises:
            UnseenSymbolError: if a symbol is not in the alphabet of the model.
            ValueError: if nothing is to be predicted.
        """
        parameters = self.parameters_
        encoded = [self.alphabet_.encode(part) for part in _as_list(text)]
        with threadpool_limits(1):
            return code_length(parameters, Corpus.of(encoded, len(self.alphabet_), _as_masks(mask, text)))

    def score(self, text: Texts, y: None = None) -> float:  # noqa: ARG002 - scikit-learn's signature
        """Return minus the bits per symbol of a text: larger is better, as scikit-learn expects."""
        return -self.bits(text) / sum(len(part) for part in _as_list(text))

    def predict(self, context: Text) -> dict[str | int, float]:
        """Return the probability of each symbol (of each byte value) after the context has been read."""
        p = Walk(self.parameters_).read_all(self.alphabet_.encode(context)).predict()
        return {symbol: float(p[y]) for y, symbol in enumerate(self.alphabet_.symbols)}

    def sample(
        self, length: int, seed: int = 0, *, prompt: Text | None = None, temperature: float = 1.0
    ) -> Text:
        """Return text drawn from the model, which has read ``prompt`` first."""
        prompt = self.alphabet_.symbols[:0] if prompt is None else prompt
        rng = np.random.default_rng(seed)
        drawn = sample(self.parameters_, length, rng, self.alphabet_.encode(prompt), temperature)
        return self.alphabet_.decode(drawn)

    def save(self, path: str | Path) -> None:
        """Write the model and its training to a safetensors file; an existing file is replaced at once."""
        stored = storage.Stored(self._fitted(), self.alphabet_, self._settings(), self.get_params())
        storage.write_atomically(Path(path), storage.dump(stored))


def _merged(ranked: Sequence[Sequence[Training]], folds: Sequence[Fold]) -> Training:
    """Return one training with the networks of all folds, and the code length of what each fold held back.

    The networks of a fold are blended so that its own validation text is shortest, and the folds count alike.
    """
    models: list[Parameters] = []
    weights, offsets, held_bits = [], [], 0.0
    with threadpool_limits(1):
        for trainings, fold in zip(ranked, folds, strict=True):
            assert fold.validation is not None
            found = [training.result for training in trainings]
            blend = fit_blend(found, fold.validation)
            held_bits += code_length(merge_parameters(found, blend.weights, blend.offsets), fold.validation)
            models += found
            weights.append(blend.weights / len(folds))
            offsets.append(blend.offsets / len(folds))
        parameters = merge_parameters(models, np.concatenate(weights), np.sum(offsets, axis=0))
        trainings = [training for found in ranked for training in found]
        passes = max(training.passes for training in trainings) // 2 * 2
        # what one fold keeps back is training text of the others
        whole = [folds[0].corpus, *(fold.validation for fold in folds[:1] if len(folds) > 1)]
        return replace(
            Training.begin(parameters, min(training.rate_w for training in trainings)),
            passes=passes,
            tries=sum(training.tries for training in trainings),
            seconds=sum(training.seconds for training in trainings),
            log_likelihood=sum(
                forward(parameters, part).log_likelihood for part in whole if part is not None
            ),
            validation_bits=held_bits,
            best=parameters,
            best_bits=held_bits,
            best_pass=passes,
        )


def _dealt(encoded: list[np.ndarray], masks: list[np.ndarray] | None, folds: int, A: int) -> list[Fold]:
    """Return folds that hold back every text in turn, or, with fewer texts than folds, stretches of each."""
    marks = [np.ones(len(x), bool) for x in encoded] if masks is None else masks
    found = []
    for k in range(folds):
        kept, held = [], []
        for number, (x, mark) in enumerate(zip(encoded, marks, strict=True)):
            if len(encoded) >= folds:
                (held if number % folds == k else kept).append((x, mark))
                continue
            begin, end = len(x) * k // folds, len(x) * (k + 1) // folds
            held.append((x[begin:end], mark[begin:end]))
            kept += [(x[:begin], mark[:begin]), (x[end:], mark[end:])]
        if not all(any(mark.any() for _, mark in part) for part in (kept, held)):
            raise ValueError(f"the text is too short for {folds} folds: one of them has no symbol to predict")
        corpora = [Corpus.of([x for x, _ in part], A, [mark for _, mark in part]) for part in (kept, held)]
        found.append(Fold(*corpora))
    return found


def _split(
    encoded: list[np.ndarray], masks: list[np.ndarray] | None, share: float, A: int
) -> tuple[Corpus, Corpus]:
    """Keep back the last ``share`` of each text for validation."""
    if not 0 < share < 1:
        raise ValueError(f"the share for validation must lie between 0 and 1, got {share}")
    cuts = [len(x) - int(len(x) * share) for x in encoded]
    held = [x[cut:] for x, cut in zip(encoded, cuts, strict=True)]
    if not any(len(x) for x in held):
        raise ValueError(
            f"the text is too short to keep back {share:g} of it for validation: give another text for that, or a "
            "share of 0 for none"
        )
    kept_masks = None if masks is None else [m[:cut] for m, cut in zip(masks, cuts, strict=True)]
    held_masks = None if masks is None else [m[cut:] for m, cut in zip(masks, cuts, strict=True)]
    kept = [x[:cut] for x, cut in zip(encoded, cuts, strict=True)]
    return Corpus.of(kept, A, kept_masks), Corpus.of(held, A, held_masks)


class PCNN(SequenceModel):
    r"""Persistent contextual neural network: units that keep what they know, rewired by each symbol read.

    .. math:: V_j^{t+1} = V_j^t + \sum_i \tau_{ij x_t} s(V_i^t), \qquad
        \pi_t(y) \propto \exp \sum_i w_{iy} s(V_i^t)

    Args:
        units: N.
        connectivity: edges that leave each unit, its loop included, drawn at random; None for all N.
        metric: of the transition steps: "rbp" or "rutsd", whole; "rbp-qd" or "rutsd-qd", quasi-diagonal; "fb",
            frequency-adjusted backpropagation. None: "rbp", or "rbp-qd" for an RNN.
        writing: step of the writing weights, "qdh" (quasi-diagonal) or "dh" (diagonal Hessian).
        squash: "tanh" or "logistic"; invariant metrics learn the same with both, up to the damping.
        damping: added to the diagonal of the transition metric. Where few symbols are to be predicted, long after
            what they depend on, its sums are small and a damping of 1 outweighs them.
        reach: most that one step may change what one symbol adds to a unit V_j: each unit's step at each symbol
            is shortened to it, by itself. With little damping the step of one unit may be huge, and without a bound
            the one rate of all shrinks until nothing else moves. None: no bound. A bound that acts is not
            invariant.
        prior_writing: precision of a Gaussian prior of the writing weights; about 0.01 to 0.1 against
            overfitting, 0 for none. A prior is not invariant.
        prior_transition: the same for the transition weights between units, around their start values.
        rate: first learning rate, 1/N if None; it steers itself from there.
        passes: most passes, each a step of the writing weights or of all others.
        seconds: most seconds of training, all restarts together, or None.
        patience: passes without a shorter validation text before it stops, or None.
        validate_every: passes between two looks at the validation text.
        restarts: trainings with seeds seed, seed + 1, ..., the best of which is kept.
        heat: passes after which all but the better quarter of the restarts are dropped, or all but the
            ensemble if that is more; 0 drops none.
        ensemble: how many of the restarts, the best by the validation text, are merged into one network. Their
            weights are those with which the validation text is shortest; less overfitting than any one of them.
        folds: into how many parts the training text is divided, each of which is the validation text of its
            share of the restarts, so that nothing is lost to validation. Whole texts are dealt out if there are
            at least as many; else each is cut. Restarts and ensemble must be multiples of it. Code lengths of
            the training then are sums over what the folds held back. 1: the validation text is that of `fit`.
        jobs: processes for the restarts.
        seed: of the random graph and the start values.

    Example:
        >>> model = PCNN(units=5, passes=20).fit("abcabcabcabcabc")
        >>> round(sum(model.predict("ab").values()), 9)
        1.0

    Source:
        Y. Ollivier, *Riemannian metrics for neural networks II*, there called gated leaky neural network too.
    """

    kind = "pcnn"


class CNN(SequenceModel):
    r"""Contextual neural network: the transition weights depend on the symbol read.

    .. math:: V_j^{t+1} = \sum_i \tau_{ij x_t} s(V_i^t)

    Arguments as for `PCNN`.
    """

    kind = "cnn"


class RNN(SequenceModel):
    r"""Recurrent neural network reading symbols.

    .. math:: V_j^{t+1} = \rho_{j x_t} + \sum_i \tau_{ij} s(V_i^t)

    Arguments as for `PCNN`, but the metric must be "rbp-qd", "rutsd-qd" or "fb".
    """

    kind = "rnn"


_CLASSES: dict[str, type[SequenceModel]] = {"pcnn": PCNN, "cnn": CNN, "rnn": RNN}


def load(path: str | Path) -> SequenceModel:
    """Return the model in a file written by `SequenceModel.save`.

    Raises:
        OSError: if the file cannot be read.
        ModelFileError: if it is no model file, of a later version, or damaged.
    """
    stored = storage.load(Path(path))
    model = _CLASSES[stored.training.model.kind]()
    known = model.get_params()
    model.set_params(**{name: value for name, value in stored.options.items() if name in known})
    model.alphabet_, model.training_ = stored.alphabet, stored.training
    return model


def merge(
    models: Sequence[SequenceModel],
    weights: Sequence[float] | np.ndarray | None = None,
    offsets: Sequence[float] | np.ndarray | None = None,
) -> SequenceModel:
    """Return one model that predicts the normalised geometric mean of several.

    pi(y) proportional to exp(b_y) prod_k pi_k(y)^{c_k}, c_k = 1/K and b_y = 0 unless given; its units are those
    of all.

    Args:
        models: fitted models of one class, squash and alphabet.
        weights: the c_k.
        offsets: the b_y, in the order of the alphabet.

    Raises:
        ValueError: if there is none, or they do not fit together.
        NotFittedError: if one is not fitted.

    Example:
        >>> models = [PCNN(units=3, passes=4, seed=seed).fit("abab") for seed in (0, 1)]
        >>> merge(models).parameters_.units
        6
    """
    if not models:
        raise ValueError("there is no network to merge")
    parameters = merge_parameters([model.parameters_ for model in models], weights, offsets)
    alphabets = {model.alphabet_.symbols for model in models}
    if len(alphabets) > 1:
        raise ValueError("networks to merge must share their alphabet")
    merged = type(models[0])(**models[0].get_params())
    merged.set_params(units=parameters.units, restarts=1, ensemble=1, folds=1)
    merged.alphabet_ = models[0].alphabet_
    merged.training_ = Training.begin(parameters, merged.rate)
    return merged
