r"""The definition of every quantity of a symbolic sequence model, in plain NumPy, one sequence, dense arrays.

Slow and short on purpose: this file is what the compiled kernels are tested against.

Alphabet of this module: T symbols in the sequence, A symbols in the alphabet, N units, unit 0
always on.

    x[t]          symbol at time t, 0..A-1                     chi[t]   1 where x[t] is to be predicted
    w[i, y]       writing weight of unit i for symbol y        V0[j]    start value of unit j
    tau[i, j, y]  transition weight i -> j when y is read (PCNN, CNN);  tau[i, j] and rho[j, y] (RNN)
    V[t, i], a[t, i]   potential and activity before x[t] is read, t = 0..T
    B[t, i], m[t, i]   backpropagated gradient and modulus of unit i at time t
    edges[i, j]   True where the edge i -> j exists, row 0 (the always-on unit) included

Column 0 of V, B and m and entry 0 of V0 are zero and mean nothing.

Source: O13 = Y. Ollivier, *Riemannian metrics for neural networks II: recurrent networks and
learning symbolic data sequences*, with the misprints listed in docs/sequences.md corrected.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["pcnn", "cnn", "rnn"]
Squash = Literal["tanh", "logistic"]
Modulus = Literal["rbp", "rutsd"]
Array = NDArray[np.float64]
Integers = NDArray[np.integer]
Mask = NDArray[np.bool_]

FLOOR = 2.0**-52
"""Smallest relative spacing of float64, the floor O13 adds to symbol frequencies."""


def squash_value(squash: Squash, V: Array) -> Array:
    """Return the activity s(V): tanh V, or 1 / (1 + exp(-V))."""
    return np.tanh(V) if squash == "tanh" else 0.5 + 0.5 * np.tanh(0.5 * V)


def squash_slope(squash: Squash, a: Array) -> Array:
    """Return s'(V) as a function of the activity a = s(V)."""
    return 1 - a**2 if squash == "tanh" else a * (1 - a)


def states(
    kind: Kind, squash: Squash, tau: Array, rho: Array | None, V0: Array, x: Integers
) -> tuple[Array, Array]:
    """Return potentials V and activities a, both (T+1, N+1): row t is the state before x[t] is read."""
    V = np.zeros((len(x) + 1, len(V0)))
    a = np.ones_like(V)
    V[0, 1:] = V0[1:]
    for t in range(len(x) + 1):
        a[t, 1:] = squash_value(squash, V[t, 1:])
        if t == len(x):
            break
        if kind == "pcnn":
            # V_j^{t+1} = V_j^t + sum_i tau[i,j,x_t] a_i^t
            V[t + 1] = V[t] + a[t] @ tau[:, :, x[t]]
        elif kind == "cnn":
            # V_j^{t+1} = sum_i tau[i,j,x_t] a_i^t
            V[t + 1] = a[t] @ tau[:, :, x[t]]
        else:
            # V_j^{t+1} = rho[j,x_t] + sum_i tau[i,j] a_i^t
            assert rho is not None
            V[t + 1] = rho[:, x[t]] + a[t] @ tau
        V[t + 1, 0] = 0
    return V, a


def log_predictions(a: Array, w: Array) -> Array:
    """Return log pi_t(y), (T, A) in nats: the softmax over y of sum_i a_i^t w[i,y]."""
    # pi_t(y) = exp(sum_i a_i^t w[i,y]) / sum_y' exp(sum_i a_i^t w[i,y'])
    scores = a[:-1] @ w
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def log_likelihood(logp: Array, x: Integers, chi: Integers) -> float:
    """Return sum_t chi_t log pi_t(x_t), in nats."""
    return float(np.sum(chi * logp[np.arange(len(x)), x]))


def code_length(logp: Array, x: Integers) -> float:
    """Return the length in bits of x, each pi_t mixed with 1/(t+2) of the uniform distribution."""
    t = np.arange(len(x))
    mixed = (1 - 1 / (t + 2)) * np.exp(logp[t, x]) + 1 / ((t + 2) * logp.shape[1])
    return float(-np.log2(mixed).sum())


def writing_gradient(a: Array, logp: Array, x: Integers, chi: Integers) -> Array:
    """Return W[i, y], the derivative of the log-likelihood by the writing weights."""
    # W[i,y] = sum_t chi_t a_i^t ([x_t = y] - pi_t(y))    (printed X_t in O13 (28))
    seen = np.eye(logp.shape[1])[x]
    return a[:-1].T @ (chi[:, None] * (seen - np.exp(logp)))


def symbol_frequencies(x: Integers, A: int) -> Array:
    """Return the share of each of the A symbols in x, in [0, 1], whether predicted or not."""
    return np.bincount(x, minlength=A) / max(len(x), 1)


def writing_metric(a: Array, logp: Array, chi: Integers, damping: Array) -> tuple[Array, Array]:
    """Return h_ii[i, y] with the damping and h_0i[i, y] without, but h_00 with it, of the writing weights."""
    p = np.exp(logp)
    spread = chi[:, None] * p * (1 - p)
    # h_ii^y = eps_y + sum_t chi_t (a_i^t)^2 pi_t(y) (1 - pi_t(y))
    diagonal = damping + (a[:-1] ** 2).T @ spread
    # h_0i^y = sum_t chi_t a_i^t pi_t(y) (1 - pi_t(y)),  eps_y in the entry i = 0 too
    cross = a[:-1].T @ spread
    cross[0] += damping
    return diagonal, cross


def divide(numerator: Array, remainder: Array, diagonal: Array) -> Array:
    """Return numerator / remainder, and 0 for an entry of the diagonal that is 0: what was never seen does not move."""
    return np.divide(numerator, remainder, out=np.zeros_like(numerator), where=diagonal > 0)


def quasi_diagonal_solve(G: Array, diagonal: Array, cross: Array) -> Array:
    """Return the quasi-diagonal direction for gradient G, index 0 of the first axis being the reference.

    Args:
        G: gradient, (I, ...).
        diagonal: M_ii, same shape.
        cross: M_0i, same shape; entry 0 is not read.
    """
    M00 = diagonal[:1]
    M0i = cross[1:]
    some = np.where(M00 == 0, 1.0, M00)  # where it is zero all M_0i are
    # d_i = (G_i - G_0 M_0i / M_00) / (M_ii - M_0i^2 / M_00)
    rest = divide(G[1:] - G[:1] * M0i / some, diagonal[1:] - M0i**2 / some, diagonal[1:])
    # d_0 = G_0 / M_00 - sum_i (M_0i / M_00) d_i
    first = divide(G[:1], M00, M00) - (M0i / some * rest).sum(axis=0, keepdims=True)
    return np.concatenate([first, rest])


def backpropagate(
    kind: Kind,
    squash: Squash,
    w: Array,
    tau: Array,
    a: Array,
    logp: Array,
    x: Integers,
    chi: Integers,
) -> Array:
    """Return B[t, i] = derivative of the log-likelihood by V_i^t, (T+1, N+1)."""
    slope = squash_slope(squash, a)
    B = np.zeros_like(a)
    for t in range(len(x) - 1, -1, -1):
        through = tau[:, :, x[t]] if kind != "rnn" else tau
        # B_i^t = [PCNN] B_i^{t+1} + s'_i ( chi_t (w[i,x_t] - sum_y pi_t(y) w[i,y])
        #                                        + sum_j tau[i,j,x_t] B_j^{t+1} )
        output = chi[t] * (w[:, x[t]] - w @ np.exp(logp[t]))
        B[t] = (kind == "pcnn") * B[t + 1] + slope[t] * (output + through @ B[t + 1])
        B[t, 0] = 0
    return B


def modulus(
    rule: Modulus,
    kind: Kind,
    squash: Squash,
    w: Array,
    tau: Array,
    a: Array,
    logp: Array,
    x: Integers,
    chi: Integers,
) -> Array:
    """Return m[t, i], (T+1, N+1): recurrent backpropagated metric or recurrent unitwise outer product."""
    if rule == "rutsd":
        # m_i^t = (B_i^t)^2
        return backpropagate(kind, squash, w, tau, a, logp, x, chi) ** 2
    slope = squash_slope(squash, a)
    N = a.shape[1] - 1
    m = np.zeros_like(a)
    for t in range(len(x) - 1, -1, -1):
        through = tau[:, :, x[t]] if kind != "rnn" else tau
        # J_ij = dV_j^{t+1} / dV_i^t = [PCNN and i = j] + tau[i,j,x_t] s'_i
        J = (kind == "pcnn") * np.eye(N + 1) + through * slope[t][:, None]
        p = np.exp(logp[t])
        mean = w @ p
        variance = (w - mean[:, None]) ** 2 @ p
        # m_i^t = s'_i^2 chi_t Var_{y ~ pi_t}(w[i,y]) + sum_j J_ij^2 m_j^{t+1}
        m[t] = slope[t] ** 2 * chi[t] * variance + J**2 @ m[t + 1]
        m[t, 0] = 0
    return m


def transition_gradient(a: Array, B: Array, x: Integers, A: int) -> Array:
    """Return G[i, j, y], the derivative by tau[i, j, y]; an RNN sums over y for tau, and G[0] is rho's."""
    seen = np.eye(A)[x]
    # G[i;j,y] = sum_t [x_t = y] a_i^t B_j^{t+1}
    return np.einsum("ty,ti,tj->ijy", seen, a[:-1], B[1:])


def transition_metric(a: Array, m: Array, x: Integers, A: int) -> Array:
    """Return M[i, k, j, y], the metric over the edges i -> j and k -> j at symbol y, without damping."""
    seen = np.eye(A)[x]
    # M[i,k;j,y] = sum_t [x_t = y] a_i^t a_k^t m_j^{t+1}
    return np.einsum("ty,ti,tk,tj->ikjy", seen, a[:-1], a[:-1], m[1:])


def full_step(G: Array, M: Array, edges: Mask, damping: float) -> Array:
    """Return M^-1 G separately for each unit j and symbol y over the edges into j, (N+1, N+1, A)."""
    step = np.zeros_like(G)
    for j in range(1, G.shape[1]):
        parents = np.flatnonzero(edges[:, j])
        for y in range(G.shape[2]):
            Mjy = M[parents][:, parents, j, y] + damping * np.eye(len(parents))
            step[parents, j, y] = np.linalg.solve(Mjy, G[parents, j, y])
    return step


def quasi_diagonal_step(G: Array, M: Array, edges: Mask, damping: float) -> Array:
    """Return the quasi-diagonal transition step of a contextual model, (N+1, N+1, A)."""
    step = np.zeros_like(G)
    for j in range(1, G.shape[1]):
        parents = np.flatnonzero(edges[:, j])
        diagonal = M[parents, parents, j] + damping
        step[parents, j] = quasi_diagonal_solve(G[parents, j], diagonal, M[0, parents, j])
    return step


def rnn_quasi_diagonal_step(G: Array, M: Array, edges: Mask, damping: float) -> tuple[Array, Array]:
    """Return the quasi-diagonal steps of tau[i, j] and rho[j, y] of an RNN, with tau[0, j] for reference."""
    N1 = G.shape[1]
    A = G.shape[2]
    tau_step = np.zeros((N1, N1))
    rho_step = np.zeros((N1, A))
    for j in range(1, N1):
        parents = np.flatnonzero(edges[:, j])
        # the parameters of unit j are tau[parents, j] then rho[j, :]; M_yy = M_0y = sum_t [x_t = y]
        # m_j^{t+1}
        G_all = np.concatenate([G[parents, j].sum(axis=1), G[0, j]])
        diagonal = np.concatenate([M[parents, parents, j].sum(axis=1), M[0, 0, j]]) + damping
        cross = np.concatenate([M[0, parents, j].sum(axis=1), M[0, 0, j]])
        step = quasi_diagonal_solve(G_all[:, None], diagonal[:, None], cross[:, None])[:, 0]
        tau_step[parents, j], rho_step[j] = step[: len(parents)], step[len(parents) :]
    return tau_step, rho_step


def start_step(B: Array, m: Array, damping: float) -> Array:
    """Return the step of the start values, B_j^0 / (m_j^0 + damping), (N+1,)."""
    step = np.zeros(B.shape[1])
    # of a saturated unit 0 / 0: it does not move
    step[1:] = divide(B[0, 1:], m[0, 1:] + damping, m[0, 1:] + damping)
    return step
