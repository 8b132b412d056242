"""What `trace` accepts, what it refuses and how it says so, and that it leaves no trace itself."""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import (
    BY_NAME,
    NEAR_ANOTHER,
    ZOO,
    HandLoop,
    Recurrent,
    call,
    mlp,
    of_each_kind,
    oracle,
    slow_besides,
    trace,
    traced,
)
from oracles.squared import Oracle


@pytest.mark.sample(14)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_finds_every_class(case):
    assert traced(case)[1].num_classes == case.classes


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("case", "batch"),
    slow_besides(
        [(case, (1, 7)[n % 2]) for n, case in enumerate(ZOO) if case.name not in NEAR_ANOTHER],
        itertools.product(ZOO, (1, 7)),
    ),
    ids=str,
)
def test_finds_the_same_network_for_every_batch_size(case, batch):
    model, first = traced(case)  # from a batch of three
    network = trace(case, model, batch=batch)
    assert network.num_classes == first.num_classes
    for ours, theirs in zip(network.unit_classes, first.unit_classes, strict=True):
        assert set(ours.incoming) == set(theirs.incoming)
        assert set(ours.outgoing) == set(theirs.outgoing)
        assert set(ours.bias) == set(theirs.bias)


@pytest.mark.sample(21)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_accepts_the_batch_dimension(case):
    model = case.model(torch.float64)
    value = ps.paths.squared_path_norm(trace(case, model, batch_dim=case.batch_dim))
    assert value.item() == pytest.approx(oracle(case, model).squared_path_norm().item(), rel=1e-10)


def test_without_a_batch_dimension_all_of_the_input_is_one_example():
    model = mlp(3, 4, 2).double()
    x = torch.randn(3, dtype=torch.float64)
    alone = ps.paths.squared_path_norm(ps.trace(model, x, batch_dim=None)).item()
    batched = ps.paths.squared_path_norm(ps.trace(model, x[None])).item()
    assert alone == pytest.approx(batched, rel=1e-12)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("case", "training"),
    [
        *of_each_kind(ZOO, True),
        *(
            (BY_NAME[name], False)
            for name in ("mlp", "batch norm", "stacked rnn with dropout", "language model")
        ),
    ],
    ids=str,
)
def test_leaves_everything_untouched(case, training):
    model = case.model()
    model.train(training)
    example = case.example(3)
    for number, p in enumerate(model.parameters()):
        if number % 2:
            p.grad = torch.full_like(p, number)
    before = copy.deepcopy(model)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    inputs = copy.deepcopy(example)
    random = torch.get_rng_state()
    network = ps.trace(model, example, output=case.output)
    ps.paths.kappa(network)
    ps.paths.second_term(network)
    ps.paths.squared_path_norm(network)
    assert torch.equal(torch.get_rng_state(), random)
    _same(example, inputs)
    _same(dict(model.state_dict()), dict(before.state_dict()))
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (gradient is None)
        assert p.grad is None or torch.equal(p.grad, gradient)
        assert p.requires_grad
        assert p.is_leaf
    for ours, theirs in zip(model.modules(), before.modules(), strict=True):
        assert ours.training == theirs.training
        assert set(vars(ours)) == set(vars(theirs))
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks


def _same(ours, theirs):
    assert_close(ours, theirs, rtol=0, atol=0)


def test_leaves_global_state_untouched():
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled()
    trace(BY_NAME["small resnet"], BY_NAME["small resnet"].model())
    with pytest.raises(ps.UntraceableError):
        ps.trace(
            nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
            torch.randn(1, 2),
            strict=True,
        )
    assert before == (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_works_with_and_without_gradients(context):
    case = BY_NAME["stacked rnn"]
    model = case.model(torch.float64)
    with context():
        network = trace(case, model)
        kappa1 = ps.paths.kappa(network)
    _close(kappa1, oracle(case, model).kappa1())


def test_works_with_frozen_parameters():
    case = BY_NAME["mlp"]
    model = case.model(torch.float64)
    for p in model[0].parameters():
        p.requires_grad_(False)
    _close(ps.paths.kappa(trace(case, model)), oracle(case, model).kappa1())
    assert not model[0].weight.requires_grad


def _close(ours, theirs):
    assert_close(dict(ours), theirs, rtol=1e-10, atol=1e-12)


def test_parameters_are_the_models_own():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    assert set(network.parameters) == set(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        assert network.parameters[name] is p
    assert not set(network.outside)


@pytest.mark.parametrize("attribute", ["unit_classes", "parameters", "num_classes"])
def test_is_immutable(attribute):
    network = ps.trace(mlp(3, 4, 2), torch.randn(2, 3))
    with pytest.raises((AttributeError, TypeError)):
        setattr(network, attribute, ())
    with pytest.raises((AttributeError, TypeError)):
        network.unit_classes[0].index = 5
    with pytest.raises(TypeError):
        network.parameters["0.weight"] = None


# --- refusals -------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A function of the hidden units of a small net, inside the module "body.middle"."""

    def __init__(self, function, *modules, width=4):
        super().__init__()
        self.body = nn.Module()
        self.body.first = nn.Linear(3, 4)
        self.body.middle = Applied(function, *modules)
        self.body.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.body.last(self.body.middle(self.body.first(x).relu()))


class Applied(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, h):
        return self.function(h, self.scale, *self.parts)


def attention(h, scale, layer):
    scores = torch.softmax(h @ h.t(), -1)
    return scores @ layer(h)


REFUSED = {
    "tanh": (lambda h, _: torch.tanh(h), "tanh"),
    "sigmoid": (lambda h, _: h.sigmoid(), "sigmoid"),
    "gelu": (lambda h, _: functional.gelu(h), "gelu"),
    "elu": (lambda h, _: functional.elu(h), "elu"),
    "softplus": (lambda h, _: functional.softplus(h), "softplus"),
    "exp": (lambda h, _: h.exp(), "exp"),
    "relu6": (lambda h, _: functional.relu6(h), "relu6|hardtanh"),
    "softmax": (lambda h, _: functional.softmax(h, -1), "softmax"),
    "log_softmax": (lambda h, _: h.log_softmax(-1), "log_softmax"),
    "gating": (lambda h, _, a, b: a(h) * b(h), "mul"),
    "square": (lambda h, _: h**2, "pow|square"),
    "division": (lambda h, _: h / h.sum(-1, keepdim=True), "div"),
    "standard deviation": (lambda h, _: h / h.std(-1, keepdim=True), "std"),
    "normalize by absolute values": (lambda h, _: functional.normalize(h, p=1), "norm|div"),
    "clamp from above": (lambda h, _: h.clamp(max=1.0), "clamp"),
    "clamp on both sides": (lambda h, _: h.clamp(0, 1), "clamp"),
    "clamp away from zero": (lambda h, _: h.clamp(min=0.5), "clamp"),
    "absolute threshold": (lambda h, _: functional.threshold(h, 0.5, 0.0), "threshold"),
    "attention": (attention, "softmax|matmul|mm|@"),
    "places of an order": (lambda h, _: h * h.sort(-1).indices, "sort"),
    "a learned threshold": (
        lambda h, scale: torch.where(h > scale, h, torch.zeros_like(h)),
        "lt|gt|>",
    ),
    "leaving the graph": (lambda h, _: torch.from_numpy(h.detach().numpy()), "detach|numpy"),
    "a branch on a value": (lambda h, _: h if h.sum() > 0 else 2 * h, "bool|gt|>|item|value|sum"),
}
LAYERS = {
    "gating": lambda: (nn.Linear(4, 4), nn.Linear(4, 4)),
    "attention": lambda: (nn.Linear(4, 4),),
}


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_operation_and_place(name):
    function, operation = REFUSED[name]
    model = Wrapped(function, *LAYERS.get(name, tuple)())
    with pytest.raises(ps.UntraceableError, match=operation) as refusal:
        ps.trace(model, torch.randn(5, 3), strict=True)
    message = str(refusal.value)
    assert "body.middle" in message
    assert isinstance(refusal.value, ValueError)
    assert len(message) > len("body.middle") + 40  # and a reason


MODULES = {
    "LSTM": (lambda: nn.LSTM(4, 4), "(?i)lstm"),
    "GRU": (lambda: nn.GRU(4, 4), "(?i)gru"),
    "tanh RNN": (lambda: nn.RNN(4, 4), "(?i)tanh"),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), "(?i)pow|norm"),
    "Tanh": (nn.Tanh, "(?i)tanh"),
    "Softmax": (lambda: nn.Softmax(-1), "(?i)softmax"),
    "Hardswish": (nn.Hardswish, "(?i)hardswish"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "(?i)attention"),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        "(?i)transformer|attention|norm",
    ),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 4), "(?i)bilinear"),
}


@pytest.mark.parametrize("name", MODULES)
def test_refuses_modules(name):
    build, operation = MODULES[name]

    def run(h, _, layer):
        if name == "attention":
            return layer(h, h, h)[0]
        out = layer(h, h) if name == "Bilinear" else layer(h)
        return out[0] if isinstance(out, tuple) else out

    with pytest.raises(ps.UntraceableError, match=operation) as refusal:
        ps.trace(Wrapped(run, build()), torch.randn(5, 3), strict=True)
    assert "body.middle.parts.0" in str(refusal.value)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_refuses_hooks_that_it_cannot_see_through(kind):
    """A hook may change anything: it is named, or followed faithfully, but never ignored."""
    model = mlp(3, 4, 2).double()
    hook = {
        "forward": lambda _, __, out: torch.tanh(out),
        "forward_pre": lambda _, args: (torch.tanh(args[0]),),
    }[kind]
    getattr(model[0], f"register_{kind}_hook")(hook)
    with pytest.raises(ps.UntraceableError, match=r"hook|tanh") as refusal:
        ps.trace(model, torch.randn(2, 3).double())
    assert "0" in str(refusal.value)


class Started(HandLoop):
    """A start of ones: the recurrent layer has an input that no rescaling reaches."""

    def forward(self, x):
        h = torch.ones(x.shape[0], 3, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t]) + self.step(h))
        return self.out(h)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(Started, (2, 4, 2)), (lambda: Wrapped(lambda h, _: h + 1.0), (2, 3))],
    ids=["a start of ones", "a constant added"],
)
def test_constants_pin_the_units_or_are_refused(build, shape):
    model = build().double()
    x = torch.randn(shape, dtype=torch.float64)
    try:
        network = ps.trace(model, x)
    except ps.UntraceableError:
        return
    before = model(x)
    ps.rescaling.random_rescale_(network)
    assert_close(model(x), before)


def test_refuses_weights_reparametrised_behind_its_back():
    model = mlp(3, 4, 2)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ps.UntraceableError):
        ps.trace(model, torch.randn(2, 3), strict=True)


def test_refuses_a_parameter_that_is_not_the_models_to_ask_for():
    model = mlp(3, 4, 2)
    with pytest.raises((ValueError, KeyError), match=r"nothing\.here"):
        ps.trace(model, torch.randn(2, 3), outside=["nothing.here"])


# --- what is returned -----------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.policy, self.value, self.form = (
            nn.Linear(3, 4),
            nn.Linear(4, 2),
            nn.Linear(4, 1),
            form,
        )

    def forward(self, x):
        h = self.body(x).relu()
        return self.form(self.policy(h), self.value(h), h)


@pytest.mark.parametrize(
    "form",
    [
        lambda policy, value, _: (policy, value),
        lambda policy, value, _: {"policy": policy, "value": [value]},
        lambda policy, value, _: torch.cat([policy, value], 1),
    ],
    ids=["tuple", "dictionary", "one tensor"],
)
def test_all_returned_tensors_are_outputs(form):
    model = Heads(form).double()
    network = ps.trace(model, torch.randn(2, 3, dtype=torch.float64))
    assert network.num_classes == 4
    together = Heads(lambda policy, value, _: torch.cat([policy, value], 1)).double()
    together.load_state_dict(model.state_dict())
    known = Oracle(together, torch.ones(1, 3)).squared_path_norm().item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(known, rel=1e-12)


class Exposed(nn.Module):
    """Returns its hidden units beside its output."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.body(x).relu()
        return self.out(h), h


def test_returned_units_are_pinned_unless_others_are_picked():
    x = torch.randn(2, 3)
    assert ps.trace(Exposed(), x).num_classes == 0
    assert ps.trace(Exposed(), x, output=lambda returned: returned[0]).num_classes == 4


def test_heads_that_are_not_picked_follow_the_plain_rule():
    """They have no paths to the outputs, yet a loss may use them: never a silent skip."""
    model = Heads(lambda policy, value, _: (policy, value)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    network = ps.trace(model, x, output=lambda returned: returned[0])
    assert set(network.outside) == {"value.weight", "value.bias"}
    optimizer = ps.optim.PathSGD(model.parameters(), network)
    before = model.value.weight.detach().clone()
    policy, value = model(x)
    (policy.square().mean() + value.square().mean()).backward()
    optimizer.step()
    assert not torch.equal(model.value.weight, before)


def test_a_picked_step_is_an_output():
    model = Recurrent(emit="all", batch_first=True).double()
    last = Recurrent(emit="last", batch_first=True).double()
    last.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 2, dtype=torch.float64)
    picked = ps.trace(model, x, output=lambda out: out[:, -1])
    ours, theirs = (ps.paths.kappa(network) for network in (picked, ps.trace(last, x)))
    assert_close(dict(ours), dict(theirs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("training", [False, True])
def test_normalisation_by_the_batch_keeps_its_symmetry(training):
    """Whichever form runs, gain and shift carry the class, and rescaling preserves the function."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    model[1].running_mean.normal_()
    model.train(training)
    x = torch.randn(8, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert network.num_classes >= 4
    before = model(x).detach()
    ps.rescaling.random_rescale_(network)
    assert_close(model(x).detach(), before, rtol=1e-9, atol=1e-11)


def test_learned_slopes_are_outside():
    """PReLU's slope has no scale of its own; the units around it have."""
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert network.num_classes == 4
    assert set(network.outside) == {"1.weight"}
    before = model(x).detach()
    ps.rescaling.random_rescale_(network)
    assert_close(model(x).detach(), before, rtol=1e-10, atol=1e-12)


def test_parameters_on_no_path_are_outside():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = mlp(3, 4, 2), nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    network = ps.trace(Unused(), torch.randn(2, 3))
    assert set(network.outside) == {"unused.weight", "unused.bias"}


# --- outside --------------------------------------------------------------------------------------


def normalised() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    ).double()


@pytest.mark.parametrize("by", ["name", "module"])
def test_outside_leaves_modules_to_the_plain_rule(by):
    model = normalised()
    x = torch.randn(4, 3, dtype=torch.float64)
    network = ps.trace(model, x, outside=["3" if by == "name" else model[3]])
    assert set(network.outside) == {"3.weight", "3.bias"}
    assert set(network.parameters) == {
        f"{k}.{kind}" for k in (0, 2, 4, 6) for kind in ("weight", "bias")
    }
    # the units next to it are pinned: only the hidden units of either side are free
    assert network.num_classes == 4 + 6
    before = model(x)
    normalisation = model[3].weight.detach().clone()
    ps.rescaling.random_rescale_(network)
    assert_close(model(x), before, rtol=1e-10, atol=1e-12)
    assert torch.equal(model[3].weight, normalisation)


def test_outside_may_come_first():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.hidden, self.out = nn.LSTM(2, 3), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.hidden(self.lstm(x)[0][-1]).relu())

    model = Read().double()
    x = torch.randn(5, 3, 2, dtype=torch.float64)
    network = ps.trace(model, x, outside=["lstm"], batch_dim=1)
    assert network.num_classes == 4
    assert set(network.outside) == {f"lstm.{name}" for name, _ in model.lstm.named_parameters()}
    before = model(x)
    ps.rescaling.random_rescale_(network)
    assert_close(model(x), before, rtol=1e-10, atol=1e-12)


def test_outside_does_not_hide_what_lies_elsewhere():
    model = nn.Sequential(normalised(), nn.Tanh(), nn.Linear(2, 2).double())
    with pytest.raises(ps.UntraceableError, match=r"(?i)tanh"):
        ps.trace(model, torch.randn(4, 3, dtype=torch.float64), outside=["0.3"], strict=True)


# --- cost -----------------------------------------------------------------------------------------


def python_calls(function) -> int:
    """How many Python functions run, whatever they cost."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_cost_grows_no_faster_than_the_number_of_steps():
    model = HandLoop(1, 6)
    ps.trace(model, torch.randn(2, 10, 1))
    # eight times as many steps; one call more for every other pair of steps would show
    short, long = (
        python_calls(lambda t=t: ps.trace(model, torch.randn(2, t, 1))) for t in (30, 240)
    )
    assert long < 8 * short
    assert long < 240 * 2000


def test_runs_the_model_at_most_a_few_times():
    class Counted(HandLoop):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x)

    network = ps.trace(Counted(), torch.randn(2, 20, 2))
    assert 1 <= Counted.calls <= 4
    assert network.num_classes == 3


def test_knows_the_long_loop():
    model = HandLoop(1, 6).double()
    network = ps.trace(model, torch.randn(2, 150, 1, dtype=torch.float64))
    same = Recurrent(inputs=1, hidden=6, bias=False)
    assert network.num_classes == ps.trace(same, torch.randn(150, 2, 1)).num_classes == 6


def test_rescaled_zoo_still_computes_its_function():
    """Every class found is a symmetry of the function itself, checked on the running model."""
    for case in ZOO:
        model, network = traced(case, torch.float64)
        example = case.example(4, torch.float64)
        before = case.picked(call(model, example))
        ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
        after = case.picked(call(model, example))
        assert_close(after, before, rtol=1e-9, atol=1e-11, msg=case.name)
