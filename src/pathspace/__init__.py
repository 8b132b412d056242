"""Train ReLU and recurrent networks in a geometry that does not depend on how their weights are scaled."""

from pathspace import network, optim, paths, rescaling
from pathspace.network import Network, UntraceableError, trace

__all__ = ["Network", "UntraceableError", "network", "optim", "paths", "rescaling", "trace"]
__version__ = "0.1.0.dev0"
