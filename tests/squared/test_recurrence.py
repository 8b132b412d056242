"""The squared recurrence and its shortcuts against the plain loop, and what they must not see: the scale of a unit."""

import pytest
import torch
from torch.testing import assert_close

from pathspace.squared import recurrence
from pathspace.squared.recurrence import run_recurrence


def plain(S, u, start=None, backwards=False):
    """h_t = S h_{t-1} + u_t in float64."""
    S, u = S.double(), u.double()
    steps = range(len(u))
    h = torch.zeros(S.shape[0], dtype=torch.float64) if start is None else start.double()
    states = [h] * len(u)
    for t in reversed(steps) if backwards else steps:
        h = states[t] = S @ h + u[t]
    return torch.stack(states)


def contracting(hidden, dtype=torch.float32, scale=0.9):
    S = torch.rand(hidden, hidden, dtype=torch.float64)
    return (scale * S / torch.linalg.eigvals(S).abs().max()).to(dtype)


def identity_like(hidden, dtype=torch.float32):
    """Slow to settle: eigenvalues close together."""
    return (torch.eye(hidden) + 1e-4 * torch.rand(hidden, hidden)).to(dtype)


def with_dead_units(hidden, dtype=torch.float32):
    S = contracting(hidden, dtype)
    S[: hidden // 2, hidden // 2 :] = 0
    S[:, 0] = S[0] = 0
    return S


MATRICES = {
    "fast": lambda h, d: contracting(h, d, 0.3),
    "slow": lambda h, d: contracting(h, d, 0.99),
    "growing": lambda h, d: contracting(h, d, 1.05),
    "identity": lambda h, d: torch.eye(h, dtype=d),
    "near the identity": identity_like,
    "dead units": with_dead_units,
    "nilpotent": lambda h, d: torch.diag(torch.rand(h - 1, dtype=d), -1),
    "zero": lambda h, d: torch.zeros(h, h, dtype=d),
}


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("steps", [1, 2, 9, 28, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("matrix", MATRICES)
def test_is_the_plain_loop(matrix, dtype, steps, backwards):
    """What enters is always the same, or comes once at one end, or settles, or has no order."""
    torch.manual_seed(1)
    S = MATRICES[matrix](12, dtype)
    first = torch.rand(12, dtype=dtype)
    if matrix == "dead units":
        first[0] = 0
    entering = {
        "constant": first.expand(steps, -1),
        "once": torch.cat([first[None], first.new_zeros(steps - 1, 12)]),
        "settling": first
        + torch.cat([torch.rand(steps // 2, 12), torch.zeros(steps - steps // 2, 12)]).to(dtype),
        "any": torch.rand(steps, 12, dtype=dtype),
    }
    rtol = 3e-13 if dtype == torch.float64 else 1e-4
    for kind, u in entering.items():
        u = u.flip(0) if backwards and kind != "constant" else u
        expected = plain(S, u, backwards=backwards)
        assert_close(run_recurrence(S, u, None, backwards).double(), expected, rtol=rtol, atol=1e-30)
        # sums with weights that do not grow along the recurrence
        summed = run_recurrence(S, u, None, backwards, summed=True).double()
        weights = torch.linspace(3, 1, steps, dtype=torch.float64)
        weights = weights.flip(0) if backwards else weights
        assert_close(weights @ summed, weights @ expected, rtol=rtol, atol=1e-30)
        start = torch.rand(12, dtype=dtype)
        assert_close(
            run_recurrence(S, u, start, backwards).double(),
            plain(S, u, start, backwards),
            rtol=rtol,
            atol=1e-30,
        )


def products(monkeypatch, *arguments, **options):
    """How many matrix-vector products a recurrence takes."""
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mv", counted(torch.mv))
        patch.setattr(torch, "addmv", counted(torch.addmv))
        run_recurrence(*arguments, **options)
    return count


@pytest.mark.parametrize("matrix", ["fast", "identity", "dead units"])
def test_few_products_are_enough(matrix, monkeypatch):
    torch.manual_seed(1)
    S, first = MATRICES[matrix](64, torch.float32), torch.rand(64)
    if matrix == "dead units":
        first[0] = 0
    assert products(monkeypatch, S, first.expand(784, -1)) <= 40
    once = torch.cat([first[None], torch.zeros(783, 64)])
    assert products(monkeypatch, S, once, summed=True) <= 40


def test_a_growing_layer_is_doubled(monkeypatch):
    torch.manual_seed(1)
    S, u = contracting(32, torch.float64, 1.02), torch.rand(32, dtype=torch.float64).expand(784, -1)
    S[:16, 16:] = 0  # two rates, which no single ratio describes
    assert products(monkeypatch, S, u) < 100
    monkeypatch.setattr(recurrence, "_DOUBLE_BEYOND", 1e9)
    slowly = run_recurrence(S, u)
    assert_close(slowly, plain(S, u), rtol=1e-12, atol=0)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("kind", ["constant", "once", "settling"])
def test_rescaling_by_powers_of_two_changes_no_bit(matrix, kind):
    """All shortcuts are taken in the same places."""
    torch.manual_seed(2)
    S, first, steps = MATRICES[matrix](12, torch.float32), torch.rand(12), 200
    factors = 2.0 ** torch.randint(-8, 9, (12,))
    u = {
        "constant": first.expand(steps, -1),
        "once": torch.cat([first[None], torch.zeros(steps - 1, 12)]),
        "settling": first + torch.cat([torch.rand(9, 12), torch.zeros(steps - 9, 12)]),
    }[kind]
    scaled_S, scaled_u = (
        factors[:, None] * S / factors,
        (factors * first).expand(steps, -1) if kind == "constant" else u * factors,
    )
    for summed in (False, True):
        ours = run_recurrence(S, u, summed=summed)
        theirs = run_recurrence(scaled_S, scaled_u, summed=summed) / factors
        digits = ours > 1e-30  # below, float32 loses them one by one
        assert torch.equal(ours[digits], theirs[digits])


def test_negative_numbers_take_no_shortcut():
    """Derivatives of second order have signs: bounds by ratios say nothing about them."""
    torch.manual_seed(3)
    S = contracting(8, torch.float64, 0.9)
    u = torch.randn(8, dtype=torch.float64).expand(60, -1)
    assert_close(run_recurrence(S, u, signed=True), plain(S, u), rtol=1e-11, atol=1e-12)
