"""What optimizers say of their last step, against the same numbers in float64 from kappa and the balanced network."""

import copy

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import mlp

RULES = [
    "PathSGD",
    "PathAdam",
    "PathMuon",
    "PathSOAP",
    "PathRMSprop",
    "DDPSGD",
    "PathGradientAdam",
    "Invariant",
]
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))


def optimizer_of(kind, model, **options):
    network = ps.trace(model, X.to(next(model.parameters()).dtype))
    if kind == "Invariant":
        options["rule"] = torch.optim.NAdam
    if kind != "PathGradientAdam":
        options.setdefault("lr", 0.01)
    return getattr(ps.optim, kind)(model.parameters(), network, **options), network


def step(optimizer, model):
    optimizer.zero_grad()
    model(X.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def model_of(seed=0):
    torch.manual_seed(seed)
    return mlp(3, 6, 5, 2).double()


def balanced_metric(model):
    """Return D' = kappa' / mean + 0.1 of the balanced network and its gradients, by name."""
    twin = copy.deepcopy(model)
    network = ps.trace(twin, X.double())
    ps.rescaling.balance_(network)
    kappa = ps.paths.kappa(network)
    twin(X.double()).square().mean().backward()
    metric = {name: k / k.mean() + 0.1 for name, k in kappa.items()}
    return metric, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "far"),
    [
        *((kind, 1e2) for kind in ("PathSGD", "PathAdam", "PathMuon", "PathRMSprop", "Invariant")),
        *((kind, 1e14) for kind in ("PathSGD", "PathAdam")),
    ],
)
def test_numbers_are_those_of_the_balanced_network(kind, far):
    """Also where the network is too far from balance for float32 to hold the factors between them."""
    model = model_of() if far < 1e10 else model_of().float()
    rel = 1e-6 if far < 1e10 else 1e-4
    metric, gradients = balanced_metric(copy.deepcopy(model).double())
    squares = {name: float((gradients[name].square() / d).sum()) for name, d in metric.items()}
    optimizer, network = optimizer_of(kind, model)
    ps.rescaling.random_rescale_(network, 1 / far, far)
    step(optimizer, model)
    found = optimizer.diagnostics()
    assert any("scales" in state for state in optimizer.state.values()) == (far > 1e10)
    assert found["norm"] == pytest.approx(sum(squares.values()) ** 0.5, rel=rel)
    assert found["shares"].keys() == {"0", "2", "4"}
    for layer, share in found["shares"].items():
        own = squares[f"{layer}.weight"] + squares[f"{layer}.bias"]
        assert share == pytest.approx(own / sum(squares.values()), rel=rel)
    every = torch.cat([d.flatten() for d in metric.values()])
    expected = every.quantile(torch.tensor([0.05, 0.5, 0.95]).double(), interpolation="nearest")
    assert found["metric"] == pytest.approx(expected.tolist(), rel=rel)


@pytest.mark.parametrize("kind", ["PathSGD", "PathAdam"])
def test_norm_is_what_clipping_bounds(kind):
    """A bound just above it changes no bit of a step; one below does."""
    norm = None
    moved = {}
    for bound in (None, 1.001, 0.999):
        model = model_of()
        options = {} if norm is None or bound is None else {"clip_norm": bound * norm}
        if kind == "PathAdam":
            options["eps"] = (
                1.0  # else Adam's first step does not depend on the length of a gradient
            )
        optimizer, _ = optimizer_of(kind, model, **options)
        step(optimizer, model)
        norm = norm or optimizer.diagnostics()["norm"]
        moved[bound] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(moved[None], moved[1.001])
    assert not torch.equal(moved[None], moved[0.999])


class Counted(ps.metrics.Metric):
    def __init__(self, **options):
        super().__init__(**options)
        self.computed = 0

    def values(self, network, names):
        del names
        self.computed += 1
        return ps.paths.kappa(network)


@pytest.mark.parametrize("power", [1.0, 0.0])
def test_age_is_that_of_the_metric(power):
    model = model_of()
    metric = Counted(refresh_every=3, power=power)
    optimizer, _ = optimizer_of("PathSGD", model, metric=metric)
    age = -1
    for _ in range(11):
        before = metric.computed
        step(optimizer, model)
        age = 0 if metric.computed > before or age < 0 else age + 1
        assert optimizer.diagnostics()["age"] == age


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", RULES)
def test_they_change_no_bit(kind):
    results = []
    for looks in (False, True):
        model = model_of().float()
        optimizer, _ = optimizer_of(kind, model)
        for _ in range(4):
            step(optimizer, model)
            if looks:
                found = optimizer.diagnostics()
                assert found["norm"] > 0
                assert sum(found["shares"].values()) == pytest.approx(1.0)
        results.append((list(model.parameters()), optimizer.state_dict()["state"]))
    (weights, state), (others, other_state) = results
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert state.keys() == other_state.keys()
    for index, entries in state.items():
        assert entries.keys() == other_state[index].keys()


def test_parameters_outside_have_a_share():
    prelu = nn.PReLU()
    model = nn.Sequential(mlp(3, 5, 4), prelu, nn.Linear(4, 2))
    optimizer, network = optimizer_of("PathSGD", model, path_decay=0.1, maximize=True)
    assert network.outside == ("1.weight",)
    step(optimizer, model)
    found = optimizer.diagnostics()
    assert prelu.weight.grad is not None
    square = float(prelu.weight.grad.square())
    assert found["shares"]["1"] == pytest.approx(square / found["norm"] ** 2, rel=1e-5)


def test_there_must_be_a_step_and_gradients():
    model = model_of()
    optimizer, _ = optimizer_of("PathSGD", model)
    for prepare in (lambda: None, lambda: (step(optimizer, model), optimizer.zero_grad())):
        prepare()
        with pytest.raises(RuntimeError, match=r"after step\(\) and before zero_grad\(\)"):
            optimizer.diagnostics()


def test_of_a_metric_that_is_not_diagonal():
    model = model_of()
    optimizer, _ = optimizer_of("QuasiDiagonal", model)
    with pytest.raises(NotImplementedError, match="QuasiDiagonal is not diagonal"):
        optimizer.diagnostics()
