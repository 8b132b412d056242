"""Which weights are on a path at all: the others have no gradient, and count in no dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.precision import in_full_precision
from pathspace.paths.kernel.kappa import squared_gradients
from pathspace.paths.space.reduction import ReductionGraph, reduction_graph
from pathspace.squared.squares import dense


@tables_on_the_cpu()
@in_full_precision
def used_edges(network: Network, graph: ReductionGraph | None = None) -> Tensor:
    """Which weights are on a path from an input to an output, bool ``[E]``.

    The backward direction of a bidirectional layer that is read at the last step, for example, takes a single step,
    so its recurrent weights are on none.

    Args:
        network: a traced network.
        graph: its reduction graph, if it is known already.

    Returns:
        The mask, in the order of :func:`reduction_graph`, on the CPU.

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        >>> ps.paths.used_edges(ps.trace(rnn, torch.zeros(1, 1, 1)))  # one time step
        tensor([ True, False])
    """
    graph = reduction_graph(network) if graph is None else graph
    # kappa1 counts the paths through a weight, those without the weight's own factor, so ones keep all of them
    same = {name: _small_weights(p) for name, p in network.parameters.items()}
    paths = squared_gradients(network, same, list(same))
    return graph.flatten({name: dense(value) for name, value in paths.items()}).cpu() > 0


def _small_weights(parameter: Tensor) -> Tensor:
    """Positive weights of about 1 / sqrt(inputs), so that sums over many paths stay finite."""
    inputs = max(1, parameter[0].numel() if parameter.dim() else 1)
    return torch.full(parameter.shape, inputs**-0.5, dtype=torch.float64, device=parameter.device)
