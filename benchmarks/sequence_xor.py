"""How many passes networks need for the distant XOR task: below 1 % of lines wrong, for eight seeds fixed beforehand.

Texts of 10,000 lines of about 100 bits are drawn with the data seed: one to train on, one to look at every so many
passes, one to score. A seed succeeds at the first look with less than 1 % of the lines wrong, and ends there; the
error on the third text, which decided nothing, is printed beside. One JSON line for each seed, then a summary.
Stopped and started again with the same folder, it goes on where it was and repeats the lines of seeds that are done.

    python benchmarks/sequence_xor.py --folder runs/xor
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from pathspace.files import write_atomically
from pathspace.sequences import PCNN, load
from pathspace.sequences.tasks import xor
from sequence_quality import xor_error

PASSED = 0.01


def run(seed: int, texts: list[str], arguments: argparse.Namespace) -> dict[str, object]:
    """Train one network until it succeeds or its passes are spent, keeping it in a file at every look."""
    done, kept = arguments.folder / f"{seed}.json", arguments.folder / f"{seed}.safetensors"
    if done.exists():
        return json.loads(done.read_text())
    text, watched, test = texts
    mask = xor.mask(text)
    options = {name: getattr(arguments, name) for name in ("metric", "damping", "passes")}
    options["reach"] = arguments.reach or None
    model = PCNN(arguments.units, None, seed=seed, **options)
    if kept.exists():
        loaded = load(kept)
        assert isinstance(loaded, PCNN)
        model = loaded
    while True:
        resume = hasattr(model, "training_")
        passes = model.training_.passes if resume else 0
        error = xor_error(model, watched) if resume else math.nan
        if error < PASSED or passes >= arguments.passes:
            break
        if resume:
            nats = -model.training_.log_likelihood / len(mask[mask])
            print(f"seed {seed}: {passes} passes, {nats:.4f} nats a line, {error:.2%} wrong", flush=True)
        model.fit(text, mask=mask, passes=min(passes + arguments.every, arguments.passes), resume=resume)
        model.save(kept)
    figure = {
        "seed": seed,
        "metric": model.metric,
        "damping": model.damping,
        "reach": model.reach,
        "success": error < PASSED,
        "passes": passes,
        "error": error,
        "test_error": xor_error(model, test),
        "training_bits_per_line": -model.training_.log_likelihood / math.log(2) / len(mask[mask]),
        "seconds": round(model.training_.seconds, 1),
    }
    write_atomically(done, lambda file: file.write(json.dumps(figure).encode()))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where networks and results are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1000, 1008)))
    parser.add_argument("--data-seed", type=int, default=21)
    parser.add_argument("--units", type=int, default=10)
    parser.add_argument("--metric", default="rbp")
    parser.add_argument("--damping", type=float, default=1e-6, help="only one symbol in 200 is predicted")
    parser.add_argument(
        "--reach", type=float, default=0.1, help="bounds what a step changes at each symbol; 0: no bound"
    )
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=100, help="T: a line has from T to 1.1 T bits")
    parser.add_argument("--passes", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="passes between two looks")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    texts = [
        xor.generate(np.random.default_rng([arguments.data_seed, k]), arguments.lines, arguments.length)
        for k in (1, 2, 3)
    ]
    figures = []
    for seed in arguments.seeds:
        figures.append(run(seed, texts, arguments))
        print(json.dumps(figures[-1]), flush=True)
    good = [figure["passes"] for figure in figures if figure["success"]]
    print(f"{len(good)} of {len(figures)} seeds below 1 % of lines wrong; passes needed: {sorted(good)}")


if __name__ == "__main__":
    main()
