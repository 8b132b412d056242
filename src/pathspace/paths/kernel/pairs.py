"""The second term of kappa: pairs of distinct edges of one parameter on one path (P16 Section 3, Eq. (10), (11)).

    kappa2_i = 2 p_i^2 d^2G/d(p_i^2)^2 = 2 p_i^2 * (sum over ORDERED pairs of distinct edges of i on one path)

P16 Eq. (10) lacks the factor 2. A recurrent layer has a closed form; other parameters that occur
more than once on a path take the diagonal of the Hessian of G, one Hessian-vector product an
element.

Letters: q = p^2, G squared network. Of a recurrent layer: T time, H hidden, t = 0..T-1 a
transition; S = W_rec o W_rec ``[H, H]``; ``before[t]`` the squared state that enters transition t
(h_{t-1} of P16, zero or the start at t = 0); ``delta[t]`` = dG/dh_t, the path mass that leaves the
state after it; both ``[T, H]``.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pathspace.network import Network
from pathspace.network.network import current_values, in_full_precision
from pathspace.paths.kernel.safe_type import in_safe_type
from pathspace.squared.precision import squared_leaves, widened
from pathspace.squared.squares import Outer, dense
from pathspace.squared.tape import Tap

_CHUNK = 64  # Hessian-vector products at a time
_LOOK_EVERY = 8  # products of recurrent matrices between two looks at whether the others matter


def second_term(
    network: Network, parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """kappa2_i = 2 p_i^2 d^2G/d(p_i^2)^2 for every parameter.

    Args:
        network: a traced network.
        parameters: values to use instead of the model's own, by name.

    Returns:
        Parameter name -> tensor of the parameter's shape; zeros where no path meets a parameter
        twice. Exact. The recurrent matrix of an ``nn.RNN`` costs T products of H x H matrices; a
        parameter of n elements that a hand-written loop reuses costs n Hessian-vector products. In
        float64 where the type overflows (see :func:`pathspace.paths.kappa`).

    Raises:
        FloatingPointError: a value is not finite even in float64.
        KeyError: ``parameters`` lacks a parameter of the network.
        ValueError: one of ``parameters`` has another shape than the network's.
        TypeError: ``network`` is no traced network.

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
        >>> rnn.weight_ih_l0.data, rnn.weight_hh_l0.data = torch.tensor([[1.0]]), torch.tensor([[2.0]])
        >>> ps.paths.second_term(ps.trace(rnn, torch.zeros(3, 1, 1)))["weight_hh_l0"].item()  # G = 3 + 2 q + q^2
        16.0
    """
    current_values(network, parameters)

    def compute(values: Mapping[str, Tensor]) -> dict[str, Tensor | Outer]:
        result = pairs_term(network, values)
        return {n: result.get(n, torch.zeros_like(widened(values[n]))) for n in network.parameters}

    return {
        name: dense(value)
        for name, value in in_safe_type(network, parameters, compute).values.items()
    }


@in_full_precision
def pairs_term(network: Network, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """:func:`second_term` in the type of the given parameters, overflow or not; without those that have none."""
    with torch.inference_mode(False), torch.enable_grad():
        uses = parameter_uses(network)
        uses.update(_in_both_factors(network))
        q = squared_leaves(source, network.parameters)
        # q = q_0 f at f = 1: derivatives in the factor f have no scale, where d^2G/dq^2 may leave
        # the type though q times it does not
        repeated = {n: torch.ones_like(q[n]).requires_grad_() for n in q if uses[n] > 1}
        scaled = {
            n: square.detach() * repeated[n] if n in repeated else square for n, square in q.items()
        }
        taps: list[Tap] = []
        total, _ = network.tape.run(scaled, network.live, taps=taps)
        closed = [tap for tap in taps if uses[tap.recurrent] == 1]
        result = _of_recurrent(total, closed, q)
        result.update(_of_repeated(total, repeated, q, batched=not taps))
    return result


def _of_recurrent(total: Tensor, taps: Sequence[Tap], q: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return kappa2 of recurrent matrices that their layers alone use, in closed form."""
    if not taps:
        return {}
    result = {}
    deltas = torch.autograd.grad(total, [tap.entering for tap in taps], retain_graph=True)
    for tap, delta in zip(taps, deltas, strict=True):
        S = q[tap.recurrent].detach()
        before = tap.before.detach()
        if tap.backwards:
            before = before.flip(0)
            delta = delta.flip(0)
        term = torch.zeros_like(S)
        for h, d in zip(_per_example(before), _per_example(delta), strict=True):
            term = term + recurrent_second_term(S, h, d)
        result[tap.recurrent] = term
    return result


def _per_example(values: Tensor) -> tuple[Tensor, ...]:
    """Return the values ``[T, ..., H]`` of each example, ``[T, H]``."""
    return values.reshape(len(values), -1, values.shape[-1]).unbind(1)


def _of_repeated(
    total: Tensor, factors: Mapping[str, Tensor], q: Mapping[str, Tensor], *, batched: bool
) -> dict[str, Tensor]:
    """Return kappa2 of parameters that are used several times, from second derivatives in their factors."""
    if not factors:
        return {}
    gradients = torch.autograd.grad(
        total, list(factors.values()), create_graph=True, materialize_grads=True
    )
    result = {}
    for (name, factor), gradient in zip(factors.items(), gradients, strict=True):
        if not gradient.requires_grad:
            continue
        diagonal = _hessian_diagonal(gradient, factor, batched=batched)
        if diagonal is None:
            continue
        # 2 q d^2G/dq^2 = 2 (d^2G/df^2) / q, and nothing where q = 0
        square = q[name].detach()
        result[name] = torch.where(square > 0, 2 * diagonal / square, 0.0)
    return result


def parameter_uses(network: Network) -> Counter[str]:
    """Return how many operations use each parameter; views of it are followed."""
    names = {leaf.slot: leaf.name for leaf in network.tape.leaves if leaf.kind == "parameter"}
    count: Counter[str] = Counter()
    for instruction in network.tape.instructions:
        for slot in instruction.inputs:
            if slot in names:
                if instruction.of_parameter:
                    names.update(dict.fromkeys(instruction.outputs, names[slot]))
                else:
                    count[names[slot]] += 1
    return count


def _in_both_factors(network: Network) -> set[str]:
    """Return the parameters that a path may meet twice because activations are multiplied that both depend on them."""
    if not network.tape.product:
        return set()
    leaves = [leaf for leaf in network.tape.leaves if leaf.kind == "parameter"]
    names = [leaf.name for leaf in leaves]
    # sets of parameters, as the bits of a number
    before = {leaf.slot: 1 << names.index(leaf.name) for leaf in leaves}
    both = 0
    for instruction in network.tape.instructions:
        sets = [before.get(slot, 0) for slot in instruction.inputs]
        if instruction.form == "product":
            both |= sets[0] & sets[1] if len(sets) > 1 else sets[0]
        union = functools.reduce(operator.or_, sets)
        before.update(dict.fromkeys(instruction.outputs, union))
    return {name for i, name in enumerate(names) if both >> i & 1}


def _hessian_diagonal(gradient: Tensor, f: Tensor, *, batched: bool) -> Tensor | None:
    """D gradient_i / d f_i for every element; None for zero. ``batched`` takes several at a time."""
    flat = gradient.reshape(-1)
    diagonal = torch.zeros_like(flat)
    (probe,) = torch.autograd.grad(flat.sum(), f, retain_graph=True, allow_unused=True)
    # not negative: no path has a pair of edges of this parameter
    if probe is None or not bool(probe.any()):
        return None
    chunk = _CHUNK if batched else 1
    for start in range(0, flat.numel(), chunk):
        index = torch.arange(start, min(start + chunk, flat.numel()), device=flat.device)
        rows = torch.zeros(len(index), flat.numel(), dtype=flat.dtype, device=flat.device)
        rows[torch.arange(len(index), device=flat.device), index] = 1
        rows = rows if batched else rows[0]
        (products,) = torch.autograd.grad(
            flat, f, rows, retain_graph=True, is_grads_batched=batched
        )
        diagonal[index] = products.reshape(len(index), -1).gather(1, index[:, None])[:, 0]
    return diagonal.reshape(f.shape)


def recurrent_second_term(S: Tensor, before: Tensor, delta: Tensor) -> Tensor:
    """kappa2 of the recurrent matrix of one layer.

    Args:
        S: squared recurrent weights ``[H, H]``.
        before: squared states before each transition, ``[T, H]``.
        delta: path mass after each transition, ``[T, H]``.

    Returns:
        kappa2, ``[H, H]``. P16 Eq. (11), whose footnote 3 prints h_{t2} for h_{t2-1} and drops the
        factor 4. For an S that contracts, the sum ends as soon as a proved bound on the rest is
        below rounding.
    """
    steps = before.shape[0]
    total = torch.zeros_like(S)
    loops = S.new_empty(S.shape)
    power = torch.eye(S.shape[0], dtype=S.dtype, device=S.device)
    # no sum over t below is larger than this in any entry
    most = torch.outer(delta.sum(0), before.amax(0))
    for m in range(steps - 1):
        # The edge k -> j at transitions t and t + m + 1, joined by S^m from j back to k.
        pairs = delta[m + 1 :].t() @ before[: steps - m - 1]
        # kappa2 = 4 sum_m S o (S^m)^T o [sum_t delta_{t+m+1} before_t^T]; S o (S^m)^T first,
        # because a loop has no scale, where the other two factors may leave the type together
        # though the product of all three does not
        torch.mul(S, power.t(), out=loops)
        total.addcmul_(loops, pairs)
        following = power @ S
        if m % _LOOK_EVERY == _LOOK_EVERY - 1 and _negligible(
            power, following, loops * most, total
        ):
            break
        power = following
    return total.mul_(4)


def _negligible(power: Tensor, following: Tensor, last: Tensor, total: Tensor) -> bool:
    """Return whether all further terms are below the rounding of the sum so far, in every entry.

    With S^{m+1} <= r S^m elementwise, S^{m+i} <= r^i S^m for all i, since S is not negative: all
    further terms add up to at most r / (1 - r) ``last``, a bound on the last term taken. r and the
    comparison are made of ratios that rescaling does not change.
    """
    grows = torch.where(following > 0, following / power, 0.0).amax()
    r = float(grows)
    if r >= 1 or r != r:
        return False
    rest = last * (r / (1 - r))
    return bool((rest <= torch.finfo(total.dtype).eps * total).all())
