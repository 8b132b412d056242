"""From a text in three parts to the task of predicting what comes next; characters and words alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks.task import Split, Task, prediction, windows


@dataclass(frozen=True)
class Cutting:
    """The cutting of three parts of a text into windows.

    Attributes:
        length: T, predictions per window.
        context: Steps that validation and test windows read before those that count; none in a
            stream.
        stream: Whether windows are read in the order of the text, each from the state that the one
            before it left.
        sizes: Symbols from the beginning of the training, the validation and the test part, by the
            names of the options; 0 takes all.
    """

    length: int
    context: int
    stream: bool
    sizes: Mapping[str, int]


def next_symbol(
    task: Literal["characters", "words"],
    text: Sequence[Tensor],
    cutting: Cutting,
    *,
    title: str,
    symbols: int,
    kinds: str,
    metric: Literal["bits per character", "perplexity"],
) -> Task:
    """Return the prediction of the next symbol of a text as a task.

    Args:
        task: Its name in the registry, which is also what its symbols are called.
        text: The numbers of the symbols of training, validation and test part, int64.
        cutting: How they are cut.
        title: What reports call the text.
        symbols: How many different ones there are.
        kinds: What reports call those.
        metric: See `task.prediction`.

    Raises:
        ConfigurationError: An option is impossible; the message names it.
    """
    context = 0 if cutting.stream else cutting.context
    train, validation, test = (
        _shortened(part, size, name, least=cutting.length + context + 1, task=task)
        for part, (name, size) in zip(text, cutting.sizes.items(), strict=True)
    )
    how = "a stream read in segments" if cutting.stream else "windows"
    splits: list[Split] = [windows(train, cutting.length)]
    splits += [windows(part, cutting.length, context) for part in (validation, test)]
    return prediction(
        task,
        f"{title}, {symbols} {kinds}, {how} of {cutting.length} ({len(train)} training, {len(validation)} validation, "
        f"{len(test)} test {task})",
        *splits,
        symbols=symbols,
        metric=metric,
        stream=cutting.stream,
    )


def _shortened(text: Tensor, size: int, name: str, *, least: int, task: str) -> Tensor:
    """Return the first `size` symbols of a text; 0 stands for all."""
    if size > len(text) or 0 < size < least:
        raise ConfigurationError(
            f"The option {name!r} of the task {task!r} is {size!r}: give a whole number from {least} (one window) "
            f"to {len(text)} (the whole text), or 0 for all."
        )
    return text[:size] if size else text
