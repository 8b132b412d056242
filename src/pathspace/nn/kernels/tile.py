"""One block of a sum of matrix products, held in the registers of the processor from its first term to its last.

Letters: R rows and N vectors of a block, L numbers in a vector, K terms of a product.

A job is a table of 64-bit numbers, ten and seven more for each product; sizes and strides are in
bytes, 0 is no matrix:

    out, out_row               where the result goes, and from a row of it to the next
    start, start_row           what the sum begins with (a stride of 0 gives every row the same)
    extra, extra_row           and what is added to it
    gate, gate_row             numbers that are not > 0 make zeros of the result's (NaN does not)
    relu                       1 for the ReLU of the result
    count                      how many products, each with
        a, a_row, a_term           A[r, k], one number at a time
        m, m_term                  M[k, :], rows of adjacent numbers
        terms                      K
        panels                     where M lies in panels, from which the caller sets m and m_term; not read here

    out[r, :] = gate( relu( start[r, :] + extra[r, :] + sum over products, sum_k A[r, k] M[k, :] ) )

Numba has no vectors, so the block is written in LLVM's own instructions, which it compiles for the
processor at hand. The last vector of a row is read and written under a mask: nothing beyond the
matrices is touched.
"""

# ruff: noqa: ARG001 - the arguments of what Numba compiles arrive as types, and as values in
# `generate`
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

HEAD = 10
PRODUCT = 7
"""Numbers of a job before its products, and of each product."""

_I1 = ir.IntType(1)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_POINTER = ir.PointerType()


def vector_bytes(features: str) -> int:
    """Bytes of a vector on a processor with some of LLVM's features: 64, 32, or 0 without fused multiplication."""
    have = {name[1:] for name in features.split(",") if name.startswith("+")}
    if "fma" not in have or "avx2" not in have:
        return 0
    return 64 if "avx512f" in have and "avx512vl" in have else 32


class Block:
    """Writes the instructions of one block.

    Args:
        builder: LLVM's.
        rows: R.
        vectors: N.
        double: whether numbers have 64 bits, not 32.
        width: bytes of a vector.
        last: how many numbers of the last vector belong to the matrices.
    """

    def __init__(
        self, builder: Any, rows: int, vectors: int, double: bool, width: int, last: ir.Value
    ) -> None:
        self.builder = builder
        self.rows = rows
        self.vectors = vectors
        self.width = width
        self.last = last
        self.number = ir.DoubleType() if double else ir.FloatType()
        self.number_bytes = 8 if double else 4
        lanes = width // self.number_bytes
        self.vector = ir.VectorType(self.number, lanes)
        self.lanes = lanes
        self.zero = ir.Constant(self.vector, [0.0] * lanes)
        whole = ir.VectorType(ir.IntType(8 * self.number_bytes), lanes)
        rest = self._repeated(builder.trunc(last, whole.element), whole)
        # the signs of numbers, as AVX2 has masks
        signs = self._opaque(builder.sub(ir.Constant(whole, list(range(lanes))), rest), "x")
        self.mask = builder.icmp_signed("<", signs, ir.Constant(whole, [0] * lanes))
        self.sums = []
        for _ in range(rows):
            self.sums.append([cgutils.alloca_once(builder, self.vector) for _ in range(vectors)])
        for q, n in self._places():
            builder.store(self.zero, self.sums[q][n])

    def ahead(self, base: ir.Value, stride: ir.Value, write: bool) -> None:
        """Ask for what `finish` reads or writes, so that it is in the nearest cache by then."""
        b = self.builder
        zero = ir.Constant(_I64, 0)
        kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
        prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with b.if_then(b.and_(b.icmp_signed("!=", base, zero), b.icmp_signed("!=", stride, zero))):
            for q, n in self._places():
                place = b.inttoptr(self._address(base, stride, q, n), _POINTER)
                b.call(prefetch, [place, _I32(int(write)), _I32(3), _I32(1)])

    def add(self, base: ir.Value, stride: ir.Value) -> None:
        """Add a matrix, if there is one."""
        b = self.builder
        with b.if_then(b.icmp_signed("!=", base, ir.Constant(_I64, 0))):
            for q, n in self._places():
                value = self._load(self._address(base, stride, q, n), n)
                b.store(b.fadd(b.load(self.sums[q][n]), value), self.sums[q][n])

    def add_product(self, a: ir.Value, a_row: ir.Value, a_term: ir.Value, m: ir.Value, m_term: ir.Value,
                    terms: ir.Value) -> None:  # fmt: skip
        """Add sum_k A[r, k] M[k, :]."""
        b = self.builder
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        fma = self._function("fma", kind)
        rows = [b.mul(a_row, ir.Constant(_I64, q)) for q in range(self.rows)]
        with cgutils.for_range(b, terms) as loop:
            at = b.add(m, b.mul(loop.index, m_term))
            values = [
                self._load(b.add(at, ir.Constant(_I64, n * self.width)), n)
                for n in range(self.vectors)
            ]
            here = self._opaque(b.add(a, b.mul(loop.index, a_term)), "r")
            for q, row in enumerate(rows):
                place = b.inttoptr(b.add(here, row), _POINTER)
                factor = self._repeated(
                    b.load(place, typ=self.number, align=self.number_bytes), self.vector
                )
                for n, value in enumerate(values):
                    b.store(b.call(fma, [factor, value, b.load(self.sums[q][n])]), self.sums[q][n])

    def finish(
        self, relu: ir.Value, gate: ir.Value, gate_row: ir.Value, out: ir.Value, out_row: ir.Value
    ) -> None:
        """Write the sums, after the ReLU or the gate."""
        b = self.builder
        zero = ir.Constant(_I64, 0)
        with b.if_then(b.icmp_signed("!=", relu, zero)):
            for q, n in self._places():
                self._keep_where_positive(b.load(self.sums[q][n]), self.sums[q][n])
        with b.if_then(b.icmp_signed("!=", gate, zero)):
            for q, n in self._places():
                self._keep_where_positive(
                    self._load(self._address(gate, gate_row, q, n), n), self.sums[q][n]
                )
        for q, n in self._places():
            self._store(b.load(self.sums[q][n]), self._address(out, out_row, q, n), n)

    def _opaque(self, value: Any, register: str) -> Any:
        """Hide from LLVM how a value was computed, so that it does not compute it again or in another way."""
        nothing = ir.InlineAsm(
            ir.FunctionType(value.type, [value.type]), "", f"={register},0", False
        )
        return self.builder.call(nothing, [value])

    def _places(self) -> list[tuple[int, int]]:
        return [(q, n) for q in range(self.rows) for n in range(self.vectors)]

    def _address(self, base: ir.Value, stride: ir.Value, q: int, n: int) -> ir.Value:
        b = self.builder
        return b.add(
            b.add(base, b.mul(stride, ir.Constant(_I64, q))), ir.Constant(_I64, n * self.width)
        )

    def _keep_where_positive(self, decides: ir.Value, place: ir.Value) -> None:
        # as in PyTorch, max(NaN, 0) is NaN, and its gradient goes through
        b = self.builder
        b.store(
            b.select(b.fcmp_unordered(">", decides, self.zero), b.load(place), self.zero), place
        )

    def _repeated(self, value: ir.Value, kind: ir.VectorType) -> ir.Value:
        """Return a vector of one number."""
        b = self.builder
        undefined = ir.Constant(kind, ir.Undefined)
        one = b.insert_element(undefined, value, _I32(0))
        return b.shuffle_vector(
            one, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
        )

    def _function(self, name: str, kind: ir.FunctionType) -> Any:
        suffix = f".v{self.lanes}f{8 * self.number_bytes}" + (
            ".p0" if name.startswith("masked") else ""
        )
        return cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}{suffix}")

    def _load(self, address: ir.Value, n: int) -> ir.Value:
        b = self.builder
        place = self.builder.inttoptr(address, _POINTER)
        if n < self.vectors - 1:
            return b.load(place, typ=self.vector, align=self.number_bytes)
        kind = ir.FunctionType(self.vector, [_POINTER, _I32, self.mask.type, self.vector])
        return b.call(
            self._function("masked.load", kind),
            [place, _I32(self.number_bytes), self.mask, self.zero],
        )

    def _store(self, value: ir.Value, address: ir.Value, n: int) -> None:
        b = self.builder
        place = self.builder.inttoptr(address, _POINTER)
        if n < self.vectors - 1:
            b.store(value, place, align=self.number_bytes)
            return
        kind = ir.FunctionType(ir.VoidType(), [self.vector, _POINTER, _I32, self.mask.type])
        # a store under a mask takes a processor with AVX2 tens of cycles
        with b.if_else(b.icmp_signed("==", self.last, ir.Constant(_I64, self.lanes))) as (
            whole,
            part,
        ):
            with whole:
                b.store(value, place, align=self.number_bytes)
            with part:
                masked = self._function("masked.store", kind)
                b.call(masked, [value, place, _I32(self.number_bytes), self.mask])


@intrinsic
def on_its_own(_typing: Any):
    """Compile the function that says this once, not into each of those that call it."""

    def generate(context: Any, b: Any, _signature: Any, _arguments: Any) -> Any:
        b.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=False)
def move(_typing: Any, unit: Any, to: Any, begin: Any):
    """Copy one number of the type of `unit` from an address to another."""

    def generate(_context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        number, to, begin = arguments
        size = 8 if unit == types.float64 else 4
        value = b.load(b.inttoptr(begin, _POINTER), typ=number.type, align=size)
        b.store(value, b.inttoptr(to, _POINTER), align=size)
        return _context.get_dummy_value()

    return types.void(unit, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def tile(
    _typing: Any,
    rows: Any,
    vectors: Any,
    width: Any,
    unit: Any,
    job: Any,
    row: Any,
    column: Any,
    last: Any,
):
    """Do a job for a block of R x N vectors.

    Args:
        rows: R, a constant.
        vectors: N, a constant.
        width: bytes of a vector, a constant.
        unit: any number of the type that the matrices have.
        job: the address of the job.
        row: the first row of the block.
        column: bytes from the beginning of a row to the block.
        last: numbers of the last vector.
    """
    double = unit == types.float64
    signature = types.void(rows, vectors, width, unit, *[types.int64] * 4)

    def generate(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
        job, row, column, last = arguments[4:]
        table = b.inttoptr(job, _POINTER)

        def entry(i: Any) -> ir.Value:
            return b.load(b.gep(table, [i], source_etype=_I64), typ=_I64, align=8)

        def matrix(slot: int) -> tuple[ir.Value, ir.Value]:
            """Return where the block of a matrix begins, 0 if there is none, and the stride of its rows."""
            base = entry(ir.Constant(_I64, slot))
            stride = entry(ir.Constant(_I64, slot + 1))
            zero = ir.Constant(_I64, 0)
            here = b.add(b.add(base, b.mul(row, stride)), column)
            return b.select(b.icmp_signed("==", base, zero), zero, here), stride

        block = Block(
            b, rows.literal_value, vectors.literal_value, double, width.literal_value, last
        )
        start = matrix(2)
        extra = matrix(4)
        gate = matrix(6)
        out = matrix(0)
        for each, write in ((start, False), (gate, False), (out, True)):
            block.ahead(*each, write)
        with cgutils.for_range(b, entry(ir.Constant(_I64, 9))) as loop:
            first = b.add(b.mul(loop.index, ir.Constant(_I64, PRODUCT)), ir.Constant(_I64, HEAD))
            a, a_row, a_term, m, m_term, terms = (
                entry(b.add(first, ir.Constant(_I64, i))) for i in range(6)
            )
            block.add_product(
                b.add(a, b.mul(row, a_row)), a_row, a_term, b.add(m, column), m_term, terms
            )
        block.add(*start)
        block.add(*extra)
        block.finish(entry(ir.Constant(_I64, 8)), *gate, *out)
        return context.get_dummy_value()

    return signature, generate
