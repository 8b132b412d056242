"""The Fisher information of a network's output, whole, and the natural gradient (D16 Sections 4 and 5).

With f the outputs of an example, J = df/dw and the mean over the n examples,

    F = mean of J^T J                               Gaussian output of variance one
    F = mean of J^T (diag(pi) - pi pi^T) J          softmax output, pi = softmax(f)

F is the second derivative of KL(p_w || p_w') at w' = w: the change of the output that a step makes.
Its rank is the number of degrees of freedom (see :func:`degrees_of_freedom`). A node-wise rescaling
w -> D w makes D^-1 F D^-1 of F, so that the natural gradient, F^-1 g, moves all members of a class
alike. F is singular, because rescaling moves no output. What is added to it must transform as it
does, and the kappa of paths does:

    d = (F + damping diag(kappa))^-1 g

is found by conjugate gradients, preconditioned by kappa. All numbers that they compare are the same
in every member of a class, so their steps commute with rescaling. A product F v takes two backward
passes; F is never written down.

Letters: n examples, P places of an output, K numbers at each, E weights, J ``[P, K, E]``, g
gradient, d natural gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.network import current_values
from pathspace.paths.kernel.kappa import kappa
from pathspace.paths.listing.jacobian import (
    Output,
    check_output,
    derivatives,
    in_float64,
    outputs_on,
    pulled_back,
)
from pathspace.paths.listing.unrolled import examples
from pathspace.paths.space.reduction import reduction_graph


@tables_on_the_cpu()
def fisher(network: Network, data: Any, *, output: Output = "gaussian", dim: int = -1) -> Tensor:
    """Compute the Fisher information of a network's output, mean over examples of J^T Lambda J.

    Args:
        network: a traced network.
        data: examples, as the example input of :func:`pathspace.trace` was.
        output: ``"gaussian"``: the outputs are means, Lambda = 1; ``"softmax"``: they are logits,
            and Lambda = diag(pi)
            - pi pi^T. Where a network has outputs at many places, such as time steps, their terms
              are added.
        dim: the dimension of the outputs along which the softmax runs.

    Returns:
        ``[E, E]`` in float64 on the CPU; weights in the order of :func:`reduction_graph`. Its
        diagonal for a Gaussian is :func:`data_dependent_kappa` at alpha = 1, if nothing is cut.

    Raises:
        ValueError: there is no such ``output``, the data are not of the form of the example input,
            or the outputs on them are not finite.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> network, x = ps.trace(model, torch.zeros(1, 1)), torch.tensor([[2.0]])
        >>> ps.paths.fisher(network, x)
        tensor([[4., 0.],
                [0., 4.]], dtype=torch.float64)
        >>> ps.paths.fisher(network, x, output="softmax").round()
        tensor([[ 1., -1.],
                [-1.,  1.]], dtype=torch.float64)
    """
    check_output(output)
    current_values(network)
    total = torch.zeros((reduction_graph(network).num_edges,) * 2, dtype=torch.float64)
    count = 0
    for example in derivatives(network, data, output, dim):
        count += 1
        for f, J in example:
            if output == "softmax":
                pi = f.softmax(-1).unsqueeze(-1)
                # diag(pi) - pi pi^T = S^T S with S = diag(sqrt(pi)) (1 - 1 pi^T)
                rows = (pi.sqrt() * (J - (pi * J).sum(1, keepdim=True))).flatten(0, 1)
            else:
                rows = J.flatten(0, 1)
            total.addmm_(rows.t(), rows)
    return total / count


@tables_on_the_cpu()
@torch.inference_mode(False)
@torch.enable_grad()
def natural_gradient(
    network: Network,
    data: Any,
    gradients: Mapping[str, Tensor],
    *,
    damping: float = 0.01,
    output: Output = "gaussian",
    dim: int = -1,
    tolerance: float = 1e-10,
    iterations: int = 1000,
) -> dict[str, Tensor]:
    """Compute the natural gradient with the whole Fisher information, (F + damping diag(kappa))^-1 g.

    Args:
        network: a traced network.
        data: examples, as the example input of :func:`pathspace.trace` was.
        gradients: g by name, such as those of a loss; a parameter that is missing, or None, has
            none.
        damping: the share of kappa, positive. It does not harm the invariance, and F is singular
            without it.
        output: see :func:`fisher`.
        dim: likewise.
        tolerance: conjugate gradients end at a residual of this share of g, both measured with 1 /
            kappa.
        iterations: or after so many steps.

    Returns:
        Parameter name -> tensor of the parameter's shape, float64 on the CPU; zero where kappa is.

    Raises:
        FloatingPointError: a gradient is not finite, or kappa is not.
        TypeError: ``gradients`` are no mapping.
        ValueError: ``damping`` is not positive, ``tolerance`` not in [0, 1), or a gradient of no
            parameter or another shape; see :func:`fisher` for the rest.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> network, x = ps.trace(model, torch.zeros(1, 1)), torch.tensor([[2.0]])
        >>> ps.paths.natural_gradient(network, x, {"weight": torch.tensor([[10.0]])}, damping=1.0)  # 10 / (4 + 1)
        {'weight': tensor([[2.]], dtype=torch.float64)}
    """
    check_output(output)
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"gradients must be a mapping by parameter name, not a {type(gradients).__name__}"
        )
    if not damping > 0:
        raise ValueError(f"damping must be positive, because F is singular; got {damping}")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be in [0, 1), got {tolerance}")
    current_values(network)
    graph = reduction_graph(network)
    kappas = graph.flatten({name: k.double().cpu() for name, k in kappa(network).items()})
    found = {name: g for name, g in gradients.items() if g is not None}
    if unknown := found.keys() - {*network.parameters, *network.outside}:
        own = ", ".join(network.parameters)
        raise ValueError(
            f"there is no parameter '{min(unknown)}': give gradients by the names {own}"
        )
    given = {name: found.get(name, torch.zeros_like(p)) for name, p in network.parameters.items()}
    g = graph.flatten(
        {n: t.detach().double().cpu() for n, t in current_values(network, given).items()}
    )
    g = torch.where(kappas > 0, g, 0.0)  # a weight on no path
    if not bool(g.isfinite().all()):
        raise FloatingPointError("gradients are not finite: training diverged, or a batch held NaN")
    product = _fisher_product(network, data, output, dim)
    scale = torch.where(kappas > 0, 1 / kappas, 0.0)
    return graph.unflatten(
        _conjugate_gradients(
            lambda v: product(v) + damping * kappas * v, g, scale, tolerance, iterations
        )
    )


def _fisher_product(
    network: Network, data: Any, output: Output, dim: int
) -> Callable[[Tensor], Tensor]:
    """Return the function v -> F v."""
    graph = reduction_graph(network)
    model, parameters = in_float64(network)
    # whose outputs have no classes along the dimension of examples
    one = next(examples(network.call, data))
    outputs_on(network, model, one, output, dim)
    outputs = outputs_on(network, model, data, "gaussian", dim)
    n = sum(1 for _ in examples(network.call, data))
    probes = [torch.zeros_like(f, requires_grad=True) for f in outputs]
    # u -> J^T u, linear in u: its derivative along v is J v
    pulled = pulled_back(graph, outputs, parameters, probes, create_graph=True)

    def product(v: Tensor) -> Tensor:
        forward = torch.autograd.grad(pulled, probes, v, retain_graph=True, materialize_grads=True)
        if output == "softmax":  # (diag(pi) - pi pi^T) t
            pairs = zip((f.detach().softmax(dim) for f in outputs), forward, strict=True)
            forward = [pi * (t - (pi * t).sum(dim, keepdim=True)) for pi, t in pairs]
        return pulled_back(graph, outputs, parameters, forward) / n

    return product


def _conjugate_gradients(
    operator: Callable[[Tensor], Tensor],
    g: Tensor,
    scale: Tensor,
    tolerance: float,
    iterations: int,
) -> Tensor:
    """Solve operator(d) = g by conjugate gradients, preconditioned by a diagonal ``scale``."""
    d = torch.zeros_like(g)
    rest = g.clone()
    z = scale * rest
    size = first = rest @ z
    direction = z.clone()
    for _ in range(iterations):
        if not size > tolerance**2 * first:
            break
        image = operator(direction)
        step = size / (direction @ image)
        d.add_(step * direction)
        rest.sub_(step * image)
        z = scale * rest
        before = size
        size = rest @ z
        direction = z + (size / before) * direction
    return d
