"""Functions of a traced network run outside ``torch.autocast``, on weights that have values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from pathspace.network.errors import expect_weights
from pathspace.squared.precision import full_precision

Function = TypeVar("Function", bound=Callable[..., Any])


def in_full_precision(function: Function) -> Function:
    """Run a function of a traced network, its first argument, outside autocast."""

    @functools.wraps(function)
    def run(network: Any, *args: Any, **kwargs: Any) -> Any:
        expect_weights(network)
        one = next(iter(network.parameters.values()), None)  # none, where all of the model is a cut
        with full_precision(next(network.model.parameters()) if one is None else one):
            return function(network, *args, **kwargs)

    return run  # type: ignore[return-value]
