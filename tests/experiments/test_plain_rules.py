import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pathspace
from pathspace.experiments.plain_rules import SGD, SOAP, Muon
from pathspace.optim import PathMuon, PathSOAP

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


@pytest.mark.parametrize(("plain", "invariant"), [(SOAP, PathSOAP), (Muon, PathMuon)])
def test_the_plain_rule_is_the_invariant_one_where_the_metric_is_one(plain, invariant) -> None:
    model, inputs = network()

    def outside(model: nn.Module) -> torch.optim.Optimizer:
        # a network beside the model: all parameters of the model take the rule with D = 1
        other = nn.Linear(2, 2).double()
        traced = pathspace.trace(other, torch.zeros(1, 2, dtype=torch.float64))
        return invariant([*model.parameters(), *other.parameters()], traced, lr=0.01, weight_decay=0.1)

    one = trained(model, inputs, lambda m: plain(m.parameters(), 0.01, weight_decay=0.1))
    other = trained(model, inputs, outside)
    for p, q, start in zip(one, other, model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
        assert not torch.allclose(p, start)


def test_muon_is_torchs_on_matrices_up_to_its_bfloat16() -> None:
    model, inputs = network()
    model = nn.Sequential(
        *(nn.Linear(m.in_features, m.out_features, bias=False) for m in model[::2])
    ).double()
    ours = trained(model, inputs, lambda m: Muon(m.parameters(), 0.01, weight_decay=0.1))
    theirs = trained(
        model,
        inputs,
        lambda m: torch.optim.Muon(
            m.parameters(), lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
    )
    for p, q, start in zip(ours, theirs, model.parameters(), strict=True):
        assert (p - q).norm() < 0.15 * (p - start).norm()  # a wrong rule or scale is 0.5 off and more


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
