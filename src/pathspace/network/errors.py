"""Errors of tracing, and checks of the arguments of public functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class UntraceableError(ValueError):
    """A model contains an operation that node-wise rescaling does not commute with, or that has no rule.

    The message names the operation, the module in which it was called and the reason, and says what
    to do.

    Attributes:
        operation: name of the operation, e.g. ``"tanh"``.
        module: path of the module that called it, e.g. ``"encoder.0"``; empty for the model itself.
        reason: why it cannot be traced.
        advice: what to do, where there is more than to leave the module outside.
    """

    def __init__(self, operation: str, module: str, reason: str, advice: str | None = None) -> None:
        self.operation = operation
        self.module = module
        self.reason = reason
        self.advice = advice
        place = f"module '{module}'" if module else "the model's own forward"
        super().__init__(
            f"cannot trace '{operation}' in {place}: {reason}. {advice or _advice(module)}"
        )

    def public(self) -> UntraceableError:
        """Return the error under the name that users catch: ``NoRule`` is a distinction within a trace."""
        if type(self) is UntraceableError:
            return self
        return UntraceableError(self.operation, self.module, self.reason, self.advice)

    def __reduce__(self) -> Any:
        return type(self), (self.operation, self.module, self.reason, self.advice), vars(self)


class NoRule(UntraceableError):  # noqa: N818 -- caught by tracing, which cuts the network there unless it is strict
    """An operation that a network cannot be followed through: where it is cut, and at which a strict trace ends."""


def _advice(module: str) -> str:
    owner, parametrized, _ = module.partition(".parametrizations.")
    if parametrized:
        return (
            "Remove it first (torch.nn.utils.parametrize.remove_parametrizations), or leave "
            f"'{owner}' to the plain rule with outside=['{owner}']"
        )
    if not module:
        return "Replace it, or put that part into a module of its own and leave it to the plain rule with outside=[...]"
    return f"Replace it, or leave that part to the plain rule with outside=['{module}']."


def expect_network(network: Any) -> None:
    """Refuse what is no traced network, most often the model itself.

    Raises:
        TypeError: it is none.
    """
    if not hasattr(type(network), "check_current"):
        raise TypeError(
            f"this needs a traced network, got {type(network).__name__}: network = ps.trace(model, example_input)"
        )


def expect_module(model: Any, name: str = "model") -> None:
    """Refuse what is no module, most often a traced network.

    Args:
        model: the argument of a public function.
        name: the name of that argument.

    Raises:
        TypeError: it is none.
    """
    if isinstance(model, nn.Module):
        return
    advice = ": give network.model" if hasattr(type(model), "check_current") else ""
    raise TypeError(f"{name} must be an nn.Module, got {type(model).__name__}{advice}")


def expect_weights(network: Any) -> None:
    """Refuse what is no traced network, and a network whose weights have no values.

    Raises:
        TypeError: it is no traced network.
        RuntimeError: it is on the meta device.
    """
    expect_network(network)
    if network.parameters:  # none, where all of the model is a cut
        expect_values(next(iter(network.parameters.values())))


def expect_paths(network: Any) -> None:
    """Refuse a network that multiplies activations, whose outputs are no sums over paths.

    Raises:
        ValueError: it does.
    """
    product = network.tape.product
    if product or len(network.monomials):
        where = product or "in a part that no output reads, which ties the scales of its units"
        raise ValueError(
            f"the network multiplies two activations or weights ({where}), so its outputs are no sums "
            "over paths and there is no basis; optimizers by kappa (PathSGD, PathAdam, Invariant) follow products"
        )


def expect_values(tensor: Any) -> None:
    """Refuse a tensor without values.

    Raises:
        RuntimeError: it is on the meta device.
    """
    if tensor.is_meta:
        raise RuntimeError(
            "the model is on the meta device, where weights have no values: give it memory and values "
            "(model.to_empty(device=...), then a start or load_state_dict), and trace it again"
        )


def all_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, as the sum tells unless it is too large."""
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def expect_finite(weights: Iterable[Tensor]) -> None:
    """Refuse weights that are not finite, also where no output shows it: in front of a unit that is dead on all data.

    Raises:
        FloatingPointError: one is not.
    """
    weights = [w.detach() for w in weights]
    if not weights:
        return
    sums = [w.sum() for w in weights]
    # a finite sum has finite summands; one that is not may be of finite ones, too large together
    if all_finite(torch.stack([s.to(sums[0]) for s in sums])):
        return
    if not all(map(all_finite, weights)):
        raise FloatingPointError(
            "weights are not finite, because training diverged (lower the learning rate or clip) or a batch held NaN; "
            "parameters are not changed"
        )


class WrongBatchDimension(Exception):  # noqa: N818 -- a signal between tracing attempts, not a user's error
    """The dimension taken for the batch is used as something else (time, features).

    Attributes:
        operation: what uses it so.
        module: path of the module that called it.
    """

    def __init__(self, operation: str, module: str = "") -> None:
        super().__init__(f"{operation} in '{module}'" if module else operation)
        self.operation = operation
        self.module = module


class MixedExamples(WrongBatchDimension):
    """An operation puts elements of one example of a batch in the place of another's.

    Attributes:
        refusal: what to tell the user if no other dimension can be the batch.
        certain: whether that is known of the elements themselves.
    """

    def __init__(self, operation: str, module: str = "", *, certain: bool = True) -> None:
        super().__init__(operation, module)
        self.certain = certain
        self.refusal = UntraceableError(
            operation,
            module,
            "it mixes the examples of a batch: with two of them, elements of one come to the place of the other's",
            "Keep the batch a dimension of its own (view(len(x), ...), then transpose), or say batch_dim=None if the "
            "input is a single example, of which every later input has the shape",
        )


class UnmatchedForwardError(ValueError):
    """A forward pass on data is not the one that was traced, or holds something that cannot be followed on data."""
