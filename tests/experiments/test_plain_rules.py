import copy
from collections.abc import Callable

import torch
from torch import nn

from pathspace.experiments.plain_rules import SGD

STEPS = 12


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    return model, torch.randn(16, 5, dtype=torch.float64)


def trained(
    model: nn.Module, inputs: torch.Tensor, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> list:
    model = copy.deepcopy(model)
    optimizer = make(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_sgd_is_torchs_with_decoupled_decay() -> None:
    model, inputs = network()
    ours = trained(model, inputs, lambda m: SGD(m.parameters(), 0.1, momentum=0.9))
    theirs = trained(model, inputs, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)
    # without a gradient the decay alone is left: p (1 - 0.1 0.5) at every step
    p = nn.Parameter(torch.ones(3))
    optimizer = SGD([p], 0.1, momentum=0.9, weight_decay=0.5)
    p.grad = torch.zeros(3)
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.95**2))
