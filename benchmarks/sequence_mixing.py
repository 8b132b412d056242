"""Bits per symbol of the last tenth of a text after the rest: compressors, context trees, networks, contexts, mixtures.

Prints a table for each text: bits per symbol, and the seconds of processor time that learning the
nine tenths and scoring the last took. Texts: "log" is drawn by server_log.py (2 MB); "text8" and
"wikitext" are the first megabyte of those data sets, in $PATHSPACE_DATA; any other name is a file.
Each network has --seconds: the first learns all of the text from the start, the second 1/64 of it
first, which doubles six times, each part for the same time.

    python benchmarks/sequence_mixing.py log text8 --seconds 60
    python benchmarks/sequence_mixing.py /var/log/dpkg.log --seconds 20 --json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from pathspace.sequences import PCNN, Mixed, baselines, compress, decompress
from pathspace.sequences.text import Alphabet
from server_log import generate

Row = tuple[str, float, float]
_STAGES = 7


def text_of(name: str) -> bytes:
    """Return the text of this name."""
    data = Path(os.environ.get("PATHSPACE_DATA", "data"))
    if name == "log":
        return generate(np.random.default_rng(0), 2_000_000)
    if name == "text8":
        with gzip.open(data / "text8" / "text8_first6800000.txt.gz") as file:
            return file.read(1_000_000)
    if name == "wikitext":
        return (data / "wikitext-2" / "wiki.train.tokens").read_bytes()[:1_000_000]
    return Path(name).read_bytes()


def growing(units: int, before: bytes, held: bytes, seconds: float) -> PCNN:
    """Return a network fitted to a part of the text that doubles, each part for the same time."""
    model = PCNN(units=units, passes=10**6, patience=None)
    for k in range(_STAGES):
        last = k == _STAGES - 1
        model.fit(
            before[: len(before) >> (_STAGES - 1 - k)],
            held if last else held[: 1 << 15],
            alphabet=before + held,
            seconds=seconds * (k + 1) / _STAGES,
            resume=k > 0,
        )
    return model


def rows(text: bytes, seconds: float, units: int) -> Iterator[Row]:
    """Yield the name of each model, its bits per symbol, and its processor time."""
    cut = len(text) - len(text) // 10
    before, held = text[:cut], text[cut:]
    alphabet = Alphabet.of([text])
    seen, x = alphabet.encode(before), alphabet.encode(held)

    def timed(name: str, bits: Callable[[], float]) -> Row:
        began = time.process_time()
        return name, bits() / len(held), time.process_time() - began

    for name in baselines.COMPRESSORS:
        yield timed(name, lambda name=name: baselines.compressed_bits(name, held, before))
    for depth in (2, 6):
        yield timed(
            f"context trees, depth {depth}",
            lambda depth=depth: baselines.context_tree_bits(x, len(alphabet), depth, seen),
        )
    network = PCNN(units=units, passes=10**6, patience=None)
    if seconds:
        yield timed(
            f"network, {units} units",
            lambda: network.fit(before, held, alphabet=text, seconds=seconds).training_.result_bits,
        )
        grown: list[PCNN] = []

        def grow() -> float:
            grown.append(growing(units, before, held, seconds))
            return grown[0].training_.result_bits

        yield timed(f"network, {units} units, growing parts", grow)
        network = grown[0]
    contexts = Mixed()
    yield timed("contexts", lambda: contexts.read(before, held).validation_bits_ or 0.0)
    if seconds:
        mixed = Mixed(network)
        yield timed(
            "contexts and the growing network",
            lambda: mixed.read(before, held, unseen=True).validation_bits_ or 0.0,
        )
    packed = compress(contexts, held)
    assert decompress(contexts, packed) == held
    yield timed("contexts, compressed", lambda: 8.0 * len(compress(contexts, held)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="+", help="log, text8, wikitext, or files")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each network; 0: no network"
    )
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        Mixed().fit(b"compiles")
        for name in arguments.texts:
            text = text_of(name)
            if not arguments.json:
                print(f"{name}: {len(text)} bytes, {len(set(text))} different", flush=True)
            for model, bits, seconds in rows(text, arguments.seconds, arguments.units):
                figure = {
                    "text": name,
                    "model": model,
                    "bits_per_symbol": round(bits, 4),
                    "cpu_seconds": round(seconds, 1),
                }
                line = (
                    json.dumps(figure)
                    if arguments.json
                    else f"  {model:36} {bits:8.4f} {seconds:8.1f} s"
                )
                print(line, flush=True)


if __name__ == "__main__":
    main()
