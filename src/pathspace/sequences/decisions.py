"""A symbol as a few binary decisions: the alphabet, in its order, halved by weight again and again.

Neighbours in the alphabet (digits, capitals) share their first decisions, and frequent symbols take
few of them.

Alphabet of this module: A symbols, A - 1 nodes, L decisions of the symbol that takes most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pathspace.sequences.kernels.mixing import GROUP
from pathspace.sequences.text import Alphabet, IntArray


class Tree(NamedTuple):
    """The binary tree of the decisions; its root is the last node.

    Args:
        child: (A-1, 2) what each digit leads to: a node, or ~y for symbol y. Children come before
            their parent.
        node: (A, L) nodes on the way to each symbol.
        digit: (A, L) digits on the way to each symbol.
        depth: (A,) decisions on the way to each symbol.
        role: (A,) what each symbol is to words and lines.
        root: (A-1,) node at which the group of three decisions begins that each node is in.
        cell: (A-1,) place of each node in its group: 1 for the root, 2 and 3 behind it, 4 to 7
            behind these.
    """

    child: IntArray
    node: IntArray
    digit: IntArray
    depth: IntArray
    role: IntArray
    root: IntArray
    cell: IntArray


def halve(counts: IntArray) -> IntArray:
    """Return the children (A-1, 2) of a tree whose nodes part an interval of symbols into halves of like weight.

    Args:
        counts: (A,) how often each symbol occurs; each counts once more.

    Example:
        >>> halve(np.array([5, 1, 1])).tolist()  # 1 against 2, then 0 against both
        [[-2, -3], [-1, 0]]
    """
    upto = np.concatenate([[0], np.cumsum(np.asarray(counts) + 1)])
    children: list[tuple[int, int]] = []

    def node(low: int, high: int) -> int:
        if high - low == 1:
            return ~low
        # the cut whose two sides differ least
        cut = low + 1 + int(np.argmin(np.abs(2 * upto[low + 1 : high] - upto[low] - upto[high])))
        left = node(low, cut)
        right = node(cut, high)
        children.append((left, right))
        return len(children) - 1

    node(0, len(counts))
    return np.array(children, dtype=np.int64).reshape(-1, 2)


def part_by_bits(codes: IntArray) -> IntArray:
    """Return the children (A-1, 2) of a tree whose nodes part sorted codes by the highest bit in which some differ.

    Example:
        >>> part_by_bits(np.array([48, 49, 97])).tolist()  # 48 against 49, then both against 97
        [[-1, -2], [0, -3]]
    """
    children: list[tuple[int, int]] = []

    def node(low: int, high: int) -> int:
        if high - low == 1:
            return ~low
        bit = int(codes[low] ^ codes[high - 1]).bit_length() - 1
        is_one = codes[low:high] >> bit & 1
        cut = low + int(np.argmax(is_one))
        left = node(low, cut)
        right = node(cut, high)
        children.append((left, right))
        return len(children) - 1

    node(0, len(codes))
    return np.array(children, dtype=np.int64).reshape(-1, 2)


def tree(counts: IntArray, alphabet: Alphabet | None = None) -> Tree:
    """Return the decisions of symbols that occur so often; without their alphabet none of them has a role."""
    return tree_of(halve(counts), alphabet)


def tree_of(child: IntArray, alphabet: Alphabet | None = None) -> Tree:
    """Return the decisions of a tree by the children (A-1, 2) of its nodes."""
    A = len(child) + 1
    # without a node, symbol 0 is ~0 = -1
    ways: dict[int, list[tuple[int, int]]] = {len(child) - 1: []}
    for v in range(len(child) - 1, -1, -1):
        for digit in (0, 1):
            ways[int(child[v, digit])] = [*ways[v], (v, digit)]
    depth = np.array([len(ways[~y]) for y in range(A)], dtype=np.int64)
    node, digits = np.zeros((2, A, max(1, int(depth.max()))), dtype=np.int64)
    for y in range(A):
        for k, (v, digit) in enumerate(ways[~y]):
            node[y, k] = v
            digits[y, k] = digit
    role = np.zeros(A, np.int64) if alphabet is None else alphabet.roles
    root, cell = _groups(child)
    return Tree(child, node, digits, depth, role, root, cell)


def _groups(child: IntArray) -> tuple[IntArray, IntArray]:
    """Return the root and the place of each node, in groups of three decisions one after the other."""
    last = len(child) - 1
    root = np.full(len(child), last)
    cell = np.ones(len(child), np.int64)
    for v in range(last, -1, -1):
        for digit in (0, 1):
            behind = child[v, digit]
            if behind < 0:
                continue
            is_new = cell[v] >= 1 << GROUP - 1
            root[behind] = behind if is_new else root[v]
            cell[behind] = 1 if is_new else 2 * cell[v] + digit
    return root, cell
