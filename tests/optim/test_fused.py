"""Compiled loops against the tape: kappa, whole runs, what they refuse, and what they leave to the general way."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import mlp
from conformance import power_of_two_factors
from pathspace.squared.squares import dense

pytest.importorskip("numba", reason="compiled loops need Numba")

from pathspace.compiled.plan import NoPlanError, Plan
from pathspace.optim.base.path_metric import gauges


class Layers(nn.Module):
    """Stacked ReLU layers with a linear one on top, read at the last step, at all steps, or from the last states."""

    def __init__(self, layers=1, read="last", *, bias=True, batch_first=True, hidden=7):
        super().__init__()
        self.rnn = nn.RNN(3, hidden, layers, nonlinearity="relu", batch_first=batch_first, bias=bias)
        self.out = nn.Linear(hidden, 2, bias=bias)
        self.read, self.batch_first = read, batch_first

    def forward(self, x):
        sequence, last = self.rnn(x if self.batch_first else x.transpose(0, 1))
        if self.read == "states":
            return self.out(last[-1])
        if self.read == "all":
            return self.out(sequence).flatten(0, 1)
        return self.out(sequence[:, -1] if self.batch_first else sequence[-1])


NETS = {
    "mlp": (lambda: mlp(3, 5, 4, 2), (4, 3)),
    "mlp without bias": (lambda: mlp(3, 5, 4, 2, bias=False), (4, 3)),
    "wide mlp": (lambda: nn.Sequential(nn.Flatten(), mlp(12, 9, 2)), (4, 3, 4)),
    "rnn": (Layers, (4, 6, 3)),
    "rnn without bias": (lambda: Layers(bias=False), (4, 6, 3)),
    "rnn, one step": (Layers, (4, 1, 3)),
    "rnn, time first": (lambda: Layers(batch_first=False), (4, 6, 3)),
    "rnn, last states": (lambda: Layers(2, "states"), (4, 6, 3)),
    "rnn at all steps": (lambda: Layers(1, "all"), (4, 9, 3)),
    "stack": (lambda: Layers(3), (4, 6, 3)),
    "stack at all steps": (lambda: Layers(3, "all"), (4, 9, 3)),
    "settling rnn": (lambda: _scaled(Layers(1, hidden=20), 0.3), (2, 200, 3)),
    "settling rnn at all steps": (lambda: _scaled(Layers(1, "all", hidden=20), 0.3), (2, 200, 3)),
    "settling stack at all steps": (lambda: _scaled(Layers(2, "all", hidden=20), 0.3), (2, 150, 3)),
}


def _scaled(model, factor):
    with torch.no_grad():
        for name, p in model.rnn.named_parameters():
            if "weight_hh" in name:
                p.mul_(factor / p.square().sum(1, keepdim=True).sqrt())
    return model


def build(name, dtype=torch.float32):
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    x = torch.randn(shape, dtype=dtype)
    return model, x, ps.trace(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_kappa_and_its_means_are_those_of_the_tape(name, dtype):
    _, _, network = build(name, dtype)
    found = gauges(network, network.parameters)
    plan = Plan(network)
    result = plan.run(found)
    if name == "rnn, one step" and dtype == torch.float32:  # no path through the recurrent weights: all zero
        assert result is None
        return
    assert result is not None
    surveyed, means = result
    rounding = 100 * torch.finfo(dtype).eps
    for (key, expected), mean in zip(ps.paths.kappa(network).items(), means, strict=True):
        value = dense(surveyed.values[key])
        assert_close(value.reshape(expected.shape), expected, rtol=rounding, atol=0)
        parts, factor = found[key].mean(expected)
        product = factor * torch.stack(parts).prod().item()
        assert mean == pytest.approx(product, rel=rounding)
        low, high = (math.prod(bounds) for bounds in zip(*surveyed.bounds[key], strict=True))
        assert low == pytest.approx(expected.min().item(), rel=rounding)
        assert high == pytest.approx(expected.max().item(), rel=rounding)
    # where nothing is zero, a call without a look at the bounds finds the same
    assert plan.means() == (means if all(mean > 0 for mean in means) else None)


OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.5, "nesterov": True, "clip_norm": 0.05},
    "stale": {"refresh_every": 3},
    "frozen": {"normalization": "frozen"},
    "raw": {"normalization": "none", "lr": 1e-5},
    "maximizing": {"maximize": True, "lr": 1e-4},
    # left to the general way, in part or as a whole
    "damped": {"damping": 0.01, "momentum": 0.5},
    "path decay": {"path_decay": 0.01},
    "power": {"power": 0.5, "momentum": 0.5},
    "second term": {"second_term": True},
}


ADAM_OPTIONS = {
    "plain": {},
    "clipped": {"clip_norm": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    "stale": {"refresh_every": 3, "normalization": "frozen"},
    "undamped": {"damping": 0.0},
    "maximizing": {"maximize": True, "lr": 1e-4},
    # left to the general way, but for kappa
    "AMSGrad": {"amsgrad": True},
    "power": {"power": 0.5},
}


def train(name, steps=12, dtype=torch.float64, factors=None, rule=ps.optim.PathSGD, **options):
    model, x, network = build(name, dtype)
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    outside = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    optimizer = rule([*model.parameters(), outside], network, **{"lr": 0.02, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - outside).square().mean()).backward()
        optimizer.step()
    if factors is not None:
        ps.rescaling.rescale_(network, 1 / factors)
    return optimizer, [p.detach() for p in (*model.parameters(), outside)]


@pytest.mark.parametrize("name", ["mlp", "rnn", "stack at all steps", "settling rnn"])
@pytest.mark.parametrize("options", OPTIONS)
def test_runs_are_those_of_the_tape(name, options):
    _, expected = train(name, **OPTIONS[options])
    optimizer, found = train(name, fused=True, **OPTIONS[options])
    assert optimizer.fused == (options != "second term")
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    start, *_ = train(name, steps=0)[1]
    assert not torch.equal(found[0], start)


@pytest.mark.parametrize("name", ["mlp", "rnn", "settling rnn"])
@pytest.mark.parametrize("options", ADAM_OPTIONS)
def test_runs_of_path_adam_are_those_of_the_tape(name, options):
    _, expected = train(name, rule=ps.optim.PathAdam, **ADAM_OPTIONS[options])
    optimizer, found = train(name, rule=ps.optim.PathAdam, fused=True, **ADAM_OPTIONS[options])
    assert optimizer.fused
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "stack", "settling rnn at all steps"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "nesterov": True, "clip_norm": 0.5, "refresh_every": 4}]
)
def test_powers_of_two_change_no_bit(name, options):
    _, _, network = build(name)
    factors = power_of_two_factors(network.num_classes).float()
    _, ours = train(name, 40, torch.float32, None, fused=True, **options)
    _, theirs = train(name, 40, torch.float32, factors, fused=True, **options)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("refresh_every", [1, 2])
@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam"])
def test_the_loops_take_the_steps(monkeypatch, rule, refresh_every):
    """All but the first step are two compiled calls; nothing asks the tape."""
    model, x, network = build("rnn")
    rule = getattr(ps.optim, rule)
    optimizer = rule(model.parameters(), network, fused=True, clip_norm=1.0, refresh_every=refresh_every)
    model(x).square().sum().backward()
    optimizer.step()
    monkeypatch.setattr(type(network.tape), "gradient", None)
    monkeypatch.setattr(rule, "_advance", None)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_what_does_not_settle_is_left_to_the_tape():
    model = Layers(hidden=10)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(torch.eye(10))
    x = torch.randn(2, 120, 3)
    network = ps.trace(model, x)
    assert Plan(network).run(gauges(network, network.parameters)) is None
    runs = []
    for fused in (False, True):
        twin = copy.deepcopy(network)
        optimizer = ps.optim.PathSGD(twin.model.parameters(), twin, lr=1e-4, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            (twin.model(x) / 100).square().mean().backward()
            optimizer.step()
        runs.append([p.detach() for p in twin.model.parameters()])
    for ours, theirs in zip(*runs, strict=True):
        assert_close(ours, theirs)


def test_dead_units_and_other_extremes_are_left_to_the_general_way():
    runs = []
    for fused in (False, True):
        model, x, network = build("mlp")
        with torch.no_grad():
            model[2].weight[:, 1] = 0
            model[4].weight.mul_(1e-12)
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=1e-3, fused=fused)
        for _ in range(4):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        runs.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*runs, strict=True):
        assert torch.isfinite(ours).all()
        assert_close(ours, theirs)


def test_parameters_may_move_in_memory_and_options_change():
    runs = []
    for fused in (False, True):
        model, x, network = build("rnn", torch.float64)
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, fused=fused, refresh_every=2)
        for step in range(10):
            if step == 4:
                for p in model.parameters():
                    p.data = p.data.clone()
            if step == 5:
                optimizer.param_groups[0].update(momentum=0.5, lr=torch.tensor(0.005))
            if step == 7:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        runs.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*runs, strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=0)


def _cleared(model, optimizer):
    del model
    optimizer.state.clear()


def _set_anew(model, optimizer):
    del model
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            if torch.is_tensor(value):
                state[key] = value.clone()  # the memory that the old one had is free for others


def _without_velocity(model, optimizer):
    del model
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)
        state.pop("exp_avg", None)


def _velocity_moved(model, optimizer):
    del model
    for state in optimizer.state.values():
        for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & state.keys():
            state[key].data = state[key].data.clone()


def _converted(model, optimizer):
    del optimizer
    model.half()
    model.double()


@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam"])
@pytest.mark.parametrize("refresh_every", [1, 3])
@pytest.mark.parametrize("change", [_cleared, _set_anew, _without_velocity, _velocity_moved, _converted])
def test_what_others_do_to_the_state_is_seen(change, refresh_every, rule):
    runs = []
    for fused in (False, True):
        model, x, network = build("stack")
        options = {"lr": 0.01, "refresh_every": refresh_every} | (
            {"momentum": 0.9} if rule == "PathSGD" else {}
        )
        optimizer = getattr(ps.optim, rule)(model.parameters(), network, fused=fused, **options)
        junk = []
        for step in range(8):
            if step == 4:
                change(model, optimizer)
                junk = [torch.full((n,), 1e9) for p in model.parameters() for n in [p.numel()] * 20]
            optimizer.zero_grad()
            model(x.to(model.out.weight.dtype)).square().mean().backward()
            optimizer.step()
        assert all(bool((t == 1e9).all()) for t in junk)
        runs.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*runs, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_autograd_notices_the_step():
    model, x, network = build("mlp")
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, fused=True)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rule", ["PathSGD", "PathAdam"])
def test_a_state_goes_from_one_kind_to_the_other(rule):
    expected = None
    options = {"momentum": 0.9} if rule == "PathSGD" else {}
    for kinds in [(False, False), (False, True), (True, False), (True, True)]:
        model, x, network = build("rnn", torch.float64)
        state = None
        for fused in kinds:
            optimizer = getattr(ps.optim, rule)(
                model.parameters(), network, lr=0.01, fused=fused, refresh_every=4, **options
            )
            if state is not None:
                optimizer.load_state_dict(state)
            for _ in range(6):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            state = optimizer.state_dict()
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        expected = found if expected is None else expected
        assert_close(found, expected, rtol=1e-10, atol=0)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).relu()) + self.second(self.first(x.relu()).relu())


REFUSED = {
    "conv": (lambda: nn.Sequential(nn.Conv1d(3, 2, 1), nn.ReLU(), nn.Conv1d(2, 2, 1)), (2, 3, 4)),
    "bidirectional": (lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True), (5, 2, 3)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (5, 3)),
    "shared": (Twice, (5, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_networks_without_a_plan_take_the_general_way(name):
    make, shape = REFUSED[name]
    model, x = make(), torch.randn(shape)
    output = (lambda result: result[0]) if name == "bidirectional" else None
    network = ps.trace(model, x, output=output)
    with pytest.raises(NoPlanError):
        Plan(network)
    optimizer = ps.optim.PathSGD(model.parameters(), network, fused=True)
    assert not optimizer.fused
    assert optimizer.not_fused_because


def test_selecting_other_steps_has_no_plan():
    class First(Layers):
        def forward(self, x):
            return self.out(self.rnn(x)[0][:, 0])

    with pytest.raises(NoPlanError, match="selects steps other than the last"):
        Plan(ps.trace(First(), torch.randn(2, 5, 3)))


def test_half_precision_has_no_plan():
    model = mlp(3, 4, 2).bfloat16()
    optimizer = ps.optim.PathSGD(
        model.parameters(), ps.trace(model, torch.randn(2, 3, dtype=torch.bfloat16)), fused=True
    )
    assert "float32" in optimizer.not_fused_because


def test_a_copy_has_memory_of_its_own():
    model, x, network = build("rnn", torch.float64)
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, fused=True, refresh_every=2)
    _advance(model, x, optimizer, 3)
    twin, copied = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    _advance(twin, x, copied, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    _advance(model, x, optimizer, 5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_replaced_parameters_are_noticed():
    model, x, network = build("mlp")
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, fused=True)
    _advance(model, x, optimizer, 3)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match="trace the model again"):
        optimizer.step()


def _advance(model, x, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_loops_are_taken_in_every_member_of_a_rescaling_class(sign):
    """Elements of kappa go through 2^40 where factors go to 2^10: that must not decide who takes the step."""
    outputs, taken = [], []
    for power in (0.0, 10.0):
        model, x, network = build("rnn")
        ends = torch.where(torch.arange(network.num_classes) % 2 == 0, sign * power, -sign * power)
        ps.rescaling.rescale_(network, 2.0 ** ends.double())
        with torch.no_grad():
            for p in model.rnn.parameters():
                p[1].mul_(1e-3)  # a unit of little path mass
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, fused=True)
        for _ in range(5):
            optimizer.zero_grad()
            outputs.append(model(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
        taken.append(optimizer._plan.means() is not None)
    assert taken == [True, True]
    assert all(torch.equal(a, b) for a, b in zip(outputs[:5], outputs[5:], strict=True))
