"""PathMuon: every option against torch's Muon in coordinates, and on weights where there is nothing to rescale."""

import itertools
import math

import pytest
import torch
from plain_metric import PlainMetric
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, in_turn, mlp, traced
from pathspace.optim.rules import division, newton_schulz
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.newton_schulz import orthogonalized, orthogonalized_all


class Plain:
    """PathMuon, one obvious line after the other; torch's Muon trains a matrix of its own from G."""

    def __init__(self, case, model, **options):
        self.model = model
        self.options = {
            "momentum": 0.95,
            "nesterov": True,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "adjust_lr": "match_rms_adamw",
            "ns_steps": 5,
            "clip_norm": math.inf,
            "maximize": False,
        } | options
        self.metric = PlainMetric(case, model, options)
        self.t, self.rules, self.m, self.v = 0, {}, {}, {}

    def matrix_direction(self, name, G):
        options = self.options
        if name not in self.rules:
            matrix = nn.Parameter(torch.zeros_like(G))
            self.rules[name] = (
                matrix,
                torch.optim.Muon(
                    [matrix],
                    lr=1.0,
                    weight_decay=0.0,
                    momentum=options["momentum"],
                    nesterov=options["nesterov"],
                    ns_steps=options["ns_steps"],
                    adjust_lr_fn=options["adjust_lr"],
                ),
            )
        matrix, rule = self.rules[name]
        before, matrix.grad = matrix.detach().clone(), G
        rule.step()
        return before - matrix

    @torch.no_grad()
    def step(self):
        options, metric = self.options, self.metric.advance()
        parameters = dict(self.model.named_parameters())
        beta1, beta2 = options["betas"]
        self.t += 1
        sign = -1 if options["maximize"] else 1
        h = {
            name: (sign * p.grad / metric[name].sqrt()).nan_to_num(0.0)
            for name, p in parameters.items()
        }
        shrink = min(
            1.0, options["clip_norm"] / math.sqrt(sum(value.square().sum() for value in h.values()))
        )
        for name, p in parameters.items():
            g = shrink * h[name]
            if p.dim() > 1 and name not in options.get("apart", ()):
                d = self.matrix_direction(name, g.reshape(len(g), -1)).reshape(g.shape)
            else:
                m = self.m[name] = beta1 * self.m.get(name, 0.0) + (1 - beta1) * g
                v = self.v[name] = beta2 * self.v.get(name, 0.0) + (1 - beta2) * g**2
                d = m / (1 - beta1**self.t) / ((v / (1 - beta2**self.t)).sqrt() + options["eps"])
            d = (d / metric[name].sqrt()).nan_to_num(0.0, posinf=0.0, neginf=0.0)
            p.copy_((1 - options["lr"] * options["weight_decay"]) * p - options["lr"] * d)


OPTIONS = {
    "default": {},
    "momentum": {"momentum": 0.5},
    "without nesterov": {"nesterov": False},
    "betas": {"betas": (0.5, 0.8)},
    "eps": {"eps": 0.1},
    "weight decay": {"weight_decay": 0.3},
    "original size": {"adjust_lr": "original"},
    "fewer iterations": {"ns_steps": 2},
    "clipped": {"clip_norm": 0.02},
    "stale, raw": {"refresh_every": 3, "normalization": "none"},
    "frozen": {"normalization": "frozen"},
    "second term": {"second_term": True},
    "damped": {"damping": 0.5},
    "undamped": {"damping": 0.0},
    "power": {"power": 0.5},
    "maximize": {"maximize": True},
}
CASES = ["mlp", "rnn", "small resnet"]


def train(rule, model, case, steps=5):
    for step in range(steps):
        model.zero_grad()
        # long gradients, so that one step of clipping tells in the momentum
        (
            10.0 ** (step % 2) * case.loss(call(model, case.example(8, torch.float64, seed=step)))
        ).backward()
        rule.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (o, "rnn" if (o, c) == ("second term", "small resnet") else c)
        for o, c in in_turn(OPTIONS, CASES)
    ],
)
def test_option_is_the_rule_written_out(chosen, name):
    case = BY_NAME[name]
    options = {"lr": 0.01} | OPTIONS[chosen]
    (ours, network), theirs = traced(case, torch.float64), case.model(torch.float64)
    optimizer = ps.optim.PathMuon(ours.parameters(), network, **options)
    expected = train(Plain(case, theirs, **options), theirs, case)
    # a last digit may tip a rounding to bfloat16
    assert_close(train(optimizer, ours, case), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_group_may_leave_its_matrices_to_adamw(name):
    case = BY_NAME[name]
    (ours, network), theirs = traced(case, torch.float64), case.model(torch.float64)
    inside, ends = {n: p for n, p in ours.named_parameters() if p.dim() > 1}, []
    for end in (next(iter(inside)), next(reversed(inside))):
        ends.append(inside.pop(end))
    apart = [n for n, p in ours.named_parameters() if any(p is end for end in ends)]
    others = [p for n, p in ours.named_parameters() if n not in apart]
    groups = [{"params": others}, {"params": ends, "use_muon": False}]
    optimizer = ps.optim.PathMuon(groups, network, lr=0.01)
    expected = train(Plain(case, theirs, lr=0.01, apart=apart), theirs, case)
    assert_close(train(optimizer, ours, case), expected, rtol=0, atol=2e-4)


def test_every_option_has_an_effect():
    case = BY_NAME["rnn"]
    ends = []
    for options in OPTIONS.values():
        model, network = traced(case, torch.float64)
        optimizer = ps.optim.PathMuon(model.parameters(), network, **({"lr": 0.01} | options))
        ends.append(torch.cat([p.flatten() for p in train(optimizer, model, case).values()]))
    pairs = itertools.combinations(range(len(ends)), 2)
    assert [(i, j) for i, j in pairs if torch.allclose(ends[i], ends[j], rtol=0, atol=1e-4)] == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [(4, 7), (7, 4)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_without_freedom_it_is_torch_muon(size, adjust, nesterov):
    """One linear layer has no unit to rescale, and its kappa is 1. In bfloat16, as published."""
    n, m = size
    case = BY_NAME["rnn"]
    ours, theirs = nn.Linear(m, n, bias=False), nn.Linear(m, n, bias=False)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.01, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    network = ps.trace(ours, torch.zeros(1, m))
    optimizer = ps.optim.PathMuon(
        ours.parameters(), network, adjust_lr=adjust, damping=0.0, **options
    )
    plain = torch.optim.Muon(theirs.parameters(), adjust_lr_fn=adjust, **options)
    for _ in range(6):
        x = torch.randn(9, m)
        for model, rule in ((ours, optimizer), (theirs, plain)):
            model.zero_grad()
            case.loss(model(x)).backward()
            rule.step()
    assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"adjust_lr": "never"},
        {"ns_steps": 0},
        {"use_muon": "no"},
        {"power": -1.0},
        {"damping": -1.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    model = mlp(3, 4, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        ps.optim.PathMuon(model.parameters(), ps.trace(model, torch.zeros(1, 3)), **options)


def test_a_group_says_by_true_or_false_who_steps_its_matrices():
    model = mlp(3, 4, 2)
    groups = [{"params": model.parameters(), "use_muon": None}]
    with pytest.raises(ValueError, match="use_muon must be True or False, got None"):
        ps.optim.PathMuon(groups, ps.trace(model, torch.zeros(1, 3)))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"weight_decay": 0.1, "adjust_lr": "original"}]
)
def test_matrices_of_one_shape_take_the_steps_of_torch(options):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (6, 4), (3, 5), (3, 5), (4, 4)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    others = [nn.Parameter(weight.detach().clone()) for weight in weights]
    options = {"adjust_lr": "match_rms_adamw", "weight_decay": 0.0, **options}
    batched = MuonAdamW(weights, lr=0.02, **options)
    options["adjust_lr_fn"] = options.pop("adjust_lr")
    plain = torch.optim.Muon(others, lr=0.02, **options)
    for _ in range(3):
        for weight, other in zip(weights, others, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            other.grad = weight.grad.clone()
        batched.step()
        plain.step()
    for weight, other in zip(weights, others, strict=True):
        # bfloat16 has eight digits, and products of a batch may be summed in another order
        assert_close(weight, other, rtol=0, atol=0.02 * 0.05)
        momentum = batched.state[weight]["momentum_buffer"]
        assert_close(momentum, plain.state[other]["momentum_buffer"], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 6), (300, 260)])
def test_a_matrix_alone_is_orthogonalized_as_by_torch(shape):
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    gradient = torch.randn(shape, dtype=torch.float64)
    weight.grad = gradient
    options = {"momentum": 0.0, "weight_decay": 0.0, "ns_steps": 4}
    torch.optim.Muon([weight], lr=1.0, **options).step()
    (alone,) = orthogonalized_all([gradient], [4])
    size = math.sqrt(max(1, shape[0] / shape[1]))
    assert_close(-weight, alone * size, rtol=1e-12, atol=1e-12)


def test_one_call_orthogonalizes_all_matrices_of_a_shape(monkeypatch):
    calls = []

    def counted(matrices, count):
        calls.append(tuple(matrices.shape))
        return orthogonalized(matrices, count)

    monkeypatch.setattr(newton_schulz, "orthogonalized", counted)
    matrices = [torch.randn(shape) for shape in [(3, 5), (6, 4), (3, 5), (300, 280), (300, 280)]]
    results = orthogonalized_all(matrices, [5, 5, 5, 1, 1])
    # on a CPU large matrices gain nothing by it
    assert sorted(calls) == [(2, 3, 5), (6, 4), (300, 280), (300, 280)]
    assert [result.shape for result in results] == [matrix.shape for matrix in matrices]


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_every_type_are_told_apart(kind):
    one = torch.ones(3, 3, dtype=kind)
    other = one.clone()
    other[1, 2] += 2 * torch.finfo(kind).eps
    assert division._sum_of_bits(one) == division._sum_of_bits(one.clone())
    assert division._sum_of_bits(one) != division._sum_of_bits(other)
