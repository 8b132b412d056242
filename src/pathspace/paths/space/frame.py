"""Gradients and steps in path space, at one point of it.

S19 with its Algorithm 2 corrected: as printed masks are missing, a sum runs over the wrong axis,
and G/W stands for G/s. It also counts outgoing skeleton weights as 1, as they are from the start
that it presumes (see ``ones``); here they may be any. With g = dL/dw, and everything on the right
taken before the step:

    q_e = v_e dL/dv_e = w_e g_e                          for e outside I and O
    q_c = w_e g_e - S_c                                  for e = I(c), S_c the sum of q over all paths that go on from c
        = w_I g_I + w_O g_O - T_c                        where T_c is the sum of w g over all edges that leave c
        = w_I g_I + q_c' - T_c                           if O(c) is I(c') as well
    R_c = 1 + dv_e / v_e                                 for e = I(c) outside O; R_u if I(c) = (u -> c) is in O
    w_e <- w_e                                           for e in O
    w_e <- w_e R_c / R_u                                 for e = I(c)
    w_e <- (w_e + dv_e / (A_u B_v)) / R_u                for all others

R = 1 at inputs and the bias node. The coordinates are x_e = v_e / a_e, where a_e = a_u b_v > 0 are
units that rescaling does not change; f_u = a_u / A_u and f_v = b_v / B_v are the factors between a
weight's gradient and that of its path: dL/dx_e = g f_u f_v, and dw = dx f_u f_v. Factors are
numbered like the products, by nodes (see ``chart``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pathspace.paths.space.chart import Chart, Measure, Place
from pathspace.paths.space.slots import Slots, put_

_ALMOST_ZERO = 1e-300
_CACHED = 2**16
"""Elements of sums that stay in the cache."""


class _Vectors:
    """Values of a frame at nodes and skeleton edges, in one type; a step copies them from float64 in one go."""

    def __init__(self, values: Tensor, nodes: int, edges: int) -> None:
        self.values = values
        parts = values.split([nodes, nodes, nodes, edges])
        # f, its square, 1 / R; weights of the K skeleton edges
        self.factors, self.squares, self.inverse, self.edges = (Slots(part) for part in parts)

    def copy_(self, wide: Tensor) -> None:
        if self.values is not wide:
            self.values.copy_(wide)
        for slots in (self.factors, self.squares, self.inverse, self.edges):
            slots.refresh()


class _Part:
    """One parameter's entries of the vectors of its type; None or left out where they are 1 for all elements."""

    def __init__(self, place: Place, vectors: _Vectors) -> None:
        both = [ends for ends in (place.sources, place.targets) if ends is not None]
        self.factors = [ends.at(vectors.factors) for ends in both]
        self.squares = [ends.at(vectors.squares) for ends in both]
        self.inverse = None if place.sources is None else place.sources.at(vectors.inverse)
        self.places = place.skeleton
        self.skeleton = None if place.skeleton is None else vectors.edges.at(place.among)


class Frame:
    """Path space at the present weights: made once for a chart, and brought up to date by :meth:`look`.

    A step of a small network costs what its calls cost, and the first call of an operation several
    times what others do: hence the memory that is kept here, and operations of few kinds.

    Args:
        chart: the chart.
        measure: what steps are measured in.
        weights: name -> weights of the chart's parameters; their types and shapes are looked at.

    Attributes:
        dtypes: the types of the weights, in their order.
        moments: q of the P classes, of the gradients that were handed in last.
    """

    def __init__(self, chart: Chart, measure: Measure, weights: Mapping[str, Tensor]) -> None:
        self.chart = chart
        fixed = measure.fixed
        nodes = len(fixed)
        edges = sum(place.among.count for place in chart.places.values())
        self.dtypes = [w.dtype for w in weights.values()]
        self._inverse_units = measure.units.reciprocal()
        self._rates = measure.rates(chart)
        self._wide = _Vectors(fixed.new_ones(3 * nodes + edges), nodes, edges)
        self._vectors = {
            t: self._wide if t == fixed.dtype else _Vectors(self._wide.values.to(t), nodes, edges)
            for t in set(self.dtypes)
        }
        self._parts = {
            n: _Part(p, self._vectors[weights[n].dtype]) for n, p in chart.places.items()
        }
        # at nodes: A and B, T
        self._products = fixed.clone()
        self._almost_zero = torch.full_like(fixed, _ALMOST_ZERO)
        self._leaving = Slots(torch.zeros_like(fixed))
        # at the K edges: g, w g
        self._gradients = fixed.new_empty(edges)
        self._terms = Slots(fixed.new_empty(edges))
        # at the P classes: 1, a_e / v_e for e = I(c), q
        self._one = torch.ones_like(self._rates)
        self._slopes = torch.empty_like(self._one)
        self.moments = torch.empty_like(self._one)
        self._find_views()

    def _find_views(self) -> None:
        """Keep what every step reads and writes of the vectors."""
        chart = self.chart
        factors = self._wide.factors
        edges = self._wide.edges
        self._at_classes = factors.at(chart.classes), factors.at(chart.inverses)
        self._at_skeleton = self._terms.at(chart.into), self._terms.at(chart.out_of)
        self._own_sums = self._leaving.at(chart.classes)
        self._own_weights = edges.at(chart.into)
        self._own_inverse = chart.classes.view(self._wide.inverse.values)
        self._moved = None if chart.moved is None else chart.into.places[chart.moved]
        self._levels = [
            (level, edges.at(level.edges), level.nodes.view(self._products))
            for level in chart.levels
        ]
        self._sources = []
        self._weights_at = []
        self._gradients_at = []
        for name, place in chart.places.items():
            if place.sources is not None:
                view = place.sources.nodes.view(self._leaving.values)
                self._sources.append((name, place.sources, view))
            if place.skeleton is not None:
                weights = place.among.take(edges.values)
                gradients = place.among.take(self._gradients)
                self._weights_at.append((name, place.skeleton, weights))
                self._gradients_at.append((name, place.skeleton, gradients))

    def look(self, weights: Mapping[str, Tensor]) -> Frame:
        """Bring the frame to these weights, in place.

        Args:
            weights: name -> weights of the chart's parameters.

        Returns:
            The frame.
        """
        _gather(weights, self._weights_at)
        self._wide.edges.refresh()
        # A_c = w A_u for I(c) = (u -> c); B_c = w B_v for O(c) = (c -> v)
        for level, w, nodes in self._levels:
            product = w if level.starts is None else w * level.starts.take(self._products)
            if nodes is None:
                self._products.index_copy_(0, level.nodes.places, product)
            else:
                nodes.copy_(product)
        # f = 1 / r for r = A / a, and 0 where r = 0
        r = self._wide.factors.values
        squares = self._wide.squares.values
        torch.mul(self._products, self._inverse_units, out=r)
        torch.div(r, torch.addcmul(self._almost_zero, r, r, out=squares), out=r)
        self._wide.factors.refresh()
        # a_e / v_e at e = I(c) = (u -> c), where v_e = A_c B_c
        torch.mul(*self._at_classes, out=self._slopes).mul_(self._rates)
        return self

    # --- gradients --------------------------------------------------------------------------------

    def gradients(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """dL/dx of every basis path, at the element that it belongs to; 0 at edges O.

        Args:
            weights: those that the frame looks at.
            gradients: dL/dw, by name.

        Returns:
            Name -> new tensor of the parameter's shape.
        """
        at_skeleton = torch.zeros_like(self._gradients)
        self._put_moved(at_skeleton, self._moments(weights, gradients) * self._slopes)
        self._convert()
        result = {}
        for name, part in self._parts.items():
            # dL/dx = g f_u f_v
            g = gradients[name]
            for i, factor in enumerate(part.factors):
                g = g * factor if i == 0 else g.mul_(factor)
            result[name] = g if part.factors else g.clone()
            if part.places is not None:
                heads = self.chart.places[name].among.take(at_skeleton)
                put_(result[name], part.places, heads.to(g.dtype))
        return result

    def lengths(self, weights: Mapping[str, Tensor], gauge: Tensor) -> Tensor:
        """Return how far the balanced weights move, relative to I(c), when R_c changes: a coordinate's natural length.

        .. code-block:: text

            l_c^2 = 1 + sum of w_e^2 / w_I^2, in the gauge, over all e that R_c moves against I(c)

        The sum is S_c with w_e^2 for w_e g_e.

        Args:
            weights: those that the frame looks at, float64.
            gauge: the scale at which every node stands, float64 ``[1 + 2 C]``.

        Returns:
            l of the P classes; those whose R is another's have no use for it.
        """
        squares = Slots(gauge.square())
        scaled = {}
        for name, place in self.chart.places.items():
            g = weights[name]
            for ends in (place.sources, place.targets):
                if ends is not None:
                    g = g * ends.at(squares)
            scaled[name] = g
        moments = self._moments(weights, scaled)
        return (2 - moments / self._at_skeleton[0]).clamp(min=1).sqrt()

    def _moments(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
        """q_c of the P classes."""
        chart = self.chart
        sums = self._leaving.values.zero_()
        for name, ends, view in self._sources:  # T_c
            terms = _summed_products(weights[name], gradients[name], ends.shape).reshape(-1)
            if view is None:
                sums.index_add_(0, ends.nodes.places, terms.to(sums.dtype))
            else:
                view.add_(terms)
        self._leaving.refresh()
        _gather(gradients, self._gradients_at)
        torch.mul(self._wide.edges.values, self._gradients, out=self._terms.values)
        self._terms.refresh()
        entering, leaving = self._at_skeleton
        if chart.single is not None:
            leaving = leaving * chart.single
        q = torch.add(entering, leaving, out=self.moments).add_(self._own_sums, alpha=-1)
        for classes, after in chart.links:
            q.index_add_(0, classes, q.index_select(0, after))
        return q

    # --- steps ------------------------------------------------------------------------------------

    def ratios(
        self,
        directions: Mapping[str, Tensor],
        lrs: Mapping[str, float],
        shrinking: Mapping[str, float] | None = None,
    ) -> Tensor:
        """R of the P classes for the steps dx = -lr d.

        Args:
            directions: d of every basis path, by name.
            lrs: learning rates by name.
            shrinking: factors that multiply all values v of a parameter's paths before the step;
                None for ones.
        """
        _gather(directions, self._gradients_at)
        return self._ratios(self.chart.into.take(self._gradients), lrs, shrinking)

    def gradient_ratios(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lrs: Mapping[str, float],
        shrinking: Mapping[str, float] | None = None,
    ) -> Tensor:
        """:meth:`ratios` for the gradients d = dL/dx, without writing these down; ``gradients`` are dL/dw."""
        return self._ratios(self._moments(weights, gradients).mul_(self._slopes), lrs, shrinking)

    def move_(
        self,
        weights: Mapping[str, Tensor],
        directions: Mapping[str, Tensor],
        lrs: Mapping[str, float],
        ratios: Tensor,
        shrinking: Mapping[str, float] | None = None,
        *,
        of_weights: bool = False,
    ) -> None:
        """Change the weights, in place, so that the paths take the steps dx = -lr d.

        Args:
            weights: those that the frame looks at.
            directions: d by name, not changed.
            lrs: learning rates by name.
            ratios: R of the P classes.
            shrinking: see :meth:`ratios`.
            of_weights: ``directions`` are gradients dL/dw, of which d = dL/dx is made on the way.
        """
        self._pass(ratios)
        for name, part in self._parts.items():
            w = weights[name]
            d = directions[name]
            if shrinking is not None and shrinking[name] != 1:
                w.mul_(shrinking[name])
            # dw = -lr d f_u f_v, and d = dL/dw f_u f_v
            factors = part.squares if of_weights else part.factors
            if not factors:
                w.add_(d, alpha=-lrs[name])
            else:
                if len(factors) == 2:
                    d = d * factors[0]
                w.addcmul_(d, factors[-1], value=-lrs[name])
            if part.inverse is not None:  # 1 / R_u
                w.mul_(part.inverse)
            if part.places is not None and part.skeleton is not None:
                put_(w, part.places, part.skeleton)

    def _ratios(
        self, direction: Tensor, lrs: Mapping[str, float], shrinking: Mapping[str, float] | None
    ) -> Tensor:
        """R = 1 + dv / v, dv / v = -lr d a / v, for the paths at I(c)."""
        lr = self._per_class(lrs)
        if isinstance(lr, Tensor):
            direction = direction * lr
            lr = 1.0
        ratios = torch.addcmul(self._one, direction, self._slopes, value=-lr)
        if shrinking is not None:
            ratios += self._per_class(shrinking) - 1
        return ratios if self.chart.like is None else ratios.index_select(0, self.chart.like)

    def _per_class(self, numbers: Mapping[str, float]) -> Tensor | float:
        """Numbers of the parameters that own I(c), for the P classes; one number where all are alike."""
        if len(set(numbers.values())) == 1:
            return next(iter(numbers.values()))
        edges = torch.zeros_like(self._gradients)
        for name, place in self.chart.places.items():
            place.among.take(edges).fill_(numbers[name])
        return self.chart.into.take(edges)

    def _pass(self, ratios: Tensor) -> None:
        """Put what holds after a step in the place of what held before: 1 / R, and weights of the skeleton edges."""
        chart = self.chart
        wide = self._wide
        if self._own_inverse is not None:
            torch.div(self._one, ratios, out=self._own_inverse)
        else:
            chart.classes.put_(wide.inverse.values, self._one / ratios)
        # w <- w R_c / R_u for I(c) = (u -> c)
        change = ratios if chart.starts is None else ratios * chart.starts.take(wide.inverse.values)
        if self._moved is None and chart.into.first >= 0:
            self._own_weights.mul_(change)  # a view
        else:
            self._put_moved(wide.edges.values, self._own_weights * change)
        torch.mul(wide.factors.values, wide.factors.values, out=wide.squares.values)
        self._convert()

    def _convert(self) -> None:
        """Bring the vectors to the types of the parameters."""
        for vectors in self._vectors.values():
            vectors.copy_(self._wide.values)

    def _put_moved(self, edges: Tensor, values: Tensor) -> None:
        """Overwrite, of the K edges, those I(c) that are coordinates by values of the P classes."""
        if self._moved is None or self.chart.moved is None:
            self.chart.into.put_(edges, values)
        else:
            edges.index_copy_(0, self._moved, values.index_select(0, self.chart.moved))


def _gather(tensors: Mapping[str, Tensor], entries: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Write elements of tensors, by their flat indices, to parts of a vector, which are views of it."""
    for name, places, part in entries:
        part.copy_(tensors[name].take(places))


def _summed_products(w: Tensor, g: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sums of w g in a shape that broadcasts to theirs."""
    size = w.numel()
    if size <= _CACHED or shape[0] > 1 or not w.is_cpu:
        return (w * g).sum_to_size(shape)
    # over rows: some at a time, in half the time that all products take to memory and back
    count = max(1, _CACHED * len(w) // size)
    sums = torch.zeros_like(w[:count])
    for rows, of_rows in zip(w.split(count), g.split(count), strict=True):
        sums[: len(rows)].addcmul_(rows, of_rows)
    return sums.sum_to_size(shape)
