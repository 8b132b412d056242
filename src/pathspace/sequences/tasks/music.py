"""Music task: a rhythm and a chord for every bar, drawn independently.

A bar is its notes, each pitch and duration and a blank, then "|" and a newline: "c2 c4 |". The
chords follow the 8-bar cycle I IV I V I IV V I; the rhythm is uniform among five, each pitch
uniform in the chord.
"""

from __future__ import annotations

import math

import numpy as np

from pathspace.sequences.tasks.text_error import ImpossibleTextError

CYCLE = ("ceg", "cfa", "ceg", "gbd", "ceg", "cfa", "gbd", "ceg")
RHYTHMS = (("4", "4", "4"), ("2", "4"), ("4.", "8", "4"), ("2.",), ("4", "4", "8", "8"))


def generate(rng: np.random.Generator, bars: int = 2700) -> str:
    """Return a text of so many bars."""
    text = []
    for bar in range(bars):
        chord = CYCLE[bar % len(CYCLE)]
        rhythm = RHYTHMS[rng.integers(len(RHYTHMS))]
        text += [chord[rng.integers(3)] + duration + " " for duration in rhythm] + ["|\n"]
    return "".join(text)


def true_bits(text: str) -> float:
    """Return the code length of a text under the generator, its number of bars being known.

    Raises:
        ImpossibleTextError: if the generator cannot make the text.
    """
    bits = 0.0
    bars = text.split("\n")
    if bars.pop() != "":
        raise ImpossibleTextError("the text does not end with a newline")
    for number, bar in enumerate(bars):
        slip = slips_of(bar, number)
        if slip:
            raise ImpossibleTextError(f"bar {number + 1}, {bar!r}: {slip}")
        bits += math.log2(len(RHYTHMS)) + (bar.count(" ")) * math.log2(3)
    return bits


def slips_of(bar: str, number: int) -> str:
    """Return what is wrong with bar ``number`` (from 0) of a text, or an empty string.

    Example:
        >>> slips_of("c2 c4 |", 0), slips_of("d2. |", 1)
        ('', 'd is not in the chord cfa')
    """
    notes = bar.split(" ")
    if notes.pop() != "|":
        return "it does not end with ' |'"
    if tuple(note[1:] for note in notes) not in RHYTHMS:
        return "its rhythm is none of the five"
    chord = CYCLE[number % len(CYCLE)]
    wrong = [note[0] for note in notes if note[0] not in chord]
    return f"{wrong[0]} is not in the chord {chord}" if wrong else ""
