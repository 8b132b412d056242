"""Does an optimizer see how the weights of a network are scaled? A check that anyone can run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.network import Network, trace
from pathspace.network.call import arguments_in
from pathspace.network.errors import expect_module
from pathspace.network.trace.shadow import copy_of
from pathspace.rescaling.rescale import random_rescale_
from pathspace.torch_private import pytree

MASK = 1e4
"""Outputs of this size that stay as they are were filled in, to be passed over by a softmax or a maximum."""


@dataclass(frozen=True)
class InvarianceReport:
    """The result of :func:`check_invariance`.

    Attributes:
        steps: how many steps both copies took.
        outputs_equal: whether all outputs along the way were bitwise equal.
        largest_output_difference: largest absolute difference of outputs, relative to the largest
            output.
        weights_equal: whether the weights, the rescaling undone, were bitwise equal after the last
            step.
        largest_weight_difference: largest absolute difference of those, relative to each
            parameter's largest element.
        differs_from_sgd: whether the optimizer's steps differ from plain SGD's with the same
            learning rate; True where it has no number as option ``lr``.
        finite: whether losses, weights and outputs stayed finite, but for infinities that both
            copies return alike.
        moved: whether the steps changed a parameter at all.
    """

    steps: int
    outputs_equal: bool
    largest_output_difference: float
    weights_equal: bool
    largest_weight_difference: float
    differs_from_sgd: bool
    finite: bool
    moved: bool = True

    @property
    def passed(self) -> bool:
        """Bitwise the same function and weights along the way, finite, and not by standing still or being plain SGD."""
        return self.outputs_equal and self.weights_equal and self._tells

    @property
    def _tells(self) -> bool:
        return self.moved and self.differs_from_sgd and self.finite

    def within(self, tolerance: float) -> bool:
        """Like ``passed``, with relative differences up to ``tolerance`` (for factors that are no powers of two)."""
        largest = max(self.largest_output_difference, self.largest_weight_difference)
        return self._tells and largest <= tolerance

    def __str__(self) -> str:
        """Return the verdict, with every condition that does not hold."""
        faults = []
        if not self.outputs_equal:
            faults.append(f"outputs differ by {self.largest_output_difference:.2g} (relative)")
        if not self.weights_equal:
            faults.append(f"weights differ by {self.largest_weight_difference:.2g} (relative)")
        if not self.finite:
            faults.append("not all numbers are finite")
        if not self.moved:
            faults.append("no parameter moved")
        if not self.differs_from_sgd:
            faults.append("the steps are those of plain SGD")
        in_steps = f"in {self.steps} steps" if self.steps > 1 else f"in {self.steps} step"
        if faults:
            return f"not passed {in_steps}: {', '.join(faults)}"
        return f"passed: bitwise the same {in_steps}"


@torch.inference_mode(False)
@torch.enable_grad()
def check_invariance(
    model: nn.Module,
    example_input: Any,
    loss: Callable[[Any], Tensor],
    make_optimizer: Callable[[nn.Module, Network], torch.optim.Optimizer],
    steps: int = 100,
    low: float = 2.0**-10,
    high: float = 2.0**10,
    powers_of_two: bool = True,
    seed: int = 0,
    **trace_options: Any,
) -> InvarianceReport:
    """Train a network and a rescaled copy of it side by side, and compare.

    Args:
        model: the network; it is copied, not changed.
        example_input: the batch both copies are trained on: a tensor, a tuple of arguments or a
            dict of them.
        loss: a function from what the model returns to a scalar.
        make_optimizer: from a model and its traced network, which are copies, to an optimizer of
            the model's parameters. One that asks for a closure, as LBFGS does, is given one.
        steps: optimizer steps.
        low: smallest rescaling factor.
        high: largest rescaling factor.
        powers_of_two: rescale by whole powers of two, so that an invariant optimizer agrees
            bitwise.
        seed: seed of the factors, and of dropout in both copies; torch's random state is restored
            at the end.
        trace_options: keyword arguments of :func:`pathspace.trace` other than ``outside``, which is
            taken by name.

    Returns:
        The report; ``report.passed`` is the verdict.

    Raises:
        UntraceableError: the model cannot be traced.
        TypeError: ``make_optimizer`` is no function or returns no optimizer, or the loss is no
            tensor.
        ValueError: ``steps`` is less than 1, no unit class is rescaled by another factor than 1,
            the optimizer has no parameter of its model, the loss is not one number, or there is no
            output to compare.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> ps.rescaling.check_invariance(
        ...     model, torch.randn(16, 4), lambda out: out.square().mean(),
        ...     lambda m, network: ps.optim.PathSGD(m.parameters(), network, lr=0.01),
        ... ).passed
        True
    """
    _check_arguments(model, make_optimizer, steps)
    # The copies train: an optimizer that keeps state on the caller's tensors would show here.
    ours, rescaled, plain = (copy_of(model) for _ in range(3))
    networks = [trace(m, example_input, **trace_options) for m in (ours, rescaled)]
    factors = _rescale_by_more_than_one_(networks[1], low, high, powers_of_two, seed)
    optimizers = [make_optimizer(m, n) for m, n in zip((ours, rescaled), networks, strict=True)]
    rates = _rates_by_name(optimizers, ours)
    pair = list(zip((ours, rescaled), networks, optimizers, strict=True))
    found = _trained_side_by_side(pair, example_input, loss, steps, seed)
    weight_difference, weights_equal = _compare_weights(ours, rescaled, networks[1], factors)
    # one without a number as rate has a size of steps of its own
    differs_from_sgd = any(rate is None for rate in rates.values()) or _differs_from_sgd(
        ours, plain, rates, example_input, loss, seed, steps
    )
    return InvarianceReport(
        steps=steps,
        outputs_equal=found.equal,
        largest_output_difference=found.largest,
        weights_equal=weights_equal,
        largest_weight_difference=weight_difference,
        moved=_differ(ours, model),
        differs_from_sgd=differs_from_sgd,
        finite=found.finite and _is_finite(ours) and _is_finite(rescaled),
    )


def _rescale_by_more_than_one_(
    network: Network, low: float, high: float, powers_of_two: bool, seed: int
) -> Tensor:
    """Rescale at random and return the factors.

    Raises:
        ValueError: they are all 1.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = random_rescale_(network, low, high, powers_of_two, generator)
    if bool((factors == 1).all()):
        drawn = (
            f"is rescaled by nothing: low={low}, high={high} and seed={seed} draw no factor but 1"
        )
        why = drawn if len(factors) else "has no unit class: nothing in it can be rescaled"
        raise ValueError(f"the network {why}, and every optimizer would pass: {network}")
    return factors


@dataclass
class _Outputs:
    """Comparison of the outputs of two copies.

    Attributes:
        equal: whether they were bitwise equal at all steps.
        largest: their largest difference, relative to the largest output.
        finite: whether losses and outputs were finite, but for infinities that both copies return.
    """

    equal: bool = True
    largest: float = 0.0
    finite: bool = True

    def note(self, ours: Tensor, rescaled: Tensor) -> None:
        """Compare the outputs of one step."""
        # infinities of masks stand in both
        odd = ~(ours.isfinite() & rescaled.isfinite())
        self.finite = self.finite and bool((ours == rescaled)[odd].all())
        self.equal = self.equal and torch.equal(ours, rescaled)
        self.largest = max(self.largest, _relative(*difference(ours, rescaled)))


def _trained_side_by_side(
    pair: list[tuple[nn.Module, Network, torch.optim.Optimizer]],
    example_input: Any,
    loss: Callable[[Any], Tensor],
    steps: int,
    seed: int,
) -> _Outputs:
    """Train both copies, and compare their outputs at every step.

    Raises:
        ValueError: there is no output to compare.
    """
    found = _Outputs()
    for step in range(steps):
        outputs = []
        for model, network, optimizer in pair:
            output, value = _step(model, example_input, loss, optimizer, seed + step)
            found.finite = found.finite and math.isfinite(value)
            # a model may also return hidden states, which do change with the scale
            parts = [part.detach().double().reshape(-1) for part in network.returned(output)]
            outputs.append(torch.cat(parts))
            if not outputs[-1].numel():
                raise ValueError(
                    "the example gives no output to compare: give one example at least"
                )
        found.note(*outputs)
    return found


def _check_arguments(model: Any, make_optimizer: Any, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    expect_module(model)
    # a class of optimizers can be called, too, but not with a network
    found = make_optimizer if isinstance(make_optimizer, type) else type(make_optimizer)
    if issubclass(found, torch.optim.Optimizer) or not callable(make_optimizer):
        raise TypeError(
            "make_optimizer must be a function of a model and its network, such as lambda m, network: "
            f"torch.optim.Adam(m.parameters()); got {found.__name__}"
        )


def _rates_by_name(optimizers: list[Any], model: nn.Module) -> dict[str, Any]:
    """Return the learning rates of the first optimizer by the names of the model's parameters.

    Raises:
        TypeError: one of them is no optimizer.
        ValueError: the first one has no parameter of the model.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"make_optimizer must return an optimizer, got {type(optimizer).__name__}"
            )
    rates: dict[int, Any] = {
        id(p): g.get("lr") for g in optimizers[0].param_groups for p in g["params"]
    }
    names = {id(p): name for name, p in model.named_parameters()}
    by_name = {names[i]: rate for i, rate in rates.items() if i in names}
    if not by_name:
        raise ValueError(
            "the optimizer holds no parameter of the model that make_optimizer was given: make it from that model and "
            "that network, which are copies"
        )
    return by_name


def _compare_weights(
    ours: nn.Module, rescaled: nn.Module, network: Network, factors: Tensor
) -> tuple[float, bool]:
    """Compare the weights of a model with those of its rescaled copy, brought back.

    Returns:
        The largest relative difference, and whether all bits are equal.
    """
    largest = 0.0
    equal = True
    for name, parameter in ours.named_parameters():
        its = rescaled.get_parameter(name)
        other = its.detach().double()
        traced = network.names_by_id.get(id(its))  # without the prefix of a wrapper
        if traced is not None:
            other = other / network.edge_factors(traced, factors.to(other.device))
        mine = parameter.detach().double()
        equal = equal and torch.equal(mine, other)
        if mine.numel():
            apart = _relative(float((mine - other).abs().max()), float(mine.abs().max()))
            largest = max(largest, apart)
    return largest, equal


def difference(old: Tensor, new: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors and the largest entry; entries masked in both count as 0."""
    old = old.double()
    new = new.double()
    masks = (old == new) & (old.abs() >= MASK)
    return float((new - old).masked_fill(masks, 0).abs().max()), float(
        old.masked_fill(masks, 0).abs().max()
    )


def _relative(moved: float, largest: float) -> float:
    """Return a largest difference beside a largest entry; infinite where it is no number."""
    return moved / max(largest, 1e-300) if math.isfinite(moved) else math.inf


def _is_finite(model: nn.Module) -> bool:
    """Return whether all parameters are: the last step shows in no output."""
    return all(bool(p.isfinite().all()) for p in model.parameters())


def called(model: nn.Module, example_input: Any, seed: int) -> Any:
    """Return what a model returns, with random numbers of a seed; torch's random state is restored."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    # copies: the model may write into them
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments_in(example_input))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return model(*args, **kwargs)


def _step(
    model: nn.Module,
    example_input: Any,
    loss: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    seed: int,
) -> tuple[Any, float]:
    """One optimizer step; returns what the model returned before it, and the loss."""
    seen: list[tuple[Any, float]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        output = called(model, example_input, seed)
        value = loss(output)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss must return a tensor of one number, got {type(value).__name__}")
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(
                f"loss must return a tensor of one number, got one of shape {shape}; take its mean"
            )
        seen.append((output, float(value.detach())))
        value.backward()
        return value

    take: Any = optimizer.step  # LBFGS demands a closure, as the rule of Invariant, too
    own = inspect.signature(getattr(getattr(optimizer, "rule", None), "step", take)).parameters.get(
        "closure"
    )
    if own is not None and own.default is inspect.Parameter.empty:
        take(closure)
    else:
        closure()
        take()
    torch.clear_autocast_cache()  # or the next call would take the weights before this step
    return seen[0]


def _differ(a: nn.Module, b: nn.Module) -> bool:
    """Return whether a parameter of two copies of a model is not the same."""
    return any(not torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _differs_from_sgd(
    trained: nn.Module,
    plain: nn.Module,
    rates: dict[str, Any],
    example_input: Any,
    loss: Callable[[Any], Tensor],
    seed: int,
    steps: int,
) -> bool:
    """Return whether plain SGD with the same learning rates ends elsewhere (the published Path-SGD code does not)."""
    groups = [
        {"params": [p], "lr": float(rates[n])} for n, p in plain.named_parameters() if n in rates
    ]
    sgd = torch.optim.SGD(groups, lr=0.1)
    for step in range(steps):
        _step(plain, example_input, loss, sgd, seed + step)
    return _differ(trained, plain)
