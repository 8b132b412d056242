"""Attention inside the geometry: values and output projections, queries and keys, in blocks as they are in use.

The blocks are written out with random weights: GPT-2 (LayerNorm, GELU, tied embeddings), Llama
(RMSNorm, rotary embeddings, grouped heads, SwiGLU), ViT (patches, a class token),
`nn.TransformerEncoderLayer`.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pathspace as ps
from cases import in_turn
from pathspace.network.written_out import multi_head_attention

WIDTH, HEADS, STEPS, WORDS = 8, 2, 4, 5
SIZE = WIDTH // HEADS


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def in_one_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * SIZE**-0.5
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)


class GPT2(nn.Module):
    def __init__(self, attention=in_one_call):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.before, self.between, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self._attention = attention

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (heads(t) for t in self.qkv(self.before(x)).split(WIDTH, 2))
        x = x + self.out(joined(self._attention(q, k, v)))
        x = x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))
        return self.after(x) @ self.words.weight.t()


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] / 10 ** torch.arange(0, 1, 2 / x.shape[-1])
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """One group of two query heads."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.before, self.between, self.after = (RMSNorm() for _ in range(3))
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, WIDTH, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        h = self.before(x)
        q, k, v = rotated(heads(self.q(h))), rotated(heads(self.k(h), 1)), heads(self.v(h), 1)
        k, v = (t.expand(-1, HEADS, -1, -1) for t in (k, v))
        x = x + self.o(joined(in_one_call(q, k, v)))
        h = self.between(x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return self.head(self.after(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, 2)
        self.token, self.places = (nn.Parameter(torch.zeros(1, n, WIDTH)) for n in (1, 5))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.head = (
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        h = self.before(x)
        q, k, v = (heads(f(h)) for f in (self.q, self.k, self.v))
        x = x + self.out(joined((q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1) @ v))
        x = x + self.down(functional.gelu(self.up(self.between(x))))
        return self.head(x[:, 0])


def encoder_layer():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(3, WIDTH), layer, nn.Linear(WIDTH, 2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        h = self.start(x)
        return self.end(self.layer(h, h.flip(1)))


class SeveralHeads(nn.Module):
    """`nn.MultiheadAttention` with a mask, by default with weights that nobody reads."""

    def __init__(self, learned=False, **options):
        super().__init__()
        self.start, self.end = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.attention, self.weights = nn.MultiheadAttention(WIDTH, HEADS, **options), True
        self.mask = nn.Parameter(torch.zeros(STEPS, STEPS)) if learned else None

    def forward(self, x, padding=None):
        h = self.start(x).transpose(0, 1)
        mask = (
            torch.ones(len(h), len(h), dtype=torch.bool).triu(1) if self.mask is None else self.mask
        )
        h, _ = self.attention(
            h, h, h, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights
        )
        return self.end(h.transpose(0, 1))


class Relative(nn.Module):
    """A bias of the scores for every head and distance, as T5 learns it, of the scale of the scores, which is 1."""

    def __init__(self, attention=functional.scaled_dot_product_attention):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(3, WIDTH) for _ in range(4))
        self.out, self.table = nn.Linear(WIDTH, 2), nn.Embedding(2 * STEPS, HEADS)
        self._attention = attention

    def forward(self, x):
        places = torch.arange(x.shape[1])
        bias = self.table(places[:, None] - places + STEPS).permute(2, 0, 1)[None]
        q, k, v = (heads(f(x)) for f in (self.q, self.k, self.v))
        return self.out(joined(self._attention(q, k, v, bias)))


def tokens():
    return torch.randint(WORDS, (3, STEPS), generator=torch.Generator().manual_seed(1))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


QK, V, NORM = WIDTH, WIDTH, WIDTH
BLOCKS = {  # the model, its input, and its unit classes
    # gains of the norms in front of attention and MLP; the last one stands before the tied table,
    # which is fixed
    "GPT-2": (GPT2, tokens, 2 * NORM + QK + V),
    "GPT-2, attention by hand": (lambda: GPT2(by_hand), tokens, 2 * NORM + QK + V),
    "GPT-2, attention by einsum": (lambda: GPT2(by_einsum), tokens, 2 * NORM + QK + V),
    # keys of one group, by pairs of dimensions; values of one group; the linear side of the gate
    "Llama": (Llama, tokens, 3 * NORM + SIZE // 2 + SIZE + 12),
    "ViT": (ViT, lambda: normal(3, 1, 4, 4), 2 * NORM + QK + V),
    # of its norms, which stand behind the sums, the last one has nothing beside it
    "encoder layer": (encoder_layer, lambda: normal(3, STEPS, 3), QK + V + 12 + NORM),
    "decoder layer": (DecoderLayer, lambda: normal(3, STEPS, 3), 2 * (QK + V) + 12 + NORM),
    # what enters it and what leaves it are free, too
    "several heads in one call": (SeveralHeads, lambda: normal(3, STEPS, 3), QK + V + 2 * WIDTH),
    "learned mask": (
        lambda: SeveralHeads(learned=True),
        lambda: normal(3, STEPS, 3),
        QK + V + 2 * WIDTH,
    ),
    "learned key": (
        lambda: SeveralHeads(add_bias_kv=True),
        lambda: normal(3, STEPS, 3),
        QK + V + 2 * WIDTH,
    ),
    # the scores of a head and pair of steps are added to a table of their distances, looked up by
    # inputs
    "relative positions": (Relative, lambda: normal(3, STEPS, 3), QK + V),
}


def made(name, dtype=torch.float64):
    build, example, classes = BLOCKS[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=dtype))
    x = example()
    return model, x.to(dtype) if x.is_floating_point() else x, classes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BLOCKS)
def test_finds_the_scales_of_attention(name):
    model, x, classes = made(name)
    assert ps.trace(model, x).num_classes == classes


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BLOCKS)
def test_rescaling_is_bitwise_invisible_and_kappa_follows_it(name):
    model, x, _ = made(name)
    network = ps.trace(model, x)

    def seen():
        data = [
            ps.paths.data_dependent_norm(network, x, alpha=alpha, statistic=statistic)
            for alpha, statistic in (
                (0.0, "second_moment"),
                (0.5, "second_moment"),
                (0.5, "covariance"),
            )
        ]
        return [model(x), ps.paths.squared_path_norm(network), *data]

    before = [t.detach().clone() for t in seen()]
    kappas = [ps.paths.kappa(network, second_term=second) for second in (False, True)]
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert bool((factors != 1).any())
    for then, now in zip(before, seen(), strict=True):
        assert torch.equal(then, now)
    for second, kappa in enumerate(kappas):
        for key, now in ps.paths.kappa(network, second_term=bool(second)).items():
            assert torch.equal(now * network.edge_factors(key, factors).square(), kappa[key])


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"kdim": WIDTH, "vdim": WIDTH}, {"dropout": 0.1}, {"learned": True}, {"add_bias_kv": True},
    {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True, "learned": True},
])  # fmt: skip
@pytest.mark.parametrize("weights", [True, False])
def test_several_heads_in_one_call_are_those_written_out(options, weights):
    """The library's own way to write it gives what torch's does."""
    torch.manual_seed(0)
    model = SeveralHeads(**options).double().eval()
    model.weights = weights
    x, padding = normal(3, STEPS, 3).double(), torch.zeros(3, STEPS, dtype=torch.bool)
    padding[1, 2:] = True
    if options.get("learned"):  # a mask of numbers, as the other one then
        padding = torch.zeros(3, STEPS, dtype=torch.float64).masked_fill(padding, -math.inf)
    attention, h = model.attention, model.start(x).transpose(0, 1)
    seen = {}

    def note(query, key, value, *args, **kwargs):
        seen["call"] = ((query, key, value, *args), kwargs)
        return torch_own(query, key, value, *args, **kwargs)

    torch_own = functional.multi_head_attention_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "multi_head_attention_forward", note)
        theirs = attention(
            h, h, h, key_padding_mask=padding, attn_mask=model.mask, need_weights=weights
        )
    args, kwargs = seen["call"]
    for ours, other in zip(multi_head_attention(*args, **kwargs), theirs, strict=True):
        assert (ours is None) == (other is None)
        if ours is not None:
            torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-14)
    network = ps.trace(model, (x, padding))
    assert network.num_classes == QK + V + 2 * WIDTH
    assert not network.outside


@pytest.mark.parametrize(
    ("large", "counted"), [(-math.inf, 0), (-1e9, 1), (torch.finfo(torch.float32).min, 1)]
)
@pytest.mark.parametrize("where", ["constant", "buffer", "part of a buffer"])
def test_a_mask_that_is_added_by_hand_keeps_the_path_norm_finite(large, counted, where):
    """Reference code of Llama adds it to the scores; the square of an infinity drowned all paths."""

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.fill = nn.Linear(3, 4), nn.Linear(3, 4), 0.0
            self.register_buffer("mask", torch.zeros(2 * STEPS, 2 * STEPS))

        def forward(self, x):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            mask = (
                torch.full((STEPS, STEPS), self.fill).triu(1) if where == "constant" else self.mask
            )
            return (scores + mask[:STEPS, :STEPS]).softmax(-1) @ x

    torch.manual_seed(0)
    model = Causal()
    plain = ps.paths.squared_path_norm(ps.trace(model, normal(1, STEPS, 3)))
    model.fill = large
    model.mask = torch.full((2 * STEPS if where.startswith("part") else STEPS,) * 2, large).triu(1)
    network = ps.trace(model, normal(1, STEPS, 3))
    assert network.num_classes == 4
    assert all(kappa.isfinite().all() for kappa in ps.paths.kappa(network).values())
    added = counted * STEPS * (STEPS - 1) / 2  # ones from the bias node
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(plain.item() + added)


def test_without_a_batch_it_is_a_cut():
    class Single(SeveralHeads):
        def forward(self, x):
            h = self.start(x)
            return self.end(self.attention(h, h, h)[0])

    network = ps.trace(Single(), normal(STEPS, 3), batch_dim=None)
    assert [cut.operation for cut in network.cuts] == ["multi_head_attention_forward"]
    assert "attention.in_proj_weight" in network.outside


def test_steps_that_come_first_are_no_batch():
    """As torch's layers have it by default."""
    first = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True)
    second = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0)
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 5, WIDTH)
    found = [ps.trace(layer, t) for layer, t in ((first, x), (second, x.transpose(0, 1)))]
    assert [network.call.batch_dim for network in found] == [0, 1]
    assert found[0].num_classes == found[1].num_classes
    torch.testing.assert_close(*map(ps.paths.kappa, found), rtol=1e-5, atol=0)
    with pytest.raises(
        ps.UntraceableError, match="dimension 0 of the example input cannot be the batch"
    ):
        ps.trace(second, x.transpose(0, 1), batch_dim=0)


def test_torchs_encoder_is_traced_in_evaluation_form_with_a_mask_of_padding():
    """Its fast path asks what the mask holds, which no trace knows."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    padding = torch.tensor([[False] * 4, [False] * 3 + [True]])
    example = {"src": torch.randn(2, 4, WIDTH), "src_key_padding_mask": padding}
    networks = [ps.trace(encoder.train(training), example) for training in (True, False)]
    assert repr(networks[0]) == repr(networks[1])
    assert networks[0].num_classes


def test_a_learned_mask_in_one_call_is_a_summand_of_the_scores():
    def by_hand(q, k, v, bias):
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v

    ours, x = Relative().double(), normal(3, STEPS, 3).double()
    theirs = Relative(by_hand).double()
    theirs.load_state_dict(ours.state_dict())
    networks = [ps.trace(model, x) for model in (ours, theirs)]
    for alpha in (0.0, 0.5, 1.0):
        for statistic in ("second_moment", "covariance"):
            one, other = (
                ps.paths.data_dependent_kappa(n, x, alpha=alpha, statistic=statistic)
                for n in networks
            )
            assert "table.weight" in one
            for name in other:
                torch.testing.assert_close(one[name], other[name], rtol=1e-11, atol=1e-14)
    one, other = (ps.paths.kappa(n, second_term=True) for n in networks)
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=1e-11, atol=1e-14)


def test_the_scale_of_scores_is_a_fixed_edge():
    """And one over the root of the size of a head where none is given."""

    def of_scale(scale):
        def attention(q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, scale=scale)

        torch.manual_seed(0)
        model = GPT2(attention).double()
        return ps.paths.kappa(ps.trace(model, torch.zeros(1, STEPS, dtype=torch.long)))[
            "qkv.weight"
        ]

    default, given, larger = (of_scale(scale) for scale in (None, SIZE**-0.5, 3 * SIZE**-0.5))
    torch.testing.assert_close(given, default, rtol=1e-13, atol=0)
    scores = slice(0, 2 * WIDTH)  # queries and keys lead to scores alone
    torch.testing.assert_close(larger[scores], 9 * default[scores], rtol=1e-12, atol=0)
    torch.testing.assert_close(larger[2 * WIDTH :], default[2 * WIDTH :], rtol=1e-12, atol=0)


def test_queries_and_keys_are_inverse_to_each_other():
    model, x, _ = made("ViT")
    network = ps.trace(model, x)
    targets = [network.edges[f"{key}.weight"].target.reshape(-1) for key in "qk"]
    assert bool((targets[0] > 0).all())
    assert torch.equal(targets[0], -targets[1])
    assert torch.equal(
        network.edges["v.weight"].target.reshape(-1), network.edges["out.weight"].source.reshape(-1)
    )


def squared_gpt2(q, split=STEPS):
    """The squared network of GPT-2 by hand: scores and what enters the GELU are outputs, their results inputs."""

    def normed(z, name):
        return z / z.mean(-1, keepdim=True).detach() * q[f"{name}.weight"] + q[f"{name}.bias"]

    def linear(z, name):
        return z @ q[f"{name}.weight"].t() + q[f"{name}.bias"]

    x = q["words.weight"].sum(0) + q["places.weight"][None]
    queries, keys, values = (heads(t) for t in linear(normed(x, "before"), "qkv").split(WIDTH, 2))
    scores = queries @ keys.transpose(-2, -1) / SIZE
    x = x + linear(joined(values.sum(-2, keepdim=True).expand(values.shape)), "out")
    up = linear(normed(x, "between"), "up")
    x = x + linear(torch.ones_like(up), "down")
    return scores.sum() + up.sum() + (normed(x, "after") @ q["words.weight"].t()).sum()


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2, attention by einsum"])
def test_the_squared_network_is_the_one_by_hand(name):
    model, x, _ = made(name)
    network = ps.trace(model, x)
    q = {key: p.detach().square().requires_grad_() for key, p in model.named_parameters()}
    norm = squared_gpt2(q)
    kappa = dict(zip(q, torch.autograd.grad(norm, list(q.values())), strict=True))
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm.detach(), rtol=1e-12, atol=0
    )
    assert not network.outside
    for key, found in ps.paths.kappa(network).items():
        torch.testing.assert_close(found, kappa[key], rtol=1e-11, atol=1e-13)


OPTIMIZERS = {
    "PathSGD": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.02, momentum=0.9),
    "PathAdam": lambda m, n: ps.optim.PathAdam(m.parameters(), n, lr=0.01),
    "Invariant": lambda m, n: ps.optim.Invariant(m.parameters(), n, torch.optim.AdamW, lr=0.01),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "name"),
    in_turn(
        OPTIMIZERS,
        ["GPT-2", "Llama", "ViT", "encoder layer", "several heads in one call"],
        everywhere=("PathSGD",),
    ),
)
def test_optimizers_are_bitwise_invariant(name, rule):
    model, x, _ = made(name, torch.float32)
    report = ps.rescaling.check_invariance(
        model, x, lambda y: y.square().mean(), OPTIMIZERS[rule], steps=5, low=2.0**-4, high=2.0**4
    )
    assert report.passed


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_the_optimizer_on_data_is_bitwise_invariant(name):
    ours, x, _ = made(name, torch.float32)
    theirs = copy.deepcopy(ours)
    networks = [ps.trace(m, x) for m in (ours, theirs)]
    ps.rescaling.random_rescale_(networks[1], 2.0**-4, 2.0**4, powers_of_two=True)
    for m, network in zip((ours, theirs), networks, strict=True):
        optimizer = ps.optim.DDPSGD(
            m.parameters(), network, lr=0.02, alpha=0.5, statistic="second_moment"
        )
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT"])
def test_balancing_keeps_the_function(name):
    model, x, _ = made(name)
    network, before = ps.trace(model, x), model(x)
    ps.rescaling.random_rescale_(network, 2.0**-4, 2.0**4)
    ps.rescaling.balance_(network)
    torch.testing.assert_close(model(x), before, rtol=1e-9, atol=1e-11)


def test_path_space_refuses_products_by_name():
    model, x, _ = made("ViT")
    network = ps.trace(model, x)
    with pytest.raises(
        ValueError, match=r"multiplies two activations or weights \((matmul|__matmul__)"
    ):
        ps.optim.GSGD(model.parameters(), network, lr=0.01)
    with pytest.raises(ps.UntraceableError, match=r"multiplies two activations.*no sum over paths"):
        ps.paths.unroll(network)


def test_a_strict_trace_refuses_attention():
    model, x, _ = made("GPT-2")
    with pytest.raises(
        ps.UntraceableError, match=r"'scaled_dot_product_attention'.*attention multiplies"
    ):
        ps.trace(model, x, strict=True)
