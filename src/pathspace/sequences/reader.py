"""The common part of fitted networks and mixtures: reading a text symbol by symbol, and predicting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.sequences import mixed_storage
from pathspace.sequences.folds import Texts
from pathspace.sequences.storage import ModelFileError
from pathspace.sequences.stream import Stream, bits_of_each
from pathspace.sequences.text import Alphabet
from pathspace.sequences.walk import Place, sample
from pathspace.tools.files import check_writable, write_atomically

_LONGEST = 1 << 40  # of a sample: a million symbols a second would take twelve days


class Reader(ABC):
    """A model that, once fitted, predicts the next symbol of a text."""

    alphabet_: Alphabet

    @abstractmethod
    def bits(self, text: Texts, mask: Any = None) -> float:
        """Return the code length of a text in bits."""

    @abstractmethod
    def begin(self, length: int) -> Place:
        """Return the place before the first symbol of a text of at most so many symbols."""

    @abstractmethod
    def frozen(self) -> Place:
        """Return a place before a text that learns nothing, and shares the model's memory."""

    @abstractmethod
    def check_fitted(self) -> None:
        """Raise NotFittedError if nothing has been learned yet."""

    @abstractmethod
    def content(self) -> bytes:
        """Return what a file of the model holds."""

    def __sklearn_tags__(self) -> Any:  # scikit-learn's searches ask for them from 1.6 on
        from sklearn.utils import Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=False))

    def score(self, text: Texts, y: None = None) -> float:  # noqa: ARG002 - scikit-learn's signature
        """Return minus the bits per symbol of a text: larger is better, as scikit-learn expects."""
        return -self.bits(text) / sum(len(part) for part in self.alphabet_.sequences(text).parts)

    def predict(self, context: Any) -> dict[Any, float]:
        """Return the probability of each symbol (of each byte value) after the context has been read."""
        self.check_fitted()
        context = self.alphabet_.sequence(context)
        p = self.begin(len(context) + 1).read_all(self.alphabet_.encode(context)).predict()
        return {symbol: float(p[y]) for y, symbol in enumerate(self.alphabet_.symbols)}

    def code_lengths(self, text: Texts, *, frozen: bool = False) -> Any:
        """Return the bits of each symbol of a text as an array, of several texts as a list of arrays.

        They add up to `bits`. A symbol that the model does not know costs the bits of its place and
        of which it is.

        Args:
            text: as for `bits`.
            frozen: learn nothing from one text to the next, nor within them, and copy no tables: a
                line takes about a millisecond.

        Example:
            >>> from pathspace.sequences import Mixed
            >>> bits = Mixed().fit("she sells sea shells " * 9).code_lengths("she sells tea")
            >>> bits.shape, int(bits.argmax())
            ((13,), 10)
        """
        self.check_fitted()
        given = self.alphabet_.sequences(text)
        place = self.frozen() if frozen else self.begin(sum(len(part) for part in given.parts))
        found = []
        for part in given.parts:
            place.restart()
            found.append(bits_of_each(place, self.alphabet_, part))
        return found[0] if given.is_one else found

    def stream(self, *, frozen: bool = False) -> Stream:
        """Return the model before a sequence whose symbols come one by one.

        Args:
            frozen: learn nothing from them.
        """
        return Stream(self.frozen() if frozen else self.begin(0), self.alphabet_)

    def sample(
        self, length: int, seed: int = 0, *, prompt: Any = None, temperature: float = 1.0
    ) -> Any:
        """Return text drawn from the model, which has read ``prompt`` first; a mixture learns what it draws.

        If the model was fitted with ``end``, the text stops before the first one.

        A model of tokens returns a list of them, one of words or lines their text.

        Raises:
            TypeError: if the length is no whole number, or the prompt no text.
            ValueError: if the length is negative or beyond all memories, the seed no whole number
                of at least 0, or the temperature not positive.
            UnseenSymbolError: if a symbol of the prompt is not in the alphabet of the model.
        """
        if not isinstance(length, int | np.integer):
            raise TypeError(f"the length must be a whole number, got {length!r}")
        if not 0 <= length <= _LONGEST:
            raise ValueError(f"the length must be from 0 to {_LONGEST}, got {length}")
        if not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"the seed must be a whole number of at least 0, got {seed!r}")
        self.check_fitted()
        read = np.empty(0, np.int64) if prompt is None else self.alphabet_.encode(prompt)
        place = self.begin(length + len(read))
        rng = np.random.default_rng(seed)
        return self.alphabet_.decode(
            sample(place, length, rng, read, temperature, self.alphabet_.end)
        )

    def save(self, path: str | Path) -> None:
        """Write the model to a safetensors file, a mixture with its training text.

        What was written is read back before it replaces a file that was there.

        Raises:
            OSError: if it cannot be written; the file that was there before is then untouched.
            ModelFileError: if it cannot be read back; the file that was there before is then
                untouched.
            ValueError: if the network of a mixture has been trained since the mixture read its
                text.
        """
        path = Path(path)
        content = self.content()

        def read_back(written: Path) -> None:
            with _readable(path):
                mixed_storage.load(written)

        if check_writable(path) is None:  # a device or a pipe, from which nothing can be read
            with _readable(path):
                mixed_storage.check_content(content)
        write_atomically(path, lambda file: file.write(content), check=read_back)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say of a model that cannot be read back where it was to be written, and what to do."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(
            f"the model cannot be read back from what was written for {path} ({error}), and {path} stays as it was: "
            "save it to another disk, and please report it if that fails in the same way"
        ) from error
