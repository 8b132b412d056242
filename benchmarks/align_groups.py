"""Which units of large networks `align_` may put in another order, and how long it takes to find them.

The networks are those of ``trace_models``, with random weights; most need transformers.

    python benchmarks/align_groups.py resnet-50 gpt2 mobilenet-v2
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

import pathspace as ps
from pathspace.rescaling.permutation import class_order, groups_of
from trace_models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=sorted(MODELS), metavar="name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.names:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        network = ps.trace(model.eval(), inputs)
        before = time.process_time()
        groups = groups_of(network)
        seconds = time.process_time() - before
        turned = [torch.arange(len(group)).roll(1) for group in groups]
        held = class_order(network, groups, turned) == torch.arange(network.num_classes)
        print(
            f"{name}: {sum(p.numel() for p in model.parameters()):,} weights, {len(groups)} groups of "
            f"{sum(map(len, groups)):,} units, {int(held.sum())} of {network.num_classes:,} classes keep their order, "
            f"{seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
