"""Geometries that optimizers train in, and Riemannian metrics of single units."""

from pathspace.metrics.balanced import Balanced
from pathspace.metrics.data_dependent import DataDependent
from pathspace.metrics.metric import Metric
from pathspace.metrics.path import Path
from pathspace.metrics.quasi_diagonal import QuasiDiagonalMetric, quasi_diagonal_metric
from pathspace.metrics.solve import solve_diagonal, solve_full, solve_quasi_diagonal
from pathspace.rescaling.frames import Frame

__all__ = [
    "Balanced",
    "DataDependent",
    "Frame",
    "Metric",
    "Path",
    "QuasiDiagonalMetric",
    "quasi_diagonal_metric",
    "solve_diagonal",
    "solve_full",
    "solve_quasi_diagonal",
]
