"""Bits beyond the true code length on a fresh text, after training within a budget of passes or time.

Three texts are drawn with the data seed: one to train on, one to stop on and to weight the ensemble
by, one to test. With --folds 2 the first two take turns: half of the networks learn the one and
stop on the other, half the other way round. Prints one JSON line: the regrets on the three texts,
and the time. Without --folds, --exchange trains on the second text and stops on the first, and
saved networks of both kinds are put together with --members and --exchanged.

    python benchmarks/sequence_quality.py music --units 16 --restarts 16 --ensemble 12 --seconds 600 --jobs 2
    python benchmarks/sequence_quality.py music --units 16 --restarts 16 --ensemble 16 --folds 2 --patience 80
    python benchmarks/sequence_quality.py xor --units 10 --connectivity 0 --passes 2000
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from pathspace.experiments.xor import wrong_lines
from pathspace.sequences import PCNN, SequenceModel, load, merge
from pathspace.sequences.ensembles import fit_blend
from pathspace.sequences.evaluation import code_length
from pathspace.sequences.merging import merge_parameters
from pathspace.sequences.passes import forward
from pathspace.sequences.tasks import TASKS, regret
from pathspace.sequences.tasks.music import slips_of
from pathspace.sequences.text import Corpus


def music_slips(model: SequenceModel, bars: int, texts: int) -> list[int]:
    """Return how many bars of each generated text break the rules, chords by their place in the cycle."""
    counts = []
    for seed in range(texts):
        drawn = model.sample(12 * bars, seed=seed)
        assert isinstance(drawn, str)
        counts.append(
            sum(bool(slips_of(bar, number)) for number, bar in enumerate(drawn.split("\n")[:bars]))
        )
    return sorted(counts)


def network_of(path: Path) -> SequenceModel:
    """Return the network of a file that --save has written."""
    model = load(path)
    assert isinstance(model, SequenceModel)
    return model


def merged(groups: list[list[SequenceModel]], text: str, held: str) -> SequenceModel:
    """Return all networks in one: each group blended so that what it has not learned is shortest, groups alike.

    The first group has learned the first text, the second, which may be missing, the second text.
    """
    members = [member for group in groups for member in group]
    alphabet = members[0].alphabet_
    corpora = [Corpus.of([alphabet.encode(part)], len(alphabet)) for part in (text, held)]
    weights, offsets, held_bits = [], [], 0.0
    with threadpool_limits(1):
        for group, corpus in zip(groups, reversed(corpora), strict=False):
            networks = [member.parameters_ for member in group]
            blend = fit_blend(networks, corpus)
            held_bits += code_length(
                merge_parameters(networks, blend.weights, blend.offsets), corpus
            )
            weights += [*(blend.weights / len(groups))]
            offsets.append(blend.offsets / len(groups))
        model = merge(members, weights, np.sum(offsets, axis=0))
        model.training_ = replace(
            model.training_,
            log_likelihood=sum(
                forward(model.parameters_, part).log_likelihood for part in corpora[: len(groups)]
            ),
            best_bits=held_bits,
            passes=sum(member.training_.passes for member in members),
            tries=sum(member.training_.tries for member in members),
            seconds=sum(member.training_.seconds for member in members),
        )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--connectivity", type=int, default=3, help="0: full")
    parser.add_argument("--metric", default="rbp")
    parser.add_argument(
        "--reach", type=float, help="most that a step changes what a symbol adds to a unit"
    )
    parser.add_argument("--prior-writing", type=float, default=0.0)
    parser.add_argument("--prior-transition", type=float, default=0.0)
    parser.add_argument("--passes", type=int, default=10**6)
    parser.add_argument("--patience", type=int, default=300)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--heat", type=int, default=0)
    parser.add_argument("--ensemble", type=int, default=1)
    parser.add_argument("--folds", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--exchange", action="store_true", help="learn the second text, stop on the first"
    )
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--data-seed", type=int, default=21)
    parser.add_argument(
        "--members", type=Path, nargs="+", help="merge these saved models instead of training"
    )
    parser.add_argument(
        "--exchanged", type=Path, nargs="+", help="merge these too, trained with --exchange"
    )
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    text, held, test = (
        task.generate(np.random.default_rng([arguments.data_seed, k])) for k in (1, 2, 3)
    )
    if arguments.exchange:
        text, held = held, text
    masks = [None if task.mask is None else task.mask(part) for part in (text, held, test)]
    model: SequenceModel = PCNN(
        arguments.units,
        arguments.connectivity or None,
        metric=arguments.metric,
        reach=arguments.reach,
        prior_writing=arguments.prior_writing,
        prior_transition=arguments.prior_transition,
        passes=arguments.passes,
        patience=arguments.patience,
        restarts=arguments.restarts,
        heat=arguments.heat,
        ensemble=arguments.ensemble,
        folds=arguments.folds,
        jobs=arguments.jobs,
        seed=arguments.seed,
    )
    began, began_processor = time.perf_counter(), time.process_time()
    if arguments.members:
        groups = [
            [network_of(path) for path in paths]
            for paths in (arguments.members, arguments.exchanged)
            if paths
        ]
        model = merged(groups, text, held)
    elif arguments.folds > 1:
        model.fit(
            [text, held], mask=None if masks[0] is None else masks[:2], seconds=arguments.seconds
        )
    else:
        model.fit(text, held, mask=masks[0], validation_mask=masks[1], seconds=arguments.seconds)
    wall = time.perf_counter() - began
    both = arguments.folds > 1 or bool(arguments.exchanged)
    training, true = model.training_, [task.true_bits(part) for part in (text, held)]
    figure: dict[str, object] = {
        "task": arguments.task,
        "test_regret_bits": round(regret(arguments.task, test, model.bits(test, masks[2])), 1),
        "validation_regret_bits": round(training.result_bits - true[0] * both - true[1], 1),
        "training_regret_bits": round(
            -training.log_likelihood / math.log(2) - true[0] - true[1] * both, 1
        ),
        "units": model.parameters_.units,
        "passes": training.passes,
        "tries": training.tries,
        "wall_seconds": round(wall, 1),
        "processor_seconds": round(time.process_time() - began_processor, 1),
        "training_seconds": round(training.seconds, 1),
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    if arguments.task == "xor":
        figure["test_error"] = wrong_lines(model, test)
    if arguments.task == "music":
        figure["slips_in_64_generated_bars_of_16_texts"] = music_slips(model, 64, 16)
    print(json.dumps(figure), flush=True)
    if arguments.save is not None:
        model.save(arguments.save)


if __name__ == "__main__":
    main()
