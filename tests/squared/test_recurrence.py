"""The squared recurrence and its derivatives against a plain loop, and what it must not see: the scale of a unit."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from pathspace.squared.recurrence import linear_recurrence

PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "bmm", "mv", "addmm", "addmm_", "addmv", "addmv_")
}


def plain(S, u, start=None, backwards=False):
    """h_t = S h_{t-1} + u_t."""
    steps = range(len(u))
    h, states = start, list(u)
    for t in reversed(steps) if backwards else steps:
        h = states[t] = u[t] if h is None else S @ h + u[t]
    return torch.stack(states)


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    "steps", [1, 2, 9, 15, 16, 23]
)  # from 16 on in blocks, the last one whole or not
@pytest.mark.parametrize("started", [False, True])
def test_is_the_plain_loop_and_so_are_its_derivatives(started, steps, backwards):
    torch.manual_seed(1)
    S, u, start = (
        torch.rand(*shape, dtype=torch.float64) / 2 for shape in ((4, 4), (steps, 4), (4,))
    )
    ends = [t.requires_grad_() for t in ((S, u, start) if started else (S, u))]
    weights = torch.rand(steps, 4, dtype=torch.float64)
    results = []
    for function in (linear_recurrence, plain):
        h = function(*ends, backwards=backwards)
        first = torch.autograd.grad(
            (weights * h**2).sum(), ends, create_graph=True, materialize_grads=True
        )
        total = torch.stack([(g**2).sum() for g in first]).sum()
        second = torch.autograd.grad(total, ends, materialize_grads=True)
        results.append([h, *first, *second])
    assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("growth", [0.3, 0.99, 1.05])
def test_rescaling_by_powers_of_two_changes_no_bit(growth):
    torch.manual_seed(2)
    S = torch.rand(12, 12)
    S, u = growth * S / torch.linalg.eigvals(S).abs().max(), torch.rand(200, 12)
    factors = 2.0 ** torch.randint(-8, 9, (12,))
    ours = linear_recurrence(S, u)
    theirs = linear_recurrence(factors[:, None] * S / factors, u * factors) / factors
    digits = ours > 1e-30  # below, float32 loses them one by one
    assert torch.equal(ours[digits], theirs[digits])


def test_a_unit_that_nothing_enters_stays_zero_over_many_steps():
    """However large its loop is: in blocks its power is infinite, and 0 times infinity is no number."""
    h = linear_recurrence(
        torch.diag(torch.tensor([0.25, 144.0])), torch.tensor([1.0, 0.0]).expand(400, 2)
    )
    assert_close(h[-1], torch.tensor([4 / 3, 0.0]))


def products(steps, units):
    """How many products of matrices and vectors the states and their gradient take."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func.overloadpacket in PRODUCTS
            return func(*args, **(kwargs or {}))

    S = torch.rand(units, units).div_(units).requires_grad_()
    with Count() as count:
        linear_recurrence(S, torch.ones(steps, units)).sum().backward()
    return count.number


def test_many_steps_of_few_units_take_an_eighth_of_the_products():
    assert products(399, 100) == 2 * 398 + 1
    assert 8 * products(784, 100) < 2 * 783 + 1
