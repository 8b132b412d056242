"""The midpoint of two independently trained networks, with their units matched in several ways.

The images are the digits of scikit-learn, 1200 for training and 597 to test. Networks:

    MLP           64-128-128-10
    VGG           three convolutions of 16, 32 and 32 channels, two maxima, two linear layers
    ResNet        a convolution and three residual blocks of 16, 32 and 32 channels, one linear layer
    Transformer   two blocks, which read the eight rows of an image

MLPs, VGGs and ResNets are trained with BatchNorm, which is folded afterwards, or which stays and
gets its statistics anew from the training images; MLPs also with Adam alone. With "one end
rescaled" that end is rescaled by random factors between 1/8 and 8 after folding. The figure is the
barrier: the test loss at the mean of the weights minus the mean of both ends.

``raw weights`` is weight matching as it is usual: on the weights as they are, without scales. With
``REPAIR`` (Jordan et al., 2022) every channel of a mean that enters a hidden unit gets the mean of
the two ends' means and standard deviations on 300 training images; networks with BatchNorm and
transformers go without.

    python benchmarks/align_pairs.py --pairs 6 --out benchmarks/results/align-pairs.json   # resumes
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import pathspace as ps
from pathspace.rescaling.align import likeness
from pathspace.rescaling.assignment import best_assignment
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.permutation import groups_of

HIDDEN = 128
LAYERS = (nn.Linear, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


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


def normalized_layer(enters: int, leaves: int) -> list[nn.Module]:
    return [nn.Linear(enters, leaves), nn.BatchNorm1d(leaves), nn.ReLU()]


def normalized_convolution(
    enters: int, leaves: int, kernel: int = 3, stride: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(enters, leaves, kernel, stride, kernel // 2)
    return [convolution, nn.BatchNorm2d(leaves)]


def mlp() -> nn.Module:
    return nn.Sequential(
        *normalized_layer(64, HIDDEN), *normalized_layer(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 10)
    )


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *normalized_convolution(1, 16),
        nn.ReLU(),
        *normalized_convolution(16, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *normalized_convolution(32, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *normalized_layer(128, 64),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    """A residual block; where it changes the form, its skip is a convolution of kernel 1."""

    def __init__(self, enters: int, leaves: int, stride: int) -> None:
        super().__init__()
        first = normalized_convolution(enters, leaves, 3, stride)
        self.inner = nn.Sequential(*first, nn.ReLU(), *normalized_convolution(leaves, leaves))
        same = enters == leaves and stride == 1
        self.skip = nn.Sequential(
            *([] if same else normalized_convolution(enters, leaves, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.skip(x)).relu()


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *normalized_convolution(1, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@cache
def normalized(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network trained with BatchNorm, for all kinds of pairs that begin with it."""
    torch.manual_seed(seed)
    return train(make(), *digits()[:2], 12)


def fold_(module: nn.Module) -> nn.Module:
    """Put every BatchNorm into the layer before it."""
    names = list(module._modules)
    for first, second in itertools.pairwise(names):
        layer = module._modules[first]
        norm = module._modules[second]
        if not isinstance(norm, NORMS):
            continue
        if isinstance(layer, nn.Conv2d):
            module._modules[first] = fuse_conv_bn_eval(layer, norm)
        elif isinstance(layer, nn.Linear):
            module._modules[first] = fuse_linear_bn_eval(layer, norm)
        module._modules[second] = nn.Identity()
    for child in module.children():
        fold_(child)
    # what fuses them freezes the biases
    return module.requires_grad_(True)


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
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
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


@torch.no_grad()
def repaired(a: nn.Module, b: nn.Module, x: Tensor) -> nn.Module:
    """Return the midpoint after REPAIR: statistics of what enters hidden units halfway between both ends."""
    ends = [statistics_of(model, x) for model in (a, b)]
    result = midpoint(a, b)

    def reset(layer: Any, _: Any, out: Tensor) -> Tensor:
        (mean_a, deviation_a), (mean_b, deviation_b) = (end[names[layer]] for end in ends)
        mean, deviation = by_channel(out)
        gain = (deviation_a + deviation_b) / 2 / deviation.clamp_min(1e-6)
        shift = (mean_a + mean_b) / 2 - gain * mean
        layer.weight.mul_(gain.view(-1, *[1] * (layer.weight.dim() - 1)))
        layer.bias.mul_(gain).add_(shift)
        form = (-1, *[1] * (out.dim() - 2))
        return out * gain.view(form) + shift.view(form)

    names = {layer: name for name, layer in hidden_layers(result).items()}
    with_hooks(result, reset, x)
    return result


def statistics_of(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and standard deviation of each channel of each hidden layer, by name of the layer."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    names = {layer: name for name, layer in hidden_layers(model).items()}

    def note(layer: nn.Module, _: Any, out: Tensor) -> None:
        found[names[layer]] = by_channel(out)

    with_hooks(model, note, x)
    return found


def hidden_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return all layers but the last."""
    layers: dict[str, nn.Module] = {
        name: one for name, one in model.named_modules() if isinstance(one, LAYERS)
    }
    layers.popitem()
    return layers


def with_hooks(model: nn.Module, hook: Callable[..., Any], x: Tensor) -> None:
    """Call a model once, with a hook behind its hidden layers."""
    handles = [layer.register_forward_hook(hook) for layer in hidden_layers(model).values()]
    model(x)
    for handle in handles:
        handle.remove()


def by_channel(out: Tensor) -> tuple[Tensor, Tensor]:
    rows = out.transpose(0, 1).flatten(1)
    return rows.mean(1), rows.std(1)


Pair = tuple[nn.Module, nn.Module]


def by_raw_weights(a: ps.Network, b: ps.Network) -> Pair:
    """Both after matching the weights as they are."""
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
    return a.model, other


def balanced_alone(a: ps.Network, b: ps.Network) -> Pair:
    """The members with equal norms, in the order that the units have."""
    first, second = (copy.deepcopy(network) for network in (a, b))
    for network in (first, second):
        ps.rescaling.rescale_(network, equal_norm_factors(network))
    return first.model, second.model


def aligned(a: ps.Network, b: ps.Network, **options: Any) -> Pair:
    """The first at equal norms and the second aligned to it, whose mean is what ``merge`` returns."""
    first, second = (copy.deepcopy(network) for network in (a, b))
    ps.rescaling.rescale_(first, equal_norm_factors(first))
    ps.rescaling.align_(second, first, **options)
    return first.model, second.model


def barriers(a: nn.Module, b: nn.Module, data: tuple[Tensor, ...]) -> dict[str, float]:
    x, _, test_x, test_y = data
    some = x[:300]

    def loss(model: nn.Module) -> float:
        model = measured_anew(model, x)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(test_x), test_y))

    one, other = (ps.trace(model, x[:2]) for model in (a, b))
    ways: dict[str, Callable[[], Pair]] = {
        "none": lambda: (a, b),
        "equal norms, no matching": lambda: balanced_alone(one, other),
        "raw weights": lambda: by_raw_weights(one, other),
        "weights": lambda: aligned(one, other, by="weights"),
        "paths": lambda: aligned(one, other, by="paths"),
        "activations": lambda: aligned(one, other, by="activations", examples=some),
    }
    ends = (loss(a) + loss(b)) / 2
    found = {"ends": ends}
    repairs = not any(isinstance(m, (*NORMS, nn.LayerNorm)) for m in a.modules())
    for name, way in ways.items():
        first, second = way()
        found[name] = loss(midpoint(first, second)) - ends
        if repairs:
            found[f"{name}, REPAIR"] = loss(repaired(first, second, some)) - ends
    return found


def made(make: Callable[[], nn.Module], folds: bool, seed: int) -> nn.Module:
    model = copy.deepcopy(normalized(make, seed))
    return fold_(model) if folds else model


def made_and_rescaled(make: Callable[[], nn.Module], x: Tensor, seed: int) -> nn.Module:
    return rescaled_if_second(made(make, True, seed), seed, x)


def rescaled_if_second(model: nn.Module, seed: int, x: Tensor) -> nn.Module:
    """The model, rescaled if its seed is that of the second end."""
    return rescaled(model, seed, x) if seed >= 200 else model


def half_width(values: list[float]) -> float:
    """Return half the width of the 95 % interval of the mean, by Student's t."""
    if len(values) < 2:
        return float("nan")
    return t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5


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
    makes: dict[str, Callable[[], nn.Module]] = {"MLP": mlp, "VGG": vgg, "ResNet": resnet}
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "Transformer": lambda seed: transformer(seed, x, y),
        "Adam": lambda seed: plain(seed, x, y),
        "Adam, one end rescaled": lambda seed: rescaled_if_second(plain(seed, x, y), seed, x),
    }
    for name, make in makes.items():
        kinds[f"{name}, folded"] = partial(made, make, True)
        kinds[f"{name}, measured anew"] = partial(made, make, False)
        kinds[f"{name}, folded, one end rescaled"] = partial(made_and_rescaled, make, x)
    results: dict[str, dict[str, list[float]]] = {}
    if options.out and options.out.exists():
        results = json.loads(options.out.read_text())["barriers"]
    for kind in options.kinds or kinds:
        found = results.setdefault(kind, {})
        for pair in range(len(found.get("ends", [])), options.pairs):
            ends = kinds[kind](100 + pair), kinds[kind](200 + pair)
            for name, value in barriers(*ends, data).items():
                found.setdefault(name, []).append(round(value, 4))
            if options.out:
                text = json.dumps({"pairs": options.pairs, "barriers": results}, indent=1)
                options.out.write_text(text + "\n")
        print(kind)
        for name, values in found.items():
            print(f"  {name:34s} {statistics.mean(values):7.3f} +- {half_width(values):.3f}")


if __name__ == "__main__":
    main()
