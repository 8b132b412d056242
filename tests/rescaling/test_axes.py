"""Axes of tensors: whatever is said to run over the same units can be put in another order, before or after."""

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathspace.graph.capture import Capture, plain, wrapped
from pathspace.rescaling.axes import Axis, dim_of, places_of, regrouped, resolved, unify
from pathspace.rescaling.axis_rules import AxisReader


def permuted(tensor, dims, axis, order):
    """The tensor with the places of an axis in another order."""
    for d, dim in enumerate(dims):
        places = places_of(axis, dim)
        if places is not None:
            index = torch.arange(tensor.shape[d])
            index[places.reshape(-1)] = places[order].reshape(-1)
            tensor = tensor.index_select(d, index)
    return tensor


def axes_in(dims):
    return {id(a.root): a.root for dim in dims for segment in resolved(dim) for a in segment}


def factors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def movements(draw):
    """A function of a tensor that only moves elements, and its name."""
    kind = draw(
        st.sampled_from(
            ["view", "permute", "halves", "joined", "slice", "strided", "expand", "stack", "pad"]
        )
    )
    seed = draw(st.integers(0, 999))

    def move(x):
        chosen = random.Random(seed)
        pick = chosen.randrange
        d = pick(x.dim())
        n = x.shape[d]
        if kind == "view":
            sizes, left = [], x.numel()
            while left > 1:
                of_left = factors(left)
                sizes.append(of_left[1 + pick(len(of_left) - 1)])
                left //= sizes[-1]
            return x.reshape(sizes or [1])
        if kind == "permute":
            return x.permute(*chosen.sample(range(x.dim()), x.dim()))
        if kind == "halves":
            return x.split([n // 2, n - n // 2], d)[pick(2) if n > 1 else 1]
        if kind == "joined":
            return torch.cat([x, 2 * x], d)
        if kind == "slice":
            start = pick(n)
            return x.narrow(d, start, 1 + pick(n - start))
        if kind == "strided":
            return x[tuple(slice(None, None, 2) if k == d else slice(None) for k in range(x.dim()))]
        if kind == "expand":
            return x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:])
        if kind == "stack":
            return torch.stack([x, x + 1], d)
        return torch.nn.functional.pad(x, (1, 0))

    return move


@settings(max_examples=150)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3),
    moves=st.lists(movements(), max_size=4),
)
def test_an_axis_may_be_permuted_before_or_after(shape, moves):
    def moved(x):
        for move in moves:
            if x.numel() > 2000:
                break
            x = move(x)
        return x

    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    capture, reader = Capture(), AxisReader()
    with capture.running():
        inner = wrapped(x)
        reader.bind_weight("x", plain(inner))
        result = plain(moved(inner))
    for step in capture.steps:
        reader.read(step)
    before, after = reader.of(plain(inner)), reader.of(result)
    assert [sum(math.prod(a.size for a in s) for s in dim) for dim in after] == list(result.shape)
    for axis in axes_in([*before, *after]).values():
        order = torch.randperm(axis.size, generator=torch.Generator().manual_seed(1))
        one = permuted(moved(x), after, axis, order)
        other = moved(permuted(x, before, axis, order))
        assert axis.fixed or torch.equal(one, other), (before, after)


def test_sizes_that_do_not_fit_fix_the_order():
    six, other = dim_of(6), ((Axis(2), Axis(3)),)
    unify(six, other)
    assert [[a.size for a in segment] for segment in resolved(six)] == [[2, 3]]
    unify(six, ((Axis(3), Axis(2)),))
    assert all(a.fixed for segment in resolved(six) for a in segment)


def test_a_sum_is_equal_to_a_sum_in_other_places():
    one, other = ((Axis(2),), (Axis(4),)), ((Axis(3),), (Axis(3),))
    unify(one, other)
    # without those of size 1
    assert [[a.size for a in segment] for segment in resolved(one)] == [
        [2],
        [],
        [3],
    ]
    assert axes_in([one]) == axes_in([other])


def test_axes_of_a_view_are_those_of_its_tensor():
    given_dims = [dim_of(4), dim_of(6)]
    twelve, two = regrouped(given_dims, [12, 2])
    assert [[a.size for a in segment] for segment in resolved(twelve)] == [[4, 3]]
    assert axes_in([twelve, two]) == axes_in(given_dims)
