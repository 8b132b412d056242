"""Data parallelism: two processes with half of every batch each end where one process does, bitwise alike."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing import assert_close

import pathspace as ps
from cases import OPTIMIZERS, mlp
from pathspace.optim.base import coordinates
from pathspace.optim.rules import soap
from pathspace.optim.rules.division import shared_out
from processes import in_processes, orthogonalizations

STEPS = 24  # two refreshes at their usual distance, and a few steps more
DATA = {"lr": 0.02, "estimator": "signs"}
# (class, options, examples in the whole batch)
RULES = {
    "PathSGD": ("PathSGD", {"lr": 0.05, "momentum": 0.5, "clip_norm": 1.0}, 8),
    "PathSGD measure": ("PathSGD", {"lr": 0.05, "frame": "measure"}, 8),
    "PathAdam": ("PathAdam", {"lr": 0.01}, 8),
    "PathRMSprop": ("PathRMSprop", {"lr": 0.01}, 8),
    "PathGradientAdam": ("PathGradientAdam", {"lr": 0.01}, 8),
    "PathMuon": ("PathMuon", {"lr": 0.01}, 8),
    "PathSOAP": ("PathSOAP", {"lr": 0.01, "precondition_frequency": 10}, 8),
    "Invariant AdamW": ("Invariant", {"rule": torch.optim.AdamW, "lr": 0.01}, 8),
    "Invariant SGD": ("Invariant", {"rule": torch.optim.SGD, "lr": 0.02, "momentum": 0.5}, 8),
    "GSGD": ("GSGD", {"lr": 0.01}, 8),
    "GAdam": ("GAdam", {"lr": 0.01}, 8),
    "DDPSGD": ("DDPSGD", {"lr": 0.02, "momentum": 0.5, "refresh_every": 2}, 8),  # estimator="auto"
    "DDPSGD exact": ("DDPSGD", {"lr": 0.02, "estimator": "exact"}, 8),
    "DDPSGD, half of the examples": ("DDPSGD", DATA, 128),
    "DDPAdam": ("DDPAdam", {"lr": 0.01}, 8),
    "QuasiDiagonal": ("QuasiDiagonal", {"lr": 0.02, "alpha": 0.5, "damping": 0.1}, 8),
}
# the mean of the parts' metrics is not that of the whole
COVARIANCE = {
    "DDPSGD C": ("DDPSGD", {**DATA, "statistic": "covariance", "alpha": 1.0, "damping": 0.1}, 8),
}
UNUSUAL = ("PathAdam", "DDPSGD", "DDPSGD C", "QuasiDiagonal")
APART = {"each by itself": ("DDPSGD", {**DATA, "process_group": None}, 8)}


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 6, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class TwoTypes(nn.Module):
    """The first layer in float32."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(3, 6), nn.Linear(6, 2)

    def double(self):
        self.out.double()
        return self

    def forward(self, x):
        return self.out(self.read(x.float()).relu().double())


MODELS = {"mlp": (lambda: mlp(3, 6, 5, 2), (3,)), "rnn": (LastStep, (4, 3))}
# one rule of each kind of metric and of each kind of state trains one network, two both; all others
# are slow tests
ON_ONE = (
    "PathSGD",
    "PathMuon",
    "Invariant AdamW",
    "GSGD",
    "DDPSGD",
    "DDPSGD C",
    "DDPSGD exact",
    "QuasiDiagonal",
)
ON_BOTH = ("PathSGD", "DDPSGD")
PAIRS = [
    *((rule, "mlp") for rule in (*ON_ONE, *APART)),
    *((rule, "rnn") for rule in (*ON_BOTH, *APART)),
]
OTHERS = [(rule, kind) for kind in MODELS for rule in RULES if (rule, kind) not in PAIRS]


def trained(rule, kind="mlp", parts=(0, 1), wrap=lambda model: model, *, halves=False):
    """Weights after some steps, on one of the equal parts of every batch, or on the mean of the gradients of halves."""
    name, options, size = (RULES | COVARIANCE | APART)[rule]
    torch.manual_seed(0)
    build, shape = MODELS.get(kind, (TwoTypes, (3,)))
    model = build().double()
    x = torch.randn(STEPS, size, *shape, dtype=torch.float64)
    y = torch.randn(STEPS, size, 2, dtype=torch.float64)
    some = (
        parts
        if isinstance(parts, slice)
        else slice(*(n * size // parts[1] for n in (parts[0], parts[0] + 1)))
    )
    network, run = ps.trace(model, x[0]), wrap(model)
    optimizer = getattr(ps.optim, name)(model.parameters(), network, **options)
    for i in range(STEPS):
        optimizer.zero_grad()
        for these in (slice(0, size // 2), slice(size // 2, size)) if halves else (some,):
            loss = (run(x[i, these]) - y[i, these]).square().mean()
            (loss / 2 if halves else loss).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def refused(rank):
    """What a step says when a batch of the second process is not finite."""
    model = mlp(3, 6, 5, 2).double()
    network = ps.trace(model, torch.zeros(1, 3))
    optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.01)
    x = torch.full((4, 3), float("nan") if rank else 1.0, dtype=torch.float64)
    nn.parallel.DistributedDataParallel(model)(x).square().mean().backward()
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return "nothing"


class Fused(nn.Module):
    """Matrices of several shapes, two of one, and three in the rows of one parameter."""

    def __init__(self):
        super().__init__()
        self.read, self.fused, self.again = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = self.fused(self.read(x).relu()).chunk(3, -1)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(self.again(h.relu()).relu())


def with_gradients(name, rank, *, apart=False, **options):
    """A model, its optimizer, and gradients that are the same in all processes, unless they are apart."""
    torch.manual_seed(0)
    model = Fused()
    network = ps.trace(model, torch.zeros(2, 4, 3))
    optimizer = getattr(ps.optim, name)(model.parameters(), network, lr=0.01, **options)
    torch.manual_seed(1 + rank if apart else 1)
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(5)]
    return model, optimizer, gradients


def steps(model, optimizer, gradients):
    """Weights after steps along these gradients."""
    for of_step in gradients:
        for p, g in zip(model.parameters(), of_step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def decompositions():
    """A one for every basis that SOAP finds or refines, in a list that grows."""
    counts = []

    def counting(function):
        def counted(*args):
            counts.append(1)
            return function(*args)

        return counted

    with (
        mock.patch.object(soap, "eigenvectors", counting(soap.eigenvectors)),
        mock.patch.object(soap, "refined", counting(soap.refined)),
    ):
        yield counts


DIVIDED = {
    "PathMuon": (orthogonalizations, {}),
    "PathSOAP": (decompositions, {"precondition_frequency": 2}),
}
# matrices that Muon orthogonalizes in Fused in five steps, and bases that SOAP finds in three of them
WORK = {"PathMuon": 5 * 6, "PathSOAP": 3 * 8}


def divided(rank, name):
    """What becomes of an optimizer whose processes divide its matrices."""
    # chunks as small as this are those of large models
    with mock.patch.object(coordinates, "_TOGETHER", 80):
        return divided_in_chunks(rank, name)


def divided_in_chunks(rank, name):
    count, options = DIVIDED[name]
    found = {}
    world = torch.distributed.group.WORLD
    with count() as work:
        found["divided"] = steps(*with_gradients(name, rank, process_group=world, **options))
    found["work"] = sum(work)
    with count() as work:
        found["undivided"] = steps(*with_gradients(name, rank, **options))
    found["undivided work"] = sum(work)
    model, optimizer, gradients = with_gradients(name, rank, process_group=world, **options)
    if rank == 0:
        # of one process alone: it must not wait for others
        get_optimizer_state_dict(model, optimizer)
    steps(model, optimizer, gradients[:2])
    options["process_group"] = "default"
    other, resumed, _ = with_gradients(name, rank, **options)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    copied = copy.deepcopy((model, optimizer))
    found["resumed"] = steps(other, resumed, gradients[2:])
    found["copied"] = steps(*copied, gradients[2:])
    model, optimizer, gradients = with_gradients(name, rank, apart=True, **options)
    start = [p.detach().clone() for p in model.parameters()]
    try:
        steps(model, optimizer, gradients)
    except RuntimeError as error:
        found["apart"] = str(error)
    found["unmoved"] = alike(start, model.parameters())
    return found


def train_replicas(rank, folder, pairs):
    return {
        (rule, kind): trained(rule, kind, (rank, 2), nn.parallel.DistributedDataParallel)
        for rule, kind in pairs
    }


def replica(rank, folder):
    results = train_replicas(rank, folder, PAIRS)
    unequal = slice(0, 5) if rank == 0 else slice(5, 8)
    for rule in UNUSUAL:
        results[rule, "unequal"] = trained(
            rule, "mlp", unequal, nn.parallel.DistributedDataParallel
        )
        results[rule, "two types"] = trained(
            rule, "two types", (rank, 2), nn.parallel.DistributedDataParallel
        )
    results["not finite"] = refused(rank)
    results["divided"] = {name: divided(rank, name) for name in DIVIDED}
    return results


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    return in_processes(2, replica, tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def other_replicas(tmp_path_factory):
    return in_processes(2, train_replicas, tmp_path_factory.mktemp("replicas"), OTHERS)


def alike(one, other):
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_replicas_stay_alike(replicas, kind):
    first, second = replicas
    for rule in (rule for rule, its in PAIRS if its == kind and rule not in APART):
        assert alike(first[rule, kind], second[rule, kind]), rule
    assert not alike(first["each by itself", kind], second["each by itself", kind])


@pytest.mark.parametrize("rule", UNUSUAL)
@pytest.mark.sample(2)
def test_unequal_parts_and_several_types_keep_replicas_alike(replicas, rule):
    first, second = replicas
    assert alike(first[rule, "unequal"], second[rule, "unequal"])
    assert alike(first[rule, "two types"], second[rule, "two types"])
    if rule in RULES:
        assert_close(first[rule, "two types"], trained(rule, "two types"), rtol=1e-3, atol=1e-4)


def test_a_batch_that_is_not_finite_stops_all_processes(replicas):
    for each in replicas:
        assert "not finite" in each["not finite"]


@pytest.mark.parametrize("name", DIVIDED)
def test_replicas_that_divide_matrices_stay_alike_and_step_as_one(replicas, name):
    first, second = (each["divided"][name] for each in replicas)
    for run in ("divided", "resumed", "copied"):
        assert alike(first[run], second[run]), run
        # bfloat16 has eight digits, and products of a batch may be summed in another order
        near = 5 * 0.01 * 0.05 if name == "PathMuon" else 0
        assert_close(first[run], first["undivided"], rtol=0, atol=near)
    assert alike(first["resumed"], first["divided"])
    assert alike(first["copied"], first["divided"])


@pytest.mark.parametrize("name", DIVIDED)
def test_each_of_two_processes_does_its_share(replicas, name):
    first, second = (each["divided"][name] for each in replicas)
    assert first["undivided work"] == second["undivided work"] == WORK[name]
    assert first["work"] + second["work"] == WORK[name]
    # SOAP's basis of 24 rows costs more than the seven others together
    assert min(first["work"], second["work"]) >= WORK[name] / 8


@pytest.mark.parametrize("name", DIVIDED)
def test_processes_with_other_gradients_divide_nothing(replicas, name):
    for each in replicas:
        found = each["divided"][name]
        assert "process_group" in found["apart"]
        assert "DistributedDataParallel" in found["apart"]
        assert found["unmoved"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_balanced(size):
    costs = [5, 1, 1, 9, 3, 3, 2, 8, 1, 1]
    owners = shared_out(costs, size)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == n) for n in range(size)]
    assert sum(loads) == sum(costs)
    assert max(loads) <= max(max(costs), 4 / 3 * sum(costs) / size)


def test_the_costliest_job_comes_first():
    assert shared_out([1, 4, 2, 3], 2) == [0, 0, 1, 1]
    assert shared_out([2, 2, 2], 2) == [0, 1, 0]
    assert shared_out([], 3) == []


@pytest.mark.parametrize("kind", DIVIDED)
def test_process_group_is_a_group(kind):
    model = mlp(3, 6, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="process_group must be None"):
        getattr(ps.optim, kind)(model.parameters(), network, process_group=2)


def check_end(end, rule, kind):
    # the eigenbasis of SOAP turns with the rounding of a mean of halves, by more than 1e-10 on some
    # processors
    assert_close(end, trained(rule, kind, halves=rule == "PathSOAP"), rtol=1e-10, atol=1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rule", "kind"), [pair for pair in PAIRS if pair[0] in RULES])
def test_two_processes_end_where_one_does(replicas, rule, kind):
    check_end(replicas[0][rule, kind], rule, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind"), OTHERS)
def test_two_other_processes_end_where_one_does(other_replicas, rule, kind):
    first, second = other_replicas
    assert alike(first[rule, kind], second[rule, kind])
    check_end(first[rule, kind], rule, kind)


def test_every_optimizer_is_among_them():
    assert {name for name, _, _ in RULES.values()} == set(OPTIMIZERS)
