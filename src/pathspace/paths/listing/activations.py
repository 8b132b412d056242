"""Active units, from the values of basis paths and the signs of skeleton weights (S19 Theorem 2).

Let z_u be the value of unit u of class c before its activation, h_u after it. Carried on along O
they are sums over paths, which basis values decide:

    Z_u = B_c z_u = sum over edges e = (u' -> u) of H_u' v_e / V_c',    V_c = A_c B_c,  H = B h,  V = H = x at an input
    h_u = z_u where z_u > 0, that is where sign(B_c) Z_u > 0, and 0 elsewhere

V_c is a basis value, and sign(B_c) the product of the signs of the skeleton weights from c to an
output. So both together say what is active, one unit after the other, and with S19 Eq. (3) what the
network returns. By :func:`weights_from_values` they are the weights of a network with |B_c| = 1
everywhere, for which Z_u is z_u up to the sign; and that network is run.

Letters: c unit class, u unit, e edge, v_e value of the basis path through e.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.paths.listing.unrolled import Activity, activity
from pathspace.paths.space.member import weights_from_values
from pathspace.paths.space.skeleton import Skeleton


@tables_on_the_cpu()
def activity_from_values(
    network: Network, skeleton: Skeleton, values: Mapping[str, Tensor], signs: Tensor, data: Any
) -> Activity:
    """Compute activations and outputs from basis values and skeleton signs alone (S19 Theorem 2).

    Args:
        network: a traced network; its weights are not looked at.
        skeleton: a skeleton of it.
        values: basis values by name, as :func:`basis_values` gives them.
        signs: the sign of O(c) for every class, ``[num_classes]``, as :func:`skeleton_signs` gives
            them.
        data: see :func:`activity`.

    Returns:
        Inputs, gates and outputs, in float64 on the CPU, as :func:`activity` of any network with
        these values and signs; but for gates on no path to an output, which nothing depends on.

    Raises:
        ValueError: see :func:`weights_from_values` and :func:`activity`.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> model[0].weight.data, model[2].weight.data = torch.tensor([[1.0], [-2.0]]), torch.tensor([[5.0, -1.0]])
        >>> network = ps.trace(model, torch.zeros(1, 1))
        >>> skeleton = ps.paths.skeleton(network)
        >>> values, signs = ps.paths.basis_values(network, skeleton), ps.paths.skeleton_signs(network, skeleton)
        >>> ps.paths.activity_from_values(network, skeleton, values, signs, torch.tensor([[3.0], [-3.0]])).gates > 0
        tensor([[ True, False],
                [False,  True]])
    """
    return activity(network, data, weights_from_values(network, skeleton, values, signs))
