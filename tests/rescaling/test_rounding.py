"""The member that rounds best: brute force on tiny networks, convexity on others, and what is promised."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, mlp, traced
from pathspace.rescaling import rounding
from pathspace.rescaling.rescale import rescale_


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def small(seed=0, hidden=2):
    torch.manual_seed(seed)
    model = mlp(3, hidden, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) * 8)
    return model, torch.randn(6, 3, dtype=torch.float64)


# --- by hand: J from its definition, one weight after the other -----------------------------------


def squared_derivatives(model, x):
    """E[(df/dw)^2], summed over the outputs, by one backward pass for each output of each example."""
    parameters = list(model.parameters())
    found = [torch.zeros_like(p) for p in parameters]
    for example in x:
        for output in model(example[None]).flatten():
            gradients = torch.autograd.grad(output, parameters, retain_graph=True)
            for total, gradient in zip(found, gradients, strict=True):
                total += gradient.square() / len(x)
    return found


def path_kappa(model):
    """Kappa of two linear layers with one activation between them, by hand."""
    first, second = model[0].weight.detach(), model[2].weight.detach()
    entering = first.square().sum(1) + model[0].bias.detach().square()
    leaving = second.square().sum(0)
    return [leaving[:, None].expand_as(first), leaving, entering.expand_as(second), torch.ones(2)]


def error_of(model, reactions, per="tensor"):
    """J of a model as it is: over tensors, the largest weight squared times the K of all that are not zero."""
    total = 0.0
    for parameter, reaction in zip(model.parameters(), reactions, strict=True):
        if parameter.dim() < 2:
            continue
        w, k = parameter.detach(), torch.where(parameter.detach() == 0, 0.0, reaction)
        parts = zip(w, k, strict=True) if per == "row" else [(w, k)]
        total += sum(float(one.abs().max() ** 2 * other.sum()) for one, other in parts)
    return total


def errors_of_members(model, reactions, logs, per):
    """J of the members of two linear layers with log s = each row of ``logs``, from w -> a w and K -> K / a^2."""
    s = logs.exp()
    sides = [(0, s[:, :, None]), (2, 1 / s[:, None, :])]
    total = torch.zeros(len(logs), dtype=torch.float64)
    for layer, a in sides:
        w, k = model[layer].weight.detach().abs() * a, reactions[layer] / a.square()
        dims = (2,) if per == "row" else (1, 2)
        total += (w.amax(dims).square() * k.sum(dims)).reshape(len(logs), -1).sum(1)
    return total


def least_by_search(model, reactions, per):
    """The least J over a grid of the scales of two hidden units, refined five times around its best point."""
    centre, width, least = torch.zeros(2, dtype=torch.float64), 6.0, math.inf
    steps = torch.linspace(-1, 1, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(steps, steps)
    for _ in range(6):
        logs = centre + width * grid
        errors = errors_of_members(model, reactions, logs, per)
        centre, least, width = logs[errors.argmin()], min(least, float(errors.min())), width / 8
    return least


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.sample(2)
def test_no_member_of_a_tiny_network_has_a_smaller_error(per, data):
    model, x = small()

    def reactions_of(model):
        return squared_derivatives(model, x[:2]) if data else path_kappa(model)

    before = error_of(model, reactions_of(model), per)
    expected = least_by_search(model, reactions_of(model), per)
    network = ps.trace(model, x)
    calibration = x[:2] if data else None
    ps.rescaling.balance_(network, x, criterion="rounding", per=per, calibration=calibration)
    found = error_of(model, reactions_of(model), per)
    assert found < before
    assert found == pytest.approx(expected, rel=0.01)


NETWORKS = [
    "skip",
    "depthwise",
    "small resnet",
    "tied autoencoder",
    "convolution transposed",
    "slices",
    "rnn",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_away_leads_to_a_smaller_error(name):
    """J is convex, so what is least nearby is least of all."""
    model, network = traced(BY_NAME[name], torch.float64)
    ps.rescaling.random_rescale_(network, 0.1, 10.0, generator=generator())

    def error():
        reactions = ps.paths.kappa(network)
        ours = [reactions.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()]
        return error_of(model, ours)

    before = error()
    ps.rescaling.balance_(network, criterion="rounding")
    least = error()
    assert least <= before
    for seed, size in itertools.product(range(6), (0.01, 0.3)):
        logs = (
            torch.randn(network.num_classes, dtype=torch.float64, generator=generator(seed)) * size
        )
        rescale_(network, logs.exp())
        assert error() > 0.99 * least
        rescale_(network, (-logs).exp())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{}, {"per": "row"}, {"data": True}, {"data": True, "activations": 4}], ids=str
)
@pytest.mark.parametrize("name", ["skip", "small resnet", "depthwise"])
def test_all_members_come_to_the_same_weights(name, options):
    """Bitwise, if they differ by powers of two; otherwise as well as the minimum is determined."""
    case, results = BY_NAME[name], []
    example, options = case.example(3, torch.float64), dict(options)
    options["calibration"] = example if options.pop("data", False) else None
    for change in (None, True, False):
        model, network = traced(case, torch.float64)
        if change is not None:
            ps.rescaling.random_rescale_(
                network, 2**-6, 2**6, powers_of_two=change, generator=generator()
            )
        ps.rescaling.balance_(network, example, criterion="rounding", **options)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(results[0], results[1], rtol=0, atol=0)
    assert_close(results[0], results[2], rtol=5e-3, atol=1e-9)


def test_attention_keeps_its_function(monkeypatch):
    from pathspace.experiments.models import Transformer

    monkeypatch.setattr(rounding, "STEPS", 5)
    torch.manual_seed(0)
    model, tokens = (
        Transformer(7, 5, hidden=8, layers=1, heads=2).double(),
        torch.randint(7, (3, 6)),
    )
    network = ps.trace(model, tokens)
    before = model(tokens)
    ps.rescaling.balance_(
        network, tokens, criterion="rounding", calibration=tokens, activations=True
    )
    assert_close(model(tokens), before)


def test_a_weight_of_zero_is_not_rounded():
    """Rounding leaves it at zero, so its kappa, however large, has no share in the error."""
    model, x = small(hidden=3)
    with torch.no_grad():
        model[2].weight[:, 0] = 0  # nothing leaves this unit, and what enters it moves no output
        model[0].weight[0] *= 1e3
    ps.rescaling.balance_(ps.trace(model, x), x, criterion="rounding")
    first = model[0].weight.detach().abs()
    assert first[0].max() <= 1.01 * first[1:].max()


# --- rounded activations --------------------------------------------------------------------------


def test_channels_with_small_values_are_enlarged_where_activations_are_rounded():
    """With weights of many bits only the ranges of the values h = relu(x W) count."""
    torch.manual_seed(0)
    model, x = mlp(3, 4, 1).double(), torch.randn(40, 3, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.fill_(1.0)
        model[0].bias.fill_(0.5)
    ps.rescaling.balance_(
        ps.trace(model, x), x, criterion="rounding", bits=30, calibration=x, activations=2
    )
    ranges = model[:2](x).detach().amax(0)
    # all of them use the whole range
    assert_close(ranges, ranges.mean().expand(4), rtol=2e-2, atol=0)


def test_bits_decide_between_weights_and_activations():
    def balanced(bits, activations):
        model, x = small(hidden=4)
        network = ps.trace(model, x)
        options = {"bits": bits, "activations": activations, "calibration": x}
        return ps.rescaling.balance_(network, x, criterion="rounding", **options)

    assert_close(balanced(4, False), balanced(8, False), rtol=1e-6, atol=0)
    assert not torch.allclose(balanced(4, 8), balanced(8, 4), rtol=1e-2)
    assert_close(balanced(8, True), balanced(8, 8), rtol=0, atol=0)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"criterion": "range", "bits": 4},
            "bits is an option of criterion='rounding', not of 'range'",
        ),
        (
            {"criterion": "rounding", "per": "channel"},
            "per must be one of 'tensor', 'row', got 'channel'",
        ),
        (
            {"criterion": "rounding", "bits": 1},
            "bits must be a whole number of bits from 2 to 32, got 1",
        ),
        (
            {"criterion": "rounding", "bits": 8.0},
            "bits must be a whole number of bits from 2 to 32, got 8.0",
        ),
        (
            {"criterion": "rounding", "activations": True},
            "activations=... needs the ranges of values on data",
        ),
        (
            {"criterion": "rounding", "alpha": 0.5},
            "alpha is an option of criterion='activations' and 'measure'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    model, x = small()
    with pytest.raises(ValueError, match=message.replace("...", r"\.\.\.")):
        ps.rescaling.balance_(ps.trace(model, x), x, **options)


def test_a_network_without_classes_is_left_alone():
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    assert (
        len(ps.rescaling.balance_(ps.trace(model, x), x, criterion="rounding", calibration=x)) == 0
    )
