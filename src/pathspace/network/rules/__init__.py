"""One rule for every operation that tracing knows.

A rule is a function ``rule(recorder, *args, **kwargs)`` with the arguments of the torch function it
stands for, which the recorder knows as ``name`` and ``func`` while the rule runs. It says three
things: what the operation does to the scales of units, what it does in the squared network, and
which tensor comes out. ``RULES`` maps the operation's name to its rule; at what is not in it the
network is cut (see ``boundary``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathspace.network.rules import (
    accumulation,
    activations,
    attention,
    choice,
    contraction,
    convolution,
    elementwise,
    embedding,
    fixed_edges,
    linear,
    movement,
    normalization,
    order,
    packed,
    pooling,
    products,
    recurrent,
    scale_free,
    selection,
    upsampling,
    weight_norm,
)
from pathspace.network.written_out import WRITTEN_OUT

_MODULES = (
    accumulation,
    activations,
    attention,
    choice,
    contraction,
    convolution,
    elementwise,
    embedding,
    fixed_edges,
    linear,
    movement,
    normalization,
    order,
    packed,
    pooling,
    products,
    recurrent,
    scale_free,
    selection,
    upsampling,
    weight_norm,
)
RULES: dict[str, Callable[..., Any]] = {
    name: rule for module in _MODULES for name, rule in module.RULES.items()
}

RULED = frozenset([*RULES, *WRITTEN_OUT])
"""Operations whose arguments tracing knows."""

MOVEMENTS = frozenset([*movement.RULES, *upsampling.RULES])
"""Operations that mean the same for inputs as for activations."""

ON_INPUTS = MOVEMENTS | frozenset(packed.RULES) | {"sort", "argsort", "batch_norm"}
"""Operations whose rules also say what they make of inputs; any other function of inputs alone is preprocessing."""
