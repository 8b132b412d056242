"""Symbols that are no characters: events, words, lines, numbers; the sequences of them, and their alphabet.

Alphabet of this module: A symbols.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.text import Alphabet, Given, IntArray, Text, given_texts, is_text, role_of

Splitter = Literal["words", "lines"]
Mode = bool | Splitter
"""What the symbols are: False for characters or bytes, True for tokens, or the name of a splitter of text."""

SPLITTERS: tuple[Splitter, ...] = ("words", "lines")
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_PLAIN = ({str}, {int})
"""Types of tokens that need no look at each of them."""


class Tokens(list[Hashable]):
    """One sequence of symbols that are no characters."""


def mode_of(text: Any, tokens: Mode | None) -> Mode:
    """Return what the symbols of a training text are.

    Args:
        text: the training text as the user gave it.
        tokens: what the user said about it; None: nothing.

    Raises:
        ValueError: if ``tokens`` is unknown, or a column of strings may be texts as well as tokens.
        TypeError: if the text has no order or can be read only once.
    """
    if tokens is None:
        return _looks_like_tokens(text)
    if not isinstance(tokens, bool) and tokens not in SPLITTERS:
        raise ValueError(f"tokens must be True, False, 'words', 'lines' or None, got {tokens!r}")
    return tokens


def _looks_like_tokens(text: Any) -> bool:
    """Return whether a text of which nothing was said has symbols that are no characters."""
    if is_text(text) or not isinstance(text, Iterable) or isinstance(text, Iterator):
        return False
    if isinstance(text, Tokens):
        return True
    _check_order(text)
    items = list(text)
    if not items or not all(is_text(item) for item in items):
        return bool(items)
    if _is_column(text):
        raise ValueError(
            f"a {type(text).__name__} of strings may be one sequence of tokens or several texts: give tokens=True for "
            "tokens, tokens=False for texts"
        )
    # a text of one symbol has nothing to predict it from
    return len(items) > 1 and all(isinstance(item, str) and len(item) == 1 for item in items)


def sequences_of(text: Any, mode: Mode) -> Given:
    """Return the sequences that a user gave, each as str, bytes or `Tokens`.

    Raises:
        TypeError: if it is no sequence, or a symbol cannot be hashed.
        ValueError: if a symbol is missing (None, NaN).
    """
    if mode is False:
        return given_texts(text)
    if isinstance(text, Tokens):
        return Given([text], True)
    if mode is not True:
        return _split(text, mode)
    if is_text(text):
        raise TypeError(
            f"a sequence of tokens is a list, an array or a column of them, got {type(text).__name__}: give "
            "[symbol, ...], text.split(), or fit with tokens='words'"
        )
    if not isinstance(text, Iterable) or isinstance(text, Iterator):
        return given_texts(text)  # which says what is wrong with it
    return _given_tokens(text)


def _given_tokens(text: Iterable[Any]) -> Given:
    """Return one sequence of tokens, or a sequence for each list of them."""
    _check_order(text)
    if isinstance(text, np.ndarray) and text.ndim > 2:
        raise TypeError(
            f"tokens are one row, or one row for each sequence, got an array of {text.ndim} axes"
        )
    items = list(text)
    nested = [_is_sequence(item) for item in items]
    if not any(nested):
        return Given([_tokens(text)], True)
    if not all(nested):
        at = nested.index(True)
        raise TypeError(
            f"tokens and lists of tokens are mixed (a list at position {at}): give one list of tokens, or a list of "
            "such lists"
        )
    return Given([_tokens(item) for item in items], False)


def _is_sequence(item: Any) -> bool:
    """Return whether an item is a list or a column of tokens, not a token."""
    return isinstance(item, list) or (_is_column(item) and getattr(item, "ndim", 0) > 0)


def joined(tokens: Sequence[Any], mode: Mode) -> str:
    """Return the text that has these words or lines; of other tokens one line for each.

    Example:
        >>> joined(sequences_of("she sells", "words").parts[0], "words")
        'she sells'
    """
    return ("" if mode == "words" else "\n").join(map(str, tokens))


def _is_column(text: Any) -> bool:
    """Return whether this is an array, or a column of a table, of NumPy, pandas, or alike."""
    return hasattr(text, "tolist") and hasattr(text, "dtype")


def _check_order(text: Any) -> None:
    if isinstance(text, AbstractSet | Mapping):
        raise TypeError(f"a {type(text).__name__} has no order: give a list of its symbols")
    if hasattr(text, "columns"):
        raise TypeError(
            f"a {type(text).__name__} has several columns: give one of them, table['name']"
        )


def _tokens(items: Any) -> Tokens:
    """Return one sequence, with Python's numbers and strings for those of NumPy."""
    if isinstance(items, Tokens):
        return items
    found = items.tolist() if _is_column(items) else list(items)
    if set(map(type, found)) in _PLAIN:
        return Tokens(found)
    return Tokens(_token(item, at) for at, item in enumerate(found))


def _token(item: Any, at: int) -> Hashable:
    if isinstance(item, np.number | np.bool_ | np.str_ | np.bytes_):
        item = item.item()
    if isinstance(item, bytearray | memoryview):
        item = bytes(item)
    try:
        hash(item)
    except TypeError as error:
        raise TypeError(
            f"a token must be hashable, as str, int and tuple are, got {type(item).__name__} at position {at}"
        ) from error
    if _is_missing(item):
        raise ValueError(
            f"the symbol at position {at} is missing ({item!r}): drop it (dropna), or give it a name (fillna)"
        )
    return item


def _is_missing(item: Any) -> bool:
    if item is None:
        return True
    try:
        return bool(item != item)  # NaN and NaT
    except TypeError:  # pandas' NA says neither
        return True


def _split(text: Any, mode: Splitter) -> Given:
    given = given_texts(text)
    return Given([_tokens_of(part, mode) for part in given.parts], given.is_one)


def _tokens_of(text: Text, mode: Splitter) -> Tokens:
    """Return the words or lines of a text.

    A word is a run of letters, digits and underscores, or a run of blanks, or any other character,
    so that they make the text again. Lines are those between the newlines.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{mode} are those of UTF-8 text: {error}") from error
    if mode == "words":
        return Tokens(_WORD.findall(text))
    lines = text.split("\n")
    return Tokens(lines if lines[-1] else lines[:-1])


@dataclass(frozen=True)
class TokenAlphabet(Alphabet):
    """The tokens that a model knows.

    Args:
        symbols: the distinct tokens, sorted where they can be, else in the order in which they
            came.
        mode: how a text is split into them; True: it is not.

    Example:
        >>> TokenAlphabet.of_sequences([Tokens(["open", "close"])]).encode(Tokens(["close"])).tolist()
        [0]
    """

    symbols: Any
    mode: Mode = True

    @classmethod
    def of_sequences(cls, sequences: Sequence[Tokens], mode: Mode = True) -> TokenAlphabet:
        """Return the alphabet of all symbols in some sequences.

        Raises:
            ValueError: if there is none.
        """
        found: list[Any] = list(
            dict.fromkeys(token for sequence in sequences for token in sequence)
        )
        if not found:
            raise ValueError("the text is empty: there is no symbol to learn from")
        # neighbours share their first decisions
        alike = len({type(token) for token in found}) == 1 and isinstance(found[0], str | int)
        return cls(tuple(sorted(found) if alike else found), mode)

    @cached_property
    def _numbers(self) -> dict[Hashable, int]:
        return {token: y for y, token in enumerate(self.symbols)}

    @property
    def roles(self) -> IntArray:
        """(A,) what each token is to words and lines: LETTER for a word, BLANK, NEWLINE or OTHER."""
        texts = [token if isinstance(token, str) else "" for token in self.symbols]
        return np.array([role_of(text) for text in texts], np.int64)

    def sequences(self, text: Any) -> Given:
        """Return the sequences that a user gave, as the model reads them."""
        if isinstance(text, str) and self.mode is True and text in self._numbers:
            return Given([Tokens([text])], True)
        return sequences_of(text, self.mode)

    def sequence(self, text: Any) -> Any:
        """Return the one sequence that a user gave, such as a context; raises TypeError if there are several."""
        if self.mode is not True and isinstance(text, list | tuple):
            return _tokens(text)
        given = self.sequences(text)
        if not given.is_one:
            raise TypeError(
                f"one sequence of tokens is expected, got {len(given.parts)} of them: give one"
            )
        return given.parts[0]

    def numbers(self, text: Any) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the number of each symbol, any of a foreign one, and whether the alphabet has it."""
        number = self._numbers.get
        x = np.fromiter((number(token, -1) for token in text), np.int64, len(text))
        return np.maximum(x, 0), x >= 0

    def spelled(self, symbol: Any) -> float:
        """Return the bits that say which symbol outside of the alphabet this is: of its bytes and one to end them."""
        return 8.0 * (len(str(symbol).encode(errors="replace")) + 1)

    def decode(self, x: Iterable[int]) -> Any:
        """Return the sequence with these numbers: a list, or the text where the model splits texts."""
        found = [self.symbols[int(y)] for y in x]
        return found if self.mode is True else joined(found, self.mode)


def alphabet_over(sequences: Sequence[Any], mode: Mode) -> Alphabet:
    """Return the alphabet of all symbols in some sequences; raises as `Alphabet.of` does."""
    return Alphabet.of(sequences) if mode is False else TokenAlphabet.of_sequences(sequences, mode)


def described(alphabet: Alphabet) -> Any:
    """Return what a file says of an alphabet, for JSON.

    Raises:
        TypeError: if a token is nothing that a file can hold.
    """
    symbols = alphabet.symbols
    if isinstance(alphabet, TokenAlphabet):
        return {"mode": alphabet.mode, "tokens": [_written(token) for token in symbols]}
    return list(symbols) if isinstance(symbols, bytes) else symbols


def _written(token: Any) -> Any:
    if isinstance(token, tuple):
        return {"tuple": [_written(part) for part in token]}
    if isinstance(token, bytes):
        return {"bytes": token.hex()}
    if type(token) in (str, bool, int, float):
        return token
    raise TypeError(
        f"a model file holds tokens of str, bytes, int, float, bool and tuples of them, got {type(token).__name__}: "
        "fit to str(token)"
    )


def alphabet_from(said: Any, end: Any = None) -> Alphabet:
    """Return the alphabet that a file describes; raises ValueError or TypeError if it is none.

    Args:
        said: its symbols.
        end: the number of the symbol that ends texts, or None.
    """
    alphabet = _alphabet_from(said)
    if end is None:
        return alphabet
    if type(end) is not int or not 0 <= end < len(alphabet):
        raise ValueError(f"the symbol that ends texts is number {end!r}")
    return replace(alphabet, end=end)


def _alphabet_from(said: Any) -> Alphabet:
    if isinstance(said, dict):
        symbols = tuple(_read(token) for token in said["tokens"])
        if said["mode"] is not True and said["mode"] not in SPLITTERS:
            raise ValueError(f"the tokens are {said['mode']!r}")
        if not symbols or len(set(symbols)) < len(symbols):
            raise ValueError("the alphabet has no symbol, or one twice")
        return TokenAlphabet(symbols, said["mode"])
    if not isinstance(said, str | list):
        raise ValueError(f"the alphabet is a {type(said).__name__}")
    if not said:
        raise ValueError("the alphabet has no symbol")
    if len(set(said)) < len(said):
        raise ValueError("the alphabet has a symbol twice")
    return Alphabet(said if isinstance(said, str) else bytes(said))


def _read(said: Any) -> Hashable:
    if isinstance(said, dict) and said.keys() == {"tuple"}:
        return tuple(_read(part) for part in said["tuple"])
    if isinstance(said, dict):
        return bytes.fromhex(said["bytes"])
    if type(said) not in (str, bool, int, float):
        raise ValueError(f"a token is a {type(said).__name__}")
    return said
