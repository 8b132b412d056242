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

import torch
from torch import Tensor

from pathspace.paths.chart import Chart, Place


class Frame:
    """Path space at the present weights.

    Args:
        chart: the chart.
        weights: name -> weights of the chart's parameters.
        fixed: products of the nodes that do not move, float64 ``[1 + 2 C]``.
        units: a and b of every node, likewise.
        pace: factor of a_e for the coordinates at I(c), ``[1 + 2 C]``, read at the classes.

    Attributes:
        factors: f at every node, float64 ``[1 + 2 C]``; 0 where a product is 0.
    """

    def __init__(
        self, chart: Chart, weights: Mapping[str, Tensor], fixed: Tensor, units: Tensor, pace: Tensor
    ) -> None:
        self.chart = chart
        self._weights = self._gather(weights)
        products = chart.products(self._weights, fixed)
        self.factors = torch.where(products == 0, 0.0, units / products)
        # a_e / v_e at e = I(c) = (u -> c): a_e = pace a_u b_c, and v_e = A_c B_c
        self._slopes = self.factors[chart.classes] * self.factors[chart.inverses] * pace[chart.classes]
        self._slopes *= units[chart.starts] / units[chart.classes]
        self._cast: dict[torch.dtype, Tensor] = {}

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
        own = (self._weights * g)[self.chart.into]
        return (2 - self._moments(g, sums) / own).clamp(min=1).sqrt()

    def _moments(self, gradients: Tensor, sums: Tensor) -> Tensor:
        """q_c of the P classes."""
        chart = self.chart
        terms = self._weights * gradients
        leaving = terms[chart.out_of]
        if chart.single is not None:
            leaving = leaving * chart.single
        q = terms[chart.into] + leaving - sums[chart.classes]
        for classes, after in chart.links:
            q[classes] += q[after]
        return q

    def _at_skeleton(self, values: Tensor) -> Tensor:
        """Values of the P classes at I(c), where it is a coordinate, and 0 at the others of the K edges."""
        result = torch.zeros_like(self._weights)
        moved = self.chart.moved
        if moved is None:
            result[self.chart.into] = values
        else:
            result[self.chart.into[moved]] = values[moved]
        return result

    def _scaled(self, place: Place, values: Tensor) -> Tensor:
        """Values f_u f_v, a new tensor."""
        result = values
        for ends in (place.sources, place.targets):
            if ends is not None:
                factor = ends.take(self._typed(values.dtype))
                result = result * factor if result is values else result.mul_(factor)
        return result.clone() if result is values else result

    # --- steps -------------------------------------------------------------------------------------------

    def ratios(self, steps: Mapping[str, Tensor], shrinking: Mapping[str, float] | None = None) -> Tensor:
        """R of the P classes.

        Args:
            steps: dx of every basis path, by name.
            shrinking: factors that multiply all values v of a parameter's paths before the step.
        """
        chart = self.chart
        moved = 1 + self._gather(steps)[chart.into] * self._slopes
        if shrinking is not None:
            parts = [
                moved.new_full((place.count,), shrinking[name] - 1) for name, place in chart.places.items()
            ]
            moved += torch.cat(parts)[chart.into]
        return moved if chart.like is None else moved[chart.like]

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
        inverse, skeleton = self._after(ratios)
        for name, place in self.chart.places.items():
            w, dw = weights[name], steps[name]
            if shrinking is not None and shrinking[name] != 1:
                w.mul_(shrinking[name])
            for ends in (place.sources, place.targets):
                if ends is not None:
                    dw.mul_(ends.take(self._typed(dw.dtype)))
            w.add_(dw)
            if place.sources is not None:
                w.mul_(place.sources.take(inverse.to(w.dtype)))
            put_(w, place, skeleton)

    def _after(self, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """1 / R at every node, and the new weights of the skeleton edges."""
        chart = self.chart
        inverse = torch.ones_like(self.factors)
        inverse[chart.classes] = ratios.reciprocal()
        skeleton = self._weights.clone()
        if chart.moved is None:
            skeleton[chart.into] *= ratios * inverse[chart.starts]
        else:
            moved = chart.moved
            skeleton[chart.into[moved]] *= ratios[moved] * inverse[chart.starts[moved]]
        return inverse, skeleton

    def _gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [
            take(tensors[name], place.skeleton)
            for name, place in self.chart.places.items()
            if place.skeleton is not None
        ]
        if not parts:
            return self.chart.classes.new_zeros(0, dtype=torch.float64)
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).double()

    def _typed(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._cast:
            self._cast[dtype] = self.factors.to(dtype)
        return self._cast[dtype]


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Elements by their flat indices."""
    return tensor.view(-1).index_select(0, indices) if tensor.is_contiguous() else tensor.take(indices)


def put_(tensor: Tensor, place: Place, values: Tensor) -> None:
    """Overwrite a parameter's skeleton elements with their values among those of all K."""
    if place.skeleton is None:
        return
    own = values.narrow(0, place.first, place.count).to(tensor.dtype)
    if tensor.is_contiguous():
        tensor.view(-1).index_copy_(0, place.skeleton, own)
    else:
        tensor.put_(place.skeleton, own)
