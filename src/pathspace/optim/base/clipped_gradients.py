"""Checks of gradients before a step: finite, of this network, and not clipped beforehand.

A gradient that is not finite would spoil weights and state for good, so that nothing is changed
then. What an example does to a weight's gradient it does to a row or a column of it, so that one of
each shows it. All of a large gradient is looked at in one step of ten: looking at all of it in
every step took up to a twentieth of the time of a step.

Clipped gradients have a norm that depends on how the weights are scaled.

Who clips them does it before an optimizer sees any, and invariance is gone without a sign. But then
some steps have the same norm of all gradients though their gradients differ, which hardly happens
to others. A few steps are looked at, five from each of the steps 0, 50, 100, 200, 400, ...: one
pass over the gradients, and one wait for a GPU after the fifth.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pathspace.network import Network
from pathspace.squared.sharding import to_local, totals

_SMALL = 2**15  # elements of a gradient, all of which are looked at in every step
_THOROUGH = 10  # steps from one look at all elements to the next
_FIFTH = 5  # the step at which to look for parameters that nobody was given
_TAKEN = WeakIdKeyDictionary()  # parameters that some optimizer was given
_LOOKS = 5
_SECOND = 50
_EQUAL = 3  # of the five
# between norms, relative: clip_grad_norm_ adds 1e-6, and sums millions of squares in float32
_SAME = 3e-5
# Between the norms of single tensors, relative to that of all. On a smooth path (all of the data in
# every step) the norm of all may stand still for a moment, but not to so many digits while its
# parts move as far as this.
_DIFFERENT = 0.01


class ClippedGradients:
    """Looks at gradients, and warns once if they arrive clipped.

    Args:
        kind: the name of the optimizer.
        instead: its argument that clips what does not depend on the scales.
    """

    def __init__(self, kind: str, instead: str) -> None:
        self._kind = kind
        self._instead = instead
        self._step = 0
        self._start = 0.0
        self._norms: list[Tensor] = []

    def look(self, gradients: Sequence[Tensor]) -> None:
        """See the gradients of a step."""
        self._step += 1
        if self._step <= self._start:
            return
        norms = _norms(gradients)
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
            stacklevel=level_of_the_caller(),
        )


def level_of_the_caller() -> int:
    """Return how far above whoever asks the program stands that called ``step()``."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("pathspace.", "torch.")
    ):
        level = level + 1
        frame = frame.f_back
    return level


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors, shape (how many,)."""
    device = gradients[0].device
    norms = (
        torch.linalg.vector_norm(to_local(g), dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    )
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    return totals(squares, gradients).sqrt_()


def repeated(norms: list[list[float]]) -> float | None:
    """Return the norm that several different gradients have.

    Args:
        norms: for each step, the norms of its tensors.

    Returns:
        It, or None.
    """
    steps = sorted((math.hypot(*parts), parts) for parts in norms)
    for i in range(len(steps) - _EQUAL + 1):
        some = steps[i : i + _EQUAL]
        shortest = some[0][0]
        longest = some[-1][0]
        if longest - shortest <= _SAME * shortest and all(
            math.dist(a, b) > _DIFFERENT * shortest
            for (_, a), (_, b) in itertools.combinations(some, 2)
        ):
            return longest
    return None


def taken(parameters: Iterable[Tensor]) -> None:
    """Remember that an optimizer was given some parameters."""
    for p in parameters:
        _TAKEN[p] = True


class Gradients:
    """Looks at the gradients of an optimizer.

    Args:
        kind: the name of the optimizer.
        network: the traced network.
    """

    def __init__(self, kind: str, network: Network) -> None:
        self._kind = kind
        self._network = network
        self._steps = 0
        self._calls = 0  # of look_for_others

    def expect_finite(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        agreed: Callable[[bool], bool],
    ) -> None:
        """Refuse gradients that are not finite; on the CPU, as a GPU would have to be waited for.

        Args:
            parameters: of a step.
            gradients: of each of them, the part in this process.
            agreed: from whether this process refuses the step to whether all do.

        Raises:
            FloatingPointError: one is not.
        """
        on_cpu = [g for g in gradients if g.is_cpu]
        if not on_cpu:
            return
        thorough = self._steps % _THOROUGH == 0
        self._steps += 1
        total = 0.0
        for g in on_cpu:
            total += _sum(g, thorough=thorough)
        bad = None
        # a finite sum has finite summands; one that is not may be of finite ones, too large for
        # their type
        if not math.isfinite(total):
            pairs = zip(parameters, gradients, strict=True)
            bad = next((p for p, g in pairs if g.is_cpu and not bool(g.isfinite().all())), None)
        if agreed(bad is not None):
            raise FloatingPointError(
                f"{self._name(bad)} is not finite, because training diverged (lower the learning rate or clip) or a "
                "batch held NaN; parameters and the optimizer's state are not changed"
            )

    def _name(self, p: Tensor | None) -> str:
        """Return what a gradient is called in a message; that of None is in another process."""
        if p is None:
            return "a gradient in another process"
        every = self._network.model.named_parameters()
        name = next((name for name, q in every if q is p), None)
        if name is None:
            return f"the gradient of a parameter of shape {tuple(p.shape)} outside the model"
        return f"the gradient of '{name}'"

    def look_for_others(self, own: Callable[[], Iterable[Tensor]]) -> None:
        """Warn, at the fifth step, of parameters of the network with gradients that no optimizer here was given.

        Groups may be added before. Where several optimizers share a network, the rest is left out
        on purpose.

        Args:
            own: returns the optimizer's parameters.
        """
        self._calls += 1
        if self._calls != _FIFTH:
            return
        inside = self._network.parameters
        kind = self._kind
        ids = {id(p) for p in own()}
        others = {n: p for n, p in inside.items() if id(p) not in ids}
        if any(p in _TAKEN for p in others.values()):
            return
        left = [n for n, p in others.items() if p.is_leaf and p.grad is not None]
        if not left:
            return
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(
            f"{kind} was given {len(inside) - len(others)} of the {len(inside)} parameters of the network, and "
            f"gradients reach {', '.join(map(repr, left[:3]))}{more}, which no optimizer of pathspace was given. They "
            "stay as they are, or another rule moves them and training depends on how the weights are scaled: give "
            f"all parameters of the model to {kind}, or call requires_grad_(False) on those that are to stay",
            stacklevel=level_of_the_caller(),
        )


def _sum(gradient: Tensor, *, thorough: bool) -> float:
    """Return the sum of all elements, or of a row and a column of a large gradient."""
    if thorough or gradient.dim() < 2 or gradient.numel() <= _SMALL:
        return gradient.sum().item()
    return gradient[0].sum().item() + gradient[:, 0].sum().item()
