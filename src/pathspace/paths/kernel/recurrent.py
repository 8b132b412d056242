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
    loops = S.new_empty(S.shape)
    power = torch.eye(S.shape[0], dtype=S.dtype, device=S.device)
    # no sum over t below is larger than this in any entry
    most = torch.outer(delta.sum(0), before.amax(0))
    for m in range(steps - 1):
        # The edge k -> j at transitions t and t + m + 1, joined by S^m from j back to k.
        pairs = delta[m + 1 :].t() @ before[: steps - m - 1]
        # kappa2 = 4 sum_m S o (S^m)^T o [sum_t delta_{t+m+1} before_t^T]; S o (S^m)^T first, because a loop has no
        # scale, where the other two factors may leave the type together though the product of all three does not
        torch.mul(S, power.t(), out=loops)
        total.addcmul_(loops, pairs)
        following = power @ S
        if m % _LOOK_EVERY == _LOOK_EVERY - 1 and _negligible(power, following, loops * most, total):
            break
        power = following
    return total.mul_(4)


def _negligible(power: Tensor, following: Tensor, last: Tensor, total: Tensor) -> bool:
    """Whether all further terms are below the rounding of the sum so far, in every entry.

    With S^{m+1} <= r S^m elementwise, S^{m+i} <= r^i S^m for all i, since S is not negative: all further terms add up
    to at most r / (1 - r) ``last``, a bound on the last term taken. r and the comparison are made of ratios that
    rescaling does not change.
    """
    grows = torch.where(following > 0, following / power, 0.0).amax()
    r = float(grows)
    if r >= 1 or r != r:
        return False
    rest = last * (r / (1 - r))
    return bool((rest <= torch.finfo(total.dtype).eps * total).all())
