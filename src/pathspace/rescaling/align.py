"""Two networks brought to the same order and the same scales of their hidden units.

Units of independently trained networks stand in any order and at any scale. Which unit of the one
is most like which of the other is an assignment problem for every group of units (see
``permutation``), given the order of all other groups; groups take turns until no order changes.
What is compared does not depend on how either network is scaled:

    paths         u_e = sqrt(kappa_e) w_e: correlations of what enters a unit, plus those of what leaves it
    weights       w_e of the member with equal norms (see ``equal_norms``)
    activations   correlations of the values of units on data

Parameters outside the network, which no rescaling changes, are compared as they are.

Letters: a the network that stays, b the one that moves, i unit of a, j unit of b, e edge.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.network import current_values
from pathspace.paths.kernel.inner import expect_alike
from pathspace.paths.kernel.kappa import kappa_in_float64
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.rescaling.assignment import best_assignment
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.permutation import (
    Group,
    Lines,
    Values,
    all_permuted,
    candidates,
    class_order,
    groups_of,
    read_axes,
    state_of,
)
from pathspace.rescaling.rescale import replace_, rescale_

By = Literal["paths", "weights", "activations"]
WAYS: tuple[str, ...] = get_args(By)
_SUMS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "add")
"""Operations that make values of units: of linear maps and of residual sums."""
SWEEPS = 50
"""How often groups take turns at most."""
_OFF_PATHS = 1e-6
"""The size of weights on no path, beside those of the others, when units are matched by paths."""


@dataclass(frozen=True, repr=False)
class Alignment:
    """The result of :func:`align_`; printed, it says how much was moved.

    Attributes:
        order: the unit class that each class was before, int64 ``[num_classes]``.
        factors: by which it was rescaled afterwards, float64 ``[num_classes]``.
        held: how many classes had to stay where they are.
        groups: how many units there are in each group that may stand in any order, those without a
            scale among them.
    """

    order: Tensor
    factors: Tensor
    held: int
    groups: tuple[int, ...] = ()

    def __repr__(self) -> str:
        count = len(self.order)
        moved = int((self.order.cpu() != torch.arange(count)).sum())
        parts = [f"{moved} of {count} unit classes moved"]
        if count:
            parts.append(f"factors {self.factors.min():.3g} to {self.factors.max():.3g}")
        parts.append(f"{self.held} held")
        if self.groups:
            groups = f"{len(self.groups)} group{'s' * (len(self.groups) != 1)}"
            parts.append(f"{sum(self.groups)} units of {groups} may stand in any order")
        return f"Alignment({', '.join(parts)})"


@tables_on_the_cpu()
@torch.no_grad()
def align_(network: Network, to: Network, *, by: By = "paths", examples: Any = None) -> Alignment:
    """Permute and rescale the hidden units of a network, in place, so that they stand as the units of another one do.

    The function stays the same. The units of each group of exchangeable ones are matched by an
    exact solution of the assignment problem, and groups take turns, since what enters a unit
    depends on the order of the layer before. Tied units (of a residual stream, or multiplied with
    each other) move together. Units that have no scale of their own are permuted too, such as those
    in front of LayerNorm, heads of attention, and channels of BatchNorm with their running
    statistics. Then every unit class is rescaled so that it stands to the member with equal norms
    as in ``to``.

    Args:
        network: a traced network, whose model's parameters and buffers are changed.
        to: another one of the same architecture, which stays as it is.
        by: what makes units alike: ``"paths"``, the path mass through each weight with the weight's
            sign; ``"weights"``, the weights of the member with equal norms; ``"activations"``, the
            values of units on examples. None depends on how the networks are scaled.
        examples: for ``"activations"``, a batch as the models are called with it.

    Returns:
        The order and the factors.

    Raises:
        ValueError: the networks have different architectures, or ``examples`` do not fit ``by``.
        OverflowError: a weight would overflow or become zero in its type.
        RuntimeError: a parameter of a model was replaced after tracing.
        TypeError: one of them is no traced network.

    Warns: UserWarning: some unit classes keep their order, because an operation treats them
        differently or is not known.

    Example:
        >>> import copy, torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> other = copy.deepcopy(model)
        >>> shuffled = torch.randperm(8)
        >>> with torch.no_grad():
        ...     for p, dim in ((other[0].weight, 0), (other[0].bias, 0), (other[2].weight, 1)):
        ...         _ = p.copy_(p.index_select(dim, shuffled))
        >>> a, b = ps.trace(model, torch.zeros(1, 4)), ps.trace(other, torch.zeros(1, 4))
        >>> _ = ps.rescaling.random_rescale_(b)
        >>> _ = ps.rescaling.align_(b, to=a)
        >>> torch.allclose(model[0].weight, other[0].weight)
        True
    """
    _check(by, examples)
    current_values(network)
    expect_alike(to, network)
    groups = groups_of(to)
    held = _held(to, groups)
    if held:
        warnings.warn(
            f"{len(held)} of {to.num_classes} unit classes keep their order, beginning with "
            f"'{to.class_names[held[0]]}': an operation treats places differently, or is not known",
            stacklevel=4,
        )
    orders = _Matching(to, network, groups, by, examples).orders()
    values = {name: value.detach() for name, value in state_of(network).items()}
    _write(network, all_permuted(values, groups, orders))
    factors = equal_norm_factors(network) / equal_norm_factors(to)
    rescale_(network, factors)
    sizes = tuple(len(group) for group in groups)
    return Alignment(class_order(network, groups, orders), factors, len(held), sizes)


def _held(network: Network, groups: Sequence[Group]) -> list[int]:
    """Return the unit classes that are in no group."""
    moved = class_order(network, groups, [torch.arange(len(group)).roll(1) for group in groups])
    return (moved == torch.arange(network.num_classes)).nonzero().flatten().tolist()


def _write(network: Network, values: Values) -> None:
    """Write permuted values into a model."""
    replace_(network, {name: values[name] for name in network.parameters})
    for name, tensor in state_of(network).items():
        if name not in network.parameters:
            tensor.detach().copy_(values[name])


def _check(by: Any, examples: Any) -> None:
    if by not in WAYS:
        raise ValueError(f"by must be one of {', '.join(map(repr, WAYS))}, got {by!r}")
    if (by == "activations") != (examples is not None):
        raise ValueError(
            f"by='activations' compares values of units on examples, and the others take none: got by={by!r} "
            f"{'without' if examples is None else 'with'} examples"
        )


class _Matching:
    """The search for the order of the units of b that is most like a.

    Args:
        a: the network that stays.
        b: the one that moves.
        groups: of both.
        by: see :func:`align_`.
        examples: likewise.
    """

    def __init__(
        self, a: Network, b: Network, groups: Sequence[Group], by: str, examples: Any
    ) -> None:
        self._groups = groups
        self._by = by
        self._parts = [_parts_of(group, groups) for group in groups]
        if by == "activations":
            self._units = [_unit_values(network, groups, examples) for network in (a, b)]
        else:
            read = path_coordinates if by == "paths" else _at_equal_norms
            self._a, self._b = (read(network) | _outside(network) for network in (a, b))

    def orders(self, start: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return for each group which unit of b comes to each place."""
        if self._by == "activations":
            return self._by_values()
        orders = (
            [torch.arange(len(group)) for group in self._groups] if start is None else list(start)
        )
        b = all_permuted(self._b, self._groups, orders)
        for _ in range(SWEEPS):
            changed = False
            for k, group in enumerate(self._groups):
                order = best_assignment(self._likeness(k, b))
                if not torch.equal(order, torch.arange(len(group))):
                    changed = True
                    orders[k] = orders[k][order]
                    b = group.permuted(b, order)
            if not changed:
                break
        return orders

    def by_features(self) -> list[Tensor]:
        """Return orders by what no permutation of other groups changes: the sorted sizes of the weights of a unit."""
        found = []
        b = self._b
        for group in self._groups:
            total = torch.zeros(len(group), len(group), dtype=torch.float64)
            for line in _of_values(group, self._a):
                ours, theirs = (
                    _slices(values[line.name], line.dim, line.places).abs().sort(1).values
                    for values in (self._a, b)
                )
                total -= torch.cdist(ours, theirs).square()
            found.append(best_assignment(total))
            # what these units contain moves with them
            b = group.permuted(b, found[-1])
        return found

    def _likeness(self, k: int, b: Values) -> Tensor:
        """Return how much every unit of a group of a is like every unit of b."""
        normalized = self._by == "paths"

        def alike(i: int, j: int) -> Tensor:
            ours = self._groups[i]
            theirs = self._groups[j]
            return likeness(ours, self._a, b, normalized=normalized, other=theirs)

        return _by_parts(self._parts[k], alike) if self._parts[k] else alike(k, k)

    def _by_values(self) -> list[Tensor]:
        """Return orders by the values of units on examples."""
        first, second = self._units

        def alike(i: int, j: int) -> Tensor:
            sums = zip(first[i], second[j], strict=True)
            return sum(
                (_correlated(ours) @ _correlated(theirs).t() for ours, theirs in sums),
                torch.zeros(len(self._groups[i]), len(self._groups[j]), dtype=torch.float64),
            )

        orders: list[Tensor] = []
        for k in range(len(self._groups)):
            parts = self._parts[k]
            values = _by_parts(parts, alike) if parts else alike(k, self._moved(k, orders))
            orders.append(best_assignment(values))
        return orders

    def _moved(self, k: int, orders: Sequence[Tensor]) -> int:
        """Return the group of b that comes to the place of a group, as the units that contain it are ordered."""
        for order, parts in zip(orders, self._parts, strict=False):
            for places in parts:
                if k in places:
                    return places[int(order[places.index(k)])]
        return k


def _parts_of(group: Group, groups: Sequence[Group]) -> list[list[int]]:
    """Return the groups whose units lie within the units of a group: a list by unit for each axis of theirs."""
    found: dict[int, list[int]] = {}
    for k, other in enumerate(groups):
        if (
            group.within is None
            and other.within is not None
            and other.within[0].root is group.axis.root
        ):
            found.setdefault(id(other.axis.root), []).append(k)
    return list(found.values())


def _by_parts(parts: Sequence[Sequence[int]], alike: Callable[[int, int], Tensor]) -> Tensor:
    """Return how much units are alike whose parts may stand in any order: the sum over parts of the most alike."""
    n = len(parts[0])
    total = torch.zeros(n, n, dtype=torch.float64)
    for places in parts:
        for i, j in itertools.product(range(n), repeat=2):
            total[i, j] += alike(places[i], places[j]).amax(1).sum()
    return total


def likeness(
    group: Group, a: Values, b: Values, *, normalized: bool, other: Group | None = None
) -> Tensor:
    """Return how much every unit i of a is like every unit j of b, ``[n, n]``.

    Args:
        group: the units of a, and of b if ``other`` is None.
        a: values for the weights of a.
        b: those of b, in the order that is known so far.
        normalized: whether products are divided by the lengths of both, once for what enters and
            once for what leaves.
        other: the units of b, such as features of another head.
    """
    n = len(group)
    total = torch.zeros(n, n, dtype=torch.float64)
    for enters in (True, False):
        products = torch.zeros_like(total)
        lengths = [torch.zeros(n, dtype=torch.float64) for _ in range(2)]
        pairs = zip(_of_values(group, a), _of_values(other or group, a), strict=True)
        for line, of_b in pairs:
            if line.enters != enters:
                continue
            ours = _slices(a[line.name], line.dim, line.places)
            theirs = _slices(b[of_b.name], of_b.dim, of_b.places)
            products += ours @ theirs.t()
            lengths[0] += ours.square().sum(1)
            lengths[1] += theirs.square().sum(1)
        if normalized:
            size = torch.outer(*lengths).sqrt()
            products = _quotients(products, size)
        total += products
    return total


def _of_values(group: Group, values: Values) -> list[Lines]:
    """Return the lines of a group in what is compared, which running statistics are not."""
    return [line for line in group.lines if line.name in values]


def _slices(value: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return what belongs to each unit, one row for each."""
    rows = value.movedim(dim, 0)
    return rows[places.reshape(-1)].reshape(len(places), -1)


def path_coordinates(network: Network) -> Values:
    """Return u = sqrt(kappa) w of all weights, float64 on the CPU: u^2 is the path mass through a weight.

    A weight on no path has its value in the balanced member instead, so small beside the others
    that it decides only between units that no path goes through.
    """
    found = kappa_in_float64(network)
    on_paths = {
        name: (found[name].sqrt() * p.detach().double()).cpu()
        for name, p in network.parameters.items()
    }
    balanced = _at_balance(network)
    largest_on_paths = _largest(on_paths) or 1.0
    largest_balanced = _largest(balanced) or 1.0
    small = _OFF_PATHS * largest_on_paths / largest_balanced
    return {
        name: torch.where(found[name].cpu() > 0, u, small * balanced[name])
        for name, u in on_paths.items()
    }


def _largest(values: Values) -> float:
    return max((float(v.abs().max()) for v in values.values() if v.numel()), default=0.0)


def _at_balance(network: Network) -> Values:
    """Return the weights of the balanced member, float64 on the CPU."""
    return _rescaled_by(network, 1.0 / node_mass(network).balance().cpu())


def _at_equal_norms(network: Network) -> Values:
    """Return the weights of the member with equal norms, float64 on the CPU."""
    return _rescaled_by(network, equal_norm_factors(network))


def _rescaled_by(network: Network, factors: Tensor) -> Values:
    weights = {name: p.detach().to("cpu", torch.float64) for name, p in network.parameters.items()}
    return {name: w * network.edge_factors(name, factors.cpu()) for name, w in weights.items()}


def _outside(network: Network) -> Values:
    """Return the parameters that are no edges of the network, float64 on the CPU."""
    return {
        name: p.detach().to("cpu", torch.float64)
        for name, p in network.model.named_parameters()
        if name not in network.parameters
    }


def _unit_values(network: Network, groups: Sequence[Group], examples: Any) -> list[list[Tensor]]:
    """Return the values of the units of each group on examples: one tensor for every sum of the model, a row a unit."""
    try:
        reading = read_axes(network, examples)
    except (RuntimeError, IndexError, TypeError) as error:  # the model's own
        raise ValueError(
            f"the model does not take the examples; give a batch as it is called with: {error}"
        ) from error
    by_key = {
        group.key: group
        for whole, divisions in candidates(reading)
        for group in (whole, *itertools.chain.from_iterable(divisions))
    }
    found: list[list[Tensor]] = []
    for group in groups:
        rows = []
        sums = (tensor for name, tensor in reading.results if name in _SUMS)
        for tensor in sums if group.key in by_key else ():
            for d, dim in enumerate(reading.reader.of(tensor)):
                places = by_key[group.key].places_in(dim)
                if places is not None:
                    rows.append(_slices(tensor, d, places))
        found.append(rows)
    return found


def _correlated(rows: Tensor) -> Tensor:
    """Return rows without their means, of length 1."""
    rows = rows - rows.mean(1, keepdim=True)
    lengths = rows.norm(dim=1, keepdim=True)
    return _quotients(rows, lengths)


def _quotients(values: Tensor, sizes: Tensor) -> Tensor:
    """Divide values by sizes; 0 where these are 0."""
    return torch.where(sizes > 0, values / torch.where(sizes > 0, sizes, 1.0), 0.0)


@dataclass(frozen=True)
class Equivalence:
    """The result of :func:`equivalent`; true if the networks are equal up to permutation and rescaling.

    Attributes:
        equal: the verdict.
        where: the first unit class, parameter or buffer that differs; empty if none does.
        difference: how far the weights there are apart, relative to the largest; 0 if none differs,
            infinite for buffers and parameters outside the network, which are compared bit by bit.
    """

    equal: bool
    where: str = ""
    difference: float = 0.0

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        """Return the verdict in a sentence."""
        if self.equal:
            return "equal up to permutation and rescaling"
        # what no rescaling changes is compared bit by bit
        size = f" by {self.difference:.2g} (relative)" if math.isfinite(self.difference) else ""
        return f"not equal up to permutation and rescaling: {self.where} differs{size}"


@tables_on_the_cpu()
@torch.no_grad()
def equivalent(a: Network, b: Network, *, tolerance: float = 1e-5) -> Equivalence:
    """Tell whether two networks are equal up to a permutation and a rescaling of their hidden units.

    The units are matched by path mass, the second network is rescaled so that most weights at every
    unit are those of the first, and all are compared. Equal weights are a proof that the functions
    are equal. Unequal ones are no proof of the contrary: units that are nearly alike may be matched
    wrongly, and two networks may compute one function without these symmetries.

    Args:
        a: a traced network.
        b: another one of the same architecture. Neither is changed.
        tolerance: the largest difference, relative to the largest weight at the same unit, that
            passes as rounding.

    Returns:
        The verdict, which is true or false, with the first class that differs.

    Raises:
        ValueError: the networks have different architectures.
        RuntimeError: a parameter of a model was replaced after tracing.
        TypeError: one of them is no traced network.

    Example:
        >>> import copy, torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> a, b = (ps.trace(m, torch.zeros(1, 4)) for m in (model, copy.deepcopy(model)))
        >>> _ = ps.rescaling.random_rescale_(b)
        >>> print(ps.rescaling.equivalent(a, b))
        equal up to permutation and rescaling
    """
    for network in (a, b):
        current_values(network)
    expect_alike(a, b)
    groups = groups_of(a)
    matching = _Matching(a, b, groups, "paths", None)
    orders = matching.orders(matching.by_features())
    ours = _at_balance(a)
    state = {name: value.detach().cpu() for name, value in state_of(b).items()}
    state = all_permuted(state, groups, orders)
    outside = _different_outside(a, state)
    if outside:
        return Equivalence(False, outside, float("inf"))
    theirs = {name: state[name].double() for name in a.parameters}
    factors = _factors_between(a, theirs, ours)
    theirs = {name: value * a.edge_factors(name, factors) for name, value in theirs.items()}
    return _compared(a, ours, theirs, tolerance)


def _different_outside(network: Network, values: Values) -> str:
    """Return what differs of all that no unit class is rescaled with: parameters outside, and buffers."""
    for name, own in state_of(network).items():
        if name not in network.parameters and not torch.equal(own.detach().cpu(), values[name]):
            kind = "parameter" if name in network.outside else "buffer"
            return f"the {kind} '{name}'" + (" outside the network" if kind == "parameter" else "")
    return ""


def _factors_between(network: Network, values: Values, wanted: Values) -> Tensor:
    """Return factors that make values those wanted, at most of the weights that enter each unit class.

    From the inputs on, the factor of a class is the median over the weights between it and classes
    whose factor is known, so that a few weights that differ do not decide on it.
    """
    C = network.num_classes
    x = torch.zeros(C, dtype=torch.float64)
    known = torch.zeros(C, dtype=torch.bool)
    for _ in range(C):
        places = []
        logs = []
        for name, value in values.items():
            ratios = (wanted[name] / value).abs().log()
            for labels, log in _told(network, name, x, known, ratios):
                places.append(labels)
                logs.append(log)
        place = torch.cat(places)
        log = torch.cat(logs)
        if not len(place):
            break
        by_value = log.argsort()
        ordered = by_value[place[by_value].argsort(stable=True)]
        found, counts = place[ordered].unique_consecutive(return_counts=True)
        middle = counts.cumsum(0) - counts + (counts - 1) // 2
        x[found] = log[ordered][middle]
        known[found] = True
    return x.exp()


def _told(
    network: Network, name: str, x: Tensor, known: Tensor, ratios: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return classes of unknown factor at one end of a parameter's weights, and log factors that the weights tell."""
    C = network.num_classes
    edges = network.edges[name]
    # of a product of classes the factor is taken as not known
    beyond = torch.zeros(len(network.monomials), dtype=torch.bool)
    is_known = torch.cat([torch.ones(1, dtype=torch.bool), known, beyond])
    log = torch.cat(
        [torch.zeros(1, dtype=torch.float64), x, torch.zeros(len(beyond), dtype=torch.float64)]
    )
    told = []
    for one, other, sign in ((edges.target, edges.source, 1), (edges.source, edges.target, -1)):
        one, other = (labels.cpu().expand(ratios.shape) for labels in (one, other))
        wanted = ratios.isfinite() & ~is_known[one.abs()] & is_known[other.abs()] & (one.abs() <= C)
        # log ratio = x_target - x_source
        found = one.sign() * (sign * ratios + other.sign() * log[other.abs()])
        told.append((one.abs()[wanted] - 1, found[wanted]))
    return told


def _compared(network: Network, ours: Values, theirs: Values, tolerance: float) -> Equivalence:
    """Compare weights class by class, then those that no class touches."""
    places = 1 + network.num_classes
    largest = torch.zeros(places, dtype=torch.float64)
    apart = torch.zeros(places, dtype=torch.float64)
    for name, one in ours.items():
        edges = network.edges[name]
        for labels in (edges.target.cpu(), edges.source.cpu()):
            single = labels.abs()
            single = (
                torch.where(single > network.num_classes, 0, single).expand(one.shape).reshape(-1)
            )
            largest.scatter_reduce_(0, single, one.abs().reshape(-1), "amax")
            apart.scatter_reduce_(0, single, (one - theirs[name]).abs().reshape(-1), "amax")
    relative = torch.where(largest > 0, apart / torch.where(largest > 0, largest, 1.0), apart)
    # label 0 is no class: inputs, outputs and biases of outputs
    bad = (relative > tolerance) | relative.isnan()
    wrong = bad[1:].nonzero().reshape(-1).tolist()
    if wrong:
        return Equivalence(
            False, f"'{network.class_names[wrong[0]]}'", float(relative[1 + wrong[0]])
        )
    if bool(bad[0]):
        return Equivalence(False, "a weight at inputs or outputs", float(relative[0]))
    return Equivalence(True)


def merge(networks: Sequence[Network], *, by: By = "paths", examples: Any = None) -> nn.Module:
    """Average several networks of one architecture, aligned to the first one.

    All are taken to the member with equal norms, the others are aligned to the first one (see
    :func:`align_`), and weights are averaged. That the average is any good is not said: measure it,
    and compare it with the average without alignment. Running statistics of BatchNorm are averaged
    too, and should be measured anew.

    Args:
        networks: traced networks. None is changed.
        by: see :func:`align_`.
        examples: likewise.

    Returns:
        A copy of the first network's model with the averaged weights.

    Raises:
        ValueError: there are fewer than two networks, their architectures differ, or ``examples``
            do not fit ``by``.
        RuntimeError, TypeError, OverflowError: see :func:`align_`.

    Warns:
        UserWarning: see :func:`align_`.

    Example:
        >>> import torch, pathspace as ps
        >>> def network():
        ...     layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ...     return ps.trace(torch.nn.Sequential(*layers), torch.zeros(1, 4))
        >>> ps.rescaling.merge([network(), network()])(torch.zeros(1, 4)).shape
        torch.Size([1, 2])
    """
    if len(networks) < 2:
        raise ValueError(f"expected two networks or more to merge, got {len(networks)}")
    copies = [copy.deepcopy(network) for network in networks]
    first = copies[0]
    rescale_(first, equal_norm_factors(first))
    for other in copies[1:]:
        align_(other, first, by=by, examples=examples)
    states = [network.model.state_dict() for network in copies]
    first.model.load_state_dict(_mean_of(states))
    return first.model


def _mean_of(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of tensors of real numbers, and the first of all others."""
    result = {}
    for name, value in states[0].items():
        if value.is_floating_point():
            every = torch.stack([state[name].to(value.device, torch.float64) for state in states])
            result[name] = every.mean(0).to(value.dtype)
        else:
            result[name] = value
    return result
