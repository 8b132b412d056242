"""Learning-rate schedules: the factor of the learning rate at a step, from the number of the step alone.

No schedule keeps a state, so a resumed run takes the factors that an uninterrupted one takes.
"""

from __future__ import annotations

import math

DROPS = {"steps": (1 / 2, 3 / 4, 7 / 8), "drop": (4 / 5, 19 / 20)}
"""The parts of a run after each of which a rate is a tenth of what it was."""

SCHEDULES = {
    "constant": "the learning rate as it is",
    "cosine": "half a period of a cosine, from the learning rate to 0",
    "steps": "a tenth after 1/2, 3/4 and 7/8 of the run",
    "drop": "the learning rate as it is, a tenth of it from 4/5 of the run on, a hundredth from 19/20 on",
}


def factor(schedule: str, warmup: float, step: int, steps: int) -> float:
    """Return what multiplies the learning rate at one step.

    .. code-block:: text

        w = round(warmup steps)
        (step + 1) / w                                     for step < w
        (1 + cos(pi (step - w) / (steps - w))) / 2         for a cosine, from then on
        10^-(how many of 1/2, 3/4, 7/8 are <= step / steps)    for steps, from then on
        10^-(how many of 4/5, 19/20 are <= step / steps)       for drop, from then on

    Args:
        schedule: A name in `SCHEDULES`.
        warmup: The part of the run, in [0, 1), over which the factor rises linearly.
        step: The number of the step, from 0.
        steps: How many steps the whole run has.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule in DROPS:
        return 0.1 ** sum(step >= drop * steps for drop in DROPS[schedule])
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / (steps - rising)))
