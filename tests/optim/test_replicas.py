"""Replicas of data-parallel training read their own batches, and stay alike to the last bit: two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import mlp

RULES = {
    "DDPSGD M": ("DDPSGD", {"estimator": "signs", "momentum": 0.9, "refresh_every": 2}),
    "DDPSGD C": ("DDPSGD", {"estimator": "signs", "statistic": "covariance", "alpha": 1.0, "damping": 0.1}),
    "DDPAdam": ("DDPAdam", {"estimator": "signs"}),
    "QuasiDiagonal": ("QuasiDiagonal", {"estimator": "signs", "alpha": 0.5}),
    "exact": ("DDPSGD", {"estimator": "exact"}),
    "apart": ("DDPSGD", {"estimator": "signs", "process_group": None}),
}


def trained(rule, parts, wrap=lambda model: model, steps=5):
    """Weights after some steps on the parts of batches that are a process's own, and what its averages are."""
    kind, options = RULES[rule]
    torch.manual_seed(0)
    model = mlp(3, 6, 5, 2).double()
    x, y = torch.randn(steps, 8, 3, dtype=torch.float64), torch.randn(steps, 8, 2, dtype=torch.float64)
    network, run = ps.trace(model, x[0]), wrap(model)
    optimizer = getattr(ps.optim, kind)(model.parameters(), network, lr=0.02, **options)
    for i in range(steps):
        optimizer.zero_grad()
        (run(x[i, parts]) - y[i, parts]).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def replica(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    own = slice(4 * rank, 4 * rank + 4)
    found = {rule: trained(rule, own, nn.parallel.DistributedDataParallel) for rule in RULES}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_replicas_stay_alike(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    code = "import pathlib, sys, test_replicas; test_replicas.replica(int(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for rule in RULES:
        alike = all(torch.equal(p, q) for p, q in zip(first[rule], second[rule], strict=True))
        assert alike == (rule != "apart"), rule
    # what is linear in the data is that of the whole batch
    assert_close(first["exact"], trained("exact", slice(None)), rtol=1e-9, atol=1e-12)
