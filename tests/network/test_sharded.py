"""Weights that are split over processes are told so, by the name of what split them, with what works instead."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed import device_mesh

import pathspace as ps
from cases import mlp

PATH = [name for name in ps.optim.__all__ if name != "Invariant"]


@pytest.fixture
def mesh(tmp_path):
    """A group of one process; its tensors are split like those of many."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield device_mesh.init_device_mesh("cpu", (1,))
    gc.collect()  # a wrapper that outlives the group ends its threads while it holds the interpreter's lock
    torch.distributed.destroy_process_group()


def build():
    torch.manual_seed(0)
    return mlp(4, 8, 2)


def split(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)
    return model


def as_dtensors(model, mesh):
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def parts(_, module, mesh):
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    return distribute_module(model, mesh, parts)


def wrapped(model, _mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.parametrize(("shard", "by"), [(split, "FSDP"), (as_dtensors, "DTensor"), (wrapped, "FSDP")])
@pytest.mark.filterwarnings(
    "ignore:FSDP will not all-gather",
    "ignore:FSDP is switching to use",
    "ignore:.*FullyShardedDataParallel.*deprecated",
)
def test_a_sharded_model_is_not_traced(mesh, shard, by):
    with pytest.raises(
        ps.UntraceableError, match=f"'{by}' in .* whole in every process \\(DistributedDataPar"
    ):
        ps.trace(shard(build(), mesh), torch.zeros(1, 4))


@pytest.mark.parametrize("outside", [(), ("2",)])
def test_a_part_that_is_sharded_is_named(mesh, outside):
    model = build()
    split(model[2], mesh)
    with pytest.raises(ps.UntraceableError, match="'FSDP' in module '2'"):
        ps.trace(model, torch.zeros(1, 4), outside=outside)


def test_a_model_whose_weights_are_whole_for_the_moment_is_sharded_all_the_same(mesh):
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model(torch.zeros(1, 4))
    with pytest.raises(ps.UntraceableError, match="'FSDP'"):
        ps.trace(model, torch.zeros(1, 4))


@pytest.mark.parametrize("name", PATH)
def test_optimizers_of_sharded_parameters(mesh, name):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    sharded = split(copy.deepcopy(model), mesh)
    with pytest.raises(
        ValueError, match=f"{name} was given weights .* FSDP's fully_shard .*DistributedDataPar"
    ):
        getattr(ps.optim, name)(sharded.parameters(), network)


@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "GSGD"])
def test_groups_of_sharded_parameters(mesh, name):
    model = build()
    optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, torch.zeros(1, 4)))
    with pytest.raises(ValueError, match="FSDP"):
        optimizer.add_param_group({"params": split(nn.Linear(2, 2), mesh).parameters()})


def test_a_model_that_was_sharded_after_tracing(mesh):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    optimizer = ps.optim.PathSGD(model.parameters(), network)
    split(model, mesh)
    model(torch.randn(3, 4)).square().sum().backward()
    for refused in (optimizer.step, lambda: ps.paths.kappa(network), lambda: ps.rescaling.balance_(network)):
        with pytest.raises(RuntimeError, match=r"'0.weight' was split over processes after tracing \(FSDP"):
            refused()


def test_a_balanced_model_may_be_sharded_and_trained(mesh):
    """What the messages tell to do: in every process as it would be alone."""
    ends, x = [], torch.randn(3, 4)
    for shard in (split, lambda model, _: model):
        model = build()
        ps.rescaling.balance_(ps.trace(model, x), x)
        model = shard(model, mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        ends.append(model(x).detach())
    assert torch.equal(*ends)
