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
from pathspace.optim.rules.traits import traits_of
from pathspace.squared.parts import cut, dealt, joined, local, whole

# torch's own optimizers are made of these
_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_addcmul_ = torch._foreach_addcmul_  # pyright: ignore[reportPrivateImportUsage]

# elements: so many of each of a rule's tensors stay in the cache, and cost more than the calls
_TOGETHER = 2**18
_ALIGNED = 16  # elements, a line of the cache
# beside the largest element: digits lost near zero, which depend on the scales of the weights
_NOTHING = 2.0**-80


def as_shadow(p: Tensor, *, matrix: bool = False) -> nn.Parameter:
    """Make the tensor that a rule trains in the place of a parameter: its coordinates, float32 for half precision.

    It has no memory of its own, and no numbers, as these are known at a step alone (see
    ``points.expect_unread``). Of a parameter that is split over processes, those of the part in
    this one.
    """
    p = local(p)
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
    traits, groups = traits_of(type(rule)), rule.param_groups
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    if traits.reads_points or (any(decays) and traits.decays != "decoupled"):
        yield None
        return
    factors = {
        id(p): 1 - float(group["lr"]) * decay
        for group, decay in zip(groups, decays, strict=True)
        for p in (group["params"] if decay else ())
    }
    try:
        for group, decay in zip(groups, decays, strict=True):
            if decay:
                group["weight_decay"] = 0.0
        yield lambda p: factors.get(id(p), 1.0)
    finally:
        for group, decay in zip(groups, decays, strict=True):
            if decay:
                group["weight_decay"] = decay


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Parameters stepped in one call. All chunks of a type share the buffers ``u`` and ``h``."""

    u: Tensor
    h: Tensor
    size: int


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
        "_h",
        "_in_parts",
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
        self.parameter, self.shadow, self.chunk = parameter, shadow, chunk
        self.p = p = local(parameter)
        self._in_parts = p is not parameter
        self.r: Tensor | None = None
        self.has_zeros = False
        self._u, self._h = (t[start : start + p.numel()].view(p.shape) for t in (chunk.u, chunk.h))
        shadow.grad, shadow.data = None, self._u.view(shadow.shape)
        self._shaped = self._h.view(shadow.shape)

    @property
    def is_current(self) -> bool:
        """Whether the parameter is where it was, in the type that it had."""
        return self._u.device == self.p.device and self._u.dtype == type_of_shadow(self.p)

    @property
    def is_plain(self) -> bool:
        """Whether w, r, u and the gradient are of one type and on a GPU, where one launch serves many parameters."""
        r, g = self.r, self.parameter.grad
        if r is None or g is None or self._in_parts or not self._u.is_cuda:
            return False
        return self.p.dtype == r.dtype == self._u.dtype == g.dtype

    @property
    def is_finite(self) -> bool:
        """Whether u is."""
        return bool(self._u.isfinite().all())

    def read_gradient(self, *, masked: bool, factor: float | Tensor = 1.0) -> None:
        """h = factor r g, without a change of the user's own.

        Args:
            masked: what is nothing beside the largest becomes zero.
            factor: what clips all gradients.
        """
        r, h = self.r, self._h
        if self.parameter.grad is None:  # of an evaluation that did not use the parameter
            self.shadow.grad = None
            h.zero_()
            return
        g = local(self.parameter.grad)
        if r is None:
            h.copy_(g)
        elif r.dtype == g.dtype == h.dtype:
            torch.mul(g, r, out=h)
        else:
            h.copy_(g * r)
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
        self.shadow.grad = self._shaped

    def put(self) -> None:
        """u = w / r."""
        u, r = self._u, self.r
        if r is None:
            u.copy_(self.p)
        elif self.p.dtype == r.dtype == u.dtype:
            torch.div(self.p, r, out=u)
        else:
            u.copy_(self.p / r)
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
        p, shape = self.parameter, (*self.parameter.shape[:1], *self.shadow.shape[1:])
        h = whole(joined(self._h, p))
        u = whole(joined(self._u, p)) if sees or self.r is None else torch.zeros_like(h)
        full = nn.Parameter(u.view(shape))
        vars(full).update(vars(self.shadow))  # what the rule is told of it
        full.grad = h.view(shape)
        return full

    def put_zero(self, decay: float) -> None:
        """u = decay w outside the network, where all other u of the chunk are 0."""
        if self.r is None:
            self._u.copy_(self.p).mul_(decay)

    def map_back(self, decay: float | None) -> None:
        """w = w + r du; r is let go of, so that there are never two of them in memory.

        Args:
            decay: what w is multiplied with before, if u was 0; None if u was w / r.
        """
        self._fetch()
        u, r, self.r = self._u, self.r, None
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
        if self.shadow.data_ptr() != self._u.data_ptr():
            self._u.copy_(self.shadow.view(self.p.shape))
            self.shadow.data = self._u.view(self.shadow.shape)

    def move_to(self, start: Tensor) -> None:
        """w = start + r (u - start / r), with u kept."""
        self._fetch()
        self.p.copy_(self._u if self.r is None else start + self._step(start, self.r) * self.r)

    def squared_norm(self) -> Tensor:
        """Return that of h, 0-dim."""
        return torch.dot(h := self._h.view(-1), h)


def read_gradients(
    views: Sequence[CoordinateView], *, masked: bool, factor: float | Tensor
) -> None:
    """Set the gradients h of all shadows; see :meth:`CoordinateView.read_gradient`."""
    together = [] if masked else [view for view in views if view.is_plain]
    rest = views if not together else [view for view in views if not view.is_plain]
    for view in rest:
        view.read_gradient(masked=masked, factor=factor)
    if not together:
        return
    h = [view.h for view in together]
    _copy_(h, [g for view in together if (g := view.parameter.grad) is not None])
    _mul_(h, [r for view in together if (r := view.r) is not None])
    if changes(factor):
        _mul_(h, factor)
    for view in together:
        view.hand_gradient()


def map_back(views: Sequence[CoordinateView], decay: Callable[[Tensor], float] | None) -> None:
    """Apply the step of the rule to the weights; see :meth:`CoordinateView.map_back`."""
    together = [] if decay is None else [view for view in views if view.is_plain]
    rest = views if not together else [view for view in views if not view.is_plain]
    for view in rest:
        view.map_back(None if decay is None else decay(view.shadow))
    if decay is None or not together:
        return
    decays = [decay(view.shadow) for view in together]
    w = [view.p for view in together]
    if any(each != 1 for each in decays):
        _mul_(w, decays)
    _addcmul_(
        w,
        [view.fetched() for view in together],
        [r for view in together if (r := view.r) is not None],
    )
    for view in together:
        view.r = None


def views_of(
    rule: Optimizer, shadows: Mapping[Tensor, nn.Parameter]
) -> dict[Tensor, CoordinateView]:
    """Return a view of every parameter.

    Args:
        rule: what trains the shadows; if it treats each by itself, it steps one chunk after the
            other.
        shadows: of each parameter, in its type.
    """
    together = _TOGETHER if traits_of(type(rule)).one_by_one else sys.maxsize
    chunks: dict[
        tuple[torch.device, torch.dtype], list[list[Tensor]]
    ] = {}  # of each device and type
    for p, shadow in shadows.items():
        alike = chunks.setdefault((p.device, shadow.dtype), [])
        on_cpu = p.device.type == "cpu"
        room = next(
            (chunk for chunk in alike if not on_cpu or _size([*chunk, p]) <= together), None
        )
        if room is None:
            alike.append([p])
        else:
            room.append(p)
    result = {}
    for kind, alike in chunks.items():
        device, dtype = kind
        u, h = torch.zeros(2, max(_size(chunk) for chunk in alike), device=device, dtype=dtype)
        for parameters in alike:
            chunk, start = Chunk(u, h, _size(parameters)), 0
            for p in parameters:
                result[p] = CoordinateView(p, shadows[p], chunk, start)
                start += _size([p])
    return result


def chunks_of(rule: Optimizer, views: Sequence[CoordinateView]) -> list[list[CoordinateView]]:
    """Split the views into chunks that the rule steps one at a time."""
    if not traits_of(type(rule)).one_by_one:
        return [list(views)]
    chunks: dict[Chunk, list[CoordinateView]] = {}
    for view in views:
        chunks.setdefault(view.chunk, []).append(view)
    return list(chunks.values())


def split_by_momentum(rule: Optimizer, chunk: list[CoordinateView]) -> list[list[CoordinateView]]:
    """Split a chunk for torch's fused SGD, which needs a momentum of all parameters, or of none."""
    state: Mapping[Any, Any] = rule.state if type(rule) is optim.SGD else {}
    begun = [
        view for view in chunk if state.get(view.shadow, {}).get("momentum_buffer") is not None
    ]
    if len(begun) in (0, len(chunk)):
        return [chunk]
    return [begun, [view for view in chunk if view not in begun]]


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
        p, own = view.parameter, view.shadow
        full, kept = view.gathered(sees=sees), rule.state.get(own, {})
        rule.state[full] = {key: whole(value) for key, value in kept.items()}
        with restricted_to(rule, {id(own): full}):
            rule.step()
        own.copy_(cut(full, p))
        rule.state[own] = {key: dealt(value, p) for key, value in rule.state.pop(full).items()}


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
    return sum(-(-local(p).numel() // _ALIGNED) * _ALIGNED for p in parameters)
