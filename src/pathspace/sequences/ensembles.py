"""Weights of networks and of symbols in a merged network, found on a validation text.

Alphabet of this module: K networks, P predicted positions, A symbols.

    pi_t(y) proportional to exp( b_y + sum_k c_k s_k,t(y) ),   s_k,t(y) = sum_i a_k,i^t w_k[i,y]

The log-likelihood of a text is concave in the weights c and the offsets b, so Newton's method finds
its maximum. The offsets are there because a geometric mean is smallest where the networks disagree:
rare symbols would be predicted too rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.evaluation import code_length
from pathspace.sequences.folds import Fold
from pathspace.sequences.merging import merge_parameters
from pathspace.sequences.one_thread import one_thread
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.passes import activities, forward, predicting
from pathspace.sequences.text import Corpus
from pathspace.sequences.training import Training

Array = NDArray[np.float64]

_BLOCK = 2048


@dataclass(frozen=True, eq=False)
class Blend:
    """Weights and offsets with which networks are put together.

    Args:
        weights: (K,) the c_k.
        offsets: (A,) the b_y.
    """

    weights: Array
    offsets: Array


def _newton_terms(
    outputs: Sequence[tuple[Array, Array]], v: Array, x: NDArray[np.int64]
) -> tuple[float, Array, Array]:
    """Return log-likelihood, gradient (K+A,) and minus the Hessian (K+A, K+A) at v = (c, b).

    The outputs are activities (P, N_k+1) and writing weights (N_k+1, A) of each network.
    """
    K = len(outputs)
    A = outputs[0][1].shape[1]
    total = 0.0
    gradient = np.zeros(K + A)
    curvature = np.zeros((K + A, K + A))
    for begin in range(0, len(x), _BLOCK):
        seen = x[begin : begin + _BLOCK]
        s = np.stack([a[begin : begin + _BLOCK] @ w for a, w in outputs])
        mixed = np.tensordot(v[:K], s, axes=1) + v[K:]
        mixed -= mixed.max(axis=1, keepdims=True)
        logp = mixed - np.log(np.exp(mixed).sum(axis=1, keepdims=True))
        p = np.exp(logp)
        at = np.arange(len(seen))
        total += float(logp[at, seen].sum())
        # dLL/dc_k = sum_t s_k,t(x_t) - E s_k,t,   dLL/db_y = sum_t [x_t = y] - pi_t(y)
        mean = np.einsum("py,kpy->kp", p, s)
        gradient[:K] += (s[:, at, seen] - mean).sum(axis=1)
        gradient[K:] += np.bincount(seen, minlength=A) - p.sum(axis=0)
        # -d2LL/dc_k dc_l = sum_t Cov(s_k,t, s_l,t),  -d2LL/dc_k db_y = sum_t pi_t(y) (s_k,t(y) - E s_k,t),
        # -d2LL/db_y db_z = sum_t [y = z] pi_t(y) - pi_t(y) pi_t(z)
        centred = (s - mean[:, :, None]) * np.sqrt(p)
        flat = centred.reshape(K, -1)
        curvature[:K, :K] += flat @ flat.T
        curvature[:K, K:] += np.einsum("kpy,py->ky", centred, np.sqrt(p))
        curvature[K:, K:] += np.diag(p.sum(axis=0)) - p.T @ p
    curvature[K:, :K] = curvature[:K, K:].T
    return total, gradient, curvature


def fit_blend(
    models: Sequence[Parameters],
    corpus: Corpus,
    ridge: float = 1.0,
    ridge_offsets: float = 10.0,
    iterations: int = 50,
) -> Blend:
    """Return the weights c and offsets b that maximise the log-likelihood of a text, held by ridges.

    maximise LL(c, b) - (ridge K / 2) sum_k (c_k - 1/K)^2 - (ridge_offsets / 2) sum_y b_y^2

    Args:
        models: networks of one kind, squash and alphabet.
        corpus: a text they were not trained on.
        ridge: how strongly the weights are held near 1/K.
        ridge_offsets: how strongly the offsets are held near 0.
        iterations: most steps of Newton's method.

    Raises:
        ValueError: if there is no network.
    """
    if not models:
        raise ValueError("there is no network to weight")
    K = len(models)
    A = corpus.A
    outputs = [(predicting(activities(model, corpus), corpus), model.w) for model in models]
    centre = np.concatenate([np.full(K, 1 / K), np.zeros(A)])
    strength = np.concatenate([np.full(K, ridge * K), np.full(A, ridge_offsets)])

    def objective(v: Array) -> tuple[float, Array, Array]:
        total, gradient, curvature = _newton_terms(outputs, v, corpus.expected)
        pull = strength * (v - centre)
        return (
            total - float(pull @ (v - centre)) / 2,
            gradient - pull,
            curvature + np.diag(strength),
        )

    v: Array = centre.copy()
    value, gradient, curvature = objective(v)
    for _ in range(iterations):
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-6:
            trial = objective(v + size * step)
            if trial[0] >= value:
                break
            size /= 2
        else:
            break
        v = v + size * step
        gain = trial[0] - value
        value, gradient, curvature = trial
        if gain < 1e-6:
            break
    return Blend(v[:K], v[K:])


def merge_folds(ranked: Sequence[Sequence[Training]], folds: Sequence[Fold]) -> Training:
    """Return one training with the networks of all folds, and the code length of what each fold held back.

    The networks of a fold are blended so that its own validation text is shortest, and the folds
    count alike.
    """
    models: list[Parameters] = []
    weights = []
    offsets = []
    held_bits = 0.0
    with one_thread():
        for trainings, fold in zip(ranked, folds, strict=True):
            assert fold.validation is not None
            found = [training.result for training in trainings]
            blend = fit_blend(found, fold.validation)
            held_bits += code_length(
                merge_parameters(found, blend.weights, blend.offsets), fold.validation
            )
            models += found
            weights.append(blend.weights / len(folds))
            offsets.append(blend.offsets / len(folds))
        parameters = merge_parameters(models, np.concatenate(weights), np.sum(offsets, axis=0))
        trainings = [training for found in ranked for training in found]
        passes = max(training.passes for training in trainings) // 2 * 2
        return replace(
            Training.begin(parameters, min(training.rate_w for training in trainings)),
            passes=passes,
            tries=sum(training.tries for training in trainings),
            seconds=sum(training.seconds for training in trainings),
            log_likelihood=_of_whole_text(parameters, folds),
            validation_bits=held_bits,
            best=parameters,
            best_bits=held_bits,
            best_pass=passes,
            broke_off=any(training.broke_off for training in trainings),
        )


def _of_whole_text(parameters: Parameters, folds: Sequence[Fold]) -> float:
    """Return the log-likelihood of all that the folds have learned."""
    total = forward(parameters, folds[0].corpus).log_likelihood
    held = folds[0].validation
    # what one fold keeps back is training text of the others
    if len(folds) > 1 and held is not None:
        total = total + forward(parameters, held).log_likelihood
    return total
