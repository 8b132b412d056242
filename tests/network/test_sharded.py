"""Weights that are split over processes are told so, by the name of what split them, with what works instead."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import device_mesh

import pathspace as ps
from cases import OPTIMIZERS, mlp
from processes import in_processes

PATH = [name for name in OPTIMIZERS if name != "Invariant"]
SHARDED = ["PathSGD", "PathAdam", "PathRMSprop", "PathGradientAdam", "PathMuon", "PathSOAP"]
WHOLE = sorted(set(PATH) - set(SHARDED))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A group of one process; its tensors are split like those of many."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield device_mesh.init_device_mesh("cpu", (1,))
    # a wrapper that outlives the group ends its threads while it holds the interpreter's lock
    gc.collect()
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
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            )

    return distribute_module(model, mesh, parts)


def wrapped(model, _mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("shard", "by"), [(split, "FSDP"), (as_dtensors, "DTensor"), (wrapped, "FSDP")]
)
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


INSTEAD = (
    "given weights .* FSDP's fully_shard .*make the optimizer after.*AdamW.*DistributedDataPar"
)


@pytest.mark.parametrize("name", PATH)
def test_a_model_that_was_not_traced_before_it_was_sharded(mesh, name):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    with pytest.raises(ValueError, match=f"{name} was {INSTEAD}"):
        getattr(ps.optim, name)(split(copy.deepcopy(model), mesh).parameters(), network)


def test_optimizers_that_need_whole_weights(mesh):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    split(model, mesh)
    for name in WHOLE:
        with pytest.raises(ValueError, match=f"{name} was {INSTEAD}"):
            getattr(ps.optim, name)(model.parameters(), network)
    for name in SHARDED:
        with pytest.raises(ValueError, match=r"given weights .* \(without second_term\)"):
            getattr(ps.optim, name)(model.parameters(), network, second_term=True)

    def invariant(rule, **options):
        return ps.optim.Invariant(model.parameters(), network, rule, **options)

    for rule in (torch.optim.Rprop, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=f"Invariant was {INSTEAD}"):
            invariant(rule, points=())
    with pytest.raises(ValueError, match=f"Invariant was {INSTEAD}"):
        invariant(torch.optim.SGD, metric=ps.metrics.DataDependent())


@pytest.mark.parametrize("name", WHOLE)
def test_groups_of_sharded_parameters(mesh, name):
    model = build()
    optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, torch.zeros(1, 4)))
    with pytest.raises(ValueError, match="FSDP"):
        optimizer.add_param_group({"params": split(nn.Linear(2, 2), mesh).parameters()})


def test_an_optimizer_that_was_made_before(mesh):
    model = build()
    optimizer = ps.optim.PathSGD(model.parameters(), ps.trace(model, torch.zeros(1, 4)))
    split(model, mesh)
    model(torch.randn(3, 4)).square().sum().backward()
    with pytest.raises(
        RuntimeError, match=r"after this PathSGD was made, .* make the optimizer after it"
    ):
        optimizer.step()


def test_what_follows_a_model_that_was_sharded_after_tracing(mesh):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    kappa, norm = ps.paths.kappa(network), ps.paths.squared_path_norm(network).detach()
    before = [weakref.ref(p) for p in model.parameters()]
    split(model, mesh)
    assert all(
        map(
            torch.equal, (k.full_tensor() for k in ps.paths.kappa(network).values()), kappa.values()
        )
    )
    assert torch.equal(ps.paths.squared_path_norm(network), norm)
    gc.collect()
    assert not any(p() is not None for p in before)  # the network would keep them in memory
    for refused in (
        lambda: ps.rescaling.balance_(network),
        lambda: ps.rescaling.random_rescale_(network),
        lambda: ps.paths.kappa(network, second_term=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"split over processes after tracing \(FSDP.*before the model is sh"
        ):
            refused()


def test_weights_that_are_whole_for_the_moment(mesh):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    split(model, mesh)
    with torch.no_grad():
        model(torch.zeros(1, 4))
    with pytest.raises(
        RuntimeError, match=r"'0.weight' is split .* whole at present: call reshard\(\)"
    ):
        ps.optim.PathSGD(model.parameters(), network)
    model.reshard()
    optimizer = ps.optim.PathSGD(model.parameters(), network)
    model(torch.randn(3, 4)).square().sum().backward()
    with torch.no_grad():
        model(torch.zeros(1, 4))
    with pytest.raises(RuntimeError, match=r"'0.weight' is whole at present: .* Call reshard\(\)"):
        optimizer.step()
    model.reshard()
    optimizer.step()


def test_weights_that_are_split_otherwise(mesh):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    square = device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    for options, why in [
        ({"mesh": square}, "over a mesh of 2 dimensions .*hybrid.*FSDP"),
        (
            {"mesh": mesh, "shard_placement_fn": lambda p: Shard(p.dim() - 1)},
            r"as S\(1\).*no shard_placement_fn",
        ),
    ]:
        model = build()
        network = ps.trace(model, torch.zeros(1, 4))
        fully_shard(model, **options)
        with pytest.raises(RuntimeError, match=f"'0.weight' was split over processes .*{why}"):
            ps.optim.PathAdam(model.parameters(), network)


def test_weights_that_tensor_parallelism_splits(mesh):
    from torch.distributed.tensor import parallel

    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    parallel.parallelize_module(
        model, mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    )
    with pytest.raises(
        RuntimeError, match=r"'2.weight' was split .*as S\(1\).*no tensor parallelism"
    ):
        ps.optim.PathAdam(model.parameters(), network)


def flat(rank, folder):
    """What is said of models that FullyShardedDataParallel flattens after tracing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    said = []
    for keeps_names in (False, True):
        for made_before in (False, True):
            model = build()
            network = ps.trace(model, torch.zeros(1, 4))
            optimizer = ps.optim.PathAdam(model.parameters(), network) if made_before else None
            wrapped = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=keeps_names
            )
            try:
                if optimizer is None:
                    optimizer = ps.optim.PathAdam(wrapped.parameters(), network)
                wrapped(torch.zeros(3, 4)).square().sum().backward()
                optimizer.step()
            except RuntimeError as error:
                said.append(str(error))
    return said


def test_weights_that_are_flattened(tmp_path):
    """In two processes; a group of one leaves the weights as they are."""
    for said in in_processes(2, flat, tmp_path):
        assert len(said) == 4
        for sentence in said:
            assert "flattened by FullyShardedDataParallel" in sentence
            assert "Trace the model before FSDP's fully_shard splits it" in sentence


def test_a_parameter_of_another_shape():
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    model[2].weight.data = torch.zeros(3, 8)
    with pytest.raises(
        RuntimeError, match=r"'2.weight' was replaced after tracing \(a new layer or shape"
    ):
        ps.paths.kappa(network)


def test_mixed_precision_of_fully_shard(mesh):
    """Forward and backward in bfloat16, the optimizer on the float32 parts; the same bits from a rescaled start."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    outputs = []
    for rescaled in (False, True):
        model = build()
        network = ps.trace(model, torch.zeros(1, 4))
        if rescaled:
            generator = torch.Generator().manual_seed(3)
            ps.rescaling.random_rescale_(network, powers_of_two=True, generator=generator)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = ps.optim.PathAdam(model.parameters(), network, lr=0.01)
        for x in torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            outputs.append(model(x))
            outputs[-1].square().sum().backward()
            optimizer.step()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not torch.equal(outputs[0], outputs[11])
    assert all(map(torch.equal, outputs[:12], outputs[12:]))


def test_weights_that_are_split_anew(mesh):
    model = build()
    network = ps.trace(model, torch.zeros(1, 4))
    optimizer = ps.optim.PathAdam(split(model, mesh).parameters(), network)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(p.detach().clone()))
    model(torch.randn(3, 4)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' was split over processes anew"):
        optimizer.step()


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
