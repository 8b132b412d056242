"""Models as users bring them: each is traced rightly, or refused with the place and what to do.

The oracle lists every path, by running the model on real tensors: what it returns is the sum over
its paths, and gamma_net^2 the sum of their squares.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, rnn

import pathspace as ps


class Model(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *inputs):
        return self._function(self, *inputs)


def normal(*shape):
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def tokens(*shape):
    return (torch.arange(torch.Size(shape).numel()) * 3 + 1).reshape(shape) % 5


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def conv(*layers, flat):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 2))


def bag(mode, **options):
    return Model(
        lambda m, *t: m.o(m.e(*t).relu()),
        e=nn.EmbeddingBag(5, 3, mode=mode, **options),
        o=nn.Linear(3, 2),
    )


class UNet(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 2, 2), nn.Conv2d(2, 1, 1)
        self.up = nn.Upsample(scale_factor=2, mode=mode)
        self.out = nn.Conv2d(3, 1, 2, stride=2)

    def forward(self, x):
        left = functional.relu_(self.down(x))
        right = functional.relu(self.inner(functional.max_pool2d(left, 2)))
        return self.out(torch.cat([left, self.up(right)], 1))


class Inverted(nn.Module):
    """The block of MobileNet: widen, one filter for each channel, narrow, add."""

    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.each = nn.Conv2d(2, 2, 3, groups=2, padding="same", bias=False)
        self.narrow = nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return (
            x + self.narrow(functional.relu(self.each(functional.relu(self.norm(self.wide(x))))))
        ).mean((2, 3))


def cells(m, x):
    h = x.new_zeros(x.shape[0], 3)
    for now in x.unbind(1):
        h = m.c(now, h)
    return m.o(h)


def shared_layer():
    layer = nn.Linear(3, 3)
    return nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(3, 1)
    )


def tied_autoencoder():
    return Model(
        lambda m, x: functional.linear(functional.linear(x, m.w).relu(), m.w.t()),
        w=nn.Parameter(normal(2, 3)),
    )


def residual(m, x):
    h = m.i(x)
    h += x
    return m.o(functional.leaky_relu(h, 0.1) / 2**0.5)


# name: (builder, inputs, classes)
TRACED = {
    "leaky in place": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1, True), nn.Linear(4, 2)), normal(2, 3), 4),
    "threshold": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Threshold(0, 0), nn.Linear(4, 2)), normal(2, 3), 4),
    "clamp by a tensor": (lambda: Model(lambda m, x: m.o(m.i(x).clamp(min=torch.tensor(0.0))),
        i=nn.Linear(3, 4), o=nn.Linear(4, 2)), normal(2, 3), 4),
    "bag, sum": (lambda: bag("sum"), tokens(2, 3), 3),
    "bag, mean": (lambda: bag("mean"), tokens(2, 3), 3),
    "bag, max": (lambda: bag("max"), tokens(2, 3), 3),
    "bag with padding": (lambda: bag("sum", padding_idx=0), tokens(2, 3), 3),
    "convolution in three dimensions, dilated": (
        lambda: conv(nn.Conv3d(1, 2, 2, dilation=2), nn.ReLU(), flat=2), normal(2, 1, 3, 3, 3), 2),
    "padding by reflection": (lambda: conv(nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU(), flat=6),
        normal(2, 1, 3), 2),
    "padding that a maximum passes over": (
        lambda: conv(nn.Conv1d(1, 2, 2), nn.ConstantPad1d(1, -torch.inf), nn.MaxPool1d(2), flat=4), normal(2, 1, 3), 2),
    "a mask of large numbers, then a maximum": (lambda: Model(
        lambda m, x: m.o(m.i(x).masked_fill(x < 0, -1e9).amax(1, keepdim=True).expand(-1, 4)),
        i=nn.Linear(4, 4), o=nn.Linear(4, 2)), normal(2, 4), 0),
    "large numbers in fixed places, then a maximum": (lambda: Model(
        lambda m, x: m.o(torch.where(torch.tensor([True, False, True, True]), m.i(x), -1e9).amax(1, keepdim=True)),
        i=nn.Linear(3, 4), o=nn.Linear(1, 2)), normal(2, 3), 1),
    "shuffled pixels": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.PixelUnshuffle(2), nn.Conv2d(8, 1, 1)),
        normal(2, 1, 2, 2), 2),
    "u-net": (lambda: UNet("nearest"), normal(2, 1, 3, 3), 3),
    "bilinear u-net": (lambda: UNet("bilinear"), normal(2, 1, 3, 3), 3),
    "bicubic u-net": (lambda: UNet("bicubic"), normal(2, 1, 3, 3), 3),
    "mobile block": (Inverted, normal(2, 1, 2, 2), 4),
    "loop over a cell": (lambda: Model(cells, c=nn.RNNCell(2, 3, nonlinearity="relu"), o=nn.Linear(3, 1)),
        normal(2, 3, 2), 3),
    "one layer in two places": (shared_layer, normal(2, 2), 3),
    "tied autoencoder": (tied_autoencoder, normal(2, 3), 0),
    "residual in place": (lambda: Model(residual, i=nn.Linear(3, 3), o=nn.Linear(3, 2)), normal(2, 3), 0),
    "data parallel": (lambda: nn.DataParallel(mlp()), normal(2, 3), 4),
    "functional call": (lambda: Model(
        lambda m, x: torch.func.functional_call(m.b, dict(m.b.named_parameters()), (x,)), b=mlp()), normal(2, 3), 4),
    "half of it frozen": (lambda: Model(lambda m, x: m.b(x), b=mlp().requires_grad_(False)), normal(2, 3), 4),
    "checkpointed": (lambda: Model(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.b, x, use_reentrant=False), b=mlp()), normal(2, 3), 4),
    "list as an input": (lambda: Model(lambda m, xs: m.b(xs[0] + xs[1]), b=mlp()), ([normal(2, 3), normal(2, 3)],), 4),
}  # fmt: skip


def call(model, inputs):
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def built(name):
    build, inputs, classes = TRACED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double().eval()
    return model, inputs, classes


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TRACED)
def test_is_the_sum_over_its_paths(name):
    model, inputs, classes = built(name)
    network = ps.trace(model, inputs)
    assert network.num_classes == classes
    paths = ps.paths.enumerate_paths(network, limit=200_000)
    known = (paths.factor * paths.values(network.parameters)).square().sum().item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(known, rel=1e-12)
    ours = paths.output(network.parameters, ps.paths.activity(network, inputs))
    torch.testing.assert_close(
        ours, call(model, inputs).reshape(ours.shape), rtol=1e-10, atol=1e-10
    )


NOTHING_TO_RESCALE = [name for name, (_, _, classes) in TRACED.items() if not classes]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", [n for n in TRACED if n not in ("half of it frozen", *NOTHING_TO_RESCALE)]
)
def test_rescaling_is_bitwise_invisible(name):
    model, inputs, _ = built(name)
    report = ps.rescaling.check_invariance(
        model, inputs, lambda out: out.square().mean(),
        lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.01), steps=6,
    )  # fmt: skip
    assert report.passed


def pooled(fill):
    layers = {"i": nn.Linear(3, 8), "o": nn.Linear(8, 8), "r": nn.Linear(8, 2)}
    return Model(
        lambda m, x, mask: m.r(m.o(m.i(x).masked_fill(mask, fill).amax(1)).relu()), **layers
    )


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_what_stands_for_an_infinity_keeps_the_rate(fill):
    """Counted by its square, such a number drowned all paths, and PathSGD ran away at SGD's rate."""
    x, mask = normal(32, 3, 3), (torch.arange(96) % 3 == 1).reshape(32, 3, 1)
    losses = []
    for number in (fill, -torch.inf):
        torch.manual_seed(0)
        model = pooled(number).double()
        network = ps.trace(model, (x, mask))
        assert ps.paths.squared_path_norm(network) < 1e3
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.03, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x, mask) - x[:, 0, :2]).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 1.2 * losses[1]


def after(layer, width=4, **options):
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(width, 2)), options


def packed(m, x):
    return m.r(rnn.pack_padded_sequence(x, [3, 2], batch_first=True))[1][-1]


REFUSED = {
    "gelu": (after(nn.GELU())[0], normal(2, 3), "'gelu' in module '1'.*outside="),
    "relu6": (after(nn.ReLU6())[0], normal(2, 3), "'1'.*outside="),
    "local response": (
        nn.Sequential(nn.Conv1d(1, 4, 1), nn.LocalResponseNorm(2), nn.Conv1d(4, 2, 1)), normal(2, 1, 3),
        "'local_response_norm'.* '1'",
    ),
    "alpha dropout": (after(nn.AlphaDropout())[0], normal(2, 3), "'alpha_dropout' in module '1'.*draws"),
    "highway": (
        Model(lambda m, x: m.t(torch.sigmoid(m.t(x)) * m.t(x)), t=nn.Linear(3, 3)), normal(2, 3),
        "sigmoid.*the model's own forward.*module of its own",
    ),
    "packed sequences": (
        Model(packed, r=nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), normal(2, 3, 3), "lengths.*argument",
    ),
    "bag by offsets": (bag("sum"), (tokens(6), torch.tensor([0, 2])), "'embedding_bag' in module 'e'.*offsets.*row"),
    "a layer in vmap": (
        Model(lambda m, x: torch.vmap(m.b)(x), b=mlp()), normal(2, 3),
        r"'linear' in module 'b.*vmap.*whole batch.*outside",
    ),
    "an operation in vmap": (
        Model(lambda m, x: torch.vmap(torch.relu)(m.b(x)), b=mlp()), normal(2, 3), "'relu'.*inside torch.func.*vmap",
    ),
    "a gradient as a value": (
        Model(lambda m, x: torch.func.grad(lambda t: m.b(t).sum())(x), b=mlp()), normal(2, 3),
        "torch.func.*grad.*outside",
    ),
    "weight norm": (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2)), normal(2, 3),
        r"module '0\.parametrizations.*computes 'weight' from other.*remove_parametrizations.*outside=\['0'\]",
    ),
    "spectral norm": (
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2)), normal(2, 3),
        "module '0.parametrizations.*computes 'weight' from other parameters",
    ),
    "orthogonal": (
        nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 2)), normal(2, 3),
        "module '0.parametrizations.*computes 'weight' from other parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_place_and_what_to_do(name):
    model, inputs, message = REFUSED[name]
    model = copy.deepcopy(model).double()
    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(model, inputs, strict=True)


def test_vmap_of_constants_and_outside_is_no_obstacle():
    def causal(m, x):
        places = torch.arange(3)
        mask = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(places, places)
        return m.b(m.i(x).relu() * mask.any(0))

    model = Model(
        causal, i=nn.Linear(2, 3), b=Model(lambda m, x: torch.vmap(m.o)(x), o=nn.Linear(3, 2))
    ).double()
    assert set(ps.trace(model, normal(4, 2), outside="b").parameters) == {"i.weight", "i.bias"}


def test_a_parametrized_module_may_stay_outside():
    model, inputs, _ = REFUSED["weight norm"]
    network = ps.trace(model.double(), inputs, outside=["0"])
    assert set(network.parameters) == {"2.weight", "2.bias"}


@dataclass
class Heads:
    logits: Tensor
    value: Tensor


class Pair(NamedTuple):
    logits: Tensor
    value: Tensor


@pytest.mark.parametrize("form", [
    Heads, Pair, lambda a, b: OrderedDict(a=a, b=b), lambda a, b: {"a": [a, (b,)]}, lambda a, b: [a, None, b, 3],
])  # fmt: skip
def test_outputs_come_in_any_structure(form):
    torch.manual_seed(0)
    model = Model(lambda m, x: form(m.a(m.i(x).relu()), m.b(m.i(x).relu())),
        i=nn.Linear(3, 4), a=nn.Linear(4, 2), b=nn.Linear(4, 1)).double()  # fmt: skip
    plain = Model(
        lambda m, x: torch.cat([m.a(m.i(x).relu()), m.b(m.i(x).relu())], 1),
        i=model.i,
        a=model.a,
        b=model.b,
    )
    x = normal(2, 3)
    network = ps.trace(model, x)
    assert network.num_classes == 4
    ours, theirs = (ps.paths.squared_path_norm(n).item() for n in (network, ps.trace(plain, x)))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert ps.paths.data_dependent_norm(network, x, alpha=0.5).item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_models_of_any_precision_have_one_geometry(dtype):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    ours = ps.paths.squared_path_norm(ps.trace(model, torch.zeros(2, 3, dtype=dtype)))
    exact = ps.paths.squared_path_norm(ps.trace(mlp_like(model), normal(2, 3)))
    assert ours.item() == pytest.approx(exact.item(), rel=1e-6 if dtype == torch.float32 else 1e-2)


def mlp_like(model):
    return copy.deepcopy(model).double()


def test_models_without_data_are_traced():
    """On the meta device there is only the form, which is all that tracing reads."""
    with torch.device("meta"):
        model = nn.Sequential(mlp(), nn.Linear(2, 2))
    network = ps.trace(model, torch.zeros(2, 3, device="meta"))
    assert network.num_classes == 6
