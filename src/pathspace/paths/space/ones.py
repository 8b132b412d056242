"""A start for rules that need skeleton weights of 1, as S19's Algorithm 2 does."""

from __future__ import annotations

import torch

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_paths, expect_weights
from pathspace.network.network import current_values
from pathspace.paths.space.reduction import expect_own
from pathspace.paths.space.skeleton import Rule, Skeleton
from pathspace.paths.space.skeleton import skeleton as choose


@tables_on_the_cpu()
@torch.no_grad()
def skeleton_ones_(
    network: Network, skeleton: Skeleton | Rule = "cyclic", generator: torch.Generator | None = None
) -> Skeleton:
    """Set the weights of a skeleton to 1, in place, and leave all others as they are.

    This changes the function of the network: call it on a fresh start, not on a trained model. Then

    .. code-block:: text

        A_c = B_c = 1 for every class c,   v_e = w_e for every basis path

    so the multipliers 1 / (A_u B_v)^2 of ``GSGD(units="none")`` begin at 1, and its step is that of
    S19's Algorithm 2. That algorithm (B.1, Eqs. 10 to 12) counts outgoing skeleton weights as 1 and
    never moves them.

    Args:
        network: a traced network, whose model's parameters are changed.
        skeleton: a skeleton of the network, or the rule to choose one by; S19's Algorithm 1 is
            ``"cyclic"``.
        generator: see :func:`skeleton`.

    Returns:
        The skeleton, which ``GSGD(skeleton=...)`` and ``GAdam(skeleton=...)`` take.

    Raises:
        RuntimeError: a parameter of the model was replaced after tracing.
        TypeError: ``network`` is no traced network.
        ValueError: the network multiplies activations, so there are no basis paths; the skeleton is
            another network's; or there is no such rule. Nothing has been changed then.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> chosen = ps.paths.skeleton_ones_(network)
        >>> model[0].weight[0, 0].item(), model[2].weight.tolist()
        (1.0, [[1.0, 1.0, 1.0]])
        >>> optimizer = ps.optim.GSGD(
        ...     model.parameters(), network, lr=0.1, units="none", clamp=None, skeleton=chosen
        ... )
    """
    expect_weights(network)
    expect_paths(network)
    current_values(network)
    chosen = skeleton if isinstance(skeleton, Skeleton) else choose(network, skeleton, generator)
    expect_own(chosen.graph, network, "skeleton was chosen")
    on_skeleton = torch.zeros(chosen.graph.num_edges, dtype=torch.bool)
    on_skeleton[chosen.edges[chosen.edges >= 0]] = True
    for name, mask in chosen.graph.unflatten(on_skeleton).items():
        parameter = network.parameters[name]
        parameter.masked_fill_(mask.to(parameter.device), 1)
    torch.clear_autocast_cache()  # it holds the weights before in half precision
    return chosen
