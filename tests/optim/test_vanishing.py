"""Deep networks whose first layers get gradients of zero, as float32 has no smaller numbers: they stay as they are."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import slow_besides

RULES = {
    "PathSGD": {"momentum": 0.9},
    "PathSGD every other step": {"refresh_every": 2, "clip_norm": 1.0},
    "PathAdam": {"eps": 1e-3},
    "PathMuon": {},
    "PathSOAP": {},
    "GSGD": {},
    "GSGD with momentum": {"momentum": 0.9, "clip_norm": 1.0},
    "GAdam": {},
    "DDPSGD": {},
    "DDPAdam": {},
}
MOVES_ALL = ("GSGD", "GSGD with momentum", "GAdam")  # R_c moves what leaves a class


@functools.cache
def traced(layers, scale, dtype=torch.float32):
    """A deep model and its network, and the input that it is traced with: to be copied."""
    model, x = (
        deep(layers, scale).to(dtype),
        torch.randn(16, 8, generator=torch.Generator().manual_seed(1)),
    )
    return model, ps.trace(model, x.to(dtype)), x.to(dtype)


def deep(layers, scale):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(8, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def train(model, network, x, rule, steps, **options):
    """Returns which parameters had a gradient other than zero in any step."""
    kind = getattr(ps.optim, rule.split()[0])
    optimizer = kind(model.parameters(), network, lr=0.01, **RULES[rule], **options)
    pulled = set()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        pulled |= {name for name, p in model.named_parameters() if p.grad.any()}
        optimizer.step()
    return pulled


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "layers", "scale"),
    slow_besides(
        [*((rule, 40, 0.05) for rule in RULES), ("PathSGD", 150, 1.0)],
        [(rule, 150, 1.0) for rule in ("GSGD", "DDPSGD")],
    ),
)
def test_weights_without_gradients_stay(rule, layers, scale):
    start = traced(layers, scale)[0]
    model, network, x = copy.deepcopy(traced(layers, scale))
    pulled = train(model, network, x, rule, 2)
    assert len(pulled) < len(list(model.parameters()))
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        if name not in pulled and rule not in MOVES_ALL:
            assert torch.equal(p, start.get_parameter(name)), name
    assert not torch.equal(model[-1].bias, start[-1].bias)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam", "GSGD", "DDPSGD"])
def test_the_last_layers_step_as_in_float64(rule):
    start = traced(30, 0.05)[0][-1].bias.double()
    ends = []
    for dtype in (torch.float32, torch.float64):
        model, network, x = copy.deepcopy(traced(30, 0.05, dtype))
        train(model, network, x, rule, 1)
        ends.append(model[-1].bias.double())
    moved, expected = (end - start for end in ends)
    assert_close(moved, expected, rtol=1e-5, atol=1e-9)
    assert expected.abs().max() > 1e-4
