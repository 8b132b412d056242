"""Param groups by what parameters do in a network: which are hidden matrices, and which stand at its ends.

Muon is made for the matrices between hidden layers, and its authors leave embeddings, the last
layer, gains and biases to AdamW (Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An
optimizer for hidden layers in neural networks", 2024). Names of modules do not say which parameters
those are. The traced network does: a matrix is hidden if another one comes before it on the way
from the inputs, and another one after it on the way to the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pathspace.network import Network
from pathspace.network.network import current_values
from pathspace.network.rules.contraction import Form
from pathspace.network.trace.values import identity
from pathspace.squared.normalization import Normalization
from pathspace.squared.recurrence import Stack
from pathspace.squared.tape import Instruction

Parameters = Mapping[str, nn.Parameter]

_HIDDEN = "hidden"
_FIRST = "first"
_LAST = "last"


@dataclass(frozen=True, repr=False)
class ParamGroups:
    """The parameters of a model, each in one group; made by :func:`param_groups`.

    Iterating yields the groups that are not empty as param groups of ``torch.optim``: dicts with
    ``params``, the name of the group as ``kind``, and ``use_muon``, which :class:`PathMuon` reads:
    True for ``hidden``, ``fused`` and ``filters``. Optimizers that do not know an option keep it
    unread.

    Attributes:
        hidden: name -> matrix, with other matrices before and after it.
        fused: hidden matrices that are several in one, as the projections to queries, keys and
            values. See ``blocks``.
        filters: hidden weights of more than two dimensions, as those of convolutions, which
            ``torch.optim.Muon`` refuses and :class:`PathMuon` steps as matrices of their rows.
        embeddings: weights that read inputs of the model: tables, also of learned positions, and
            first layers. Those that are tied to the last layer are here, too.
        readouts: weights without another one after them: last layers.
        vectors: gains and biases.
        outside: parameters that do not belong to the network.
        blocks: name of a fused matrix -> how many rows each of its matrices has.
    """

    hidden: Parameters
    fused: Parameters
    filters: Parameters
    embeddings: Parameters
    readouts: Parameters
    vectors: Parameters
    outside: Parameters
    blocks: Mapping[str, tuple[int, ...]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the groups that are not empty, as param groups."""
        for kind, parameters in self._by_kind().items():
            if parameters:
                use_muon = kind in ("hidden", "fused", "filters")
                yield {"params": list(parameters.values()), "kind": kind, "use_muon": use_muon}

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    def __str__(self) -> str:
        """Return a line for each group: its parameters, and their names."""
        lines = []
        for kind, parameters in self._by_kind().items():
            size = sum(p.numel() for p in parameters.values())
            lines.append(f"{kind:10s}  {size:9d} weights  {', '.join(parameters)}".rstrip())
        return "\n".join(lines)

    def _by_kind(self) -> dict[str, Parameters]:
        return {kind: getattr(self, kind) for kind in _KINDS}


_KINDS = tuple(f.name for f in fields(ParamGroups) if f.name != "blocks")


def param_groups(network: Network) -> ParamGroups:
    """Sort the parameters of a model by what they do, as the trace tells it.

    Every parameter is in one group, a shared one once. Cuts of the network and modules left outside
    do not matter: what leaves them counts as computed from what entered.

    Args:
        network: a traced network.

    Returns:
        The groups, by name, and as param groups for an optimizer.

    Raises:
        TypeError: ``network`` is no traced network.
        RuntimeError: a parameter of the model was replaced after tracing.

    Example:
        >>> import torch, pathspace as ps
        >>> relu = torch.nn.ReLU()
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), relu, torch.nn.Linear(8, 8), relu, torch.nn.Linear(8, 2)
        ... )
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> groups = ps.optim.param_groups(network)
        >>> [*groups.hidden], [*groups.embeddings], [*groups.readouts]
        (['2.weight'], ['0.weight'], ['4.weight'])
        >>> optimizer = ps.optim.PathMuon(groups, network, lr=1e-3)
        >>> muon = torch.optim.Muon(groups.hidden.values(), lr=1e-3)
    """
    current_values(network, parts=True)
    roles = _roles(network)
    sorted_: dict[str, dict[str, nn.Parameter]] = {kind: {} for kind in _KINDS}
    for name, p in network.parameters.items():
        sorted_[_kind(network, name, roles.get(name, set()))][name] = p
    sorted_["outside"] = {name: network.model.get_parameter(name) for name in network.outside}
    blocks = {name: network.row_blocks[name] for name in sorted_["fused"]}
    return ParamGroups(
        **{kind: MappingProxyType(parameters) for kind, parameters in sorted_.items()},
        blocks=MappingProxyType(blocks),
    )


def _kind(network: Network, name: str, roles: set[str]) -> str:
    """Return the group of a parameter of the network that has these roles as a matrix."""
    shape = network.parameters[name].shape
    if not roles:
        is_table = network.edges[name].bias and sum(size > 1 for size in shape) > 1
        return "embeddings" if is_table else "vectors"
    if _HIDDEN not in roles:
        return "embeddings" if _FIRST in roles else "readouts"
    if len(shape) > 2:
        return "filters"
    return "fused" if name in network.row_blocks else "hidden"


@dataclass
class _Step:
    """Something that makes values of others.

    Attributes:
        entering: slots of the values that are no weights.
        leaving: slots of the results.
        matrices: names of the parameters that it reads as matrices.
        inner: those of them that are hidden wherever it stands, as the recurrent ones of a layer of
            several.
        mixes: whether it has matrices, its own or of a cut or of a module left outside.
    """

    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    matrices: tuple[str, ...]
    inner: frozenset[str]
    mixes: bool


def _roles(network: Network) -> dict[str, set[str]]:
    """Return the roles of each matrix at its uses, by name: hidden, first, or last."""
    steps = _steps(network)
    # forwards: the slots of values that a matrix was applied to
    computed: set[int] = set()
    follows_matrix: list[bool] = []
    for step in steps:
        follows = not computed.isdisjoint(step.entering)
        follows_matrix.append(follows)
        if step.mixes or follows:
            computed.update(step.leaving)
    # backwards: the slots of values that a matrix will be applied to
    read_later: set[int] = set()
    roles: dict[str, set[str]] = {}
    for step, follows in zip(reversed(steps), reversed(follows_matrix), strict=True):
        precedes = not read_later.isdisjoint(step.leaving)
        if step.mixes or precedes:
            read_later.update(step.entering)
        role = _HIDDEN if follows else _FIRST
        if not precedes and not step.inner:
            role = _LAST
        for name in step.matrices:
            roles.setdefault(name, set()).add(_HIDDEN if name in step.inner else role)
    return roles


def _steps(network: Network) -> list[_Step]:
    """Return the steps of the model in their order: instructions of the tape that make no weight, and cuts."""
    tape = network.tape
    weights = {leaf.slot: (leaf.name,) for leaf in tape.leaves if leaf.kind == "parameter"}
    shapes = _shapes(network)
    steps: dict[int, _Step] = {}
    for instruction in tape.instructions:
        read = _names_read(instruction, weights)
        if _makes_a_weight(network, instruction, weights, read):
            # gains of a normalized weight are smaller than the weight
            largest = max(read, key=lambda name: shapes[name].numel())
            weights.update(dict.fromkeys(instruction.outputs, (largest,)))
            continue
        matrices = _matrices(network, instruction, weights, shapes)
        steps[instruction.outputs[0]] = _Step(
            entering=tuple(slot for slot in instruction.inputs if slot not in weights),
            leaving=tuple(instruction.outputs),
            matrices=matrices,
            inner=_inner(instruction, weights),
            mixes=bool(matrices),
        )
    steps.update(_crossings(network, shapes))
    return [steps[slot] for slot in sorted(steps)]


def _shapes(network: Network) -> dict[str, torch.Size]:
    """Return the shapes of all parameters of the model, by name."""
    shapes = {name: p.shape for name, p in network.model.named_parameters()}
    shapes.update((name, p.shape) for name, p in network.parameters.items())
    return shapes


def _crossings(network: Network, shapes: Mapping[str, torch.Size]) -> dict[int, _Step]:
    """Return what lies between the parts of a network that is cut, by the slot of its result."""
    steps = {}
    for slot, crossing in network.program.crossings.items():
        mixes = any(len(shapes[name]) > 1 for name in crossing.parameters)
        steps[slot] = _Step(crossing.entering, (slot,), (), frozenset(), mixes)
    return steps


def _makes_a_weight(
    network: Network,
    instruction: Instruction,
    weights: Mapping[int, Sequence[str]],
    read: Sequence[str],
) -> bool:
    """Return whether the result of an instruction is a weight: a view of a parameter, or a normalized one.

    Args:
        network: the network.
        instruction: of its tape.
        weights: by slot, the names of the parameters of which the value there is made, for all
            slots of weights.
        read: the names of the parameters that the instruction reads.
    """
    if instruction.of_parameter:
        return True
    if not all(slot in weights for slot in instruction.inputs):
        return False
    # the direction v of a normalized weight g v / ||v||, unless these are learned units
    reads_units = any(name in network.edges and network.edges[name].bias for name in read)
    is_direction = instruction.function is identity and not reads_units
    # its product with the gain g
    is_normalized = instruction.form == "product" and instruction.statistic is not None
    return is_direction or is_normalized


def _matrices(
    network: Network,
    instruction: Instruction,
    weights: Mapping[int, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[str, ...]:
    """Return the parameters that an instruction reads as matrices: not as gains or biases."""
    function = instruction.function
    if isinstance(instruction.form, Normalization) or function is torch.mul:
        return ()
    if isinstance(function, Form) and set(function.second) <= set(function.first) & set(
        function.out
    ):
        return ()  # an einsum that multiplies element by element
    return tuple(
        name
        for name in _names_read(instruction, weights)
        if len(shapes[name]) > 1 and not (name in network.edges and network.edges[name].bias)
    )


def _names_read(instruction: Instruction, weights: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the names of the parameters that an instruction reads."""
    return [name for slot in instruction.inputs for name in weights.get(slot, ())]


def _inner(instruction: Instruction, weights: Mapping[int, Sequence[str]]) -> frozenset[str]:
    """Return the parameters of a stack of recurrent layers that do not read what enters it."""
    stack = instruction.form
    if not isinstance(stack, Stack):
        return frozenset()
    every = set(_names_read(instruction, weights))
    position = 1
    for cell in range(stack.directions):  # of the first layer
        every.difference_update(weights.get(instruction.inputs[position], ()))
        position += stack.per_cell + stack.starts[cell]
    return frozenset(every)
