"""The parameters of a PCNN, CNN or RNN and their start values.

Alphabet of this module: A symbols, N units, unit 0 always on, E edges of the graph.

    w[i, y]      writing weights, (N+1, A)                V0[j]        start values, (N+1,), entry 0 unused
    tau[y, e]    weight of edge e when y is read, (A, E)  (PCNN, CNN)
    tau[0, e]    weight of edge e, (1, E), and rho[y, j], (A, N+1)  (RNN)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.graph import Graph
from pathspace.sequences.text import Corpus

Kind = Literal["pcnn", "cnn", "rnn"]
Squash = Literal["tanh", "logistic"]
Array = NDArray[np.float64]

FLOOR = 2.0**-52


@dataclass(frozen=True, eq=False)
class Parameters:
    """All numbers of a model, with the graph they live on.

    Args:
        kind: "pcnn", "cnn" or "rnn".
        squash: "tanh" or "logistic".
        graph: the edges.
        w: (N+1, A) writing weights.
        tau: (A, E) transition weights, or (1, E) for an RNN.
        rho: (A, N+1) reading weights of an RNN, of zero rows otherwise.
        V0: (N+1,) start values.

    Raises:
        ValueError: if a name is unknown or a shape does not fit the graph.
    """

    kind: Kind
    squash: Squash
    graph: Graph
    w: Array
    tau: Array
    rho: Array
    V0: Array

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"unknown model {self.kind!r}, choose from {get_args(Kind)}")
        if self.squash not in get_args(Squash):
            raise ValueError(f"unknown squash {self.squash!r}, choose from {get_args(Squash)}")
        if self.w.ndim != 2:
            raise ValueError(f"w must be a matrix, got the shape {self.w.shape}")
        N1 = self.graph.units + 1
        E = self.graph.edges
        A = self.symbols
        contextual = self.kind != "rnn"
        wanted = {
            "w": (N1, A),
            "tau": (A if contextual else 1, E),
            "rho": (0 if contextual else A, N1),
            "V0": (N1,),
        }
        for name, shape in wanted.items():
            found = getattr(self, name)
            if found.shape != shape or found.dtype != np.float64:
                raise ValueError(
                    f"{name} of a {self.kind} must be float64 {shape}, got {found.dtype} {found.shape}"
                )

    @property
    def units(self) -> int:
        """Number of units N, without the always-on one."""
        return self.graph.units

    @property
    def symbols(self) -> int:
        """Number of symbols A."""
        return self.w.shape[1]

    @property
    def is_finite(self) -> bool:
        """True if no entry is infinite or NaN."""
        return all(
            bool(np.isfinite(array).all()) for array in (self.w, self.tau, self.rho, self.V0)
        )

    def contextual_tau(self) -> Array:
        """Return the weights (A, E) with which each edge acts when each symbol is read.

        An RNN is the contextual model with tau[i,j,y] = tau[i,j] and tau[0,j,y] = tau[0,j] +
        rho[j,y].
        """
        if self.kind != "rnn":
            return self.tau
        tau = np.repeat(self.tau, self.symbols, axis=0)
        bias = self.graph.first[1:-1]
        tau[:, bias] += self.rho[:, 1:]
        return tau

    def moved(self, direction: Direction, rate: float, reach: float | None = None) -> Parameters:
        """Return these parameters plus ``rate`` times a direction.

        Args:
            direction: where to.
            rate: how far.
            reach: shorten the step of each unit (and symbol) so far that it changes no V_j, given
                the same activities before, by more than this; None: do not.
        """
        tau = rate * direction.tau
        rho = rate * direction.rho
        V0 = rate * direction.V0
        if reach is not None:
            tau, rho, V0 = _shortened(self.graph, tau, rho, V0, reach)
        return replace(
            self,
            w=self.w + rate * direction.w,
            tau=self.tau + tau,
            rho=self.rho + rho,
            V0=self.V0 + V0,
        )


def _still() -> Array:
    return np.zeros(())


def _shortened(
    graph: Graph, tau: Array, rho: Array, V0: Array, reach: float
) -> tuple[Array, Array, Array]:
    """Return a step no block of which can change a V_j by more than ``reach`` when one symbol is read."""
    if tau.ndim:
        # |sum_i dtau[i,j,y] a_i| <= sum_i |dtau[i,j,y]|, as |a_i| <= 1
        change = np.add.reduceat(np.abs(tau), graph.first[1:-1], axis=1)
        if rho.ndim:
            # one row for all symbols: the worst of them
            change += np.abs(rho[:, 1:]).max(axis=0)
        scale = np.minimum(1.0, reach / np.maximum(change, reach))
        tau = tau * scale[:, graph.targets - 1]
        if rho.ndim:
            rho = rho.copy()
            rho[:, 1:] *= scale
    return tau, rho, np.clip(V0, -reach, reach)


@dataclass(frozen=True, eq=False)
class Direction:
    """A step for every parameter; a zero-dimensional zero stands for an array that does not move."""

    w: Array = field(default_factory=_still)
    tau: Array = field(default_factory=_still)
    rho: Array = field(default_factory=_still)
    V0: Array = field(default_factory=_still)

    @property
    def is_finite(self) -> bool:
        """True if no entry is infinite or NaN."""
        return all(
            bool(np.isfinite(array).all()) for array in (self.w, self.tau, self.rho, self.V0)
        )


def start(
    kind: Kind, squash: Squash, graph: Graph, corpus: Corpus, rng: np.random.Generator | Array
) -> Parameters:
    """Return start values in which unit j remembers about j symbols.

    nu are the frequencies of the symbols among those to be predicted, nu~ among all; alpha = 1/2,
    mu_j = 1/(j+1), beta_j = -sqrt(alpha (alpha - mu_j)), u uniform in [0, 1].

    Args:
        kind: "pcnn", "cnn" or "rnn"; O13 gives no start values for the CNN, those here follow its
            RNN's.
        squash: "tanh" or "logistic"; the logistic start is the same function in other coordinates.
        graph: the edges.
        corpus: the training text, for the frequencies.
        rng: source of u, or u itself, (N+1, A) with row 0 unused.

    Source:
        O13, the section on initialization; of the two signs of beta that fit, the negative one is
        meant.
    """
    if squash not in get_args(Squash):
        raise ValueError(f"unknown squash {squash!r}, choose from {get_args(Squash)}")
    N = graph.units
    A = corpus.A
    u = rng.random((N + 1, A)) if isinstance(rng, np.random.Generator) else rng
    nu = np.bincount(corpus.expected, minlength=A) / len(corpus.expected)
    centred = u - (u @ corpus.frequencies)[:, None]
    j = np.arange(1, N + 1)
    w = np.zeros((N + 1, A))
    # w[0,y] = log(nu_y + 2.2e-16)
    w[0] = np.log(nu + FLOOR)
    V0 = np.zeros(N + 1)
    rho = np.zeros((A if kind == "rnn" else 0, N + 1))
    tau = np.zeros((1 if kind == "rnn" else A, graph.edges))
    bias = graph.first[1:-1]
    loops = graph.loops[1:]
    has_loop = loops >= 0
    if kind == "pcnn":
        alpha = 0.5
        mu = 1 / (j + 1)
        beta = -np.sqrt(alpha * (alpha - mu))
        # tau[j,j,y] = -alpha,  tau[0,j,y] = beta_j + (mu_j/4)(u_jy - sum_y' nu~_y' u_jy'),
        # V0_j = atanh(beta_j/alpha)
        tau[:, loops[has_loop]] = -alpha
        tau[:, bias] = (beta[:, None] + mu[:, None] / 4 * centred[1:]).T
        V0[1:] = np.arctanh(beta / alpha)
    else:
        # tau[j,j] = 1 - 1/j,  rho[j,y] = (u_jy - sum_y' nu~_y' u_jy') / 2,  V0 = 0
        tau[:, loops[has_loop]] = (1 - 1 / j)[has_loop]
        if kind == "rnn":
            rho[:, 1:] = centred[1:].T / 2
        else:
            tau[:, bias] = centred[1:].T / 2
    model = Parameters(kind, "tanh", graph, w, tau, rho, V0)
    return model if squash == "tanh" else logistic_twin(model)


def logistic_twin(model: Parameters) -> Parameters:
    """Return the logistic model that computes what a tanh model does, with V' = 2 V and a' = (a + 1) / 2.

    tau'[i,j] = 4 tau[i,j],  tau'[0,j] = 2 (tau[0,j] - sum_{i>=1} tau[i,j]),  w'[i] = 2 w[i],
    w'[0] = w[0] - sum_{i>=1} w[i],  rho' = 2 rho,  V0' = 2 V0.

    Raises:
        ValueError: if the model is logistic already.
    """
    if model.squash != "tanh":
        raise ValueError("the model is logistic already")
    graph = model.graph
    bias = graph.first[1:-1]
    w = 2 * model.w
    w[0] = model.w[0] - model.w[1:].sum(axis=0)
    tau = 4 * model.tau
    into = np.zeros((len(tau), graph.units + 1))
    for y in range(len(tau)):
        into[y] = np.bincount(graph.targets, weights=model.tau[y], minlength=graph.units + 1)
    # `into` counts the bias once, so it is added back
    tau[:, bias] = 2 * (2 * model.tau[:, bias] - into[:, 1:])
    return replace(model, squash="logistic", w=w, tau=tau, rho=2 * model.rho, V0=2 * model.V0)
