"""Random programs: as a model, and as their squared network, interpreted by hand.

A program is a list of statements on variables ``[B, F]`` or ``[B, T, F]``. `Real` says what each
does to numbers; it runs inside a model, in the many ways in which people write it. `Squared` says
what it does in the squared network of one example: weights and constants are squared, ReLUs are
left out, a maximum is a sum, a product of activations is one of masses, a normalization divides by
the mean of the mass that enters it, and at a function without a rule the network is cut. The two
share nothing with the tracer but torch, and what merely moves numbers is the same in both.

Letters: B batch, T steps, F features, n heads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DOUBLE = {"dtype": torch.float64}
REFUSED = ("mixed", "into_integers", "branched")
"""Statements after which a program is to be refused."""


@dataclass(frozen=True)
class Statement:
    """One operation.

    Attributes:
        name: method of `Real` and `Squared`.
        args: numbers of variables, layers and vectors, and constants.
        form: which way of writing it the model takes.
    """

    name: str
    args: tuple[Any, ...]
    form: int = 0


@dataclass
class Program:
    """A random program.

    Attributes:
        seed: what it was drawn from.
        steps: T of its input; None for rows.
        features: F of its input.
        layers: (F before, F after, whether there is a bias) of each linear layer.
        vectors: F of each vector of parameters.
        statements: what it does; the last variable is what it returns.
        frozen: layers that are not trained.
        tied: pairs of layers that have one weight under two names.
    """

    seed: int
    steps: int | None
    features: int
    layers: list[tuple[int, int, bool]] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    tied: list[tuple[int, int]] = field(default_factory=list)

    def input(self, batch: int, times: int = 1) -> Tensor:
        """Random numbers of the form of the input, or of one with so many times the steps."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (
            (batch, self.features)
            if self.steps is None
            else (batch, times * self.steps, self.features)
        )
        return torch.randn(shape, generator=generator, **DOUBLE)

    @property
    def examples(self) -> int:
        """How many examples it is traced with."""
        return 1 + self.seed % 3

    @property
    def refused(self) -> bool:
        """Whether some statement has no place in path geometry."""
        return any(s.name in REFUSED for s in self.statements)


class Moves:
    """What moves numbers, or adds them: the same for numbers and for squares."""

    def __init__(self, x: Tensor) -> None:
        self.variables: list[Tensor] = [x]

    def run(self, statements: list[Statement]) -> Tensor:
        for statement in statements:
            self.form = statement.form
            result = getattr(self, statement.name)(*statement.args)
            if result is not None:
                self.variables.append(result)
        return self.variables[-1]

    def __getitem__(self, i: int) -> Tensor:
        return self.variables[i]

    def part(self, i: int, first: int, last: int) -> Tensor:
        h = self[i]
        return h[..., first:last] if self.form % 2 else h.narrow(-1, first, last - first)

    def step(self, i: int, t: int) -> Tensor:
        return self[i][:, t] if self.form % 2 else self[i].select(1, t)

    def picked(self, i: int, places: list[int]) -> Tensor:
        if self.form % 3 == 0:
            return self[i][..., places]
        index = torch.tensor(places)
        made = self[i][..., index] if self.form % 3 == 1 else self[i].index_select(-1, index)
        self.changed_later(index)
        return made

    def changed_later(self, index: Tensor) -> None:
        """What it was when it was used counts."""

    def flipped(self, i: int, dim: int) -> Tensor:
        return self[i].flip(dim)

    def joined(self, i: int, j: int) -> Tensor:
        return torch.cat([self[i], self[j]], -1)

    def stacked(self, i: int, j: int) -> Tensor:
        return torch.stack([self[i], self[j]], 1)

    def copied(self, i: int) -> Tensor:
        return self[i].clone()

    def viewed(self, i: int) -> Tensor:
        """Another tensor in the same memory."""
        h = self[i]
        if self.form % 3 == 0:
            return h.view(h.shape)
        return (
            h.unsqueeze(1).squeeze(1) if self.form % 3 == 1 else h.transpose(0, -1).transpose(0, -1)
        )

    def turned(self, i: int) -> Tensor:
        """Features read as steps, which puts other units into each place for another number of steps."""
        h = self[i]
        turned = h.transpose(1, 2)
        return (
            turned.reshape(h.shape)
            if self.form % 2
            else turned.flatten(1).unflatten(1, h.shape[1:])
        )

    def flattened(self, i: int) -> Tensor:
        h = self[i]
        return [
            lambda: h.flatten(1),
            lambda: h.reshape(h.shape[0], -1),
            lambda: h.transpose(1, 2).flatten(1),
        ][self.form % 3]()

    def parted(self, i: int, steps: int) -> Tensor:
        h = self[i]
        if self.form % 2:
            return h.reshape(h.shape[0], steps, -1)
        return h.reshape(h.shape[0], -1, steps).transpose(1, 2)

    def windows(self, i: int, k: int, r: int, steps: int) -> Tensor:
        """A recurrence over every window of so many steps by itself."""
        h = self[i]
        if self.form % 5 == 4:
            parts = [self.states(h[:, t : t + steps], k, r) for t in range(0, h.shape[1], steps)]
            return torch.cat(parts, 1)
        if self.form % 5 == 3:  # times first
            rows = h.unflatten(1, (-1, steps)).transpose(0, 1).reshape(-1, steps, h.shape[-1])
            out = self.states(rows, k, r).unflatten(0, (-1, len(h)))
            return out.transpose(0, 1).flatten(1, 2)
        return self.states(h.reshape(-1, steps, h.shape[-1]), k, r).reshape(*h.shape[:2], -1)

    def total(self, i: int) -> Tensor:
        return [
            lambda h: h.sum(1), lambda h: h.sum(1, dtype=torch.float64), lambda h: torch.sum(h, dim=1),
            lambda h: torch.einsum("btf->bf", h),
        ][self.form % 4](self[i])  # fmt: skip

    def running(self, i: int) -> Tensor:
        return (
            self[i].cumsum(1)
            if self.form % 2
            else torch.cumsum(self[i], dim=1, dtype=torch.float64)
        )

    def written(self, i: int, first: int, j: int) -> None:
        width = self[j].shape[-1]
        self[i][..., first : first + width] = self[j]

    def cleared(self, i: int, first: int, last: int) -> None:
        h = self[i]
        if self.form % 3 == 0:
            h[..., first:last] = 0
        elif self.form % 3 == 1:
            h[..., first:last].masked_fill_(torch.ones(last - first, dtype=torch.bool), 0.0)
        else:
            h[..., first:last] *= torch.zeros(last - first, **DOUBLE)

    def added(self, i: int, j: int) -> Tensor:
        return self[i] + self[j]

    def added_in_place(self, i: int, j: int) -> None:
        if self.form % 2:
            self[i].add_(self[j])
        else:
            self.variables[i] += self[j]


class Real(Moves):
    """The program itself, in its many ways of being written."""

    def __init__(self, x: Tensor, layers: Any, vectors: Any) -> None:
        super().__init__(x)
        self.layers, self.vectors = layers, vectors

    def changed_later(self, index: Tensor) -> None:
        index.zero_()

    def linear(self, i: int, k: int) -> Tensor:
        h, layer = self[i], self.layers[k]
        if self.form % 4 == 0:
            return layer(h)
        if self.form % 4 == 1:
            return functional.linear(h, layer.weight, layer.bias)
        if self.form % 4 == 2 and h.dim() == 3:  # all steps as rows
            return layer(h.reshape(-1, h.shape[-1])).view(*h.shape[:2], -1)
        made = h @ layer.weight.t()
        return made if layer.bias is None else made + layer.bias

    def loop(self, i: int, k: int, r: int) -> Tensor:
        return self.states(self[i], k, r)

    def states(self, x: Tensor, k: int, r: int) -> Tensor:
        read, back = self.layers[k], self.layers[r]
        if self.form % 3 == 2 and (read.bias is None) == (back.bias is None):
            weights = [p for p in (read.weight, back.weight, read.bias, back.bias) if p is not None]
            start = torch.zeros(1, x.shape[0], back.in_features, **DOUBLE)
            return torch.rnn_relu(x, start, weights, len(weights) > 2, 1, 0.0, False, False, True)[
                0
            ]
        h = x.new_zeros(x.shape[0], back.in_features) if self.form % 2 else torch.zeros(
            x.shape[0], back.in_features, **DOUBLE
        )  # fmt: skip
        out = []
        for t in range(x.shape[1]):
            h = torch.relu(read(x[:, t]) + back(h))
            out.append(h)
        return torch.stack(out, 1)

    def relu(self, i: int) -> Tensor:
        h = self[i]
        forms = [
            lambda: h.relu(), lambda: functional.relu(h), lambda: h.clamp(min=0),
            lambda: functional.leaky_relu(h, 0.25),
            lambda: h.abs(), lambda: torch.maximum(h, torch.zeros_like(h)), lambda: h * (h > 0),
            lambda: torch.where(h > 0, h, 0.0),
        ]  # fmt: skip
        return forms[self.form % len(forms)]()

    def relu_in_place(self, i: int) -> None:
        if self.form % 2:
            self[i].relu_()
        else:
            functional.relu(self[i], inplace=True)

    def subtracted(self, i: int, j: int) -> Tensor:
        return self[i] - self[j] if self.form % 2 else torch.sub(self[i], self[j])

    def subtracted_in_place(self, i: int, j: int) -> None:
        self[i].sub_(self[j])

    def scaled(self, i: int, c: float) -> Tensor:
        return self[i] * c if self.form % 2 or c == 0 else self[i] / (1 / c)

    def scaled_in_place(self, i: int, c: float) -> None:
        if self.form % 2:
            self[i].mul_(c)
        else:
            self.variables[i] *= c

    def weighed(self, i: int, c: list[float]) -> Tensor:
        constant = torch.tensor(c, **DOUBLE)
        return self[i] * (constant.to(self[i]) if self.form % 2 else constant)

    def weighed_in_place(self, i: int, c: list[float]) -> None:
        constant = torch.tensor(c) if self.form % 2 else torch.tensor(c, **DOUBLE)
        self[i].mul_(constant)

    def mean(self, i: int) -> Tensor:
        return self[i].mean(1) if self.form % 2 else self[i].mean(dim=1, dtype=torch.float64)

    def largest(self, i: int) -> Tensor:
        return self[i].amax(1) if self.form % 2 else self[i].max(1).values

    def maxout(self, i: int) -> Tensor:
        h = self[i]
        parts = h.unflatten(-1, (-1, 2))
        return [
            lambda: parts.amax(-1), lambda: parts.max(-1).values, lambda: torch.max(parts, dim=-1)[0],
            lambda: torch.maximum(h[..., ::2], h[..., 1::2]), lambda: parts.max(dim=-1, keepdim=True)[0].squeeze(-1),
            lambda: parts.topk(1, -1).values.squeeze(-1),
        ][self.form % 6]()  # fmt: skip

    def biased(self, i: int, v: int) -> Tensor:
        return self[i] + self.vectors[v]

    def learned_scale(self, i: int, v: int) -> Tensor:
        return self[i] * self.vectors[v]

    def prelu(self, i: int, v: int) -> Tensor:
        return functional.prelu(self[i], self.vectors[v])

    def table(self, i: int, v: int, k: int) -> Tensor:
        """Learned units, the same for all examples, and a layer."""
        h, units = self[i], self.vectors[v]
        if self.form % 5 == 1:
            units = units.relu()
        elif self.form % 5 == 2:
            units = torch.zeros(units.shape, **DOUBLE) + units
        elif self.form % 5 == 3:
            units = h.new_zeros(*h.shape[:-1], len(units)) + units
        elif self.form % 5 == 4:
            units = units.expand(*h.shape[:-1], -1)
        return h + self.layers[k](units)

    def product(self, i: int, j: int) -> Tensor:
        a, b = self[i], self[j]
        return [
            lambda: a * b, lambda: torch.mul(b, a), lambda: a.relu() * b, lambda: b * functional.leaky_relu(a, 0.5),
            lambda: torch.einsum("...f,...f->...f", a, b), lambda: a.abs().mul(b),
            lambda: torch.multiply(a, other=b),
        ][self.form % 7]()  # fmt: skip

    def product_in_place(self, i: int, j: int) -> None:
        if self.form % 2:
            self[i].mul_(self[j])
        else:
            self.variables[i] *= self[j]

    def inner(self, i: int, j: int) -> Tensor:
        a, b = self[i], self[j]
        return [
            lambda: (a * b).sum(-1, keepdim=True), lambda: torch.einsum("...f,...f->...", a, b)[..., None],
            lambda: (a.unsqueeze(-2) @ b.unsqueeze(-1)).squeeze(-1),
        ][self.form % 3]()  # fmt: skip

    def powered(self, i: int, k: int) -> Tensor:
        h = self[i]
        forms = [lambda: h**k, lambda: torch.pow(h.relu(), k), lambda: h.relu().pow(exponent=k)]
        forms += [lambda: h.square(), lambda: h * h] if k == 2 else []
        return forms[self.form % len(forms)]()

    def linear_side(self, i: int, j: int) -> Tensor:
        both = torch.cat([self[i], self[j]], -1)
        if self.form % 2:
            return functional.glu(both)
        a, b = both.chunk(2, -1)
        return a * b.sigmoid()

    def attention(self, q: int, k: int, v: int, heads: int, causal: bool) -> Tensor:
        """Queries, keys and values ``[B, T, F]``, F of all heads."""
        q, k, v = (self[i].unflatten(-1, (heads, -1)).transpose(1, 2) for i in (q, k, v))
        size, steps = q.shape[-1], q.shape[-2]
        if self.form % 3 == 0:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            if self.form % 3 == 1:
                scores = q @ k.transpose(-2, -1) / size**0.5
            else:
                scores = torch.einsum("bntd,bnsd->bnts", q * size**-0.5, k)
            if causal:
                scores = scores.masked_fill(
                    torch.ones(steps, steps, dtype=torch.bool).triu(1), -torch.inf
                )
            out = scores.softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    def normalized(self, i: int, g: int, b: int) -> Tensor:
        """A root mean square, and a LayerNorm where there is a bias."""
        h, gain = self[i], self.vectors[g]
        if b >= 0:
            return functional.layer_norm(h, h.shape[-1:], gain, self.vectors[b])
        return [
            lambda: functional.rms_norm(h, h.shape[-1:], gain, 1e-6),
            lambda: gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)),
            lambda: h / (h * h).mean(-1, keepdim=True).add(1e-6).sqrt() * gain,
        ][self.form % 3]()

    def cut(self, i: int, k: int) -> Tensor:
        """A function without a rule, of a tensor of its own, and a layer: a function of inputs alone is an input."""
        h = 2 * self[i]
        forms = [
            lambda: h.softmax(-1), lambda: functional.gelu(h), lambda: h.tanh(), lambda: torch.sigmoid(h),
            lambda: (-h.abs()).exp(), lambda: functional.relu6(h, inplace=True), lambda: functional.relu6(h),
            lambda: h.clamp(-1, 1), lambda: h.clamp_(max=1.0), lambda: h.softmax(0), lambda: h.softmax(1),
            lambda: functional.silu(h, inplace=True), lambda: h.cos().view(h.shape), lambda: h.long().double(),
            lambda: h.atan().transpose(0, -1).transpose(0, -1), lambda: (h.round() + 1).clone(),
        ]  # fmt: skip
        return self.layers[k](forms[self.form % len(forms)]())

    def gated(self, i: int, j: int) -> Tensor:
        gate = torch.sigmoid(2 * self[j])
        return self[i] * gate if self.form % 2 else gate * self[i]

    def divided(self, i: int, j: int) -> Tensor:
        by = 1 + (2 * self[j]).exp() if self.form % 2 else 1 + (2 * self[j]).abs().exp().log1p()
        return self[i] / by

    def mixed(self, i: int) -> Tensor:
        h = self[i]
        size, width = h.shape[0], h.shape[-1]
        if h.dim() == 3:
            return h.reshape(size, -1).view(h.shape[1], size, width).transpose(0, 1)
        return h.reshape(width, -1).t()

    def branched(self, i: int, k: int, size: int) -> Tensor:
        return self.layers[k](self[i]).relu() if len(self[i]) > size else self[i]

    def dropped(self, i: int, c: list[float]) -> Tensor:
        """Units times a constant of which a part is dropped, or changed, in training."""
        c = torch.tensor(c, **DOUBLE)
        forms = [
            lambda: functional.dropout(c, 0.5), lambda: functional.rrelu(c, training=True),
            lambda: torch.dropout(c, 0.5, True), lambda: functional.alpha_dropout(c, 0.5, training=True),
            lambda: functional.dropout(c.clone(), 0.5, inplace=True), lambda: nn.Dropout(0.5)(c),
        ]  # fmt: skip
        return self[i] * forms[self.form % len(forms)]()

    def into_integers(self, i: int) -> Tensor:
        whole = torch.zeros(self[i].shape, dtype=torch.int64)
        whole[:] = self[i]
        return whole.double()


class Squared(Moves):
    """The squared network, on squared weights and ones; clones, so that autograd keeps what a write would change."""

    def __init__(
        self, x: Tensor, layers: list[tuple[Tensor, Tensor | None]], vectors: list[Tensor]
    ) -> None:
        super().__init__(x)
        self.layers, self.vectors = layers, vectors
        # what enters, and a zero in all that depends on what leaves
        self.cuts: list[tuple[Tensor, Tensor]] = []

    def norm(self, statements: list[Statement]) -> Tensor:
        """The sum over the outputs, among them what enters cuts that lead to one."""
        total = self.run(statements).sum()
        left = list(self.cuts)
        while True:
            reached = [
                torch.autograd.grad(total, mark, retain_graph=True, allow_unused=True)[0]
                for _, mark in left
            ]
            if all(g is None for g in reached):
                return total
            total = total + sum(
                e.sum() for (e, _), g in zip(left, reached, strict=True) if g is not None
            )
            left = [cut for cut, g in zip(left, reached, strict=True) if g is None]

    def leaving(self, entering: Tensor) -> Tensor:
        mark = torch.zeros((), requires_grad=True, **DOUBLE)
        self.cuts.append((entering, mark))
        return torch.ones_like(entering) + mark

    def cut(self, i: int, k: int) -> Tensor:
        return self.mapped(self.leaving(4 * self[i]), k)

    def gated(self, i: int, j: int) -> Tensor:
        return self[i].clone() * self.leaving(4 * self[j])

    def divided(self, i: int, j: int) -> Tensor:
        return self[i].clone() / self.leaving(4 * self[j])

    def linear_side(self, i: int, j: int) -> Tensor:
        return self[i].clone() * self.leaving(self[j].clone())

    def product(self, i: int, j: int) -> Tensor:
        return self[i].clone() * self[j].clone()

    def product_in_place(self, i: int, j: int) -> None:
        self[i].copy_(self.product(i, j))

    def inner(self, i: int, j: int) -> Tensor:
        return self.product(i, j).sum(-1, keepdim=True)

    def powered(self, i: int, k: int) -> Tensor:
        return self[i].clone() ** k

    def attention(self, q: int, k: int, v: int, heads: int, causal: bool) -> Tensor:
        """Scores are outputs, those that a mask closes in one call, too; weights are ones."""
        q, k, v = (self[i].unflatten(-1, (heads, -1)).transpose(1, 2).clone() for i in (q, k, v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1]
        if causal and self.form % 3:
            scores = scores.tril()  # an infinity starts no path
        return (self.leaving(scores) @ v).transpose(1, 2).flatten(2)

    def normalized(self, i: int, g: int, b: int) -> Tensor:
        z = self[i].clone()
        mean = z.mean(-1, keepdim=True).detach()
        y = torch.where(mean == 0, 0, z / mean.where(mean != 0, 1)) * self.vectors[g]
        return y if b < 0 else y + self.vectors[b]

    def maxout(self, i: int) -> Tensor:
        return self[i].unflatten(-1, (-1, 2)).sum(-1)

    def prelu(self, i: int, v: int) -> Tensor:
        del v
        return self[i].clone()

    def table(self, i: int, v: int, k: int) -> Tensor:
        return self[i] + self.mapped(self.vectors[v], k)

    def linear(self, i: int, k: int) -> Tensor:
        return self.mapped(self[i].clone(), k)

    def mapped(self, h: Tensor, k: int) -> Tensor:
        q, c = self.layers[k]
        return h @ q.t() if c is None else h @ q.t() + c

    def loop(self, i: int, k: int, r: int) -> Tensor:
        return self.states(self[i], k, r)

    def states(self, x: Tensor, k: int, r: int) -> Tensor:
        (q, c), (s, d) = self.layers[k], self.layers[r]
        h, out = x.new_zeros(len(x), len(s)), []
        for t in range(x.shape[1]):
            h = x[:, t].clone() @ q.t() + h @ s.t()
            h = h + sum(b for b in (c, d) if b is not None)
            out.append(h)
        return torch.stack(out, 1)

    def relu(self, i: int) -> Tensor:
        return self[i].clone()

    def relu_in_place(self, i: int) -> None:
        pass

    def subtracted(self, i: int, j: int) -> Tensor:
        return self[i] + self[j]

    def subtracted_in_place(self, i: int, j: int) -> None:
        self[i].add_(self[j])

    def scaled(self, i: int, c: float) -> Tensor:
        return self[i] * c**2

    def scaled_in_place(self, i: int, c: float) -> None:
        self[i].mul_(c**2)

    def weighed(self, i: int, c: list[float]) -> Tensor:
        return self[i] * torch.tensor([w**2 for w in c], **DOUBLE)

    def weighed_in_place(self, i: int, c: list[float]) -> None:
        self[i].mul_(torch.tensor([w**2 for w in c], **DOUBLE))

    def dropped(self, i: int, c: list[float]) -> Tensor:
        """Read without drops; a random slope by its mean."""
        slope = (1 / 8 + 1 / 3) / 2 if self.form % 6 == 1 else 1
        return self.weighed(i, [w if w > 0 else slope * w for w in c])

    def mean(self, i: int) -> Tensor:
        return self[i].sum(1) / self[i].shape[1] ** 2

    def largest(self, i: int) -> Tensor:
        return self[i].sum(1)

    def biased(self, i: int, v: int) -> Tensor:
        return self[i] + self.vectors[v]

    def learned_scale(self, i: int, v: int) -> Tensor:
        return self[i].clone() * self.vectors[v]


class Model(nn.Module):
    """A program as a model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        generator = torch.Generator().manual_seed(program.seed)
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=b, **DOUBLE) for n, m, b in program.layers)
        self.vectors = nn.ParameterList(torch.empty(n, **DOUBLE) for n in program.vectors)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, **DOUBLE))
        for first, second in program.tied:
            self.layers[second].weight = self.layers[first].weight
        for k in program.frozen:
            self.layers[k].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return Real(x, self.layers, self.vectors).run(self.program.statements)


def squared_path_norm(program: Program, model: Model) -> tuple[Tensor, dict[str, Tensor]]:
    """gamma_net^2 and kappa1 = dG/dq of a program, by the hand-written interpreter and autograd."""
    q = {name: p.detach().square().requires_grad_() for name, p in model.named_parameters()}
    owner = {k: k for k in range(len(program.layers))} | {
        second: first for first, second in program.tied
    }
    layers = [
        (q[f"layers.{owner[k]}.weight"], q.get(f"layers.{k}.bias"))
        for k in range(len(program.layers))
    ]
    vectors = [q[f"vectors.{v}"] for v in range(len(program.vectors))]
    total = Squared(torch.ones_like(program.input(1)), layers, vectors).norm(program.statements)
    slopes = torch.autograd.grad(total, list(q.values()), materialize_grads=True)
    return total.detach(), dict(zip(q, slopes, strict=True))


# --- drawing

SIZES = (2, 3, 4)
NUMBERS = (0, 0.0, 1, -1, 2, -3, 0.5)
LEAST, MOST = 2, 8
MOST_PRODUCTS = 3
"""In one program: the numbers of more may leave float64."""


def drawn(seed: int, *, with_refused: bool = True) -> Program:
    """The program of a seed."""
    return _Drawing(seed, with_refused).program()


class _Drawing:
    def __init__(self, seed: int, with_refused: bool) -> None:
        self.random, self.with_refused = random.Random(seed), with_refused
        steps = self.random.choice([None, 2, 3])
        self.made = Program(seed, steps, self.random.choice(SIZES))
        # (T, F) of every variable
        self.forms: list[tuple[int | None, int]] = [(steps, self.made.features)]
        self.products = 0

    def program(self) -> Program:
        self.linear(0)
        kinds = [name for name in dir(self) if name.startswith("draw_")]
        if self.with_refused and self.random.random() < 0.1:
            self.refused()
        for _ in range(self.random.randint(LEAST, MOST)):
            getattr(self, self.random.choice(kinds))()
        self.linear(len(self.forms) - 1)
        return self.made

    def refused(self) -> None:
        name, i = self.random.choice(REFUSED), self.any()
        if name != "branched":
            self.say(name, (i,), self.forms[i])
            return
        width, most = self.forms[i][1], max(1, self.made.examples - 1)
        self.say(name, (i, self.layer(width, width), self.random.randint(1, most)), self.forms[i])

    def say(
        self, name: str, args: tuple[Any, ...], form: tuple[int | None, int] | None = None
    ) -> None:
        if name in REFUSED:
            form = self.forms[args[0]]
        self.made.statements.append(Statement(name, args, self.random.randrange(24)))
        if form is not None:
            self.forms.append(form)

    def any(self, *, steps: bool | None = None, like: tuple[int | None, int] | None = None) -> int:
        """The number of a variable, a late one most often; -1 if there is none such."""
        found = [
            i for i, form in enumerate(self.forms)
            if i and (steps is None or (form[0] is not None) == steps) and (like is None or form == like)
        ]  # fmt: skip
        return self.random.choice(found[-3:]) if found else -1

    def layer(self, before: int, after: int | None = None, *, tied: bool = True) -> int:
        """A layer, of which some are used more than once."""
        fitting = [
            k for k, (n, m, _) in enumerate(self.made.layers) if n == before and after in (None, m)
        ]  # fmt: skip
        if tied and fitting and self.random.random() < 0.4:
            return self.random.choice(fitting)
        after = self.random.choice(SIZES) if after is None else after
        self.made.layers.append((before, after, self.random.random() < 0.6))
        made = len(self.made.layers) - 1
        alike = [k for k in fitting if self.made.layers[k][:2] == (before, after)]
        if tied and alike and self.random.random() < 0.3:  # the first of those with one weight
            first = next((a for a, b in self.made.tied if b == alike[0]), alike[0])
            self.made.tied.append((first, made))
        return made

    def vector(self, size: int) -> int:
        fitting = [v for v, n in enumerate(self.made.vectors) if n == size]
        if fitting and self.random.random() < 0.3:
            return self.random.choice(fitting)
        self.made.vectors.append(size)
        return len(self.made.vectors) - 1

    def linear(self, i: int) -> None:
        steps, width = self.forms[i]
        k = self.layer(width)
        self.say("linear", (i, k), (steps, self.made.layers[k][1]))

    def fresh(self, i: int, width: int) -> int:
        """The number of a variable of units whose scales are free when it is made."""
        steps, before = self.forms[i]
        self.say("linear", (i, self.layer(before, width, tied=False)), (steps, width))
        return len(self.forms) - 1

    def span(self, width: int) -> tuple[int, int]:
        first = self.random.randrange(width)
        return first, self.random.randint(first + 1, width)

    def draw_linear(self) -> None:
        self.linear(self.any())

    def draw_relu(self) -> None:
        i = self.any()
        self.say("relu", (i,), self.forms[i])

    draw_relu_again = draw_relu

    def draw_relu_in_place(self) -> None:
        self.say("relu_in_place", (self.any(),))

    def draw_cut(self) -> None:
        i = self.any()
        if self.random.random() < 0.6:
            k = self.layer(self.forms[i][1])
            self.say("cut", (i, k), (self.forms[i][0], self.made.layers[k][1]))
        else:
            name = self.random.choice(["gated", "divided"])
            self.say(name, (i, self.any(like=self.forms[i])), self.forms[i])

    draw_cut_again = draw_cut

    def draw_loop(self) -> None:
        i = (
            0
            if self.forms[0][0] is not None and self.random.random() < 0.5
            else self.any(steps=True)
        )
        if i >= 0:
            k = self.layer(self.forms[i][1])
            width = self.made.layers[k][1]
            self.say("loop", (i, k, self.layer(width, width)), (self.forms[i][0], width))

    def draw_windows(self) -> None:
        i = (
            0
            if self.forms[0][0] is not None and self.random.random() < 0.5
            else self.any(steps=True)
        )
        if i >= 0:
            k, times = self.layer(self.forms[i][1]), self.forms[i][0] or 1
            width, lengths = (
                self.made.layers[k][1],
                [n for n in range(1, times + 1) if times % n == 0],
            )
            self.say(
                "windows",
                (i, k, self.layer(width, width), self.random.choice(lengths)),
                (times, width),
            )

    def draw_sum(self) -> None:
        i = self.any()
        name = self.random.choice(["added", "subtracted"])
        self.say(name, (i, self.any(like=self.forms[i])), self.forms[i])

    def draw_sum_in_place(self) -> None:
        i = self.any()
        name = self.random.choice(["added_in_place", "subtracted_in_place"])
        self.say(name, (i, self.any(like=self.forms[i])))

    def draw_scaled(self) -> None:
        i, c = self.any(), self.random.choice(NUMBERS)
        if self.random.random() < 0.5:
            self.say("scaled", (i, c), self.forms[i])
        else:
            self.say("scaled_in_place", (i, c))

    def draw_weighed(self) -> None:
        i = self.any()
        c = [self.random.choice(NUMBERS) for _ in range(self.forms[i][1])]
        c = [0] * len(c) if self.random.random() < 0.3 else c
        if self.random.random() < 0.5:
            self.say("weighed", (i, c), self.forms[i])
        else:
            self.say("weighed_in_place", (i, c))

    def draw_dropped(self) -> None:
        i = self.any()
        c = [self.random.choice(NUMBERS) for _ in range(self.forms[i][1])]
        self.say("dropped", (i, c), self.forms[i])

    def draw_turned(self) -> None:
        i = self.any(steps=True)
        if i >= 0:
            self.say("turned", (i,), self.forms[i])

    def draw_part(self) -> None:
        i = self.any()
        first, last = self.span(self.forms[i][1])
        self.say("part", (i, first, last), (self.forms[i][0], last - first))

    def draw_written(self) -> None:
        j = self.any()
        steps, width = self.forms[j]
        fitting = [
            i for i, (t, f) in enumerate(self.forms) if i and t == steps and f >= width and i != j
        ]
        if fitting:
            i = self.random.choice(fitting)
            self.say("written", (i, self.random.randint(0, self.forms[i][1] - width), j))

    def draw_cleared(self) -> None:
        i = self.any()
        self.say("cleared", (i, *self.span(self.forms[i][1])))

    def draw_picked(self) -> None:
        i = self.any()
        size = self.random.choice(SIZES)
        places = [self.random.randrange(self.forms[i][1]) for _ in range(size)]
        self.say("picked", (i, places), (self.forms[i][0], size))

    def draw_moved(self) -> None:
        i = self.any()
        steps, width = self.forms[i]
        name = self.random.choice(["flipped", "copied", "viewed", "viewed", "joined"])
        if name == "flipped":
            dims = [-1] if steps is None else [-1, 1]
            self.say(name, (i, self.random.choice(dims)), self.forms[i])
        elif name == "joined":
            j = self.any(like=self.forms[i])
            self.say(name, (i, j), (steps, 2 * width))
        else:
            self.say(name, (i,), self.forms[i])

    def draw_stacked(self) -> None:
        i = self.any(steps=False)
        if i >= 0:
            self.say("stacked", (i, self.any(like=self.forms[i])), (2, self.forms[i][1]))

    def draw_flattened(self) -> None:
        i = self.any(steps=True)
        if i >= 0:
            steps, width = self.forms[i]
            self.say("flattened", (i,), (None, (steps or 1) * width))

    def draw_parted(self) -> None:
        i = self.any(steps=False)
        if i >= 0 and self.forms[i][1] % 2 == 0:
            self.say("parted", (i, 2), (2, self.forms[i][1] // 2))

    def draw_step(self) -> None:
        i = self.any(steps=True)
        if i >= 0:
            steps, width = self.forms[i]
            self.say("step", (i, self.random.randrange(steps or 1)), (None, width))

    def draw_reduced(self) -> None:
        i = self.any(steps=True)
        if i >= 0:
            name = self.random.choice(["total", "mean", "largest", "running"])
            self.say(name, (i,), self.forms[i] if name == "running" else (None, self.forms[i][1]))

    def draw_biased(self) -> None:
        i = self.any()
        name = self.random.choice(["biased", "learned_scale"])
        self.say(name, (i, self.vector(self.forms[i][1])), self.forms[i])

    def draw_product(self) -> None:
        self.products += 1
        if self.products > MOST_PRODUCTS:
            return
        i = self.any()
        j = self.fresh(self.any(like=self.forms[i]), self.forms[i][1])
        name = self.random.choice(["product", "product", "product_in_place", "inner", "powered"])
        if name == "product_in_place":
            self.say(name, (i, j))
        elif name == "powered":
            self.say(name, (j, self.random.choice([2, 2, 3])), self.forms[j])
        else:
            self.say(name, (i, j), (self.forms[i][0], 1) if name == "inner" else self.forms[i])

    draw_product_again = draw_product

    def draw_linear_side(self) -> None:
        i = self.any()
        self.say("linear_side", (i, self.any(like=self.forms[i])), self.forms[i])

    def draw_attention(self) -> None:
        i = self.any(steps=True)
        if i < 0:
            return
        if self.random.random() < 0.5:
            i = self.norm(i)
        heads, size = self.random.choice([1, 2]), self.random.choice([1, 2])
        q, k, v = (self.fresh(i, heads * size) for _ in range(3))
        self.say("attention", (q, k, v, heads, self.random.random() < 0.5), self.forms[v])

    draw_attention_again = draw_attention

    def norm(self, i: int) -> int:
        width = self.forms[i][1]
        bias = self.vector(width) if self.random.random() < 0.5 else -1
        self.say("normalized", (i, self.vector(width), bias), self.forms[i])
        return len(self.forms) - 1

    def draw_norm(self) -> None:
        self.norm(self.any())

    def draw_adapter(self) -> None:
        """A pair of low rank beside a frozen layer."""
        i = self.any()
        frozen = self.fresh(i, self.random.choice(SIZES))
        self.made.frozen.append(len(self.made.layers) - 1)
        rank = self.fresh(i, self.random.choice([1, 2]))
        self.say("added", (frozen, self.fresh(rank, self.forms[frozen][1])), self.forms[frozen])

    def draw_maxout(self) -> None:
        i = self.any()
        steps, width = self.forms[i]
        i = (
            i
            if width % 2 == 0 and self.random.random() < 0.5
            else self.fresh(i, self.random.choice([2, 4]))
        )
        self.say("maxout", (i,), (steps, self.forms[i][1] // 2))

    def draw_prelu(self) -> None:
        """With a slope that may be a bias or a gain elsewhere."""
        i = self.any()
        steps, width = self.forms[i]
        size = width if steps is None and self.random.random() < 0.5 else 1
        self.say("prelu", (i, self.vector(size)), self.forms[i])

    def draw_table(self) -> None:
        i, size = self.any(), self.random.choice(SIZES)
        k = self.layer(size, self.forms[i][1])
        self.say("table", (i, self.vector(size), k), self.forms[i])
