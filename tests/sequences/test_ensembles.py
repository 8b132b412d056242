"""Weights of merged networks: the maximum of a concave function, found two ways."""

import numpy as np
import pytest

from pathspace.sequences import PCNN
from pathspace.sequences.ensembles import fit_blend
from pathspace.sequences.folds import deal
from pathspace.sequences.merging import merge_parameters
from pathspace.sequences.passes import forward
from pathspace.sequences.text import Corpus

TEXT = "one two three two one, two two one three; " * 10
HELD = "three one two, one one two three; two three " * 4


@pytest.fixture(scope="module")
def models():
    return [PCNN(units=4, passes=passes, seed=passes).fit(TEXT) for passes in (6, 20, 44)]


def held_corpus(models):
    return Corpus.of([models[0].alphabet_.encode(HELD)], len(models[0].alphabet_))


def test_weights_and_offsets_maximise_the_held_out_likelihood_of_the_merged_network(models):
    held = held_corpus(models)
    networks = [model.parameters_ for model in models]

    def objective(c, b):
        merged = merge_parameters(networks, c.tolist(), b.tolist())
        return (
            forward(merged, held).log_likelihood
            - 0.15 * 3 * np.sum((c - 1 / 3) ** 2)
            - 1.0 * np.sum(b**2)
        )

    blend = fit_blend(networks, held, ridge=0.3, ridge_offsets=2.0)
    c, b = blend.weights, blend.offsets
    best = objective(c, b)
    assert best > objective(np.full(3, 1 / 3), 0 * b) + 1
    assert best > objective(c, 0 * b)
    for step in (-1e-3, 1e-3):
        for k in range(len(c)):
            assert objective(c + step * (np.arange(len(c)) == k), b) < best
        for y in range(len(b)):
            assert objective(c, b + step * (np.arange(len(b)) == y)) < best


def test_strong_ridges_give_the_geometric_mean(models):
    networks = [model.parameters_ for model in models]
    blend = fit_blend(networks, held_corpus(models), ridge=1e9, ridge_offsets=1e12)
    assert np.abs(blend.weights - 1 / 3).max() < 1e-5
    assert np.abs(blend.offsets).max() < 1e-9
    with pytest.raises(ValueError, match="no network"):
        fit_blend([], held_corpus(models))
    with pytest.raises(ValueError, match="one finite offset for each"):
        merge_parameters(networks, None, [0.0])


def test_an_ensemble_is_one_model_better_on_held_out_text_than_its_best_member(tmp_path):
    rng = np.random.default_rng(3)
    text, held = ("".join(rng.choice(list("abcd"), 400, p=[0.4, 0.3, 0.2, 0.1])) for _ in range(2))
    arguments = {"units": 6, "passes": 40, "restarts": 4, "heat": 0}
    single = PCNN(**arguments).fit(text, held)
    merged = PCNN(**arguments, ensemble=3).fit(text, held)
    assert merged.parameters_.units == 18
    assert merged.bits(held) < single.bits(held)
    assert merged.training_.result_bits == merged.bits(held)
    merged.save(tmp_path / "m")
    passes = merged.training_.passes
    merged.fit(text, held, passes=passes + 6, resume=True)
    assert merged.training_.passes == passes + 6
    assert merged.training_.result_bits <= merged.bits(held) + 1e-9


@pytest.mark.parametrize("texts", [1, 2, 5])
def test_folds_hold_back_every_symbol_once(texts):
    rng = np.random.default_rng(texts)
    encoded = [rng.integers(0, 3, 40 + k) for k in range(texts)]
    marks = [rng.random(len(x)) < 0.7 for x in encoded]
    folds = deal(encoded, marks, 2, 3)
    held = np.concatenate([fold.validation.x for fold in folds])
    assert np.array_equal(np.bincount(held), np.bincount(np.concatenate(encoded)))
    for fold in folds:
        assert len(fold.corpus.x) + len(fold.validation.x) == len(held)
        assert fold.corpus.chi.sum() + fold.validation.chi.sum() == sum(
            mark.sum() for mark in marks
        )
    if texts > 1:
        assert len(folds[0].validation.bounds) - 1 == len(encoded[::2])


FOUR = {"units": 6, "passes": 40, "restarts": 4, "heat": 0}


def random_texts():
    rng = np.random.default_rng(3)
    return ["".join(rng.choice(list("abcd"), 300, p=[0.4, 0.3, 0.2, 0.1])) for _ in range(2)]


def test_an_ensemble_of_folds_learns_from_all_of_the_text():
    text, fresh = random_texts()
    folded, alone = PCNN(**FOUR, ensemble=4, folds=4).fit(text), PCNN(**FOUR).fit(text, 0.25)
    assert folded.parameters_.units == 24
    # each part was scored by networks that had not seen it, so the estimate is no better than the
    # fresh text
    assert folded.training_.result_bits == pytest.approx(folded.bits(fresh), rel=0.1)
    assert folded.bits(fresh) < alone.bits(fresh)
    with pytest.raises(ValueError, match="cannot go on"):
        folded.fit(text, resume=True)


@pytest.mark.slow  # by default, two folds in two processes: test_estimators.py
def test_an_ensemble_of_folds_is_the_same_in_two_processes():
    text, fresh = random_texts()
    serial, parallel = (PCNN(**FOUR, ensemble=4, folds=4, jobs=jobs).fit(text) for jobs in (1, 2))
    assert parallel.bits(fresh) == serial.bits(fresh)


@pytest.mark.parametrize(
    ("arguments", "validation", "message"),
    [
        ({"folds": 2, "restarts": 3, "ensemble": 2}, None, "multiples of folds"),
        ({"folds": 2, "restarts": 2, "ensemble": 1}, None, "multiples of folds"),
        ({"folds": 0}, None, "multiples of folds"),
        (
            {"folds": 2, "restarts": 2, "ensemble": 2},
            0.1,
            "folds take turns as the validation text",
        ),
        ({"folds": 200, "restarts": 200, "ensemble": 200}, None, "too short for 200 folds"),
    ],
)
def test_impossible_folds_are_refused(arguments, validation, message):
    with pytest.raises(ValueError, match=message):
        PCNN(units=3, passes=2, **arguments).fit(TEXT[:50], validation)
