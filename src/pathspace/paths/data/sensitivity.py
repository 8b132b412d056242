"""Sensitivity of outputs to each weight, measured on data, and the importance of weights derived from it.

    sensitivity_i = mean over examples of  sum over outputs k of (df_k / dw_i)^2
    importance_i  = w_i^2 sensitivity_i

To first order in w_i, importance is the mean square by which the outputs change when w_i is
removed: the score of Optimal Brain Damage (LeCun, Denker, Solla 1990) for outputs with a square
error. Rescaling multiplies w_i by s and its sensitivity by 1 / s^2, so it does not change the
importance.

With eps_k random signs, (d sum_k eps_k f_k / dw_i)^2 has the sensitivity as its mean: one backward
pass for an example instead of one for each output.

Letters: f outputs of one example, w weights, K how many outputs, eps signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pathspace.network import Network
from pathspace.network.call import arguments_in
from pathspace.network.network import current_values, in_full_precision
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.paths.data.data_dependent import Estimator, check_estimator, is_exact
from pathspace.paths.data.signs import random_signs
from pathspace.paths.kernel.kappa import kappa
from pathspace.paths.listing.unrolled import examples
from pathspace.squared.precision import widened
from pathspace.torch_private import pytree

EXACT_OUTPUTS = 16
"""The number of outputs of an example up to which ``"auto"`` takes them one by one."""


@in_full_precision
@torch.inference_mode(False)
@torch.enable_grad()
def sensitivity(
    network: Network,
    data: Any,
    *,
    estimator: Estimator = "auto",
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Measure the mean square derivative of the outputs in every weight, E[sum_k (df_k / dw)^2].

    A copy of the model runs in evaluation form, through all operations at which the network is cut.
    Where it is not cut, this is :func:`data_dependent_kappa` with ``alpha=1``.

    Args:
        network: a traced network.
        data: a batch, of the form of the example input of :func:`pathspace.trace`. Outputs are
            those that count for the trace, before softmax and loss.
        estimator: ``"exact"``: a backward pass for each output of each example. ``"signs"``: one
            for each example and draw, right in the mean. ``"auto"``: exact up to 16 outputs of an
            example.
        draws: of signs for an example.
        generator: draws the signs, on the CPU; one with seed 0 if None.

    Returns:
        Parameter name -> tensor of the parameter's shape, not negative. For parameters of half
        precision in float32.

    Raises:
        ValueError: the data are not of the form of the example input, an option is unknown,
            ``draws`` is less than 1, or no output depends on a weight.
        RuntimeError: a parameter of the model was replaced after tracing.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> network = ps.trace(torch.nn.Linear(2, 1), torch.zeros(1, 2))
        >>> ps.paths.sensitivity(network, torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        {'weight': tensor([[2., 8.]]), 'bias': tensor([1.])}
    """
    current_values(network)
    check_estimator(estimator)
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    model = evaluation_form_of(network.model)
    weights = {name: model.get_parameter(name).requires_grad_() for name in network.parameters}
    total = {name: torch.zeros_like(widened(p.detach())) for name, p in weights.items()}
    count = 0
    for example in examples(network.call, data):
        f = _outputs(network, model, example)
        if is_exact(estimator, sum(t.numel() for t in f), EXACT_OUTPUTS):
            _add_squares(total, f, weights, _unit_seeds(f), 1.0)
        else:
            _add_squares(total, f, weights, _sign_seeds(f, draws, generator), 1 / draws)
        count += 1
    return {name: value.div_(count) for name, value in total.items()}


def _add_squares(
    total: Mapping[str, Tensor],
    outputs: list[Tensor],
    weights: Mapping[str, Tensor],
    seeds: Iterable[list[Tensor]],
    factor: float,
) -> None:
    """Add the squares of the gradients, one for each seed, times a factor to ``total``."""
    for seed in seeds:
        gradients = torch.autograd.grad(
            outputs,
            list(weights.values()),
            seed,
            retain_graph=True,
            materialize_grads=True,
            allow_unused=True,
        )
        for name, gradient in zip(weights, gradients, strict=True):
            total[name].add_(widened(gradient).square(), alpha=factor)


def _outputs(network: Network, model: nn.Module, example: Any) -> list[Tensor]:
    """Return the outputs of a copy of the model that depend on a weight."""
    args, kwargs = arguments_in(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), example))
    outputs = [t for t in network.returned(model(*args, **kwargs)) if t.requires_grad]
    if not outputs:
        raise ValueError(
            "no output of the model depends on a weight of the network: nothing is sensitive"
        )
    return outputs


def _unit_seeds(f: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield what is put into a backward pass for each output in turn: one there, and zero at all others."""
    for at, output in enumerate(f):
        for k in range(output.numel()):
            seed = [torch.zeros_like(t) for t in f]
            seed[at].view(-1)[k] = 1
            yield seed


def _sign_seeds(f: list[Tensor], draws: int, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """Yield random signs at all outputs."""
    for _ in range(draws):
        signs = random_signs((1, sum(t.numel() for t in f)), generator)[0]
        parts = signs.split([t.numel() for t in f])
        yield [part.to(t).view(t.shape) for part, t in zip(parts, f, strict=True)]


def importance(
    network: Network,
    data: Any = None,
    *,
    estimator: Estimator = "auto",
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return how much the outputs would change without each weight, w^2 times its :func:`sensitivity`.

    This is the score of Optimal Brain Damage (LeCun, Denker and Solla 1990), to first order, with
    outputs in the place of a loss. Rescaling does not change it. ``torch.nn.utils.prune`` takes it
    as ``importance_scores``.

    Args:
        network: a traced network.
        data: see :func:`sensitivity`. None: kappa takes the place of the sensitivity, and w^2 kappa
            is the squared path norm of all paths through a weight, whether or not data open them.
        estimator: see :func:`sensitivity`.
        draws: likewise.
        generator: likewise.

    Returns:
        Parameter name -> tensor of the parameter's shape, not negative.

    Raises:
        ValueError, RuntimeError, TypeError: see :func:`sensitivity`.
        FloatingPointError: kappa is not finite even in float64.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, -3.0)
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> ps.paths.importance(network, torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        {'weight': tensor([[18., 72.]])}
    """
    if data is None:
        found = kappa(network)
    else:
        found = sensitivity(network, data, estimator=estimator, draws=draws, generator=generator)
    weights = {name: network.parameters[name].detach() for name in found}
    return {name: value * weights[name].to(value.dtype).square() for name, value in found.items()}
