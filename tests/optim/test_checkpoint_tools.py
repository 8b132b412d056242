"""States that travel by torch.distributed.checkpoint, as docs/optim.md tells it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import pathspace as ps

DATA = ["DDPSGD", "DDPAdam", "QuasiDiagonal"]


def pair(name, x, weights=None):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if weights is not None:
        model.load_state_dict(weights)
    return model, getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), lr=0.01)


def train(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
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


@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "PathSOAP", "PathMuon", *DATA])
def test_resumes_bitwise(name):
    ours, theirs = resumed(name)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch, about a single process
@pytest.mark.parametrize("name", sorted(set(ps.optim.__all__) - {"GSGD", "GAdam", "Invariant"}))
def test_resumes_bitwise_from_disk(name, tmp_path):
    """What is loaded is what a state has room for after one empty step."""
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model, optimizer = pair(name, x)
    train(model, optimizer, x, 5)
    checkpoint.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other, resuming = pair(name, x, model.state_dict())
    if name in DATA:
        resuming.observe(x)
    room = {"optimizer": get_optimizer_state_dict(other, resuming)}
    checkpoint.load(room, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resuming, room["optimizer"])
    ours, theirs = train(model, optimizer, x), train(other, resuming, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["GSGD", "GAdam"])
def test_path_space_refuses_what_has_no_room_for_its_state(name):
    with pytest.raises(KeyError, match="path_space"):
        resumed(name)
