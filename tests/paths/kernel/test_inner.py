"""Norms, inner products and distances of path vectors against the list of all paths."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, of_each_kind, traced

FIXED = [case for case in ZOO if not case.normalizes]
# more than 100,000 paths
LONG = {"deep residual", "paddings", "small resnet", "stacked bidirectional rnn", "recurrent tower"}
LISTED = [case for case in FIXED if case.name not in LONG]


def vector(network, weights=None):
    """The path vector: the fixed factor of every path times the product of its weights."""
    paths = ps.paths.enumerate_paths(network)
    return paths.factor * paths.values(network.parameters if weights is None else weights)


def pair(case):
    """A network, and another one of the same architecture with other weights and running statistics."""
    network = traced(case, torch.float64)[1]
    model, other = traced(case, torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.5 + torch.rand_like(buffer))
                buffer.mul_(-1 if "mean" in name else 1)
    return network, other


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", of_each_kind(LISTED), ids=str)
def test_norms_equal_those_of_the_list_of_paths(case):
    network = traced(case, torch.float64)[1]
    known = vector(network).detach().abs()
    for p in (1, 1.5, 2, 5):
        value = ps.paths.path_norm(network, p=p)
        assert value.item() == pytest.approx(known.pow(p).sum().pow(1 / p).item(), rel=1e-10), p


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", of_each_kind(LISTED), ids=str)
def test_inner_product_and_distance_equal_those_of_the_list_of_paths(case):
    a, b = pair(case)
    first, second = vector(a), vector(b)
    assert ps.paths.path_inner(a, b).item() == pytest.approx(
        (first * second).sum().item(), rel=1e-9
    )
    assert ps.paths.path_distance(a, b).item() == pytest.approx(
        (first - second).norm().item(), rel=1e-9
    )


@pytest.mark.parametrize("name", ["batch norm", "scaled residual", "average pool without padding"])
def test_fixed_edges_are_in_the_list_of_paths(name):
    """The cases above are drawn; these have weights of fixed edges other than one."""
    test_norms_equal_those_of_the_list_of_paths(BY_NAME[name])
    test_inner_product_and_distance_equal_those_of_the_list_of_paths(BY_NAME[name])


@pytest.mark.parametrize("name", ["mlp", "rnn"])
def test_gradients_equal_those_of_the_list_of_paths(name):
    a, b = pair(BY_NAME[name])
    for function, known in (
        (lambda: ps.paths.path_norm(a, p=1), lambda: vector(a).abs().sum()),
        (lambda: ps.paths.path_distance(a, b), lambda: (vector(a) - vector(b)).norm()),
        (lambda: ps.paths.path_distance(b, a), lambda: (vector(a) - vector(b)).norm()),
    ):
        weights = [*a.parameters.values()]
        ours = torch.autograd.grad(function(), weights, materialize_grads=True)
        theirs = torch.autograd.grad(known(), weights, materialize_grads=True)
        for x, y in zip(ours, theirs, strict=True):
            assert_close(x, y, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["mlp", "cnn 2d", "small resnet", "layer norm", "batch norm in training", "gated"]
)
def test_does_not_see_how_either_network_is_scaled(name):
    a, b = pair(BY_NAME[name])
    before = [ps.paths.path_norm(a, p=p).item() for p in (1, 3)]
    before += [ps.paths.path_inner(a, b).item(), ps.paths.path_distance(a, b).item()]
    for network, seed in ((a, 1), (b, 2)):
        ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(seed))
    after = [ps.paths.path_norm(a, p=p).item() for p in (1, 3)]
    after += [ps.paths.path_inner(a, b).item(), ps.paths.path_distance(a, b).item()]
    assert after == pytest.approx(before, rel=1e-8)


@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_of_one_network_is_its_squared_norm(case):
    network = traced(case, torch.float64)[1]
    square = ps.paths.squared_path_norm(network).item()
    assert ps.paths.path_inner(network, network).item() == pytest.approx(square, rel=1e-12)
    assert ps.paths.path_norm(network).item() ** 2 == pytest.approx(square, rel=1e-12)


def test_normalization_divides_by_the_root_of_both_statistics():
    """y = g (V W x) / sqrt(mean of (V W)^2): written out for one input."""
    torch.manual_seed(0)

    def build():
        return nn.Sequential(
            nn.Linear(1, 3, bias=False), nn.LayerNorm(3, bias=False), nn.Linear(3, 1, bias=False)
        ).double()

    a, b = build(), build()
    vectors = []
    for model in (a, b):
        nn.init.normal_(model[1].weight)
        w = model[0].weight.detach()[:, 0]
        vectors.append(
            w / w.square().mean().sqrt() * model[1].weight.detach() * model[2].weight.detach()[0]
        )
    networks = [ps.trace(model, torch.zeros(1, 1).double()) for model in (a, b)]
    assert ps.paths.path_inner(*networks).item() == pytest.approx(
        (vectors[0] * vectors[1]).sum().item()
    )
    for p in (1, 3):
        known = vectors[0].abs().pow(p).sum().pow(1 / p).item()
        assert ps.paths.path_norm(networks[0], p=p).item() == pytest.approx(known)


def test_weight_normalization_divides_by_the_root_of_both_lengths():
    torch.manual_seed(0)

    def build():
        first = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
        return nn.Sequential(first, nn.ReLU(), nn.Linear(3, 1))

    a, b = build().double(), build().double()
    networks = [ps.trace(model, torch.zeros(1, 2).double()) for model in (a, b)]
    plain = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double() for _ in (a, b)]
    for made, model in zip(plain, (a, b), strict=True):
        with torch.no_grad():
            made[0].weight.copy_(model[0].weight)
            made[0].bias.copy_(model[0].bias)
        made[2].load_state_dict(model[2].state_dict())
    known = [ps.trace(model, torch.zeros(1, 2).double()) for model in plain]
    assert ps.paths.path_inner(*networks).item() == pytest.approx(
        ps.paths.path_inner(*known).item()
    )
    assert ps.paths.path_norm(networks[0], 1).item() == pytest.approx(
        ps.paths.path_norm(known[0], 1).item()
    )


def test_is_zero_for_members_of_one_class_and_resolves_near_networks():
    model, network = traced(BY_NAME["cnn 2d"], torch.float64)
    _, rescaled = copy.deepcopy((model, network))
    ps.rescaling.random_rescale_(rescaled)
    size = ps.paths.path_norm(network).item()
    distance = ps.paths.path_distance(network, rescaled)
    assert distance.item() < 1e-7 * size
    slopes = torch.autograd.grad(distance, [*network.parameters.values()], materialize_grads=True)
    assert all(bool(slope.isfinite().all()) for slope in slopes)
    with torch.no_grad():
        weight = next(iter(network.parameters.values()))
        before = vector(network)
        weight.mul_(1 + 1e-5 * torch.randn_like(weight))
        known = (vector(network) - before).norm().item()
    assert known < 1e-4 * size
    assert ps.paths.path_distance(network, rescaled).item() == pytest.approx(known, rel=1e-4)


def test_single_precision_is_computed_in_double():
    a, b = (traced(BY_NAME["mlp"])[1] for _ in range(2))
    assert ps.paths.path_distance(a, b).item() == 0
    assert ps.paths.path_norm(a, p=1).dtype == torch.float64


def test_of_no_path_is_zero_with_a_gradient():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    network = ps.trace(model, torch.zeros(1, 2))
    for p in (1, 1.5, 2):
        value = ps.paths.path_norm(network, p=p)
        assert value.item() == 0
        assert torch.autograd.grad(value, model.weight)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("p", [0.5, 0, float("inf"), float("nan"), "1"])
def test_refuses_other_powers(p):
    with pytest.raises(ValueError, match="p must be a finite number of at least 1"):
        ps.paths.path_norm(traced(BY_NAME["mlp"])[1], p=p)


def mlp(*widths, activation=nn.ReLU, factor=1.0):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(*widths[:2]), nn.Linear(*widths[1:])
            self.act = activation()

        def forward(self, x):
            return factor * self.b(self.act(self.a(x)))

    return ps.trace(Net(), torch.zeros(1, widths[0]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            lambda: mlp(3, 5, 2),
            r"'a.weight' the first has shape \(4, 3\) and the second has shape \(5, 3\)",
        ),
        (lambda: mlp(3, 4, 2, factor=2.0), "different forward passes"),
        (lambda: mlp(3, 4, 2, activation=nn.GELU), "different forward passes"),
        (lambda: ps.trace(nn.Linear(3, 2), torch.zeros(1, 3)), "'a.weight' .* the second lacks it"),
    ],
)
def test_refuses_two_architectures(other, what):
    for function in (ps.paths.path_inner, ps.paths.path_distance):
        with pytest.raises(ValueError, match=what):
            function(mlp(3, 4, 2), other())
