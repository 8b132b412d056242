"""Sums over paths: the path norm and kappa, the metric of Path-SGD."""

from pathspace.paths.kappa import kappa
from pathspace.paths.norm import squared_path_norm
from pathspace.paths.pairs import second_term

__all__ = ["kappa", "second_term", "squared_path_norm"]
