"""The symmetry itself: node-wise rescaling of a network's units, and checks that a method does not see it."""

from pathspace.rescaling.align import Alignment, Equivalence, align_, equivalent, merge
from pathspace.rescaling.balance import FunctionChangedError, balance_
from pathspace.rescaling.biases import absorb_biases_, correct_biases_
from pathspace.rescaling.conserved import conserved
from pathspace.rescaling.imbalance import Imbalance, LayerScales, imbalance
from pathspace.rescaling.invariance import InvarianceReport, check_invariance
from pathspace.rescaling.rescale import random_rescale_, rescale_

__all__ = [
    "Alignment",
    "Equivalence",
    "FunctionChangedError",
    "Imbalance",
    "InvarianceReport",
    "LayerScales",
    "absorb_biases_",
    "align_",
    "balance_",
    "check_invariance",
    "conserved",
    "correct_biases_",
    "equivalent",
    "imbalance",
    "merge",
    "random_rescale_",
    "rescale_",
]
