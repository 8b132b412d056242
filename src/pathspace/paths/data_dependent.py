"""kappa of the data-dependent path norm (D16 Section 4: Neyshabur, Tomioka, Salakhutdinov, Srebro 2016).

With the activation pattern held, half the second derivative of gamma_net^2 in w_uv is

    kappa_uv = (1 - alpha) psi_v gamma_u^2 + alpha sum over non-input nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]

    psi = 1 at outputs, psi_u = (1 - alpha) sum_v psi_v w_uv^2;  v itself is one of the nodes o
    stat = mean square over the examples (R = M) or variance (R = C)

alpha = 0 is Path-SGD; alpha = 1 with R = M is the diagonal of the Gaussian Fisher information (D16 Theorem 2), without
shared weights and for convolutions. (D16 Eq. (30) needs alpha/n and pairs over N_out(u1) x N_out(u2), and holds for
layered networks only.) For a recurrent network half the Hessian is the Fisher plus E[z d2z/dp2], which can be negative;
here it is always the square of the first derivative: that of the parameter (``"parameters"``, the Fisher), or that of
each of its edges (``"edges"``).

One backward pass estimates the second term: seed every node o of every example i with eps_o^i sqrt(psi_o), eps = +-1.
For R = M the signs of examples are independent; for R = C all examples have the same signs, and the squared mean is
subtracted. Both are unbiased.

Letters: u -> v an edge, o node, i example, n examples, h activation, z value before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.observed import Key
from pathspace.network.precision import in_full_precision
from pathspace.network.replay import Replay, replay
from pathspace.paths.edge_statistics import Seeded, Sharing, products, statistics
from pathspace.paths.kappa import kappa_of
from pathspace.paths.node_measure import Statistic, check_options, measure
from pathspace.paths.norm import widened

Estimator = Literal["exact", "signs", "auto"]

EXACT_UNITS = 8
"""``"auto"`` takes one backward pass for each unit up to so many of them, and random signs beyond."""


@in_full_precision
def data_dependent_kappa(
    network: Network,
    inputs: Any,
    *,
    alpha: float = 0.5,
    statistic: Statistic = "second_moment",
    sharing: Sharing = "parameters",
    estimator: Estimator = "exact",
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The metric of data-dependent Path-SGD for every parameter of a network.

    Args:
        network: a traced network.
        inputs: a batch, as for :func:`data_dependent_norm`.
        alpha: share of the data, in [0, 1]; 0 is :func:`kappa`.
        statistic: ``"second_moment"`` (R = M) or ``"covariance"`` (R = C).
        sharing: whether a parameter's edges are added before the statistic is taken, ``"parameters"``: half the Hessian
            of a feed-forward network, and the Fisher of any at alpha = 1; or after it, ``"edges"``.
        estimator: ``"exact"``: one backward pass for every unit o that is no input (with alpha = 1, every output);
            ``"signs"``: one backward pass in all, unbiased; ``"auto"``: exact up to ``EXACT_UNITS`` units.
        generator: draws the signs; seeded with 0 if None. Torch's own random state is never used.

    Returns:
        Parameter name -> tensor of the parameter's shape, non-negative.

    Raises:
        ValueError: an option is none of those, or the inputs have another shape than the traced ones.
        UnmatchedForwardError: the forward pass on these inputs is not the traced one, or holds an operation that cannot
            be followed on data.
        FloatingPointError: a value is not finite.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> ps.paths.data_dependent_kappa(network, x, alpha=1.0)
        {'weight': tensor([[2., 8.]]), 'bias': tensor([1.])}
    """
    check_options(alpha, statistic)
    if sharing not in ("parameters", "edges"):
        raise ValueError(f"sharing must be 'parameters' or 'edges', got {sharing!r}")
    if estimator not in ("exact", "signs", "auto"):
        raise ValueError(f"estimator must be 'exact', 'signs' or 'auto', got {estimator!r}")
    if alpha == 0:
        network.check_current()
        return kappa_of(network, list(network.parameters))
    shares = kappa_shares(
        network,
        inputs,
        alpha=alpha,
        statistic=statistic,
        sharing=sharing,
        estimator=estimator,
        generator=torch.Generator().manual_seed(0) if generator is None else generator,
    )
    return require_finite({n: torch.add(p, shares.data[n], alpha=alpha) for n, p in shares.path.items()})


def require_finite(kappa: dict[str, Tensor]) -> dict[str, Tensor]:
    """Kappa itself, all of it finite.

    Raises:
        FloatingPointError: a value is not.
    """
    if kappa and not bool(torch.isfinite(torch.stack([value.sum() for value in kappa.values()])).all()):
        raise FloatingPointError(
            "the data-dependent kappa is not finite: weights or inputs are not finite, or too large"
        )
    return kappa


@dataclass(frozen=True)
class Shares:
    """The two terms of kappa, path + alpha data, by parameter name; the first may share memory.

    Attributes:
        path: (1 - alpha) psi_v gamma_u^2.
        data: the sum over nodes o.
        cross: the same sum for products with the derivative in another parameter, the bias.
        bias_of: which other one.
        drawn: whether the sums were estimated.
    """

    path: dict[str, Tensor]
    data: dict[str, Tensor]
    cross: dict[str, Tensor]
    bias_of: dict[str, str]
    drawn: bool


def kappa_shares(
    network: Network,
    inputs: Any,
    *,
    alpha: float,
    statistic: Statistic,
    sharing: Sharing,
    estimator: Estimator,
    generator: torch.Generator,
    names: Sequence[str] | None = None,
    pairs: Callable[[Network, Replay], dict[str, str]] | None = None,
) -> Shares:
    """The two terms of :func:`data_dependent_kappa`, path + alpha data.

    Args:
        network: a traced network.
        inputs: a batch; also a pair of positional and keyword arguments.
        alpha: share of the data, positive.
        statistic: see :func:`data_dependent_kappa`, like the options that follow.
        sharing: likewise.
        estimator: likewise.
        generator: draws the signs.
        names: the parameters to return; all of the network's if None.
        pairs: finds for which parameters, and with which others, products are wanted.

    Returns:
        Both terms, not yet checked with :func:`require_finite`.
    """
    found = replay(network, inputs)
    wanted = list(network.parameters) if names is None else list(names)
    path, psi = path_share(network, found, alpha, statistic, wanted)
    exact = estimator == "exact"
    if estimator == "auto":
        exact = sum(p.numel() for p in psi.values()) <= EXACT_UNITS
    bias_of = {} if pairs is None else {w: b for w, b in pairs(network, found).items() if w in wanted}
    seedings = _one_by_one(found, psi) if exact else [(sign_seeds(found, psi, statistic, generator), 1.0)]
    data: dict[str, Tensor] = {}
    cross: dict[str, Tensor] = {}
    for seeds, weight in seedings:
        seeded = Seeded.of(found, seeds)
        _add(data, statistics(seeded, statistic, sharing, wanted), weight)
        _add(cross, {w: products(seeded, w, b, statistic) for w, b in bias_of.items()}, weight)
    if not data:  # nothing reaches an output
        data = {name: torch.zeros_like(found.leaves[name]) for name in wanted}
        cross = {name: torch.zeros_like(found.leaves[name]) for name in bias_of}
    return Shares(path, data, cross, bias_of, not exact)


def _add(total: dict[str, Tensor], values: dict[str, Tensor], weight: float) -> None:
    for name, value in values.items():
        if name in total:
            total[name].add_(value, alpha=weight)
        else:
            total[name] = value if weight == 1 else value.mul_(weight)


def path_share(
    network: Network, found: Replay, alpha: float, statistic: Statistic, wanted: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[Key, Tensor]]:
    """(1 - alpha) psi_v gamma_u^2 of all parameters, and psi of the nodes where it is not zero (one example)."""
    with torch.inference_mode(False), torch.enable_grad():
        q = {name: widened(p.detach()).square().requires_grad_() for name, p in network.parameters.items()}
        result = measure(network, q, found, alpha, statistic)
        keys, names = list(result.nodes), list(q) if wanted is None else list(wanted)
        gradients = torch.autograd.grad(
            result.net, [*(result.nodes[k] for k in keys), *(q[n] for n in names)], allow_unused=True
        )
    psi = {k: g for k, g in zip(keys, gradients, strict=False) if g is not None and bool(g.any())}
    rest = gradients[len(keys) :]
    path = {n: torch.zeros_like(q[n]) if g is None else g for n, g in zip(names, rest, strict=True)}
    return {n: p.detach() for n, p in path.items()}, psi


def _one_by_one(found: Replay, psi: dict[Key, Tensor]) -> Iterator[tuple[dict[Key, Tensor], float]]:
    """A seed of one for every unit o by itself, with psi_o."""
    for key, weights in psi.items():
        node = found.nodes[key]
        for position, weight in enumerate(weights.reshape(-1).tolist()):
            if weight:
                one = torch.zeros(weights.numel(), dtype=node.value.dtype, device=node.value.device)
                one[position] = 1
                yield {key: one.reshape(node.shape_of_one()).expand(node.value.shape)}, weight


def sign_seeds(
    found: Replay, psi: dict[Key, Tensor], statistic: Statistic, generator: torch.Generator
) -> dict[Key, Tensor]:
    """eps_o sqrt(psi_o) at every node o: for R = M of every example, for R = C the same for all examples."""
    nodes = {key: found.nodes[key] for key in psi}
    shapes = [n.value.shape if statistic == "second_moment" else n.shape_of_one() for n in nodes.values()]
    signs = random_signs(shapes, generator)
    return {
        key: (psi[key].reshape(node.shape_of_one()).to(node.value.dtype).sqrt() * eps.to(node.value)).expand(
            node.value.shape
        )
        for (key, node), eps in zip(nodes.items(), signs, strict=True)
    }


def random_signs(shapes: Sequence[torch.Size], generator: torch.Generator) -> list[Tensor]:
    """Independent signs +-1, int8; a random word makes 62 of them."""
    sizes = [shape.numel() for shape in shapes]
    count = sum(sizes)
    words = torch.randint(0, 2**62, (-(-count // 62), 1), generator=generator, device=generator.device)
    bits = words.bitwise_right_shift(torch.arange(62, device=words.device)).bitwise_and_(1)
    signs = bits.to(torch.int8).mul_(2).sub_(1).reshape(-1)[:count]
    return [part.reshape(shape) for part, shape in zip(signs.split(sizes), shapes, strict=True)]
