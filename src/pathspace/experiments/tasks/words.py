"""Predicting the next word: Penn Treebank and WikiText-2, with one end of sentence for every line.

A training sequence is a window of the text, read from a zero state; windows do not overlap and come
in random order. Validation and test windows are preceded by a context that is read and does not
count.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import Count, Natural
from pathspace.experiments.tasks.corpora import WORDS, read_corpus
from pathspace.experiments.tasks.next_symbol import Cutting, next_symbol
from pathspace.experiments.tasks.task import Task

PRESET: dict[str, Any] = {
    # A few minutes on two cores: 600 steps.
    "task_options": {"train_size": 240_000, "validation_size": 10_000, "test_size": 20_000},
    "epochs": 1,
    "batch_size": 20,
    # One-hot inputs would be wasteful: every word has a vector.
    "model_options": {"hidden": 200, "embedding": 200, "output": "every"},
    "momentum": 0.9,
    "clip_norm": 1.0,
    "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
}
UNKNOWN, END = "<unk>", "<eos>"


def build(
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
        length: T, predictions per window.
        context: Steps that validation and test windows read before those that count.
        train_size: Words from the beginning of the training part; 0 takes all. The vocabulary is
            that of the whole training part in any case.
        validation_size: The same of the validation part.
        test_size: The same of the test part.
        stream: Whether windows are read in the order of the text, each from the state that the one
            before it left; then there is no context.
        data_dir: The folder that holds the files, or the data set's folder with them.

    Raises:
        ConfigurationError: A size is impossible, or there is no data.
    """
    corpus = WORDS[dataset]
    texts = [text.replace("\n", f" {END} ").split() for text in read_corpus(corpus, data_dir)]
    known = {word: number for number, word in enumerate(sorted(_types(texts[0], vocabulary)))}
    numbers = [torch.tensor([known.get(word, known[UNKNOWN]) for word in text]) for text in texts]
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    return next_symbol(
        "words",
        numbers,
        Cutting(length, context, stream, sizes),
        title=corpus.title,
        symbols=len(known),
        kinds="types",
        metric="perplexity",
    )


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
