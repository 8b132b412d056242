"""Training of networks that normalize."""

import copy

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import half_mean_square
from oracles.normalization import NETWORKS, network_of


@pytest.mark.parametrize("optimizer", ["PathSGD", "PathAdam"])
def test_an_optimizer_goes_on_in_the_form_of_its_network(optimizer):
    """An evaluation between two steps changes nothing."""
    runs = []
    for pause in (False, True):
        model, network, _ = network_of("batch norm of images")
        rule = getattr(ps.optim, optimizer)(model.parameters(), network, lr=0.01)
        torch.manual_seed(1)
        for _ in range(5):
            x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
            rule.zero_grad()
            half_mean_square(model(x)).backward()
            if pause:
                model.eval()
            rule.step()
            model.train()
        runs.append(model.state_dict())
    assert_close(dict(runs[0]), dict(runs[1]), rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["batch norm", "batch norm of images", "layer norm", "group norm of images"]
)
def test_descent_does_not_see_the_scale_of_weights_in_front(name):
    """Without eps and normalizer, Path-SGD is equivariant to it: bitwise with powers of two."""
    runs = []
    for t in (1.0, 32.0):
        model, _, _ = network_of(name)
        for norm in (model.first, model.second):
            norm.eps = 1e-300  # no more than nothing beside a variance
        network = ps.trace(model, torch.randn(16, *NETWORKS[name][1], dtype=torch.float64))
        with torch.no_grad():
            model.first.bias.add_(3)  # no row of zeros, which has no statistics without eps
            fronts = (
                [model.inner, model.embed] if hasattr(model, "inner") else [model.conv, model.stem]
            )
            for layer in fronts:
                layer.weight.mul_(t)
        rule = ps.optim.PathSGD(
            model.parameters(), network, lr=1e-4, momentum=0.9, normalization="none"
        )
        torch.manual_seed(1)
        outputs = []
        for _ in range(20):
            output = model(torch.randn(16, *NETWORKS[name][1], dtype=torch.float64))
            rule.zero_grad()
            half_mean_square(output).backward()
            rule.step()
            outputs.append(output.detach())
        runs.append((torch.stack(outputs), *(layer.weight.detach() / t for layer in fronts)))
    assert not torch.equal(runs[0][0][0], runs[0][0][-1])
    assert_close(*runs, rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "optimizer", ["PathSGD", "PathAdam", "PathMuon", "PathSOAP", "GSGD", "GAdam", "DDPSGD"]
)
def test_zero_gains_at_the_start_train(optimizer):
    """A zero-initialised residual: what is in front of it waits for its gain, and nothing jumps."""
    model, network, _ = network_of("batch norm of images")
    with torch.no_grad():
        model.second.weight.zero_()
        model.second.bias.zero_()
    before = copy.deepcopy(model.state_dict())
    rule = getattr(ps.optim, optimizer)(model.parameters(), network, lr=0.01)
    torch.manual_seed(1)
    x, losses = torch.randn(8, 1, 4, 4, dtype=torch.float64), []
    for _ in range(30):
        rule.zero_grad()
        loss = half_mean_square(model(x))
        loss.backward()
        rule.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert max(losses) < 1.5 * losses[0]
    for key in ("second.weight", "conv.weight"):
        assert not torch.equal(model.state_dict()[key], before[key])
