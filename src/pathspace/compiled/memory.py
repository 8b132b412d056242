"""Tensors for compiled loops: an array that stands where a tensor is."""

from __future__ import annotations

from numba import carray, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.extending import intrinsic


@intrinsic
def _pointer(typingctx, address, like):  # noqa: ARG001
    """The address as a pointer to elements of ``like``'s type."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


@njit(error_model="numpy", cache=True, inline="always")
def matrix_at(address, rows, columns, like):
    """The matrix of ``like``'s type that lies at an address."""
    return carray(_pointer(address, like), (rows, columns))  # pyright: ignore[reportCallIssue]


@njit(error_model="numpy", cache=True, inline="always")
def vector_at(address, size, like):
    """The vector of ``like``'s type that lies at an address."""
    return carray(_pointer(address, like), (size,))  # pyright: ignore[reportCallIssue]
