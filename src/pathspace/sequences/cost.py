"""Lower bounds of the memory and time of a fit, so that one that cannot end is refused before it begins.

Alphabet of this module: N units, d edges that leave each unit, E edges with those from unit 0, A
symbols, T symbols of the text, P of them predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pathspace.memory import check_memory
from pathspace.sequences.text import Corpus

LARGEST = {
    "restarts": 100_000,
    "ensemble": 100_000,
    "folds": 100_000,
    "jobs": 100_000,
    "passes": 10**9,
    "heat": 10**9,
    "patience": 10**9,
    "validate_every": 10**9,
    "iterations": 10**9,
}
"""Options that count what takes time, and more than anybody waits for."""
_ANY = 2**128
"""Above all other whole numbers; a seed may have so many bits."""
_NUMBER = 8  # bytes
_SPEED = 2e10  # multiplications a second, more than one core does
_DAY = 86_400.0
_PROCESS = 1e8  # bytes of an interpreter with its libraries
_TRAINING = 2e3  # bytes of the objects of a training


def check_count(name: str, value: object) -> None:
    """Refuse a whole number beyond all memory and time.

    Raises:
        ValueError: if it is.
    """
    most = LARGEST.get(name, _ANY)
    if isinstance(value, int) and value > most:
        shown = f"{value}" if value < 10**40 else "a number of more than 40 digits"
        raise ValueError(f"{name} must be at most {most}, got {shown}: give a smaller number")


@dataclass(frozen=True)
class Networks:
    """The size of networks that are trained together.

    Args:
        kind: "pcnn", "cnn" or "rnn".
        metric: of the transition steps.
        units: N.
        degree: d, at most N.
        restarts: how many networks.
        jobs: processes.
        passes: most passes of each; without any, no state along the text is kept.
        writing: rule of the writing steps.
    """

    kind: str
    metric: str
    units: int
    degree: int
    restarts: int = 1
    jobs: int = 1
    passes: int = 1
    writing: str = "qdh"

    def fisher(self, A: int) -> int:
        """Return the rows of the whole Fisher matrix of the writing weights, 0 if none is made."""
        return (self.units + 1) * A if self.writing == "fisher" and self.passes else 0

    @property
    def edges(self) -> int:
        """E."""
        return self.units * (self.degree + 1)

    @property
    def triangles(self) -> int:
        """Entries of the metric of one symbol: of all d+1 edges into each unit with one another."""
        if self.metric not in ("rbp", "rutsd"):
            return self.edges
        return self.units * (self.degree + 1) * (self.degree + 2) // 2

    def held(self, A: int) -> float:
        """Return the bytes that the networks take while they wait for their turn."""
        symbols = 1 if self.kind == "rnn" else A
        numbers = symbols * self.edges + A * self.units + 2 * self.edges
        return self.restarts * (_NUMBER * numbers + _TRAINING)

    def trained(self, A: int, T: int, P: int) -> float:
        """Return the bytes that one training takes."""
        # tau, its layout by slots, that squared, and the gradient; the metric
        numbers = 4 * A * self.edges + A * self.triangles
        if self.passes:
            # a and B now and on trial, and the predictions now and on trial; see docs/sequences.md
            numbers += 3 * T * (self.units + 1) + 2 * P * A
        # the matrix, its eigenvectors, and room to find them
        numbers += 4 * self.fisher(A) ** 2
        return _NUMBER * numbers

    def seconds(self, A: int, T: int, P: int) -> float:
        """Return the seconds of a pass of one network."""
        # states and gradients, the metric along the text, the predictions
        products = 2 * T * self.edges + P * self.units * A
        if self.metric in ("rbp", "rutsd"):
            # sum_t a_i a_k m_j, and the Cholesky decomposition of each triangle
            products += T * self.triangles + A * self.triangles * (self.degree + 1) / 3
        # the sum along the text, and the eigenvectors
        products += P * self.fisher(A) ** 2 + 4 * self.fisher(A) ** 3
        return products / _SPEED


def check_networks(networks: Networks, corpus: Corpus) -> None:
    """Refuse networks that memory has no room for, or one pass of which takes days.

    Raises:
        ValueError: if there is no room, or no time.
    """
    A = corpus.A
    T = len(corpus.x)
    P = len(corpus.expected)
    processes = min(networks.jobs, networks.restarts)
    needed = networks.held(A) + processes * networks.trained(A, T, P)
    if processes > 1:
        needed += processes * _PROCESS
    what = f"{networks.restarts} networks" if networks.restarts > 1 else "a network"
    size = (
        f"of {networks.units} units and {networks.edges} edges, for {A} symbols and a text of {T}"
    )
    instead = "give fewer units, a smaller connectivity, the metric rbp-qd, or less text"
    if networks.writing == "fisher":
        instead = f"{instead.removesuffix(', or less text')}, the writing step qdh, or less text"
    if networks.restarts > 1:
        instead = f"give fewer restarts or jobs, or {instead.removeprefix('give ')}"
    check_memory(needed, f"the arrays of {what} {size},", instead)
    days = networks.seconds(A, T, P) / _DAY if networks.passes else 0.0
    if days > 1:
        raise ValueError(
            f"one pass of a network {size}, takes at least {days:,.1f} days, and one is allowed: {instead}"
        )


def check_blend(networks: int, units: int, validation: Corpus) -> None:
    """Refuse an ensemble whose states along the validation text memory has no room for.

    Raises:
        ValueError: if there is no room.
    """
    P = len(validation.expected)
    check_memory(
        _NUMBER * networks * P * (units + 1),
        f"the states of an ensemble of {networks} networks of {units} units along a validation text of {P} symbols",
        "give a smaller ensemble, fewer units, or a shorter validation text",
    )


def check_hidden_states(
    states: int, iterations: int, T: int, A: int, edges: int | None = None
) -> None:
    """Refuse a hidden Markov model that memory has no room for, or one iteration of which takes days.

    Args:
        states: how many.
        iterations: of expectation-maximization.
        T: symbols of the text.
        A: symbols of the alphabet.
        edges: that leave each state; None: to all.

    Raises:
        ValueError: if there is no room, or no time.
    """
    check_count("iterations", iterations)
    size = f"a hidden Markov model of {states} states for {A} symbols and a text of {T}"
    # transitions and their expected numbers; emissions likewise; probabilities on the way forward
    # and back
    needed = _NUMBER * (2 * states * states + 2 * states * A + 2 * T * states)
    check_memory(needed, f"the arrays of {size}", "give fewer states, or less text")
    days = 2 * T * states * (states if edges is None else edges) / _SPEED / _DAY
    if days > 1:
        raise ValueError(
            f"one iteration of {size} takes at least {days:,.1f} days, and one is allowed: give fewer states, "
            "or less text"
        )


def check_folds(T: int, folds: int) -> None:
    """Refuse more folds than memory has room for: each holds the text once.

    Raises:
        ValueError: if there is no room.
    """
    # symbols, and whether each is predicted
    check_memory(
        folds * T * (_NUMBER + 1), f"{folds} folds of a text of {T} symbols", "give fewer folds"
    )
