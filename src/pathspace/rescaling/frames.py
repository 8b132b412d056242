"""Frames: the members of a rescaling class in which metrics look at a network, and to which ``balance_`` brings it.

A frame is a scale b_c for every unit class. Dividing class c by b_c leads to the member that the
frame stands for.

    balanced   b_c of ``node_mass``: balance, unit path mass or even gain, by the form of the network
    measure    b_c = gamma_c, the root of the data-dependent measure (D16 Section 2): then gamma_c = 1
    layers     b_c of "balanced" over its geometric mean in the layer: what lies between layers stays as it is
    weights    b_c = 1: the network as it is

Rescaling class c by s_c turns b_c into s_c b_c for the first two, so nothing computed in such a
frame depends on the scales of the weights. For "layers" that holds only for rescalings with
geometric mean 1 in every layer, and for "weights" for none.

Letters: c unit class, s_c its factor, b_c its scale in a frame, gamma_c^2 its measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.network import in_full_precision
from pathspace.paths.data.node_measure import check_options, class_measure, layers_of
from pathspace.paths.kernel.node_mass import node_mass, path_measure
from pathspace.replay.replay import replay

FrameName = Literal["balanced", "measure", "layers", "weights"]
FRAMES: tuple[str, ...] = get_args(FrameName)

ALPHA = 1.0
"""The share of data in the measure, if nothing else is asked for."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The member of a rescaling class in which a metric normalizes and damps kappa.

    Metrics take the name alone, too: ``frame="measure"`` is ``Frame("measure")``.

    Args:
        name: ``"balanced"``: as much path mass enters a unit as leaves it, or unit path mass in a
            network that normalizes, or even gain in one with convolutions (what ``balance_`` does).
            ``"measure"``: every unit has the measure 1 on data. ``"layers"``: balanced within each
            layer, while the geometric mean of a layer's scales stays as it is. Only rescalings with
            geometric mean 1 in every layer then change nothing; a whole layer multiplied by 2
            trains differently. ``"weights"``: the network as it is, so means of kappa, damping and
            the length of a step depend on the scales of the weights; no rule is invariant then.
        data: the batch for ``"measure"``, as the model is called with it. None: the batch of the
            first step.
        alpha: share of the data in the measure, in (0, 1]; see
            :func:`pathspace.paths.unit_measure`. None: 1, the mean square of what a unit receives.

    Raises:
        ValueError: the name is unknown, an option belongs to another frame, or alpha is outside (0,
            1].

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network, x = ps.trace(model, torch.zeros(1, 4)), torch.randn(16, 4)
        >>> metric = ps.metrics.Path(frame=ps.metrics.Frame("measure", data=x))
        >>> optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1, metric=metric)
    """

    name: FrameName = "balanced"
    data: Any = field(default=None, repr=False)
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.name not in FRAMES:
            raise ValueError(
                f"frame must be one of {', '.join(map(repr, FRAMES))}, got {self.name!r}"
            )
        if self.name != "measure" and not (self.data is None and self.alpha is None):
            raise ValueError(
                f"data and alpha are options of the frame 'measure', not of {self.name!r}"
            )
        check_alpha(self.alpha)

    @property
    def needs_batch(self) -> bool:
        """True if the frame is measured on the batch of the first step."""
        return self.name == "measure" and self.data is None


def check_alpha(alpha: float | None) -> None:
    """Refuse a share of the data that is none.

    Raises:
        ValueError: it is outside (0, 1].
    """
    if alpha is None:
        return
    check_options(alpha, "second_moment")
    if alpha == 0:
        raise ValueError(
            "alpha must be in (0, 1], got 0: the measure without data is balance_(criterion='measure')"
        )


def scales_of(
    network: Network, name: FrameName, data: Any = None, alpha: float | None = None
) -> Tensor:
    """Compute the scales b_c of a frame.

    Args:
        network: a traced network.
        name: of the frame.
        data: the batch for ``"measure"``. None: the measure that inputs of size 1 would give if
            every ReLU let half of what enters it through.
        alpha: share of the data; None: 1.

    Returns:
        b_c, float64 ``[num_classes]``; not finite for data that are not: see
        :func:`expect_finite_scales`.

    Raises:
        FloatingPointError: a path mass is not finite.
        UnmatchedForwardError: the forward pass on the data is not the traced one.
    """
    balanced = node_mass(network).gauge()
    if name == "weights":
        return torch.ones_like(balanced)
    if name == "balanced":
        return balanced
    if name == "layers":
        return _over_means_of_layers(network, balanced)
    squared = path_measure(network) if data is None else _measure(network, data, alpha)
    # a unit that is 0 on all examples has no measure: balance, which every unit class has, stands
    # for it
    return torch.where(squared == 0, balanced, squared.sqrt())


def expect_finite_scales(scales: Tensor) -> None:
    """Refuse scales of a frame that are not finite.

    Raises:
        FloatingPointError: one is not.
    """
    if not bool(torch.isfinite(scales).all()):
        raise FloatingPointError(
            "on these data the measure of a unit is not finite: leave out examples with values that are not"
        )


@in_full_precision
@tables_on_the_cpu()
def _measure(network: Network, data: Any, alpha: float | None) -> Tensor:
    """Compute gamma_c^2 on data, in float64."""
    with torch.no_grad():
        replayed = replay(network, data, wide=True)
        squared, _ = class_measure(
            network, replayed, ALPHA if alpha is None else alpha, "second_moment"
        )
    return squared


def _over_means_of_layers(network: Network, scales: Tensor) -> Tensor:
    """Divide scales by their geometric mean in each layer.

    Exponents are added as whole numbers, so powers of two whose product in a layer is 1 do not
    change a bit of the mean.
    """
    mantissa, exponent = torch.frexp(scales)
    logs = mantissa.log2()
    result = scales.clone()
    for members in layers_of(network.class_names).values():
        mean = logs[members].mean() + exponent[members].double().mean()
        result[members] /= mean.exp2()
    return result
