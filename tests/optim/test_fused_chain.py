"""Compiled loops of chains give the shares that torch gives, from the same draws."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from pathspace.paths.data.chain_shares import chain_shares
from pathspace.paths.data.data_dependent import Request
from pathspace.paths.data.node_measure import spread_of
from pathspace.replay.chain import ChainWitness, layers_of

pytest.importorskip("numba", reason="compiled loops need Numba")

from pathspace.compiled.fused_chain import FusedChain, Summaries


def seen(widths, count, statistic, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b, bias=bias), nn.ReLU())]
        model, x = nn.Sequential(*layers[:-1]).double(), torch.randn(count, widths[0], dtype=torch.float64)
    network = ps.trace(model, x)
    own = Summaries(statistic, len(widths) - 1)
    with ChainWitness(network, layers_of(network), own, count, count) as witness:
        result = model(x)
    return witness.found(result)


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize("widths", [(5, 3), (5, 7, 6, 3), (4, 9, 2)])
@pytest.mark.parametrize(("count", "part"), [(1, True), (7, True), (70, True), (70, False), (128, True)])
@pytest.mark.parametrize(("bias", "alpha"), [(True, 0.5), (False, 0.3), (True, 1.0)])
def test_shares_are_those_of_torch(statistic, widths, count, part, bias, alpha):
    found, request = (
        seen(widths, count, statistic, bias),
        Request(alpha, statistic, "parameters", "signs", part=part),
    )
    ours, memory = FusedChain(), {}
    for seed in range(2):  # with memory that was used before
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        theirs = chain_shares(copy.copy(found), request, generators[0], {})
        mine = ours.shares(found, request, generators[1], memory)
        assert_close(mine.weights, theirs.weights, rtol=1e-12, atol=1e-15)
        assert_close(mine.biases, theirs.biases, rtol=1e-12, atol=1e-15)
        if alpha < 1:
            assert_close(mine.leaving, theirs.leaving, rtol=1e-13, atol=0)
            assert_close(mine.entering, theirs.entering, rtol=1e-13, atol=0)
        assert torch.equal(*(torch.rand(3, generator=g) for g in generators))


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_spreads_are_those_of_torch(statistic):
    z = torch.randn(9, 5, dtype=torch.float64)
    for given, batch in ((z, 0), (z.t(), 0), (z, None), (z[None], 1)):
        ours, theirs = Summaries(statistic)(given, batch), spread_of(given, batch, statistic)
        assert_close(ours, theirs, rtol=1e-13, atol=0)
