"""Closed forms for recurrent layers.

Letters: T time, H hidden, t = 0..T-1 a transition; S = W_rec o W_rec ``[H, H]``; ``before[t]`` the squared state that
enters transition t (h_{t-1} of P16, zero or the start at t = 0); ``delta[t]`` = dG/dh_t, the path mass that leaves the
state after it; both ``[T, H]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOOK_EVERY = 8  # products between two looks at whether the others matter


def recurrent_second_term(S: Tensor, before: Tensor, delta: Tensor) -> Tensor:
    """kappa2 of the recurrent matrix of one layer.

    Args:
        S: squared recurrent weights ``[H, H]``.
        before: squared states before each transition, ``[T, H]``.
        delta: path mass after each transition, ``[T, H]``.

    Returns:
        kappa2, ``[H, H]``. P16 Eq. (11), whose footnote 3 prints h_{t2} for h_{t2-1} and drops the factor 4. For an S
        that contracts, the sum ends as soon as a proved bound on the rest is below rounding.
    """
    steps = before.shape[0]
    total = torch.zeros_like(S)
    power = torch.eye(S.shape[0], dtype=S.dtype, device=S.device)
    # no sum over t below is larger than this in any entry
    most = torch.outer(delta.sum(0), before.amax(0))
    for m in range(steps - 1):
        # The edge k -> j at transitions t and t + m + 1, joined by S^m from j back to k.
        pairs = delta[m + 1 :].t() @ before[: steps - m - 1]
        # kappa2 = 4 S o sum_m (S^m)^T o [sum_t delta_{t+m+1} before_t^T]
        total += power.t() * pairs
        following = power @ S
        if m % _LOOK_EVERY == _LOOK_EVERY - 1 and _negligible(power, following, most, total):
            break
        power = following
    return 4 * S * total


def _negligible(power: Tensor, following: Tensor, most: Tensor, total: Tensor) -> bool:
    """Whether all further terms are below the rounding of the sum so far, in every entry.

    With S^{m+1} <= r S^m elementwise, S^{m+i} <= r^i S^m for all i, since S is not negative: all further terms add up
    to at most r / (1 - r) (S^m)^T o ``most``. r and the comparison are made of ratios that rescaling does not change.
    """
    grows = torch.where(following > 0, following / power, 0.0).amax()
    r = float(grows)
    if r >= 1 or r != r:
        return False
    rest = power.t() * most * (r / (1 - r))
    return bool((rest <= torch.finfo(total.dtype).eps * total).all())
