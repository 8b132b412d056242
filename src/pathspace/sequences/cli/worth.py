"""The bits of a model on the held-out part, beside those of general compressors."""

from __future__ import annotations

from pathspace.sequences import baselines
from pathspace.sequences.cli.console import per_symbol
from pathspace.sequences.text import Alphabet, Text

LONGEST = 1 << 19
"""Symbols that context trees read, seconds of them: those of the held-out part and the last ones before it."""
DEPTH = 6


def baseline_bits(held: Text, before: Text, symbols: int | None = None) -> dict[str, float]:
    """Return the bits per symbol of a text after another, by bzip2, xz and context tree weighting.

    Context trees are left out where the text alone is longer than `LONGEST`, and a compressor where
    the few symbols of the text make its file, of whole blocks or bytes, no longer.

    Args:
        held: the text.
        before: what comes before it.
        symbols: of the text, None: its characters or bytes. Context trees read those alone.
    """
    counted = len(held) if symbols is None else symbols
    content, seen = (part.encode() if isinstance(part, str) else part for part in (held, before))
    rows: dict[str, float] = {
        name: baselines.compressed_bits(name, content, seen) for name in baselines.COMPRESSORS
    }
    if counted == len(held) <= LONGEST:
        recent = before[max(0, len(before) - (LONGEST - len(held))) :]
        alphabet = Alphabet.of([recent, held])
        coded = alphabet.encode(held)
        history = alphabet.encode(recent)
        rows["context trees"] = baselines.context_tree_bits(coded, len(alphabet), DEPTH, history)
    return {name: per_symbol(bits, counted) for name, bits in rows.items() if bits > 0}


def _listed(names: list[str]) -> str:
    """Return names as English lists them."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def verdict(
    model: float, others: dict[str, float], mixing_tried: bool, overfitted: bool = False
) -> list[str]:
    """Return the lines that set the bits per symbol of a model beside those of the baselines.

    Args:
        model: bits per symbol of the model.
        others: those of the baselines.
        mixing_tried: whether it was mixed with contexts.
        overfitted: whether the network got worse in most of its passes, so that more of them are no
            advice.
    """
    listed = ", ".join(f"{name} {bits:.4f}" for name, bits in others.items())
    shorter = [name for name in sorted(others, key=others.__getitem__) if others[name] < model]
    if not shorter:
        fewer = (
            "fewer bits than each of them"
            if model < min(others.values())
            else "no more bits than any of them"
        )
        said = f"the model needs {fewer}: worth keeping"
    else:
        more = "fit longer (--seconds, --passes) or with more --units"
        if overfitted:
            more = "fit with fewer --units or to more text (the network got worse in most of its passes)"
        if not mixing_tried:
            more += ", or mix it with contexts (without --no-context)"
        # context trees are scored, but no command writes a file with them
        compressors = [name for name in shorter if name in baselines.COMPRESSORS]
        # that is what was measured: without the training part before it they need far more
        together = "to compress a text together with the training part"
        take = f"{together}, take {compressors[0]}, or " if compressors else ""
        said = f"the model needs more bits than {_listed(shorter)}: {take}{more}"
    return [f"beside it, after the training part: {listed} bits/symbol", said]
