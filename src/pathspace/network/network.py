"""A traced network: what every other part of the library is a function of."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pathspace.network.call import Call
from pathspace.network.errors import expect_network, expect_weights
from pathspace.network.program import Cut, Program, told
from pathspace.network.returned import Returned
from pathspace.network.row_blocks import row_blocks
from pathspace.network.sharded import WHAT_TO_DO
from pathspace.network.staleness import StalenessCheck
from pathspace.network.units import EdgeLabels, UnitClass
from pathspace.squared.precision import full_precision
from pathspace.squared.sharding import is_sharded
from pathspace.squared.tape import Tape

Function = TypeVar("Function", bound=Callable[..., Any])
# of models, as a network may be rescaled by another trace of its model
_RESCALINGS: WeakKeyDictionary[nn.Module, Counter[str]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Network:
    """An immutable view of a model as a weighted graph; made by :func:`pathspace.trace`.

    It refers to the model's own parameters, so what is computed from it follows training. Where
    FSDP's ``fully_shard`` split them since, it follows the parts.

    Attributes:
        model: the traced model.
        parameters: name -> parameter, for those that are edges of the graph.
        outside: names of the model's other parameters; they take the plain rule of an optimizer's
            family.
        edges: name -> the unit classes at the two ends of every element.
        num_classes: how many unit classes there are.
        class_names: where each was made.
        monomials: where activations are multiplied, products of scales: row k has the labels of the
            factors of label 1 + C + k, the k-th beyond the C classes; int64 ``[K, n]``, padded with
            zeros.
        tape: the squared network.
        nodes: unit values on the tape, for measures of a unit class as a whole: slot -> class label
            of each element.
        returned: from what the model returns to the tensors in it that rescaling leaves alone.
        call: how the model was called.
        program: the forward pass that was traced, for what depends on data.
    """

    model: nn.Module = field(repr=False)
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    outside: tuple[str, ...]
    edges: Mapping[str, EdgeLabels] = field(repr=False)
    num_classes: int
    class_names: tuple[str, ...] = field(repr=False)
    monomials: Tensor = field(repr=False)
    tape: Tape = field(repr=False)
    nodes: Mapping[int, Tensor] = field(repr=False)
    returned: Returned = field(repr=False)
    call: Call = field(repr=False)
    program: Program = field(repr=False)

    @cached_property
    def unit_classes(self) -> tuple[UnitClass, ...]:
        """The unit classes, in the order in which the network makes them."""
        shapes = MappingProxyType({name: p.shape for name, p in self.parameters.items()})
        return tuple(
            UnitClass(i, name, self.edges, shapes, self.monomials, self.num_classes)
            for i, name in enumerate(self.class_names)
        )

    @cached_property
    def names_by_id(self) -> Mapping[int, str]:
        """Names of the network's parameters by the identity of the tensor."""
        return {id(p): name for name, p in self.parameters.items()}

    @cached_property
    def row_blocks(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters that are several in one, as the weight of three projections: how many rows each of these has."""
        return row_blocks(self.tape, self.edges)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The operations at which it is cut: what enters them counts as an output, what leaves them as an input."""
        return tuple(cut for cut in self.program.cuts if cut.holds)

    def live(self, name: str) -> Tensor:
        """Return the current value of a buffer, or of a parameter outside the network."""
        outside = name in self.outside
        return (self.model.get_parameter(name) if outside else self.model.get_buffer(name)).detach()

    @cached_property
    def _staleness(self) -> StalenessCheck:
        return StalenessCheck(self.model, self.parameters, self.call, self._retraced)

    def _retraced(self) -> Call | None:
        """Return how the model is called in another trace of it; None if that finds another network, or none."""
        found = None if self.call.again is None else self.call.again(self)
        if found is None:
            return None
        self.__dict__["program"], call = found
        return replace(call, again=self.call.again)

    def _checked(self) -> dict[str, nn.Parameter]:
        """Compare the model with what was traced; return its parameters that were split over processes since."""
        split = self._staleness.check()
        # what is watched, if a change was none of the network
        self.__dict__["call"] = self._staleness.call
        return split

    def watch(self) -> None:
        """Start to notice changes of the model."""
        _ = self._staleness

    def check_current(self, *, parts: bool = False) -> None:
        """Raise RuntimeError if modules, parameters or masks of the model are no longer those that were traced.

        Args:
            parts: whether parameters may be split over processes by FSDP since; the network follows
                these, in the place of the whole ones.
        """
        if "_stale" in self.__dict__:
            raise RuntimeError(self.__dict__["_stale"])
        split = self._checked()
        if split:
            # else whoever keeps the network would keep the whole weights in memory
            self.__dict__["parameters"] = MappingProxyType({**self.parameters, **split})
            for name in ("names_by_id", "splits", "_staleness"):
                self.__dict__.pop(name, None)
        if self.splits and not parts:
            raise RuntimeError(
                f"{self.splits} parameters of the network were split over processes after tracing (FSDP's "
                f"fully_shard), and this needs whole weights: do it before the model is sharded. {WHAT_TO_DO}"
            )

    @cached_property
    def splits(self) -> int:
        """Number of its parameters that are split over processes."""
        return sum(map(is_sharded, self.parameters.values()))

    @cached_property
    def rescalings(self) -> Counter[str]:
        """Number of times that the library rescaled the model's weights, under "done"; saved states rely on it.

        All networks of a model share the counter.
        """
        return _RESCALINGS.setdefault(self.model, Counter())

    def squared(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return gamma_net^2 as a function of the *squared* parameters ``parameters``; a 0-dim tensor."""
        return self.tape.run(parameters, self.live)[0]

    def edge_factors(self, name: str, factors: Tensor) -> Tensor:
        """Return s_target / s_source for every element of a parameter.

        Args:
            name: a parameter of the network.
            factors: one positive scale per unit class, shape ``[num_classes]``.

        Returns:
            A tensor broadcastable to the parameter's shape.
        """
        edges = self.edges[name]
        return self.scale_of(factors, edges.target) / self.scale_of(factors, edges.source)

    def scale_of(self, scales: Tensor, labels: Tensor) -> Tensor:
        """Return the scale of each label of an :class:`EdgeLabels`.

        Args:
            scales: one positive scale per unit class, shape ``[num_classes]``.
            labels: labels of any shape.

        Returns:
            1, a scale, a product of scales, or the inverse of one, of the shape of ``labels``.
        """
        if scales.shape != (self.num_classes,):  # products would be read from what is too much
            raise ValueError(
                f"need one scale for each of {self.num_classes} classes, got {scales.numel()}"
            )
        labels = labels.to(scales.device)
        table = torch.cat([scales.new_ones(1), scales])
        if self.monomials.numel():
            table = torch.cat([table, _at(table, self.monomials.to(scales.device)).prod(-1)])
        return _at(table, labels)

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        model = copy.deepcopy(self.model, memo)
        if id(self) in memo:  # the model has it as an attribute
            return memo[id(self)]
        # not by name: a model that has it as an attribute is copied up to here
        parameters = MappingProxyType(
            {name: copy.deepcopy(p, memo) for name, p in self.parameters.items()}
        )
        stale = ""
        try:
            self._checked()
        except RuntimeError as error:
            # the copy of a network that does not fit its model does not fit either
            stale = str(error)
        created = replace(self, model=model, parameters=parameters)
        created.rescalings["done"] = self.rescalings["done"]
        if stale:
            created.__dict__["_stale"] = stale
        return created

    def __reduce__(self) -> Any:
        raise TypeError("a Network cannot be pickled; save the model and trace it again")

    def __copy__(self) -> Network:
        return self

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.parameters.values())
        counts = [
            f"{size} weights in {len(self.parameters)} parameters",
            f"{self.num_classes} unit classes",
        ]
        if self.outside:
            counts.append(f"{len(self.outside)} parameters outside")
        if self.call.batch_dim is None:
            counts.append("the input is one example")
        head = f"Network({', '.join(counts)})"
        return "\n".join([head, *(f"  cut at {line}" for line in told(self.cuts))])


def current_values(
    network: Network, parameters: Mapping[str, Tensor] | None = None, *, parts: bool = False
) -> Mapping[str, Tensor]:
    """Return the values to compute with: the given ones, or those of the model.

    Args:
        network: a traced network.
        parameters: a value for each of the network's parameters, by name; the model's own if None.
        parts: whether these may be split over processes.

    Raises:
        TypeError: ``network`` is no traced network.
        RuntimeError: a parameter of the model was replaced after tracing.
        KeyError: ``parameters`` lacks a parameter.
        ValueError: one of them has another shape than the network's.
    """
    expect_network(network)
    if parameters is None:
        network.check_current(parts=parts)
        return network.parameters
    for name, current in network.parameters.items():
        if name not in parameters:
            raise KeyError(
                f"parameters lacks '{name}': give a value for each of {', '.join(network.parameters)}"
            )
        if parameters[name].shape != current.shape:
            shape = tuple(parameters[name].shape)
            raise ValueError(f"'{name}' has shape {shape}, the network's {tuple(current.shape)}")
    return parameters


def in_full_precision(function: Function) -> Function:
    """Run a function of a traced network, its first argument, outside ``torch.autocast``, on weights with values."""

    @functools.wraps(function)
    def run(network: Any, *args: Any, **kwargs: Any) -> Any:
        expect_weights(network)
        one = next(iter(network.parameters.values()), None)  # none, where all of the model is a cut
        with full_precision(next(network.model.parameters()) if one is None else one):
            return function(network, *args, **kwargs)

    return cast(Function, run)


def _at(table: Tensor, labels: Tensor) -> Tensor:
    """Look up the scales of signed labels in a table of the scales of labels."""
    scale = table[labels.abs()]
    return torch.where(labels < 0, scale.reciprocal(), scale)
