"""Parameters that are several in one train as these do: a fused layer, and its twin with a layer for each block."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps

HEADS, WIDTH = 2, 8


def heads(t):
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q, k, v):
    return (
        functional.scaled_dot_product_attention(heads(q), heads(k), heads(v))
        .transpose(1, 2)
        .flatten(2)
    )


class Attention(nn.Module):
    """nn.MultiheadAttention, of one sequence or of two."""

    def __init__(self, crossed=False):
        super().__init__()
        self.read, self.crossed = nn.Linear(5, WIDTH), crossed
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        nn.init.normal_(self.mha.in_proj_bias, std=0.3)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.read(x).relu()
        other = h.flip(1) if self.crossed else h
        return self.out(self.mha(h, other, other, need_weights=False)[0].mean(1))


class AttentionTwin(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.crossed = model.crossed
        self.read, self.out, self.proj = (
            copy.deepcopy(m) for m in (model.read, model.out, model.mha.out_proj)
        )
        self.proj = linear(self.proj.weight, self.proj.bias)
        weights, biases = model.mha.in_proj_weight.chunk(3), model.mha.in_proj_bias.chunk(3)
        self.blocks = nn.ModuleList(map(linear, weights, biases))

    def forward(self, x):
        h = self.read(x).relu()
        other = h.flip(1) if self.crossed else h
        q, k, v = (layer(t) for layer, t in zip(self.blocks, (h, other, other), strict=True))
        return self.out(self.proj(attend(q, k, v)).mean(1))


class Fused(nn.Module):
    """One linear layer, whose result is cut into blocks of these sizes."""

    sizes = (WIDTH, WIDTH, WIDTH)

    def __init__(self):
        super().__init__()
        self.read, self.fused = nn.Linear(5, WIDTH), nn.Linear(WIDTH, sum(self.sizes))
        self.out = nn.Linear(WIDTH, 3)

    def parts(self, h):
        return self.fused(h).split(self.sizes, -1)

    def forward(self, x):
        return self.out(self.join(*self.parts(self.read(x).relu())).mean(1))

    def join(self, q, k, v):
        return attend(q, k, v)


class Reshaped(Fused):
    """As timm writes it."""

    def parts(self, h):
        q, k, v = self.fused(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 1, 3, 4).unbind(0)
        return q.flatten(-2), k.flatten(-2), v.flatten(-2)


class Gated(Fused):
    """Blocks of other sizes: a gate, and two layers that have nothing to do with each other."""

    sizes = (WIDTH, WIDTH, 4)

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, WIDTH)

    def join(self, a, b, c):
        return a.relu() * b + self.last(c.relu())


class FusedTwin(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = copy.deepcopy(model)
        weights, biases = (t.split(model.sizes) for t in (model.fused.weight, model.fused.bias))
        self.blocks = nn.ModuleList(map(linear, weights, biases))
        self.inner.fused = nn.Identity()

    def forward(self, x):
        h = self.inner.read(x).relu()
        return self.inner.out(self.inner.join(*(layer(h) for layer in self.blocks)).mean(1))


def linear(weight, bias):
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = (nn.Parameter(t.detach().clone()) for t in (weight, bias))
    return layer


MODELS = {
    "attention": (Attention, AttentionTwin),
    "attention of two sequences": (lambda: Attention(crossed=True), AttentionTwin),
    "fused": (Fused, FusedTwin),
    "reshaped": (Reshaped, FusedTwin),
    "gated": (Gated, FusedTwin),
}
RULES = {
    "PathMuon": {"lr": 0.02, "weight_decay": 0.1},
    "PathMuon original": {"lr": 0.02, "adjust_lr": "original", "nesterov": False},
    "PathSGD": {"lr": 0.05, "momentum": 0.5},
    "PathAdam": {"lr": 0.01, "clip_norm": 0.1},
    "PathMuon frozen": {"lr": 0.02, "normalization": "frozen", "damping": 0.01},
}


def made(name, dtype=torch.float64):
    torch.manual_seed(3)
    make, twin = MODELS[name]
    model = make().to(dtype)
    return model, twin(model).to(dtype), torch.randn(6, 4, 5, dtype=dtype), torch.randint(3, (6,))


def optimizer_of(rule, model, x):
    kind = getattr(ps.optim, rule.split()[0])
    return kind(model.parameters(), ps.trace(model, x), **RULES[rule])


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def fused_weights(model):
    """The weight and bias of the fused layer."""
    return (
        (model.mha.in_proj_weight, model.mha.in_proj_bias)
        if isinstance(model, Attention)
        else (model.fused.weight, model.fused.bias)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_layer_trains_as_its_parts(name, rule):
    model, twin, x, y = made(name)
    optimizers = [optimizer_of(rule, m, x) for m in (model, twin)]
    for _ in range(12):
        step(model, optimizers[0], x, y)
        step(twin, optimizers[1], x, y)
        parts = [torch.cat([getattr(b, end) for b in twin.blocks]) for end in ("weight", "bias")]
        # torch's Muon iterates in bfloat16
        tight = 1e-6 if "Muon" in rule else 1e-10
        for fused, part in zip(fused_weights(model), parts, strict=True):
            assert_close(fused, part, rtol=tight, atol=tight)


def test_one_step_of_muon_is_that_of_the_parts():
    model, twin, x, y = made("attention")
    for m in (model, twin):
        step(m, optimizer_of("PathMuon", m, x), x, y)
    assert_close(
        model.mha.in_proj_weight, torch.cat([b.weight for b in twin.blocks]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["PathMuon", "PathSGD"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_invariantly(name, rule):
    model, _, x, y = made(name, torch.float32)
    kind = getattr(ps.optim, rule)
    report = ps.rescaling.check_invariance(
        model,
        x,
        lambda out: functional.cross_entropy(out, y),
        lambda model, network: kind(model.parameters(), network, lr=0.02),
        steps=15,
    )
    assert report.passed, report


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["PathMuon", "PathSGD", "PathMuon frozen"])
def test_resumes_exactly(rule, tmp_path):
    model, _, x, y = made("attention", torch.float32)
    optimizer = optimizer_of(rule, model, x)
    for _ in range(11):
        step(model, optimizer, x, y)
    others = []
    for way in ("saved", "copied", "through a file", "by the tools"):
        other, following = copy.deepcopy((model, optimizer))
        if way != "copied":
            following = optimizer_of(rule, other, x)
        if way == "saved":
            following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if way == "through a file":
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            following.load_state_dict(torch.load(tmp_path / "state.pt"))
        if way == "by the tools":
            set_optimizer_state_dict(
                other, following, copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            )
        others.append((other, following))
    for _ in range(11):
        step(model, optimizer, x, y)
        for other, following in others:
            step(other, following, x, y)
    for other, _ in others:
        assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


class Mixed(Fused):
    """Rows that are used together in one place are one matrix everywhere."""

    def forward(self, x):
        h = self.fused(self.read(x).relu())
        return (
            self.out(self.join(*h.split(self.sizes, -1)).mean(1))
            + h.relu().sum((1, 2), keepdim=False)[:, None]
        )


class Woven(Fused):
    """Queries, keys and values lie in turn for each head, as in GPT-NeoX."""

    def parts(self, h):
        q, k, v = self.fused(h).unflatten(-1, (HEADS, 3, -1)).unbind(-2)
        return q.flatten(-2), k.flatten(-2), v.flatten(-2)


class Turned(Fused):
    """A rotary embedding of one head, whose halves are first multiplied apart."""

    sizes = (4, 4)

    def join(self, a, b):
        angles = torch.linspace(0, 1, 4)
        turned = torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
        )
        return turned.relu()


@pytest.mark.parametrize("kind", [Mixed, Woven, Turned])
def test_rows_that_are_used_together_are_one_matrix(kind):
    model = kind()
    assert not ps.trace(model, torch.zeros(2, 4, 5)).row_blocks
