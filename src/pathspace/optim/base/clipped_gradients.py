"""Whether gradients arrive clipped, to a norm that depends on how the weights are scaled.

Who clips them does it before an optimizer sees any, and invariance is gone without a sign. But then some steps have
the same norm of all gradients though their gradients differ, which hardly happens to others. A few steps are looked
at, five from each of the steps 0, 50, 100, 200, 400, ...: one pass over the gradients, and one wait for a GPU after the
fifth.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pathspace.squared.parts import local, totals

_LOOKS, _SECOND = 5, 50
_EQUAL = 3  # of the five
_SAME = 3e-5  # between norms, relative: clip_grad_norm_ adds 1e-6, and sums millions of squares in float32
# Between the norms of single tensors, relative to that of all. On a smooth path (all of the data in every step) the
# norm of all may stand still for a moment, but not to so many digits while its parts move as far as this.
_DIFFERENT = 0.01


class ClippedGradients:
    """Looks at gradients, and warns once if they arrive clipped.

    Args:
        kind: the name of the optimizer.
        instead: its argument that clips what does not depend on the scales.
    """

    def __init__(self, kind: str, instead: str) -> None:
        self._kind, self._instead = kind, instead
        self._step, self._start = 0, 0.0
        self._norms: list[Tensor] = []

    def look(self, gradients: Iterable[Tensor]) -> None:
        """See the gradients of a step."""
        self._step += 1
        if self._step <= self._start:
            return
        norms = _norms(list(gradients))
        if self._norms and len(self._norms[0]) != len(norms):
            self._norms.clear()
        self._norms.append(norms)
        if len(self._norms) == _LOOKS:
            norm = repeated(torch.stack(self._norms).tolist())
            self._norms.clear()
            self._start = 2 * self._start or _SECOND
            if norm is not None:
                self._start = math.inf
                self._warn(norm)

    def _warn(self, norm: float) -> None:
        kind = self._kind
        warnings.warn(
            f"{kind} gets different gradients of the same norm, {norm:.4g}: something clips them (clip_grad_norm_, "
            "gradient_clip_val of Lightning, max_grad_norm of Hugging Face's Trainer). That norm depends on how the "
            "weights are scaled, so training is not invariant any more. Switch it off (gradient_clip_val=None, "
            f"max_grad_norm=0), and clip what does not depend on it: {kind}(..., {self._instead}={norm:.4g})",
            stacklevel=_level_of_the_caller(),
        )


def _level_of_the_caller() -> int:
    """How far above whoever asks the program stands that called ``step()``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("pathspace.", "torch.")
    ):
        level, frame = level + 1, frame.f_back
    return level


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norms of tensors, shape (how many,)."""
    device = gradients[0].device
    norms = (
        torch.linalg.vector_norm(local(g), dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    )
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    return totals(squares, gradients).sqrt_()


def repeated(norms: list[list[float]]) -> float | None:
    """The norm that several different gradients have.

    Args:
        norms: for each step, the norms of its tensors.

    Returns:
        It, or None.
    """
    steps = sorted((math.hypot(*parts), parts) for parts in norms)
    for i in range(len(steps) - _EQUAL + 1):
        some = steps[i : i + _EQUAL]
        shortest, longest = some[0][0], some[-1][0]
        if longest - shortest <= _SAME * shortest and all(
            math.dist(a, b) > _DIFFERENT * shortest for (_, a), (_, b) in itertools.combinations(some, 2)
        ):
            return longest
    return None
