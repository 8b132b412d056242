"""The midpoint of two independently trained networks, with their units matched in several ways.

MLPs 64-128-128-10 on the digits of scikit-learn, 1200 for training and 597 to test. Kinds of pairs:
trained with BatchNorm, which is folded afterwards, or which stays and gets its statistics anew from
the training images; trained with Adam alone; and the latter with one end rescaled by random factors
between 1/8 and 8. And transformers of two blocks, which read the eight rows of an image. The figure
is the barrier: the test loss at the mean of the weights minus the mean of both ends.

``raw weights`` is weight matching as it is usual: on the weights as they are, without scales.

    python benchmarks/align_pairs.py --pairs 10 --out benchmarks/results/align-pairs.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

import pathspace as ps
from pathspace.rescaling.align import likeness
from pathspace.rescaling.assignment import best_assignment
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.permutation import groups_of

HIDDEN = 128


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16.0, dtype=torch.float32)[order], torch.tensor(targets)[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def plain(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    sizes = (64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10)
    first, second, last = (nn.Linear(*size) for size in sizes)
    return train(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last), x, y, 25)


def folded(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    first, second, last = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 10)
    norms = nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN)
    train(nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), last), x, y, 12)
    first, second = fuse_linear_bn_eval(first, norms[0]), fuse_linear_bn_eval(second, norms[1])
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def normalized(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    sizes = (64, HIDDEN), (HIDDEN, HIDDEN)
    layers = [
        layer for size in sizes for layer in (nn.Linear(*size), nn.BatchNorm1d(HIDDEN), nn.ReLU())
    ]
    return train(nn.Sequential(*layers, nn.Linear(HIDDEN, 10)), x, y, 12)


class Transformer(nn.Module):
    """Two pre-norm blocks of four heads over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.read, self.positions = nn.Linear(8, width), nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.read(x.unflatten(-1, (8, 8))) + self.positions).mean(1))


def transformer(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    return train(Transformer(), x, y, 30)


@torch.no_grad()
def measured_anew(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with statistics of BatchNorm from some images."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    if norms:
        model.train()(x)
    return model.eval()


def rescaled(model: nn.Module, seed: int, x: Tensor) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    ps.rescaling.random_rescale_(ps.trace(model, x[:2]), 1 / 8, 8, generator=generator)
    return model


def midpoint(a: nn.Module, b: nn.Module) -> nn.Module:
    result = copy.deepcopy(a)
    with torch.no_grad():
        for p, q in zip(result.parameters(), b.parameters(), strict=True):
            p.add_(q).div_(2)
    return result


def by_raw_weights(a: ps.Network, b: ps.Network) -> nn.Module:
    """The midpoint after matching the weights as they are."""
    groups = groups_of(a)
    ours = {name: p.detach().double() for name, p in a.model.named_parameters()}
    theirs = {name: p.detach().double() for name, p in b.model.named_parameters()}
    for _ in range(20):
        for group in groups:
            order = best_assignment(likeness(group, ours, theirs, normalized=False))
            theirs = group.permuted(theirs, order)
    other = copy.deepcopy(b.model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(theirs[name])
    return midpoint(a.model, other)


def balanced_alone(a: ps.Network, b: ps.Network) -> nn.Module:
    """The midpoint of the members with equal norms, in the order that the units have."""
    pair = [copy.deepcopy(network) for network in (a, b)]
    for network in pair:
        ps.rescaling.rescale_(network, equal_norm_factors(network))
    return midpoint(pair[0].model, pair[1].model)


def barriers(a: nn.Module, b: nn.Module, data: tuple[Tensor, ...]) -> dict[str, float]:
    x, _, test_x, test_y = data

    def loss(model: nn.Module) -> float:
        model = measured_anew(model, x)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(test_x), test_y))

    networks = [ps.trace(model, x[:2]) for model in (a, b)]
    ways: dict[str, Callable[[], nn.Module]] = {
        "none": lambda: midpoint(a, b),
        "equal norms, no matching": lambda: balanced_alone(*networks),
        "raw weights": lambda: by_raw_weights(*networks),
        "weights": lambda: ps.rescaling.merge(networks, by="weights"),
        "paths": lambda: ps.rescaling.merge(networks, by="paths"),
        "activations": lambda: ps.rescaling.merge(networks, by="activations", examples=x[:300]),
    }
    ends = (loss(a) + loss(b)) / 2
    return {"ends": ends, **{name: loss(merged()) - ends for name, merged in ways.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", help="only these; default all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = digits()
    x, y = data[:2]
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "BatchNorm, folded": lambda seed: folded(seed, x, y),
        "BatchNorm, measured anew": lambda seed: normalized(seed, x, y),
        "Transformer": lambda seed: transformer(seed, x, y),
        "Adam": lambda seed: plain(seed, x, y),
        "Adam, one end rescaled": lambda seed: (
            plain(seed, x, y) if seed < 200 else rescaled(plain(seed, x, y), seed, x)
        ),
    }
    results: dict[str, dict[str, list[float]]] = {}
    for kind in options.kinds or kinds:
        make = kinds[kind]
        found: dict[str, list[float]] = {}
        for pair in range(options.pairs):
            for name, value in barriers(make(100 + pair), make(200 + pair), data).items():
                found.setdefault(name, []).append(round(value, 4))
        results[kind] = found
        print(kind)
        for name, values in found.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            half = 1.96 * spread / len(values) ** 0.5
            print(f"  {name:26s} {statistics.mean(values):7.3f} +- {half:.3f}", flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({"pairs": options.pairs, "barriers": results}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
