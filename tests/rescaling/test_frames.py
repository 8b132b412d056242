"""Frames: the members with unit measure and those evened within layers, by brute force; who is invariant in them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing import assert_close

import pathspace as ps
from cases import ZOO, Recurrent, mlp, of_each_kind, traced
from pathspace.rescaling.frames import scales_of

TIGHT = {"rtol": 1e-9, "atol": 0.0}
POWERS = 2.0 ** torch.tensor([3.0, -2.0, 0.0, 5.0, -4.0, 1.0, 2.0, -6.0])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def deep(width=4):
    torch.manual_seed(0)
    return mlp(3, width, width, 2).double()


def values_of(model, x, layers):
    """What the units of some layers receive on data, by hooks of the model itself."""
    found = []
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out: found.append(out.detach()))
        for layer in layers
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def layer_factors(classes, layers, *, mean_one):
    """Random factors of layers of equal size, with geometric mean 1 in each, or not."""
    logs = torch.randn(layers, classes // layers, generator=generator(3), dtype=torch.float64)
    return (logs - logs.mean(1, keepdim=True) if mean_one else logs).flatten().exp()


# --- unit measure, by brute force -----------------------------------------------------------------


def test_units_of_an_mlp_have_mean_square_one():
    model, x = deep(), torch.randn(50, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    before = model(x).detach()
    ps.rescaling.balance_(network, x, criterion="measure")
    for z in values_of(model, x, (model[0], model[2])):
        assert_close(z.square().mean(0), torch.ones(4, dtype=torch.float64), **TIGHT)
    assert_close(model(x), before)


def test_channels_have_mean_square_one_over_examples_and_positions():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2),
    ).double()  # fmt: skip
    x = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    network = ps.trace(model, x)
    ps.rescaling.balance_(network, x, criterion="measure")
    for z in values_of(model, x, (model[0], model[3], model[6])):
        sizes = z.square().transpose(0, 1).flatten(1).mean(1)
        assert_close(sizes, torch.ones_like(sizes), **TIGHT)


def test_recurrent_units_have_mean_square_one_over_steps():
    torch.manual_seed(0)
    model, x = Recurrent(batch_first=True).double(), torch.randn(9, 4, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    ps.rescaling.balance_(network, x, criterion="measure")
    rnn, h, sizes = model.rnn, 0.0, []
    for t in range(4):
        z = x[:, t] @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + rnn.bias_hh_l0
        z = z + (h @ rnn.weight_hh_l0.T if t else 0.0)
        sizes.append(z.square().mean(0))
        h = z.relu()
    mean = torch.stack(sizes).mean(0).detach()
    assert_close(mean, torch.ones_like(mean), **TIGHT)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_measure_mixes_data_with_paths(alpha):
    """gamma_v^2 = alpha mean z_v^2 + (1 - alpha) sum of w_uv^2 gamma_u^2, bias node and inputs having 1."""
    model, x = deep(), torch.randn(50, 3, dtype=torch.float64)
    ps.rescaling.balance_(ps.trace(model, x), x, criterion="measure", alpha=alpha)
    gamma = torch.ones(3, dtype=torch.float64)
    layers = (model[0], model[2])
    for layer, z in zip(layers, values_of(model, x, layers), strict=True):
        paths = layer.weight.detach().square() @ gamma + layer.bias.detach().square()
        gamma = alpha * z.square().mean(0) + (1 - alpha) * paths
        assert_close(gamma, torch.ones(4, dtype=torch.float64), **TIGHT)


def test_without_data_inputs_of_size_one_are_assumed_and_half_enters():
    """He's start has the squares of a row 2 / n, and about 1 enters each unit, however deep."""
    model = deep()
    ps.rescaling.balance_(
        ps.trace(model, torch.zeros(1, 3, dtype=torch.float64)), criterion="measure"
    )
    mass = torch.ones(3, dtype=torch.float64)
    for layer in (model[0], model[2]):
        mass = (layer.weight.detach().square() @ mass + layer.bias.detach().square()) / 2
        assert_close(mass, torch.ones(4, dtype=torch.float64), **TIGHT)


# --- on all networks ------------------------------------------------------------------------------

# a learned initial state of nn.RNN cannot be followed on data
WITH_CLASSES = [case for case in ZOO if case.classes and case.name != "rnn with a learned start"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", of_each_kind(WITH_CLASSES), ids=str)
def test_every_member_goes_to_the_one_with_unit_measure(case):
    model, network = traced(case, torch.float64)
    x = case.example(8, torch.float64)
    ps.rescaling.balance_(network, x, criterion="measure", alpha=0.5)
    measures = ps.paths.unit_measure(network, x, alpha=0.5).squared
    live = measures > 0
    assert live.any()
    assert_close(measures[live], torch.ones_like(measures[live]), **TIGHT)
    member = copy.deepcopy(model.state_dict())
    again = ps.rescaling.balance_(network, x, criterion="measure", alpha=0.5)
    assert_close(again, torch.ones_like(again), **TIGHT)
    ps.rescaling.random_rescale_(network, generator=generator())
    ps.rescaling.balance_(network, x, criterion="measure", alpha=0.5)
    assert_close(dict(model.state_dict()), dict(member), rtol=1e-8, atol=1e-12)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", of_each_kind(WITH_CLASSES), ids=str)
def test_the_measure_of_a_rescaled_unit_has_the_square_of_its_factor(case):
    _model, network = traced(case, torch.float64)
    x = case.example(8, torch.float64)
    before = ps.paths.unit_measure(network, x, alpha=0.5).squared
    factors = ps.rescaling.random_rescale_(network, 0.1, 10.0, generator=generator())
    after = ps.paths.unit_measure(network, x, alpha=0.5).squared
    assert_close(after, before * factors.square(), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("name", ["measure", "balanced"])
def test_scales_follow_powers_of_two_to_the_last_bit(name):
    model, x = deep().float(), torch.randn(50, 3)
    network = ps.trace(model, x)
    before = scales_of(network, name, x)
    ps.rescaling.rescale_(network, POWERS)
    assert torch.equal(scales_of(network, name, x), before * POWERS)


# --- within layers --------------------------------------------------------------------------------


def test_layers_keep_the_geometric_mean_of_their_scales():
    model, x = deep(), torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    factors = ps.rescaling.balance_(network, x, criterion="layers")
    assert_close(factors.log().view(2, 4).mean(1), torch.zeros(2, dtype=torch.float64))
    balance = 1 / scales_of(network, "balanced")
    assert_close(balance.view(2, 4), balance.view(2, 4)[:, :1].expand(2, 4))


def test_layers_are_the_same_member_for_factors_of_mean_one_and_for_no_others():
    x = torch.randn(5, 3, dtype=torch.float64)
    members = {}
    for mean_one in (None, True, False):
        model = deep()
        network = ps.trace(model, x)
        if mean_one is not None:
            ps.rescaling.rescale_(network, layer_factors(8, 2, mean_one=mean_one))
        ps.rescaling.balance_(network, x, criterion="layers")
        members[mean_one] = model[0].weight.detach()
    assert_close(members[True], members[None])
    ratio = members[False] / members[None]
    assert not torch.allclose(ratio, torch.ones_like(ratio), rtol=0.05)


# --- optimizers -----------------------------------------------------------------------------------


def trained(make, factors=None, *, steps=25, dtype=torch.float32):
    """Outputs of a network in training, from weights rescaled by factors."""
    model = deep().to(dtype)
    network = ps.trace(model, torch.zeros(2, 3, dtype=dtype))
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    optimizer = make(model.parameters(), network)
    outputs, draws = [], generator(1)
    for _ in range(steps):
        x = torch.randn(6, 3, generator=draws).to(dtype)
        optimizer.zero_grad()
        y = model(x)
        (y - x[:, :2]).square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return torch.stack(outputs)


def _sgd(metric):
    return lambda params, network: ps.optim.Invariant(
        params, network, torch.optim.SGD, lr=0.05, metric=metric()
    )


MAKERS = {
    "PathSGD": lambda frame: lambda p, n: ps.optim.PathSGD(p, n, lr=0.05, momentum=0.9, frame=frame),
    "PathAdam": lambda frame: lambda p, n: ps.optim.PathAdam(p, n, lr=0.01, frame=frame),
    "PathMuon": lambda frame: lambda p, n: ps.optim.PathMuon(p, n, lr=0.01, frame=frame),
    "DDPSGD": lambda frame: lambda p, n: ps.optim.DDPSGD(p, n, lr=0.05, frame=frame),
    "Balanced": lambda frame: _sgd(lambda: ps.metrics.Balanced(frame=frame)),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MAKERS)
def test_training_in_the_frame_of_unit_measure_is_bitwise_invariant(name):
    plain = trained(MAKERS[name]("measure"))
    assert torch.equal(trained(MAKERS[name]("measure"), POWERS), plain)
    assert not torch.equal(trained(MAKERS[name]("balanced")), plain)
    assert not torch.equal(trained(MAKERS[name](ps.metrics.Frame("measure", alpha=0.5))), plain)


def test_training_within_layers_is_invariant_for_factors_of_mean_one_and_for_no_others():
    make = MAKERS["PathSGD"]("layers")
    plain = trained(make)
    mean_one = 2.0 ** torch.tensor([3.0, -2.0, 0.0, -1.0, -4.0, 1.0, 5.0, -2.0])
    assert torch.equal(trained(make, mean_one), plain)
    one_layer = torch.tensor([2.0] * 4 + [1.0] * 4)
    assert (trained(make, one_layer) - plain).abs().max() > 1e-3


def test_training_on_the_weights_as_they_are_depends_on_their_scales():
    assert not torch.equal(
        trained(MAKERS["PathSGD"]("weights"), POWERS), trained(MAKERS["PathSGD"]("weights"))
    )


def test_the_plain_rule_on_the_weights_as_they_are_is_the_plain_rule():
    x = torch.randn(6, 3, generator=generator(1), dtype=torch.float64)
    models = [deep(), deep()]
    metric = ps.metrics.Balanced(frame="weights")
    rules = [
        torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
        ps.optim.PathSGD(
            models[1].parameters(), ps.trace(models[1], x), lr=0.1, momentum=0.9, metric=metric
        ),
    ]
    for _ in range(5):
        for model, rule in zip(models, rules, strict=True):
            rule.zero_grad()
            model(x).square().mean().backward()
            rule.step()
        assert_close(models[0](x), models[1](x), rtol=1e-12, atol=1e-14)


def test_it_is_the_plain_rule_on_the_balanced_member():
    x = torch.randn(6, 3, generator=generator(1), dtype=torch.float64)
    models = [deep(), deep()]
    ps.rescaling.balance_(ps.trace(models[0], x), x, criterion="measure")
    metric = ps.metrics.Balanced(frame=ps.metrics.Frame("measure", data=x))
    rules = [
        torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
        ps.optim.Invariant(
            models[1].parameters(),
            ps.trace(models[1], x),
            torch.optim.SGD,
            lr=0.1,
            momentum=0.9,
            metric=metric,
        ),
    ]
    for _ in range(5):
        for model, rule in zip(models, rules, strict=True):
            rule.zero_grad()
            model(x).square().mean().backward()
            rule.step()
        assert_close(models[0](x), models[1](x))


def test_a_resumed_run_keeps_the_frame_of_its_first_batch():
    def steps(model, optimizer, draws, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(6, 3, generator=draws)).square().mean().backward()
            optimizer.step()

    def make(model):
        network = ps.trace(model, torch.zeros(2, 3))
        return ps.optim.PathSGD(model.parameters(), network, lr=0.05, momentum=0.9, frame="measure")

    model, draws = deep().float(), generator(1)
    optimizer = make(model)
    steps(model, optimizer, draws, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), draws.get_state()))
    steps(model, optimizer, draws, 15)
    other, again = deep().float(), torch.Generator()
    other.load_state_dict(saved[0])
    resumed = make(other)
    resumed.load_state_dict(saved[1])
    again.set_state(saved[2])
    assert not other._forward_pre_hooks
    steps(other, resumed, again, 15)
    assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_the_hook_is_gone_after_the_first_step():
    model = deep().float()
    network = ps.trace(model, torch.zeros(2, 3))
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.05, frame="measure")
    assert len(model._forward_pre_hooks) == 1
    model(torch.randn(6, 3)).square().mean().backward()
    optimizer.step()
    assert not model._forward_pre_hooks


def test_a_state_may_be_asked_for_before_the_first_batch():
    ends = []
    for early in (False, True):
        model = deep().float()
        optimizer = MAKERS["PathSGD"]("measure")(
            model.parameters(), ps.trace(model, torch.zeros(2, 3))
        )
        if early:
            get_optimizer_state_dict(model, optimizer)
            assert model._forward_pre_hooks
        model(torch.randn(6, 3, generator=generator())).square().mean().backward()
        optimizer.step()
        ends.append(dict(model.state_dict()))
    assert_close(*ends, rtol=0, atol=0)


def test_a_copy_of_model_and_optimizer_goes_on_alike():
    model = deep().float()
    optimizer = MAKERS["PathSGD"]("measure")(model.parameters(), ps.trace(model, torch.zeros(2, 3)))
    pairs = [(model, optimizer), copy.deepcopy((model, optimizer))]
    x = torch.randn(6, 3)
    for one, rule in pairs:
        for _ in range(3):
            rule.zero_grad()
            one(x).square().mean().backward()
            rule.step()
    assert torch.equal(model(x), pairs[1][0](x))


def test_a_unit_that_no_example_excites_has_the_scale_of_balance():
    model, x = deep(), torch.randn(6, 3, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight[1].zero_()
        model[0].bias[1].zero_()
    network = ps.trace(model, x)
    balanced, measured = (scales_of(network, name, x) for name in ("balanced", "measure"))
    assert measured[1] == balanced[1] > 0
    ps.rescaling.balance_(network, x, criterion="measure")


# --- refusals -------------------------------------------------------------------------------------


def test_a_frame_on_data_needs_a_batch():
    model = deep().float()
    optimizer = ps.optim.PathSGD(
        model.parameters(), ps.trace(model, torch.zeros(2, 3)), lr=0.1, frame="measure"
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"needs a batch.*Frame\('measure', data=inputs\)"):
        optimizer.step()
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _n, _x: ps.metrics.Path(frame="even"), "must be one of 'balanced', 'measure', 'layers', 'weights'"),
        (lambda _n, x: ps.metrics.Frame("layers", data=x), "data and alpha are options of the frame 'measure'"),
        (lambda _n, _x: ps.metrics.Frame("measure", alpha=0), r"alpha must be in \(0, 1\], got 0"),
        (lambda _n, _x: ps.metrics.Frame("measure", alpha=2.0), r"alpha must be in"),
        (lambda n, x: ps.rescaling.balance_(n, x, criterion="layers", alpha=0.5), "alpha is an option of"),
        (lambda n, _x: ps.rescaling.balance_(n, criterion="measure", alpha=0.5), "share of the data: give example"),
        (lambda n, x: ps.rescaling.balance_(n, x, criterion="measure", alpha=0), r"alpha must be in \(0, 1\]"),
        (lambda n, x: ps.rescaling.balance_(n, x, criterion="measure", statistic="mean"), "statistic is an option"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(call, message):
    x = torch.randn(6, 3, dtype=torch.float64)
    network = ps.trace(deep(), x)
    with pytest.raises(ValueError, match=message):
        call(network, x)


def test_data_that_are_not_finite_are_refused_and_nothing_changes():
    model, x = deep(), torch.randn(6, 3, dtype=torch.float64)
    network, before = ps.trace(model, x), copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="measure of a unit is not finite"):
        ps.rescaling.balance_(
            network, calibration=torch.full_like(x, torch.nan), criterion="measure"
        )
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_first_batch_that_is_not_finite_is_refused_and_the_next_one_taken():
    model = deep().float()
    optimizer = MAKERS["PathSGD"]("measure")(model.parameters(), ps.trace(model, torch.zeros(2, 3)))
    model(torch.full((6, 3), torch.nan)).sum().backward()
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()


def test_parameters_in_parts_are_refused_by_a_frame_on_data():
    assert ps.metrics.Path().takes_parts
    assert ps.metrics.Path(frame="layers").takes_parts
    assert not ps.metrics.Path(frame="measure").takes_parts
