"""The compiled passes against the NumPy definition and the exact values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pathspace.sequences.graph import Graph
from pathspace.sequences.kernels import reference as ref
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import Direction, Parameters, logistic_twin, start
from pathspace.sequences.passes import (
    forward,
    gradient_and_modulus,
    moments,
    transition_direction,
    writing_direction,
)
from pathspace.sequences.prior import Prior
from pathspace.sequences.text import Corpus
from sequences.fixture import KINDS, assert_close, exact, tiny_model, tiny_sequence


def to_edges(graph, dense):
    """(A, E) from tau[i, j, y], or (1, E) from tau[i, j]."""
    values = dense[graph.sources, graph.targets]
    return np.ascontiguousarray(np.atleast_2d(values.T), dtype=float)


def to_dense(graph, values):
    dense = np.zeros((graph.units + 1, graph.units + 1, len(values)))
    dense[graph.sources, graph.targets] = values.T
    return dense


def tiny(kind):
    p = tiny_model(kind)
    graph = Graph.from_edges(3, exact()["tiny"]["edges_out"])
    rho = np.zeros((0, 4)) if kind != "rnn" else np.ascontiguousarray(p["rho"].T)
    model = Parameters(kind, "tanh", graph, p["w"], to_edges(graph, p["tau"]), rho, p["V0"])
    x, chi = tiny_sequence()
    return p, model, Corpus.of([x], 3, [chi.astype(bool)])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_need_no_modulus_read_none(kind, dense, monkeypatch):
    monkeypatch.setattr(Graph, "is_dense", dense)
    _, model, corpus = tiny(kind)
    state = forward(model, corpus)
    buffers = Buffers()
    for name in ("B", "m"):
        buffers.array(name, *state.a.shape).fill(np.nan)  # whatever was in the memory
    gradient, outer = (
        moments(model, corpus, state, 0, buffers=buffers),
        moments(model, corpus, state, 1, True, buffers),
    )
    whole = moments(model, corpus, state, 1)
    for sums in (gradient, outer):
        np.testing.assert_array_equal(sums.G, whole.G)
        np.testing.assert_array_equal(sums.B0, whole.B0)
    assert not gradient.m0.any()
    B, m = gradient_and_modulus(model, corpus, state)
    np.testing.assert_array_equal(outer.m0, (B**2)[corpus.starts].sum(axis=0))
    assert np.isfinite(outer.diagonal).all()
    assert not np.array_equal(outer.m0, m[corpus.starts].sum(axis=0))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_agrees_with_exact_values(kind, dense, monkeypatch):
    monkeypatch.setattr(Graph, "is_dense", dense)
    p, model, corpus = tiny(kind)
    state = forward(model, corpus)
    assert_close(state.a, p["a"])
    assert_close(state.pi, p["pi"][corpus.chi])
    assert_close(state.log_likelihood, p["LL"])
    assert_close(writing_direction(model, corpus, state, "qdh").w, p["step_w_QDH"])
    assert_close(writing_direction(model, corpus, state, "dh").w, p["step_w_DH"])
    B, m = gradient_and_modulus(model, corpus, state)
    assert_close(B[:, 1:], p["B"][:, 1:])
    assert_close(m[:, 1:], p["m_rbpm"][:, 1:])

    def agrees(metric, tag):
        step = transition_direction(model, corpus, state, metric)
        expected = p[f"step_tau_{tag}"]
        assert_close(to_dense(model.graph, step.tau).reshape(expected.shape), expected)
        start_tag = "fb" if tag == "fb" else tag.rsplit("_", 1)[0]
        assert_close(step.V0, p[f"step_V0_{start_tag}"])
        if kind == "rnn":
            assert_close(step.rho.T, p[f"step_rho_{tag}"])

    for metric, tag in (("rbp-qd", "rbpm_qd"), ("rutsd-qd", "rutsd_qd"), ("fb", "fb")):
        agrees(metric, tag)
    for metric, tag in (("rbp", "rbpm_full"), ("rutsd", "rutsd_full")):
        if kind == "rnn":
            with pytest.raises(ValueError, match="-qd"):
                transition_direction(model, corpus, state, metric)
        else:
            agrees(metric, tag)


def random_model(kind, squash, units, degree, A, seed, corpus):
    rng = np.random.default_rng(seed)
    graph = Graph.full(units) if degree == units else Graph.random(units, degree, rng)
    model = start(kind, squash, graph, corpus, rng)
    return Parameters(
        kind,
        squash,
        graph,
        rng.normal(size=model.w.shape),
        model.tau + 0.3 * rng.normal(size=model.tau.shape),
        model.rho + 0.3 * rng.normal(size=model.rho.shape),
        model.V0 + 0.3 * rng.normal(size=model.V0.shape) * (np.arange(units + 1) > 0),
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("squash", ["tanh", "logistic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("units", "degree"), [(1, 1), (9, 2), (9, 9)])
def test_passes_over_several_sequences_agree_with_the_definition(kind, squash, units, degree):
    A = 5
    rng = np.random.default_rng(1)
    # one symbol is never seen, one sequence is a single symbol, one has nothing to predict
    sequences = [rng.integers(0, A - 1, size) for size in (700, 1, 13, 300)]
    masks = [rng.random(len(x)) < 0.7 for x in sequences]
    masks[2][:] = False
    corpus = Corpus.of(sequences, A, masks)
    model = random_model(kind, squash, units, degree, A, 2, corpus)
    graph = model.graph
    state = forward(model, corpus)
    B, m = gradient_and_modulus(model, corpus, state)
    tau = to_dense(graph, model.tau)
    tau, rho = (tau[:, :, 0], model.rho.T) if kind == "rnn" else (tau, None)
    total, W, G, M = 0.0, 0.0, 0.0, 0.0
    h, h0 = 0.0, 0.0
    all_B, all_m = [], []
    for x, chi in zip(sequences, masks, strict=True):
        _, a = ref.states(kind, squash, tau, rho, model.V0, x)
        logp = ref.log_predictions(a, model.w)
        total += ref.log_likelihood(logp, x, chi)
        W += ref.writing_gradient(a, logp, x, chi)
        diagonal, cross = ref.writing_metric(a, logp, chi, np.zeros(A))
        h, h0 = h + diagonal, h0 + cross
        ref_B = ref.backpropagate(kind, squash, model.w, tau, a, logp, x, chi)
        ref_m = ref.modulus("rbp", kind, squash, model.w, tau, a, logp, x, chi)
        all_B.append(ref_B)
        all_m.append(ref_m)
        G = G + ref.transition_gradient(a, ref_B, x, A)
        M = M + ref.transition_metric(a, ref_m, x, A)
    assert_close(state.log_likelihood, total, 1e-12)
    assert_close(B, np.concatenate(all_B), 1e-11)
    assert_close(m, np.concatenate(all_m), 1e-11)
    eps = corpus.frequencies + ref.FLOOR
    h0[0] += eps
    assert_close(
        writing_direction(model, corpus, state).w, ref.quasi_diagonal_solve(W, h + eps, h0), 1e-9
    )
    sums = moments(model, corpus, state, 1)
    edges = (graph.sources, graph.targets)
    assert_close(sums.B0, sum(B[0] for B in all_B), 1e-11)
    assert_close(sums.m0, sum(m[0] for m in all_m), 1e-11)
    assert_close(sums.G, G[edges].T, 1e-11)
    assert_close(sums.diagonal, M[graph.sources, graph.sources, graph.targets].T, 1e-11)
    assert_close(sums.cross, M[0, graph.sources, graph.targets].T, 1e-11)
    mask = np.zeros((units + 1, units + 1), bool)
    mask[edges] = True
    # without any a symbol that is never seen has no metric, and does not move
    for damping in (
        1.0,
        0.0,
    ):
        step = transition_direction(model, corpus, state, "rbp-qd", damping)
        if kind == "rnn":
            tau_step, rho_step = ref.rnn_quasi_diagonal_step(G, M, mask, damping)
            assert_close(step.tau[0], tau_step[edges], 1e-9)
            assert_close(step.rho.T, rho_step, 1e-9)
            assert (step.rho[A - 1] == 0).all()
        else:
            assert_close(step.tau, ref.quasi_diagonal_step(G, M, mask, damping)[edges].T, 1e-9)
            assert (step.tau[A - 1] == 0).all()
    if kind != "rnn":
        whole = transition_direction(model, corpus, state, "rbp").tau
        assert_close(whole, ref.full_step(G, M, mask, 1.0)[edges].T, 1e-9)


@pytest.mark.parametrize("metric", ["rbp", "rutsd"])
def test_quasi_diagonal_is_the_whole_metric_on_graphs_of_loops(metric):
    corpus = Corpus.of([np.random.default_rng(0).integers(0, 3, 200)], 3)
    model = random_model("pcnn", "tanh", 6, 1, 3, 3, corpus)
    state = forward(model, corpus)
    whole = transition_direction(model, corpus, state, metric)
    quasi = transition_direction(model, corpus, state, f"{metric}-qd")
    assert_close(quasi.tau, whole.tau)


@pytest.mark.parametrize("kind", KINDS)
def test_appended_symbols_without_prediction_change_nothing(kind):
    rng = np.random.default_rng(4)
    x, tail = rng.integers(0, 3, 100), rng.integers(0, 3, 37)
    chi = rng.random(100) < 0.8
    short = Corpus.of([x], 3, [chi])
    long = Corpus.of([np.concatenate([x, tail])], 3, [np.concatenate([chi, np.zeros(37, bool)])])
    model = random_model(kind, "tanh", 5, 2, 3, 5, short)
    results = []
    for corpus in (short, long):
        state = forward(model, corpus)
        step = transition_direction(model, corpus, state, "rbp-qd")
        W = writing_direction(model, corpus, state, damping=0.0).w
        results.append((state.log_likelihood, step.tau, step.V0, W))
    for first, second in zip(*results, strict=True):
        assert_close(second, first, 1e-13)


@pytest.mark.parametrize("metric", ["rbp", "rutsd-qd", "fb"])
def test_relabelled_units_change_nothing(metric):
    corpus = Corpus.of([np.random.default_rng(6).integers(0, 4, 150)], 4)
    model = random_model("pcnn", "tanh", 7, 3, 4, 7, corpus)
    graph = model.graph
    new = np.concatenate([[0], 1 + np.random.default_rng(8).permutation(7)])
    kept = graph.sources > 0
    pairs = zip(new[graph.sources[kept]], new[graph.targets[kept]], strict=True)
    other = Graph.from_edges(7, pairs)
    place = {pair: e for e, pair in enumerate(zip(other.sources, other.targets, strict=True))}
    edge = [place[new[i], new[j]] for i, j in zip(graph.sources, graph.targets, strict=True)]
    w, V0, tau = np.empty_like(model.w), np.empty_like(model.V0), np.empty_like(model.tau)
    w[new], V0[new], tau[:, edge] = model.w, model.V0, model.tau
    twin = Parameters("pcnn", "tanh", other, w, tau, model.rho, V0)
    state, twin_state = forward(model, corpus), forward(twin, corpus)
    assert_close(twin_state.log_likelihood, state.log_likelihood, 1e-13)
    step, twin_step = (
        transition_direction(m, corpus, s, metric) for m, s in ((model, state), (twin, twin_state))
    )
    assert_close(twin_step.tau[:, edge], step.tau, 1e-11)
    assert_close(twin_step.V0[new], step.V0, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_logistic_twin_computes_the_same(kind):
    corpus = Corpus.of([np.random.default_rng(9).integers(0, 3, 120)], 3)
    model = random_model(kind, "tanh", 6, 3, 3, 10, corpus)
    twin = logistic_twin(model)
    assert_close(forward(twin, corpus).pi, forward(model, corpus).pi, 1e-12)
    _, exact_twin, _ = tiny("pcnn")
    expected = tiny_model("pcnn")["logistic_twin"]
    made = logistic_twin(exact_twin)
    assert_close(made.w, expected["w"])
    assert_close(to_dense(made.graph, made.tau)[:, 1:], np.array(expected["tau"])[:, 1:])
    with pytest.raises(ValueError, match="already"):
        logistic_twin(twin)


def test_dead_units_and_a_one_symbol_alphabet_stay_finite():
    for A in (1, 4):
        x = np.random.default_rng(11).integers(0, min(A, 3), 80)
        corpus = Corpus.of([x], A)
        model = random_model("pcnn", "tanh", 4, 2, A, 12, corpus)
        model.V0[1] = 1e6  # saturated at once: the slope is exactly zero
        model.w[2] = 0.0
        state = forward(model, corpus)
        assert np.isfinite(state.log_likelihood)
        assert writing_direction(model, corpus, state).is_finite
        for metric in ("rbp", "rutsd", "rbp-qd", "rutsd-qd", "fb"):
            assert transition_direction(model, corpus, state, metric).is_finite


def test_start_values_agree_with_exact_values():
    data = exact()["trajectory"]
    x = np.array([data["alphabet"].index(symbol) for symbol in data["text"]])
    corpus = Corpus.of([x], len(data["alphabet"]))
    graph = Graph.from_edges(data["N"], data["edges_out"])
    u = np.array(data["u[j][y] (row 0 unused)"])
    for name, run in data["runs"].items():
        kind = name.split("_")[0]
        model = start(kind, "tanh", graph, corpus, u)
        assert_close(model.w[0], run["init_w0"])
        if kind == "rnn":
            assert_close(model.rho[:, 1:].T, np.array(run["init_rho"])[1:])
            assert np.abs(model.V0).max() == 0
        else:
            assert_close(to_dense(graph, model.tau)[0, 1:], np.array(run["init_tau0"])[1:])
            assert np.abs(model.V0 - run["init_V0"]).max() < 1e-10
        assert_close(forward(model, corpus).log_likelihood, run["LL0"])
    mask = exact()["xor_mask"]
    x = np.array([mask["alphabet"].index(symbol) for symbol in mask["text"]])
    corpus = Corpus.of([x], 6, [np.array(mask["chi"], bool)])
    model = start("pcnn", "tanh", Graph.full(3), corpus, np.random.default_rng(0))
    assert_close(model.w[0], mask["w0_with_floor_eps"])
    assert_close(corpus.frequencies, mask["nu_tilde"])


def test_graph_refuses_impossible_edges():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="leaves the units"):
        Graph.from_edges(2, [(1, 3)])
    with pytest.raises(ValueError, match="connectivity 5"):
        Graph.random(4, 5, rng)
    with pytest.raises(ValueError, match="at least one unit"):
        Graph.full(0)
    graph = Graph.random(12, 4, rng)
    outgoing = np.bincount(graph.sources, minlength=13)
    assert outgoing[0] == 12
    assert (outgoing[1:] == 4).all()
    assert (graph.loops[1:] >= 0).all()


def some_passes(kind="pcnn", A=4):
    """A model, a text whose last symbol is never seen, and one forward pass."""
    rng = np.random.default_rng(9)
    masks = [rng.random(size) < 0.8 for size in (90, 31)]
    corpus = Corpus.of([rng.integers(0, A - 1, len(mask)) for mask in masks], A, masks)
    model = random_model(kind, "tanh", 3, 2, A, 4, corpus)
    return model, corpus, forward(model, corpus)


def likelihood_of(corpus, a):
    """The log-likelihood in nats as a function of the writing weights, by torch."""
    active, seen = torch.from_numpy(a), torch.from_numpy(corpus.expected)
    return lambda w: -torch.nn.functional.cross_entropy(active @ w, seen, reduction="sum")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fisher_step_is_newtons_by_the_hessian_of_autograd(kind):
    """The Fisher matrix (63) is the Hessian of minus the log-likelihood, whatever the text."""
    model, corpus, state = some_passes(kind)
    likelihood = likelihood_of(corpus, state.a[corpus.predicted])
    w = torch.from_numpy(model.w).requires_grad_()
    n = w.numel()
    fisher = -torch.autograd.functional.hessian(likelihood, w).reshape(n, n)
    gradient = torch.autograd.grad(likelihood(w), w)[0].reshape(n)
    eps = torch.from_numpy(corpus.frequencies + ref.FLOOR).repeat(model.units + 1)
    damped = torch.linalg.solve(fisher + torch.diag(eps), gradient).reshape(w.shape)
    # of the last symbol, never seen, the damping is 2.2e-16: no step of it is certain
    step = writing_direction(model, corpus, state, "fisher").w
    assert_close(step - step[:, -1:], (damped - damped[:, -1:]).numpy(), 1e-6)
    prior = Prior.around(model.moved(Direction(w=np.ones_like(model.w)), 0.1), 0.5, 0.0)
    pulled = torch.from_numpy(prior.w.ravel()), torch.from_numpy((prior.centre.w - model.w).ravel())
    expected = torch.linalg.solve(
        fisher + torch.diag(eps + pulled[0]), gradient + pulled[0] * pulled[1]
    ).reshape(w.shape)
    with_prior = writing_direction(model, corpus, state, "fisher", prior=prior).w
    assert_close(with_prior[1:], expected[1:].numpy(), 1e-6)


def test_a_fisher_step_without_damping_reaches_the_maximum():
    """Newton's steps, which do not depend on a number that is added to the weights of all symbols."""
    _, corpus, _ = some_passes()
    seen = Corpus.of([corpus.x], 3)
    model = random_model("pcnn", "tanh", 3, 2, 3, 4, seen)
    ends = []
    for start_w in (np.zeros_like(model.w), np.zeros_like(model.w) + np.arange(4.0)[:, None]):
        other = replace(model, w=start_w)
        for _ in range(12):
            state = forward(other, seen)
            other = other.moved(writing_direction(other, seen, state, "fisher", damping=0.0), 1.0)
        ends.append(forward(other, seen).log_likelihood)
        gradient = writing_direction(other, seen, forward(other, seen), "bp").w
        assert np.abs(gradient).max() < 1e-9
    assert ends[1] == pytest.approx(ends[0], abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_backpropagation_is_the_gradient_by_differences(kind):
    model, corpus, state = some_passes(kind)
    writing = writing_direction(model, corpus, state, "bp")
    transition = transition_direction(model, corpus, state, "bp")
    rng = np.random.default_rng(3)
    for direction, names in (
        (writing, ("w",)),
        (transition, ("tau", "V0") + ("rho",) * (kind == "rnn")),
    ):
        way = {name: rng.normal(size=getattr(model, name).shape) for name in names}
        for array in (way[name] for name in names if name in ("V0", "rho")):
            array[..., 0] = 0  # means nothing
        slope = sum(float(np.vdot(getattr(direction, name), array)) for name, array in way.items())
        ends = [
            forward(model.moved(Direction(**way), sign * 1e-6), corpus).log_likelihood
            for sign in (1, -1)
        ]
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)
