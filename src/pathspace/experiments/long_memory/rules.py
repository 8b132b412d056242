"""Directions of the plain rules, for many copies of a parameter at once.

Each is the rule of the library: AdamW's direction and SOAP's are its own functions; Muon is written out here, because
torch orthogonalizes one matrix at a time. Letters: S copies of a gradient G, (S, n, m) or (S, n); index: the copies
that go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pathspace.optim.rules.moments import adam_direction
from pathspace.optim.rules.soap import soap_direction

BETAS, SOAP_BETAS, EPS = (0.9, 0.999), (0.95, 0.95), 1e-8
SOAP_FREQUENCY = 40  # as in `ps.optim.PathSOAP`
MOMENTUM, COEFFICIENTS, ITERATIONS, TINY = 0.95, (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch's Muon


class Direction(Protocol):
    """What a rule makes of the gradients of one parameter."""

    def __call__(self, G: Tensor) -> Tensor:
        """Take the gradients in and return the directions, of their shape."""
        ...

    def keep(self, index: Tensor) -> None:
        """Forget all copies but these."""
        ...


class Adam:
    """Adam's direction; all copies have taken as many steps."""

    def __init__(self, betas: tuple[float, float] = BETAS) -> None:
        self.betas = betas
        self.state: dict[str, Any] = {}

    def __call__(self, G: Tensor) -> Tensor:
        """See `Direction`."""
        return adam_direction(G, self.state, self.betas, EPS)

    def keep(self, index: Tensor) -> None:
        """See `Direction`."""
        self.state = {k: v[index] if isinstance(v, Tensor) else v for k, v in self.state.items()}


class Muon:
    """Muon's direction for matrices, of AdamW's size: 0.2 sqrt(max(n, m)) times the orthogonalized momentum."""

    def __init__(self) -> None:
        self.momentum: Tensor | None = None

    def __call__(self, G: Tensor) -> Tensor:
        """See `Direction`."""
        if self.momentum is None:
            self.momentum = torch.zeros_like(G)
        self.momentum.lerp_(G, 1 - MOMENTUM)
        return orthogonalized(G.lerp(self.momentum, MOMENTUM)).mul_(0.2 * math.sqrt(max(G.shape[1:])))

    def keep(self, index: Tensor) -> None:
        """See `Direction`."""
        if self.momentum is not None:
            self.momentum = self.momentum[index]


def orthogonalized(G: Tensor) -> Tensor:
    """U V^T, nearly, for U S V^T = G, by torch's Newton-Schulz iterations on all copies, in bfloat16 as there."""
    a, b, c = COEFFICIENTS
    X = G.bfloat16()
    X = X.mT if G.shape[1] > G.shape[2] else X
    X = X / X.flatten(1).norm(dim=1).clamp_min(TINY)[:, None, None]
    for _ in range(ITERATIONS):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return (X.mT if G.shape[1] > G.shape[2] else X).to(G.dtype, memory_format=torch.contiguous_format)


class Soap:
    """SOAP's direction for matrices, copy by copy: factorizations gain nothing from being together."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def __call__(self, G: Tensor) -> Tensor:
        """See `Direction`."""
        self.states = self.states or [{} for _ in G]
        largest = max(G.shape[1:])
        found = [
            soap_direction(one, state, SOAP_BETAS, EPS, SOAP_FREQUENCY, largest)
            for one, state in zip(G, self.states, strict=True)
        ]
        return torch.stack(found)

    def keep(self, index: Tensor) -> None:
        """See `Direction`."""
        self.states = [self.states[i] for i in index.tolist()]


# What each rule does with W_rec, with other matrices, and with vectors.
RULES: dict[str, tuple[Callable[[], Direction], Callable[[], Direction], Callable[[], Direction]]] = {
    "muon": (Muon, Muon, Adam),
    "muon-hidden": (Muon, Adam, Adam),  # as Muon's authors advise: AdamW for the first and the last layer
    "soap": (Soap, Soap, lambda: Adam(SOAP_BETAS)),
    "adamw": (Adam, Adam, Adam),
}
