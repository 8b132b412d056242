"""Predicting the next character: Penn Treebank, text8 or its beginning, and the bytes of enwik8.

A training sequence is a window of the text, read from a zero state; windows do not overlap and come
in random order. Validation and test windows are preceded by a context that is read and does not
count.

text8 and enwik8 are cut as usual: 90, 5 and 5 million. The first 6.8 million characters of text8,
cut in the same proportion, are a data set of their own; results on them cannot be compared with
those on all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.experiments.layers import Count, Natural
from pathspace.experiments.tasks.corpora import CHARACTERS, read_corpus
from pathspace.experiments.tasks.next_symbol import Cutting, next_symbol
from pathspace.experiments.tasks.task import Task

PRESET: dict[str, Any] = {
    # A few minutes on two cores: 600 steps.
    "task_options": {"train_size": 960_000, "validation_size": 50_000, "test_size": 100_000},
    "epochs": 1,
    "batch_size": 32,
    "model_options": {"hidden": 256, "output": "every"},
    "momentum": 0.9,
    "clip_norm": 1.0,
    "learning_rates": [0.001, 0.003, 0.01, 0.03, 0.1],
}


def build(
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

    Raises:
        ConfigurationError: A size is impossible, or there is no data.
    """
    corpus = CHARACTERS[dataset]
    texts = read_corpus(corpus, data_dir)
    if dataset == "ptb":  # a space follows every character
        texts = tuple(text[::2] for text in texts)
    alphabet = sorted(set().union(*texts))
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    return next_symbol(
        "characters",
        [_numbers(text, alphabet) for text in texts],
        Cutting(length, context, stream, sizes),
        title=corpus.title,
        symbols=len(alphabet),
        kinds="symbols",
        metric="bits per character",
    )


def _numbers(text: str, alphabet: list[str]) -> Tensor:
    # Code points, then a table: a list of 10^8 Python numbers would not fit into memory.
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    table = torch.zeros(ord(alphabet[-1]) + 1, dtype=torch.int64)
    table[[ord(character) for character in alphabet]] = torch.arange(len(alphabet))
    return table[points]
