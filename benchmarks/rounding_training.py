"""Accuracy of MobileNetV2 on CIFAR-10 after training with rounded weights, from several members.

The network and its last layer are those of ``rounding_accuracy``. Each member of its rescaling
class is then trained by SGD with momentum 0.9: the forward pass takes weights rounded to 5 bits,
one step for each tensor, whose size follows its largest weight; gradients pass the rounding as if
it were not there (straight-through). All weights and biases are trained, on 2,000 images in batches
of 32, for four epochs. The rate of a member is the one with the best validation accuracy (500 other
images) after two epochs, of a seed that is not reported.

    python benchmarks/rounding_training.py FOLDER             # with the package that rounding_models names; resumes
    python benchmarks/rounding_training.py --table

Reported is the share of 1,000 test images that are classified correctly by the rounded network:
mean and standard deviation over seeds, and the leads over the network as it is and equalized by
hand, paired by seeds, with Student's 95 % intervals.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

from rounding_accuracy import CALIBRATION, NETWORK, labels, members, outputs, run, with_last_layer

RESULTS = Path(__file__).parent / "results" / "rounding-training.json"
BITS = 5
TRAIN, VALIDATION, TEST, BATCH = 2000, 500, 1000, 32
RATES = (0.01, 0.001, 0.0001, 0.00001)
CHOOSING_SEED, SEEDS = 100, range(5)
EPOCHS = 4
CHOOSING_EPOCHS = 2
MEMBERS = ("as it is", "by hand", "rounding, data")


def rounded_weight(weight: Tensor) -> Tensor:
    """Round to the levels of one step for the whole tensor; the gradient passes unchanged."""
    step = weight.detach().abs().amax().clamp_min(1e-30) / (2 ** (BITS - 1) - 1)
    levels = (weight.detach() / step).round() * step
    return weight + (levels - weight.detach())


def rounded_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: rounded_weight(parameter) if parameter.dim() > 1 else parameter
        for name, parameter in model.named_parameters()
    }


def accuracy(model: nn.Module, images: Tensor, targets: Tensor) -> float:
    """Share of images that the rounded network classifies correctly, in per cent."""
    frozen = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in rounded_parameters(model).items():
            frozen.get_parameter(name).copy_(value)
    if not all(parameter.isfinite().all() for parameter in frozen.parameters()):
        return 0.0
    return 100 * float((outputs(frozen, images).argmax(1) == targets).double().mean())


def train(
    member: nn.Module, rate: float, seed: int, images: Tensor, targets: Tensor, epochs: int
) -> nn.Module:
    """Train a copy of a member with rounded weights."""
    # channels last: half the time of a step
    model = copy.deepcopy(member)
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    images = images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            optimizer.zero_grad()
            result = functional_call(model, rounded_parameters(model), (images[batch],))
            nn.functional.cross_entropy(result, targets[batch]).backward()
            optimizer.step()
    return model


def measure(folder: Path, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill in what is missing: member -> {"start", "validation" by rate, "rate", "test" by seed}."""
    model = with_last_layer(NETWORK.load(folder))
    all_images = NETWORK.inputs(TRAIN + VALIDATION, True)
    all_targets = labels(TRAIN + VALIDATION, True)
    images, targets = all_images[:TRAIN], all_targets[:TRAIN]
    held = all_images[TRAIN:], all_targets[TRAIN:]
    test = NETWORK.inputs(TEST, False), labels(TEST, False)
    made = members(model, all_images[:CALIBRATION])
    for name in MEMBERS:
        member = made[name]()
        line = found.setdefault(name, {"validation": {}, "test": {}})
        line.setdefault("start", accuracy(member, *test))
        for rate in RATES:
            if f"{rate:g}" in line["validation"]:
                continue
            began = time.process_time()
            trained = train(member, rate, CHOOSING_SEED, images, targets, CHOOSING_EPOCHS)
            line["validation"][f"{rate:g}"] = accuracy(trained, *held)
            save()
            _tell(f"{name}, rate {rate:g}: {line['validation'][f'{rate:g}']:.1f} % valid", began)
        line["rate"] = float(max(line["validation"], key=line["validation"].__getitem__))
        for seed in SEEDS:
            if str(seed) in line["test"]:
                continue
            began = time.process_time()
            trained = train(member, line["rate"], seed, images, targets, EPOCHS)
            line["test"][str(seed)] = accuracy(trained, *test)
            save()
            _tell(f"{name}, seed {seed}: {line['test'][str(seed)]:.1f} % right", began)


def _tell(words: str, began: float) -> None:
    seconds = time.process_time() - began
    print(f"    {words}, {seconds:.0f} s", file=sys.stderr, flush=True)


def table(found: dict[str, Any]) -> str:
    """Accuracy before and after training, and the leads over the network as it is and equalized by hand."""
    lines = [
        "| member | rate | rounded, before training | trained | over as it is | over by hand |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, line in found.items():
        values = np.array(list(line["test"].values()))
        leads = [_lead(line, found[other]) if name != other else "" for other in MEMBERS[:2]]
        lines.append(
            f"| {name} | {line['rate']:g} | {line['start']:.1f} | {values.mean():.1f} ± {values.std(ddof=1):.1f} "
            f"| {' | '.join(leads)} |"
        )
    return "\n".join(lines)


def _lead(line: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the mean difference of two members, paired by seeds, ± half of Student's 95 % interval."""
    apart = np.array([accuracy - other["test"][seed] for seed, accuracy in line["test"].items()])
    half = stats.t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / math.sqrt(len(apart))
    return f"{apart.mean():+.1f} ± {half:.1f}"


if __name__ == "__main__":
    run(__doc__, RESULTS, measure, table)
