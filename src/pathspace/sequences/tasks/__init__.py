"""Synthetic texts whose true code lengths are known (O13, Section 4).

Each task module has ``generate(rng, ...)``, which makes a text, and ``true_bits(text)``, its code
length under the generator: minus the base-2 logarithm of its probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pathspace.sequences.tasks import alphabet, anbn, music, xor
from pathspace.sequences.tasks.text_error import ImpossibleTextError

__all__ = ["TASKS", "ImpossibleTextError", "Task", "regret"]


@dataclass(frozen=True)
class Task:
    """A generator and its code length.

    Args:
        generate: makes a text from a source of randomness.
        true_bits: code length in bits of a text under the generator.
        mask: which symbols are to be predicted, or None for all.
    """

    generate: Callable[[np.random.Generator], str]
    true_bits: Callable[[str], float]
    mask: Callable[[str], np.ndarray] | None = None


TASKS: dict[str, Task] = {
    "alphabet": Task(alphabet.generate, alphabet.true_bits),
    "alphabet-9": Task(
        partial(alphabet.generate, after_last=False), partial(alphabet.true_bits, after_last=False)
    ),
    "music": Task(music.generate, music.true_bits),
    "xor": Task(xor.generate, xor.true_bits, xor.mask),
    "anbn": Task(anbn.generate, anbn.true_bits),
}
"""The tasks by name, in the paper's sizes; "alphabet-9" has no capitals after the digit 9, unlike the paper."""


def regret(task: str, text: str, bits: float) -> float:
    r"""Return how many bits a code needs more than the true generator's: bits minus the true code length.

    Example:
        >>> round(regret("anbn", "a" * 1024 + "\n" + "b" * 1024 + "\n", 12.0), 4)
        1.9986
    """
    return bits - TASKS[task].true_bits(text)
