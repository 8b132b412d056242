"""Normalization by statistics of what enters, against squared networks written out by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import NormalizedResidual, half_mean_square
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


class Blocks(nn.Module):
    """Normalized features, a residual block of them, and a head."""

    def __init__(self, normalize):
        super().__init__()
        self.embed, self.first = nn.Linear(3, 4, bias=False), normalize(4)
        self.inner, self.second = nn.Linear(4, 4, bias=False), normalize(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(self.embed(x)).relu()
        return self.head(h + self.second(self.inner(h)).relu())


def blocks(q, over):
    """The squared network of `Blocks` by hand: gamma^2 at the inner nodes, and at the outputs."""

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


NETWORKS = {
    "batch norm": (lambda: Blocks(nn.BatchNorm1d), (3,), lambda q: blocks(q, 0)),
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
    if name == "batch norm":
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
    stem = "embed" if name == "batch norm" else "stem"
    with torch.no_grad():
        model.second.weight.zero_()
    kappa = ps.paths.kappa(network)
    inner = "inner.weight" if name == "batch norm" else "conv.weight"
    assert not kappa[inner].any()
    assert (kappa["second.weight"] > 0).all()
    with torch.no_grad():
        model.get_submodule(stem).weight.zero_()
    kappa = ps.paths.kappa(network)
    assert all(torch.isfinite(k).all() for k in kappa.values())
    assert not kappa[f"{stem}.weight"].any()
    assert not kappa["first.weight"].any()
    assert (kappa["first.bias"] > 0).all()
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
    model = shaken(nn.Sequential(*Blocks(nn.BatchNorm1d).children())).eval()
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


# --- on data ---------------------------------------------------------------------------------------------


def with_statistics_of(model, x):
    """A copy in evaluation form whose running statistics are those of a batch."""
    held = copy.deepcopy(model).train()
    norms = [m for m in held.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def note(norm, args):
        over = [d for d in range(args[0].dim()) if d != 1]
        norm.running_var, norm.running_mean = torch.var_mean(args[0].detach(), over, correction=0)

    for norm in norms:
        norm.momentum = 0.0
        norm.register_forward_pre_hook(note)
    held(x)
    for norm in norms:
        norm._forward_pre_hooks.clear()
    return held.eval()


@EACH
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_on_data_the_statistics_of_the_batch_are_held(name, statistic):
    model, network, _ = network_of(name)
    torch.manual_seed(1)
    x = torch.randn(6, *NETWORKS[name][1], dtype=torch.float64)
    expected = ps.trace(with_statistics_of(model, x), x)
    options = {"alpha": 1.0, "statistic": statistic}
    ours, theirs = (ps.paths.data_dependent_kappa(n, x, **options) for n in (network, expected))
    assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    norms = [ps.paths.data_dependent_norm(n, x, **options).item() for n in (network, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)


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
