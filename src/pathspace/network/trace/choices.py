"""Questions of a model about its inputs: whether a mask masks anything, whether lengths are in order.

Each answer leads to a graph. The model is traced once for each combination of answers. If all
traces have the same operations with the same unit classes, the answer does not matter, and neither
does that of later inputs. (Movements, sums and masks, such as a mask that is added only if it masks
anything, are not compared; scales are.) Otherwise the trace is refused. Answers for which the model
itself raises an error need no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from pathspace.network.errors import UntraceableError
from pathspace.network.network import Network

QUESTIONS = frozenset(["__bool__", "is_nonzero", "__contains__", "equal", "allclose"])
"""Functions that turn a tensor into one Python truth value."""

PASSED_OVER = frozenset(["add", "add_", "masked_fill", "masked_fill_", "where"])
"""Sums and masks, which are not compared."""
_MOST_GRAPHS = 8


class Choices:
    """The answers of one trace.

    Args:
        answers: to the first questions; to all later ones it is yes.

    Attributes:
        given: the answers so far in this pass.
    """

    def __init__(self, answers: Sequence[bool] = ()) -> None:
        self._answers = answers
        self.given: list[bool] = []
        self._refusal: UntraceableError | None = None

    def start(self) -> None:
        """Start a pass."""
        self.given = []

    def answer(self, refusal: UntraceableError) -> bool:
        """Return the answer to the next question; ``refusal`` is raised if the answer matters."""
        place = len(self.given)
        self._refusal = refusal
        if place >= len(self._answers) + _MOST_GRAPHS:  # as in a loop until some input is reached
            raise refusal
        self.given.append(self._answers[place] if place < len(self._answers) else True)
        return self.given[-1]

    def refuse(self) -> None:
        """Raise what was to be raised if the last answer matters."""
        assert self._refusal is not None
        raise self._refusal


def whatever_the_answers(
    traced: Callable[[Choices], Network], movements: Collection[str]
) -> Network:
    """Trace once per combination of answers; return the network of the first (all yes) if all networks are equal.

    Args:
        traced: a trace with given answers.
        movements: names of operations that only move values.

    Raises:
        UntraceableError: an answer matters, or there are too many.
    """
    choices = Choices()
    graphs = 1
    result = None
    error = None
    while True:
        try:
            network = traced(choices)
        except (AssertionError, ValueError) as raised:
            if isinstance(raised, UntraceableError) or not choices.given:
                raise
            error = error or raised
        else:
            result = network if result is None else result
            ignored = {*movements, *PASSED_OVER}
            if network is not result and not _is_same_network(result, network, ignored):
                choices.refuse()
        answers = _next(choices.given)
        if answers is None:
            break
        if graphs == _MOST_GRAPHS:
            choices.refuse()
        choices = Choices(answers)
        graphs += 1
    if result is None:
        assert error is not None
        raise error
    return result


def _next(given: list[bool]) -> list[bool] | None:
    """Return the next combination of answers, from all yes to all no; None after the last."""
    while given and not given[-1]:
        given = given[:-1]
    return [*given[:-1], False] if given else None


def _is_same_network(a: Network, b: Network, ignored: Collection[str]) -> bool:
    """Return whether two traces have the same operations, but for ignored ones, and the same unit classes."""
    if _form_of(a, ignored) != _form_of(b, ignored):
        return False
    if not torch.equal(a.monomials, b.monomials):
        return False
    for name, edges in a.edges.items():
        other = b.edges[name]
        if not torch.equal(edges.target, other.target):
            return False
        if not torch.equal(edges.source, other.source):
            return False
    return True


def _form_of(network: Network, ignored: Collection[str]) -> tuple[Any, ...]:
    """Return all that must be equal in two traces, except tensors."""
    operations = [
        (o.name, o.module, o.kind) for o in network.program.operations if o.name not in ignored
    ]
    return (
        operations,
        network.outside,
        network.class_names,
        network.call.batch_dim,
        network.returned,
        network.edges.keys(),
    )
