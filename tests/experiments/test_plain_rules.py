import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pathspace as ps
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import build_model
from pathspace.experiments.plain_rules import SGD
from pathspace.experiments.settings import Settings

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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("mlp", {}, {"layers.0.weight", "readout.weight"}),
        ("relu-rnn", {}, {"rnn.weight_ih_l0", "readout.weight"}),
        (
            "transformer",
            {"hidden": 8, "heads": 2, "layers": 2},
            {"embedding.weight", "readout.weight"},
        ),
        ("language-model", {"hidden": 8, "embedding": 6}, {"embedding.weight"}),
    ],
)
@pytest.mark.parametrize("method", ["muon", "path-muon"])
def test_muon_for_hidden_layers_leaves_the_first_and_the_last_matrix_to_adam(
    method: str, name: str, options: dict[str, int], ends: set[str]
) -> None:
    symbols = name in ("transformer", "language-model")
    x = torch.randint(0, 5, (4, 8)) if symbols else torch.randn(4, 8, 5)
    moved = []
    for chosen in (method, f"{method}-hidden"):
        torch.manual_seed(0)
        model = build_model(name, 5, 3, options)
        network = ps.trace(model, x) if method == "path-muon" else None
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        run = Settings().run_config(chosen, "default", 0.01, 0, evaluate_test=False)
        optimizer = METHODS[chosen].build(model, network, run)
        outputs = model(x)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean().backward()
        optimizer.step()
        moved.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    whole, hidden = moved
    # the first step of Adam is of one length everywhere, that of Muon is not
    assert {
        n for n in whole if not torch.allclose(whole[n], hidden[n], rtol=1e-4, atol=1e-7)
    } == ends
