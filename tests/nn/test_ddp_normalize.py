from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import half
from oracles import ddp_normalization as oracle

DATA = json.loads((Path(__file__).parents[1] / "data" / "ddp_normalization.json").read_text())
NAMES = {"C": "covariance", "M": "second_moment"}
RULES = [
    (alpha, statistic, centred)
    for alpha in (0.0, 0.3, 1.0)
    for statistic in ("second_moment", "covariance")
    for centred in (False, True)
]
LAYERS = {
    "linear": (lambda bias: nn.Linear(4, 3, bias=bias), (7, 4)),
    "linear over time": (lambda bias: nn.Linear(4, 3, bias=bias), (3, 5, 4)),
    "conv1d": (lambda bias: nn.Conv1d(2, 3, 3, padding=1, bias=bias), (4, 2, 5)),
    "conv2d": (
        lambda bias: nn.Conv2d(2, 3, 3, stride=2, padding=1, dilation=2, bias=bias),
        (3, 2, 6, 5),
    ),
    "valid": (lambda bias: nn.Conv1d(2, 3, 2, padding="valid", bias=bias), (4, 2, 6)),
    "groups": (lambda bias: nn.Conv2d(4, 6, 2, groups=2, bias=bias), (3, 4, 4, 4)),
    "same": (lambda bias: nn.Conv1d(2, 3, 3, padding="same", bias=bias), (4, 2, 6)),
    "circular": (
        lambda bias: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular", bias=bias),
        (4, 2, 5),
    ),
}


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        m
        for i in range(len(widths) - 1)
        for m in (nn.Linear(*widths[i : i + 2], bias=bias), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1]).double()


def single(name: str, *, bias: bool) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model whose first layer is internal, an input, and D by brute force: how often a tap falls inside."""
    torch.manual_seed(1)
    build, shape = LAYERS[name]
    layer = build(bias)
    x = torch.randn(shape, dtype=torch.float64)
    rows, weight = oracle.predecessors(layer.double(), torch.ones_like(x))
    out = (
        nn.Linear(weight.shape[0], 1)
        if isinstance(layer, nn.Linear)
        else nn.Conv1d(weight.shape[0], 1, 1)
    )
    if isinstance(layer, nn.Conv2d):
        out = nn.Conv2d(weight.shape[0], 1, 1)
    return nn.Sequential(layer, nn.ReLU(), out).double(), x, rows[0].mean(0)


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: f"{c['R']}-{c['alpha']}")
def test_fixture(case):
    weights = [torch.tensor(w, dtype=torch.float64) for w in DATA["W"]]
    x, y = (torch.tensor(DATA[k], dtype=torch.float64) for k in ("X", "Y"))
    model = mlp(*(w.shape[1] for w in weights), len(weights[-1]), bias=False)
    model.load_state_dict({f"{2 * i}.weight": w for i, w in enumerate(weights)})
    options = {"alpha": case["alpha"], "statistic": NAMES[case["R"]], "centred": case["centred"]}
    model = ps.nn.ddp_normalize(model, ps.trace(model, x), **options, eps=0.0)
    out = model(x)
    loss = (out - y).square().sum() / (2 * len(x))
    loss.backward()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(out, torch.tensor(case["out"], dtype=torch.float64), **close)
    assert abs(loss.item() - case["loss"]) < 1e-10
    for p, expected in zip(model.parameters(), case["grads"], strict=True):
        torch.testing.assert_close(p.grad, torch.tensor(expected, dtype=torch.float64), **close)


@pytest.mark.sample(9)
@pytest.mark.parametrize(("rule", "name", "bias"), half(RULES, LAYERS, [True, False]), ids=str)
def test_layer_is_what_the_definition_says_and_so_are_its_gradients(name, rule, bias):
    alpha, statistic, centred = rule
    model, x, d = single(name, bias=bias)
    normal = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred, eps=0.0
    )
    leaves = [x.clone().requires_grad_(), *normal[0].parameters()]
    z = normal[0](leaves[0])
    rows = (
        z.flatten(0, -2)
        if name.startswith("linear")
        else z.flatten(2).transpose(1, 2).flatten(0, 1)
    )
    expected = oracle.normalized(normal[0], leaves[0], alpha, statistic, centred, d)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
    seed = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(v, leaves, seed, allow_unused=True) for v in (rows, expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.sample(6)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["linear", "groups"])
def test_first_and_second_derivatives(name, rule):
    alpha, statistic, centred = rule
    model, x, _ = single(name, bias=True)
    layer = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred, momentum=0.0
    )[0]
    x = x[:2, :, :3, :3] if x.dim() > 2 else x[:3]
    leaves = [t.detach().requires_grad_() for t in (x, layer.weight, layer.bias)]

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_second_derivatives_where_the_input_depends_on_the_weight():
    """As where the input was moved along the gradient of a loss; the first of them are those without second ones."""
    model, x, _ = single("linear", bias=True)
    layer = ps.nn.ddp_normalize(model, ps.trace(model, x))[0]
    found = []
    for again in (False, True):
        loss = layer(x + layer(x).sum(1, keepdim=True)).square().sum()
        found.append(torch.autograd.grad(loss, (layer.weight, layer.bias), create_graph=again))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_func_differentiates_what_a_backward_pass_does(rule):
    """As with BatchNorm, running statistics are arguments then."""
    alpha, statistic, centred = rule
    model, x, _ = single("conv1d", bias=True)
    network = ps.trace(model, x)
    normal = ps.nn.ddp_normalize(model, network, alpha=alpha, statistic=statistic, centred=centred)
    other = copy.deepcopy(normal)
    parameters = {name: p.detach() for name, p in other.named_parameters()}
    buffers = dict(other.named_buffers())

    def loss(parameters, buffers):
        return torch.func.functional_call(
            other, (parameters, buffers), (x,)
        ).square().sum(), buffers

    gradients, buffers = torch.func.grad(loss, has_aux=True)(parameters, buffers)
    normal(x).square().sum().backward()
    for name, p in normal.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)
    for name, buffer in normal.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)


def test_three_dimensions_agree_with_batch_normalization():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv3d(2, 3, 2, bias=False), nn.ReLU(), nn.Conv3d(3, 1, 1)).double()
    x = torch.randn(2, 2, 3, 4, 3, dtype=torch.float64)
    ours = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=1.0, statistic="covariance")
    theirs = nn.Sequential(model[0], nn.BatchNorm3d(3, affine=False).double(), *model[1:])
    torch.testing.assert_close(ours(x), theirs(x))
    a, b = (torch.autograd.grad(m(x).square().sum(), m[0].weight)[0] for m in (ours, theirs))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_are_orthogonal_to_the_weights_of_internal_nodes_alone(rule):
    alpha, statistic, centred = rule
    model, x = mlp(3, 5, 4, 2), torch.randn(9, 3, dtype=torch.float64)
    normal = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred, eps=0.0
    )
    (normal(x) - 1).square().mean().backward()
    for i in (0, 2, 4):
        layer = normal[i]
        inner = (layer.weight * layer.weight.grad).sum(1) + layer.bias * layer.bias.grad
        size = layer.weight.grad.norm() * layer.weight.norm()
        assert size > 1e-3
        assert (inner.abs().max() < 1e-13 * size) == (i != 4)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_length_of_the_weights_does_not_matter_to_the_last_bit(rule):
    alpha, statistic, centred = rule
    model, x = mlp(3, 5, 4, 2).float(), torch.randn(9, 3)
    normal = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred, eps=0.0
    )
    before = normal(x)
    with torch.no_grad():
        for layer in (normal[0], normal[2]):
            factors = torch.tensor([2.0**k for k in range(-2, layer.out_features - 2)])
            layer.weight.mul_(factors[:, None])
            layer.bias.mul_(factors)
    assert torch.equal(before, normal(x))
    with torch.no_grad():
        normal[0].weight[:, 0].mul_(2.0)  # but their direction does
    assert not torch.equal(before, normal(x))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("convolutional", [False, True])
def test_covariance_centred_is_batch_normalization_without_affine_parameters(
    convolutional, momentum
):
    torch.manual_seed(2)
    if convolutional:
        layers = [nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 3, 3, bias=False)]
        norms, x = (
            [nn.BatchNorm2d(c, affine=False, momentum=momentum) for c in (4, 3)],
            (5, 2, 6, 6),
        )
        tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)]
    else:
        layers = [nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False)]
        norms, x = [nn.BatchNorm1d(c, affine=False, momentum=momentum) for c in (5, 3)], (8, 3)
        tail = [nn.Linear(3, 2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), *tail).double()
    theirs = nn.Sequential(
        *copy.deepcopy([layers[0], norms[0], nn.ReLU(), layers[1], norms[1], nn.ReLU(), *tail])
    ).double()
    x = torch.randn(x, dtype=torch.float64)
    ours = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=1.0, statistic="covariance", momentum=momentum
    )
    close = {"rtol": 1e-11, "atol": 1e-12}
    for _ in range(3):
        x = torch.randn_like(x)
        outputs = [m(x) for m in (ours, theirs)]
        torch.testing.assert_close(*outputs, **close)
        for out in outputs:
            out.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)
    for i, norm in ((0, theirs[1]), (2, theirs[4])):
        torch.testing.assert_close(ours[i].running_mean, norm.running_mean, **close)
        torch.testing.assert_close(ours[i].running_statistic, norm.running_var, **close)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **close)
    torch.testing.assert_close(ps.nn.fold(ours)(x), theirs(x), **close)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_fold_gives_the_plain_network_of_evaluation_mode(rule):
    alpha, statistic, centred = rule
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding="same", bias=False), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, padding_mode="reflect", padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.ReLU(),
        nn.Linear(5, 2),
    )  # fmt: skip
    model = model.double()
    x = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    normal = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred
    )
    for _ in range(3):
        normal(torch.randn_like(x))
    plain = ps.nn.fold(normal)
    assert plain.training
    assert [type(m) for m in plain] == [type(m) for m in model]
    assert not dict(plain.named_buffers())
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in plain.parameters())
    torch.testing.assert_close(plain(x), normal.eval()(x), rtol=1e-11, atol=1e-12)
    plain(x).sum().backward()
    assert ps.trace(plain, x).num_classes == 12
    # with the batch itself as the running statistic, evaluation is training
    whole = ps.nn.ddp_normalize(
        model,
        ps.trace(model, x),
        alpha=alpha,
        statistic="second_moment",
        centred=centred,
        momentum=1.0,
    )
    trained = whole(x)
    torch.testing.assert_close(whole.eval()(x), trained, rtol=1e-11, atol=1e-12)


class Skips(nn.Module):
    """Max-pooling, a residual sum, average pooling and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1)
        self.c, self.d = nn.Conv1d(2, 3, 3, padding=1), nn.Linear(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        h = nn.functional.max_pool1d(self.a(x).relu(), 2)  # 2 paths: gamma^2 = 2
        r = (self.b(h) + h).relu()  # 1 + 2 = 3
        c = self.c(r).relu()  # 1
        means = torch.cat([r.mean(2), c.mean(2)], 1)  # 3 / P and 1 / P with P = 4 positions
        return self.out(self.d(means).relu())


def test_path_measure_follows_pooling_sums_and_padding():
    model = Skips().double()
    x = torch.randn(3, 1, 8, dtype=torch.float64)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=0.5)
    # the outer taps miss one position of four
    inside = torch.tensor([3 / 4, 1.0, 3 / 4], dtype=torch.float64)
    for layer, expected in (
        (normal.a, torch.tensor([7 / 8, 1.0, 7 / 8])),
        (normal.b, 2 * inside),
        (normal.c, 3 * inside),
        (normal.d, torch.tensor([3 / 4, 3 / 4, 1 / 4, 1 / 4, 1 / 4])),
    ):
        measure = layer.ddp_measure.expand(layer.weight.shape)
        torch.testing.assert_close(measure, expected.double().expand(layer.weight.shape))
    assert type(normal.out) is nn.Linear


class Sum(nn.Module):
    """Two paths enter every unit that the second layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(*n) for n in ((3, 4), (3, 4), (4, 3), (3, 1)))

    def forward(self, x):
        return self.out(self.c(self.a(x).relu() + self.b(x).relu()).relu())


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_a_measure_that_is_one_number_counts_as_often(alpha):
    torch.manual_seed(0)
    model, x = Sum().double(), torch.randn(7, 3, dtype=torch.float64)
    layer = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=alpha, eps=0.0).c
    assert layer.ddp_measure.item() == 2.0
    leaves = [torch.randn(7, 4, dtype=torch.float64, requires_grad=True), layer.weight, layer.bias]
    expected = oracle.normalized(
        layer, leaves[0], alpha, "second_moment", False, torch.full((4,), 2.0).double()
    )
    found, seed = layer(leaves[0]), torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    ours, theirs = (torch.autograd.grad(v, leaves, seed) for v in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_path_normalization_has_unit_path_measure_and_needs_no_batch():
    model, x = mlp(3, 5, 4, 2), torch.randn(9, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    normal = ps.nn.ddp_normalize(model, network, alpha=0.0, centred=False, eps=0.0)
    torch.testing.assert_close(normal(x[:1]), normal(x)[:1])
    assert all("running" not in name for name, _ in normal.named_buffers())
    plain = ps.nn.fold(normal)
    # every internal node has gamma^2 = 1, so the path norm is that of the last layer alone
    expected = plain[4].weight.square().sum() + plain[4].bias.square().sum()
    torch.testing.assert_close(ps.paths.squared_path_norm(ps.trace(plain, x)), expected)
    # path-normalizing is a rescaling: the outputs are those of the rescaled network with its output
    # layer kept
    assert not torch.allclose(plain(x), model(x))


def test_fold_leaves_frozen_what_was_frozen():
    model, x = mlp(3, 5, 4, 2), torch.randn(9, 3, dtype=torch.float64)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    plain = ps.nn.fold(ps.nn.ddp_normalize(model, ps.trace(model, x)))
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in plain.named_parameters()} == trained


def test_model_is_left_alone_and_the_copy_is_an_ordinary_module():
    model, x = mlp(3, 5, 2), torch.randn(9, 3, dtype=torch.float64)
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x))
    assert torch.equal(random, torch.get_rng_state())
    normal(x).sum().backward()
    torch.optim.SGD(normal.parameters(), lr=0.1).step()
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert [n for n, _ in normal.named_parameters()] == [n for n, _ in model.named_parameters()]
    for other in (copy.deepcopy(normal), pickle.loads(pickle.dumps(normal))):
        assert torch.equal(other.eval()(x), copy.deepcopy(normal).eval()(x))
    fresh = ps.nn.ddp_normalize(model, ps.trace(model, x))
    fresh.load_state_dict(normal.state_dict())
    assert torch.equal(fresh.eval()(x), normal.eval()(x))
    assert normal.float().eval()(x.float()).dtype == torch.float32


def test_every_layer_of_the_copy_has_hooks_of_its_own():
    model, x = mlp(3, 5, 2), torch.zeros(9, 3, dtype=torch.float64)
    kept = model[0].register_full_backward_pre_hook(lambda *_: None)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x))
    assert list(normal[0]._backward_pre_hooks) == [kept.id]
    normal[0].register_forward_hook(lambda *_: None)
    normal[2].register_full_backward_pre_hook(lambda *_: None)
    assert not model[0]._forward_hooks
    assert not normal[2]._forward_hooks
    assert not model[2]._backward_pre_hooks


def test_half_precision_regions_compute_in_the_parameters_type():
    model, x = mlp(3, 5, 2).float(), torch.randn(9, 3)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert normal[0](x.bfloat16()).dtype == torch.float32
        normal(x).sum().backward()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_half_precision_models_train(rule):
    alpha, statistic, centred = rule
    model, x = mlp(3, 5, 4, 2), torch.randn(64, 3, dtype=torch.float64)
    exact = ps.nn.ddp_normalize(
        model, ps.trace(model, x), alpha=alpha, statistic=statistic, centred=centred
    )
    half = copy.deepcopy(exact).bfloat16()
    for m, inputs in ((exact, x), (half, x.bfloat16())):
        m(inputs).square().mean().backward()
    for p, q in zip(half.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.bfloat16
        assert (p.grad.double() - q.grad).norm() < 0.2 * q.grad.norm() + 1e-3
    assert half.eval()(x.bfloat16()).dtype == torch.bfloat16


def test_statistics_that_float16_does_not_hold_are_taken_in_a_type_that_does():
    model, x = mlp(4, 8, 2).half(), 1e3 * torch.randn(64, 4).half()  # of squares of 1e6
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=1.0, statistic="covariance")
    w, b = (p.detach().double().requires_grad_() for p in model[0].parameters())
    a = x.double() @ w.t()
    expected = (a - a.mean(0) + b) / a.std(0, correction=0)
    z, g = normal[0](x), torch.randn(64, 8).half()
    torch.testing.assert_close(z.double(), expected, rtol=4e-3, atol=4e-3)
    ours, exact = (
        torch.autograd.grad(z, normal[0].weight, g)[0],
        torch.autograd.grad(expected, w, g.double())[0],
    )
    torch.testing.assert_close(
        ours.double(), exact, rtol=4e-3, atol=4e-3 * exact.abs().max().item()
    )


def test_evaluation_does_not_track_and_batch_statistics_flow_gradients():
    model, x = mlp(3, 5, 2), torch.randn(9, 3, dtype=torch.float64)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=0.5)
    normal.eval()(x)
    assert int(normal[0].num_batches_tracked) == 0
    normal.train()(x)
    assert int(normal[0].num_batches_tracked) == 1
    with torch.no_grad():
        normal(x)
    assert int(normal[0].num_batches_tracked) == 2


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_has_no_outputs_where_no_statistic_is_taken(name):
    model, x, _ = single(name, bias=True)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=0.0)
    assert normal(x[:0]).shape == model(x[:0]).shape


def test_inference_mode_is_no_obstacle():
    model, x = mlp(3, 5, 2), torch.randn(4, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    with torch.inference_mode():
        normal = ps.nn.ddp_normalize(model, network)
    normal(x).square().sum().backward()
    with torch.inference_mode():
        plain = ps.nn.fold(normal)
    plain(x).square().sum().backward()
    for m in (normal, plain):
        assert not any(t.is_inference() for t in m.state_dict().values())


def test_a_variance_of_one_value_is_refused():
    model = mlp(3, 5, 2)
    normal = ps.nn.ddp_normalize(
        model, ps.trace(model, torch.zeros(1, 3).double()), statistic="covariance"
    )
    with pytest.raises(ValueError, match="at least 2 values per channel"):
        normal(torch.randn(1, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"at least 2 values per channel.*got 0"):
        normal(torch.randn(0, 3, dtype=torch.float64))
    assert int(normal[0].num_batches_tracked) == 0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.b(self.b(self.a(x).relu()).relu()).relu())


class Functional(Twice):
    def forward(self, x):
        return self.out(nn.functional.linear(x, self.a.weight, self.a.bias).relu())


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(3, 4, nonlinearity="relu", batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Fixed(nn.Module):
    """The first layer is added to the input, so its units cannot be rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.b((self.a(x) + x).relu()).relu())


class Mixed(nn.Module):
    """Half of a layer's units are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(2, 1)

    def forward(self, x):
        h = self.a(x)
        return self.out(h[:, :2].relu()), h[:, 2:]


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (Twice(), (2, 3), "'b' .Linear. is used more than once"),
        (Functional(), (2, 3), "call the layer"),
        (Rnn(), (2, 5, 3), "'rnn.weight_ih_l0' of 'rnn' .RNN."),
        (Fixed(), (2, 3), "what enters 'b' depends on 'a.weight'"),
        (Mixed(), (2, 3), "some are internal"),
        (nn.Sequential(nn.Linear(3, 1)), (2, 3), "nothing to normalize"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)),
            (2, 3),
            "BatchNorm1d",
        ),
        (
            nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.ReLU(), nn.Conv1d(4, 1, 1)),
            (2, 3, 4),
            "ConvTranspose1d",
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_what_has_no_normalized_form_is_refused_by_name(model, shape, message):
    network = ps.trace(model, torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        ps.nn.ddp_normalize(model, network)


def test_without_a_path_measure_fixed_scales_do_no_harm():
    model = Fixed()
    normal = ps.nn.ddp_normalize(model, ps.trace(model, torch.zeros(2, 3)), alpha=1.0)
    assert [type(m).__name__ for m in (normal.a, normal.b, normal.out)] == [
        "Linear",
        "DDPLinear",
        "Linear",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"statistic": "variance"}, "second_moment"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("inf")}, "eps must be finite"),
        ({"momentum": 2.0}, "momentum"),
    ],
)
def test_bad_arguments(options, message):
    model = mlp(3, 5, 2)
    with pytest.raises(ValueError, match=message):
        ps.nn.ddp_normalize(model, ps.trace(model, torch.zeros(1, 3).double()), **options)


@pytest.mark.parametrize("name", ["alpha", "eps", "momentum"])
def test_what_is_no_number_is_named(name):
    model = mlp(3, 5, 2)
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        ps.nn.ddp_normalize(model, ps.trace(model, torch.zeros(1, 3).double()), **{name: "0.5"})


def test_network_of_another_model_and_folding_a_plain_one():
    model, network = mlp(3, 5, 2), ps.trace(mlp(3, 5, 2), torch.zeros(1, 3).double())
    with pytest.raises(ValueError, match="not a trace of this"):
        ps.nn.ddp_normalize(model, network)
    with pytest.raises(TypeError, match="needs a traced network, got Sequential"):
        ps.nn.ddp_normalize(model, model)
    with pytest.raises(ValueError, match="nothing to fold"):
        ps.nn.fold(model)
    with pytest.raises(ValueError, match="this Network has no layer made by ddp_normalize"):
        ps.nn.fold(network)


@pytest.mark.parametrize("training", [True, False])
def test_tracing_a_normalized_model_is_refused(training):
    model = mlp(3, 5, 2)
    normal = ps.nn.ddp_normalize(model, ps.trace(model, torch.zeros(1, 3).double())).train(training)
    with pytest.raises(ps.UntraceableError, match="fold"):
        ps.trace(normal, torch.zeros(1, 3).double())
