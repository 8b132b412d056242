"""Balancing a residual network: read off the model, or told pairs of layers as PyTorch's equalization is."""

import copy
import warnings

import torch

import pathspace as ps


class Residual(torch.nn.Module):
    """relu(a x) is read by b and, around it, by c."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            torch.nn.Linear(8, 16),
            torch.nn.Linear(16, 16),
            torch.nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return self.c(h + torch.relu(self.b(h)))


torch.manual_seed(0)
model, x = Residual(), torch.randn(64, 8)
network = ps.trace(model, x)
ps.rescaling.random_rescale_(network, 1 / 16, 16)
expected = model(x).detach()


@torch.no_grad()
def moved(other: torch.nn.Module) -> float:
    return float((other(x) - expected).norm() / expected.norm())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.ao is on its way out of PyTorch
    from torch.ao.quantization._equalize import equalize

    told = equalize(copy.deepcopy(model), [["a", "b"], ["b", "c"]])
print(f"told pairs of layers    outputs moved by {moved(told):.0%}")
ps.rescaling.balance_(network, x)
print(f"read off the model      outputs moved by {moved(model):.0e}")
