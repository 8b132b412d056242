"""Steps of networks that are rescaled so far that kappa leaves float32 at both ends."""

import copy
import functools
import io
import itertools

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import slow_besides
from pathspace.metrics import metric

RULES = {
    "PathSGD": lambda p, n: ps.optim.PathSGD(p, n, lr=0.05, momentum=0.9),
    "PathSGD with options": lambda p, n: ps.optim.PathSGD(
        p, n, lr=0.05, momentum=0.9, weight_decay=0.01, path_decay=1e-3, clip_norm=1.0, clip_step=0.1, damping=0.01,
        second_term=True, refresh_every=2,
    ),
    "PathSGD raw": lambda p, n: ps.optim.PathSGD(p, n, lr=0.01, normalization="none"),
    "PathSGD half": lambda p, n: ps.optim.PathSGD(p, n, lr=0.05, power=0.5, refresh_every=2),
    "PathAdam": lambda p, n: ps.optim.PathAdam(p, n, lr=1e-2),
    "PathAdam half": lambda p, n: ps.optim.PathAdam(p, n, lr=1e-2, power=0.5, damping=0.0, weight_decay=0.1),
    "PathSOAP": lambda p, n: ps.optim.PathSOAP(p, n, lr=1e-2, precondition_frequency=2),
    "PathMuon": lambda p, n: ps.optim.PathMuon(p, n, lr=1e-2),
    "DDPSGD": lambda p, n: ps.optim.DDPSGD(p, n, lr=0.05, estimator="exact"),
    "DDPSGD with options": lambda p, n: ps.optim.DDPSGD(
        p, n, lr=0.05, momentum=0.9, statistic="covariance", damping=0.1, power=0.5, clip_norm=1.0, refresh_every=2,
        estimator="exact",
    ),
    "DDPAdam": lambda p, n: ps.optim.DDPAdam(p, n, lr=1e-2, estimator="exact"),
    "QuasiDiagonal": lambda p, n: ps.optim.QuasiDiagonal(p, n, lr=0.05),
    "QuasiDiagonal with options": lambda p, n: ps.optim.QuasiDiagonal(
        p, n, lr=0.01, momentum=0.9, alpha=0.5, statistic="covariance", estimator="signs", weight_decay=0.01,
        clip_norm=1.0, refresh_every=2, damping=0.0, nesterov=True,
    ),
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.RNN(3, 6, nonlinearity="relu", batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def deep():
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


NETWORKS = {"deep": (deep, (8, 3)), "recurrent": (Recurrent, (8, 7, 3))}


BOUNDS = {torch.float32: 48, torch.float64: 100}
"""Exponents up to which docs/reliability.md promises equal bits."""


@functools.cache
def traced(name, dtype):
    """A model, its network, an input, targets, and a sign for every class: to be copied."""
    build, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = build().to(dtype), torch.randn(shape).to(dtype), torch.randn(8, 2).to(dtype)
        network = ps.trace(model, x)
        return model, network, x, y, 2 * torch.randint(2, (network.num_classes,)) - 1


def start(name, exponent, dtype=torch.float32):
    model, network, x, y, signs = copy.deepcopy(traced(name, dtype))
    factors = 2.0 ** (exponent * signs).double()
    ps.rescaling.rescale_(network, factors)
    return model, network, factors, x, y


def train(make, name, exponent, way="plain", steps=5, dtype=torch.float32):
    model, network, factors, x, y = start(name, exponent, dtype)
    parameters = list(model.parameters())
    optimizer = make(parameters[:-2] if way == "joins" else parameters, network)
    outputs = []
    for step in range(steps):
        if step == 3 and way == "joins":
            optimizer.add_param_group({"params": parameters[-2:]})
        if step == 3 and way == "resumes":
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            model = copy.deepcopy(model)
            network = ps.trace(model, x)
            optimizer = make(model.parameters(), network)
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        optimizer.zero_grad()
        outputs.append(model(x))
        (outputs[-1] - y).square().mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(same(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    ps.rescaling.rescale_(network, 1 / factors)
    return torch.stack(outputs).detach(), [p.detach() for p in model.parameters()], optimizer


@functools.cache
def near(rule, name, **options):
    """The run from the weights as they are: only to be read."""
    return train(RULES[rule], name, 0, **options)


def same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def alike(ours, theirs):
    return torch.equal(ours[0], theirs[0]) and all(
        torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "name"),
    slow_besides(
        [
            *((rule, ("recurrent", "deep")[number % 2]) for number, rule in enumerate(RULES)),
            *((rule, name) for rule in ("PathSGD", "DDPSGD", "QuasiDiagonal") for name in NETWORKS),
        ],
        itertools.product(RULES, NETWORKS),
    ),
)
def test_a_member_far_away_steps_alike(rule, name):
    here, far = near(rule, name), train(RULES[rule], name, BOUNDS[torch.float32])
    assert alike(here, far)
    assert not torch.equal(here[0][0], here[0][-1])
    assert not any("scales" in state for state in here[2].state.values())  # others pay nothing
    assert set(far[2].state) <= {p for group in far[2].param_groups for p in group["params"]}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "rule", ["PathSGD with options", "PathAdam", "PathMuon", "DDPSGD with options"]
)
def test_a_member_far_away_steps_alike_in_float64(rule):
    exponents = (0, BOUNDS[torch.float64])
    assert alike(*(train(RULES[rule], "recurrent", e, dtype=torch.float64) for e in exponents))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["GSGD", "GAdam"])
def test_a_member_far_away_steps_alike_in_path_space(kind, dtype):
    def make(parameters, network):
        return getattr(ps.optim, kind)(parameters, network, lr=0.01)

    assert alike(*(train(make, "recurrent", e, dtype=dtype) for e in (0, BOUNDS[dtype])))


ENDS = {torch.float32: (15, 16, 17), torch.float64: (29, 30, 31)}


@pytest.mark.parametrize(
    ("rule", "dtype"),
    slow_besides(
        [("PathSGD", torch.float32), ("PathAdam", torch.float64)],
        itertools.product(("PathSGD", "PathAdam"), ENDS),
    ),
    ids=str,
)
def test_equal_bits_where_kappa_is_first_computed_elsewhere(rule, dtype):
    here = near(rule, "recurrent", steps=12, dtype=dtype)
    for exponent in ENDS[dtype]:
        assert alike(here, train(RULES[rule], "recurrent", exponent, steps=12, dtype=dtype))


@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam"])
def test_beyond_the_bound_steps_are_rounded_and_then_refused(rule):
    here, far = near(rule, "recurrent"), train(RULES[rule], "recurrent", 60)
    torch.testing.assert_close(here[0], far[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(FloatingPointError, match="not finite"):
        train(RULES[rule], "recurrent", 300, dtype=torch.float64)


WITH_STATES = (
    "PathSGD with options",
    "PathSOAP",
    "DDPSGD with options",
    "QuasiDiagonal with options",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "way"),
    slow_besides(
        [(rule, ("joins", "resumes")[number // 2]) for number, rule in enumerate(WITH_STATES)],
        itertools.product(WITH_STATES, ("joins", "resumes")),
    ),
)
def test_far_members_resume_and_take_more_parameters(rule, way):
    assert alike(*(train(RULES[rule], "recurrent", exponent, way) for exponent in (0, 40)))


# of this one steps come out alike without it
WITHIN = [rule for rule in RULES if rule != "PathSGD with options"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "rule",
    slow_besides(["PathSGD", "PathAdam half", "PathMuon", "DDPSGD", "QuasiDiagonal"], WITHIN),
)
def test_without_it_they_part(rule, monkeypatch):
    here = near(rule, "recurrent")
    monkeypatch.setattr(metric, "far_scales", lambda *_: None)
    try:
        far = train(RULES[rule], "recurrent", 40)
    except FloatingPointError:
        return
    assert not alike(here, far)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"damping": 0.1}, {"power": 0.5}, {"refresh_every": 2}])
def test_random_signs_are_the_same_there(options):
    """Exponents of 32 leave float32 in some elements of a tensor and not in others."""

    def make(parameters, network):
        return ps.optim.DDPSGD(parameters, network, lr=0.05, estimator="signs", **options)

    deep, recurrent = (train(make, name, 0) for name in ("deep", "recurrent"))
    for exponent in (32, 40):
        assert alike(deep, train(make, "deep", exponent))
        far = train(make, "recurrent", exponent)  # by autograd there, to rounding
        torch.testing.assert_close(recurrent[0], far[0], rtol=1e-6, atol=1e-6)


def test_a_failed_step_changes_nothing():
    model, network, _, x, _ = start("deep", 40)
    optimizer = RULES["PathSGD"](model.parameters(), network)
    model(x).square().mean().backward()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert all(
        torch.equal(p, b) or p.isnan().any()
        for p, b in zip(model.parameters(), before, strict=True)
    )
    assert all(isinstance(key, nn.Parameter) for key in optimizer.state)
