"""Compiled loops of recurrent chains give the shares that torch gives, from the same draws."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import Recurrent
from pathspace.network.recurrent_chain import RecurrentWitness, recurrent_chain_of
from pathspace.paths.data_dependent import Request
from pathspace.paths.recurrent_shares import recurrent_shares

pytest.importorskip("numba", reason="compiled loops need Numba")

from pathspace.optim.fused_chain import fused_recurrent_shares


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "emit": "all"}], ids=["one", "stack"])
@pytest.mark.parametrize(
    ("count", "alpha", "vanishing"), [(1, 0.5, False), (70, 0.3, False), (7, 1.0, False), (7, 0.5, True)]
)
def test_shares_are_those_of_torch(statistic, options, count, alpha, vanishing):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Recurrent(hidden=5, batch_first=True, **options).double()
        x = torch.randn(count, 40 if vanishing else 4, 2, dtype=torch.float64)
    with torch.no_grad():
        model.rnn.weight_hh_l0.mul_(1e-8 if vanishing else 1)
    network = ps.trace(model, x)
    with RecurrentWitness(network, recurrent_chain_of(network), count, count) as witness:
        result = model(x)
    seen, memory, names = witness.found(result), {}, list(network.parameters)
    for seed in range(2):  # with memory that was used before
        request = Request(alpha, statistic, "parameters", "signs", part=True)
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        theirs = recurrent_shares(seen, request, generators[0], names, {})
        ours = fused_recurrent_shares(seen, request, generators[1], names, memory)
        assert_close(ours.data, theirs.data, rtol=1e-12, atol=1e-15)
        zeros = {name: torch.zeros_like(value) for name, value in ours.data.items()}
        for name in names:
            kappas = [shares.kappa(name, zeros[name], 1.0) for shares in (ours, theirs)]
            assert_close(*kappas, rtol=1e-12, atol=0)
        assert torch.equal(*(torch.rand(3, generator=g) for g in generators))
