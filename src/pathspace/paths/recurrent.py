"""Closed forms for recurrent layers.

Letters: T time, H hidden, t = 0..T-1 a transition; S = W_rec o W_rec ``[H, H]``; ``before[t]`` the squared state that
enters transition t (h_{t-1} of P16, zero or the start at t = 0); ``delta[t]`` = dG/dh_t, the path mass that leaves the
state after it; both ``[T, H]``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_second_term(S: Tensor, before: Tensor, delta: Tensor) -> Tensor:
    """kappa2 of the recurrent matrix of one layer.

    Args:
        S: squared recurrent weights ``[H, H]``.
        before: squared states before each transition, ``[T, H]``.
        delta: path mass after each transition, ``[T, H]``.

    Returns:
        kappa2, ``[H, H]``. P16 Eq. (11), whose footnote 3 prints h_{t2} for h_{t2-1} and drops the factor 4.
    """
    steps = before.shape[0]
    total = torch.zeros_like(S)
    power = torch.eye(S.shape[0], dtype=S.dtype, device=S.device)
    for m in range(steps - 1):
        # The edge k -> j at transitions t and t + m + 1, joined by S^m from j back to k.
        pairs = delta[m + 1 :].t() @ before[: steps - m - 1]
        # kappa2 = 4 S o sum_m (S^m)^T o [sum_t delta_{t+m+1} before_t^T]
        total += power.t() * pairs
        power = power @ S
        if m % 16 == 15 and not bool(power.any()):  # underflow: all further terms are zero
            break
    return 4 * S * total
