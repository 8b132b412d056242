"""Networks that multiply activations, by brute force: their symmetry as a null space, their path mass path by path.

A *diagonal scaling* multiplies every weight by a factor of its own, exp(theta_e). Those that keep a
function f for all weights w and inputs x form a group, whose Lie algebra are the theta with

    sum over e of theta_e w_e df_x/dw_e (w) = 0          for all x and w,

the null space of the derivatives in log|w|, one below the other for enough x and w.

A path of a product of activations is a path of each, so a node of such a network holds *terms*: its
value with ReLUs left out is the sum of products of weights, and its mass the sum of their squares.

Letters: e a weight, numbered through the parameters; E how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, product

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def scalings(model: nn.Module, examples: Sequence[Tensor], seeds: int = 8) -> Tensor:
    """An orthonormal basis of the diagonal scalings that keep a function, ``[E, rank]``; for float64 models.

    An example may be a batch: every output of it is one more equation.
    """
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        w = {
            n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for n, p in model.named_parameters()
        }
        for x in examples:

            def outputs(w: dict[str, Tensor], x: Tensor = x) -> Tensor:
                return functional_call(model, w, (x,)).reshape(-1)

            slopes = jacrev(outputs)(w)
            rows.append(torch.cat([(slopes[n] * w[n]).reshape(len(slopes[n]), -1) for n in w], 1))
    _, singular, basis = torch.linalg.svd(torch.cat(rows))
    values = torch.zeros(basis.shape[0], dtype=torch.float64)
    values[: len(singular)] = singular
    return basis[values < 1e-9 * values.max()].t()


Term = Counter[int]
"""A product of weights: how often each number of a weight occurs."""
Terms = list[Term]
"""A sum of them: one entry for every path."""
ONE: Terms = [Counter()]


def times(*factors: Terms) -> Terms:
    """The product: a path of each."""
    return [sum(each, Counter[int]()) for each in product(*factors)]


class Weights:
    """The weights of a model as terms, numbered through its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {n: p.shape for n, p in model.named_parameters()}
        self.values = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
        self._first, first = {}, 0
        for n, shape in self.shapes.items():
            self._first[n] = first
            first += shape.numel()

    def of(self, name: str, *index: int) -> Terms:
        """One weight."""
        place = 0
        for i, n in zip(index, self.shapes[name], strict=True):
            place = place * n + i
        return [Counter([self._first[name] + place])]

    def linear(self, name: str, x: Sequence[Terms]) -> list[Terms]:
        """What ``nn.Linear`` of that name makes of features."""
        result = []
        for row in range(self.shapes[f"{name}.weight"][0]):
            edges = [times(self.of(f"{name}.weight", row, i), terms) for i, terms in enumerate(x)]
            if f"{name}.bias" in self.shapes:
                edges.append(self.of(f"{name}.bias", row))
            result.append(list(chain.from_iterable(edges)))
        return result


def masses(weights: Weights, outputs: Sequence[Terms]) -> tuple[Tensor, Tensor, Tensor]:
    """The squared path norm, kappa1 and kappa2, ``[E]``, by counting: G = sum of products of squares.

    kappa1 = dG/dq and kappa2 = 2 q d^2G/dq^2 in q = w^2: a term with n factors q has n and n (n -
    1) of them.
    """
    q = weights.values.square()
    norm, first, second = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros_like(q),
        torch.zeros_like(q),
    )
    for term in chain.from_iterable(outputs):
        mass = torch.ones((), dtype=torch.float64)
        for e, n in term.items():
            mass = mass * q[e] ** n
        norm += mass
        for e, n in term.items():
            first[e] += n * mass / q[e]
            second[e] += 2 * n * (n - 1) * mass / q[e]
    return norm, first, second
