"""The papers' rules as printed, and the whole natural gradient, against their formulas on one step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import mlp
from oracles.basis import PathValues
from pathspace.experiments.methods import METHODS
from pathspace.experiments.plain_rules import ITERATIONS, LEAST_DAMPING, TOLERANCE
from pathspace.experiments.run import RunConfig
from pathspace.experiments.settings import Settings

PLAIN = replace(
    Settings().run_config("natural", "default", 0.1, 0, evaluate_test=False),
    damping=0.0,
    refresh_every=1,
)
RUN = replace(
    PLAIN,
    learning_rate=1e-4,
    momentum=0.9,
    clip_norm=1e-9,
    damping=0.1,
    refresh_every=10,
    clip_step=1e-9,
)


def step(method: str, run: RunConfig = RUN):
    """A network with gradients, these, the optimizer, and the batch."""
    torch.manual_seed(6)
    model = mlp(3, 4, 4, 2).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    optimizer = METHODS[method].build(model, network, run)
    nn.functional.mse_loss(model(x), y).backward()
    gradients = {name: p.grad for name, p in network.parameters.items() if p.grad is not None}
    assert gradients.keys() == network.parameters.keys()
    return network, gradients, optimizer, x


@pytest.mark.parametrize("both", [False, True])
def test_path_sgd_divides_by_kappa_and_does_nothing_else(both: bool) -> None:
    network, gradients, optimizer, _ = step(
        "path-sgd-published-both" if both else "path-sgd-published"
    )
    kappa = ps.paths.kappa(network, second_term=both)
    known = {
        name: p.detach() - RUN.learning_rate * gradients[name] / kappa[name]
        for name, p in network.parameters.items()
    }
    optimizer.step()
    for name, p in network.parameters.items():
        torch.testing.assert_close(p.detach(), known[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("one", [False, True])
def test_path_sgd_on_the_weights_divides_by_kappa_over_its_mean_and_clips_the_step(
    one: bool,
) -> None:
    run = replace(RUN, momentum=0.0, clip_step=0.0, clip_norm=1e-3, refresh_every=1, damping=0.0)
    network, gradients, optimizer, _ = step(
        "path-sgd-weights-one" if one else "path-sgd-weights", run
    )
    kappa = ps.paths.kappa(network)
    means = {name: value.mean() for name, value in kappa.items()}
    if one:
        means = dict.fromkeys(
            kappa, torch.cat([value.flatten() for value in kappa.values()]).mean()
        )
    d = {name: gradients[name] / (kappa[name] / means[name]) for name in kappa}
    length = torch.cat([value.flatten() for value in d.values()]).norm()
    assert length > 1e-3
    known = {
        name: p.detach() - run.learning_rate * 1e-3 / length * d[name]
        for name, p in network.parameters.items()
    }
    optimizer.step()
    for name, p in network.parameters.items():
        torch.testing.assert_close(p.detach(), known[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scaled", [False, True])
def test_adam_is_fed_path_gradients_as_they_are_or_as_long_as_the_gradient(scaled: bool) -> None:
    run = replace(PLAIN, clip_norm=None)
    network, gradients, optimizer, _ = step("path-gradient-adam" + "-scaled" * scaled, run)
    ps.rescaling.balance_(network)  # where the frame of the metric is the network itself
    for p in network.parameters.values():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).double()
    gradients = {name: p.grad for name, p in network.parameters.items()}
    kappa = ps.paths.kappa(network)
    d = {name: gradients[name] / kappa[name] for name in kappa}
    lengths = [torch.cat([v.flatten() for v in each.values()]).norm() for each in (gradients, d)]
    optimizer.step()
    for name, p in network.parameters.items():
        fed = optimizer.state[p]["exp_avg"] / 0.1
        expected = d[name] * lengths[0] / lengths[1] if scaled else d[name]
        torch.testing.assert_close(fed, expected, rtol=1e-6, atol=0)


def test_g_sgd_steps_on_the_values_of_the_cyclic_basis() -> None:
    network, _, optimizer, _ = step("g-sgd-published")
    values = PathValues(network, ps.paths.skeleton(network, "cyclic"))
    known = values.now() - RUN.learning_rate * values.gradient()
    optimizer.step()
    torch.testing.assert_close(values.now(), known, rtol=1e-9, atol=1e-12)


def test_the_natural_gradient_is_that_of_the_batch() -> None:
    network, gradients, optimizer, x = step("natural", PLAIN)
    d = ps.paths.natural_gradient(
        network, x, gradients, damping=LEAST_DAMPING, tolerance=TOLERANCE, iterations=ITERATIONS
    )
    before = {name: p.detach().clone() for name, p in network.parameters.items()}
    optimizer.step()
    for name, p in network.parameters.items():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * d[name], rtol=1e-12, atol=1e-14)
    network, gradients, optimizer, _ = step("natural", replace(PLAIN, clip_norm=1e-3))
    optimizer.step()
    length = sum(
        float(((before[name] - p.detach()) / 0.1 * gradients[name]).sum())
        for name, p in network.parameters.items()
    )
    # d is shortened to sqrt(g d) = c, so that what the step is along g is c times that length
    whole = sum(float((d[name] * gradients[name]).sum()) for name in d)
    assert length == pytest.approx(1e-3 * whole**0.5, rel=1e-9)
