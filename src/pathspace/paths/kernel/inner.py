"""Two networks in one function space: the inner product and the distance of their path vectors.

The path vector Phi of a network has an entry for every path from an input or the bias node to an
output: the product of its weights. No rescaling changes it. A sum over paths factorizes, so the
squared network, fed with other products than squares, gives in one pass

    <Phi_a, Phi_b> = sum over paths of  prod_e a_e b_e  =  G(a b),        |Phi_a|^2 = G(a^2)

Fixed edges, maxima, shared weights and recurrences count as in the squared path norm. Where a
network divides by a statistic of what enters, m is the one of each network by itself, so that 1 /
sqrt(m_a m_b) stands for 1 / m, and it is held constant in derivatives.

Letters: a and b weights of the two networks, e an edge, G squared network, m statistic of a
normalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.likeness import same_paths
from pathspace.network.network import current_values, in_full_precision
from pathspace.paths.kernel.norm import inverse_statistics
from pathspace.squared.tape import Sums

# pairs that were compared already
_ALIKE: WeakKeyDictionary[Network, WeakSet[Network]] = WeakKeyDictionary()


def path_inner(a: Network, b: Network) -> Tensor:
    """Return the inner product of the path vectors of two networks of one architecture.

    <Phi_a, Phi_b> = sum over all paths of the product of the weights of both along the path.
    Rescaling either network does not change it; permuting hidden units of one does.

    Args:
        a: a traced network.
        b: another one, with parameters of the same names and shapes and the same forward pass.

    Returns:
        A 0-dim float64 tensor, differentiable in the weights of both. It costs one pass through the
        squared network; networks with normalizations take three.

    Raises:
        ValueError: the networks have different architectures.
        RuntimeError: a parameter of a model was replaced after tracing, or split over processes.
        TypeError: one of them is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> a, b = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        >>> for model, weight in ((a, 3.0), (b, -2.0)):
        ...     _ = torch.nn.init.constant_(model.weight, weight)
        >>> ps.paths.path_inner(*(ps.trace(model, torch.zeros(1, 2)) for model in (a, b))).item()
        -12.0
    """
    first, second = _weights_of_both(a, b)
    return _inner(
        a, b, first, second, (inverse_statistics(a, first), inverse_statistics(b, second))
    )


def path_distance(a: Network, b: Network) -> Tensor:
    """Return the Euclidean distance of the path vectors of two networks of one architecture.

    |Phi_a - Phi_b| = sqrt(|Phi_a|^2 + |Phi_b|^2 - 2 <Phi_a, Phi_b>). It is zero for two members of a rescaling class,
    and does not depend on how either network is scaled. It is a distance of weights up to rescaling, not up to
    permutation: align the networks first if their units may be in another order.

    The three terms cancel where the networks are near: the result has an error of about 1e-8 times
    the larger norm, so distances below that are rounding.

    Args:
        a: a traced network.
        b: another one, with parameters of the same names and shapes and the same forward pass.

    Returns:
        A 0-dim float64 tensor, differentiable in the weights of both; where it is 0, its gradient
        is taken as 0. It costs three passes through the squared network.

    Raises:
        ValueError: the networks have different architectures.
        RuntimeError: a parameter of a model was replaced after tracing, or split over processes.
        TypeError: one of them is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).double()
        >>> x = torch.zeros(1, 4, dtype=torch.double)
        >>> import copy
        >>> a, b = ps.trace(model, x), ps.trace(copy.deepcopy(model), x)
        >>> _ = ps.rescaling.random_rescale_(b, powers_of_two=True)
        >>> ps.paths.path_distance(a, b).item()
        0.0
    """
    first, second = _weights_of_both(a, b)
    of_first = inverse_statistics(a, first)
    of_second = inverse_statistics(b, second)
    squares = _inner(a, a, first, first, (of_first, of_first)) + _inner(
        b, b, second, second, (of_second, of_second)
    )
    square = squares - 2 * _inner(a, b, first, second, (of_first, of_second))
    # rounding may leave a negative number, and the root has no slope at 0
    apart = square > 0
    return torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0)


def _weights_of_both(a: Network, b: Network) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of two networks in float64, on the device of the first; check that they fit."""
    values = [current_values(network) for network in (a, b)]
    expect_alike(a, b)
    first = {name: values[0][name].double() for name in a.parameters}
    second = {name: values[1][name].to(p.device, torch.float64) for name, p in first.items()}
    return first, second


@in_full_precision
def _inner(
    a: Network,
    b: Network,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    statistics: tuple[Mapping[int, Tensor], Mapping[int, Tensor]],
) -> Tensor:
    """Return <Phi_a, Phi_b> from the weights and the inverse statistics of both."""
    inverses = {slot: (one * statistics[1][slot]).sqrt() for slot, one in statistics[0].items()}
    products = {name: value * second[name] for name, value in first.items()}
    sums = Sums(other=b.live, held=inverses)
    return a.tape.run(products, a.live, sums=sums)[0]


def expect_alike(a: Network, b: Network) -> None:
    """Raise ValueError unless two networks have parameters of the same names and shapes, and the same paths."""
    if a is b or b in _ALIKE.get(a, ()):
        return
    _expect_shapes_alike(a, b)
    first = [instruction.name for instruction in a.tape.instructions]
    second = [instruction.name for instruction in b.tape.instructions]
    if first != second or not same_paths(a, b):
        pairs = zip(first, second, strict=False)
        other = next((f": {x} and {y}" for x, y in pairs if x != y), "")
        raise ValueError(
            "expected two networks of one architecture, but parameters of the same names and shapes take part in "
            f"different forward passes{other}. Trace both models in the same form (training or evaluation), with "
            "examples of the same size"
        )


def _expect_shapes_alike(a: Network, b: Network) -> None:
    first = {name: tuple(p.shape) for name, p in a.parameters.items()}
    second = {name: tuple(p.shape) for name, p in b.parameters.items()}
    for name in first | second:
        if first.get(name) != second.get(name):
            raise ValueError(
                f"expected two networks of one architecture, but of the parameter '{name}' the first "
                f"{_said(first.get(name))} and the second {_said(second.get(name))}: give two models of the same "
                "class and size"
            )


def _said(shape: tuple[int, ...] | None) -> str:
    return "lacks it" if shape is None else f"has shape {shape}"
