"""Predicting the next character: Penn Treebank and the beginning of text8.

A training sequence is a window of the text, read from a zero state; windows do not overlap and come in random
order. Validation and test windows are preceded by a context that is read and does not count.

What is in `corpora.CHARACTERS` can be had; of text8 that is its first 6.8 million characters, cut into nine
tenths, a twentieth and a twentieth. Results on them cannot be compared with those on the usual split of all 10^8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.tasks.corpora import CHARACTERS, read_corpus
from pathspace.experiments.tasks.task import Task, prediction, windows

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
    dataset: str = "ptb",
    length: int = 50,
    context: int = 50,
    train_size: int = 0,
    validation_size: int = 0,
    test_size: int = 0,
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
        stream: Whether windows are read in the order of the text, each from the state that the one before it left;
            then there is no context.
        data_dir: The folder that holds the files, or the data set's folder with them.

    Raises:
        ConfigurationError: There is no such data set, a size is impossible, or there is no data.
    """
    if dataset == "enwik8":
        raise ConfigurationError(
            "The text enwik8 (the first 10^8 bytes of an English Wikipedia dump) cannot be read yet: this version has "
            f"no copy of it to check a file against. Choose a dataset from {', '.join(CHARACTERS)}."
        )
    if dataset not in CHARACTERS:
        raise unknown_name(
            "dataset", str(dataset), CHARACTERS, "the option 'dataset' of the task 'characters'"
        )
    corpus = CHARACTERS[dataset]
    context = check_stream(stream, context, "characters")
    texts = read_corpus(corpus, data_dir)
    if dataset == "ptb":  # a space follows every character
        texts = tuple(text[::2] for text in texts)
    alphabet = sorted(set(texts[0]))
    numbers = [_numbers(text, alphabet) for text in texts]
    sizes = {"train_size": train_size, "validation_size": validation_size, "test_size": test_size}
    train, validation, test = (
        shortened(text, size, name, least=length + context + 1, task="characters")
        for text, (name, size) in zip(numbers, sizes.items(), strict=True)
    )
    kind = "a stream read in segments" if stream else "windows"
    return prediction(
        "characters",
        f"{corpus.title}, {len(alphabet)} symbols, {kind} of {length} ({len(train)} training, "
        f"{len(validation)} validation, {len(test)} test characters)",
        windows(train, length),
        windows(validation, length, context),
        windows(test, length, context),
        symbols=len(alphabet),
        metric="bits per character",
        stream=stream,
    )


def check_stream(stream: bool, context: int, task: str) -> int:
    """Return the context that a task reads before what counts: none in a stream.

    Raises:
        ConfigurationError: `stream` is neither true nor false.
    """
    if not isinstance(stream, bool):
        raise ConfigurationError(
            f"The option 'stream' of the task {task!r} is {stream!r}: give true or false."
        )
    return 0 if stream else context


def shortened(text: Tensor, size: int, name: str, *, least: int, task: str) -> Tensor:
    """Return the first `size` symbols of a text; 0 stands for all.

    Raises:
        ConfigurationError: There are fewer than `size`, or `size` is smaller than `least`.
    """
    if not isinstance(size, int) or size > len(text) or (size != 0 and size < least):
        raise ConfigurationError(
            f"The option {name!r} of the task {task!r} is {size!r}: give a whole number from {least} (one window) "
            f"to {len(text)} (the whole text), or 0 for all."
        )
    return text[:size] if size else text


def _numbers(text: str, alphabet: list[str]) -> Tensor:
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text])
