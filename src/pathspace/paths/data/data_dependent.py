"""kappa of the data-dependent path norm (D16 Section 4: Neyshabur, Tomioka, Salakhutdinov, Srebro 2016).

With the activation pattern held, half the second derivative of gamma_net^2 in w_uv is

    kappa_uv = (1 - alpha) psi_v gamma_u^2 + alpha sum over non-input nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]

    psi = 1 at outputs, psi_u = (1 - alpha) sum_v psi_v w_uv^2;  v itself is one of the nodes o
    stat = mean square over the examples (R = M) or variance (R = C)

alpha = 0 is Path-SGD; alpha = 1 with R = M is the diagonal of the Gaussian Fisher information (D16
Theorem 2), without shared weights and for convolutions. (D16 Eq. (30) needs alpha/n and pairs over
N_out(u1) x N_out(u2), and holds for layered networks only.) For a recurrent network half the
Hessian is the Fisher plus E[z d2z/dp2], which can be negative; here it is always the square of the
first derivative: that of the parameter (``"parameters"``, the Fisher), or that of each of its edges
(``"edges"``).

One backward pass estimates the second term: it seeds every node o of every example i with eps_o^i
sqrt(psi_o), eps = +-1. For R = C the two examples of a random pair have the same signs, and their
difference is squared. Both are unbiased (see ``signs``).

Letters: u -> v an edge, o node, i example, n examples, h activation, z value before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import in_full_precision
from pathspace.paths.data.edge_statistics import Seeded, Sharing, products, statistics
from pathspace.paths.data.node_measure import Statistic, check_options, measure
from pathspace.paths.data.signs import ALONE, Place, random_part, sign_seeds
from pathspace.paths.kernel.kappa import kappa
from pathspace.paths.kernel.safe_type import RangeReport, range_report
from pathspace.replay.observed import Key
from pathspace.replay.replay import Replay, replay
from pathspace.squared.precision import squared_leaves
from pathspace.squared.squares import Outer, dense

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
    """Compute the metric of data-dependent Path-SGD for every parameter of a network.

    Args:
        network: a traced network.
        inputs: a batch, as for :func:`data_dependent_norm`.
        alpha: share of the data, in [0, 1]; 0 is :func:`kappa`.
        statistic: ``"second_moment"`` (R = M) or ``"covariance"`` (R = C).
        sharing: whether a parameter's edges are added before the statistic is taken,
            ``"parameters"``: half the Hessian of a feed-forward network, and the Fisher of any at
            alpha = 1; or after it, ``"edges"``.
        estimator: ``"exact"``: one backward pass for every unit o that is no input (with alpha = 1,
            every output); ``"signs"``: one backward pass in all, unbiased; ``"auto"``: exact up to
            8 such units, else signs.
        generator: draws the signs; seeded with 0 if None. Torch's own random state is never used.

    Returns:
        Parameter name -> tensor of the parameter's shape, non-negative. In the parameters' own
        type, as for :func:`kappa`; in float64 for all, if a largest value is too large or small for
        it.

    Raises:
        ValueError: an option is unknown or out of its range, or the inputs have another shape than
            the traced ones.
        UnmatchedForwardError: the forward pass on these inputs is not the traced one, or holds an
            operation that cannot be followed on data.
        FloatingPointError: a value is not finite even in float64.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> network = ps.trace(model, torch.zeros(1, 2))
        >>> x = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> ps.paths.data_dependent_kappa(network, x, alpha=1.0)
        {'weight': tensor([[2., 8.]]), 'bias': tensor([1.])}
    """
    check_options(alpha, statistic)
    check_estimation(sharing, estimator)
    if alpha == 0:
        network.check_current()
        return kappa(network)
    return in_safe_type(network, inputs, Request(alpha, statistic, sharing, estimator), generator)[
        0
    ]


def check_estimation(
    sharing: str, estimator: str, averaging: float | None = None, examples: float | None = None
) -> None:
    """Refuse a way to find kappa that does not exist.

    Raises:
        TypeError: a number is none.
        ValueError: an option is out of its range.
    """
    if sharing not in ("parameters", "edges"):
        raise ValueError(f"sharing must be 'parameters' or 'edges', got {sharing!r}")
    check_estimator(estimator)
    for name, value in (("averaging", averaging), ("examples", examples)):
        if value is not None and not isinstance(value, Real):
            raise TypeError(f"{name} must be a number or None, got {value!r}")
    if averaging is not None and not 0 <= averaging < 1:
        raise ValueError(f"averaging must be None or in [0, 1), got {averaging}")
    if examples is not None and not (examples > 0 if examples < 1 else examples % 1 == 0):
        raise ValueError(
            f"examples must be None, a number of them or a share below 1, got {examples}"
        )


def check_estimator(estimator: str) -> None:
    """Raise ValueError for an estimator that does not exist."""
    if estimator not in ("exact", "signs", "auto"):
        raise ValueError(f"estimator must be 'exact', 'signs' or 'auto', got {estimator!r}")


@dataclass(frozen=True)
class KappaTerms:
    """The two terms of kappa, path + alpha data, by parameter name; the first may share memory.

    Attributes:
        path: (1 - alpha) psi_v gamma_u^2; nothing where it is zero.
        data: the sum over nodes o.
        cross: the same sum for products with the derivative in another parameter, the bias.
        bias_of: which other one.
        drawn: whether the sums were estimated.
    """

    path: dict[str, Tensor | Outer]
    data: dict[str, Tensor]
    cross: dict[str, Tensor]
    bias_of: dict[str, str]
    drawn: bool

    def kappa(self, name: str, data: Tensor, factor: float) -> Tensor:
        """Return path + factor data of a parameter, with data from any source."""
        path = self.path.get(name)
        if path is None:
            return data * factor
        if isinstance(path, Outer):
            return torch.addr(
                data, path.rows.to(data.dtype), path.columns.to(data.dtype), beta=factor
            )
        return torch.add(path, data, alpha=factor)


@dataclass(frozen=True)
class Request:
    """Options of :func:`kappa_terms`; see :func:`data_dependent_kappa`.

    Attributes:
        alpha: share of the data, positive.
        statistic: mean square or variance.
        sharing: edges added before or after it.
        estimator: how the sum over nodes is found.
        pairs: finds for which parameters, and with which others, products are wanted.
        part: whether random signs may leave out a part of a large batch, because the caller
            averages over draws.
        place: of this process, where each of several has a part of the batch.
    """

    alpha: float
    statistic: Statistic
    sharing: Sharing
    estimator: Estimator
    pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    part: bool = False
    place: Place = ALONE


def kappa_terms(
    network: Network,
    replayed: Replay,
    request: Request,
    generator: torch.Generator,
    names: Sequence[str] | None = None,
) -> KappaTerms:
    """Compute the two terms of :func:`data_dependent_kappa`, path + alpha data.

    Args:
        network: a traced network.
        replayed: a forward pass of it on data.
        request: what is wanted.
        generator: draws the signs.
        names: the parameters to return; all of the network's if None.

    Returns:
        Both terms, not yet checked with :func:`check_finite`.
    """
    statistic = request.statistic
    wanted = list(network.parameters) if names is None else list(names)
    path, psi = path_share(network, replayed, request.alpha, statistic, wanted)
    exact = is_exact(request.estimator, sum(p.numel() for p in psi.values()), EXACT_UNITS)
    bias_of = {}
    if request.pairs is not None:
        bias_of = {w: b for w, b in request.pairs(network, replayed).items() if w in wanted}
    data: dict[str, Tensor] = {}
    cross: dict[str, Tensor] = {}
    seedings = _one_by_one(replayed, psi) if exact else _at_once(replayed, psi, request, generator)
    for seeded, weight in seedings:
        _add(data, statistics(seeded, statistic, request.sharing, wanted), weight)
        _add(cross, {w: products(seeded, w, b, statistic) for w, b in bias_of.items()}, weight)
    if not data:  # nothing reaches an output
        data = _zeros(replayed, wanted)
        cross = _zeros(replayed, bias_of)
    # a model of several types, as for paths alone
    if len({value.dtype for value in data.values()}) > 1:
        data = _in_double(data)
        cross = _in_double(cross)
    return KappaTerms(path, data, cross, bias_of, not exact)


def is_exact(estimator: Estimator, count: int, most: int) -> bool:
    """Return whether so many units are seeded one by one; ``"auto"`` does it for ``most`` of them at most."""
    if estimator == "auto":
        return count <= most
    return estimator == "exact"


def _zeros(replayed: Replay, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(replayed.leaves[name]) for name in names}


def _in_double(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in values.items()}


def in_safe_type(
    network: Network, inputs: Any, request: Request, generator: torch.Generator | None
) -> tuple[dict[str, Tensor], KappaTerms]:
    """Compute kappa on a batch, and its two terms; in float64 if the type of the parameters cannot hold them.

    Raises:
        FloatingPointError: it is not finite even there.
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    before = generator.get_state()
    terms = kappa_terms(network, replay(network, inputs), request, generator)
    kappa = _report_of(terms, request.alpha)
    types = kappa.types()
    if not fits(kappa, types, request):
        # the same signs once more
        generator.set_state(before)
        terms = kappa_terms(network, in_float64(network, inputs), request, generator)
        kappa = _report_of(terms, request.alpha)
        if fits(kappa, types, request):
            for name, value in kappa.values.items():
                kappa.values[name] = dense(value).to(types[name])
    check_finite(kappa)
    # rounding
    result = {name: dense(value).clamp_min_(0) for name, value in kappa.values.items()}
    return result, terms


def _report_of(terms: KappaTerms, alpha: float) -> RangeReport:
    """Look at kappa, the sum of the two terms."""
    return range_report({name: terms.kappa(name, data, alpha) for name, data in terms.data.items()})


def fits(kappa: RangeReport, types: Mapping[str, torch.dtype], request: Request) -> bool:
    """Return whether some types hold kappa, so that it need not be computed in float64.

    A kappa of zeros may have vanished; only output biases have it, for the covariance without a
    share of the paths.
    """
    may_be_zero = request.alpha == 1 and request.statistic == "covariance"
    return kappa.fits_all(types, zero_fits=may_be_zero)


def in_float64(
    network: Network, inputs: Any, parameters: Mapping[str, Tensor] | None = None
) -> Replay:
    """Run a forward pass in float64, with the network's parameters or with given values.

    Raises:
        FloatingPointError: the model cannot run in it.
    """
    try:
        return replay(network, inputs, wide=True, parameters=parameters)
    except (RuntimeError, TypeError) as error:
        raise FloatingPointError(
            "the data-dependent kappa is too large or too small for the type of the parameters, and the model does not "
            f"run in float64 ({error}): balance the network (ps.rescaling.balance_) or convert the model"
        ) from error


def check_finite(kappa: RangeReport) -> None:
    """Refuse values that are not finite.

    Raises:
        FloatingPointError: one is.
    """
    worst = next((name for name in kappa.values if not math.isfinite(kappa.largest(name))), None)
    if worst is not None:
        raise FloatingPointError(
            f"the data-dependent kappa of '{worst}' is not finite: weights or inputs are not finite, or too large (if "
            "training diverged: lower the learning rate, raise the damping or clip)"
        )


def _add(total: dict[str, Tensor], values: dict[str, Tensor], weight: float) -> None:
    for name, value in values.items():
        if name in total:
            total[name].add_(value, alpha=weight)
        else:
            total[name] = value if weight == 1 else value.mul_(weight)


def path_share(
    network: Network,
    replayed: Replay,
    alpha: float,
    statistic: Statistic,
    wanted: Sequence[str] | None = None,
) -> tuple[dict[str, Tensor | Outer], dict[Key, Tensor]]:
    """Compute (1 - alpha) psi_v gamma_u^2 of parameters, and psi of nodes, for one example; leave out zeros."""
    names = list(network.parameters) if wanted is None else list(wanted)
    with torch.inference_mode(False), torch.enable_grad():
        q = squared_leaves(replayed.leaves, network.parameters)
        result = measure(network, q, replayed, alpha, statistic)
        keys = list(result.nodes)
        ends = list(result.nodes.values())
        ends += [q[name] for name in names]
        gradients = torch.autograd.grad(result.net, ends, allow_unused=True)
    psi = {}
    for key, g in zip(keys, gradients[: len(keys)], strict=True):
        if g is not None and bool(g.any()):
            psi[key] = g
    shares: dict[str, Tensor | Outer] = {}
    if alpha < 1:
        for name, g in zip(names, gradients[len(keys) :], strict=True):
            if g is not None:
                shares[name] = g
    return shares, psi


Seeding = tuple[Seeded, float]
"""Gradients of seeds, and the weight of what they give."""


def _at_once(
    replayed: Replay, psi: dict[Key, Tensor], request: Request, generator: torch.Generator
) -> Iterator[Seeding]:
    """Draw random signs at all units."""
    if psi:
        part = request.part
        place = request.place
        seeds, pairs = sign_seeds(
            replayed, psi, request.statistic, generator, part=part, place=place
        )
        chosen = None
        if pairs is None and part:
            chosen = random_part(
                replayed.count, generator, next(iter(seeds.values())).device, place
            )
        yield Seeded.of(replayed, seeds, pairs, chosen), 1.0


def _one_by_one(replayed: Replay, psi: dict[Key, Tensor]) -> Iterator[Seeding]:
    """Yield a seed of one at each unit o separately, with psi_o."""
    for key, weights in psi.items():
        node = replayed.nodes[key]
        for position, weight in enumerate(weights.reshape(-1).tolist()):
            if weight:
                one = torch.zeros(weights.numel(), dtype=node.value.dtype, device=node.value.device)
                one[position] = 1
                seeds = {key: one.reshape(node.shape_of_one).expand(node.value.shape)}
                yield Seeded.of(replayed, seeds), weight
