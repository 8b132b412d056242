"""Predicting the next character or word of a text.

The characters are those of Penn Treebank, text8 or its beginning, and the bytes of enwik8; the
words those of Penn Treebank and WikiText-2, with one end of sentence for every line.

A training sequence is a window of the text, read from a zero state; windows do not overlap and come
in random order. Validation and test windows are preceded by a context that is read and does not
count.

text8 and enwik8 are cut as usual: 90, 5 and 5 million. The first 6.8 million characters of text8,
cut in the same proportion, are a data set of their own; results on them cannot be compared with
those on all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count, Natural
from pathspace.experiments.tasks.corpora import CHARACTERS, WORDS, read_corpus
from pathspace.experiments.tasks.task import Task, described, prediction, windows

UNKNOWN, END = "<unk>", "<eos>"
# What reports call different symbols, and the error.
KINDS: dict[str, tuple[str, Literal["bits per character", "perplexity"]]] = {
    "characters": ("symbols", "bits per character"),
    "words": ("types", "perplexity"),
}
PRESETS: dict[str, dict[str, Any]] = {
    "characters": {
        # A few minutes on two cores: 600 steps.
        "task_options": {"train_size": 960_000, "validation_size": 50_000, "test_size": 100_000},
        "epochs": 1,
        "batch_size": 32,
        "model_options": {"hidden": 256, "output": "every"},
        "momentum": 0.9,
        "clip_norm": 1.0,
        "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1],
    },
    "words": {
        # A few minutes on two cores: 600 steps.
        "task_options": {"train_size": 240_000, "validation_size": 10_000, "test_size": 20_000},
        "epochs": 1,
        "batch_size": 20,
        # One-hot inputs would be wasteful: every word has a vector.
        "model_options": {"hidden": 200, "embedding": 200, "output": "every"},
        "momentum": 0.9,
        "clip_norm": 1.0,
        "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
    },
}


def characters(
    *,
    dataset: Literal["ptb", "text8", "enwik8", "text8-prefix"] = "ptb",
    length: Count = 50,
    context: Natural = 50,
    train_size: Natural = 0,
    validation_size: Natural = 0,
    test_size: Natural = 0,
    stream: bool = False,
    data_dir: Path | None = None,
) -> Task:
    """Return the prediction of characters as a task.

    Args:
        dataset: A name in `corpora.CHARACTERS`.
        length: T, predictions per window.
        context: Steps that validation and test windows read before those that count.
        train_size: Characters from the beginning of the training part; 0 takes all.
        validation_size: The same of the validation part.
        test_size: The same of the test part.
        stream: Whether windows are read in the order of the text, each from the state that the one
            before it left; then there is no context.
        data_dir: The folder that holds the files, or the data set's folder with them.
    """
    corpus = CHARACTERS[dataset]
    texts = read_corpus(corpus, data_dir)
    if dataset == "ptb":  # a space follows every character
        texts = tuple(text[::2] for text in texts)
    alphabet = sorted(set().union(*texts))
    cutting = Cutting(length, context, train_size, validation_size, test_size, stream)
    numbers = [_numbers(text, alphabet) for text in texts]
    return next_symbol("characters", corpus.title, numbers, len(alphabet), cutting)


def _numbers(text: str, alphabet: list[str]) -> Tensor:
    # Code points, then a table: a list of 10^8 Python numbers would not fit into memory.
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    table = torch.zeros(ord(alphabet[-1]) + 1, dtype=torch.int64)
    table[[ord(character) for character in alphabet]] = torch.arange(len(alphabet))
    return table[points]


def words(
    *,
    dataset: Literal["ptb", "wikitext-2"] = "ptb",
    vocabulary: Natural = 0,
    length: Count = 20,
    context: Natural = 20,
    train_size: Natural = 0,
    validation_size: Natural = 0,
    test_size: Natural = 0,
    stream: bool = False,
    data_dir: Path | None = None,
) -> Task:
    """Return the prediction of words as a task.

    Args:
        dataset: A name in `corpora.WORDS`.
        vocabulary: How many types there are: the most frequent ones, `<unk>` and the end of a
            sentence among them; all others are read as `<unk>`. 0 keeps all. Perplexities of
            different vocabularies cannot be compared.
        length: See `characters`.
        context: See `characters`.
        train_size: Words from the beginning of the training part; 0 takes all. The vocabulary is
            that of the whole training part in any case.
        validation_size: See `characters`.
        test_size: See `characters`.
        stream: See `characters`.
        data_dir: See `characters`.
    """
    corpus = WORDS[dataset]
    texts = [text.replace("\n", f" {END} ").split() for text in read_corpus(corpus, data_dir)]
    known = {word: number for number, word in enumerate(sorted(_types(texts[0], vocabulary)))}
    numbers = [torch.tensor([known.get(word, known[UNKNOWN]) for word in text]) for text in texts]
    cutting = Cutting(length, context, train_size, validation_size, test_size, stream)
    return next_symbol("words", corpus.title, numbers, len(known), cutting)


def _types(text: list[str], vocabulary: int) -> set[str]:
    types = Counter(text)
    if not vocabulary:
        return set(types) | {UNKNOWN}
    if not 2 <= vocabulary <= len(types):
        raise ConfigurationError(
            f"The option 'vocabulary' of the task 'words' is {vocabulary!r}: give a whole number from 2 to "
            f"{len(types)}, the number of types, or 0 for all."
        )
    del types[UNKNOWN], types[END]
    # Ties go by the alphabet, so that the same types come out everywhere.
    frequent = sorted(types, key=lambda word: (-types[word], word))[: vocabulary - 2]
    return {UNKNOWN, END, *frequent}


@dataclass(frozen=True)
class Cutting:
    """The options by which three parts of a text are cut into windows; see `characters`."""

    length: int
    context: int = 0
    train_size: int = 0
    validation_size: int = 0
    test_size: int = 0
    stream: bool = False


def next_symbol(
    task: Literal["characters", "words"],
    title: str,
    parts: Sequence[Tensor],
    symbols: int,
    cutting: Cutting,
) -> Task:
    """Return the prediction of the next symbol of a text as a task.

    Args:
        task: Its name in the registry, which is also what its symbols are called.
        title: What reports call the text.
        parts: The numbers of the symbols of training, validation and test part, int64.
        symbols: How many different ones there are.
        cutting: How they are cut.
    """
    context = 0 if cutting.stream else cutting.context
    least = cutting.length + context + 1
    sizes = ("train_size", "validation_size", "test_size")
    texts = [
        _shortened(part, getattr(cutting, name), f"The option {name!r} of the task {task!r}", least)
        for part, name in zip(parts, sizes, strict=True)
    ]
    train, *others = texts
    splits = [windows(train, cutting.length)]
    splits += [windows(part, cutting.length, context) for part in others]
    kinds, metric = KINDS[task]
    how = "a stream read in segments" if cutting.stream else "windows"
    words = f"{title}, {symbols} {kinds}, {how} of {cutting.length}"
    return prediction(
        task, described(words, texts, task), splits, symbols, metric, stream=cutting.stream
    )


def _shortened(text: Tensor, size: int, option: str, least: int) -> Tensor:
    """Return the first `size` symbols of a text; 0 stands for all."""
    if size > len(text) or 0 < size < least:
        raise ConfigurationError(
            f"{option} is {size!r}: give a whole number from {least} (one window) to {len(text)} (the whole text), "
            "or 0 for all."
        )
    return text[:size] if size else text
