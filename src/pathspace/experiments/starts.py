"""Starts of runs: members of one rescaling class, or a network whose skeleton weights are 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from pathspace.network import Network

STARTS = {
    "default": "PyTorch's initialisation as it is",
    "balanced": "PyTorch's initialisation, every unit rescaled so that equal path mass enters and leaves it",
    "rescaled": "the balanced start with every unit rescaled by a random factor; the same function",
    "skeleton-ones": "PyTorch's initialisation with the weights of the cyclic skeleton set to 1; another function",
}
SKELETON_ONES = "skeleton-ones"  # where S19's Algorithm 2 has to begin
BALANCED = (
    1e-5  # how far from 1 the factors that would balance a network may be, for it to be balanced
)


def move_to_start(
    network: Network, start: str, *, seed: int, exponent: int, factor: float = 0.0
) -> None:
    """Bring freshly initialised weights to a start, in place; but for skeleton-ones the function stays.

    Args:
        network: The traced model.
        start: A name in `STARTS`.
        seed: Chooses the random factors.
        exponent: k; the factors of the rescaled start are powers of two between 2^-k and 2^k, so
            nothing is rounded.
        factor: f; where it is not 0, the factors are any numbers between 1/f and f instead,
            log-uniform.

    Raises:
        ConfigurationError: The start is unknown, or the factors are too large for the type of the
            weights.
    """
    check_start(start)
    if start == "default":
        return
    import torch

    from pathspace import paths, rescaling

    if start == SKELETON_ONES:
        paths.skeleton_ones_(network, "cyclic")
        return
    rescaling.balance_(network)
    if start == "rescaled":
        try:
            rescaling.random_rescale_(
                network,
                low=1 / factor if factor else 2.0**-exponent,
                high=factor or 2.0**exponent,
                powers_of_two=not factor,
                generator=torch.Generator().manual_seed(seed),
            )
        except OverflowError as error:
            named = (
                f"'rescale_factor' is {factor:g}" if factor else f"'rescale_exponent' is {exponent}"
            )
            raise ConfigurationError(
                f"The setting {named}, which the weights' type cannot hold: give a smaller number."
            ) from error


def balance_once_(network: Network) -> None:
    """Balance a network, in place; one that is balanced already keeps every bit.

    Factors that are powers of two come first, and the rest only where they do not suffice. So the
    balanced start, and that start rescaled by powers of two, end as the same weights to the last
    bit.
    """
    from pathspace import rescaling
    from pathspace.paths.kernel.node_mass import node_mass
    from pathspace.rescaling.balance import balancing_factors

    rescaling.rescale_(network, balancing_factors(network, powers_of_two=True))
    apart = node_mass(network).gauge()
    if bool(((apart - 1).abs() > BALANCED).any()):
        rescaling.rescale_(network, balancing_factors(network))


def are_one_function(starts: Sequence[str]) -> bool:
    """Return whether a network computes the same from all of these starts."""
    return len(starts) == 1 or SKELETON_ONES not in starts


def check_start(start: Any, where: str = "--start") -> None:
    """Raise a `ConfigurationError` unless there is a start of this name."""
    if start not in STARTS:
        raise unknown_name("start", start, STARTS, where)
