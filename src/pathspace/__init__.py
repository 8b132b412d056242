"""Train ReLU and recurrent networks in a geometry that does not depend on how their weights are scaled."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathspace import metrics, network, nn, optim, paths, rescaling, sequences
    from pathspace.network import Network, UntraceableError, trace

__version__ = "0.1.0.dev0"
__all__ = [
    "Network",
    "UntraceableError",
    "metrics",
    "network",
    "nn",
    "optim",
    "paths",
    "rescaling",
    "sequences",
    "trace",
]

# Not looked up in them: that would load torch for `from pathspace import cli`, too.
_MODULES = ("optim", "rescaling", "paths", "metrics", "network", "nn", "sequences")
_FROM_NETWORK = frozenset({"Network", "UntraceableError", "trace"})


def __getattr__(name: str) -> Any:
    """Import on first use: the command line answers `--help` without loading torch."""
    if name in _FROM_NETWORK:
        return getattr(import_module("pathspace.network"), name)
    if name in __all__:
        return import_module(f"pathspace.{name}")
    raise AttributeError(
        f"module 'pathspace' has no attribute {name!r}; look in its modules: {', '.join(_MODULES)}"
    )


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
