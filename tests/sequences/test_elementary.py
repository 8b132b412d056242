"""The branch-free exponential and hyperbolic tangent against extended precision."""

import numpy as np
import pytest
from numba import njit

from pathspace.sequences.kernels.elementary import (
    add_row_of,
    dot_of,
    exponential,
    hyperbolic_tangent,
    logistic,
    prefetch,
    squash,
)


def mapped(function):
    @njit(error_model="numpy")
    def run(x, out):
        for k in range(len(x)):
            out[k] = function(x[k])

    def call(x):
        out = np.empty_like(x)
        run(x, out)
        return out

    return call


@pytest.mark.parametrize(
    ("function", "exact", "limit"), [(exponential, np.exp, 700), (hyperbolic_tangent, np.tanh, 30)]
)
def test_relative_error_is_a_few_units_in_the_last_place(function, exact, limit):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-limit, limit, 4000), rng.normal(size=4000), 10.0 ** rng.uniform(-12, 0, 4000)]
    )
    expected = exact(x.astype(np.longdouble))
    assert np.abs((mapped(function)(x) - expected) / expected).max() < 4e-16


def test_ends_of_the_range():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 1e-300, 25.0, -1e9])
    assert np.array_equal(
        mapped(hyperbolic_tangent)(x), [np.nan, 1, -1, 0, 1e-300, 1, -1], equal_nan=True
    )
    y = mapped(exponential)(np.array([np.nan, 0.0, -1e9, 1e9]))
    assert np.isnan(y[0])
    assert y[1] == 1
    assert 0 <= y[2] < 1e-300
    assert np.isfinite(y[3])


def test_squash_of_both_kinds():
    V, a = np.array([9.0, 0.5, -2.0]), np.empty(3)
    squash(V, False, a)
    assert a == pytest.approx([1, np.tanh(0.5), np.tanh(-2)], rel=1e-15)
    squash(V, True, a)
    assert a == pytest.approx([1, 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(2))], rel=1e-15)


@pytest.mark.parametrize("columns", [4, 8, 28])
def test_rows_are_multiplied_and_added_in_the_order_that_is_said(columns):
    dot = dot_of(columns)
    add_row = add_row_of(columns)

    @njit(error_model="numpy")
    def products(a, b):
        return dot(a, 1, b, 2)

    @njit(error_model="numpy")
    def added(a, b):
        add_row(a, 1, b, 2, 0.3)

    rng = np.random.default_rng(columns)
    a, b = rng.normal(size=(3, columns)), rng.normal(size=(4, columns))
    lanes = [0.0] * 4
    for k in range(columns):
        lanes[k % 4] += a[1, k] * b[2, k]
    assert products(a, b) == (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    expected = a.copy()
    expected[1] += 0.3 * b[2]
    added(a, b)
    np.testing.assert_array_equal(a, expected)


def test_memory_that_is_asked_for_early_stays_as_it_is():
    @njit(error_model="numpy")
    def asked(numbers):
        for k in range(len(numbers)):
            prefetch(numbers, k)

    numbers = np.arange(99, dtype=np.uint32)
    asked(numbers)
    assert "llvm.prefetch" in next(iter(asked.inspect_llvm().values()))
    np.testing.assert_array_equal(numbers, np.arange(99))


def test_the_logistic_function_is_that_of_long_numbers():
    x = np.linspace(-12, 12, 999)
    expected = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    assert np.abs((mapped(logistic)(x) - expected) / expected).max() < 1e-15
