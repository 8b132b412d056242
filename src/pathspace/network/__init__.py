"""Rescalable networks: tracing, unit classes, and the squared network."""

from pathspace.network.errors import UnmatchedForwardError, UntraceableError
from pathspace.network.network import Network
from pathspace.network.registered import register
from pathspace.network.trace.tracer import trace
from pathspace.network.units import Edge, EdgeLabels, UnitClass

__all__ = [
    "Edge",
    "EdgeLabels",
    "Network",
    "UnitClass",
    "UnmatchedForwardError",
    "UntraceableError",
    "register",
    "trace",
]
