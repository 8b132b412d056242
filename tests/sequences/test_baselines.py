"""The baselines against known values and brute force."""

import bz2
import itertools
import lzma
import math
from fractions import Fraction

import numpy as np
import pytest

from pathspace.sequences.baselines import (
    COMPRESSORS,
    HiddenMarkov,
    SparseHiddenMarkov,
    compressed_bits,
    context_tree_bits,
)


def krichevsky_trofimov(zeros, ones):
    p = Fraction(1)
    for k in range(zeros):
        p *= Fraction(2 * k + 1, 2 * (k + 1))
    for k in range(ones):
        p *= Fraction(2 * k + 1, 2 * (zeros + k + 1))
    return p


def weighted(x, past, depth, context=()):
    """P_w of a binary sequence by the definition, in fractions."""
    whole = past + x
    counts = [0, 0]
    for t in range(len(past), len(whole)):
        if tuple(whole[t - len(context) : t][::-1]) == context:
            counts[whole[t]] += 1
    estimate = krichevsky_trofimov(*counts)
    if len(context) == depth:
        return estimate
    children = math.prod(
        weighted(x, past, depth, (*context, y)) for y in sorted(set(whole) | {0, 1})
    )
    return (estimate + children) / 2


def test_the_textbook_example():
    """Willems, Shtarkov and Tjalkens code 0110100 after 010 with depth 3: 95/32768."""
    x, past = [0, 1, 1, 0, 1, 0, 0], [0, 1, 0]
    assert weighted(x, past, 3) == Fraction(95, 32768)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_binary_context_trees_agree_with_the_definition(depth):
    """A symbol of its own stands before the beginning, as it does in the definition with past (2, 2, ...)."""
    for x in itertools.islice(itertools.product([0, 1], repeat=9), 0, None, 37):
        past = [2] * depth

        def by_definition(context=(), x=x, past=past):
            whole = past + list(x)
            counts = [0, 0]
            for t in range(len(past), len(whole)):
                if tuple(whole[t - len(context) : t][::-1]) == context:
                    counts[whole[t]] += 1
            estimate = krichevsky_trofimov(*counts)
            if len(context) == depth:
                return estimate
            return (estimate + math.prod(by_definition((*context, y)) for y in (0, 1, 2))) / 2

        assert context_tree_bits(np.array(x), 2, depth) == pytest.approx(
            -math.log2(by_definition()), abs=1e-9
        )


def test_several_symbols_are_a_product_of_binary_decisions():
    x = np.array([3, 1, 0, 3, 3, 2, 1, 3, 0, 3, 1])
    high = [k >> 1 for k in x]
    expected = krichevsky_trofimov(high.count(0), high.count(1))
    for half in (0, 1):
        low = [k & 1 for k in x if k >> 1 == half]
        expected *= krichevsky_trofimov(low.count(0), low.count(1))
    assert context_tree_bits(x, 4, depth=0) == pytest.approx(-math.log2(expected), abs=1e-9)


def test_context_trees_learn_order_and_chain_over_texts():
    x = np.arange(4000) % 5
    assert context_tree_bits(x, 5, depth=2) < 200
    assert context_tree_bits(x, 5, depth=0) > 4000 * 2
    rng = np.random.default_rng(0)
    x, seen = rng.integers(0, 7, 500), rng.integers(0, 7, 3000)
    whole = context_tree_bits(np.concatenate([seen, x]), 7, 4)
    parts = context_tree_bits(seen, 7, 4) + context_tree_bits(x, 7, 4, seen)
    assert whole == pytest.approx(parts, rel=1e-12)
    assert context_tree_bits(np.zeros(9, int), 1) == 0
    assert context_tree_bits(np.zeros(0, int), 3) == 0
    with pytest.raises(ValueError, match="depth"):
        context_tree_bits(x, 7, -1)
    with pytest.raises(ValueError, match="symbols must lie"):
        context_tree_bits(x, 5)


def test_compressors_are_those_of_the_standard_library():
    text = b"to be or not to be, " * 50
    assert compressed_bits("bzip2", text) == 8 * len(bz2.compress(text))
    assert compressed_bits("xz", text) == 8 * len(
        lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    )
    for name in COMPRESSORS:
        assert compressed_bits(name, text, seen=text) < compressed_bits(name, text)
    with pytest.raises(ValueError, match="unknown compressor"):
        compressed_bits("rar", text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:hmmlearn")
def test_hidden_markov_models_agree_with_a_sum_over_paths():
    x = np.arange(300) % 3
    model = HiddenMarkov(3, iterations=100, seed=1).fit(x, 4)
    short = np.array([0, 1, 2, 0, 3, 1])
    p = []
    for t in range(len(short)):
        total = {}
        for length in (t, t + 1):
            total[length] = 0.0
            for path in itertools.product(range(3), repeat=length):
                value = 1.0
                for k, state in enumerate(path):
                    step = model.start_[state] if k == 0 else model.transition_[path[k - 1], state]
                    value *= step * model.emission_[state, short[k]]
                total[length] += value
        p.append(total[t + 1] / total[t] if total[t] > 0 else None)
    # the symbol 3 was never seen, so what comes after it has no probability by the sum over paths
    upto = 5
    share = 1 / (np.arange(upto) + 2)
    expected = -np.log2((1 - share) * np.array(p[:upto], float) + share / 4).sum()
    assert model.bits(short[:upto]) == pytest.approx(expected, rel=1e-10)
    assert math.isfinite(model.bits(short))
    assert model.bits(x) < 300


def test_a_hidden_markov_model_of_one_symbol_has_transitions():
    hidden = HiddenMarkov(2).fit(np.array([0]), 2)
    assert np.allclose(hidden.transition_.sum(axis=1), 1)
    assert hidden.bits(np.zeros(40, int)) < 6


def expected_numbers(x, start, transition, emission):
    """Sum over all paths of states: log-likelihood, expected first states, transitions and emissions."""
    S, A = emission.shape
    first, moves, seen, total = np.zeros(S), np.zeros((S, S)), np.zeros((S, A)), 0.0
    for path in itertools.product(range(S), repeat=len(x)):
        weight = start[path[0]] * emission[path[0], x[0]]
        for t in range(1, len(x)):
            weight *= transition[path[t - 1], path[t]] * emission[path[t], x[t]]
        total += weight
        first[path[0]] += weight
        for t, state in enumerate(path):
            seen[state, x[t]] += weight
            if t:
                moves[path[t - 1], state] += weight
    return math.log(total), first / total, moves / total, seen / total


def test_an_iteration_of_the_sparse_hidden_markov_model_is_the_sum_over_paths():
    x, A = np.array([0, 1, 1, 2, 0, 1]), 4
    begin = SparseHiddenMarkov(4, edges=2, iterations=0, seed=5).fit(x, A)
    once = SparseHiddenMarkov(4, edges=2, iterations=1, seed=5).fit(x, A)
    before, first, moves, seen = expected_numbers(
        x, begin.start_, begin.transition_, begin.emission_
    )
    assert begin.log_likelihoods_ == [pytest.approx(before, abs=1e-12)]
    np.testing.assert_allclose(once.start_, first, atol=1e-12)
    np.testing.assert_allclose(
        once.transition_, moves / moves.sum(axis=1, keepdims=True), atol=1e-12
    )
    np.testing.assert_allclose(once.emission_, seen / seen.sum(axis=1, keepdims=True), atol=1e-12)
    after, *_ = expected_numbers(x, once.start_, once.transition_, once.emission_)
    assert once.log_likelihoods_ == [
        pytest.approx(before, abs=1e-12),
        pytest.approx(after, abs=1e-12),
    ]


@pytest.mark.parametrize(("states", "edges"), [(7, 3), (7, None), (3, 9)])
def test_expectation_maximization_never_loses_and_keeps_the_graph(states, edges):
    x = np.cumsum(np.random.default_rng(3).integers(0, 2, 400)) % 4
    degree = min(edges or 5, states)  # the paper's number of edges is that of the symbols
    begin = SparseHiddenMarkov(states, edges, iterations=0, seed=2).fit(x, 5)
    lacks = begin.transition_ == 0
    assert ((~lacks).sum(axis=1) == degree).all()
    assert not lacks.diagonal().any()
    model = SparseHiddenMarkov(states, edges, iterations=40, seed=2).fit(x, 5)
    assert (model.transition_[lacks] == 0).all()
    assert len(model.log_likelihoods_) > 10
    assert (np.diff(model.log_likelihoods_) > -1e-9).all()
    assert model.log_likelihoods_[-1] > begin.log_likelihoods_[0] + 50
    for rows in (model.start_[None], model.transition_, model.emission_):
        np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-12)
    # a symbol that the text lacks is scored by the uniform share alone
    assert (model.emission_[:, 4] == 0).all()
    assert math.isfinite(model.bits(np.array([0, 4, 1])))


def test_the_sparse_hidden_markov_model_starts_as_the_paper_says():
    """Emissions are frequencies times U[0, 1], transitions Dirichlet(1/2): each of d edges has the mean 1/d."""
    x = np.repeat([0, 1, 2], [600, 300, 100])
    model = SparseHiddenMarkov(2000, edges=2, iterations=0).fit(x, 3)
    p = model.transition_[model.transition_ > 0]
    # Dirichlet(1/2, 1/2) is the arcsine law: its mean is 1/2, its variance 1/8
    assert p.mean() == pytest.approx(0.5, abs=1e-12)
    assert p.var() == pytest.approx(1 / 8, abs=0.01)
    ratio = model.emission_ / [0.6, 0.3, 0.1]
    # up to the norm of the row, of three numbers from U[0, 1] the largest is any with the
    # probability 1/3
    assert np.bincount(ratio.argmax(axis=1)) / 2000 == pytest.approx([1 / 3] * 3, abs=0.04)
    assert (model.start_ == 1 / 2000).all()


def test_wrong_arguments_of_the_sparse_hidden_markov_model_are_named():
    with pytest.raises(ValueError, match="connectivity 0"):
        SparseHiddenMarkov(3, edges=0).fit(np.array([0, 1]), 2)
    with pytest.raises(ValueError, match="the text is empty"):
        SparseHiddenMarkov(3).fit(np.zeros(0, int), 2)
