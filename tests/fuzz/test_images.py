"""Random networks on images: what holds for every network must hold for these."""

from collections import Counter

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from fuzz.images import Images
from fuzz.test_programs import UNSURE, on_paths
from pathspace.rescaling.permutation import groups_of, state_of

COUNT, MANY, BATCHES = 12, 1500, (1, 3)
TIGHT = {"rtol": 1e-8, "atol": 1e-10}
MOST_PATHS = 3000


@torch.no_grad()
def run(net):
    return [net(net.input(batch)) for batch in BATCHES]


def check_rescaled(seed):
    net = Images(seed)
    before = run(net)
    network = ps.trace(net, net.input(1 + seed % 3))
    kappa = ps.paths.kappa(network)
    gauge = ps.rescaling.balance.balancing_factors(network)
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=torch.Generator().manual_seed(seed)
    )
    assert all(torch.equal(a, b) for a, b in zip(run(net), before, strict=True))
    for name, found in ps.paths.kappa(network).items():
        scale = network.edge_factors(name, factors)
        assert_close(found * scale.square(), kappa[name], rtol=1e-9, atol=0)
    alive = on_paths(network, kappa)
    moved = ps.rescaling.balance.balancing_factors(network) * factors
    assert_close(moved[alive], gauge[alive], rtol=1e-9, atol=0)
    return "rescaled" if network.num_classes else "without units"


def check_on_data(seed):
    net = Images(seed, piecewise_linear=True)
    x = net.input(3)
    network = ps.trace(net, x)
    try:
        outputs = net(x).flatten()
        outputs.sum().backward(retain_graph=True)
    except RuntimeError as error:  # it writes into what a gradient needs
        if "inplace operation" not in str(error):
            raise
        return "no gradients"
    found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    parameters = [network.parameters[name] for name in found]
    squares = [torch.zeros_like(p) for p in parameters]
    for output in outputs:
        slopes = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        for square, slope in zip(squares, slopes, strict=True):
            square += 0 if slope is None else slope.square() / len(x)
    assert_close(list(found.values()), squares, **TIGHT)
    return "compared"


@torch.no_grad()
def check_listed(seed):
    net = Images(seed, piecewise_linear=True)
    x = net.input(2)
    network = ps.trace(net, x)
    try:
        paths = ps.paths.enumerate_paths(network, limit=MOST_PATHS)
    except ps.paths.TooManyPathsError:
        return "many paths"
    values = paths.factor * paths.values(network.parameters)
    assert_close(values.square().sum(), ps.paths.squared_path_norm(network), **TIGHT)
    found = paths.output(network.parameters, ps.paths.activity(network, x))
    assert_close(found, net(x).flatten(1), **TIGHT)
    return "listed"


@torch.no_grad()
def check_permuted(seed):
    net = Images(seed)
    before = run(net)
    network = ps.trace(net, net.input(1 + seed % 3))
    groups, state = groups_of(network), state_of(network)
    values = {name: value.detach() for name, value in state.items()}
    for group in groups:
        values = group.permuted(values, torch.arange(len(group)).flip(0))
    for name, value in state.items():
        value.copy_(values[name])
    assert_close(run(net), before, **TIGHT)
    return "permuted" if groups else "without groups"


CHECKS = [check_rescaled, check_on_data, check_listed, check_permuted]


def outcomes(check, seeds):
    found = Counter()
    for seed in seeds:
        try:
            found[check(seed)] += 1
        except Exception as error:
            if isinstance(error, ps.UntraceableError) and any(w in str(error) for w in UNSURE):
                found["unsure"] += 1
                continue
            raise AssertionError(f"seed {seed}: {Images(seed).names}") from error
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_images(check):
    found = outcomes(check, range(COUNT))
    assert max(found.values()) >= COUNT / 2


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_many_images(check):
    found = outcomes(check, range(COUNT, COUNT + MANY))
    assert max(found.values()) > 0.3 * MANY
