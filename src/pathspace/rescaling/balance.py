"""The balanced member of a rescaling class: by path mass, or by the ranges that rounding depends on.

Letters: c unit class, s_c its factor, gamma_in,c and gamma_out,c the path mass into and out of it
(see ``paths.node_mass``), w weight, h_c the values of a unit class on data.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import UnmatchedForwardError, expect_weights
from pathspace.network.returned import tensors_in
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.rescaling.activations import Statistic, log_ranges
from pathspace.rescaling.conditioning import conditioning_factors
from pathspace.rescaling.criteria import (
    Criterion,
    Scales,
    activation_gap,
    agreement,
    range_gap,
    rounded_edges,
)
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.frames import expect_finite_scales, scales_of
from pathspace.rescaling.invariance import called, difference
from pathspace.rescaling.optimizer_states import MovedStates, Optimizers
from pathspace.rescaling.options import Options, check_options
from pathspace.rescaling.rescale import replace_
from pathspace.rescaling.rounding import Per, rounding_factors
from pathspace.rescaling.within_range import within_range

LARGE = 100.0
"""Factors beyond which ``balance_`` warns."""


class FunctionChangedError(RuntimeError):
    """A change that should have left the network's function alone did not; it has been undone."""


def balance_(
    network: Network,
    example_input: Any = None,
    *,
    criterion: Criterion = "path",
    calibration: Any = None,
    alpha: float | None = None,
    statistic: Statistic | None = None,
    bits: int | None = None,
    per: Per | None = None,
    activations: bool | int | None = None,
    tolerance: float | None = None,
    powers_of_two: bool = False,
    optimizer: Optimizers | None = None,
) -> Tensor:
    r"""Rescale a network, in place, to the member of its class that is balanced at every unit class.

    With the criterion ``"path"`` that is the member with the least path mass in every unit class:

    .. code-block:: text

        gamma_in,c <- s_c^2 gamma_in,c      gamma_out,c <- gamma_out,c / s_c^2
        s_c = (gamma_out,c / gamma_in,c)^(1/4)

    Of what enters a unit half is counted, as a ReLU lets half of it through: so He's start, however
    deep, is nearly balanced.

    Afterwards as much path mass enters each unit class as leaves it: the spread |log(gamma_in,c /
    gamma_out,c)| is zero for every class. As the product of the two does not change under
    rescaling, their sum is then the least that any member of the rescaling class has, 2
    sqrt(gamma_in,c gamma_out,c), and in all unit classes at once; no other member reaches it. (A
    class that no path enters, or none leaves, has no such minimum: there the other side becomes 1,
    for a single node where nothing leaves.) Every member is brought to the same weights, so
    training a balanced network with SGD or Adam is the baseline that any invariant method has to
    beat. A start that was designed may be better left alone: Fixup's trains worse once balanced.

    A network that normalizes by statistics of what enters (BatchNorm traced in training form,
    LayerNorm, ...) is brought to the member in which the mean path mass of each unit class is one
    instead, with a maximum counted as the mean of its window. There balance would make up, at a
    gain, for whatever lies behind it, and train worse than the start. One whose units are read at
    many positions, as channels of a convolution are, is brought to the member in which path mass
    changes from layer to layer by the same factor: balance would weigh a channel by the number of
    positions that read it.

    Four more criteria lead to other members, for training:

    .. code-block:: text

        norm           sum of w^2 entering c = sum of w^2 leaving c       (the least sum of squares)
        conditioning   the least p log(sum_w kappa_w) - sum_w log kappa_w     (p how many weights have kappa > 0)
        measure        gamma_c = 1          (of ``ps.paths.unit_measure``; the mean square of its values at alpha = 1)
        layers         "path" within each layer; the geometric mean of the factors of a layer is 1

    With ``"layers"``, members are brought to the same weights only if they differ by factors of
    geometric mean 1 in every layer: a layer multiplied by 2 as a whole stays multiplied by 2. With
    the other three every member is. ``"norm"`` is where ENorm's steps between those of training
    lead, and where ``ps.rescaling.conserved`` is zero. ``"conditioning"`` is PathCond's: there kappa
    is as near to one number for all weights as rescaling can bring it, in the log-determinant
    divergence.

    The last three criteria are those of quantisation, for any traced network:

    .. code-block:: text

        range         max |w entering c| = max |w leaving c|             (cross-layer equalization)
        activations   max |h_c|^alpha = max |w leaving c|^(1 - alpha)    (what SmoothQuant does)
        rounding      the least sum over tensors of (max |w|)^2 sum_w K_w

    The last sum is in proportion to the squared error of the outputs that rounding causes: a step
    of rounding is proportional to the largest |w| of its tensor, or row, and K_w, which is kappa or
    E[(df/dw)^2] on data, says how strongly the outputs react to w. It is convex in log s. Of the
    members where it is least, which differ by the scale of whole tensors, it is the one nearest to
    that of "path".

    w counts if its parameter has two dimensions or more; where a class has such weights on one side
    alone (a gain on the other), "range" makes their maximum 1, and scales that the criterion does
    not touch are those of "path". No weight overflows or becomes zero. A weight that would become
    zero takes the smallest number of its type, if that is below eps^2 of the largest weight that
    enters the same unit, and of the largest that leaves the unit where it starts (eps the precision
    of the type), and the paths through it are below eps^2 of those through another weight that
    enters the same unit. At outputs, operations without a rule, and units that are sums of several
    layers, the row of the weight takes the place of the unit. Otherwise the factor is nearer to 1,
    as at some units that weight decay left dead: that unit is not balanced, and a warning says so.

    Neighbouring classes depend on each other, so the scales are found step by step, from the member
    that "path" leads to: all members are brought to the same weights, and another criterion, or
    "path", can follow at any time.

    Args:
        network: a traced network, whose model's parameters are changed; the function stays the
            same.
        example_input: what the model is called with, as for ``trace``. If it is given, the outputs
            of the model, in evaluation mode, are compared before and after; the comparison runs on
            a copy of the model.
        criterion: ``"path"``, ``"norm"``, ``"conditioning"``, ``"measure"``, ``"layers"``,
            ``"range"``, ``"activations"`` or ``"rounding"``.
        calibration: data for ``"activations"``, ``"rounding"`` and ``"measure"``, a batch as the
            model is called with it; of the traced shapes, but for the number of examples. For
            ``"measure"`` the example is taken if it is missing; without both, inputs of size 1 and
            units that let half through are assumed. ``"rounding"`` takes kappa without data; a few
            dozen examples are enough to measure derivatives.
        alpha: for ``"measure"``, the share of the data, in (0, 1], by default 1. For
            ``"activations"``, how much of the difference of ranges is taken from the values and
            given to the weights, in (0, 1], by default 0.5; at 1 the values of all classes have the
            range 1.
        statistic: the range of values, ``"largest"`` |h|, or the ``"mean"`` of |h|, as AWQ measures
            it. By default ``"largest"``.
        bits: of a weight, for ``"rounding"``, by default 8. It matters beside ``activations``
            alone: the best member for rounded weights is the same for all bits.
        per: for ``"rounding"``, whether each ``"tensor"`` has a step, or each ``"row"`` of it
            (dimension 0). By default ``"tensor"``.
        activations: for ``"rounding"``, bits of what enters linear layers and convolutions, where
            that is rounded, too, with a step for each tensor; True for 8. Needs ``calibration``. By
            default False: it is not rounded.
        tolerance: the largest change of an output, relative to the largest output, that passes as
            rounding; by default the square root of the type's precision (3e-4 for float32).
        powers_of_two: round the factors to powers of two, so that nothing else is rounded. The
            spread is then at most 2 log 2 in each class.
        optimizer: the optimizer that trains the network, or all of them in a list: what it keeps,
            and gradients that wait for a step, move with the weights (see :func:`rescale_`).

    Returns:
        The factors s that were used (see :func:`rescale_`), float64, shape ``[num_classes]``.

    Raises:
        FunctionChangedError: an output moved by more than the tolerance, or was not finite; the
            weights are what they were before.
        FloatingPointError: the path mass or the measure of a class is not finite.
        ValueError: ``tolerance`` without an example, or not positive; an example without outputs to
            compare; an unknown criterion, an option of another one, ``"activations"`` without data,
            an alpha outside (0, 1]; the state of the optimizer cannot move.
        UnmatchedForwardError: the forward pass on the calibration data is not the traced one.

    Warns: UserWarning: a factor is beyond 100 or below 1/100, or nearer to 1 than the criterion
        asks for, or parameters
            took no part in the traced forward pass, or not as a whole.

    Source:
        Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
        2019; Xiao et al., "SmoothQuant", 2023; Lin et al., "AWQ: Activation-aware Weight
        Quantization", 2024; Stock et al., "Equi-normalization of Neural Networks", 2019;
        Lebeurrier et al., "Path-conditioned training: a principled way to rescale ReLU neural
        networks", 2026, as its authors' code has it.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(16, 4)
        >>> ps.rescaling.balance_(ps.trace(model, x), x).shape
        torch.Size([8])
    """
    if tolerance is not None and (example_input is None or not tolerance > 0):
        raise ValueError(f"tolerance={tolerance} needs an example_input, and must be positive")
    options = Options(calibration, alpha, statistic, bits, per, activations)
    check_options(criterion, options, example_input)
    expect_weights(network)
    states = MovedStates(network, optimizer)
    if criterion == "measure" and calibration is None:
        options = replace(options, calibration=example_input)
    factors = _factors(network, criterion, options)
    if powers_of_two:
        factors = factors.log2().round().exp2()
    wanted = factors
    factors, changed = within_range(network, wanted, powers_of_two=powers_of_two)
    _warn_of_cut(network, int((factors != wanted).sum()))
    _warn_of_large(network, factors)
    _warn_of_unused(network)
    if example_input is None:
        replace_(network, changed)
        states.follow(factors)
        return factors
    probe = _Probe(network, example_input)
    before = {name: parameter.detach().clone() for name, parameter in network.parameters.items()}
    replace_(network, changed)
    try:
        probe.check(tolerance)
    except BaseException:  # of the model too, which runs on other weights than before
        with torch.no_grad():
            for name, parameter in network.parameters.items():
                parameter.copy_(before[name])
        network.rescalings["done"] -= 1
        raise
    states.follow(factors)
    return factors


def balancing_factors(network: Network, *, powers_of_two: bool = False) -> Tensor:
    """Return the factors of the criterion "path", float64 ``[num_classes]``."""
    # gamma_in becomes s^2 gamma_in and gamma_out becomes gamma_out / s^2: equal for s^4 = gamma_out
    # / gamma_in.
    factors = 1.0 / node_mass(network).gauge()
    return factors.log2().round().exp2() if powers_of_two else factors


@tables_on_the_cpu()
def _factors(network: Network, criterion: Criterion, options: Options) -> Tensor:
    """Return the factors of a criterion, float64 ``[num_classes]``."""
    calibration = options.calibration
    alpha = options.alpha
    if criterion in ("measure", "layers"):
        scales = scales_of(network, criterion, calibration, alpha)
        expect_finite_scales(scales)
        return 1.0 / scales
    factors = balancing_factors(network)
    if criterion == "path":
        return factors
    if criterion == "norm":
        return equal_norm_factors(network)
    if criterion == "conditioning":
        return conditioning_factors(network, factors)
    if criterion == "rounding":
        return rounding_factors(network, factors, options.scheme())
    edges = rounded_edges(network, factors)
    scales = Scales.of(network, factors.device)
    if criterion == "range":
        return factors * agreement(range_gap(edges, scales), torch.zeros_like(factors))
    # Of the member at hand, and of the balanced one: multiplied by a power of two, not a bit of
    # them changes.
    ranges = log_ranges(network, scales, calibration, options.statistic or "largest", factors)
    gap = activation_gap(edges, scales, ranges, 0.5 if alpha is None else alpha)
    return factors * agreement(gap, torch.zeros_like(factors))


def _warn_of_cut(network: Network, count: int) -> None:
    """Tell how many unit classes are not where the criterion wants them."""
    if count:
        warnings.warn(
            f"balance_ multiplies what enters {count} of {network.num_classes} unit classes by a factor nearer to 1 "
            "than the criterion asks for, since a weight would overflow or underflow in its type: these units are not "
            "balanced. Convert the model to float64 to balance them, or set weights of dead units to zero first",
            stacklevel=3,
        )


def _warn_of_large(network: Network, factors: Tensor) -> None:
    """Tell of factors that change gradients, and with them what a learning rate means, by orders of magnitude."""
    sizes = torch.maximum(factors, 1 / factors)
    many = int((sizes > LARGE).sum())
    if many:
        worst = int(sizes.argmax())
        warnings.warn(
            f"balance_ multiplies what enters {many} of {network.num_classes} unit classes by more than {LARGE:g} or "
            f"less than {1 / LARGE:g}, most of all in '{network.class_names[worst]}' by {float(factors[worst]):.2g}; "
            "gradients there change by the inverse. If nobody scaled the weights on purpose, see that the network was "
            "traced in the form it is trained in (BatchNorm in training mode), and choose the learning rate anew",
            stacklevel=3,
        )


def _warn_of_unused(network: Network) -> None:
    """Tell of parameters by which another method, as the critic of an actor, or a longer example may read units."""
    unused = network.call.unused
    if unused and network.num_classes:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        warnings.warn(
            f"{', '.join(unused[:3])}{more} took no part in the forward pass that was traced, or a part of them did "
            "not, or met zeros alone: if a longer example, or another method of the model, applies it to traced units, "
            "balance_ changes what that computes. Trace a forward pass that uses all of them, if there is one",
            stacklevel=3,
        )


class _Probe:
    """The outputs of a model for one example, before a change of its parameters and after it."""

    def __init__(self, network: Network, example_input: Any) -> None:
        self.network = network
        self.example_input = example_input
        # evaluation mode must not show in the user's model, nor must what a forward pass does to
        # buffers
        self.copy = evaluation_form_of(network.model)
        self.before = self._outputs()
        if not any(t.is_floating_point() and t.numel() for t in self.before):
            raise ValueError(
                "the outputs for this example_input hold no number to compare: give one example at least"
            )

    def check(self, tolerance: float | None) -> None:
        """Compare with the model's parameters as they are now.

        Raises:
            FunctionChangedError: an output moved by more than the tolerance, or is not finite.
        """
        with torch.no_grad():
            for ours, theirs in zip(
                self.copy.parameters(), self.network.model.parameters(), strict=True
            ):
                ours.copy_(theirs)
        torch.clear_autocast_cache()
        for i, (old, new) in enumerate(zip(self.before, self._outputs(), strict=True)):
            if not old.is_floating_point() or not old.numel():
                continue
            allowed = torch.finfo(old.dtype).eps ** 0.5 if tolerance is None else tolerance
            moved, largest = difference(old, new)
            if not moved <= allowed * largest:
                raise FunctionChangedError(
                    f"output {i} of the network moved by {moved:.3g}, where the largest output is {largest:.3g} and "
                    f"{allowed:.3g} of that passes as rounding; the weights are what they were before. Was the model "
                    "changed after tracing, or is the example not finite? Where rounding grows so much, use float64 or "
                    "a larger tolerance"
                )

    @torch.no_grad()
    def _outputs(self) -> list[Tensor]:
        result = called(self.copy, self.example_input, seed=0)
        try:
            returned = self.network.returned(result)
        except UnmatchedForwardError:  # parts of it are there in training only
            returned = tensors_in(result)
        return [tensor.clone() for tensor in returned]
