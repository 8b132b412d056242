"""The exact values of the tiny networks and the trajectories, as NumPy arrays."""

import json
from functools import cache
from pathlib import Path

import numpy as np

KINDS = ("pcnn", "cnn", "rnn")


@cache
def exact():
    return json.loads((Path(__file__).parent / "fixtures" / "sequences.json").read_text())


def tiny_sequence():
    tiny = exact()["tiny"]
    return np.array(tiny["x"]), np.array(tiny["chi"])


def tiny_edges():
    tiny = exact()["tiny"]
    edges = np.zeros((tiny["N"] + 1, tiny["N"] + 1), bool)
    edges[0, 1:] = True
    for i, j in tiny["edges_out"]:
        edges[i, j] = True
    return edges


def tiny_model(kind):
    """Every array of one tiny network; `rho` is None for the contextual models."""
    values = exact()["tiny"]["models"][kind]
    arrays = {
        name: np.array(value) if isinstance(value, list) else value
        for name, value in values.items()
    }
    arrays.setdefault("rho", None)
    return arrays


def assert_close(actual, expected, tolerance=1e-10):
    """Compare to the largest absolute entry, the tolerance the fixture is stated with."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    scale = np.abs(expected).max()
    assert np.abs(actual - expected).max() <= tolerance * scale
