"""Normalization by statistics of what enters, against squared networks written out by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import NormalizedBlocks, NormalizedResidual, RootMeanSquare, half_mean_square
from pathspace.paths.kernel.node_mass import node_mass
from pathspace.paths.kernel.norm import squared_path_norm

TIGHT = {"rtol": 1e-11, "atol": 1e-13}


def shaken(model):
    """In float64, with gains and biases away from one and zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) / max(1, p[0].numel() if p.dim() else 1) ** 0.5 + 0.1)
    return model.double().train()


def over_mean(z, dims):
    """The rule: what enters over its mean, held."""
    return z / z.mean(dims, keepdim=True).detach()


def blocks(q, over):
    """The squared network of `NormalizedBlocks` by hand: gamma^2 at the inner nodes, and at the outputs."""

    def normalized(z, layer):
        y = over_mean(z, over) * q[f"{layer}.weight"]
        return y + q[f"{layer}.bias"] if f"{layer}.bias" in q else y

    one = q["embed.weight"].new_ones(1, 3)
    h = normalized(one @ q["embed.weight"].T, "first")
    r = normalized(h @ q["inner.weight"].T, "second")
    return [h, r], (h + r) @ q["head.weight"].T + q["head.bias"]


def images(q, normalize):
    """The squared network of `NormalizedResidual` by hand."""
    one = q["stem.weight"].new_ones(1, 1, 4, 4)
    h = normalize(functional.conv2d(one, q["stem.weight"], padding=1), q, "first")
    r = normalize(functional.conv2d(h, q["conv.weight"], padding=1), q, "second")
    y = normalize(functional.conv2d(h + r, q["down.weight"], stride=2, padding=1), q, "third")
    return [h, r, y], y.flatten(1) @ q["head.weight"].T + q["head.bias"]


def by_channel(z, q, layer):
    n = over_mean(z, (0, 2, 3))
    return n * q[f"{layer}.weight"].view(1, -1, 1, 1) + q[f"{layer}.bias"].view(1, -1, 1, 1)


def by_group(z, q, layer):
    n = over_mean(z.view(1, 2, -1), 2).view(z.shape)
    return n * q[f"{layer}.weight"].view(1, -1, 1, 1) + q[f"{layer}.bias"].view(1, -1, 1, 1)


NETWORKS = {
    "layer norm": (lambda: NormalizedBlocks(nn.LayerNorm), (3,), lambda q: blocks(q, 1)),
    "layer norm without a bias": (
        lambda: NormalizedBlocks(lambda n: nn.LayerNorm(n, bias=False)),
        (3,),
        lambda q: blocks(q, 1),
    ),
    "rms norm": (lambda: NormalizedBlocks(nn.RMSNorm), (3,), lambda q: blocks(q, 1)),
    "rms norm by hand": (lambda: NormalizedBlocks(RootMeanSquare), (3,), lambda q: blocks(q, 1)),
    "group norm of images": (
        lambda: NormalizedResidual(lambda n: nn.GroupNorm(2, n)),
        (1, 4, 4),
        lambda q: images(q, by_group),
    ),
    "instance norm of images": (
        lambda: NormalizedResidual(lambda n: nn.InstanceNorm2d(n, affine=True)),
        (1, 4, 4),
        lambda q: images(q, by_channel),
    ),
    "batch norm": (lambda: NormalizedBlocks(nn.BatchNorm1d), (3,), lambda q: blocks(q, 0)),
    "batch norm of images": (
        lambda: NormalizedResidual(nn.BatchNorm2d),
        (1, 4, 4),
        lambda q: images(q, by_channel),
    ),
}
EACH = pytest.mark.parametrize("name", NETWORKS)


def network_of(name):
    build, shape, hand = NETWORKS[name]
    model = shaken(build())
    return model, ps.trace(model, torch.zeros(1, *shape).double()), hand


def by_hand(network, hand):
    """Squared path norm, kappa, and gamma^2 and dG/dgamma^2 of the inner nodes."""
    q = {name: p.detach().square().requires_grad_() for name, p in network.parameters.items()}
    nodes, outputs = hand(q)
    total = outputs.sum()
    grads = torch.autograd.grad(total, [*q.values(), *nodes])
    masses = [(h.detach(), d) for h, d in zip(nodes, grads[len(q) :], strict=True)]
    return total.item(), dict(zip(q, grads[: len(q)], strict=True)), masses


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
def test_weights_in_front_scale_kappa_inversely_and_nothing_else(name):
    """The function of t stays but for eps; with powers of two nothing is rounded."""
    model, network, _ = network_of(name)
    before = ps.paths.kappa(network)
    norm = squared_path_norm(network).item()
    fronts = [
        key for key in network.parameters if key.split(".")[0] in ("embed", "inner", "stem", "conv", "down")
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


# --- forms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_trace_in_training_form_leaves_the_statistics_alone(dim):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1](1, 2, 3)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](2)
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
    found = {key: ps.paths.kappa(n)["0.weight"] for key, n in (("f", fixed), ("m", mixed), ("b", batch))}
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


# --- layers ----------------------------------------------------------------------------------------------


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
        model = shaken(nn.Sequential(nn.Linear(3, 4), Written(function), nn.ReLU(), nn.Linear(4, 2)))
        network = ps.trace(model, torch.zeros(1, 3).double())
        assert network.num_classes == 4
        found.append(ps.paths.kappa(network))
    assert_close(*found, rtol=0, atol=0)


NOT_ONE = {
    "no root": lambda x: x * x.pow(2).mean(-1, keepdim=True),
    "divided by the square": lambda x: x / x.pow(2).mean(-1, keepdim=True),
    "another tensor": lambda x: x.flip(-1) * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "a sum of activations": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.abs()),
    "no mean": lambda x: x * x.pow(2).rsqrt(),
    "a cube": lambda x: x * x.pow(3).mean(-1, keepdim=True).rsqrt(),
}


@pytest.mark.parametrize("way", NOT_ONE)
def test_what_only_looks_like_one_is_refused(way):
    model = nn.Sequential(nn.Linear(3, 4), Written(NOT_ONE[way]), nn.Linear(4, 2))
    with pytest.raises(ps.UntraceableError, match=r"'(pow|rsqrt)'"):
        ps.trace(model, torch.zeros(1, 3))


def test_a_mean_square_that_is_returned_has_what_it_is_of_for_an_output():
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
    expected = h.sum() + (model.second.weight.square() @ h + model.second.bias.square()).sum()
    assert squared_path_norm(network).item() == pytest.approx(expected.item())


def test_statistics_may_be_of_several_dimensions_and_without_gains():
    conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    model = shaken(
        nn.Sequential(conv, nn.LayerNorm((2, 3, 3), elementwise_affine=False), nn.Flatten(), nn.Linear(18, 1))
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
        model = shaken(nn.Sequential(nn.Conv1d(1, 4, 2), norm, nn.Flatten(), nn.Linear(12, 2))).eval()
        norm.running_mean.copy_(torch.arange(4.0))
        norm.running_var.copy_(torch.arange(1.0, 5.0))
        kappa.append(ps.paths.kappa(ps.trace(model, torch.zeros(1, 1, 4).double())))
    assert_close(*kappa, rtol=0, atol=0)


def test_what_is_normalized_holds_no_batch():
    network = ps.trace(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((5, 4))), torch.zeros(5, 3))
    assert network.call.batch_dim is None


# --- on data ---------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A normalization whose statistics are constants to autograd."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm, n = self.norm, x.dim()
        place, parts = (1, -1) + (1,) * (n - 2), x
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            over = [d for d in range(n) if d != 1]
        elif isinstance(norm, nn.GroupNorm):
            parts, over = x.reshape(len(x), norm.num_groups, -1), (2,)
        elif isinstance(norm, nn.InstanceNorm2d):
            over = (2, 3)
        else:
            place, over = (-1,), (n - 1,)
        fixed = parts.detach()
        mean = 0 if isinstance(norm, (nn.RMSNorm, RootMeanSquare)) else fixed.mean(over, keepdim=True)
        square = (fixed - mean).square().mean(over, keepdim=True)
        eps = getattr(norm, "eps", 1e-6)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        y = ((parts - mean) / (square + eps).sqrt()).reshape(x.shape) * norm.weight.reshape(place)
        return y if getattr(norm, "bias", None) is None else y + norm.bias.reshape(place)


@EACH
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_on_data_statistics_are_held(name, statistic):
    """alpha = 1 is the squared Jacobian of the outputs, example by example."""
    model, network, _ = network_of(name)
    torch.manual_seed(1)
    x = torch.randn(6, *NETWORKS[name][1], dtype=torch.float64)
    held = copy.deepcopy(model)
    for layer in ("first", "second", "third"):
        if hasattr(held, layer):
            setattr(held, layer, Held(getattr(held, layer)))
    outputs = held(x)
    assert_close(outputs, model(x), rtol=1e-9, atol=1e-11)
    weights = dict(zip(network.parameters, held.parameters(), strict=True))
    squares = {key: torch.zeros_like(p) for key, p in weights.items()}
    for k in range(outputs.shape[1]):
        rows = [
            torch.autograd.grad(outputs[i, k], list(weights.values()), retain_graph=True) for i in range(6)
        ]
        for key, *slopes in zip(weights, *rows, strict=True):
            J = torch.stack(slopes)
            squares[key] += J.square().mean(0) if statistic == "second_moment" else J.var(0, correction=0)
    options = {"alpha": 1.0, "statistic": statistic}
    assert_close(ps.paths.data_dependent_kappa(network, x, **options), squares, rtol=1e-9, atol=1e-11)
    if statistic == "second_moment":
        norm = ps.paths.data_dependent_norm(network, x, alpha=1.0)
        assert norm.item() == pytest.approx(outputs.square().mean(0).sum().item(), rel=1e-10)
        edges = ps.paths.data_dependent_kappa(network, x, alpha=0.5, sharing="edges")
        assert all(bool((k >= 0).all()) for k in edges.values())


def test_on_data_the_mean_is_that_of_the_data_dependent_measure():
    model, network, _ = network_of("batch norm")
    torch.manual_seed(1)
    x, alpha = torch.randn(6, 3, dtype=torch.float64), 0.3
    q = {name: p.detach().square() for name, p in network.parameters.items()}
    h = model.first(model.embed(x))
    r = model.second(model.inner(h.relu()))
    output = model(x)

    def mixed(z, path):
        return alpha * z.detach().square().mean(0) + (1 - alpha) * path

    h = mixed(h, q["first.weight"] + q["first.bias"])  # one feature is its own mean
    r = mixed(r, q["second.weight"] + q["second.bias"])
    expected = mixed(output, q["head.weight"] @ (h + r) + q["head.bias"])
    found = ps.paths.data_dependent_norm(network, x, alpha=alpha)
    assert found.item() == pytest.approx(expected.sum().item(), rel=1e-10)
    value = ps.paths.data_dependent_kappa(network, x, alpha=alpha)
    assert all(bool((k >= 0).all()) for k in value.values())


# --- training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["PathSGD", "PathAdam"])
def test_an_optimizer_goes_on_in_the_form_of_its_network(optimizer):
    """An evaluation between two steps changes nothing."""
    runs = []
    for pause in (False, True):
        model, network, _ = network_of("batch norm of images")
        rule = getattr(ps.optim, optimizer)(model.parameters(), network, lr=0.01)
        torch.manual_seed(1)
        for _ in range(5):
            x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
            rule.zero_grad()
            half_mean_square(model(x)).backward()
            if pause:
                model.eval()
            rule.step()
            model.train()
        runs.append(model.state_dict())
    assert_close(dict(runs[0]), dict(runs[1]), rtol=0, atol=0)


def test_the_gauge_is_the_size_of_what_enters():
    """At PyTorch's start it is one; balance is another member, where gains make up for all that lies behind them."""
    torch.manual_seed(0)
    model = NormalizedBlocks(nn.BatchNorm1d).double()
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert_close(node_mass(network).gauge(), torch.ones(4).double(), **TIGHT)
    factors = torch.tensor([0.5, 3.0, 8.0, 1e3]).double()
    ps.rescaling.rescale_(network, factors)
    assert_close(node_mass(network).gauge(), factors, **TIGHT)
    ps.rescaling.balance_(network)
    found = node_mass(network)
    assert_close(found.into, found.out_of, **TIGHT)
    assert_close(found.balance(), torch.ones(4).double(), **TIGHT)
    with torch.no_grad():  # nothing enters a class: the scale of its other side
        for norm in (model.first, model.second):
            norm.weight[0] = norm.bias[0] = 0
    found = node_mass(network)
    assert found.into[0] == 0
    assert found.gauge()[0].item() == pytest.approx(found.out_of[0].item() ** -0.5)
