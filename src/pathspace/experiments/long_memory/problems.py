"""Problems of long memory: the sum, product or difference of two marked numbers of a long sequence.

Sources: S. Hochreiter and J. Schmidhuber (1997), in the form of Q. Le, N. Jaitly and G. Hinton (2015); the product is
theirs of 1997, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.experiments.tasks.adding import marked_sequences


@dataclass(frozen=True)
class Problem:
    """What is asked for, and when it is learned.

    Attributes:
        answer: From the two marked numbers.
        target: A test error below this is a success: 6 % of what the best constant answer gets.
        constant: The mean squared error of the best constant answer.
    """

    answer: Callable[[Tensor, Tensor], Tensor]
    target: float
    constant: float

    def draw(self, generator: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw sequences (count, length, 2) and their answers (count,)."""
        inputs, marked = marked_sequences(count, length, generator)
        return inputs, self.answer(marked[:, 0], marked[:, 1])


PROBLEMS = {
    "addition": Problem(torch.add, 0.01, 1 / 6),
    "multiplication": Problem(torch.mul, 0.003, 7 / 144),
    "subtraction": Problem(torch.sub, 0.01, 1 / 6),
}
