"""How much of the outputs of small MLPs is lost by pruning: magnitude and importance, with and without data.

Eight networks 8-32-32-1 learn a product by Adam. The smallest weights by each score are set to
zero, as the network was trained and after a random rescaling. Prints the median loss of variance.

    python benchmarks/prune_mlps.py
"""

from __future__ import annotations

import copy
import statistics

import torch
from torch import Tensor, nn

import pathspace as ps

SEEDS = 8
AMOUNTS = (0.3, 0.5, 0.7)
EXAMPLES = 64


def trained(seed: int) -> tuple[nn.Module, Tensor]:
    """Return a trained network and its data."""
    torch.manual_seed(seed)
    hidden = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(32, 1))
    x = torch.randn(512, 8)
    y = (x[:, :1] * x[:, 1:2]).abs() + x[:, 2:3]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model, x


def scores_of(network: ps.Network, x: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the scores of all parameters by the name of the score."""
    return {
        "importance": ps.paths.importance(network, x[:EXAMPLES]),
        "importance without data": ps.paths.importance(network),
        "magnitude": {name: p.detach().abs() for name, p in network.parameters.items()},
    }


@torch.no_grad()
def lost(model: nn.Module, x: Tensor, scores: dict[str, Tensor], amount: float) -> float:
    """Return the share of the outputs' variance that is lost without the least weights."""
    pruned, before = copy.deepcopy(model), model(x)
    weights = [name for name in scores if name.endswith("weight")]
    together = torch.cat([scores[name].flatten() for name in weights])
    bound = together.kthvalue(int(amount * len(together))).values
    for name in weights:
        pruned.get_parameter(name).mul_(scores[name] > bound)
    return float((pruned(x) - before).square().mean() / before.var())


def main() -> None:
    """Train, prune and print."""
    torch.set_num_threads(1)
    losses: dict[tuple[str, float], list[float]] = {}
    for seed in range(SEEDS):
        model, x = trained(seed)
        rescaled = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        ps.rescaling.random_rescale_(ps.trace(rescaled, x), 1 / 8, 8, generator=generator)
        for member, network in (("", model), (", rescaled", rescaled)):
            for name, scores in scores_of(ps.trace(network, x), x).items():
                for amount in AMOUNTS:
                    losses.setdefault((name + member, amount), []).append(
                        lost(network, x, scores, amount)
                    )
    for name in dict.fromkeys(name for name, _ in losses):
        shares = [f"{statistics.median(losses[name, amount]):7.1%}" for amount in AMOUNTS]
        print(f"{name:<34}{''.join(shares)}")


if __name__ == "__main__":
    main()
