"""Parameters in coordinates u = w / r, and what a rule did to them mapped back.

The rule finds u and h, takes its step du, and w becomes w + r du. Most rules do not look at u:
their step is a function of gradients, and a decay that is a factor of u. These are given u = 0,
which saves four passes over the parameters (of `Invariant` with AdamW on an MLP of 2 million
weights: see docs/optim.md) and the rounding of u + du.

Most rules treat every parameter by itself, too. They get one chunk of the parameters after the
other, u and h in the same memory, which is no larger than the largest chunk and has not left the
cache when the step is mapped back.

Letters: w parameter, g = dL/dw, r = 1 / sqrt(D), u coordinates, h = dL/du = r g.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from pathspace.optim.rules.clipping import changes
from pathspace.optim.rules.division import SHARD_OF
from pathspace.optim.rules.traits import traits_of
from pathspace.squared.sharding import (
    from_local,
    full_tensor,
    is_sharded,
    local_shard,
    rows_from_local,
    shard_rows,
    to_local,
)
from pathspace.torch_private import foreach_addcmul_, foreach_copy_, foreach_mul_

# elements: so many of each of a rule's tensors stay in the cache, and cost more than the calls
_TOGETHER = 2**18
_ALIGNED = 16  # elements, a line of the cache
# beside the largest element: digits lost near zero, which depend on the scales of the weights
_NOTHING = 2.0**-80


def as_shadow(p: Tensor, *, matrix: bool = False) -> nn.Parameter:
    """Make the tensor that a rule trains instead of a parameter, with the shape of the parameter's coordinates.

    The coordinates are known only during a step, so outside of steps all elements are one NaN, which
    takes no memory (see ``points.expect_unread``). A parameter of half precision has coordinates in
    float32; a sharded one has those of its local rows.

    Args:
        p: the parameter.
        matrix: whether a tensor of more than two dimensions becomes a matrix.
    """
    p = to_local(p)
    shape = (p.shape[0], p.shape[1:].numel()) if matrix and p.dim() > 2 else p.shape
    unknown = torch.full((), torch.nan, dtype=type_of_shadow(p), device=p.device)
    return nn.Parameter(unknown.expand(shape), requires_grad=p.requires_grad)


def type_of_shadow(p: Tensor) -> torch.dtype:
    """Return the type of a parameter's coordinates."""
    return torch.promote_types(p.dtype, torch.float32)


@contextmanager
def decoupled_decay_only(rule: Optimizer) -> Iterator[Callable[[Tensor], float] | None]:
    """Switch a rule's decay off, if the decay is all that depends on u: then the rule may be given u = 0.

    Yields:
        From a parameter of the rule's groups to what its decay multiplies it with; None for rules
        that must see u.
    """
    traits = traits_of(type(rule))
    decays = [float(group.get("weight_decay", 0.0)) for group in rule.param_groups]
    if traits.reads_points or (any(decays) and traits.decays != "decoupled"):
        yield None
        return
    factors: dict[int, float] = {}
    decaying = [
        (group, decay) for group, decay in zip(rule.param_groups, decays, strict=True) if decay
    ]
    for group, decay in decaying:
        factor = 1 - float(group["lr"]) * decay
        factors.update((id(p), factor) for p in group["params"])
    try:
        for group, _ in decaying:
            group["weight_decay"] = 0.0
        yield lambda p: factors.get(id(p), 1.0)
    finally:
        for group, decay in decaying:
            group["weight_decay"] = decay


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Memory of parameters stepped in one call. That of all chunks of a type overlaps."""

    u: Tensor
    h: Tensor


class CoordinateView:
    """One parameter, and what the rule trains in its place.

    Args:
        parameter: the parameter.
        shadow: u, with h as its gradient; of w's size.
        chunk: where their memory is.
        start: from where on.

    Attributes:
        p: w, the part of the parameter in this process: all of it, unless FSDP splits it.
        r: 1 / sqrt(D); None outside the network.
        has_zeros: whether some r are zero, where w stays.
    """

    __slots__ = (
        "_address",
        "_h",
        "_is_sharded",
        "_place",
        "_shaped",
        "_u",
        "chunk",
        "has_zeros",
        "p",
        "parameter",
        "r",
        "shadow",
    )

    def __init__(self, parameter: Tensor, shadow: nn.Parameter, chunk: Chunk, start: int) -> None:
        self.parameter = parameter
        self.shadow = shadow
        self.chunk = chunk
        self.p = to_local(parameter)
        self._place = self.p.device, self.p.dtype
        self._is_sharded = self.p is not parameter
        self.r: Tensor | None = None
        self.has_zeros = False
        end = start + self.p.numel()
        self._u = chunk.u[start:end].view(self.p.shape)
        self._h = chunk.h[start:end].view(self.p.shape)
        self._address = self._u.data_ptr()
        shadow.grad = None
        shadow.data = self._u.view(shadow.shape)
        self._shaped = self._h.view(shadow.shape)

    @property
    def is_current(self) -> bool:
        """True if the parameter has kept its memory and its type."""
        p = self.p
        return self._place == (p.device, p.dtype)

    @property
    def has_one_type(self) -> bool:
        """True if w, r and u have one type, so that one call may map many parameters back."""
        r = self.r
        return r is not None and self.p.dtype == r.dtype == self._u.dtype

    @property
    def is_launched(self) -> bool:
        """True if, besides, the gradient has this type, on a GPU, where one launch serves many parameters."""
        g = self.parameter.grad
        if g is None or self._is_sharded or not self._u.is_cuda:
            return False
        return self.has_one_type and g.dtype == self._u.dtype

    @property
    def is_finite(self) -> bool:
        """True if u is finite."""
        return bool(self._u.isfinite().all())

    def read_gradient(self, *, masked: bool, factor: float | Tensor = 1.0) -> None:
        """h = factor r g, without a change of the user's own.

        Args:
            masked: what is nothing beside the largest becomes zero.
            factor: what clips all gradients.
        """
        r = self.r
        h = self._h
        g = self.parameter.grad
        if g is None:  # of an evaluation that did not use the parameter
            self.shadow.grad = None
            h.zero_()
            return
        if self._is_sharded:
            g = to_local(g)
        if r is None:
            h.copy_(g)
        else:
            torch.mul(g, r, out=h)
        if masked and h.numel():
            h.masked_fill_(h.abs() < _NOTHING * h.abs().amax(), 0.0)
        if changes(factor):
            h.mul_(factor)
        self.hand_gradient()

    @property
    def h(self) -> Tensor:
        """The memory of h, in w's shape."""
        return self._h

    def hand_gradient(self) -> None:
        """Let the rule find h."""
        if self.shadow.grad is not self._shaped:
            self.shadow.grad = self._shaped

    def put(self) -> None:
        """u = w / r."""
        u = self._u
        r = self.r
        if r is None:
            u.copy_(self.p)
        else:
            torch.div(self.p, r, out=u)
        if self.has_zeros:
            u.masked_fill_(r == 0, 0.0)

    def _step(self, start: Tensor, r: Tensor, out: Tensor | None = None) -> Tensor:
        """du = u - w / r for w = start, bitwise zero where u is what :meth:`put` made of w."""
        if start.dtype == r.dtype == self._u.dtype:
            du = torch.addcdiv(self._u, start, r, value=-1, out=out)
        else:
            du = torch.sub(self._u, (start / r).to(self._u.dtype), out=out)
        return du.masked_fill_(r == 0, 0.0) if self.has_zeros else du

    def gathered(self, *, sees: bool) -> nn.Parameter:
        """Return u, with gradient h, of a sharded parameter; u is 0 if the rule does not read it."""
        p = self.parameter
        shape = (*p.shape[:1], *self.shadow.shape[1:])
        h = full_tensor(from_local(self._h, p))
        u = full_tensor(from_local(self._u, p)) if sees or self.r is None else torch.zeros_like(h)
        full = nn.Parameter(u.view(shape))
        vars(full).update(vars(self.shadow))  # what the rule is told of it
        full.grad = h.view(shape)
        return full

    def put_decayed(self, decay: float) -> None:
        """u = decay w, outside the network."""
        self._u.copy_(self.p).mul_(decay)

    def map_back(self, decay: float | None) -> None:
        """w = w + r du; r is let go of, so that there are never two of them in memory.

        Args:
            decay: what w is multiplied with before, if u was 0; None if u was w / r.
        """
        self._fetch()
        u = self._u
        r = self.r
        self.r = None
        if r is None:
            self.p.copy_(u)
            return
        if decay is None:
            self._step(self.p, r, out=u)
        elif decay != 1:
            self.p.mul_(decay)
        if self.p.dtype == u.dtype == r.dtype:
            self.p.addcmul_(u, r)
        else:
            self.p.add_((u * r).to(self.p.dtype))

    def fetched(self) -> Tensor:
        """u, in w's shape."""
        self._fetch()
        return self._u

    def _fetch(self) -> None:
        """Take u from where a rule has put it (``p.data = ...``)."""
        if self.shadow.data_ptr() != self._address:
            self._u.copy_(self.shadow.view(self.p.shape))
            self.shadow.data = self._u.view(self.shadow.shape)

    def move_to(self, start: Tensor) -> None:
        """w = start + r (u - start / r), with u kept."""
        self._fetch()
        self.p.copy_(self._u if self.r is None else start + self._step(start, self.r) * self.r)

    def squared_norm(self) -> Tensor:
        """Return that of h, 0-dim."""
        h = self._h.view(-1)
        return torch.dot(h, h)


def read_gradients(
    views: Sequence[CoordinateView], *, masked: bool, factor: float | Tensor
) -> None:
    """Set the gradients h of all shadows; see :meth:`CoordinateView.read_gradient`."""
    launched: list[CoordinateView] = []
    gradients: list[Tensor] = []
    inverse_roots: list[Tensor] = []
    for view in views:
        g = view.parameter.grad
        r = view.r
        if not masked and g is not None and r is not None and view.is_launched:
            launched.append(view)
            gradients.append(g)
            inverse_roots.append(r)
        else:
            view.read_gradient(masked=masked, factor=factor)
    if not launched:
        return
    h = [view.h for view in launched]
    foreach_copy_(h, gradients)
    foreach_mul_(h, inverse_roots)
    if changes(factor):
        foreach_mul_(h, factor)
    for view in launched:
        view.hand_gradient()


def put_coordinates(
    views: Sequence[CoordinateView], decay: Callable[[Tensor], float] | None
) -> None:
    """Set u of a chunk: w / r, or 0 where a ``decay`` takes the place of u."""
    if decay is None:
        for view in views:
            view.put()
        return
    # of parameters of each type and device
    for memory in {view.chunk for view in views}:
        memory.u.zero_()
    for view in views:
        if view.r is None:
            view.put_decayed(decay(view.shadow))


def map_back(views: Sequence[CoordinateView], decay: Callable[[Tensor], float] | None) -> None:
    """Apply the step of the rule to the weights; see :meth:`CoordinateView.map_back`."""
    if decay is None:
        for view in views:
            view.map_back(None)
        return
    w: list[Tensor] = []
    u: list[Tensor] = []
    inverse_roots: list[Tensor] = []
    decays: list[float] = []
    for view in views:
        r = view.r
        if r is None or not view.has_one_type:
            view.map_back(decay(view.shadow))
            continue
        w.append(view.p)
        u.append(view.fetched())
        inverse_roots.append(r)
        decays.append(decay(view.shadow))
        view.r = None
    if not w:
        return
    if any(each != 1 for each in decays):
        foreach_mul_(w, decays)
    foreach_addcmul_(w, u, inverse_roots)


def views_of(
    shadows: Mapping[Tensor, nn.Parameter], *, one_by_one: bool
) -> dict[Tensor, CoordinateView]:
    """Return a view of every parameter.

    Args:
        shadows: of each parameter, in its type.
        one_by_one: whether the rule steps one chunk after the other.
    """
    largest = _TOGETHER if one_by_one else sys.maxsize
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p, shadow in shadows.items():
        by_type.setdefault((p.device, shadow.dtype), []).append(p)
    views = {}
    for (device, dtype), parameters in by_type.items():
        # other devices gain nothing by small chunks
        chunks = _packed(parameters, largest if device.type == "cpu" else sys.maxsize)
        size = max(_size(chunk) for chunk in chunks)
        u, h = torch.zeros(2, size, device=device, dtype=dtype)
        for members in chunks:
            chunk = Chunk(u[: _size(members)], h[: _size(members)])
            start = 0
            for p in members:
                views[p] = CoordinateView(p, shadows[p], chunk, start)
                start += _size([p])
    return views


def _packed(parameters: Sequence[Tensor], largest: int) -> list[list[Tensor]]:
    """Put each parameter into the first chunk with room for it; a larger one has a chunk of its own."""
    chunks: list[list[Tensor]] = []
    for p in parameters:
        for chunk in chunks:
            if _size([*chunk, p]) <= largest:
                chunk.append(p)
                break
        else:
            chunks.append([p])
    return chunks


def chunks_of(views: Sequence[CoordinateView], *, one_by_one: bool) -> list[list[CoordinateView]]:
    """Split the views into chunks that the rule steps one at a time; see :func:`views_of`."""
    if not one_by_one:
        return [list(views)]
    chunks: dict[Chunk, list[CoordinateView]] = {}
    for view in views:
        chunks.setdefault(view.chunk, []).append(view)
    return list(chunks.values())


def split_by_momentum(rule: Optimizer, chunk: list[CoordinateView]) -> list[list[CoordinateView]]:
    """Split a chunk for torch's fused SGD, which needs a momentum of all parameters, or of none."""
    if type(rule) is not optim.SGD:
        return [chunk]
    state: Mapping[Any, Any] = rule.state
    begun = []
    fresh = []
    for view in chunk:
        if state.get(view.shadow, {}).get("momentum_buffer") is None:
            fresh.append(view)
        else:
            begun.append(view)
    return [views for views in (begun, fresh) if views]


@contextmanager
def restricted_to(rule: Optimizer, some: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Restrict a rule's groups to some parameters, or to others in their place, by their ids."""
    every = [group["params"] for group in rule.param_groups]
    try:
        for group, params in zip(rule.param_groups, every, strict=True):
            group["params"] = [some[id(p)] for p in params if id(p) in some]
        yield
    finally:
        for group, params in zip(rule.param_groups, every, strict=True):
            group["params"] = params


def step_gathered(rule: Optimizer, views: Sequence[CoordinateView], *, sees: bool) -> None:
    """Step a rule that needs whole parameters, which are gathered one after the other.

    Every process takes the same step, and keeps its rows of it and of the rule's state. The rule
    finds u where it ``sees`` it, else 0.
    """
    for view in views:
        p = view.parameter
        own = view.shadow
        full = view.gathered(sees=sees)
        state = rule.state.get(own, {})
        rule.state[full] = {key: full_tensor(value) for key, value in state.items()}
        with restricted_to(rule, {id(own): full}):
            rule.step()
        own.copy_(local_shard(full, p))
        stepped = rule.state.pop(full)
        rule.state[own] = {key: shard_rows(value, p) for key, value in stepped.items()}


def step_shards(rule: Optimizer, views: Sequence[CoordinateView]) -> None:
    """Step a rule that takes rows of sharded parameters, and divides over processes what needs whole ones.

    The rule's state is sharded like the parameters from one step to the next.
    """
    for view in views:
        own = view.shadow
        rule.state[own] = {key: to_local(value) for key, value in rule.state.get(own, {}).items()}
        if is_sharded(view.parameter):
            setattr(own, SHARD_OF, view.parameter)
    try:
        with restricted_to(rule, {id(view.shadow): view.shadow for view in views}):
            rule.step()
    finally:
        for view in views:
            stepped = rule.state[view.shadow]
            rule.state[view.shadow] = {
                key: rows_from_local(value, view.parameter) for key, value in stepped.items()
            }


@contextmanager
def rollback_on_error(
    rule: Optimizer, chunks: Sequence[Sequence[CoordinateView]], *, keep: bool
) -> Iterator[None]:
    """Move chunks of the parameters back if a later chunk raises.

    Args:
        rule: what moves them.
        chunks: all that may be moved by then.
        keep: whether to keep the weights for it. They cost a pass over all of them and their
            memory, and rules that take one chunk after the other raise, if at all, at the first
            step with some groups and state.
    """
    views = [view for chunk in chunks for view in chunk]
    before = [(view.p.clone(), view.shadow in rule.state) for view in views] if keep else []
    try:
        yield
    except BaseException as error:
        for view, (w, has_state) in zip(views, before, strict=False):
            view.p.copy_(w)
            if not has_state:
                rule.state.pop(view.shadow, None)
        if views and not keep:
            error.add_note(
                "the step of some parameters of the network was taken, that of others was not"
            )
        raise


def _size(parameters: Sequence[Tensor]) -> int:
    """Elements, with each parameter at the start of a line of the cache."""
    return sum(-(-to_local(p).numel() // _ALIGNED) * _ALIGNED for p in parameters)
