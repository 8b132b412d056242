"""The network written out: every unit at every time step and position a node of its own (S19 Section 3).

A copy of the model runs once in float64, in evaluation form, on one example. Every operation it calls is either *gated*
(ReLU and its kin, maxima: an edge is open, closed, or open by a slope, depending on the data) or affine in the
activations and in the parameters. The edges of the latter are found by probing it (see ``probing``), and the result is
checked against what the operation really returned, so that an operation that is neither raises an error.

Letters: u -> v an edge of the written-out graph, w_e the weight it uses, c its fixed factor, g its gate; node 0 is the
bias node; nodes are numbered so that u < v.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pathspace.network.errors import UntraceableError
from pathspace.network.program import Cut
from pathspace.network.registered import registration_of
from pathspace.network.rules import RULES
from pathspace.network.rules.elementwise import counted
from pathspace.network.rules.scale_free import COMPARISONS, SIGNS
from pathspace.network.trace.drawn import RANDOM
from pathspace.network.trace.functions import (
    CLAMPS,
    ENDINGS,
    OF_FORM,
    SHAPED_FACTORIES,
    changes,
    short_name,
)
from pathspace.paths.listing.affine import NOT_WRITTEN, Operation, Terms, check_terms, floats, split, terms_of
from pathspace.paths.listing.gates import REDUCED, Gated, gated, gated_by_data, is_relu
from pathspace.paths.listing.loops import PackedSequences, bags, cell, layers
from pathspace.paths.listing.probing import reads
from pathspace.paths.listing.tensor_roles import JOINS, NONE, TensorRoles, Weights
from pathspace.paths.space.reduction import ReductionGraph
from pathspace.squared.precision import AtLeast


class Unroller(TensorRoles, TorchFunctionMode):
    """Writes down edges, gates and inputs while a model runs on one example."""

    def __init__(self, graph: ReductionGraph, *, with_edges: bool, cuts: Iterable[Cut] = ()) -> None:
        super().__init__(graph, with_edges=with_edges)
        self._cuts = {(cut.operation, cut.number): cut for cut in cuts}
        self._calls: Counter[str] = Counter()  # of the model's own operations, by name
        self._apart = False  # a loop is written out
        self.num_gates = 0
        self.gates: list[Tensor] = []
        self.entered: list[tuple[Tensor, Tensor]] = []  # what flows into a cut or an outside module
        # what comes out of a softmax or the like after the last parameter, and what it was computed from
        self._tails: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
        self.paused = False
        self.buffers: set[int] = set()  # the memory of the model's buffers, which may change
        self._packed = PackedSequences()
        self._terms_by_form: dict[tuple[Any, ...], tuple[Terms, Operation]] = {}
        self._exact = cache(AtLeast(torch.float64).of)  # terms are looked up by the function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, registered = short_name(func), registration_of(func)
        if registered is not None and not self.paused and name not in {cut for cut, _ in self._cuts}:
            if registered.like is None:
                with self:
                    return registered.decomposition(*args, **kwargs)
            name = registered.like
        func = self._exact(func)  # casts of the model lose nothing; what is found out about it has none
        if self.paused:
            return func(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not self._apart:
            cut = self._cuts.get((name, self._calls[name]))
            self._calls[name] += 1
            if cut is not None and name == "glu":
                return self._gated_linear(cut, *args, **kwargs)
            if cut is not None:
                return self._cut(cut, func, args, kwargs, tensors)
        tensors = tensors[:1] if name in OF_FORM else tensors
        units = any(self.is_unit(t) for t in tensors)
        weights = any(id(t) in self._weights for t in tensors)
        data = any(id(t) in self._data for t in tensors)
        if any(id(t) in self._tails for t in tensors) or (units and self._ends(name, args, kwargs, tensors)):
            if weights:
                why = "a parameter meets what is no sum of paths, such as a weight made by relu or abs"
                raise UntraceableError(name, "", why, NOT_WRITTEN)
            entered = [node for t in tensors for node in self.before_the_end(t)]
            result = func(*args, **kwargs)
            self._tails.update((id(t), (t, entered)) for t in pytree.tree_leaves(result))
            return result
        if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
            fixed = {"fixed": id(args[1]) not in self._data} if name == "_pack_padded_sequence" else {}
            with self._written_out():
                return (self._packed.pack if fixed else self._packed.pad)(*args, **fixed)
        if not (units or weights) and self._moves_inputs(name, tensors):
            result = self._affine(name, func, args, kwargs)
            self._keep(self._data, args[0] if changes(name) else result)
            return result
        made = not (units or weights) or name.startswith("new_") or name.endswith("_like")
        if made and name not in RANDOM:
            result = func(*args, **kwargs)
            # no inputs, though x is one: x.new_zeros(...), and a gate times the zeros that a recurrence begins with
            start = name in ("mul", "__mul__", "__rmul__") and any(map(self._is_zero, tensors))
            constant = name in SHAPED_FACTORIES or start
            if not data or units or weights or constant:
                return result
            if changes(name):
                self._forget_nodes(args[0])
            return self._keep(self._data, result)
        if name in ("rnn_relu", "rnn_relu_cell"):
            with self._written_out():
                return self._recurrent(name, *args, **kwargs)
        # random numbers are inputs; what the others open and close is known from the example
        if name in COMPARISONS or name in SIGNS or name in RANDOM or name == "argsort":
            return self._keep(self._data, func(*args, **kwargs))
        if name == "__setitem__" and data and id(args[1]) in self._data:
            return self._masked_write(*args)
        if name == "batch_norm" and args[1] is None:
            why = "it has no running statistics, so what it computes depends on the other examples of a batch"
            raise UntraceableError(name, "", why, "Build it with track_running_stats=True")
        if name in _NORMALIZATIONS and (units or weights):
            why = "it divides by a statistic of what enters, which is no fixed factor of a path"
            raise UntraceableError(name, "", why, NOT_WRITTEN)
        if name == "embedding_bag" and data:
            with self._written_out():
                return bags(*args, **kwargs)
        if name == "embedding" and data:
            return self._embedding(func, args, kwargs)
        if name == "__getitem__" and data and self._weight(args[0]):
            return self._embedding(functional.embedding, (args[1], args[0]), {})
        gate = gated(name, func, args, kwargs)
        if gate is None and (data or name in REDUCED) and (not weights or name in _PICKS):
            gate = gated_by_data(name, func, args, kwargs, self._units, self._data)
        if gate is not None:
            return self._gated(gate, func, args, kwargs)
        if not units and not data and name not in _PRODUCTS:
            return self._of_weights(name, func, args, kwargs)
        return self._affine(name, func, args, kwargs)

    @contextmanager
    def _written_out(self) -> Iterator[None]:
        """Operations from here on stand for one of the model's."""
        before, self._apart = self._apart, True
        try:
            with self:
                yield
        finally:
            self._apart = before

    def _cut(self, cut: Cut, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """An operation at which the network is cut: what enters it is an output, what leaves it an input."""
        entering = [t for t in tensors if self.is_unit(t)]
        # of parameters that lead to no output, and are outside the network, nothing is a unit
        if [self.is_unit(t) for t in tensors] != list(cut.entering) and (cut.counts or entering):
            why = "the network was cut there, and written out the model takes another way than it did then"
            raise UntraceableError(
                cut.operation, cut.module, why, "Trace it in evaluation form (model.eval())"
            )
        if any(id(t) in self._weights for t in tensors):
            why = "it takes a parameter of the network"
            raise UntraceableError(cut.operation, cut.module, why, NOT_WRITTEN)
        before = [(t._version, t.detach().clone(), *self._units[id(t)]) for t in entering]
        result = func(*args, **kwargs)
        if cut.counts:
            self.entered += [(t if t._version == v else copy, nodes) for v, copy, t, nodes in before]
        for created in pytree.tree_leaves(result):
            self._units.pop(id(created), None)  # written to in place
        return self._keep(self._data, result)

    def _gated_linear(self, cut: Cut, input: Tensor, dim: int = -1) -> Tensor:
        """The half that enters the sigmoid is where the network is cut, the other one goes on."""
        with self._written_out():
            a, b = input.chunk(2, dim)
        gate = self._cut(cut, torch.sigmoid, (b,), {}, [b])
        with self._written_out():
            return a * gate

    def before_the_end(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A tensor that holds units, with their nodes, or those that a function of units at the end depends on."""
        if self.is_unit(tensor):
            return [self._units[id(tensor)]]
        return self._tails[id(tensor)][1] if id(tensor) in self._tails else []

    def _ends(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        """Whether the function has a place after the last parameter only."""
        if name in CLAMPS:
            return not is_relu(args, kwargs)
        if name in ENDINGS and name in RULES:  # a product of activations, or a division by one
            acts = [self.is_unit(t) for t in tensors]
            return sum(acts) > 1 or ("div" in name and acts[-1] and args[0] is not tensors[-1])
        return name in ENDINGS or name in ("softmax", "log_softmax")

    def _recurrent(self, name: str, *args: Any) -> Any:
        """``nn.RNN`` and ``nn.RNNCell`` as the loops that they stand for."""
        if name == "rnn_relu_cell":
            return cell(args[0], self._start(args[1]), *args[2:])
        if isinstance(args[2], Tensor):
            return self._packed.run(*args[:2], lambda number: self._start(args[2], number), *args[3:])
        return layers(args[0], lambda number: self._start(args[1], number), *args[2:])

    def _masked_write(self, x: Tensor, mask: Tensor, item: Any) -> None:
        """``x[mask] = item`` as the choice that it is."""
        with self._written_out():
            chosen = torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), item, x)
        x.copy_(chosen)
        self._bind(x, self._units[id(chosen)][1])
        self._spread(x)

    def _is_zero(self, t: Tensor) -> bool:
        """Whether a tensor is a constant of zeros."""
        known = id(t) in self._data or t.untyped_storage().data_ptr() in self.buffers
        return t.dim() > 0 and not known and not bool(t.any())

    def _start(self, hx: Tensor, number: int | None = None) -> Tensor | None:
        """The initial state of a recurrent cell; None for zero."""
        if self.nodes_of(hx) is None and not self._weight(hx):
            if id(hx) in self._data and bool(hx.any()):
                raise ValueError(
                    "a state carried over from earlier data must be zero where paths are written down"
                )
            if not bool(hx.any()):
                return None
        return hx if number is None else hx[number]

    def _embedding(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Rows of a table: a linear map of one-hot inputs."""
        tokens, table = args[0], args[1]
        result = func(*args, **kwargs)
        weights = self._weights[id(table)][1]
        words, width = table.shape
        sources = self._new_nodes(torch.Size([tokens.numel(), words]))
        nodes = self._new_nodes(result.shape)
        self.inputs.append(sources.flatten())
        self.input_values.append(functional.one_hot(tokens.flatten(), words).flatten().double())
        shape = (tokens.numel(), words, width)
        ends = sources[:, :, None], nodes.reshape(-1, 1, width)
        self._edges(*(t.expand(shape) for t in (*ends, weights.numbers, weights.factors)))
        return self._bind(result, nodes)

    def _gated(self, gate: Gated, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """ReLU and its kin, and maxima."""
        sources = torch.cat([self._sources(t).flatten() for t in gate.operands])
        o, i, opened = gate.edges
        result = func(*args, **kwargs)
        nodes = self._new_nodes((result if isinstance(result, Tensor) else result[0]).shape)
        numbers = torch.arange(self.num_gates, self.num_gates + len(o))
        self.num_gates += len(o)
        self.gates.append(opened)
        self._edges(sources[i], nodes.flatten()[o], NONE, torch.ones(len(o), dtype=torch.float64), numbers)
        if not isinstance(result, Tensor):  # a maximum and its indices
            self._keep(self._data, result[1:])
        self._bind(result if isinstance(result, Tensor) else result[0], nodes)
        if any(result is t for t in gate.operands):
            self._spread(result)
        return result

    def _of_weights(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A view of a parameter, or a parameter times a constant."""
        place, operand = next(
            (place, t) for place, t in enumerate(pytree.tree_leaves((args, kwargs))) if self._weight(t)
        )
        weights = self._weights[id(operand)][1]
        result = func(*args, **kwargs)
        pieces = floats(result)
        if not pieces:
            return result  # a shape, a type
        apply = Operation(func, args, kwargs, [place], writes=False)
        values = reads(lambda w: apply([w]), operand.numel())
        constant = apply([torch.zeros(operand.numel(), dtype=torch.float64)])
        if values.target.unique().numel() != len(values.target) or bool(constant.any()):
            raise UntraceableError(name, "", "its result is no view of a parameter")
        numbers, factors = torch.zeros(len(constant), dtype=torch.long), torch.zeros_like(constant)
        numbers[values.target] = weights.numbers.flatten()[values.source]
        factors[values.target] = values.factor * weights.factors.flatten()[values.source]
        for piece, n, f in zip(pieces, split(numbers, pieces), split(factors, pieces), strict=True):
            self._weights[id(piece)] = (piece, Weights(n, f))
        return result

    def _affine(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Everything else: affine in the activations and in the parameters."""
        leaves = [(p, t) for p, t in enumerate(pytree.tree_leaves((args, kwargs))) if isinstance(t, Tensor)]
        weighted = [(p, t) for p, t in leaves if self._weight(t)]
        read = {id(t) for _, t in leaves if t.is_floating_point() or name in _NUMBERS} & self._data.keys()
        acts = [(p, t) for p, t in leaves if self.is_unit(t) or id(t) in read]
        if name in _PRODUCTS and not acts:  # a parameter in the place of activations
            acts, weighted = weighted[:1], weighted[1:]
        sources = [self._sources(t).flatten() for _, t in acts]
        weights = [self._weights[id(t)][1] for _, t in weighted]
        values = [t.detach().double().flatten().clone() for _, t in (*acts, *weighted)]
        writes = changes(name)
        operation = Operation(func, args, kwargs, [p for p, _ in (*acts, *weighted)], writes=writes)
        if writes:  # before the function changes its argument
            operation.leaves = [t.detach().clone() if isinstance(t, Tensor) else t for t in operation.leaves]
        result = func(*args, **kwargs)
        pieces = floats(args[0] if writes else result)
        if not pieces:  # where a maximum is: known from the example
            return self._keep(self._data, result)
        actual = torch.cat([t.detach().double().reshape(-1) for t in pieces])
        if self.with_edges:
            terms = self._terms(operation, values, len(acts))
            check_terms(name, terms, values, len(acts), actual)
            if name in _PICKS or RULES.get(name) is RULES["add"]:
                terms = replace(terms, constant=counted(terms.constant))
            nodes = self._place(terms, sources, weights)
        else:
            nodes = self._new_nodes(actual.shape)
        for piece, part in zip(pieces, split(nodes, pieces), strict=True):
            self._bind(piece, part)
        if writes:
            self._spread(args[0])
        return result

    def _terms(self, operation: Operation, values: list[Tensor], operands: int) -> Terms:
        """The terms of an operation; found once for all steps of a loop."""
        form = operation.form(), operands
        if form[0] is None:
            return terms_of(operation, values, operands)
        if form not in self._terms_by_form:
            self._terms_by_form[form] = terms_of(operation, values, operands), operation
        return self._terms_by_form[form][0]

    def _place(self, terms: Terms, sources: list[Tensor], weights: list[Weights]) -> Tensor:
        """Nodes for the result of an affine operation: the old ones where it only moves them."""
        size = len(terms.constant)
        if terms.fixed and not terms.mixed and not terms.biased and not bool(terms.constant.any()):
            target = torch.cat([r.target for _, r in terms.fixed])
            factor = torch.cat([r.factor for _, r in terms.fixed])
            if len(target) == size and target.unique().numel() == size and bool((factor == 1).all()):
                nodes = torch.empty(size, dtype=torch.long)
                nodes[target] = torch.cat([sources[a][r.source] for a, r in terms.fixed])
                return nodes
        nodes = self._new_nodes(torch.Size([size]))
        (where,) = terms.constant.nonzero(as_tuple=True)
        self._edges(torch.zeros_like(where), nodes[where], NONE, terms.constant[where])
        for a, r in terms.fixed:
            self._edges(sources[a][r.source], nodes[r.target], NONE, r.factor)
        for b, r in terms.biased:
            used, factors = (t.flatten()[r.source] for t in (weights[b].numbers, weights[b].factors))
            self._edges(torch.zeros_like(used), nodes[r.target], used, r.factor * factors)
        for a, b, r in terms.mixed:
            used, factors = (t.flatten()[r.member] for t in (weights[b].numbers, weights[b].factors))
            self._edges(sources[a][r.source], nodes[r.target], used, r.factor * factors)
        return nodes

    def run_outside(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module left to the plain rule: what enters it is an output, what leaves it an input."""
        entering = filter(self.is_unit, pytree.tree_leaves((args, kwargs)))
        self.entered += [self._units[id(t)] for t in entering]
        paused, self.paused = self.paused, True
        try:
            return self._keep(self._data, forward(*args, **kwargs))
        finally:
            self.paused = paused


_NORMALIZATIONS = frozenset(["layer_norm", "rms_norm", "group_norm"])  # others may be in evaluation form
_PICKS = ("where", "masked_fill", "masked_fill_", "gather", "index_select")  # also of what is learned

_NUMBERS = JOINS | {name for name, rule in RULES.items() if rule in (RULES["add"], RULES["mul"])}
"""What takes whole numbers as numbers, not as places."""

_PRODUCTS = frozenset(
    ["linear", "matmul", "mm", "mv", "bmm", "__matmul__", "addmm", "addmv", "baddbmm", "einsum", "tensordot"]
)
