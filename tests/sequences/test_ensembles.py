"""Weights of merged networks: the maximum of a concave function, found two ways."""

import numpy as np
import pytest

from pathspace.sequences import PCNN
from pathspace.sequences.ensembles import fit_weights
from pathspace.sequences.merging import merge_parameters
from pathspace.sequences.passes import forward
from pathspace.sequences.text import Corpus

TEXT = "one two three two one, two two one three; " * 10
HELD = "three one two, one one two three; two three " * 4


@pytest.fixture(scope="module")
def models():
    return [PCNN(units=4, passes=passes, seed=passes).fit(TEXT) for passes in (6, 20, 44)]


def test_weights_maximise_the_held_out_likelihood_of_the_merged_network(models):
    held = Corpus.of([models[0].alphabet_.encode(HELD)], len(models[0].alphabet_))
    networks = [model.parameters_ for model in models]

    def objective(c):
        merged = merge_parameters(networks, c.tolist())
        return forward(merged, held).log_likelihood - 0.5 * 0.3 * 3 * np.sum((c - 1 / 3) ** 2)

    c = fit_weights(networks, held, ridge=0.3)
    best = objective(c)
    assert best > objective(np.full(3, 1 / 3)) + 1
    for k in range(3):
        for step in (-1e-3, 1e-3):
            assert objective(c + step * (np.arange(3) == k)) < best


def test_a_strong_ridge_gives_the_geometric_mean(models):
    held = Corpus.of([models[0].alphabet_.encode(HELD)], len(models[0].alphabet_))
    c = fit_weights([model.parameters_ for model in models], held, ridge=1e9)
    assert np.abs(c - 1 / 3).max() < 1e-5
    with pytest.raises(ValueError, match="no network"):
        fit_weights([], held)


def test_an_ensemble_is_one_model_better_on_held_out_text_than_its_best_member(tmp_path):
    rng = np.random.default_rng(3)
    text, held = ("".join(rng.choice(list("abcd"), 400, p=[0.4, 0.3, 0.2, 0.1])) for _ in range(2))
    arguments = {"units": 6, "passes": 40, "restarts": 4, "heat": 0}
    single = PCNN(**arguments).fit(text, held)
    merged = PCNN(**arguments, ensemble=3).fit(text, held)
    assert merged.parameters_.units == 18
    assert merged.bits(held) < single.bits(held)
    assert merged.training_.best_bits == merged.bits(held)
    merged.save(tmp_path / "m")
    passes = merged.training_.passes
    merged.fit(text, held, passes=passes + 6, resume=True)
    assert merged.training_.passes == passes + 6
    assert merged.training_.best_bits <= merged.bits(held) + 1e-9
