"""Where a run starts: members of one rescaling class, all of them the same function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import unknown_name

if TYPE_CHECKING:
    from pathspace.network import Network

STARTS = {
    "default": "PyTorch's initialisation as it is",
    "balanced": "PyTorch's initialisation, every unit rescaled so that equal path mass enters and leaves it",
    "rescaled": "the balanced start with every unit rescaled by a random power of two; the same function",
}


def move_to_start(network: Network, start: str, *, seed: int, exponent: int) -> None:
    """Bring freshly initialised weights to a start, in place, without changing the network's function.

    Args:
        network: The traced model.
        start: A name in `STARTS`.
        seed: Chooses the random factors.
        exponent: k; the factors of the rescaled start are powers of two between 2^-k and 2^k, so nothing is
            rounded.

    Raises:
        ConfigurationError: The start is unknown.
    """
    check_start(start)
    if start == "default":
        return
    import torch

    from pathspace import rescaling

    rescaling.balance_(network)
    if start == "rescaled":
        rescaling.random_rescale_(
            network,
            low=2.0**-exponent,
            high=2.0**exponent,
            powers_of_two=True,
            generator=torch.Generator().manual_seed(seed),
        )


def check_start(start: Any, where: str = "--start") -> None:
    """Raise a `ConfigurationError` unless there is a start of this name."""
    if start not in STARTS:
        raise unknown_name("start", start, STARTS, where)
