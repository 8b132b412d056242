"""PathAdam and PathGradientAdam: known weights, every option against the rule written out, and Adam where they meet."""

import copy
import math

import pytest
import torch
from plain_metric import PlainMetric
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, in_turn, mlp, trace, traced
from fixture_nets import NETS, load


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NETS)
def test_three_raw_steps_give_the_known_weights(name):
    net = load(name)
    known = net.net["invariant_adam_3steps"]
    options = {"lr": known["lr"], "betas": tuple(known["betas"]), "eps": known["eps"]}
    network = ps.trace(net.model, net.x)
    optimizer = ps.optim.PathAdam(net.model.parameters(), network, normalization="none", **options)
    for _ in range(3):
        optimizer.zero_grad()
        net.loss(net.model(net.x)).backward()
        optimizer.step()
    weights = {name: p.detach() for name, p in net.model.named_parameters()}
    assert_close(weights, net.as_tensors(known["new_params"]), rtol=1e-10, atol=1e-10)


# --- the rules written out ------------------------------------------------------------------------


def norm(tensors):
    return math.sqrt(sum(float(each.square().sum()) for each in tensors))


class Plain:
    """PathAdam, or PathGradientAdam, one obvious line after the other."""

    def __init__(self, kind, case, model, **options):
        self.kind, self.model = kind, model
        self.options = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
            "clip_norm": math.inf,
            "maximize": False,
            "scale": "none",
        } | options
        raw = kind is ps.optim.PathGradientAdam
        normalization = options.get("normalization", "none" if raw else "refreshed")
        self.metric = PlainMetric(case, model, {"normalization": normalization} | options)
        self.t, self.m, self.v, self.largest = 0, {}, {}, {}

    @torch.no_grad()
    def step(self):
        options, metric = self.options, self.metric.advance()
        beta1, beta2 = options["betas"]
        self.t += 1
        sign = -1 if options["maximize"] else 1
        h = {
            name: (sign * p.grad / metric[name].sqrt()).nan_to_num(0.0)
            for name, p in self.model.named_parameters()
        }
        shrink = min(
            1.0, options["clip_norm"] / math.sqrt(sum(value.square().sum() for value in h.values()))
        )
        if options["scale"] == "gradient":
            gauge = self.metric.gauge
            gradients = [p.grad / gauge[name] for name, p in self.model.named_parameters()]
            directions = [(h[n] / metric[n].sqrt()).nan_to_num(0.0) * r for n, r in gauge.items()]
            shrink *= norm(gradients) / norm(directions)
        for name, p in self.model.named_parameters():
            root = metric[name].sqrt()
            g = shrink * h[name]
            if self.kind is ps.optim.PathGradientAdam:
                g = (g / root).nan_to_num(0.0)
            self.m[name] = beta1 * self.m.get(name, 0.0) + (1 - beta1) * g
            self.v[name] = beta2 * self.v.get(name, 0.0) + (1 - beta2) * g**2
            self.largest[name] = torch.maximum(self.largest.get(name, self.v[name]), self.v[name])
            v = self.largest[name] if options["amsgrad"] else self.v[name]
            d = (self.m[name] / (1 - beta1**self.t)) / (
                (v / (1 - beta2**self.t)).sqrt() + options["eps"]
            )
            if self.kind is ps.optim.PathAdam:
                d = (d / root).nan_to_num(0.0, posinf=0.0, neginf=0.0)
            p.copy_((1 - options["lr"] * options["weight_decay"]) * p - options["lr"] * d)


SHARED = {
    "default": {},
    "betas": {"betas": (0.5, 0.8)},
    "eps": {"eps": 0.1},
    "weight decay": {"weight_decay": 0.3},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.5)},
    "clipped": {"clip_norm": 0.02, "eps": 1e-2},
    "stale": {"refresh_every": 3},
    "second term": {"second_term": True},
    "damped": {"damping": 0.5},
    "maximize": {"maximize": True},
}
OPTIONS = [
    *((ps.optim.PathAdam, chosen, options) for chosen, options in SHARED.items()),
    *((ps.optim.PathGradientAdam, chosen, options) for chosen, options in SHARED.items()),
    (ps.optim.PathAdam, "undamped", {"damping": 0.0}),
    (ps.optim.PathAdam, "raw", {"normalization": "none"}),
    (ps.optim.PathAdam, "frozen", {"normalization": "frozen", "eps": 0.1}),
    (ps.optim.PathAdam, "power 0", {"power": 0.0}),
    (ps.optim.PathAdam, "power 0.5", {"power": 0.5}),
    (ps.optim.PathAdam, "power 1.5 raw", {"power": 1.5, "normalization": "none"}),
    (
        ps.optim.PathAdam,
        "power 0.5, damped and stale",
        {"power": 0.5, "damping": 0.1, "refresh_every": 2},
    ),
    (ps.optim.PathGradientAdam, "frozen", {"normalization": "frozen", "eps": 0.1}),
    (ps.optim.PathGradientAdam, "refreshed", {"normalization": "refreshed", "eps": 0.1}),
    (ps.optim.PathGradientAdam, "scaled", {"scale": "gradient"}),
    (ps.optim.PathGradientAdam, "scaled, eps", {"scale": "gradient", "eps": 0.1}),
    (
        ps.optim.PathGradientAdam,
        "scaled on the weights",
        {"scale": "gradient", "frame": "weights", "eps": 0.1},
    ),
    (
        ps.optim.PathGradientAdam,
        "scaled, clipped",
        {"scale": "gradient", "clip_norm": 0.02, "eps": 1e-2},
    ),
]
IDS = [f"{kind.__name__} {chosen}" for kind, chosen, _ in OPTIONS]


def train(rule, model, case, steps=5):
    for step in range(steps):
        model.zero_grad()
        case.loss(call(model, case.example(4, torch.float64, seed=step))).backward()
        rule.step()
    return {name: p.detach() for name, p in model.named_parameters()}


EVERYWHERE = ("PathAdam default", "PathGradientAdam default")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("chosen", "name"), in_turn(IDS, ("mlp", "rnn", "tied characters"), everywhere=EVERYWHERE)
)
def test_option_is_the_rule_written_out(chosen, name):
    case, (kind, _, options) = BY_NAME[name], OPTIONS[IDS.index(chosen)]
    options = {"lr": 0.01} | options
    (ours, network), theirs = traced(case, torch.float64), case.model(torch.float64)
    optimizer = kind(ours.parameters(), network, **options)
    expected = train(Plain(kind, case, theirs, **options), theirs, case)
    assert_close(train(optimizer, ours, case), expected, rtol=1e-8, atol=1e-10)


def test_every_option_has_an_effect():
    """Otherwise the comparison above could be one of two rules that both ignore the option."""
    case = BY_NAME["rnn"]
    ends = []
    for kind, _, options in OPTIONS:
        model, network = traced(case, torch.float64)
        end = train(kind(model.parameters(), network, **({"lr": 0.01} | options)), model, case)
        ends.append(torch.cat([p.flatten() for p in end.values()]))
    same = [
        (IDS[i], IDS[j])
        for i in range(len(ends))
        for j in range(i)
        if torch.allclose(ends[i], ends[j], rtol=1e-7, atol=1e-9)
    ]
    assert same == []


# --- where they meet Adam -------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_without_freedom_it_is_adamw(amsgrad):
    """One linear layer has no unit to rescale, and its kappa is 1."""
    case = BY_NAME["rnn"]
    models = [nn.Linear(3, 4).double()]
    models.append(copy.deepcopy(models[0]))
    options = {
        "lr": 0.01,
        "betas": (0.8, 0.9),
        "eps": 1e-3,
        "weight_decay": 0.1,
        "amsgrad": amsgrad,
    }
    ours = ps.optim.PathAdam(
        models[0].parameters(),
        ps.trace(models[0], torch.zeros(1, 3).double()),
        damping=0.0,
        **options,
    )
    theirs = torch.optim.AdamW(models[1].parameters(), **options)
    for step in range(6):
        x = torch.randn(5, 3, dtype=torch.float64) * (6 - step)
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            case.loss(model(x)).backward()
            optimizer.step()
    assert_close(list(models[0].parameters()), list(models[1].parameters()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp", "rnn", "small resnet"])
def test_power_zero_is_adam_after_balancing_once(name):
    case = BY_NAME[name]
    ours, theirs = case.model(torch.float64), case.model(torch.float64)
    ps.rescaling.random_rescale_(trace(case, ours), generator=torch.Generator().manual_seed(3))
    balanced = trace(case, theirs)
    ps.rescaling.balance_(balanced)
    optimizer = ps.optim.PathAdam(ours.parameters(), trace(case, ours), lr=0.01, power=0.0)
    train(optimizer, ours, case)
    train(torch.optim.Adam(theirs.parameters(), lr=0.01), theirs, case)
    example = case.example(8, torch.float64, seed=50)
    assert_close(
        case.picked(call(ours, example)), case.picked(call(theirs, example)), rtol=1e-8, atol=1e-10
    )


def test_path_gradient_adam_is_adam_fed_with_the_path_gradient():
    case = BY_NAME["stacked rnn"]
    ours, theirs = case.model(torch.float64), case.model(torch.float64)
    optimizer = ps.optim.PathGradientAdam(
        ours.parameters(), trace(case, ours), lr=0.01, weight_decay=0.1
    )
    network = trace(case, theirs)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)

    class Fed:
        def step(self):
            kappa = ps.paths.kappa(network)
            for name, p in theirs.named_parameters():
                p.grad = p.grad / kappa[name]
            adam.step()

    assert_close(train(optimizer, ours, case), train(Fed(), theirs, case), rtol=1e-9, atol=1e-12)


def test_path_gradient_adam_is_fed_the_path_gradient_of_weights_far_away_too():
    """eps is added to its size as it comes, though kappa is computed in a member near balance."""
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    network = ps.trace(model, x)
    ps.rescaling.rescale_(network, 2.0 ** torch.tensor([20.0, -20.0, 20.0, -20.0]))
    before, kappa = copy.deepcopy(dict(network.parameters)), ps.paths.kappa(network)
    optimizer = ps.optim.PathGradientAdam(model.parameters(), network, lr=1.0, eps=1.0)
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    for name, p in network.parameters.items():
        d = p.grad.double() / kappa[name].double()
        expected = before[name].double() - d / (d.abs() + 1)
        assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_constant_kappa_is_cancelled_by_the_second_moment():
    """Why PathGradientAdam is not invariant: but for eps, its first step is Adam's, whatever the scales."""
    case = BY_NAME["mlp"]
    ours, theirs = case.model(torch.float64), case.model(torch.float64)
    for model in (ours, theirs):
        ps.rescaling.random_rescale_(trace(case, model), generator=torch.Generator().manual_seed(3))
    optimizer = ps.optim.PathGradientAdam(ours.parameters(), trace(case, ours), lr=0.01, eps=1e-30)
    path = train(optimizer, ours, case, steps=1)
    plain = train(torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-30), theirs, case, steps=1)
    assert_close(path, plain, rtol=1e-9, atol=1e-12)


class Growing(ps.metrics.Metric):
    """kappa that is ten times as large at each step as at the one before."""

    step = 0

    def values(self, network, names):
        del names
        self.step += 1
        return {name: value * 10.0**self.step for name, value in ps.paths.kappa(network).items()}


def test_the_scale_of_the_gradient_takes_out_how_kappa_grows():
    case = BY_NAME["rnn"]
    ends = {}
    for scale in ("none", "gradient"):
        for kind in (Growing, ps.metrics.Path):
            model, network = traced(case, torch.float64)
            metric = kind(normalization="none", refresh_every=1)
            rule = ps.optim.PathGradientAdam(
                model.parameters(),
                network,
                betas=(0.0, 0.999),
                eps=1e-30,
                scale=scale,
                metric=metric,
            )
            end = train(rule, model, case, steps=4)
            ends[scale, kind] = torch.cat([p.flatten() for p in end.values()])
    assert_close(
        ends["gradient", Growing], ends["gradient", ps.metrics.Path], rtol=1e-9, atol=1e-12
    )
    # otherwise steps die: step t has 10^-t sqrt(t) of the length, as v remembers the path gradients
    # of a smaller kappa
    start = torch.cat([p.detach().flatten() for p in case.model(torch.float64).parameters()])
    moved = {kind: (ends["none", kind] - start).norm() for kind in (Growing, ps.metrics.Path)}
    assert moved[Growing] < 0.6 * moved[ps.metrics.Path]


@pytest.mark.parametrize("frame", ["balanced", "weights"])
def test_the_first_direction_has_the_length_of_the_gradient_in_the_frame(frame):
    """In the balanced frame it is the same number in every member; on the weights it is the plain norm."""
    case, lengths = BY_NAME["mlp"], []
    for exponent in (0, 3):
        model, network = traced(case, torch.float64)
        scales = 2.0 ** (exponent * torch.linspace(-2, 2, network.num_classes).round())
        ps.rescaling.rescale_(network, scales)
        rule = ps.optim.PathGradientAdam(
            model.parameters(), network, betas=(0.0, 0.0), scale="gradient", frame=frame
        )
        case.loss(call(model, case.example(4, torch.float64))).backward()
        rule.step()
        gradients = {name: p.grad for name, p in network.parameters.items()}
        d = {name: rule.state[p]["exp_avg"] for name, p in network.parameters.items()}
        kappa = ps.paths.kappa(network)
        assert kappa.keys() == d.keys()
        if frame == "weights":
            assert norm(d.values()) == pytest.approx(norm(gradients.values()), rel=1e-12)
        gauge = {name: rule.metric.gauge(name) for name in d}
        lengths.append(norm(gauge[name].into(value) for name, value in d.items()))
    assert (lengths[0] == lengths[1]) is (frame == "balanced")


def test_the_scale_does_not_depend_on_how_weights_lie_in_memory():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2)).double()
        x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
        network = ps.trace(model.to(memory_format=layout), x)
        rule = ps.optim.PathGradientAdam(
            model.parameters(), network, lr=0.1, eps=1.0, scale="gradient"
        )
        model(x).square().mean().backward()
        for p in model.parameters():
            p.grad = p.grad.contiguous(memory_format=layout) if p.dim() == 4 else p.grad
        rule.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(*ends, rtol=1e-12, atol=0)


def test_an_outside_parameter_and_a_gradient_of_zero_keep_their_steps():
    torch.manual_seed(2)
    model, outside = mlp(3, 4, 2).double(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    x = torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    rule = ps.optim.PathGradientAdam(
        [*model.parameters(), outside], network, lr=0.1, eps=1.0, scale="gradient"
    )
    (model(x).square().mean() * 0 + (outside * torch.tensor([1.0, -2.0, 3.0])).sum()).backward()
    before = copy.deepcopy(model.state_dict())
    rule.step()
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    g = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert_close(outside.detach(), 1 - 0.1 * g / (g.abs() + 1), rtol=1e-12, atol=0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "options",
    [
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -1.0},
        {"clip_norm": 0.0},
        {"refresh_every": 0},
        {"damping": -1e-3},
        {"normalization": "sometimes"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [ps.optim.PathAdam, ps.optim.PathGradientAdam])
def test_impossible_options_are_refused(kind, options):
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(model.parameters(), network, **options)


def test_an_unknown_scale_is_refused():
    model = mlp(3, 4, 2)
    with pytest.raises(ValueError, match="scale must be 'none' or 'gradient', got 'kappa'"):
        ps.optim.PathGradientAdam(
            model.parameters(), ps.trace(model, torch.randn(2, 3)), scale="kappa"
        )


def test_a_negative_power_is_refused():
    model = mlp(3, 4, 2)
    with pytest.raises(ValueError, match="power"):
        ps.optim.PathAdam(model.parameters(), ps.trace(model, torch.randn(2, 3)), power=-0.5)
