"""Operations that a user registers, by public names alone; twins are the same models in functions of torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps


def keep(ctx, inputs, output):
    del output
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("registered_tests::ramp", mutates_args=())
def ramp(x: torch.Tensor) -> torch.Tensor:
    """A ReLU without an implementation for tensors without values."""
    return x.clamp(min=0)


ramp.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0] > 0), setup_context=keep)


@torch.library.custom_op("registered_tests::tilted", mutates_args=())
def tilted(x: torch.Tensor) -> torch.Tensor:
    """f(s x) = s f(x), with slopes 1 and -0.5."""
    return torch.where(x > 0, x, -0.5 * x)


tilted.register_fake(torch.empty_like)
tilted.register_autograd(
    lambda ctx, g: torch.where(ctx.saved_tensors[0] > 0, g, -0.5 * g), setup_context=keep
)


@torch.library.custom_op("registered_tests::dense", mutates_args=())
def dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A fused layer: relu(x W^T + b)."""
    return torch.addmm(bias, x, weight.T).relu()


@dense.register_fake
def dense_form(x, weight, bias):
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def dense_backward(ctx, g):
    x, weight, bias = ctx.saved_tensors
    g = g * (torch.addmm(bias, x, weight.T) > 0)
    return g @ weight, g.T @ x, g.sum(0)


dense.register_autograd(dense_backward, setup_context=keep)


@torch.library.custom_op("registered_tests::affine", mutates_args=())
def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight.T)


affine.register_fake(dense_form)
affine.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.T @ ctx.saved_tensors[0], g.sum(0)),
    setup_context=keep,
)

by_hand = torch.library.Library("registered_tests", "FRAGMENT")
by_hand.define("mixed(Tensor x, Tensor y) -> Tensor")
by_hand.impl("mixed", lambda x, y: x + 0.5 * y, "CompositeImplicitAutograd")


@torch.overrides.wrap_torch_function(lambda x: (x,))
def relu(x):
    """A Python function that torch functions dispatch, and with a name of torch."""
    return x.clamp(min=0)


ps.network.register(ramp, like=torch.relu)
ps.network.register(torch.ops.registered_tests.tilted.default, like=torch.relu)
ps.network.register(
    torch.ops.registered_tests.dense,
    decomposition=lambda x, w, b: functional.linear(x, w, b).relu(),
)
ps.network.register(affine, like=functional.linear)
ps.network.register(torch.ops.registered_tests.mixed, decomposition=lambda x, y: x + 0.5 * y)
ps.network.register(relu, like=torch.relu)


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.register_buffer("offset", torch.tensor([1.0, -1.0, 2.0]))
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


# a model with registered operations, and its twin
PAIRS = {
    "ramp": (
        lambda m, x: m.c(ramp(m.b(ramp(m.a(x))))),
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
    ),
    "packet": (
        lambda m, x: m.c(torch.ops.registered_tests.ramp(m.a(x))),
        lambda m, x: m.c(m.a(x).relu()),
    ),
    "tilted": (
        lambda m, x: m.c(tilted(m.b(tilted(m.a(x))))),
        lambda m, x: m.c(functional.leaky_relu(m.b(functional.leaky_relu(m.a(x), -0.5)), -0.5)),
    ),
    "dense": (
        lambda m, x: m.c(dense(dense(x, m.a.weight, m.a.bias), m.b.weight, m.b.bias)),
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
    ),
    "affine": (
        lambda m, x: m.c(
            affine(affine(x, m.a.weight, m.a.bias).relu(), m.b.weight, m.b.bias).relu()
        ),
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
    ),
    "mixed": (
        lambda m, x: m.c(torch.ops.registered_tests.mixed(m.a(x).relu(), m.b(m.a(x).relu()))),
        lambda m, x: m.c(m.a(x).relu() + 0.5 * m.b(m.a(x).relu())),
    ),
    "function": (
        lambda m, x: m.c(relu(m.b(relu(m.a(x))))),
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()),
    ),
    "of inputs and constants": (
        lambda m, x: m.c(m.a(tilted(x)).relu()) + tilted(m.offset),
        lambda m, x: (
            m.c(m.a(functional.leaky_relu(x, -0.5)).relu()) + functional.leaky_relu(m.offset, -0.5)
        ),
    ),
}


def made(name, dtype=torch.float64):
    torch.manual_seed(1)
    forward, plain = PAIRS[name]
    model = Net(forward).to(dtype)
    twin = Net(plain).to(dtype)
    twin.load_state_dict(model.state_dict())
    return model, twin, torch.randn(12, 5, dtype=dtype)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sample(4)
def test_a_network_is_that_of_its_twin(name):
    model, twin, x = made(name)
    assert_close(model(x), twin(x))
    network, expected = ps.trace(model, x), ps.trace(twin, x)
    assert network.num_classes == expected.num_classes > 0
    assert not network.cuts
    for second_term in (False, True):
        assert_close(
            ps.paths.kappa(network, second_term),
            ps.paths.kappa(expected, second_term),
            rtol=0,
            atol=0,
        )
    assert ps.trace(model, x, strict=True).num_classes == network.num_classes


@pytest.mark.sample(2)
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize("name", PAIRS)
def test_on_data_it_is_its_twin(name, statistic):
    model, twin, x = made(name)
    values = [
        ps.paths.data_dependent_kappa(ps.trace(m, x), x, alpha=0.7, statistic=statistic)
        for m in (model, twin)
    ]
    assert_close(values[0], values[1])
    assert_close(ps.paths.fisher(ps.trace(model, x), x), ps.paths.fisher(ps.trace(twin, x), x))


@pytest.mark.parametrize("name", PAIRS)
def test_rescaling_by_powers_of_two_is_invisible(name):
    model, _, x = made(name, torch.float32)
    before = model(x)
    weights = copy.deepcopy(model.state_dict())
    ps.rescaling.random_rescale_(ps.trace(model, x), powers_of_two=True)
    assert any(not torch.equal(weights[n], w) for n, w in model.state_dict().items())
    assert_close(model(x), before, rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", ["PathSGD", "DDPSGD"])
@pytest.mark.parametrize("name", PAIRS)
def test_trains_invariantly(name, rule):
    model, _, x = made(name, torch.float32)

    def make_optimizer(model, network):
        return getattr(ps.optim, rule)(model.parameters(), network, lr=0.05)

    report = ps.rescaling.check_invariance(
        model, x, lambda out: out.square().mean(), make_optimizer, steps=12
    )
    assert report.passed, report


# torch 2.14 says so of an operation without torch.library.register_vmap; the paths are the same
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented"
)
@pytest.mark.parametrize("name", ["ramp", "tilted", "dense", "affine", "mixed", "function"])
@pytest.mark.sample(3)
def test_its_paths_can_be_written_down(name):
    model, twin, x = made(name)
    written = [ps.paths.path_jacobian(ps.trace(m, x)) for m in (model, twin)]
    assert_close(written[0], written[1])


def test_what_is_left_outside_may_hold_one():
    model, _, x = made("ramp")
    whole = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), model).double()
    network = ps.trace(whole, x, outside=[model])
    assert network.num_classes == 6
    assert set(network.outside) == {f"3.{name}" for name, _ in model.named_parameters()}


@torch.library.custom_op("registered_tests::bent", mutates_args=())
def bent(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


bent.register_autograd(
    lambda ctx, g: g * (1 - ctx.saved_tensors[0].tanh() ** 2), setup_context=keep
)
ps.network.register(bent, like=torch.relu)


def test_a_wrong_registration_is_caught():
    torch.manual_seed(0)
    model = Net(lambda m, x: m.c(bent(m.a(x))))
    report = ps.rescaling.check_invariance(
        model,
        torch.randn(8, 5),
        lambda out: out.square().mean(),
        lambda model, network: ps.optim.PathSGD(model.parameters(), network, lr=0.05),
        steps=3,
    )
    assert not report.passed


@torch.library.custom_op("registered_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


@torch.library.custom_op("registered_tests::writes", mutates_args={"x"})
def writes(x: torch.Tensor) -> None:
    x.clamp_(min=0)


@torch.library.custom_op("registered_tests::two", mutates_args=())
def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + y


class Written(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, g):
        return g


WRONG = {
    "a function of autograd": (
        (Written.apply, {"like": torch.relu}),
        TypeError,
        r"Written\.apply .*custom_op",
    ),
    "no operation": (("relu", {"like": torch.relu}), TypeError, "op must be a function"),
    "nothing about it": ((unknown, {}), TypeError, "either like="),
    "both": (
        (unknown, {"like": torch.relu, "decomposition": torch.relu}),
        TypeError,
        "either like=",
    ),
    "no function": ((unknown, {"like": "relu"}), TypeError, "like must be a function"),
    "no decomposition": (
        (unknown, {"decomposition": 3}),
        TypeError,
        "decomposition must be a function",
    ),
    "unknown": ((unknown, {"like": torch.nn.functional.gelu}), ValueError, "no rule for 'gelu'"),
    "a module": ((unknown, {"like": nn.ReLU}), ValueError, "no rule for 'ReLU'"),
    "twice": (
        (ramp, {"like": torch.relu}),
        ValueError,
        "'registered_tests.ramp' is registered already",
    ),
    "another overload": (
        (torch.ops.registered_tests.ramp.default, {"like": torch.abs}),
        ValueError,
        "registered already",
    ),
    "torch's": ((torch.relu, {"like": torch.abs}), ValueError, "'relu' has a rule already"),
    "torch's operator": (
        (torch.ops.aten.relu.default, {"like": torch.abs}),
        ValueError,
        "has a rule already",
    ),
    "a write": ((writes, {"like": torch.relu}), ValueError, "writes into its arguments"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_registrations_are_refused(kind):
    (op, options), error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        ps.network.register(op, **options)
    model = Net(lambda m, x: m.c(unknown(m.a(x))))
    assert ps.trace(model, torch.zeros(1, 5)).cuts, "nothing was registered"


def test_arguments_that_do_not_fit_are_told():
    ps.network.register(two, like=torch.relu)
    model = Net(lambda m, x: m.c(two(m.a(x), m.b(m.a(x)))))
    with pytest.raises(TypeError, match=r"'registered_tests\.two' was registered as 'relu'"):
        ps.trace(model, torch.zeros(1, 5))
