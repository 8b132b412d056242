"""How much each network of a merged one should count, found on a validation text.

Alphabet of this module: K networks, P predicted positions, A symbols.

    pi_t(y) proportional to exp( sum_k c_k s_k,t(y) ),   s_k,t(y) = sum_i a_k,i^t w_k[i,y]

The log-likelihood of a text is concave in the weights c, so Newton's method finds its maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .parameters import Parameters
from .passes import activities, predicting
from .text import Corpus

Array = NDArray[np.float64]

_BLOCK = 2048


def _scores(models: Sequence[Parameters], corpus: Corpus) -> Array:
    """Return s_k,t(y), (K, P, A), the largest of each position subtracted."""
    scores = np.empty((len(models), len(corpus.expected), corpus.A))
    for model, out in zip(models, scores, strict=True):
        np.matmul(predicting(activities(model, corpus), corpus), model.w, out=out)
        out -= out.max(axis=1, keepdims=True)
    return scores


def _newton_terms(scores: Array, c: Array, x: NDArray[np.int64]) -> tuple[float, Array, Array]:
    """Return log-likelihood, gradient (K,) and minus the Hessian (K, K) at the weights c."""
    total, gradient, curvature = 0.0, np.zeros(len(c)), np.zeros((len(c), len(c)))
    for begin in range(0, len(x), _BLOCK):
        s, seen = scores[:, begin : begin + _BLOCK], x[begin : begin + _BLOCK]
        mixed = np.tensordot(c, s, axes=1)
        mixed -= mixed.max(axis=1, keepdims=True)
        logp = mixed - np.log(np.exp(mixed).sum(axis=1, keepdims=True))
        p = np.exp(logp)
        at = np.arange(len(seen))
        total += float(logp[at, seen].sum())
        # dLL/dc_k = sum_t s_k,t(x_t) - E s_k,t,   -d2LL/dc_k dc_l = sum_t Cov(s_k,t, s_l,t)
        mean = np.einsum("py,kpy->kp", p, s)
        gradient += (s[:, at, seen] - mean).sum(axis=1)
        centred = (s - mean[:, :, None]) * np.sqrt(p)
        flat = centred.reshape(len(c), -1)
        curvature += flat @ flat.T
    return total, gradient, curvature


def fit_weights(
    models: Sequence[Parameters], corpus: Corpus, ridge: float = 1.0, iterations: int = 50
) -> Array:
    """Return the weights c (K,) that maximise the log-likelihood of a text, held near 1/K by a ridge.

    maximise LL(c) - (ridge K / 2) sum_k (c_k - 1/K)^2

    Args:
        models: networks of one kind, squash and alphabet.
        corpus: a text they were not trained on.
        ridge: how strongly the weights are held.
        iterations: most steps of Newton's method.

    Raises:
        ValueError: if there is no network.
    """
    if not models:
        raise ValueError("there is no network to weight")
    K = len(models)
    scores = _scores(models, corpus)
    centre: Array = np.full(K, 1 / K)

    def objective(c: Array) -> tuple[float, Array, Array]:
        total, gradient, curvature = _newton_terms(scores, c, corpus.expected)
        pull = ridge * K * (c - centre)
        return (
            total - float(pull @ (c - centre)) / 2,
            gradient - pull,
            curvature + ridge * K * np.eye(K),
        )

    c: Array = centre
    value, gradient, curvature = objective(c)
    for _ in range(iterations):
        step, size = np.linalg.solve(curvature, gradient), 1.0
        while size > 1e-6:
            trial = objective(c + size * step)
            if trial[0] >= value:
                break
            size /= 2
        else:
            break
        c, gain = c + size * step, trial[0] - value
        value, gradient, curvature = trial
        if gain < 1e-6:
            break
    return c
