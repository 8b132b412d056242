"""The balanced member of a rescaling class."""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.paths.node_mass import node_mass
from pathspace.rescaling.rescale import rescale_


def balance_(network: Network, *, powers_of_two: bool = False) -> Tensor:
    """Rescale a network, in place, so that as much path mass enters each unit class as leaves it.

    Every member of a class of networks that compute the same function is brought to the same one. Training a
    balanced network with SGD or Adam is the baseline that any invariant method has to beat.

    Args:
        network: a traced network, whose model's parameters are changed; the function stays the same.
        powers_of_two: round the factors to powers of two, so that nothing else is rounded.

    Returns:
        The factors s that were used (see :func:`rescale_`), float64, shape ``[num_classes]``.

    Raises:
        FloatingPointError: the path mass of a class is not finite.
        OverflowError: see :func:`rescale_`.
    """
    # gamma_in becomes s^2 gamma_in and gamma_out becomes gamma_out / s^2: equal for s^4 = gamma_out / gamma_in.
    factors = 1.0 / node_mass(network).gauge()
    if powers_of_two:
        factors = torch.exp2(torch.log2(factors).round())
    rescale_(network, factors)
    return factors
