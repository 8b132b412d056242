"""Exponential, hyperbolic tangent and squash that the compiler can turn into vector instructions; rows of matrices.

The library calls behind ``np.exp`` and ``np.tanh`` stop vectorisation. These are branch-free: reduction to
|r| <= log(2)/2, a polynomial for exp(r) - 1, and the power of two put together from its bits. Relative error
below 4e-16; NaN stays NaN.

``fastmath=False`` is said aloud because Numba lets a function inherit the option from whoever calls
it first, and reordering would cancel the addition and subtraction of _SHIFT.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pathspace.sequences.kernels.machine_code import njit

_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH = 6.93147180369123816490e-01  # log(2) rounded to 32 bits: k * _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_SHIFT = (
    6755399441055744.0  # 1.5 * 2^52: adding it rounds to the nearest integer, kept in the low bits
)
_C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13 = (
    1.0 / math.factorial(n) for n in range(2, 14)
)


@intrinsic
def _bits(typingctx, x):  # noqa: ARG001
    """Reinterpret a float64 as an int64."""

    def codegen(context, builder, signature, arguments):  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def _float(typingctx, k):  # noqa: ARG001
    """Reinterpret an int64 as a float64."""

    def codegen(context, builder, signature, arguments):  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@njit(error_model="numpy", fastmath=False, cache=True)
def _power_and_expm1(x):
    """Return 2^k and exp(r) - 1 with x = k log 2 + r; |x| at most 700."""
    shifted = x * _LOG2E + _SHIFT
    k = shifted - _SHIFT
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    r2 = r * r
    r4 = r2 * r2
    low = (0.5 + r * _C3) + r2 * (_C4 + r * _C5)
    middle = (_C6 + r * _C7) + r2 * (_C8 + r * _C9)
    high = (_C10 + r * _C11) + r2 * (_C12 + r * _C13)
    p = r + r2 * (low + r4 * (middle + r4 * high))
    return _float((_bits(shifted) + 1023) << 52), p  # pyright: ignore[reportCallIssue]


@njit(error_model="numpy", fastmath=False, cache=True)
def exponential(x):
    """Return exp(x), with x cut to [-700, 700]."""
    x = -700.0 if x < -700.0 else x
    x = 700.0 if x > 700.0 else x
    scale, p = _power_and_expm1(x)  # pyright: ignore[reportGeneralTypeIssues]
    return scale + scale * p


@njit(error_model="numpy", fastmath=False, cache=True)
def logistic(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exponential(-x))


@njit(error_model="numpy", fastmath=False, cache=True)
def hyperbolic_tangent(x):
    """Return tanh(x)."""
    # tanh x = e / (e + 2),  e = exp(2x) - 1; equal to 1 in float64 from |x| = 20 on
    z = 2.0 * x
    z = -40.0 if z < -40.0 else z
    z = 40.0 if z > 40.0 else z
    scale, p = _power_and_expm1(z)  # pyright: ignore[reportGeneralTypeIssues]
    e = scale * p + (scale - 1.0)
    return e / (e + 2.0)


@njit(error_model="numpy", fastmath=False, cache=True)
def squash(V, logistic, a):
    """Write the activities a (N+1,) of the potentials V, whose entry 0 is not read: 1 to a[0]."""
    a[0] = 1.0
    if logistic:
        # 1 / (1 + exp(-V)) = (1 + tanh(V/2)) / 2
        for j in range(1, len(a)):
            a[j] = 0.5 + 0.5 * hyperbolic_tangent(0.5 * V[j])
    else:
        for j in range(1, len(a)):
            a[j] = hyperbolic_tangent(V[j])


_LANES = 4
_Vector = ir.VectorType(ir.DoubleType(), _LANES)


def _row(context, builder, kind, array, row, columns):
    """Return a pointer to a row of a matrix as vectors."""
    matrix = context.make_array(kind)(context, builder, array)
    first = builder.gep(matrix.data, [builder.mul(row, row.type(columns))])
    return builder.bitcast(first, _Vector.as_pointer())


def _vector(builder, row, at):
    """Return the pointer to one vector of a row, and its content."""
    pointer = builder.gep(row, [at])
    return pointer, builder.load(pointer, align=8)


def dot_of(columns):
    """Make the product of rows of matrices with so many columns, a multiple of 4.

    The compiler knows the number, and writes the loop out.
    """

    @intrinsic
    def dot(typingctx, a, i, b, j):  # noqa: ARG001
        """Return the sum of products of row i of the matrix a and row j of b.

        Each fourth product is added up by itself, on all processors: so the result does not depend
        on what they can do.
        """

        def codegen(context, builder, signature, arguments):
            kinds = signature.args
            left = _row(context, builder, kinds[0], arguments[0], arguments[1], columns)
            right = _row(context, builder, kinds[2], arguments[2], arguments[3], columns)
            total = cgutils.alloca_once_value(builder, ir.Constant(_Vector, [0.0] * _LANES))
            count = ir.Constant(ir.IntType(64), columns // _LANES)
            with cgutils.for_range(builder, count) as loop:
                _, x = _vector(builder, left, loop.index)
                _, y = _vector(builder, right, loop.index)
                builder.store(builder.fadd(builder.load(total), builder.fmul(x, y)), total)
            sums = builder.load(total)
            lanes = [builder.extract_element(sums, ir.IntType(32)(lane)) for lane in range(_LANES)]
            return builder.fadd(builder.fadd(lanes[0], lanes[1]), builder.fadd(lanes[2], lanes[3]))

        return types.float64(a, types.int64, b, types.int64), codegen

    return dot


def add_row_of(columns):
    """Make the sum of a row and a multiple of another, of matrices with so many columns, a multiple of 4."""

    @intrinsic
    def add_row(typingctx, a, i, b, j, factor):  # noqa: ARG001
        """Add row j of the matrix b times a factor to row i of a."""

        def codegen(context, builder, signature, arguments):
            kinds = signature.args
            target = _row(context, builder, kinds[0], arguments[0], arguments[1], columns)
            source = _row(context, builder, kinds[2], arguments[2], arguments[3], columns)
            factors = ir.Constant(_Vector, ir.Undefined)
            for lane in range(_LANES):
                factors = builder.insert_element(factors, arguments[4], ir.IntType(32)(lane))
            count = ir.Constant(ir.IntType(64), columns // _LANES)
            with cgutils.for_range(builder, count) as loop:
                place, w = _vector(builder, target, loop.index)
                _, x = _vector(builder, source, loop.index)
                builder.store(builder.fadd(w, builder.fmul(factors, x)), place, align=8)
            return context.get_dummy_value()

        return types.void(a, types.int64, b, types.int64, types.float64), codegen

    return add_row


@intrinsic
def prefetch(typingctx, a, i):  # noqa: ARG001
    """Ask the memory for number i of an array without waiting for it."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte)
        integer = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, integer, integer, integer])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # to be read, kept in all caches, as data
        builder.call(hint, [place, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(a, types.int64), codegen
