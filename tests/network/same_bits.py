"""What a rescaling by powers of two must leave to the last bit."""

import torch
from torch import Tensor, nn

import pathspace as ps


def rescaled_unseen(model: nn.Module, network: ps.Network, x: Tensor) -> Tensor:
    """Rescale by powers of two, and see that outputs, path norm and measures on data keep every bit.

    Returns:
        The factors.
    """

    def seen() -> list[Tensor]:
        measures = (
            ps.paths.data_dependent_norm(network, x, alpha=alpha, statistic=statistic)
            for alpha, statistic in (
                (0.0, "second_moment"),
                (0.5, "second_moment"),
                (1.0, "covariance"),
            )
        )
        return [model(x), ps.paths.squared_path_norm(network), *measures]

    before = [t.detach().clone() for t in seen()]
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    for then, now in zip(before, seen(), strict=True):
        assert torch.equal(then, now)
    return factors
