"""The NumPy definition against exact values, torch autograd, products of Jacobians and invariance."""

import numpy as np
import pytest
import torch

from pathspace.sequences.kernels import reference as ref
from sequences.fixture import KINDS, assert_close, exact, tiny_edges, tiny_model, tiny_sequence


def run(kind, squash="tanh", parameters=None):
    p = parameters or tiny_model(kind)
    x, chi = tiny_sequence()
    V, a = ref.states(kind, squash, p["tau"], p["rho"], p["V0"], x)
    logp = ref.log_predictions(a, p["w"])
    return p, x, chi, V, a, logp


@pytest.mark.parametrize("kind", KINDS)
def test_forward_agrees_with_exact_values(kind):
    p, x, chi, V, a, logp = run(kind)
    assert_close(V[:, 1:], p["V"][:, 1:])
    assert_close(a, p["a"])
    assert_close(np.exp(logp), p["pi"])
    assert_close(ref.log_likelihood(logp, x, chi), p["LL"])
    assert_close(ref.code_length(logp, x), p["validation_bits_regularised"])


@pytest.mark.parametrize("kind", KINDS)
def test_writing_steps_agree_with_exact_values(kind):
    p, x, chi, _, a, logp = run(kind)
    damping = ref.symbol_frequencies(x, 3) + ref.FLOOR
    assert_close(damping, p["eps_y"])
    W = ref.writing_gradient(a, logp, x, chi)
    diagonal, cross = ref.writing_metric(a, logp, chi, damping)
    assert_close(W, p["W"])
    assert_close(diagonal, p["h_diag(with eps_y)"])
    assert_close(cross[1:], p["h_0i(row 0 unused)"][1:])
    assert_close(ref.quasi_diagonal_solve(W, diagonal, cross), p["step_w_QDH"])
    assert_close(W / diagonal, p["step_w_DH"])


@pytest.mark.parametrize("rule", ["rbp", "rutsd"])
@pytest.mark.parametrize("kind", KINDS)
def test_transition_steps_agree_with_exact_values(kind, rule):
    p, x, chi, _, a, logp = run(kind)
    tag = {"rbp": "rbpm", "rutsd": "rutsd"}[rule]
    B = ref.backpropagate(kind, "tanh", p["w"], p["tau"], a, logp, x, chi)
    m = ref.modulus(rule, kind, "tanh", p["w"], p["tau"], a, logp, x, chi)
    assert_close(B[:, 1:], p["B"][:, 1:])
    assert_close(m[:, 1:], p[f"m_{tag}"][:, 1:])
    assert_close(ref.start_step(B, m, 1.0), p[f"step_V0_{tag}"])
    edges = tiny_edges()
    G = ref.transition_gradient(a, B, x, 3)
    M = ref.transition_metric(a, m, x, 3)
    if kind == "rnn":
        assert_close(np.where(edges, G.sum(axis=2), 0), p["G_tau"])
        assert_close(G[0], p["G_rho"])
        tau_step, rho_step = ref.rnn_quasi_diagonal_step(G, M, edges, 1.0)
        assert_close(tau_step, p[f"step_tau_{tag}_qd"])
        assert_close(rho_step, p[f"step_rho_{tag}_qd"])
        return
    assert_close(np.where(edges[:, :, None], G, 0), p["G_tau"])
    assert_close(ref.full_step(G, M, edges, 1.0), p[f"step_tau_{tag}_full"])
    assert_close(ref.quasi_diagonal_step(G, M, edges, 1.0), p[f"step_tau_{tag}_qd"])
    for y, block in p[f"M_{tag}(j=1)"].items():
        parents = block["parents"]
        assert_close(
            M[np.ix_(parents, parents, [1], [int(y)])][:, :, 0, 0] + np.eye(3), block["M_with_eps"]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_autograd(kind):
    p, x, chi, _, a, logp = run(kind)
    names = ["w", "tau", "V0"] + (["rho"] if kind == "rnn" else [])
    leaves = {n: torch.tensor(p[n], dtype=torch.float64, requires_grad=True) for n in names}
    V, total = leaves["V0"], torch.zeros((), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for t, y in enumerate(x):
        activity = torch.cat([one, torch.tanh(V[1:])])
        total = total + chi[t] * torch.log_softmax(activity @ leaves["w"], 0)[y]
        if kind == "rnn":
            V = leaves["rho"][:, y] + activity @ leaves["tau"]
        else:
            V = (V if kind == "pcnn" else 0) + activity @ leaves["tau"][:, :, y]
    total.backward()
    B = ref.backpropagate(kind, "tanh", p["w"], p["tau"], a, logp, x, chi)
    G = ref.transition_gradient(a, B, x, 3)
    expected = {n: leaf.grad.numpy() for n, leaf in leaves.items() if leaf.grad is not None}
    assert total.item() == pytest.approx(ref.log_likelihood(logp, x, chi), abs=1e-12)
    assert_close(ref.writing_gradient(a, logp, x, chi), expected["w"], 1e-13)
    assert_close(B[0, 1:], expected["V0"][1:], 1e-13)
    if kind == "rnn":
        assert_close(G.sum(axis=2)[:, 1:], expected["tau"][:, 1:], 1e-13)
        assert_close(G[0, 1:], expected["rho"][1:], 1e-13)
    else:
        assert_close(G[:, 1:], expected["tau"][:, 1:], 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_modulus_agrees_with_products_of_jacobians(kind):
    """m_i^t as a sum over all later outputs and all chains of units that lead there, squared edge by edge."""
    p, x, chi, _, a, logp = run(kind)
    N, T = 3, len(x)
    slope = 1 - a**2
    squared, source = [], []
    for t in range(T):
        tau = p["tau"] if kind == "rnn" else p["tau"][:, :, x[t]]
        J = np.array(
            [
                [(kind == "pcnn") * (i == j) + tau[i, j] * slope[t, i] for j in range(1, N + 1)]
                for i in range(1, N + 1)
            ]
        )
        squared.append(J**2)
        pi, w = np.exp(logp[t]), p["w"][1:]
        pairwise = 0.5 * np.einsum("y,z,iyz->i", pi, pi, (w[:, :, None] - w[:, None, :]) ** 2)
        source.append(chi[t] * slope[t, 1:] ** 2 * pairwise)
    m = ref.modulus("rbp", kind, "tanh", p["w"], p["tau"], a, logp, x, chi)
    for t in range(T):
        total, chain = np.zeros(N), np.eye(N)
        for later in range(t, T):
            total += chain @ source[later]
            chain = chain @ squared[later]
        assert np.abs(m[t, 1:] - total).max() <= 1e-13 * np.abs(m).max()


def long_sequence(T=150):
    """A text long enough for the undamped metric to be regular: mostly cyclic, some symbols not predicted."""
    rng = np.random.default_rng(20)
    x = np.zeros(T, int)
    for t in range(1, T):
        x[t] = (x[t - 1] + 1) % 3 if rng.random() < 0.8 else rng.integers(3)
    return x, (rng.random(T) < 0.9).astype(int)


def train(kind, squash, p, method, steps=30, rate=0.05):
    """Log-likelihoods of a few plain steps without damping and without rate control."""
    x, chi = long_sequence()
    p, edges, A = {k: p[k] for k in ("w", "tau", "rho", "V0")}, tiny_edges(), 3
    frequencies = ref.symbol_frequencies(x, A)
    trace = []
    for step in range(steps):
        _, a = ref.states(kind, squash, p["tau"], p["rho"], p["V0"], x)
        logp = ref.log_predictions(a, p["w"])
        trace.append(ref.log_likelihood(logp, x, chi))
        if step % 2 == 0:
            W = ref.writing_gradient(a, logp, x, chi)
            diagonal, cross = ref.writing_metric(a, logp, chi, np.zeros(A))
            direction = (
                ref.quasi_diagonal_solve(W, diagonal, cross) if method != "dh" else W / diagonal
            )
            p["w"] = p["w"] + rate * direction
            continue
        B = ref.backpropagate(kind, squash, p["w"], p["tau"], a, logp, x, chi)
        G = ref.transition_gradient(a, B, x, A)
        if method == "fb":
            p["tau"] = p["tau"] + rate * np.where(edges[:, :, None], G / frequencies, 0)
            p["V0"] = p["V0"] + rate * B[0]
            continue
        rule = "rutsd" if method.startswith("rutsd") else "rbp"
        m = ref.modulus(rule, kind, squash, p["w"], p["tau"], a, logp, x, chi)
        M = ref.transition_metric(a, m, x, A)
        if kind == "rnn":
            tau_step, rho_step = ref.rnn_quasi_diagonal_step(G, M, edges, 0.0)
            p["tau"], p["rho"] = p["tau"] + rate * tau_step, p["rho"] + rate * rho_step
        elif method.endswith("qd"):
            p["tau"] = p["tau"] + rate * ref.quasi_diagonal_step(G, M, edges, 0.0)
        else:
            p["tau"] = p["tau"] + rate * ref.full_step(G, M, edges, 0.0)
        p["V0"] = p["V0"] + rate * ref.start_step(B, m, 0.0)
    return np.array(trace)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("rbp", 0, 1e-10),
        ("rbp qd", 0, 1e-10),
        ("rutsd", 0, 1e-5),  # nearly singular metrics amplify the rounding errors
        ("rutsd qd", 0, 1e-5),
        ("dh", 1, np.inf),  # the controls, which do depend on it
        ("fb", 1, np.inf),
    ],
)
def test_trajectories_do_not_depend_on_the_squash_exactly_where_claimed(method, low, high):
    p = tiny_model("pcnn")
    twin = {name: np.array(p["logistic_twin"][name]) for name in ("w", "tau", "V0")} | {"rho": None}
    with_tanh = train("pcnn", "tanh", p, method)
    with_logistic = train("pcnn", "logistic", twin, method)
    assert with_tanh[0] == pytest.approx(with_logistic[0], abs=1e-12)
    gap = np.abs(with_tanh - with_logistic).max()
    assert low <= gap <= high
    if method != "fb":
        assert with_tanh[-1] > with_tanh[0] + 10


def test_frequency_adjusted_steps_agree_with_exact_values():
    x, _ = tiny_sequence()
    frequencies = ref.symbol_frequencies(x, 3)
    for kind in KINDS:
        p, x, chi, _, a, logp = run(kind)
        B = ref.backpropagate(kind, "tanh", p["w"], p["tau"], a, logp, x, chi)
        G = ref.transition_gradient(a, B, x, 3)
        edges = tiny_edges()
        if kind == "rnn":
            assert_close(np.where(edges, G.sum(axis=2), 0), p["step_tau_fb"])
            assert_close(G[0] / frequencies, p["step_rho_fb"])
        else:
            assert_close(np.where(edges[:, :, None], G / frequencies, 0), p["step_tau_fb"])
        assert_close(B[0], p["step_V0_fb"])


def test_fixture_is_complete():
    assert set(exact()) >= {"tiny", "trajectory", "xor_mask", "true_bits"}
