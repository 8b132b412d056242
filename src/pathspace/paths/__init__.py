"""Sums over paths: the path norm and kappa, the metric of Path-SGD; and the graph that all paths run through."""

from pathspace.paths.basis import basis_paths, basis_values
from pathspace.paths.kappa import kappa
from pathspace.paths.norm import squared_path_norm
from pathspace.paths.pairs import second_term
from pathspace.paths.reduction import ReductionGraph, reduction_graph
from pathspace.paths.skeleton import Skeleton, skeleton

__all__ = [
    "ReductionGraph",
    "Skeleton",
    "basis_paths",
    "basis_values",
    "kappa",
    "reduction_graph",
    "second_term",
    "skeleton",
    "squared_path_norm",
]
