"""A Gaussian prior on the weights between units, against overfitting.

Alphabet of this module: A symbols, N units, theta any weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pathspace.sequences.parameters import Parameters

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior on the weights between units, for less overfitting than the likelihood alone gives.

    Adds - sum_k (precision_k / 2) (theta_k - centre_k)^2 to the log-likelihood, and the precisions
    to the diagonals of the metrics. The weights of the always-on unit and the start values are left
    free.

    Args:
        centre: the parameters the prior pulls to.
        w: (N+1, A) precisions of the writing weights.
        tau: precisions of the transition weights, of the shape of tau.
    """

    centre: Parameters
    w: Array
    tau: Array

    @classmethod
    def around(cls, centre: Parameters, writing: float, transition: float) -> Prior:
        """Return the prior with one precision for all writing and one for all transition weights."""
        w = np.full_like(centre.w, writing)
        w[0] = 0.0
        tau = np.full_like(centre.tau, transition)
        tau[:, centre.graph.sources == 0] = 0.0
        return cls(centre, w, tau)

    def scaled(self, factor: float) -> Prior:
        """Return the share of the prior that goes with a batch of the text."""
        return replace(self, w=factor * self.w, tau=factor * self.tau)

    def penalty(self, model: Parameters) -> float:
        """Return what the prior takes off the log-likelihood, in nats."""
        writing = np.vdot(self.w, (model.w - self.centre.w) ** 2)
        return float(writing + np.vdot(self.tau, (model.tau - self.centre.tau) ** 2)) / 2
