"""Hidden Markov models, trained by hmmlearn.

Alphabet of this module: S hidden states, A symbols.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathspace.extras import missing_package
from pathspace.sequences.cost import check_hidden_states
from pathspace.sequences.kernels.machine_code import njit
from pathspace.sequences.walk import mix_with_uniform

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


@njit(cache=True)
def _predictions(x, start, transition, emission):
    """Return the probability of each symbol given those before it."""
    p = np.zeros(len(x))
    belief = start.copy()
    for t in range(len(x)):
        joint = belief * emission[:, x[t]]
        p[t] = joint.sum()
        if p[t] > 0.0:
            belief = joint / p[t]
        # an impossible symbol tells nothing about the state
        belief = belief @ transition
    return p


class HiddenMarkov:
    """A hidden Markov model over symbols, all states connected, from hmmlearn's start.

    Args:
        states: S.
        iterations: most iterations of expectation maximization.
        seed: of the start values.
    """

    def __init__(self, states: int, iterations: int = 100, seed: int = 0) -> None:
        self.states = states
        self.iterations = iterations
        self.seed = seed

    def fit(self, x: IntArray, A: int) -> HiddenMarkov:
        """Learn a sequence of symbols 0..A-1 and return the model.

        Raises:
            ValueError: if memory has no room for the states, or an iteration would take days.
        """
        check_hidden_states(self.states, self.iterations, len(x), A)
        try:
            from hmmlearn.hmm import CategoricalHMM
        except ModuleNotFoundError as error:
            raise missing_package("HiddenMarkov", error, "sequences") from error
        model: Any = CategoricalHMM(
            self.states,
            n_iter=self.iterations,
            random_state=self.seed,
            n_features=A,
            tol=0.01,
            implementation="scaling",  # ten times as fast as with logarithms
        )
        model.fit(np.asarray(x).reshape(-1, 1))
        self.start_: Array = np.ascontiguousarray(model.startprob_)
        self.transition_: Array = np.ascontiguousarray(model.transmat_)
        # a text of one symbol shows no transition, and hmmlearn leaves zeros: any state may follow
        self.transition_[~self.transition_.any(axis=1)] = 1 / self.states
        self.emission_: Array = np.ascontiguousarray(model.emissionprob_)
        return self

    def bits(self, x: IntArray) -> float:
        """Return the code length of a sequence, mixed with the uniform distribution as for the other models."""
        p = _predictions(np.asarray(x, np.int64), self.start_, self.transition_, self.emission_)
        t = np.arange(len(x))
        return float(-np.log2(mix_with_uniform(p, t, self.emission_.shape[1])).sum())
