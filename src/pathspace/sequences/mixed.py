"""A network mixed with contexts: what a file that repeats itself needs, and a network of few units cannot remember.

Alphabet of this module: A symbols.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from pathspace.sequences import mixed_storage
from pathspace.sequences.decisions import tree
from pathspace.sequences.folds import (
    Fold,
    Texts,
    TooShortError,
    alphabet_of_texts,
    check_end,
    fold_of,
    to_score,
)
from pathspace.sequences.mixing import Reading, blank, blank_of
from pathspace.sequences.one_thread import one_thread
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.reader import Reader
from pathspace.sequences.sequence_model import NotFittedError, SequenceModel
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.tokens import Mode
from pathspace.sequences.walk import Progress


class Mixed(Reader):
    """A network whose predictions are mixed with those of contexts and of the longest match, as PAQ does.

    A symbol is a few binary decisions. For each, twelve contexts (the last 0 to 6 symbols, words,
    and what stands in the same field of the line before) say how often a one followed, the text
    after the longest match of what was read last says what came then, and the network says what it
    believes; an online logistic regression weighs them:

    .. code-block:: text

        q = sigmoid(sum_j c_j w_j . x),  x_i = log(p_i / (1 - p_i))

    with weights w_j chosen by the match, by the decision, by how many contexts have been seen
    before, and by the last symbol. The probability is the mean of q and of what such q have come
    to. It goes on learning while it predicts, scores and compresses; none of these changes the
    model itself.

    Contexts remember: **the file of such a model holds the training text**, compressed, from which
    loading brings the contexts back, at a million symbols in one to two seconds.

    Args:
        model: the network: a PCNN, CNN or RNN, fitted or not. None: contexts alone.
        silent: the network has no say, and is in the file to be trained further.

    Raises:
        TypeError: it is no network.

    Attributes:
        alphabet_: the symbols.
        bits_: code length of the training text while it was read, symbol for symbol before each was
            learned. After `fit` no network took part that knew the text; after `read` the network
            did if it was `unseen`.
        validation_bits_: code length of the validation text, or None without one. The model has not
            learned it.

    Example:
        >>> text = "she sells sea shells by the sea shore; " * 8
        >>> model = Mixed().fit(text)
        >>> model.bits(text) < 0.1 * 8 * len(text), model.predict("she sells s")["e"] > 0.9
        (True, True)

    Source:
        M. Mahoney, *Adaptive weighing of context models for lossless data compression*, 2005.
    """

    def __init__(self, model: SequenceModel | None = None, *, silent: bool = False) -> None:
        if not (model is None or isinstance(model, SequenceModel)):
            raise TypeError(
                f"the network of a mixture is a PCNN, CNN or RNN, or None, got {model!r}"
            )
        self.model = model
        self.silent = silent
        self.validation_bits_: float | None = None

    def __repr__(self) -> str:
        silent = ", silent=True" if self.silent else ""
        return f"Mixed({'' if self.model is None else repr(self.model)}{silent})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor by name, and those of the network as ``model__name``.

        Args:
            deep: whether to return the latter too.
        """
        own = {"model": self.model, "silent": self.silent}
        if not deep or self.model is None:
            return own
        return own | {f"model__{name}": value for name, value in self.model.get_params().items()}

    def set_params(self, **params: Any) -> Self:
        """Set arguments of the constructor, or of the network as ``model__name``.

        Raises:
            ValueError: if a name is unknown.
        """
        nested: dict[str, Any] = {}
        for name, value in params.items():
            owner, _, own_name = name.partition("__")
            if own_name and owner == "model":
                nested[own_name] = value
            elif name in ("model", "silent"):
                setattr(self, name, value)
            else:
                raise ValueError(
                    f"Mixed has no argument {name!r}: it has model, silent and model__NAME"
                )
        if nested and self.model is None:
            raise ValueError(
                f"there is no network whose {', '.join(sorted(nested))} could be set: set model first"
            )
        if self.model is not None:
            self.model.set_params(**nested)
        return self

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
        **options: Any,
    ) -> Self:
        """Fit the network as :meth:`SequenceModel.fit` does, and learn the contexts and the mixing weights.

        On the text that a network was fitted to, the weights would learn to trust it too far. So a
        second network is fitted to the first half, as long as half the fit takes, and the weights
        learn from the second half how far to trust that one. It is not kept. Its training has half
        the seconds of a budget, no checkpoints and no reports.

        Args:
            text: str or bytes, or a list of them, or a sequence of other symbols.
            validation: text to stop the network on, or the share of the training text, from its
                end; not learned.
            mask: booleans, one for each symbol: which are to be predicted.
            validation_mask: the same for the validation text.
            alphabet: symbols the model shall know beyond those of the texts.
            tokens: what a symbol is, as for the network's fit.
            end: the symbol that ends each text, as for the network's fit.
            options: of the fit of the network.

        Raises:
            ValueError: as the network's fit does; if there are options without a network.
        """
        if self.model is None:
            if options:
                raise ValueError(
                    f"without a network there is nothing for {', '.join(sorted(options))} to steer"
                )
            return self.read(
                text,
                validation,
                mask=mask,
                validation_mask=validation_mask,
                alphabet=alphabet,
                tokens=tokens,
                end=end,
            )
        self.model.fit(
            text,
            validation,
            mask=mask,
            validation_mask=validation_mask,
            alphabet=alphabet,
            tokens=tokens,
            end=end,
            **options,
        )
        vars(self).pop("_reading", None)
        self.alphabet_ = self.model.alphabet_
        fold = fold_of(self.alphabet_, text, validation, mask, validation_mask)
        seconds = self.model.seconds if options.get("seconds") is None else options["seconds"]
        return self._weigh(fold, options.get("passes"), None if seconds is None else seconds / 2)

    def _weigh(
        self,
        fold: Fold,
        passes: int | None,
        seconds: float | None,
        progress: Progress | None = None,
    ) -> Self:
        """Learn the contexts, and from the second half of the text how far to trust a network of the first."""
        half = len(fold.corpus.x) // 2
        other = None
        if self.model is not None and not self.silent:
            other = _fitted_to_half(self.model, fold, half, passes, seconds)
        reading = _blank_reading(fold, self.alphabet_)
        with one_thread():
            if other is None:
                bits = reading.learn(fold.corpus, progress=progress)
            else:
                bits = reading.learn(fold.corpus.beginning(half), progress=progress)
                reading = Reading(other, reading.tree, reading.memory)
                bits += reading.learn(fold.corpus, since=half, progress=progress)
        return self._keep(reading, bits, fold)

    def read(
        self,
        text: Texts,
        validation: Texts | float | None = None,
        *,
        mask: Any = None,
        validation_mask: Any = None,
        alphabet: Any = None,
        tokens: Mode | None = None,
        end: Any = None,
        unseen: bool | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Learn the contexts and the weights from a text, beginning anew; the network stays as it is.

        Args:
            text: str or bytes, or a list of them, or a sequence of other symbols.
            validation: text to score, or the share of the text, from its end; not learned.
            mask: booleans, one for each symbol: which are to be predicted.
            validation_mask: the same for the validation text.
            alphabet: symbols that a model without a network shall know beyond those of the texts.
            tokens: what a symbol is to a model without a network, as for a network's fit.
            end: the symbol that ends each text of a model without a network, as for a network's
                fit.
            unseen: whether the text is new to the network, so that the weights can learn from it
                how far to trust the network. False: they are learned without it, and it begins with
                the weight of every input. None: false if the network was fitted to this text, or to
                its beginning; one from a file, or merged, no longer tells what it was fitted to,
                and None is true for it.
            progress: called with the symbols done and their number.

        Raises:
            NotFittedError: if there is a network that has not been fitted.
            UnseenSymbolError: if a symbol is not in the alphabet of the network.
            ValueError: if there is no symbol.
        """
        vars(self).pop("_reading", None)  # what fails here leaves no memory of another alphabet
        if self.model is None:
            self.alphabet_ = alphabet_of_texts(text, validation, alphabet, tokens, end)
        else:
            self.alphabet_ = _fitted(self.model).alphabet_
            check_end(self.alphabet_, end)
        fold = fold_of(self.alphabet_, text, validation, mask, validation_mask)
        if unseen is None:
            unseen = self.model is None or self.silent or not self.model.has_learned(fold.corpus)
        reading = _blank_reading(fold, self.alphabet_, self._heard() if unseen else None)
        with one_thread():
            bits = reading.learn(fold.corpus, progress=progress)
        return self._keep(reading, bits, fold)

    def partial_fit(
        self,
        text: Texts,
        *,
        mask: Any = None,
        alphabet: Any = None,
        tokens: Mode | None = None,
        end: Any = None,
        progress: Progress | None = None,
    ) -> Self:
        """Learn one more text, or several, and keep all that has been learned; the network stays as it is.

        The tables are as large as the first text asked for: when they are full, the least visited
        places give way.

        Args:
            text: str or bytes, or a list of them, or a sequence of other symbols.
            mask: booleans, one for each symbol: which are to be predicted.
            alphabet: at the first call, symbols that a model without a network shall know beyond
                those of the text.
            tokens: at the first call, what a symbol is to a model without a network.
            end: at the first call, the symbol that ends each text of a model without a network.
            progress: called with the symbols done and their number.

        Raises:
            NotFittedError: if there is a network that has not been fitted.
            UnseenSymbolError: if a symbol is new after the first call.
            ValueError: if there is no symbol, or an alphabet after the first call.

        Example:
            >>> model = Mixed().partial_fit("she sells sea shells " * 9, alphabet="by the shore")
            >>> before = model.bits("by the sea shore " * 3)
            >>> model.partial_fit("by the sea shore " * 3).bits("by the sea shore " * 3) < 0.5 * before
            True
        """
        if not hasattr(self, "_reading"):
            return self.read(
                text, mask=mask, alphabet=alphabet, tokens=tokens, end=end, progress=progress
            )
        check_end(self.alphabet_, end)
        if alphabet is not None or tokens is not None:
            raise ValueError(
                "the first call of partial_fit settles the alphabet: leave alphabet and tokens out later, or fit anew"
            )
        corpus = fold_of(self.alphabet_, text, None, mask, None).corpus
        # what is interrupted leaves the model as it was
        reading = self.reading_.copy(len(corpus.x))
        with one_thread():
            bits = reading.learn(corpus, progress=progress)
        reading.round_weights()
        self._reading, self._bounds = (
            reading,
            np.append(self._bounds, self._bounds[-1] + corpus.bounds[1:]),
        )
        self.bits_ = self.bits_ + bits
        self.validation_bits_ = None
        return self

    def _keep(self, reading: Reading, bits: float, fold: Fold) -> Self:
        """Keep what was read, with the network itself, and score the validation text."""
        reading.round_weights()
        reading = Reading(self._heard(), reading.tree, reading.memory)
        self.bits_ = bits
        self._reading = reading
        self._bounds = fold.corpus.bounds
        self._first = len(fold.corpus.x)
        self.validation_bits_ = None
        if fold.validation is not None:
            self.validation_bits_ = reading.copy(len(fold.validation.x)).learn(fold.validation)
        return self

    def _heard(self) -> Parameters | None:
        return None if self.model is None or self.silent else self.model.parameters_

    def check_fitted(self) -> None:
        """Raise NotFittedError if no text has been read yet."""
        _ = self.reading_

    @property
    def reading_(self) -> Reading:
        """All that was learned; copy it to begin a text."""
        if not hasattr(self, "_reading"):
            raise NotFittedError(
                "this Mixed has not been fitted yet: call fit first, or read with a fitted network"
            )
        return self._reading

    def bits(self, text: Texts, mask: Any = None) -> float:
        """Return the code length of a text in bits; it is learned symbol by symbol, and forgotten afterwards.

        With a mask the weights learn from the marked symbols alone, so that these may take other
        bits than by the probabilities of `predict`, which learns from all.

        A symbol that the model does not know costs the bits of its place and of which it is, and is
        not read.

        Raises:
            ValueError: if nothing is to be predicted.
        """
        learned = self.reading_
        scored = to_score(self.alphabet_, text, mask)
        if scored.corpus is None:
            return scored.escaped
        return scored.escaped + learned.copy(len(scored.corpus.x)).learn(scored.corpus)

    def begin(self, length: int) -> Reading:
        """Return the place before a text of so many symbols; what is learned there does not change the model."""
        return self.reading_.copy(length)

    def frozen(self) -> Reading:
        """Return a place before a text, where nothing is learned and no table is copied."""
        return self.reading_.frozen_copy()

    def content(self) -> bytes:
        """Return what a file of the model holds."""
        return mixed_storage.dump(self._stored())

    def _stored(self) -> mixed_storage.StoredMixture:
        memory = self.reading_.memory
        if self._heard() is not self.reading_.model:
            raise ValueError(
                "the network has been trained since the mixture read its text: read the text again with it"
            )
        t = int(self._bounds[-1])
        return mixed_storage.StoredMixture(
            network=None if self.model is None else self.model.stored(),
            alphabet=self.alphabet_,
            history=memory.history[:t].astype(np.int64),
            bounds=self._bounds,
            weights=self.reading_.weights,
            bits=(self.bits_, self.validation_bits_),
            silent=self.silent,
            generation=self.reading_.generation,
            first=self._first,
        )

    @classmethod
    def restored(cls, stored: mixed_storage.StoredMixture, model: SequenceModel | None) -> Mixed:
        """Return the model of a file: the contexts are learned again, the weights are those stored."""
        mixed = cls(model, silent=stored.silent)
        mixed.alphabet_ = stored.alphabet
        corpus = Corpus(
            stored.history, stored.bounds, np.ones(len(stored.history), bool), len(stored.alphabet)
        )
        counts = np.bincount(stored.history[: stored.first], minlength=len(stored.alphabet))
        decisions = tree(counts, stored.alphabet)
        reading = Reading(None, decisions, blank_of(stored.generation, decisions, stored.first))
        reading.learn(corpus, slots_alone=True)
        memory = reading.memory._replace(**stored.weights)
        mixed._reading = Reading(mixed._heard(), decisions, memory)
        mixed._bounds = stored.bounds
        mixed._first = stored.first
        mixed.bits_, mixed.validation_bits_ = stored.bits
        return mixed


def beside_contexts(contexts: Mixed, network: SequenceModel) -> Mixed:
    """Return contexts that have been read alone with a silent network of their alphabet, which is fitted by now."""
    mixed = Mixed(network, silent=True)
    mixed.alphabet_ = network.alphabet_
    mixed._reading = contexts.reading_
    mixed._bounds = contexts._bounds
    mixed._first = contexts._first
    mixed.bits_ = contexts.bits_
    mixed.validation_bits_ = contexts.validation_bits_
    return mixed


def bits_beside(contexts: Mixed, network: Parameters, corpus: Corpus) -> float:
    """Return the bits of a text that contexts read with a network, whose weights have not been learned.

    Args:
        contexts: which have been read alone.
        network: its parameters.
        corpus: the text, by the numbers of their alphabet.
    """
    own = contexts.begin(len(corpus.x))
    with one_thread():
        return Reading(network, own.tree, own.memory).learn(corpus)


def mixed_after_fit(
    network: SequenceModel,
    fold: Fold,
    *,
    passes: int,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Mixed:
    """Return what `Mixed.fit` makes of a network that has been fitted already.

    Args:
        network: the fitted network.
        fold: the text that it was fitted to.
        passes: of the second network over the first half of the text.
        seconds: of that training at most, None: as many as it takes.
        progress: called with the symbols read and their number.
    """
    mixed = Mixed(network)
    mixed.alphabet_ = network.alphabet_
    return mixed._weigh(fold, passes, seconds, progress)


def _blank_reading(fold: Fold, alphabet: Alphabet, network: Parameters | None = None) -> Reading:
    decisions = tree(fold.corpus.counts, alphabet)
    return Reading(network, decisions, blank(decisions, len(fold.corpus.x)))


def _fitted_to_half(
    model: SequenceModel, fold: Fold, half: int, passes: int | None, seconds: float | None
) -> Parameters | None:
    """Return a network like this one that knows the first half of the text alone; None if a half is too short."""
    corpus = fold.corpus
    if not corpus.chi[:half].any() or not corpus.chi[half:].any():
        return None
    first = Fold(corpus.beginning(half), fold.validation)
    try:
        return model.trained_on(first, passes=passes, seconds=seconds)
    except TooShortError:
        return None


def _fitted(model: SequenceModel) -> SequenceModel:
    _ = model.parameters_  # raises NotFittedError
    return model
