"""The default length of training of ``pathspace sequence fit``: as long as contexts gain from the network."""

from __future__ import annotations

from pathspace.sequences.cli.fit_texts import Texts
from pathspace.sequences.mixed import Mixed, bits_beside
from pathspace.sequences.training import Training

FIRST = 25
"""Passes before the first look; the next one is after twice as many."""
LEAST = 0.01
"""Share of the bits that a network must gain from look to look."""


class Enough(Exception):  # noqa: N818 - no error: it ends a training
    """The network has gained too little since the last look."""


class Gains:
    """Gains of the validation part by a network beside contexts, from look to look.

    For a look contexts read the validation part with the network as it is; they have learned the
    training text without it, so that they do not trust it too far.

    Args:
        contexts: which have read the training text.
        texts: of the fit.
    """

    def __init__(self, contexts: Mixed, texts: Texts) -> None:
        self._contexts = contexts
        self._texts = texts
        self._next = FIRST
        self._bits = contexts.validation_bits_ or 0.0
        self._validation = texts.fold(contexts.alphabet_).validation
        self.has_any = False

    def look(self, training: Training) -> None:
        """Look at a training that has come so far; raises Enough if it has gained too little."""
        # those before a checkpoint from which the training goes on
        while self._next < training.passes:
            self._next *= 2
        if training.passes < self._next or self._validation is None:
            return
        self._next *= 2
        bits = bits_beside(self._contexts, training.result, self._validation)
        if bits <= (1 - LEAST) * self._bits:
            self._bits = bits
            self.has_any = True
            return
        gain = 1 - bits / self._bits if self._bits else 0.0
        since = "since the last look" if self.has_any else "of what contexts alone need"
        mixed = "" if self.has_any else ", so that it is not mixed with them"
        raise Enough(
            f"after {training.passes} passes the network has gained {max(gain, 0.0):.1%} {since}, less than "
            f"{LEAST:.0%}: training ends here{mixed} (--seconds or --passes train it longer)",
        )
