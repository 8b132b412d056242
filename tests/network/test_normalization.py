"""Normalization by statistics of what enters, against squared networks written out by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import NormalizedBlocks
from oracles.normalization import NETWORKS, TIGHT, by_hand, network_of, over_mean, shaken
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.paths.kernel.norm import squared_path_norm

EACH = pytest.mark.parametrize("name", NETWORKS)


@EACH
def test_norm_and_kappa_are_those_written_by_hand(name):
    _, network, hand = network_of(name)
    norm, kappa, _ = by_hand(network, hand)
    value = squared_path_norm(network)
    assert value.item() == pytest.approx(norm, rel=1e-12)
    assert_close(ps.paths.kappa(network), kappa, **TIGHT)
    # the regularizer's gradient holds the mean, too: it is 2 p kappa
    value.backward()
    for key, p in network.parameters.items():
        assert_close(p.grad, 2 * p.detach() * kappa[key], **TIGHT)


@EACH
@pytest.mark.sample(4)
def test_no_path_meets_a_weight_twice(name):
    _, network, _ = network_of(name)
    assert_close(ps.paths.kappa(network, second_term=True), ps.paths.kappa(network), rtol=0, atol=0)


def test_second_term_holds_the_mean():
    """One matrix before and behind a normalization: a pair of its edges on a path counts as if the mean were fixed."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False)

        def forward(self, x):
            return self.shared(self.norm(self.shared(x)).relu())

    model = shaken(Twice())
    network = ps.trace(model, torch.zeros(1, 3).double())
    p = model.shared.weight.detach()
    m = p.square().sum(1)

    def norm(w):
        return (w.square() @ (w.square().sum(1) / m)).sum()

    hessian = torch.autograd.functional.hessian(norm, p).reshape(9, 9)
    expected = hessian.diagonal().reshape(3, 3) / 2
    assert_close(ps.paths.kappa(network, second_term=True)["shared.weight"], expected, **TIGHT)


@EACH
@pytest.mark.sample(4)
def test_masses_of_unit_classes_are_those_written_by_hand(name):
    _, network, hand = network_of(name)
    _, _, masses = by_hand(network, hand)
    found = node_mass(network)
    channels = [[t.transpose(0, 1).flatten(1) for t in pair] for pair in masses]
    # the stream: of its two parts the first has an activation, and stands for the class
    if "images" not in name:
        (h, into_h), (r, into_r) = channels
        into, out = h.sum(1) + r.sum(1), into_h.sum(1) + into_r.sum(1)
    else:
        (h, into_h), _, (y, into_y) = channels
        into, out = torch.cat([h.sum(1), y.sum(1)]), torch.cat([into_h.sum(1), into_y.sum(1)])
    assert_close(found.into, into, **TIGHT)
    assert_close(found.out_of, out, **TIGHT)


@EACH
@pytest.mark.sample(4)
def test_weights_in_front_scale_kappa_inversely_and_nothing_else(name):
    """The function of t stays but for eps; with powers of two nothing is rounded."""
    model, network, _ = network_of(name)
    before = ps.paths.kappa(network)
    norm = squared_path_norm(network).item()
    fronts = [
        key
        for key in network.parameters
        if key.split(".")[0] in ("embed", "inner", "stem", "conv", "down")
    ]
    for front, t in zip(fronts, (0.125, 32.0, 2.0), strict=False):
        with torch.no_grad():
            model.get_parameter(front).mul_(t)
        after = ps.paths.kappa(network)
        expected = {key: k / t**2 if key == front else k for key, k in before.items()}
        assert_close(after, expected, rtol=0, atol=0)
        assert squared_path_norm(network).item() == norm
        before = after


@EACH
@pytest.mark.sample(4)
def test_zero_gains_and_zero_masses_are_bounded(name):
    model, network, _ = network_of(name)
    stem = "stem" if "images" in name else "embed"
    with torch.no_grad():
        model.second.weight.zero_()
    kappa = ps.paths.kappa(network)
    inner = "conv.weight" if "images" in name else "inner.weight"
    assert not kappa[inner].any()
    assert (kappa["second.weight"] > 0).all()
    with torch.no_grad():
        model.get_submodule(stem).weight.zero_()
    kappa = ps.paths.kappa(network)
    assert all(torch.isfinite(k).all() for k in kappa.values())
    assert not kappa[f"{stem}.weight"].any()
    assert not kappa["first.weight"].any()
    assert all((kappa[key] > 0).all() for key in kappa if key == "first.bias")
    value = squared_path_norm(network)
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters.values())


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_trace_in_training_form_leaves_the_statistics_alone(dim):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1](1, 2, 3)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](
        2, momentum=None if dim == 3 else 0.1
    )
    model = nn.Sequential(kind, norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)).train()
    x = torch.randn(1, 1, *([5] * dim))
    model(x)
    before = copy.deepcopy(model.state_dict())
    network = ps.trace(model, x)
    ps.paths.kappa(network)
    assert model.training
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_network_keeps_the_form_in_which_it_was_traced():
    """Whatever train() and eval() do to the model later; each layer by itself."""
    model = shaken(nn.Sequential(*NormalizedBlocks(nn.BatchNorm1d).children())).eval()
    with torch.no_grad():
        for norm in (model[1], model[3]):
            norm.running_var.uniform_(2, 3)
    x = torch.zeros(1, 3).double()
    fixed = ps.trace(model, x)
    model[3].train()
    mixed = ps.trace(model, x)
    batch = ps.trace(model.train(), x)
    found = {
        key: ps.paths.kappa(n)["0.weight"] for key, n in (("f", fixed), ("m", mixed), ("b", batch))
    }
    assert len({k.sum().item() for k in found.values()}) == 3
    for mode in (True, False):
        model.train(mode)
        for key, network in (("f", fixed), ("m", mixed), ("b", batch)):
            network.check_current()
            assert torch.equal(ps.paths.kappa(network)["0.weight"], found[key])


def test_without_running_statistics_it_is_always_in_training_form():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = shaken(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1)))
    x = torch.zeros(1, 3).double()
    in_training = ps.paths.kappa(ps.trace(model, x))
    assert_close(ps.paths.kappa(ps.trace(model.eval(), x)), in_training, rtol=0, atol=0)


def test_normalized_inputs_are_inputs():
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).double().train()
    kappa = ps.paths.kappa(ps.trace(model, torch.randn(4, 3).double()))
    assert_close(kappa, {"1.weight": torch.ones(2, 3).double(), "1.bias": torch.ones(2).double()})
    model = shaken(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    kappa = ps.paths.kappa(ps.trace(model, torch.randn(4, 3).double()))
    columns = model[1].weight.detach().square().sum(0)
    assert_close(kappa["0.weight"], columns)  # the mass of an input over its mean is one
    assert_close(kappa["0.bias"], columns)


def test_a_batch_of_one_example_holds_all_positions():
    """S is the batch and the positions of a channel; in the squared network one example stands for all."""
    model, few, _ = network_of("batch norm of images")
    many = ps.trace(model, torch.zeros(7, 1, 4, 4).double())
    assert_close(ps.paths.kappa(many), ps.paths.kappa(few), rtol=0, atol=0)


# --- layers ---------------------------------------------------------------------------------------


class Written(nn.Module):
    """A layer that is a function, and a gain."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * self.function(x)


BY_HAND = {
    "llama": lambda x: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6),
    "t5": lambda x: x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6),
    "root": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "methods": lambda x: x.div((x**2).mean(dim=-1, keepdim=True).add(1e-6).sqrt()),
    "power": lambda x: ((x**2).mean(-1, True) + 1e-6) ** -0.5 * x,
    "inverse": lambda x: x * (1 / torch.sqrt(torch.mean(torch.square(x), -1, keepdim=True) + 1e-6)),
    "of an activation": lambda x: (
        torch.nn.functional.dropout(x, 0.0) * x.square().mean(-1, keepdim=True).rsqrt()
    ),
    "eps outside": lambda x: x / (x.square().mean((-1,), keepdim=True).sqrt() + 1e-6),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_a_root_mean_square_written_by_hand_is_recognised(way):
    found = []
    for function in (BY_HAND[way], lambda x: functional.rms_norm(x, (4,))):
        model = shaken(
            nn.Sequential(nn.Linear(3, 4), Written(function), nn.ReLU(), nn.Linear(4, 2))
        )
        network = ps.trace(model, torch.zeros(1, 3).double())
        assert network.num_classes == 4
        found.append(ps.paths.kappa(network))
    assert_close(*found, rtol=0, atol=0)


@pytest.mark.sample(7)
@pytest.mark.parametrize("square", [torch.square, lambda x: x.pow(2), lambda x: x * x])
@pytest.mark.parametrize("way", BY_HAND)
def test_that_of_a_square_is_recognised_too(square, way):
    """As of a squared ReLU, which is the square of something itself."""
    found = []
    for function in (BY_HAND[way], lambda x: functional.rms_norm(x, (4,))):
        written = Written(lambda x, of=function: of(square(x.relu())))
        network = ps.trace(
            shaken(nn.Sequential(nn.Linear(3, 4), written, nn.Linear(4, 2))),
            torch.zeros(1, 3).double(),
        )
        assert not network.cuts
        found.append(ps.paths.kappa(network))
    assert_close(*found, rtol=0, atol=0)


def centred(x):
    return x - x.mean(-1, keepdim=True)


def from_both(x, statistics):
    spread, mean = statistics
    return (x - mean) * torch.rsqrt(spread + 1e-5)


def of_unit_length(x):
    return functional.rms_norm(x, (4,), eps=0.0) / 2


# of an activation and a gain: written by hand, and as layers
LAYERS_BY_HAND = {
    "convnext": (
        lambda x, g: centred(x) / torch.sqrt(centred(x).pow(2).mean(-1, keepdim=True) + 1e-5) * g,
        lambda x, g: functional.layer_norm(x, (4,)) * g,
    ),
    "variance": (
        lambda x, g: centred(x) * (x.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).rsqrt() * g,
        lambda x, g: functional.layer_norm(x, (4,)) * g,
    ),
    "both at once": (
        lambda x, g: from_both(x, torch.var_mean(x, -1, correction=0, keepdim=True)) * g,
        lambda x, g: functional.layer_norm(x, (4,)) * g,
    ),
    "gain first, unbiased": (
        lambda x, g: g * centred(x) / (x.std(-1, keepdim=True) + 0.0),
        lambda x, g: functional.layer_norm(x, (4,), eps=0.0) * 0.75**0.5 * g,
    ),
    "gain first, not centred": (
        lambda x, g: g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, g: functional.rms_norm(x, (4,), eps=1e-6) * g,
    ),
    "F.normalize": (
        lambda x, g: functional.normalize(x, dim=-1) * g,
        lambda x, g: of_unit_length(x) * g,
    ),
    "norm": (
        lambda x, g: x / x.norm(dim=-1, keepdim=True) * g,
        lambda x, g: of_unit_length(x) * g,
    ),
    "vector norm": (
        lambda x, g: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-9) * g,
        lambda x, g: of_unit_length(x) * g,
    ),
    "sum of squares": (
        lambda x, g: x / x.square().sum(-1, keepdim=True).sqrt() * g,
        lambda x, g: of_unit_length(x) * g,
    ),
}


class WithGain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.gain = function, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.function(x, self.gain)


@pytest.mark.parametrize("way", LAYERS_BY_HAND)
def test_layers_written_by_hand_have_the_geometry_of_layers(way):
    data = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for function in LAYERS_BY_HAND[way]:
        layers = nn.Linear(3, 4), WithGain(function), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
        model = shaken(nn.Sequential(*layers))
        network = ps.trace(model, data[:1], strict=True)
        assert not network.cuts
        assert network.num_classes == 8
        quantities = [ps.paths.kappa(network), ps.paths.data_dependent_kappa(network, data)]
        quantities.append(ps.paths.data_dependent_kappa(network, data, statistic="covariance"))
        before = model(data)
        ps.rescaling.random_rescale_(network, powers_of_two=True)
        assert torch.equal(model(data), before)
        found.append([before.detach(), *quantities])
    assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_mean_that_something_else_needs_is_not_held():
    """What is centred goes on beside its normalization: its mean is a sum over units there."""

    class Both(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.function = function

        def forward(self, x):
            return self.second(self.function(self.first(x)))

    def by_hand(x):
        d = centred(x)
        return d / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() + d

    data = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (by_hand, lambda x: functional.layer_norm(x, (4,)) + centred(x)):
        network = ps.trace(shaken(Both(function)), data[:1])
        found.append(ps.paths.kappa(network))
    assert_close(*found, rtol=1e-12, atol=0)


def centred_over_others(x):
    return (x - x.mean(1, keepdim=True)) / x.var(-1, keepdim=True).sqrt()


NOT_ONE = {
    "no root": lambda x: x * x.pow(2).mean(-1, keepdim=True),
    "divided by the square": lambda x: x / x.pow(2).mean(-1, keepdim=True),
    "another tensor": lambda x: x.flip(-1) * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "a sum of activations": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.abs()),
    "no mean": lambda x: x * x.pow(2).rsqrt(),
    "a cube": lambda x: x * x.pow(3).mean(-1, keepdim=True).rsqrt(),
    "not centred above": lambda x: x / x.std(-1, keepdim=True),
    "not centred below": lambda x: centred(x) / x.pow(2).mean(-1, keepdim=True).sqrt(),
    "centred over others": lambda x: centred_over_others(x.view(-1, 2, 2)).flatten(1),
    "divided by the variance": lambda x: centred(x) / x.var(-1, keepdim=True),
    "absolute values": lambda x: x / x.norm(1, dim=-1, keepdim=True),
    "a bound from above": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(1e-3, 2.0),
    "a spread that all share": lambda x: centred(x) / x.std(),
}


@pytest.mark.parametrize("way", NOT_ONE)
def test_what_only_looks_like_one_is_refused(way):
    model = nn.Sequential(nn.Linear(3, 4), Written(NOT_ONE[way]), nn.Linear(4, 2))
    with pytest.raises(ps.UntraceableError, match=r"'(pow|rsqrt|sqrt|std|var|norm)'"):
        ps.trace(model, torch.zeros(1, 3), strict=True)


def test_a_mean_square_that_is_returned_is_a_product():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.first(x)
            return self.second(h.relu()), h.pow(2).mean(-1, keepdim=True)

    model = shaken(Energy())
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert network.num_classes == 0
    h = model.first.weight.square().sum(1) + model.first.bias.square()
    expected = (
        h.square().sum() / 16
        + (model.second.weight.square() @ h + model.second.bias.square()).sum()
    )
    assert squared_path_norm(network).item() == pytest.approx(expected.item())


def test_statistics_may_be_of_several_dimensions_and_without_gains():
    conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    model = shaken(
        nn.Sequential(
            conv, nn.LayerNorm((2, 3, 3), elementwise_affine=False), nn.Flatten(), nn.Linear(18, 1)
        )
    )
    network = ps.trace(model, torch.zeros(1, 1, 3, 3).double())
    assert network.num_classes == 0
    q = {key: p.detach().square().requires_grad_() for key, p in network.parameters.items()}
    z = functional.conv2d(torch.ones(1, 1, 3, 3).double(), q["0.weight"], padding=1)
    total = (over_mean(z, (1, 2, 3)).flatten(1) @ q["3.weight"].T + q["3.bias"]).sum()
    expected = dict(zip(q, torch.autograd.grad(total, list(q.values())), strict=True))
    assert_close(ps.paths.kappa(network), expected, **TIGHT)


def test_tokens_are_normalized_one_by_one():
    model = shaken(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)))
    network = ps.trace(model, torch.zeros(1, 7, dtype=torch.long))
    z = model[0].weight.square().sum(0)
    y = model[1].weight.square() * z / z.mean() + model[1].bias.square()
    expected = 7 * (model[3].weight.square() @ y + model[3].bias.square()).sum()
    assert squared_path_norm(network).item() == pytest.approx(expected.item())


def test_instance_norm_with_running_statistics_is_a_fixed_map():
    kappa = []
    for kind in (nn.InstanceNorm1d, nn.BatchNorm1d):
        norm = kind(4, affine=True, track_running_stats=True)
        model = shaken(
            nn.Sequential(nn.Conv1d(1, 4, 2), norm, nn.Flatten(), nn.Linear(12, 2))
        ).eval()
        norm.running_mean.copy_(torch.arange(4.0))
        norm.running_var.copy_(torch.arange(1.0, 5.0))
        kappa.append(ps.paths.kappa(ps.trace(model, torch.zeros(1, 1, 4).double())))
    assert_close(*kappa, rtol=0, atol=0)


def test_what_is_normalized_holds_no_batch():
    network = ps.trace(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((5, 4))), torch.zeros(5, 3))
    assert network.call.batch_dim is None


def test_the_gauge_is_the_size_of_what_enters():
    """At PyTorch's start it is one, and ``balance_`` brings every member back to there."""
    torch.manual_seed(0)
    model = NormalizedBlocks(nn.BatchNorm1d).double()
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert_close(node_mass(network).gauge(), torch.ones(4).double(), **TIGHT)
    factors = torch.tensor([0.5, 3.0, 8.0, 1e3]).double()
    ps.rescaling.rescale_(network, factors)
    assert_close(node_mass(network).gauge(), factors, **TIGHT)
    ps.rescaling.balance_(network)
    assert_close(node_mass(network).gauge(), torch.ones(4).double(), **TIGHT)
    with torch.no_grad():  # nothing enters a class: the scale of its other side
        for norm in (model.first, model.second):
            norm.weight[0] = norm.bias[0] = 0
    found = node_mass(network)
    assert found.into[0] == 0
    assert found.gauge()[0].item() == pytest.approx(found.out_of[0].item() ** -0.5)


POOLS = {
    "overlapping, with padding": (
        lambda h: functional.max_pool1d(h, 3, 2, 1),
        lambda h: functional.avg_pool1d(h, 3, 2, 1, count_include_pad=False),
    ),
    "beyond the edge": (
        lambda h: functional.max_pool1d(h, 4, 4, ceil_mode=True),
        lambda h: functional.avg_pool1d(h, 4, 4, ceil_mode=True),
    ),
    "adaptive": (
        lambda h: functional.adaptive_max_pool1d(h, 4),
        lambda h: functional.adaptive_avg_pool1d(h, 4),
    ),
    "with its indices": (
        lambda h: functional.max_pool1d(h, 2, return_indices=True)[0],
        lambda h: functional.avg_pool1d(h, 2),
    ),
    "along a dimension": (lambda h: h.amax(-1), lambda h: h.mean(-1)),
    "along a dimension, with its place": (lambda h: h.max(-1).values, lambda h: h.mean(-1)),
}


class Pooled(nn.Module):
    """A normalized convolution, a maximum, and a hidden layer behind it."""

    def __init__(self, largest):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3, padding=1, bias=False), nn.BatchNorm1d(3)
        self.hidden, self.out, self.largest = nn.LazyLinear(5), nn.Linear(5, 2), largest

    def forward(self, x):
        h = self.largest(self.norm(self.conv(x)).relu())
        return self.out(self.hidden(h.flatten(1)).relu())


@pytest.mark.parametrize("pool", POOLS)
def test_one_of_a_window_goes_on_in_the_gauge_where_kappa_adds_it_up(pool):
    """A maximum has the size of one of its values, and the units behind it of what enters from there."""
    largest, mean = POOLS[pool]

    x = torch.zeros(1, 1, 6).double()
    model = Pooled(largest).double()
    model(x)
    network = ps.trace(shaken(model), x)
    q = {name: p.detach().square() for name, p in network.parameters.items()}
    z = functional.conv1d(torch.ones_like(x), q["conv.weight"], padding=1)
    h = over_mean(z, (0, 2)) * q["norm.weight"].view(1, -1, 1) + q["norm.bias"].view(1, -1, 1)
    pooled = mean(h)
    hidden = functional.linear(pooled.flatten(1), q["hidden.weight"], q["hidden.bias"])[0]
    channels = torch.cat([h[0], pooled[0].view(3, -1)], 1).mean(1)
    expected = torch.cat([channels, hidden]).sqrt()
    assert_close(node_mass(network).gauge(), expected, **TIGHT)
    factors = torch.arange(2.0, 10.0).double()
    ps.rescaling.rescale_(network, factors)
    assert_close(node_mass(network).gauge(), expected * factors, **TIGHT)


@pytest.mark.parametrize("rule", ["PathSGD", "GSGD", "DDPAdam", "PathMuon"])
@pytest.mark.sample(2)
def test_steps_behind_a_normalized_maximum_are_bitwise_invariant(rule):
    torch.manual_seed(0)
    model, x = Pooled(POOLS["overlapping, with padding"][0]), torch.randn(4, 1, 6)
    model(x)
    report = ps.rescaling.check_invariance(
        model,
        x,
        loss=lambda output: output.square().mean(),
        make_optimizer=lambda m, network: getattr(ps.optim, rule)(m.parameters(), network, lr=0.01),
        steps=12,
    )
    assert report.passed
    assert report.largest_output_difference == 0


@pytest.mark.parametrize("t", [2.0**-70, 2.0**60])
def test_weights_in_front_may_leave_the_room_of_their_type_when_squared(t):
    model, _, _ = network_of("batch norm of images")
    x = torch.zeros(1, 1, 4, 4)
    expected = ps.paths.kappa(ps.trace(model, x.double()))
    model = model.float()
    with torch.no_grad():
        model.conv.weight.mul_(t)
    found = ps.paths.kappa(ps.trace(model, x))
    for key, k in found.items():
        assert_close(
            k.double(), expected[key] / (t**2 if key == "conv.weight" else 1), rtol=1e-5, atol=0
        )


def test_a_normalization_may_be_the_last_layer():
    model = shaken(nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4)))
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert network.num_classes == 0
    q = {key: p.detach().square().requires_grad_() for key, p in network.parameters.items()}
    total = (over_mean(q["0.weight"].sum(1), 0) * q["1.weight"] + q["1.bias"]).sum()
    expected = dict(zip(q, torch.autograd.grad(total, list(q.values())), strict=True))
    assert_close(ps.paths.kappa(network), expected, **TIGHT)


def test_one_normalization_at_several_places():
    """Each call normalizes by itself; the gains are tied."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.step = nn.Linear(2, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.norm, self.out = nn.LayerNorm(3), nn.Linear(3, 1)

        def forward(self, x):
            h = self.norm(self.read(x)).relu()
            for _ in range(2):
                h = self.norm(self.step(h)).relu()
            return self.out(h)

    model = shaken(Loop())
    network = ps.trace(model, torch.zeros(1, 2).double())
    assert network.num_classes == 3
    q = {key: p.detach().square().requires_grad_() for key, p in network.parameters.items()}
    h = q["read.weight"].sum(1)
    for last in (False, False, True):
        h = over_mean(h, 0) * q["norm.weight"] + q["norm.bias"]
        h = h if last else q["step.weight"] @ h
    total = q["out.weight"][0] @ h + q["out.bias"][0]
    expected = dict(zip(q, torch.autograd.grad(total, list(q.values())), strict=True))
    assert_close(ps.paths.kappa(network), expected, **TIGHT)
    both = ps.paths.kappa(network, second_term=True)
    assert bool((both["step.weight"] > expected["step.weight"]).any())
