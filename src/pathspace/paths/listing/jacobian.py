"""The path-Jacobian, degrees of freedom, and units that data leave dead (D16 Section 5, S19 Section 3).

J = dv/dw with v the values of all paths: J_pe = n_pe v_p / w_e. Node-wise rescaling moves the
weights in num_classes directions that no path value sees, so the rank of J is generically (number
of weights) - (number of unit classes); S19 takes as many paths as a basis of path space.

d_G(w), the degrees of freedom at w, is the rank of the derivative of the network's outputs over the
data in the weights, df/dw = (df/dv) J. It is at most the rank of J, reaches it in typical networks
on enough data, and drops with dead units. (The two biases of an ``nn.RNN`` are two paths of which
the function sees the sum: one degree less for each pair.) It is the rank of the Fisher information
of a Gaussian output. Where the outputs are the logits of a softmax, the divergence KL(p_w || p_w')
takes its place: its second derivative at w is the Fisher information of the softmax (see
``fisher``), which does not see what is added to all logits of an example alike, so its rank is that
of df/dw with the mean over the K logits taken away.

Letters: P paths (or places of an output), E weights, n examples, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pathspace.network import Network
from pathspace.network.call import arguments_in
from pathspace.network.devices import tables_on_the_cpu
from pathspace.network.errors import expect_weights
from pathspace.network.network import current_values
from pathspace.network.trace.shadow import evaluation_form_of
from pathspace.paths.listing.listing import LIMIT, Paths, enumerate_paths
from pathspace.paths.listing.unrolled import examples
from pathspace.paths.space.reduction import ReductionGraph, expect_own, reduction_graph, used_edges
from pathspace.squared.precision import AtLeast, wide_copy
from pathspace.torch_private import pytree

Output = Literal["gaussian", "softmax"]


@tables_on_the_cpu()
def path_jacobian(network: Network, paths: Paths | None = None, *, limit: int = LIMIT) -> Tensor:
    """Compute the derivative of path values in the weights, J_pe = dv_p/dw_e.

    Args:
        network: a traced network.
        paths: the paths; all of the network's if None.
        limit: how many paths may be listed then.

    Returns:
        ``[P, E]`` in float64 on the CPU; weights in the order of :func:`reduction_graph`. Exact
        where weights are zero.

    Raises:
        TooManyPathsError: there are more than ``limit`` paths.
        ValueError: the paths are another network's.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        >>> for p, value in zip(model.parameters(), (2.0, 3.0)):
        ...     _ = torch.nn.init.constant_(p, value)
        >>> ps.paths.path_jacobian(ps.trace(model, torch.zeros(1, 1)))
        tensor([[3., 2.]], dtype=torch.float64)
    """
    current_values(network)
    paths = enumerate_paths(network, limit) if paths is None else paths
    expect_own(paths.reduction, network, "list of paths was made")
    w = paths.reduction.flatten(
        {n: p.detach().double().cpu() for n, p in network.parameters.items()}
    )
    factors = torch.cat([w, w.new_ones(1)])[paths.weights]  # [P, L]
    ones = factors.new_ones(len(paths), 1)
    before = torch.cat([ones, factors.cumprod(1)[:, :-1]], 1)
    after = torch.cat([factors.flip(1).cumprod(1).flip(1)[:, 1:], ones], 1)
    # dv_p/dw_e = sum over the places of e on p of the product of the other weights
    result = w.new_zeros(len(paths), len(w) + 1)
    width = factors.shape[1]
    result.scatter_add_(1, paths.columns, before[:, :width] * after[:, :width])
    return result[:, :-1]


def path_rank(jacobian: Tensor) -> int:
    """Compute the rank of a path-Jacobian, or of the derivative of outputs in the weights.

    Columns and rows are brought to length one first: their lengths say how a network is scaled, not
    its rank.

    Args:
        jacobian: ``[P, E]``, float64.

    Returns:
        The rank, up to rounding.

    Raises:
        TypeError: it is no tensor, most often the network itself.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> ps.paths.path_rank(ps.paths.path_jacobian(ps.trace(model, torch.zeros(1, 2))))  # 17 weights, 3 classes
        14
    """
    if not isinstance(jacobian, Tensor):
        raise TypeError(
            f"this needs the matrix of path_jacobian(network), got {type(jacobian).__name__}"
        )
    matrix = jacobian
    for _ in range(4):
        for dim in (0, 1):
            length = matrix.norm(dim=dim, keepdim=True)
            matrix = matrix / torch.where(length > 0, length, 1.0)
    return int(torch.linalg.matrix_rank(matrix)) if matrix.numel() else 0


@tables_on_the_cpu()
def degrees_of_freedom(
    network: Network, data: Any = None, *, output: Output = "gaussian", dim: int = -1
) -> int:
    """Count the directions of weight space that change the network's function.

    Without data: (weights on a path) - (unit classes on a path), the generic rank of the
    path-Jacobian, whatever the size of the network; more than the rank where shared weights have
    more symmetry (docs/theory/network.md). With data: d_G(w), the rank of the outputs' derivative
    in the weights over these examples.

    Args:
        network: a traced network.
        data: examples, as the example input of :func:`pathspace.trace` was; None for the generic
            number. The derivative is a matrix of (examples x outputs) x weights in float64, so take
            small networks.
        output: what the outputs are: ``"gaussian"``, means of a Gaussian, or ``"softmax"``, logits
            of one, for which the number is that of the directions that change the Kullback-Leibler
            divergence. Without data it is that of a Gaussian.
        dim: the dimension of the outputs along which the softmax runs.

    Returns:
        The number of degrees of freedom.

    Raises:
        ValueError: the data are not of the form of the example input, or the outputs on them are
            not finite; or there is no such ``output``.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> ps.paths.degrees_of_freedom(network)
        14
        >>> _ = torch.nn.init.constant_(model[0].bias, -100.0)  # all units dead: the two output biases remain
        >>> ps.paths.degrees_of_freedom(network, torch.randn(50, 2))
        2
        >>> ps.paths.degrees_of_freedom(network, torch.randn(50, 2), output="softmax")  # their difference
        1
    """
    check_output(output)
    current_values(network)
    if data is not None:
        found = [J for example in derivatives(network, data, output, dim) for _, J in example]
        if output == "softmax":
            found = [J - J.mean(1, keepdim=True) for J in found]
        return path_rank(torch.cat([J.flatten(0, 1) for J in found]))
    graph = reduction_graph(network)
    used = used_edges(network, graph)
    ends = graph.factors(graph.ends(used)).abs().flatten()
    return int(used.sum()) - int(
        (torch.bincount(ends, minlength=graph.num_classes + 1)[1:] > 0).sum()
    )


@tables_on_the_cpu()
@torch.inference_mode(False)
@torch.enable_grad()
def dead_units(network: Network, data: Any) -> Tensor:
    """Find unit classes through which nothing flows to an output on any of the examples.

    A class is dead when its units are inactive on all examples, at all time steps and positions, or
    when what they say meets inactive units alone. Weights into and out of it have no gradient then,
    whatever the loss.

    Args:
        network: a traced network.
        data: examples, as the example input of :func:`pathspace.trace` was.

    Returns:
        bool ``[num_classes]``.

    Raises:
        ValueError: the data are not of the form of the example input, or the outputs on them are
            not finite.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> with torch.no_grad():
        ...     _ = model[0].bias.copy_(torch.tensor([-100.0, 0.0, 100.0]))
        >>> ps.paths.dead_units(ps.trace(model, torch.zeros(1, 2)), torch.randn(50, 2))
        tensor([ True, False, False])
    """
    graph = reduction_graph(network)
    model, parameters = in_float64(network)
    outputs = outputs_on(network, model, data, "gaussian", -1)
    # random weights for the outputs of every example: what flows cancels with probability zero
    generator = torch.Generator().manual_seed(0)
    total = sum(
        (torch.randn(o.shape, dtype=o.dtype, generator=generator) * o).sum() for o in outputs
    )
    flows = pulled_back(graph, [torch.as_tensor(total)], parameters) != 0

    def classes(sources: Tensor, targets: Tensor) -> Tensor:
        found = torch.zeros(graph.num_classes + 1, dtype=torch.bool)
        found[torch.cat([graph.factors(sources), graph.factors(-targets)], -1).clamp(min=0)] = True
        return found[1:]

    # a direction of weight normalization is left by no edge
    left = classes(graph.source, graph.target)
    sources = graph.source[flows]
    targets = graph.target[flows]
    return ~torch.where(left, classes(sources, targets), classes(targets, sources))


def check_output(output: str) -> None:
    """Refuse a distribution that is none of ``"gaussian"`` and ``"softmax"``."""
    if output not in ("gaussian", "softmax"):
        raise ValueError(f"output must be 'gaussian' or 'softmax', got {output!r}")


@torch.inference_mode(False)
@torch.enable_grad()
def derivatives(
    network: Network, data: Any, output: Output = "gaussian", dim: int = -1
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Compute outputs and their derivative in the weights, example by example.

    Args:
        network: a traced network.
        data: examples, as the example input of :func:`pathspace.trace` was.
        output: see :func:`outputs_on`.
        dim: the dimension of the outputs that is put last.

    Yields:
        For every tensor that the network returns the outputs ``[P, K]`` at P places, K along
        ``dim``, and df/dw ``[P, K, E]``; float64 on the CPU.
    """
    graph = reduction_graph(network)
    model, parameters = in_float64(network)
    for example in examples(network.call, data):  # a backward pass of one example is the cheapest
        result = []
        for tensor in outputs_on(network, model, example, output, dim):
            f = tensor.movedim(dim, -1) if tensor.dim() else tensor.reshape(1)
            rows = [pulled_back(graph, [value], parameters) for value in f.reshape(-1).unbind()]
            places = f.detach().reshape(-1, f.shape[-1])
            result.append((places, torch.stack(rows).reshape(*places.shape, -1)))
        yield result


def pulled_back(
    graph: ReductionGraph,
    outputs: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    seeds: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
) -> Tensor:
    """Return the derivative in the weights of the sum of all outputs times seeds, ``[E]``.

    Args:
        graph: numbers the weights.
        outputs: made of the parameters; their graph stays.
        parameters: by name.
        seeds: one for each output; ones for numbers if None.
        create_graph: whether the result can be differentiated.
    """
    gradients = torch.autograd.grad(
        outputs,
        list(parameters.values()),
        seeds,
        retain_graph=True,
        create_graph=create_graph,
        materialize_grads=True,
    )
    return graph.flatten(dict(zip(parameters, gradients, strict=True)))


def in_float64(network: Network) -> tuple[nn.Module, dict[str, Tensor]]:
    """Copy the model in float64 and evaluation form; return it with its parameters."""
    expect_weights(network)
    current_values(network)
    model = evaluation_form_of(network.model).to("cpu", torch.float64)
    return model, {name: model.get_parameter(name).requires_grad_() for name in network.parameters}


def outputs_on(
    network: Network, model: nn.Module, data: Any, output: Output, dim: int
) -> list[Tensor]:
    """Return outputs of a copy of the model, of a softmax along ``dim`` if given; undo changes of its modules."""
    next(examples(network.call, data))  # which looks at their form
    args, kwargs = arguments_in(pytree.tree_map_only(Tensor, wide_copy, data))
    kept = [(d, dict(d)) for module in model.modules() for d in (vars(module), module._buffers)]
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        AtLeast(torch.float64),
        sdpa_kernel(SDPBackend.MATH),  # fused attention has no second derivative
    ):
        result = model(*args, **kwargs)
        outputs = [t for t in network.returned(result) if t.requires_grad]
    for attributes, before in kept:
        attributes.clear()
        attributes.update(before)
    _check_outputs(outputs, output, dim)
    return outputs


def _check_outputs(outputs: Sequence[Tensor], output: Output, dim: int) -> None:
    """Raise an error for outputs that have no derivative in the sense of ``output``.

    Raises:
        ValueError: there are none, they are not finite, or ``dim`` holds no classes of a softmax.
    """
    if not sum(t.numel() for t in outputs):
        raise ValueError("the batch is empty: give one example at least")
    if not all(bool(t.isfinite().all()) for t in outputs):
        raise ValueError(
            "the outputs on the data are not finite: the data, or the weights, hold NaN or infinities"
        )
    if output != "softmax":
        return
    for f in outputs:
        if not -f.dim() <= dim < f.dim() or f.shape[dim] < 2:
            raise ValueError(
                f"dim={dim} holds no classes: outputs of one example are {tuple(f.shape)}"
            )
