"""What a transition step along an invariant metric costs beside one of frequency-adjusted backpropagation.

A step is all that one pass over the text takes: states, output, backpropagation of what the step
needs, the sums over time and the direction. The steps of the two metrics alternate in one process,
on one thread, in seconds of processor time; the figure is the median of the ratios of neighbouring
steps, with quartiles. O13 says that in a sparse network the steps cost about what backpropagation
does. An RNN takes the quasi-diagonal form of its metrics.

    python benchmarks/sequence_step_cost.py
    python benchmarks/sequence_step_cost.py --texts music --units 64 --degrees 3 --networks pcnn --pairs 40
    python benchmarks/sequence_step_cost.py --output benchmarks/results/sequence_step_cost.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import paired
from pathspace.sequences.graph import Graph
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import Kind, Parameters, start
from pathspace.sequences.passes import Metric, activities, forward, transition_direction
from pathspace.sequences.tasks import TASKS
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.training import Settings, Training, train

METRICS: tuple[Metric, ...] = ("rbp", "rutsd", "rbp-qd", "rutsd-qd")


def step_of(metric: Metric, model: Parameters, corpus: Corpus) -> Callable[[], float]:
    """A step that returns its seconds, in memory of its own that it keeps."""
    buffers = Buffers()

    def step() -> None:
        state = forward(model, corpus, activities(model, corpus, buffers), buffers)
        transition_direction(model, corpus, state, metric, buffers=buffers)

    return paired.timed(step, time.process_time, cuda=False)


def measure(network: Kind, text: str, units: int, degree: int, pairs: int) -> list[dict[str, Any]]:
    """The figures of one network on one text."""
    drawn = TASKS[text].generate(np.random.default_rng(0))
    alphabet = Alphabet.of([drawn])
    corpus = Corpus.of([alphabet.encode(drawn)], len(alphabet))
    rng = np.random.default_rng(1)
    model = start(network, "tanh", Graph.random(units, degree, rng), corpus, rng)
    model = train(Training.begin(model), corpus, Settings(metric="rbp-qd", passes=4)).model
    plain, figures = step_of("fb", model, corpus), []
    for metric in METRICS:
        if network == "rnn" and not metric.endswith("-qd"):
            continue
        ratios, seconds = paired.alternate(step_of(metric, model, corpus), plain, pairs, warmup=1)
        case = {
            "network": network,
            "text": text,
            "units": units,
            "degree": degree,
            "metric": metric,
        }
        figures.append({**case, **paired.summary(ratios), "fb_ms": paired.milliseconds(seconds)})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="+", choices=("rnn", "cnn", "pcnn"), default=["pcnn", "cnn", "rnn"]
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        choices=("alphabet", "music", "anbn"),
        default=["alphabet", "music", "anbn"],
    )
    parser.add_argument("--units", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument(
        "--degrees", nargs="+", type=int, default=[3, 10], help="edges that leave a unit"
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    with threadpool_limits(1):
        for network in options.networks:
            for text in options.texts:
                for units in options.units:
                    for degree in options.degrees:
                        for figure in measure(network, text, units, degree, options.pairs):
                            figures.append(figure)
                            print(figure, flush=True)
    paired.write({"versions": paired.versions(), "figures": figures}, options.output)


if __name__ == "__main__":
    main()
