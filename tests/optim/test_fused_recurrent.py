"""Compiled loops of recurrent chains give the shares that torch gives, from the same draws."""

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import Recurrent
from pathspace.paths.data.data_dependent import Request
from pathspace.paths.data.recurrent_shares import recurrent_shares
from pathspace.replay.recurrent_chain import RecurrentWitness, recurrent_chain_of

pytest.importorskip("numba", reason="compiled loops need Numba")

from pathspace.compiled import fused_recurrent
from pathspace.compiled.fused_recurrent import FusedRecurrent


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"num_layers": 2, "emit": "all", "batch_first": True}, {"bias": False}],
    ids=["one", "stack", "without a bias"],
)
@pytest.mark.parametrize(
    ("count", "alpha", "vanishing", "some"),
    [
        (1, 0.5, False, False),
        (70, 0.3, False, False),
        (7, 1.0, False, False),
        (7, 0.5, True, False),
        (7, 0.5, False, True),
    ],
)
def test_shares_are_those_of_torch(statistic, options, count, alpha, vanishing, some, monkeypatch):
    monkeypatch.setattr(fused_recurrent, "_CHUNK", 3 * 2 * count * 5)  # several steps, and several examples
    batch, T = 0 if options.get("batch_first") else 1, 40 if vanishing else 7
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Recurrent(hidden=5, **options).double()
        x = torch.randn((T, count, 2) if batch else (count, T, 2), dtype=torch.float64)
    with torch.no_grad():
        model.rnn.weight_hh_l0.mul_(1e-8 if vanishing else 1)
    network = ps.trace(model, x, batch_dim=batch)
    few = count // 2 if some else count
    with RecurrentWitness(network, recurrent_chain_of(network), count, few) as witness:
        result = model(x)
    seen, memory, names = witness.found(result), {}, list(network.parameters)
    fused = FusedRecurrent()
    for seed in range(2):  # with memory that was used before
        request = Request(alpha, statistic, "parameters", "signs", part=True)
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        theirs = recurrent_shares(seen, request, generators[0], names, {})
        ours = fused.shares(seen, request, generators[1], names, memory)
        assert_close(ours.data, theirs.data, rtol=1e-12, atol=1e-15)
        zeros = {name: torch.zeros_like(value) for name, value in ours.data.items()}
        for name in names:
            kappas = [shares.kappa(name, zeros[name], 1.0) for shares in (ours, theirs)]
            assert_close(*kappas, rtol=1e-12, atol=0)
        assert torch.equal(*(torch.rand(3, generator=g) for g in generators))
