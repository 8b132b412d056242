"""The hidden Markov model of O13: a sparse random graph of states, trained by expectation-maximization.

Alphabet of this module: S hidden states, d edges that leave each, A symbols, T symbols of the text.

    targets[i, k]   state that the k-th edge of state i leads to       emission[y, i]  probability of y in state i
    p[i, k]         probability of that edge                           start[i]        probability of i at t = 0

    alpha_0(i) ~ start[i] emission[x_0, i],  alpha_t(j) ~ emission[x_t, j] sum_{i -> j} alpha_{t-1}(i) p_{ij}
    beta_{T-1} = 1,                          beta_{t-1}(i) = sum_{i -> j} p_{ij} emission[x_t, j] beta_t(j) / c_t

alpha_t sums to 1, c_t is what it was divided by, and the log-likelihood is sum_t log c_t.

Source: O13, footnote 9, for the graph and the start; L. Rabiner, *A tutorial on hidden Markov
models*, 1989, for the scaled passes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.baselines.hidden_markov import HiddenMarkov
from pathspace.sequences.cost import check_hidden_states
from pathspace.sequences.graph import Graph
from pathspace.sequences.kernels.machine_code import njit

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_SUMS = {"reassoc", "contract", "nsz"}
_GAIN = 0.01
"""Nats by which an iteration must raise the log-likelihood, as hmmlearn is told in the dense model."""
_SMALLEST = 1e-100
"""What is smaller counts as 0: numbers below the smallest normal one take a hundred times as long."""


@njit(error_model="numpy", fastmath=_SUMS, cache=True)
def _products(first, ends, values, vector, out):
    """Write sum_e values[e] vector[ends[e]] over the edges e of each state; the edges of i begin at first[i]."""
    for i in range(len(out)):
        total = 0.0
        for e in range(first[i], first[i + 1]):
            total += values[e] * vector[ends[e]]
        out[i] = total


@njit(error_model="numpy", cache=True)
def _forward(x, start, into, emission, alpha, scale):
    """Fill alpha (T, S) and scale (T,), which holds the c_t; ``into`` has the edges into each state."""
    first, sources, p = into
    for t in range(len(x)):
        row = alpha[t]
        if t == 0:
            row[:] = start
        else:
            _products(first, sources, p, alpha[t - 1], row)
        total = 0.0
        for i in range(len(row)):
            row[i] *= emission[x[t], i]
            total += row[i]
        scale[t] = total
        for i in range(len(row)):
            row[i] = row[i] / total if row[i] > _SMALLEST * total else 0.0


@njit(error_model="numpy", cache=True)
def _backward(x, out, emission, alpha, scale, ahead, seen):
    """Fill ahead (T, S) from row 1 on, add to seen (A, S), and return beta_0; ``out`` has the edges of each state.

    ahead_t(j) = emission[x_t, j] beta_t(j) / c_t, and seen counts how often a state emits a symbol.
    """
    first, targets, p = out
    beta = np.ones(alpha.shape[1])
    for t in range(len(x) - 1, 0, -1):
        row = ahead[t]
        for j in range(len(beta)):
            # gamma_t(i) = alpha_t(i) beta_t(i)
            seen[x[t], j] += alpha[t, j] * beta[j]
            value = emission[x[t], j] * beta[j] / scale[t]
            row[j] = value if value > _SMALLEST else 0.0
        _products(first, targets, p, row, beta)
    for j in range(len(beta)):
        seen[x[0], j] += alpha[0, j] * beta[j]
    return beta


def _normalized(counts: Array, before: Array) -> Array:
    """Return the rows of counts divided by their sums; a row of a state that was never used stays as it was before."""
    total = counts.sum(axis=1, keepdims=True)
    found = np.where(total > 0, counts / np.where(total > 0, total, 1.0), before)
    return np.where(found > _SMALLEST, found, 0.0)


class SparseHiddenMarkov(HiddenMarkov):
    """The hidden Markov model that O13 compares its networks with.

    Its graph is random, with the same number of edges leaving each state, its loop included. The
    transitions of each state start from Dirichlet(1/2, ..., 1/2) over its edges, its emissions from
    the frequencies of the symbols, each multiplied by a number from U[0, 1]. A transition that the
    graph lacks has probability 0, and keeps it.

    Args:
        states: S.
        edges: d, at most S; None: the number of symbols, as in the paper.
        iterations: most iterations of expectation-maximization; it ends before if one gains less
            than 0.01 nats.
        seed: of the graph and the start values.

    Attributes:
        log_likelihoods_: of the training text in nats, before the first iteration and after each.

    Example:
        >>> x = np.arange(60) % 3
        >>> hidden = SparseHiddenMarkov(4, seed=1).fit(x, 3)
        >>> int(hidden.transition_.astype(bool).sum(axis=1).max())
        3

    Source:
        O13, footnote 9, which does not say where the first state is drawn from: uniformly here.
    """

    def __init__(
        self, states: int, edges: int | None = None, iterations: int = 100, seed: int = 0
    ) -> None:
        super().__init__(states, iterations, seed)
        self.edges = edges

    def fit(self, x: IntArray, A: int) -> SparseHiddenMarkov:
        """Learn a sequence of symbols 0..A-1 and return the model.

        Raises:
            ValueError: if the text is empty, memory has no room for the states, an iteration would
                take days, or ``edges`` is below 1.
        """
        x = np.asarray(x, np.int64)
        edges = min(A if self.edges is None else self.edges, self.states)
        check_hidden_states(self.states, self.iterations, len(x), A, edges)
        if not len(x):
            raise ValueError("the text is empty: give one with a symbol")
        rng = np.random.default_rng(self.seed)
        graph = Graph.random(self.states, edges, rng)
        targets = graph.targets[graph.by_source].reshape(self.states, edges) - 1
        p = rng.dirichlet(np.full(edges, 0.5), self.states)
        counts = np.bincount(x, minlength=A) * rng.random((self.states, A))
        emission = counts / counts.sum(axis=1, keepdims=True)
        start = np.full(self.states, 1 / self.states)
        start, p, emission = self._maximize(x, targets, (start, p, emission))
        self.start_ = start
        self.transition_ = np.zeros((self.states, self.states))
        np.put_along_axis(self.transition_, targets, p, axis=1)
        self.emission_ = emission
        return self

    def _maximize(
        self, x: IntArray, targets: IntArray, begin: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Iterate from start (S,), p (S, d) and emission (S, A)."""
        start, p, emission = begin
        S, d = targets.shape
        order = np.argsort(targets, axis=None, kind="stable")
        first_in = np.concatenate([[0], np.cumsum(np.bincount(targets.ravel(), minlength=S))])
        first_out = np.arange(0, S * d + 1, d)
        ends = targets.ravel()
        sources = order // d
        alpha = np.empty((len(x), S))
        ahead = np.empty((len(x), S))
        scale = np.empty(len(x))
        self.log_likelihoods_: list[float] = []
        while True:
            by_symbol = np.ascontiguousarray(emission.T)
            _forward(x, start, (first_in, sources, p.ravel()[order]), by_symbol, alpha, scale)
            self.log_likelihoods_.append(float(np.log(scale).sum()))
            if self._has_ended():
                return start, p, emission
            seen = np.zeros_like(by_symbol)
            beta = _backward(x, (first_out, ends, p.ravel()), by_symbol, alpha, scale, ahead, seen)
            # sum_t xi_t(i, j) = p_ij sum_t alpha_{t-1}(i) ahead_t(j)
            used = p * np.take_along_axis(alpha[:-1].T @ ahead[1:], targets, axis=1)
            start = alpha[0] * beta / (alpha[0] @ beta)
            p = _normalized(used, p)
            emission = _normalized(seen.T, emission)

    def _has_ended(self) -> bool:
        """Say whether the iterations are spent, or the last one has gained next to nothing."""
        if len(self.log_likelihoods_) > self.iterations:
            return True
        before, now = [-math.inf, *self.log_likelihoods_][-2:]
        return now - before < _GAIN
