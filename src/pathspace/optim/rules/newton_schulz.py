"""Muon's direction: the momentum with all its singular values brought near to 1.

Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in neural networks", 2024;
the coefficients are its authors', as in ``torch.optim.Muon``. Letters: G gradient, a matrix [n, m]; B momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pathspace.optim.rules.moments import in_type

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(G: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """About U V^T for G = U S V^T, by X <- a X + (b A + c A^2) X with A = X X^T, from X = G / |G|.

    With the coefficients of the source, singular values end between about 0.7 and 1.2 instead of at 1.

    Args:
        G: a matrix ``[n, m]``.
        steps: iterations.
        dtype: type to compute in; G's own if None.

    Returns:
        A new matrix ``[n, m]`` of G's type.
    """
    a, b, c = COEFFICIENTS
    wide = G.shape[0] <= G.shape[1]
    X = (G if wide else G.T).to(dtype or G.dtype)
    X = X / X.norm().clamp(min=1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X if wide else X.T).to(G.dtype)


def muon_direction(
    G: Tensor, state: dict[str, Any], momentum: float, nesterov: bool, steps: int, dtype: torch.dtype | None
) -> Tensor:
    """Take G into the momentum B = momentum B + (1 - momentum) G and return it orthogonalized.

    Args:
        G: gradient, ``[n, m]``; it is not kept.
        state: where ``momentum_buffer`` is kept.
        momentum: decay rate of B.
        nesterov: orthogonalize (1 - momentum) G + momentum B instead of B.
        steps: iterations of :func:`orthogonalized`.
        dtype: its type.

    Returns:
        A new tensor ``[n, m]``.
    """
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(G)
    in_type(state, G.dtype, ("momentum_buffer",))
    B = state["momentum_buffer"].lerp_(G, 1 - momentum)
    return orthogonalized(G.lerp(B, momentum) if nesterov else B, steps, dtype)
