"""The two kinds of pass over a text: forward with its log-likelihood, and the directions of the steps.

Alphabet of this module: A symbols, N units, E edges, R rows of states, P predicted positions, eps
the damping of the transition metric.

A *writing* step moves w, a *transition* step moves tau, rho and V0. Both are ascent directions:
parameters plus rate times direction has, for a small rate, a larger log-likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences import layout
from pathspace.sequences.kernels import compiled, output
from pathspace.sequences.kernels.solve import solve_packed
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import FLOOR, Direction, Parameters
from pathspace.sequences.prior import Prior
from pathspace.sequences.text import Corpus

Array = NDArray[np.float64]
Metric = Literal["rbp", "rutsd", "rbp-qd", "rutsd-qd", "fb", "bp"]
WritingStep = Literal["qdh", "dh", "fisher", "bp"]

_BLOCK = 2**15
_SINGULAR = 1e-12
"""Share of the largest eigenvalue of a Fisher matrix below which one counts as 0."""
_DETAIL: dict[Metric, int] = {"rbp": 2, "rutsd": 2, "rbp-qd": 1, "rutsd-qd": 1, "fb": 0, "bp": 0}
"""What `moments` is asked for."""


@dataclass(frozen=True, eq=False)
class Forward:
    """Results of a forward pass that the steps need.

    Args:
        a: (R, N+1) activities.
        pi: (P, A) predicted probabilities.
        log_likelihood: sum of log pi_t(x_t) over the predicted positions, in nats; maybe NaN.
    """

    a: Array
    pi: Array
    log_likelihood: float


def predicting(a: Array, corpus: Corpus) -> Array:
    """Return the rows of a, (P, N+1), before the symbols that are to be predicted."""
    return a[:-1] if corpus.is_plain else a[corpus.predicted]


def activities(model: Parameters, corpus: Corpus, buffers: Buffers | None = None) -> Array:
    """Return the activities (R, N+1) along a text."""
    tau = model.contextual_tau()
    a = (buffers or Buffers()).array("a", corpus.rows, model.units + 1)
    persistent = model.kind == "pcnn"
    logistic = model.squash == "logistic"
    if model.graph.is_dense:
        weights = layout.matrix(model, tau, backward=False)
        compiled.states_dense(corpus.x, corpus.bounds, weights, model.V0, persistent, logistic, a)
    else:
        slots = layout.slots(model, tau)
        compiled.states_sparse(
            corpus.x,
            corpus.bounds,
            slots.bias,
            slots.weight,
            slots.target,
            model.V0,
            persistent,
            logistic,
            a,
        )
    return a


def forward(
    model: Parameters, corpus: Corpus, a: Array | None = None, buffers: Buffers | None = None
) -> Forward:
    """Return activities, predictions and log-likelihood.

    Args:
        model: the parameters.
        corpus: the text.
        a: the activities, if they are known: they do not depend on w.
        buffers: memory to use; the result lives in it until it is used again.
    """
    if a is None:
        a = activities(model, corpus, buffers)
    pi = (buffers or Buffers()).array("pi", len(corpus.expected), corpus.A)
    log_seen = output.predictions(predicting(a, corpus), model.w, corpus.expected, pi)
    return Forward(a, pi, float(log_seen.sum()))


def writing_direction(
    model: Parameters,
    corpus: Corpus,
    state: Forward,
    step: WritingStep = "qdh",
    damping: float = 1.0,
    prior: Prior | None = None,
) -> Direction:
    """Return the direction of a writing step.

    DH: d[i,y] = W[i,y] / h_ii^y. QDH: the quasi-diagonal rule with the always-on unit for
    reference. Fisher: the whole matrix of O13 (63) instead. BP: the gradient W itself.

    Args:
        model: the parameters.
        corpus: the text.
        state: its forward pass.
        step: "qdh", "dh", "fisher" or "bp".
        damping: factor of eps_y, the frequency of y among all symbols plus 2.2e-16, on the diagonal
            of each.
        prior: of the weights, or None.
    """
    a = predicting(state.a, corpus)
    W = output.writing_gradient(a, state.pi, corpus.expected)
    # eps_y = frequency of y + 2.2e-16, on the entry i = 0 too
    extra = np.broadcast_to(damping * (corpus.frequencies + FLOOR), W.shape)
    if prior is not None:
        W -= prior.w * (model.w - prior.centre.w)
        extra = extra + prior.w
    if step == "bp":
        return Direction(w=W)
    if step == "fisher":
        return Direction(w=_fisher_step(output.writing_fisher(a, state.pi), extra, W))
    h, h0 = output.writing_metric(a, state.pi)
    h += extra
    if step == "dh":
        return Direction(w=W / h)
    M00 = h[:1]
    M0i = h0[1:]
    # d_i = (G_i - G_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00)
    rest = _divide(W[1:] - W[:1] * M0i / M00, h[1:] - M0i**2 / M00, h[1:])
    # d_0 = G_0 / M_00 - sum_i (M_0i / M_00) d_i
    return Direction(
        w=np.concatenate([W[:1] / M00 - (M0i / M00 * rest).sum(axis=0, keepdims=True), rest])
    )


def _fisher_step(matrix: Array, extra: Array, W: Array) -> Array:
    """Return (matrix + diag(extra))^-1 W, its pseudo-inverse where it is singular.

    Without ``extra`` it is: adding a number to w[i, y] for all y changes no prediction.
    """
    matrix[np.diag_indices_from(matrix)] += extra.ravel()
    # in units of the diagonal, so that no scale of an activity decides what counts as singular
    scale = np.sqrt(_nonzero(matrix.diagonal()))
    matrix /= scale[:, None]
    matrix /= scale
    values, vectors = np.linalg.eigh(matrix)
    certain = values > _SINGULAR * values[-1]
    inverse = np.where(certain, 1.0, 0.0) / np.where(certain, values, 1.0)
    return (vectors @ (inverse * (vectors.T @ (W.ravel() / scale))) / scale).reshape(W.shape)


def _divide(numerator: Array, remainder: Array, diagonal: Array) -> Array:
    """Return numerator / remainder, and 0 where the remainder of a diagonal entry is only rounding error.

    That happens where a unit never varies and the damping is next to nothing, as for a symbol never
    seen.
    """
    certain = remainder > 8 * FLOOR * diagonal
    return np.where(certain, numerator, 0.0) / np.where(certain, remainder, 1.0)


def _nonzero(M00: Array) -> Array:
    """Return the entries of unit 0 to divide their rows by, 1 where one is zero and its row with it."""
    return np.where(M00 == 0, 1.0, M00)


class _Backward:
    """Backpropagation through a text, the last part first, B (R, N+1) filling up, and m if ``modulus``."""

    def __init__(
        self, model: Parameters, corpus: Corpus, state: Forward, buffers: Buffers, *, modulus: bool
    ) -> None:
        tau = model.contextual_tau()
        self._model = model
        self._corpus = corpus
        self._state = state
        self._modulus = modulus
        self.B = buffers.array("B", *state.a.shape)
        self.m = buffers.array("m", *state.a.shape)
        self._now = np.zeros((2, model.units + 1))
        # what the output layer sends back is made in blocks small enough to stay in the cache
        self.block = max(256, _BLOCK // (model.units + 1))
        self._kernel: Callable[..., None]
        self._weights: tuple[NDArray, ...]
        loop = layout.loops(model, tau)
        if model.graph.is_dense:
            weights = layout.matrix(model, tau, backward=True)
            squared = weights**2
            diagonal = np.arange(model.units)
            squared[:, diagonal, diagonal] = 0
            self._kernel = compiled.backpropagate_dense
            self._weights = (weights, squared, loop)
            return
        slots = layout.slots(model, tau)
        squared = np.where(slots.target == np.arange(model.units + 1), 0.0, slots.weight**2)
        self._kernel = compiled.backpropagate_sparse
        self._weights = (slots.weight, squared, slots.target, loop)

    def through(self, begin: int, end: int) -> None:
        """Go from time ``end``, where the call before ended, back to ``begin``."""
        model = self._model
        corpus = self._corpus
        state = self._state
        for stop in range(end, begin, -self.block):
            first = max(begin, stop - self.block)
            p = slice(*np.searchsorted(corpus.positions, (first, stop)))
            u, variance = output.activity_gradient(
                model.w, state.pi[p], corpus.expected[p], variance=self._modulus
            )
            self._kernel(
                corpus.x, corpus.bounds, first, stop, corpus.chi, *self._weights, state.a, u, variance,
                model.kind == "pcnn", model.squash == "logistic", self._modulus, self._now, self.B, self.m,
            )  # fmt: skip


def gradient_and_modulus(
    model: Parameters, corpus: Corpus, state: Forward, buffers: Buffers | None = None
) -> tuple[Array, Array]:
    """Return B and the RBP modulus m, both (R, N+1)."""
    backward = _Backward(model, corpus, state, buffers or Buffers(), modulus=True)
    backward.through(0, len(corpus.x))
    return backward.B, backward.m


@dataclass(frozen=True, eq=False)
class Moments:
    """The sums over time that a transition step is made of, without damping.

    Args:
        G: (A, E) gradient of every edge.
        diagonal: (A, E) diagonal of the metric (detail 1).
        cross: (A, E) row 0 of the metric (detail 1).
        M: (A, packed triangles) the metric over the edges into each unit (detail 2).
        B0: (N+1,) gradient of the start values.
        m0: (N+1,) modulus of the start values, 0 with detail 0.
    """

    G: Array
    diagonal: Array
    cross: Array
    M: Array
    B0: Array
    m0: Array


def moments(
    model: Parameters,
    corpus: Corpus,
    state: Forward,
    detail: int,
    outer_product: bool = False,
    buffers: Buffers | None = None,
) -> Moments:
    """Return the sums over time.

    Args:
        model: the parameters.
        corpus: the text.
        state: its forward pass.
        detail: 0 for the gradient, 1 for diagonal and row 0 of the metric too, 2 for the metric
            itself.
        outer_product: whether the modulus is B^2 (RUTSD), not the RBP modulus.
        buffers: memory to use.
    """
    graph = model.graph
    A = model.symbols
    G = np.zeros((A, graph.edges))
    diagonal, cross = (np.zeros(G.shape if detail == 1 else (0, 0)) for _ in range(2))
    M = np.zeros((A, int(graph.triangle[-1])) if detail == 2 else (0, 0))
    modulus = detail > 0 and not outer_product
    backward = _Backward(model, corpus, state, buffers or Buffers(), modulus=modulus)
    # the sums of a part are taken while it is in the cache; a part needs enough of each symbol for
    # long blocks
    for part in reversed(corpus.parts(max(backward.block, 64 * A))):
        backward.through(part.begin, part.end)
        if outer_product:
            rows = slice(corpus.row[part.begin], corpus.row[part.end - 1] + 2)
            # m_i^t = (B_i^t)^2
            np.multiply(backward.B[rows], backward.B[rows], out=backward.m[rows])
        compiled.moments(
            detail, part.by_symbol, part.offsets, state.a, backward.B, backward.m,
            graph.first, graph.sources, graph.triangle, G, diagonal, cross, M,
        )  # fmt: skip
    B0 = backward.B[corpus.starts].sum(axis=0)
    m0 = backward.m[corpus.starts].sum(axis=0) if detail else np.zeros_like(B0)
    return Moments(G, diagonal, cross, M, B0, m0)


def transition_direction(
    model: Parameters,
    corpus: Corpus,
    state: Forward,
    metric: Metric = "rbp",
    damping: float = 1.0,
    buffers: Buffers | None = None,
    prior: Prior | None = None,
) -> Direction:
    """Return the direction of a transition step.

    Args:
        model: the parameters.
        corpus: the text.
        state: its forward pass.
        metric: "rbp" or "rutsd" (the whole metric per unit and symbol), "rbp-qd" or "rutsd-qd"
            (quasi-diagonal), "fb" (frequency-adjusted backpropagation), "bp" (backpropagation).
        damping: eps, added to every diagonal entry.
        buffers: memory to use.
        prior: of the weights, or None.

    Raises:
        ValueError: if an RNN is to be trained in a whole metric; it couples all symbols and is not
            offered.
    """
    if model.kind == "rnn" and metric in ("rbp", "rutsd"):
        raise ValueError(f"an RNN has no whole {metric} metric; use '{metric}-qd'")
    detail = _DETAIL[metric]
    sums = moments(model, corpus, state, detail, metric.startswith("rutsd"), buffers)
    pull = np.zeros_like(model.tau)
    extra = np.full_like(model.tau, damping)
    if prior is not None:
        pull = prior.tau * (prior.centre.tau - model.tau)
        extra += prior.tau
    if metric in ("fb", "bp"):
        # of "fb", 1 / frequency of y for the parameters of a symbol; unseen symbols have G = 0
        adjust = (
            1 / np.maximum(corpus.frequencies, FLOOR) if metric == "fb" else np.ones(model.symbols)
        )
        return _backpropagated(model, sums, adjust[:, None], pull)
    # V0_j moves by B_j^0 / (m_j^0 + eps), and not at all where this is 0 / 0: a saturated unit has
    # no start to move
    V0 = np.zeros(model.units + 1)
    V0[1:] = _divide(sums.B0[1:], sums.m0[1:] + damping, sums.m0[1:] + damping)
    if detail == 2:
        step = np.empty_like(sums.G)
        solve_packed(sums.G + pull, sums.M, model.graph.first, model.graph.triangle, extra, step)
        return Direction(tau=step, V0=V0)
    if model.kind == "rnn":
        tau, rho = _rnn_quasi_diagonal(model, sums, pull, extra, damping)
        return Direction(tau=tau, rho=rho, V0=V0)
    return Direction(
        tau=_quasi_diagonal(model, sums.G + pull, sums.diagonal + extra, sums.cross), V0=V0
    )


def _backpropagated(model: Parameters, sums: Moments, adjust: Array, pull: Array) -> Direction:
    """Return G, multiplied by ``adjust`` (A, 1) for the parameters of a symbol."""
    if model.kind != "rnn":
        return Direction(tau=sums.G * adjust + pull, V0=sums.B0)
    rho = np.zeros_like(model.rho)
    rho[:, 1:] = sums.G[:, model.graph.first[1:-1]] * adjust
    return Direction(tau=sums.G.sum(axis=0, keepdims=True) + pull, rho=rho, V0=sums.B0)


def _quasi_diagonal(model: Parameters, G: Array, diagonal: Array, cross: Array) -> Array:
    """Return the quasi-diagonal direction (rows, E) with each unit's edge from unit 0 for reference."""
    graph = model.graph
    bias = graph.first[1:-1]
    reference = bias[graph.targets - 1]
    ratio = cross / _nonzero(diagonal[:, reference])
    ratio[:, bias] = 0.0
    # d_i = (G_i - G_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00); at the reference itself this is G_0 /
    # M_00
    step = _divide(G - G[:, reference] * ratio, diagonal - cross * ratio, diagonal)
    # d_0 = G_0 / M_00 - sum_i (M_0i / M_00) d_i
    step[:, bias] -= np.add.reduceat(ratio * step, bias, axis=1)
    return step


def _rnn_quasi_diagonal(
    model: Parameters, sums: Moments, pull: Array, extra: Array, damping: float
) -> tuple[Array, Array]:
    """Return the directions of tau (1, E) and rho (A, N+1), the bias tau[0,j] being the reference of both."""
    bias = model.graph.first[1:-1]
    G = sums.G.sum(axis=0, keepdims=True) + pull
    cross = sums.cross.sum(axis=0, keepdims=True)
    diagonal = sums.diagonal.sum(axis=0, keepdims=True) + extra
    step = _quasi_diagonal(model, G, diagonal, cross)
    # for rho[j,y]: M_yy = M_0y = sum_t [x_t = y] m_j^{t+1}
    Myy = sums.cross[:, bias]
    ratio = Myy / _nonzero(diagonal[:, bias])
    rho = np.zeros_like(model.rho)
    remainder = Myy + damping - Myy * ratio
    rho[:, 1:] = _divide(sums.G[:, bias] - G[:, bias] * ratio, remainder, Myy + damping)
    step[:, bias] -= (ratio * rho[:, 1:]).sum(axis=0)
    return step, rho
