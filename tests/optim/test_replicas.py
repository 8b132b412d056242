"""Data parallelism: two processes with half of every batch each end where one process does, bitwise alike."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import OPTIMIZERS, mlp
from processes import in_processes

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
def test_unequal_parts_and_several_types_keep_replicas_alike(replicas, rule):
    first, second = replicas
    assert alike(first[rule, "unequal"], second[rule, "unequal"])
    assert alike(first[rule, "two types"], second[rule, "two types"])
    if rule in RULES:
        assert_close(first[rule, "two types"], trained(rule, "two types"), rtol=1e-3, atol=1e-4)


def test_a_batch_that_is_not_finite_stops_all_processes(replicas):
    for each in replicas:
        assert "not finite" in each["not finite"]


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
