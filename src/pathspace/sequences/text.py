"""Texts as numbers: the alphabet, and sequences laid out for the compiled passes.

Alphabet of this module: A symbols, S sequences, T symbols in all of them together, R = T + S rows
of states, P predicted positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.kernels.contexts import BLANK, LETTER, NEWLINE, OTHER

IntArray = NDArray[np.int64]
Text = str | bytes

_BLOCK = 1 << 16


class UnseenSymbolError(ValueError):
    """A text has a symbol that the alphabet of the model lacks."""


def as_text(text: Any) -> Text:
    """Return a text as a str or bytes, which a bytearray and NumPy's strings are as good as.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(text, str):
        return str.__str__(text)
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    raise TypeError(
        f"a text is a str or bytes, got {type(text).__name__}: of a file give path.read_bytes(), of whole numbers "
        "bytes(numbers), or ''.join(map(chr, numbers)) if they are above 255; for a model of words, numbers or other "
        "symbols, fit to a list of them with tokens=True"
    )


def is_text(text: Any) -> bool:
    """Return whether this is one text."""
    return isinstance(text, str | bytes | bytearray | memoryview)


@dataclass(frozen=True, eq=False)
class Given:
    """The sequences that a user gave.

    Args:
        parts: each of them: a str, bytes, or a list of tokens.
        is_one: whether one was given by itself, not a list of them.
    """

    parts: list[Any]
    is_one: bool


def given_texts(text: Any) -> Given:
    """Return one text or several.

    Raises:
        TypeError: if they can be read only once, or one is no text.
    """
    if isinstance(text, Iterator):
        raise TypeError(
            f"a text is a str or bytes, or a list of them; a {type(text).__name__} is read only once: give what "
            "it yields, file.read() or list(generator)"
        )
    is_one = is_text(text) or not isinstance(text, Iterable)
    return Given([as_text(part) for part in ([text] if is_one else text)], is_one)


def codes_of(text: Text) -> NDArray[np.unsignedinteger]:
    """Return the byte values or code points of a text."""
    if isinstance(text, bytes):
        return np.frombuffer(text, np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def marks_after(text: Text, mark: Text) -> NDArray[np.bool_]:
    """Return, for each symbol of a text, whether it comes right after a symbol.

    Example:
        >>> marks_after("1=2=", "=").tolist()
        [False, False, True, False]
    """
    marks = np.zeros(len(text), bool)
    marks[1:] = codes_of(text)[:-1] == ord(mark)
    return marks


@dataclass(frozen=True)
class Alphabet:
    """The symbols a model knows, in order: characters of a str, or values of bytes.

    Args:
        symbols: the sorted distinct characters (str) or byte values (bytes).
        end: the number of the symbol that ends each text; None: none does.

    Example:
        >>> Alphabet.of(["abba"]).encode("ab").tolist()
        [0, 1]
    """

    symbols: Text
    end: int | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, texts: Iterable[Text]) -> Alphabet:
        """Return the alphabet of all symbols in some texts.

        Raises:
            ValueError: if there is no symbol at all, or two of them are the halves of a surrogate
                pair.
            TypeError: if str and bytes are mixed, or one is neither.
        """
        texts = [as_text(text) for text in texts]
        kinds = {type(text) for text in texts}
        if len(kinds) > 1:
            found = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise TypeError(f"texts must be all str or all bytes, got {found}")
        values: set[int] = set()
        characters: set[str] = set()
        for text in texts:
            if isinstance(text, bytes):
                values.update(text)
            else:
                characters.update(text)
        if not values and not characters:
            raise ValueError("the text is empty: there is no symbol to learn from")
        if values:
            return cls(bytes(sorted(values)))
        symbols = "".join(sorted(characters))
        if symbols.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") != symbols:
            raise ValueError(
                "the text holds halves of surrogate pairs as characters of their own, which a model file would join: "
                "decode it as UTF-16, or give bytes"
            )
        return cls(symbols)

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def codes(self) -> IntArray:
        """(A,) the byte value or code point of each symbol."""
        return codes_of(self.symbols).astype(np.int64)

    @property
    def roles(self) -> IntArray:
        """(A,) what each symbol is to words and lines: LETTER, BLANK, NEWLINE or OTHER."""
        return np.array([role_of(chr(code)) for code in self.codes.tolist()], np.int64)

    def sequences(self, text: Any) -> Given:
        """Return the texts that a user gave, as the model reads them."""
        return given_texts(text)

    def sequence(self, text: Any) -> Any:
        """Return the one text that a user gave."""
        return as_text(text)

    def numbers(self, text: Text) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the number of each symbol, any of a foreign one, and whether the alphabet has it."""
        if type(text) is not type(self.symbols):
            known = type(self.symbols).__name__
            given = type(text).__name__
            raise TypeError(f"the model reads {known}, the text is {given}")
        codes = codes_of(text)
        order = np.argsort(self.codes)
        x = np.empty(len(codes), np.int64)
        known = np.empty(len(codes), bool)
        # by blocks, as there may be memory for little more than the numbers of a text
        for begin in range(0, len(codes), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            place = np.searchsorted(self.codes[order], codes[part].astype(np.int64))
            x[part] = order[np.minimum(place, len(self) - 1)]
            known[part] = self.codes[x[part]] == codes[part]
        return x, known

    def spelled(self, symbol: Any) -> float:  # noqa: ARG002 - tokens differ
        """Return the bits that say which symbol outside of the alphabet this is."""
        return 8.0 if isinstance(self.symbols, bytes) else math.log2(0x110000)

    def escapes(self, text: Any, known: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the bits of the symbols outside of the alphabet: of the place in the text, and of which it is."""
        place = math.log2(len(known) + 1)
        return np.array([place + self.spelled(text[at]) for at in np.flatnonzero(~known)])

    def encode(self, text: Text) -> IntArray:
        """Return the numbers 0..A-1 of the symbols of a text.

        Raises:
            UnseenSymbolError: if a symbol is not in the alphabet; the message names it and its
                place.
            TypeError: if it is no text, or bytes where the model reads str, or the other way round.
        """
        text = self.sequence(text)
        x, known = self.numbers(text)
        if not known.all():
            at = int(np.argmin(known))
            missing = len(known) - int(known.sum())
            raise UnseenSymbolError(
                f"symbol {_shown(text, at)} at position {at} is not one of the {len(self)} symbols the "
                f"model was trained on ({missing} such positions); fit with a larger `alphabet` (--alphabet FILE)"
            )
        return x

    def decode(self, x: Iterable[int]) -> Any:
        """Return the text with these numbers."""
        if isinstance(self.symbols, bytes):
            return bytes(self.symbols[int(y)] for y in x)
        return "".join(self.symbols[int(y)] for y in x)


def _shown(text: Any, at: int) -> str:
    return repr(text[at : at + 1] if is_text(text) else text[at])


@dataclass(frozen=True, eq=False)
class Part:
    """A stretch of a text with its positions sorted by symbol.

    Args:
        begin: first t.
        end: last t plus one.
        by_symbol: (end - begin,) rows of the positions, those with symbol 0 first.
        offsets: (A+1,) where each symbol begins in ``by_symbol``.
    """

    begin: int
    end: int
    by_symbol: IntArray
    offsets: IntArray


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences of symbols laid out one after the other.

    Args:
        x: (T,) symbols.
        bounds: (S+1,) where each sequence begins, and T.
        chi: (T,) True where the symbol is to be predicted.
        A: number of symbols of the alphabet.
        whole: the corpus that this one is a batch of, whose frequencies count; None: its own.
    """

    x: IntArray
    bounds: IntArray
    chi: NDArray[np.bool_]
    A: int
    whole: Corpus | None = None

    @classmethod
    def of(
        cls, sequences: Sequence[IntArray], A: int, masks: Sequence[NDArray[np.bool_]] | None = None
    ) -> Corpus:
        """Lay out encoded sequences; a mask tells which of its symbols are to be predicted (default: all).

        Empty sequences are left out.

        Raises:
            ValueError: if there is no symbol, none is to be predicted, or a mask has another
                length.
        """
        lengths = [len(sequence) for sequence in sequences]
        if masks is not None and [len(mask) for mask in masks] != lengths:
            raise ValueError("each mask needs one entry for each symbol of its text")
        bounds = np.concatenate([[0], np.cumsum([length for length in lengths if length])]).astype(
            np.int64
        )
        if bounds[-1] == 0:
            raise ValueError("the text is empty: give one with a symbol")
        x = np.concatenate(sequences).astype(np.int64, copy=False)
        chi = np.ones(len(x), bool)
        if masks is not None:
            chi = np.concatenate([np.asarray(mask, bool) for mask in masks])
        if not chi.any():
            raise ValueError("the mask leaves no symbol to be predicted")
        return cls(x, bounds, chi, A)

    def beginning(self, T: int) -> Corpus:
        """Return the first T symbols; a sequence in which they end is cut there."""
        bounds = np.append(self.bounds[self.bounds < T], T)
        return Corpus(self.x[:T], bounds, self.chi[:T], self.A)

    def batch(self, sequences: IntArray) -> Corpus:
        """Return some of the sequences, by their numbers; raises ValueError if none of their symbols is predicted."""
        spans = [slice(self.bounds[s], self.bounds[s + 1]) for s in sequences]
        part = Corpus.of(
            [self.x[span] for span in spans], self.A, [self.chi[span] for span in spans]
        )
        return replace(part, whole=self)

    @property
    def rows(self) -> int:
        """Number of rows of states, R = T + S."""
        return len(self.x) + len(self.bounds) - 1

    @cached_property
    def row(self) -> IntArray:
        """(T,) row of the state before each symbol."""
        sequence = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))
        return np.arange(len(self.x)) + sequence

    @property
    def starts(self) -> IntArray:
        """(S,) row of the first state of each sequence."""
        return self.bounds[:-1] + np.arange(len(self.bounds) - 1)

    @cached_property
    def _parts(self) -> dict[int, list[Part]]:
        return {}

    def parts(self, size: int) -> list[Part]:
        """Return the text in parts of ``size`` symbols, each sorted by symbol."""
        if size not in self._parts:
            self._parts[size] = [
                self._part(begin, min(begin + size, len(self.x)))
                for begin in range(0, len(self.x), size)
            ]
        return self._parts[size]

    def _part(self, begin: int, end: int) -> Part:
        x = self.x[begin:end]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(x, minlength=self.A))])
        by_symbol = self.row[begin:end][np.argsort(x, kind="stable")]
        return Part(begin, end, by_symbol, offsets.astype(np.int64))

    @cached_property
    def counts(self) -> IntArray:
        """(A,) how often each symbol occurs, predicted or not."""
        return np.bincount(self.x, minlength=self.A).astype(np.int64)

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """(A,) share of each symbol among all symbols, in [0, 1]."""
        if self.whole is not None:
            return self.whole.frequencies
        return self.counts / len(self.x)

    @cached_property
    def positions(self) -> IntArray:
        """(P,) the t of the symbols that are to be predicted, increasing."""
        return np.flatnonzero(self.chi)

    @cached_property
    def predicted(self) -> IntArray:
        """(P,) rows before the symbols that are to be predicted, increasing."""
        return self.row[self.chi]

    @cached_property
    def expected(self) -> IntArray:
        """(P,) the symbols that are to be predicted."""
        return self.x[self.chi]

    @property
    def is_plain(self) -> bool:
        """True if it is one sequence with every symbol to be predicted."""
        return len(self.bounds) == 2 and len(self.predicted) == len(self.x)


def role_of(text: str) -> int:
    """Return what a character or a token is to words and lines; digits are letters."""
    if text.isalnum():
        return LETTER
    if "\n" in text and text.isspace():
        return NEWLINE
    return BLANK if text and not text.strip(" \t") else OTHER
