"""States that travel by torch.distributed.checkpoint, as docs/optim.md tells it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pathspace as ps
from cases import slow_besides
from processes import in_processes

DATA = ["DDPSGD", "DDPAdam", "QuasiDiagonal"]
OPTIONS = {
    "GSGD with momentum": ("GSGD", {"momentum": 0.9}),
    "GAdam with amsgrad": ("GAdam", {"amsgrad": True}),
    "PathSGD with momentum": ("PathSGD", {"momentum": 0.9}),
    "Invariant": ("Invariant", {"rule": torch.optim.NAdam}),
    "Invariant of SGD": ("Invariant", {"rule": torch.optim.SGD}),
}
EVERY = sorted({*ps.optim.__all__, *OPTIONS})

ONE_PROCESS = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch, about a single process


def pair(name, x, weights=None):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Softsign(), nn.Linear(6, 2))
    if weights is not None:
        model.load_state_dict(weights)
    kind, options = OPTIONS.get(name, (name, {}))
    network = ps.trace(model, x, outside=["4"])
    return model, getattr(ps.optim, kind)(model.parameters(), network, lr=0.01, **options)


def train(model, optimizer, x, steps=3, run=None):
    for _ in range(steps):
        optimizer.zero_grad()
        (run or model)(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def resumed(name):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model, optimizer = pair(name, x)
    train(model, optimizer, x)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resuming = pair(name, x, model.state_dict())
    if name in DATA:
        with pytest.raises(RuntimeError, match=r"has seen no batch.*observe"):
            set_optimizer_state_dict(other, resuming, saved)
        resuming.observe(x)
    set_optimizer_state_dict(other, resuming, saved)
    return train(model, optimizer, x), train(other, resuming, x)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EVERY)
def test_resumes_bitwise(name):
    ours, theirs = resumed(name)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def content(pairs):
    """What is saved of several models and optimizers, or has room for it."""
    return {
        name: {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        for name, (model, optimizer) in pairs.items()
    }


def load(folder, names, x):
    """What is loaded is what a state has room for after one empty step."""
    pairs = {name: pair(name, x) for name in names}
    for name in {*DATA} & pairs.keys():
        pairs[name][1].observe(x)
    room = content(pairs)
    checkpoint.load(room, checkpoint_id=folder)
    for name, (model, optimizer) in pairs.items():
        model.load_state_dict(room[name]["model"])
        set_optimizer_state_dict(model, optimizer, room[name]["optimizer"])
    return pairs


# two processes resume all of them from disk
@pytest.mark.sample(3)
@ONE_PROCESS
@pytest.mark.parametrize(
    "name",
    slow_besides(["PathSGD with momentum", "Invariant", "PathSOAP", "GAdam with amsgrad", "DDPSGD"], EVERY),
)
def test_resumes_bitwise_from_disk(name, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model, optimizer = pair(name, x)
    train(model, optimizer, x, 5)
    checkpoint.save(content({name: (model, optimizer)}), checkpoint_id=tmp_path)
    ours, theirs = train(model, optimizer, x), train(*load(tmp_path, [name], x)[name], x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def example():
    torch.manual_seed(1)
    return torch.randn(16, 4)


def trained_on(pairs, x, steps):
    """Ends of replicas that train on parts of a batch."""
    return {
        name: train(model, optimizer, x, steps, nn.parallel.DistributedDataParallel(model))
        for name, (model, optimizer) in pairs.items()
    }


def saves_on_the_way(rank, folder):
    part = example()[8 * rank : 8 * rank + 8]
    torch.manual_seed(0)
    pairs = {name: pair(name, part) for name in EVERY}
    trained_on(pairs, part, 5)
    checkpoint.save(content(pairs), checkpoint_id=folder / "of two")
    return trained_on(pairs, part, 3)


def goes_on(rank, folder):
    part = example()[8 * rank : 8 * rank + 8]
    return trained_on(load(folder / "of one", EVERY, part), part, 3)


@ONE_PROCESS
def test_two_processes_to_one_and_back(tmp_path):
    """For every optimizer, to the last bit."""
    straight = in_processes(2, saves_on_the_way, tmp_path)
    pairs = load(tmp_path / "of two", EVERY, example())
    checkpoint.save(content(pairs), checkpoint_id=tmp_path / "of one")
    resumed = in_processes(2, goes_on, tmp_path)
    for name in EVERY:
        ends = [ends[name] for ends in straight + resumed]
        assert all(all(map(torch.equal, ends[0], end)) for end in ends[1:]), name
