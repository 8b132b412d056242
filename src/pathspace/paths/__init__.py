"""Sums over paths: the path norm and kappa, the metric of Path-SGD; and the graph that all paths run through."""

from pathspace.paths.data.data_dependent import data_dependent_kappa
from pathspace.paths.data.fisher import fisher, natural_gradient
from pathspace.paths.data.node_measure import UnitMeasure, data_dependent_norm, unit_measure
from pathspace.paths.data.sensitivity import importance, sensitivity
from pathspace.paths.kernel.inner import path_distance, path_inner
from pathspace.paths.kernel.kappa import kappa
from pathspace.paths.kernel.norm import path_norm, squared_path_norm
from pathspace.paths.kernel.pairs import second_term
from pathspace.paths.listing.activations import activity_from_values
from pathspace.paths.listing.expression import BasisExpression, express
from pathspace.paths.listing.jacobian import (
    dead_units,
    degrees_of_freedom,
    path_jacobian,
    path_rank,
)
from pathspace.paths.listing.listing import Paths, TooManyPathsError, enumerate_paths
from pathspace.paths.listing.unrolled import Activity, UnrolledGraph, activity, unroll
from pathspace.paths.space.basis import basis_paths, basis_values
from pathspace.paths.space.member import skeleton_signs, weights_from_values
from pathspace.paths.space.ones import skeleton_ones_
from pathspace.paths.space.reduction import ReductionGraph, reduction_graph, used_edges
from pathspace.paths.space.skeleton import Skeleton, skeleton

__all__ = [
    "Activity",
    "BasisExpression",
    "Paths",
    "ReductionGraph",
    "Skeleton",
    "TooManyPathsError",
    "UnitMeasure",
    "UnrolledGraph",
    "activity",
    "activity_from_values",
    "basis_paths",
    "basis_values",
    "data_dependent_kappa",
    "data_dependent_norm",
    "dead_units",
    "degrees_of_freedom",
    "enumerate_paths",
    "express",
    "fisher",
    "importance",
    "kappa",
    "natural_gradient",
    "path_distance",
    "path_inner",
    "path_jacobian",
    "path_norm",
    "path_rank",
    "reduction_graph",
    "second_term",
    "sensitivity",
    "skeleton",
    "skeleton_ones_",
    "skeleton_signs",
    "squared_path_norm",
    "unit_measure",
    "unroll",
    "used_edges",
    "weights_from_values",
]
