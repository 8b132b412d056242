"""Gradients and steps in path space, at one point of it.

S19 with its Algorithm 2 corrected (as printed its step is 63 % off in a small example: masks are missing, sums run over
the wrong axis, G/W stands for G/s, and skeleton outputs count as +1). With g = dL/dw, and everything on the right taken
before the step:

    q_e = v_e dL/dv_e = w_e g_e                          for e outside I and O
    q_c = w_e g_e - S_c                                  for e = I(c), S_c the sum of q over all paths that go on from c
        = w_I g_I + w_O g_O - T_c                        where T_c is the sum of w g over all edges that leave c
        = w_I g_I + q_c' - T_c                           if O(c) is I(c') as well
    R_c = 1 + dv_e / v_e                                 for e = I(c) outside O; R_u if I(c) = (u -> c) is in O
    w_e <- w_e                                           for e in O
    w_e <- w_e R_c / R_u                                 for e = I(c)
    w_e <- (w_e + dv_e / (A_u B_v)) / R_u                for all others

R = 1 at inputs and the bias node. The coordinates are x_e = v_e / a_e, where a_e = a_u b_v > 0 are units that rescaling
does not change; f_u = a_u / A_u and f_v = b_v / B_v are the factors between a weight's gradient and that of its path:
dL/dx_e = g f_u f_v, and dw = dx f_u f_v. Factors are numbered like the products, by nodes (see
:mod:`pathspace.paths.chart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pathspace.paths.chart import Chart, Ends, Place


@dataclass(frozen=True, eq=False)
class Measure:
    """What steps are measured in, and the products that do not move: float64 ``[1 + 2 C]`` each.

    Attributes:
        fixed: products of all nodes; those of the classes that move are not looked at.
        units: a and b of every node.
        pace: at classes, the factor of a_e for the coordinates at I(c): a_e = pace a_u b_c.
    """

    fixed: Tensor
    units: Tensor
    pace: Tensor

    def rates(self, chart: Chart) -> Tensor:
        """The constant part of a_e / v_e at e = I(c) = (u -> c), for the P classes: pace a_u / a_c."""
        result = chart.classes.take(self.pace) / chart.classes.take(self.units)
        return result if chart.starts is None else result * chart.starts.take(self.units)


class Frame:
    """Path space at the present weights.

    Args:
        chart: the chart.
        weights: name -> weights of the chart's parameters.
        measure: what steps are measured in.
        rates: ``measure.rates(chart)``.
        scratch: memory that frames of later steps may use again.

    Attributes:
        factors: f at every node, float64 ``[1 + 2 C]``; 0 where a product is 0.
    """

    def __init__(
        self,
        chart: Chart,
        weights: Mapping[str, Tensor],
        measure: Measure,
        rates: Tensor | None = None,
        scratch: dict[tuple[torch.dtype, torch.Size], Tensor] | None = None,
    ) -> None:
        self.chart = chart
        self._scratch = {} if scratch is None else scratch
        self._weights = self._gather(weights)
        products = chart.products(self._weights, measure.fixed)
        self.factors = torch.where(products == 0, 0.0, measure.units / products)
        # a_e / v_e at e = I(c) = (u -> c), where v_e = A_c B_c
        self._slopes = chart.classes.take(self.factors) * chart.inverses.take(self.factors)
        self._slopes *= measure.rates(chart) if rates is None else rates
        self._typed: dict[torch.dtype, Tensor] = {}

    # --- gradients ---------------------------------------------------------------------------------------

    def gradients(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """dL/dx of every basis path, at the element that it belongs to; 0 at edges O.

        Args:
            weights: those that the frame was made of.
            gradients: dL/dw, by name.

        Returns:
            Name -> new tensor of the parameter's shape.
        """
        sums = torch.zeros_like(self.factors)
        result = {}
        for name, place in self.chart.places.items():
            g = gradients[name]
            if place.sources is not None:
                place.sources.add_to(sums, weights[name] * g)
            result[name] = self._scaled(place, g)
        at_skeleton = self._at_skeleton(self._slopes * self._moments(self._gather(gradients), sums))
        for name, place in self.chart.places.items():
            put_(result[name], place, at_skeleton)
        return result

    def lengths(self, weights: Mapping[str, Tensor], gauge: Tensor) -> Tensor:
        """How far the balanced weights move, relative to I(c), when R_c changes: a coordinate's natural length.

        .. code-block:: text

            l_c^2 = 1 + sum of w_e^2 / w_I^2, in the gauge, over all e that R_c moves against I(c)

        The sum is S_c with w_e^2 for w_e g_e.

        Args:
            weights: those that the frame was made of.
            gauge: the scale at which every node stands, float64 ``[1 + 2 C]``.

        Returns:
            l of the P classes; those whose R is another's have no use for it.
        """
        sums = torch.zeros_like(self.factors)
        scaled = {}
        for name, place in self.chart.places.items():
            g = weights[name].double()
            for ends in (place.sources, place.targets):
                if ends is not None:
                    g = g * ends.take(gauge).square()
            scaled[name] = g
            if place.sources is not None:
                place.sources.add_to(sums, weights[name] * g)
        g = self._gather(scaled)
        own = self.chart.into.take(self._weights * g)
        return (2 - self._moments(g, sums) / own).clamp(min=1).sqrt()

    def _moments(self, gradients: Tensor, sums: Tensor) -> Tensor:
        """q_c of the P classes."""
        chart = self.chart
        terms = self._weights * gradients
        leaving = chart.out_of.take(terms)
        if chart.single is not None:
            leaving = leaving * chart.single
        q = chart.into.take(terms) + leaving
        q -= chart.classes.take(sums)
        for classes, after in chart.links:
            q.index_add_(0, classes, q.index_select(0, after))
        return q

    def _at_skeleton(self, values: Tensor) -> Tensor:
        """Values of the P classes at I(c), where it is a coordinate, and 0 at the others of the K edges."""
        result = torch.zeros_like(self._weights)
        self._put_moved(result, values)
        return result

    def _put_moved(self, edges: Tensor, values: Tensor) -> None:
        chart = self.chart
        if chart.moved is None:
            chart.into.put_(edges, values)
        else:
            moved = chart.moved
            edges.index_copy_(0, chart.into.places.index_select(0, moved), values.index_select(0, moved))

    def _scaled(self, place: Place, values: Tensor) -> Tensor:
        """Values f_u f_v, a new tensor."""
        result = values
        for ends in (place.sources, place.targets):
            if ends is not None:
                factor = ends.take(self._as(values.dtype))
                result = result * factor if result is values else result.mul_(factor)
        return result.clone() if result is values else result

    # --- steps -------------------------------------------------------------------------------------------

    def ratios(self, steps: Mapping[str, Tensor], shrinking: Mapping[str, float] | None = None) -> Tensor:
        """R of the P classes.

        Args:
            steps: dx of every basis path, by name.
            shrinking: factors that multiply all values v of a parameter's paths before the step; None for ones.
        """
        return self._ratios(self.chart.into.take(self._gather(steps)) * self._slopes, shrinking)

    def move_(
        self,
        weights: Mapping[str, Tensor],
        steps: Mapping[str, Tensor],
        ratios: Tensor,
        shrinking: Mapping[str, float] | None = None,
    ) -> None:
        """Change the weights, in place, so that the paths take the steps dx.

        Args:
            weights: those that the frame was made of.
            steps: dx by name; they are overwritten.
            ratios: R of the P classes.
            shrinking: see :meth:`ratios`.
        """
        after = self._after(ratios)
        for name, place in self.chart.places.items():
            w, dw = weights[name], steps[name]
            if shrinking is not None and shrinking[name] != 1:
                w.mul_(shrinking[name])
            for ends in (place.sources, place.targets):
                if ends is not None:
                    dw.mul_(ends.take(self._as(dw.dtype)))
            inverse, skeleton = (t.to(w.dtype) for t in after)
            self._finish_(w.add_(dw), place, inverse, skeleton)

    def gradient_ratios(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lrs: Mapping[str, float],
        shrinking: Mapping[str, float] | None = None,
    ) -> Tensor:
        """R of the P classes for the steps dx = -lr dL/dx, without writing these down."""
        sums = torch.zeros_like(self.factors)
        for name, place in self.chart.places.items():
            if place.sources is not None:
                w = weights[name]
                place.sources.add_to(sums, torch.mul(w, gradients[name], out=self._scratch_like(w)))
        # dv / v = -lr q (a / v)^2
        step = self._moments(self._gather(gradients), sums).mul_(self._slopes).mul_(self._slopes)
        lr = self._per_class(lrs)
        return self._ratios(step.mul_(-lr), shrinking)

    def descend_(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        lrs: Mapping[str, float],
        ratios: Tensor,
        shrinking: Mapping[str, float] | None = None,
    ) -> None:
        """:meth:`move_` for the steps dx = -lr dL/dx, in fewer passes over memory.

        Args:
            weights: those that the frame was made of.
            gradients: dL/dw by name, not changed.
            lrs: learning rates by name.
            ratios: R of the P classes.
            shrinking: see :meth:`ratios`.
        """
        after = self._after(ratios)
        squares = self.factors.square()
        typed: dict[torch.dtype, list[Tensor]] = {}
        seen: dict[torch.dtype, tuple[dict[Ends, Tensor], dict[Ends, Tensor]]] = {}
        for name, place in self.chart.places.items():
            w, g, lr = weights[name], gradients[name], lrs[name]
            if w.dtype not in typed:
                typed[w.dtype] = [t.to(w.dtype) for t in (squares, *after)]
                seen[w.dtype] = {}, {}
            square, inverse, skeleton = typed[w.dtype]
            squares_at, inverse_at = seen[w.dtype]
            if shrinking is not None and shrinking[name] != 1:
                w.mul_(shrinking[name])
            # dw = -lr g (f_u f_v)^2
            sources, targets = place.sources, place.targets
            if sources is not None and targets is not None:
                g = torch.mul(g, sources.take(square, squares_at), out=self._scratch_like(w))
            last = sources if targets is None else targets
            if last is None:
                w.add_(g, alpha=-lr)
            else:
                w.addcmul_(g, last.take(square, squares_at), value=-lr)
            self._finish_(w, place, inverse, skeleton, inverse_at)

    def _scratch_like(self, tensor: Tensor) -> Tensor:
        """Memory for a moment: fetching it anew at every step can cost more than the arithmetic."""
        key = (tensor.dtype, tensor.shape)
        if key not in self._scratch:
            size, flat = tensor.numel(), (tensor.dtype, torch.Size())
            if flat not in self._scratch or self._scratch[flat].numel() < size:
                self._scratch.clear()
                self._scratch[flat] = tensor.new_empty(size)
            self._scratch[key] = self._scratch[flat][:size].view(tensor.shape)
        return self._scratch[key]

    def _ratios(self, relative: Tensor, shrinking: Mapping[str, float] | None) -> Tensor:
        """R = 1 + dv / v, for the relative steps of the paths at I(c)."""
        ratios = relative.add_(1)
        if shrinking is not None:
            ratios += self._per_class(shrinking) - 1
        return ratios if self.chart.like is None else ratios.index_select(0, self.chart.like)

    def _per_class(self, numbers: Mapping[str, float]) -> Tensor | float:
        """Numbers of the parameters that own I(c), for the P classes; one number where all are alike."""
        owners = [(numbers[name], place) for name, place in self.chart.places.items() if place.among.count]
        if len({number for number, _ in owners}) == 1:
            return owners[0][0]
        edges = torch.zeros_like(self._weights)
        for number, place in owners:
            place.among.put_(edges, edges.new_full((place.among.count,), number))
        return self.chart.into.take(edges)

    def _after(self, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """1 / R at every node, and the new weights of the skeleton edges."""
        chart = self.chart
        inverse = torch.ones_like(self.factors)
        chart.classes.put_(inverse, ratios.reciprocal())
        skeleton = self._weights.clone()
        change = ratios if chart.starts is None else ratios * chart.starts.take(inverse)
        self._put_moved(skeleton, chart.into.take(skeleton) * change)
        return inverse, skeleton

    def _finish_(
        self,
        w: Tensor,
        place: Place,
        inverse: Tensor,
        skeleton: Tensor,
        known: dict[Ends, Tensor] | None = None,
    ) -> None:
        """Divide by R_u, and set the skeleton edges."""
        if place.sources is not None:
            w.mul_(place.sources.take(inverse, known))
        put_(w, place, skeleton)

    def _gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [
            take(tensors[name], place.skeleton)
            for name, place in self.chart.places.items()
            if place.skeleton is not None
        ]
        if not parts:
            return self.chart.classes.places.new_zeros(0, dtype=torch.float64)
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).double()

    def _as(self, dtype: torch.dtype) -> Tensor:
        """The factors in another type."""
        if dtype not in self._typed:
            self._typed[dtype] = self.factors.to(dtype)
        return self._typed[dtype]


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Elements by their flat indices."""
    return tensor.view(-1).index_select(0, indices) if tensor.is_contiguous() else tensor.take(indices)


def put_(tensor: Tensor, place: Place, values: Tensor) -> None:
    """Overwrite a parameter's skeleton elements with their values among those of all K."""
    if place.skeleton is None:
        return
    own = place.among.take(values).to(tensor.dtype)
    if tensor.is_contiguous():
        tensor.view(-1).index_copy_(0, place.skeleton, own)
    else:
        tensor.put_(place.skeleton, own)
