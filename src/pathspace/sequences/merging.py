"""Merging trained networks into one whose prediction is the geometric mean of theirs.

Alphabet of this module: K networks, N_k units of network k.

The prediction is a softmax of a sum, so the normalised product of the K predictions, each to the
power c_k, is again one network: the units side by side, the transition weights block by block, the
writing weights times c_k. Offsets b_y of the symbols are added to the weights of the always-on
unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import Parameters

Array = NDArray[np.float64]


def merge_parameters(
    models: Sequence[Parameters],
    weights: Sequence[float] | Array | None = None,
    offsets: Sequence[float] | Array | None = None,
) -> Parameters:
    """Return one network with pi(y) proportional to exp(b_y) prod_k pi_k(y)^c_k.

    Args:
        models: networks of one kind, with one squash and one number of symbols.
        weights: the c_k, 1/K each by default.
        offsets: the b_y, 0 each by default.

    Raises:
        ValueError: if there is no network, or they do not fit together.

    Example:
        >>> from pathspace.sequences import PCNN
        >>> network = PCNN(units=3, passes=4).fit("abab").parameters_
        >>> merge_parameters([network, network]).units
        6
    """
    if not models:
        raise ValueError("there is no network to merge")
    shared = {(model.kind, model.squash, model.symbols) for model in models}
    if len(shared) > 1:
        raise ValueError(
            f"networks to merge must share kind, squash and alphabet, got {sorted(shared)}"
        )
    kind = models[0].kind
    squash = models[0].squash
    A = models[0].symbols
    c = _finite(weights, np.full(len(models), 1 / len(models)), "weight", "networks")
    b = _finite(offsets, np.zeros(A), "offset", "symbols")
    shift = np.concatenate([[0], np.cumsum([model.units for model in models])])
    edges = []
    w = np.zeros((shift[-1] + 1, A))
    rho = np.zeros((A if kind == "rnn" else 0, shift[-1] + 1))
    V0 = np.zeros(shift[-1] + 1)
    for model, offset, share in zip(models, shift, c, strict=False):
        own = slice(offset + 1, offset + model.units + 1)
        V0[own] = model.V0[1:]
        rho[:, own] = model.rho[:, 1:]
        w[own] = share * model.w[1:]
        w[0] += share * model.w[0]
        inner = model.graph.sources > 0
        sources = model.graph.sources[inner] + offset
        targets = model.graph.targets[inner] + offset
        edges += zip(sources, targets, strict=True)
    w[0] += b
    graph = Graph.from_edges(int(shift[-1]), edges)
    # edges are sorted by target, so those of one network stay together and in their order
    tau = np.concatenate([model.tau for model in models], axis=1)
    return Parameters(kind, squash, graph, w, tau, rho, V0)


def _finite(given: Sequence[float] | Array | None, default: Array, what: str, of: str) -> Array:
    """Return the numbers given, or the default.

    Raises:
        ValueError: if they are not finite, or not as many as the default.
    """
    if given is None:
        return default
    numbers = np.asarray(given, dtype=float)
    if numbers.shape != default.shape or not np.isfinite(numbers).all():
        raise ValueError(
            f"one finite {what} for each of {len(default)} {of} is needed, got {given}"
        )
    return numbers
