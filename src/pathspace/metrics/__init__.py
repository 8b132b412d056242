"""Riemannian metrics of single units: full, diagonal, and diagonal plus the column of the bias."""

from pathspace.metrics.quasi_diagonal import QuasiDiagonalMetric, quasi_diagonal_metric
from pathspace.metrics.solve import solve_diagonal, solve_full, solve_quasi_diagonal

__all__ = [
    "QuasiDiagonalMetric",
    "quasi_diagonal_metric",
    "solve_diagonal",
    "solve_full",
    "solve_quasi_diagonal",
]
