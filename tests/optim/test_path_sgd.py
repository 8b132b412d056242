"""Path-SGD: the known steps, and every option against the rule written out plainly."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from plain_metric import PlainMetric
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, Recurrent, call, in_turn, mlp, oracle, trace, traced
from fixture_nets import NETS, load


@pytest.mark.sample(5)
@pytest.mark.parametrize("second_term", [False, True], ids=["kappa1", "kappa"])
@pytest.mark.parametrize("name", NETS)
def test_raw_step_gives_the_known_weights(name, second_term):
    net = load(name)
    known = net.net["pathsgd_new_params"]
    network = ps.trace(net.model, net.x)
    optimizer = ps.optim.PathSGD(
        net.model.parameters(),
        network,
        lr=known["eta"],
        normalization="none",
        second_term=second_term,
    )
    net.loss(net.model(net.x)).backward()
    optimizer.step()
    weights = {name: p.detach() for name, p in net.model.named_parameters()}
    expected = net.as_tensors(known["kappa" if second_term else "kappa1"])
    assert_close(weights, expected, rtol=1e-10, atol=1e-12)


# --- the rule written out -------------------------------------------------------------------------


class Plain:
    """Path-SGD, one obvious line after the other."""

    def __init__(self, case, model, **options):
        self.case, self.model = case, model
        self.options = {
            "lr": 0.1,
            "momentum": 0.0,
            "nesterov": False,
            "weight_decay": 0.0,
            "path_decay": 0.0,
            "clip_norm": math.inf,
            "clip_step": math.inf,
        } | options
        self.velocity, self.metric = {}, PlainMetric(case, model, options)

    @torch.no_grad()
    def step(self):
        options = self.options
        metric = self.metric.advance()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        if options["path_decay"]:
            with torch.enable_grad():
                kappa1 = oracle(self.case, self.model).kappa1()
            for name, p in self.model.named_parameters():
                gradients[name] += options["path_decay"] * kappa1[name] * p
        squares = [(g**2 / metric[name]).nan_to_num(0.0).sum() for name, g in gradients.items()]
        norm = math.sqrt(sum(squares))
        shrink = min(1.0, options["clip_norm"] / norm)
        # the step as it looks on the weights of the balanced network
        balanced = [
            (self.metric.gauge[name] * shrink * g / metric[name]).nan_to_num(0.0)
            for name, g in gradients.items()
        ]
        shrink *= min(
            1.0, options["clip_step"] / math.sqrt(sum(d.square().sum() for d in balanced))
        )
        for name, p in self.model.named_parameters():
            d = (shrink * gradients[name] / metric[name]).nan_to_num(0.0)
            v = self.velocity[name] = options["momentum"] * self.velocity.get(name, 0.0) + d
            if options["nesterov"]:
                v = d + options["momentum"] * v
            p.copy_((1 - options["lr"] * options["weight_decay"]) * p - options["lr"] * v)


OPTIONS = {
    "default": {},
    "raw": {"normalization": "none", "lr": 0.01},
    "frozen": {"normalization": "frozen"},
    "momentum": {"momentum": 0.8},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "weight decay": {"weight_decay": 0.3},
    "momentum and weight decay": {"momentum": 0.5, "weight_decay": 0.3},
    "path decay": {"path_decay": 0.02},
    "path decay with the second term": {"path_decay": 0.02, "second_term": True},
    "path decay, clipped": {"path_decay": 0.05, "clip_norm": 0.05},
    "clipped": {"clip_norm": 0.02},
    "clipped raw": {"clip_norm": 0.02, "normalization": "none", "lr": 0.01},
    "clipped far away": {"clip_norm": 1e6},
    "short steps": {"clip_step": 0.02},
    "short steps, raw": {"clip_step": 0.02, "normalization": "none", "lr": 0.01},
    "short steps, clipped": {"clip_step": 0.02, "clip_norm": 0.1, "momentum": 0.8},
    "short steps, stale": {"clip_step": 0.02, "refresh_every": 3},
    "stale": {"refresh_every": 3},
    "stale and frozen": {"refresh_every": 2, "normalization": "frozen"},
    "second term": {"second_term": True},
    "half": {"power": 0.5},
    "half, raw": {"power": 0.5, "normalization": "none", "lr": 0.01},
    "half, stale, short": {
        "power": 0.5,
        "refresh_every": 3,
        "momentum": 0.8,
        "clip_step": 0.05,
        "damping": 0.1,
    },
    "half, clipped": {"power": 0.5, "clip_norm": 0.02},
    "more than all": {"power": 1.5},
    "damped": {"damping": 0.5},
    "damped raw": {"damping": 0.1, "normalization": "none", "lr": 0.01},
    "damped and frozen": {"damping": 0.5, "normalization": "frozen"},
    "one mean": {"normalization": "network"},
    "one mean, damped and stale": {"normalization": "network", "damping": 0.5, "refresh_every": 3},
    "on the weights": {"frame": "weights"},
    "on the weights, short steps": {"frame": "weights", "clip_step": 0.02, "damping": 0.01},
    "on the weights, one mean": {"frame": "weights", "normalization": "network", "clip_step": 0.02},
    "everything": {
        "momentum": 0.7,
        "nesterov": True,
        "weight_decay": 0.1,
        "clip_norm": 0.1,
        "refresh_every": 2,
        "second_term": True,
        "path_decay": 0.01,
    },
}


# each network has its own
TERMS = (
    "default",
    "second term",
    "path decay with the second term",
    "everything",
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        *in_turn(OPTIONS, ("mlp", "rnn", "tied characters"), everywhere=("default", "everything")),
        *((chosen, name) for chosen in TERMS for name in ("batch norm", "stacked rnn")),
    ],
)
def test_option_is_the_rule_written_out(chosen, name):
    case = BY_NAME[name]
    options = {"lr": 0.02} | OPTIONS[chosen]
    (ours, network), theirs = traced(case, torch.float64), case.model(torch.float64)
    optimizer = ps.optim.PathSGD(ours.parameters(), network, **options)
    plain = Plain(case, theirs, **options)
    for step in range(5):
        example = case.example(4, torch.float64, seed=step)
        for model, rule in ((ours, optimizer), (theirs, plain)):
            model.zero_grad()
            case.loss(call(model, example)).backward()
            rule.step()
    expected = {name: p.detach() for name, p in theirs.named_parameters()}
    assert_close(
        {name: p.detach() for name, p in ours.named_parameters()}, expected, rtol=1e-8, atol=1e-10
    )


def test_every_option_has_an_effect():
    """Otherwise the comparison above could be one of two rules that both ignore the option."""
    case = BY_NAME["rnn"]
    ends = []
    for chosen in OPTIONS:
        model, network = traced(case, torch.float64)
        optimizer = ps.optim.PathSGD(
            model.parameters(), network, **({"lr": 0.02} | OPTIONS[chosen])
        )
        for step in range(8):
            model.zero_grad()
            case.loss(call(model, case.example(4, torch.float64, seed=step))).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    same = [
        (a, b)
        for i, a in enumerate(OPTIONS)
        for j, b in enumerate(OPTIONS)
        if i < j and torch.allclose(ends[i], ends[j], rtol=1e-7, atol=1e-9)
    ]
    assert same == [("default", "clipped far away")]


def test_a_mean_of_zero_is_frozen_at_one():
    """Before a layer of zeros kappa is 0 at first; its first other mean would be tiny, and every later step with it."""
    model, x = mlp(3, 4, 2), torch.randn(8, 3)
    torch.nn.init.zeros_(model[2].weight)
    optimizer = ps.optim.PathSGD(
        model.parameters(), ps.trace(model, x), lr=0.1, normalization="frozen"
    )
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    assert optimizer.metric.state["0.weight"]["normalizer"] == 1
    assert optimizer.metric.state["2.weight"]["normalizer"] != 1


# --- sizes and bounds -----------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.8, "refresh_every": 3}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "rnn", "small resnet"])
def test_power_zero_is_sgd_after_balancing_once(name, options):
    case = BY_NAME[name]
    ours, theirs = case.model(torch.float64), case.model(torch.float64)
    ps.rescaling.random_rescale_(trace(case, ours), generator=torch.Generator().manual_seed(3))
    ps.rescaling.balance_(trace(case, theirs))
    rules = (
        ps.optim.PathSGD(ours.parameters(), trace(case, ours), lr=0.02, power=0.0, **options),
        torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=options.get("momentum", 0.0)),
    )
    for step in range(6):
        example = case.example(4, torch.float64, seed=step)
        for model, rule in zip((ours, theirs), rules, strict=True):
            model.zero_grad()
            case.loss(call(model, example)).backward()
            rule.step()
    example = case.example(8, torch.float64, seed=50)
    assert_close(
        case.picked(call(ours, example)), case.picked(call(theirs, example)), rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_default_rate_does_not_depend_on_the_size_of_kappa(scale):
    """Weights of the first layer c times as large, of the last c times as small: kappa moves, the step's effect not."""
    model = mlp(3, 8, 2).double()
    x = torch.randn(16, 3, dtype=torch.float64)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
        model[2].weight.div_(scale)
    outputs = []
    for net in (model, reference):
        optimizer = ps.optim.PathSGD(net.parameters(), ps.trace(net, x), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            (net(x) - 1).square().mean().backward()
            optimizer.step()
        outputs.append(net(x).detach())
    assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "rnn", "small resnet", "stacked rnn"])
def test_default_steps_have_the_size_of_sgds_on_the_balanced_network(name):
    """Within a factor of ten: a learning rate found for SGD is a start for Path-SGD."""
    case = BY_NAME[name]
    lengths = []
    for plain in (False, True):
        model, network = traced(case, torch.float64)
        ps.rescaling.balance_(network)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        if plain:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
        case.loss(call(model, case.example(8, torch.float64))).backward()
        optimizer.step()
        lengths.append(
            (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm().item()
        )
    assert 0.1 < lengths[0] / lengths[1] < 10


def test_clipping_bounds_the_invariant_length():
    """With lr = 1 and no momentum, || sqrt(kappa / c) step || is at most the bound, and is the bound when clipped."""
    case = BY_NAME["rnn"]
    model = case.model(torch.float64)
    kappa = oracle(case, model).kappa1()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = ps.optim.PathSGD(
        model.parameters(), trace(case, model), lr=1.0, clip_norm=1e-3, normalization="none"
    )
    case.loss(call(model, case.example(4, torch.float64))).backward()
    optimizer.step()
    squares = [
        (kappa[name] * (p.detach() - before[name]) ** 2).sum()
        for name, p in model.named_parameters()
    ]
    assert sum(squares).sqrt().item() == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.parametrize("bound", ["clip_norm", "clip_step"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_length_that_is_no_number_moves_nothing(bound, bad):
    """Clipped to nothing, or to NaN, other gradients would be lost without a word."""
    model = mlp(3, 4, 2)
    optimizer = ps.optim.PathSGD(
        model.parameters(), ps.trace(model, torch.zeros(1, 3)), **{bound: 1.0}
    )
    model(torch.ones(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert_close([p.detach() for p in model.parameters()], before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": -0.1},
        {"power": -0.5},
        {"nesterov": True},
        {"weight_decay": -1.0},
        {"path_decay": -1.0},
        {"clip_norm": 0.0},
        {"clip_norm": -1.0},
        {"clip_step": 0.0},
        {"refresh_every": 0},
        {"damping": -1e-3},
        {"normalization": "sometimes"},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    with pytest.raises(ValueError, match=next(iter(options))):
        ps.optim.PathSGD(model.parameters(), network, **options)


def test_parameters_of_another_model_are_refused():
    """All of them strangers to the network: surely a mistake, and never a silent plain SGD."""
    network = ps.trace(mlp(3, 4, 2), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"\w+"):
        ps.optim.PathSGD(mlp(3, 4, 2).parameters(), network)


def test_infinite_kappa_is_reported_and_changes_nothing():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    optimizer = ps.optim.PathSGD(model.parameters(), network)
    model(torch.randn(2, 3)).sum().backward()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.inf
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert_close({name: p.detach() for name, p in model.named_parameters()}, before, rtol=0, atol=0)


def test_stale_kappa_is_computed_as_often_as_asked(monkeypatch):
    case = BY_NAME["mlp"]
    model = case.model(torch.float64)
    optimizer = ps.optim.PathSGD(model.parameters(), trace(case, model), refresh_every=4, lr=0.01)
    steps = []
    for _ in range(9):
        optimizer.zero_grad()
        before = model[2].weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        steps.append(before - model[2].weight.detach())
    same = [bool(torch.allclose(a, b, rtol=1e-12, atol=0)) for a, b in itertools.pairwise(steps)]
    # fresh at the first four steps, and then at every fourth
    assert same == [False, False, False, False, True, True, True, False]


def test_tells_of_parameters_that_it_cannot_move():
    """A network traced with one time step has no path through the recurrent weights: kappa = 0 there."""
    for steps, options, said in (
        (1, {"damping": 0.0}, "'rnn.weight_hh_l0' does not move: gradients reach it, but no path"),
        (
            1,
            {},
            "'rnn.weight_hh_l0' takes the plain step of the balanced network: gradients reach it",
        ),
        (2, {}, ""),
    ):
        model = Recurrent(batch_first=True)
        network = ps.trace(model, torch.zeros(1, steps, 2))
        balanced = ps.trace(copy.deepcopy(model), torch.zeros(1, steps, 2))
        f = network.edge_factors("rnn.weight_hh_l0", 1 / ps.rescaling.balance_(balanced)).float()
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1, **options)
        before = model.rnn.weight_hh_l0.detach().clone()
        model(torch.randn(4, 5, 2)).square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [said in str(w.message) for w in caught] == [True] * bool(said)
        moved = model.rnn.weight_hh_l0.detach() - before
        assert moved.any() == (options == {})
        if said and options == {}:  # g' = f g, dw' = -lr g', dw = f dw'
            assert_close(moved, -0.1 * f**2 * model.rnn.weight_hh_l0.grad, rtol=1e-5, atol=1e-7)


def test_path_decay_keeps_what_half_precision_does_not_hold():
    """kappa1 of the first matrix is 10^5."""
    moved = []
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        model = mlp(4, 8, 3)
        with torch.no_grad():
            for p, scale in zip(model.parameters(), (1e-2, 1e-2, 1e3, 1.0), strict=True):
                p.mul_(scale)
        model = model.to(dtype)
        network = ps.trace(model, torch.zeros(1, 4, dtype=dtype))
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=1.0, path_decay=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        moved.append([(p - q).float() for p, q in zip(model.parameters(), before, strict=True)])
        assert moved[-1][0].abs().amax() > 1e-4
    assert_close(*moved, rtol=0.02, atol=1e-4)


def test_path_decay_holds_where_kappa_is_beyond_float32():
    """By the rule of the paper every weight loses lr lambda of itself, however large kappa is."""
    torch.manual_seed(0)
    model = mlp(4, 8, 8, 8, 8, 8, 3)
    network = ps.trace(model, torch.zeros(1, 4))
    optimizer = ps.optim.PathSGD(
        model.parameters(), network, lr=1.0, path_decay=0.1, normalization="none"
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        p.data.mul_(1e5)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert max(k.max() for k in ps.paths.kappa(network).values()) > 1e40
    assert_close(list(model.parameters()), [0.9 * p for p in before])


def test_step_does_nothing_before_any_gradient():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.randn(2, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert ps.optim.PathSGD(model.parameters(), network, weight_decay=0.1).step() is None
    assert_close({name: p.detach() for name, p in model.named_parameters()}, before, rtol=0, atol=0)


def test_a_kept_metric_keeps_nothing_else():
    torch.manual_seed(0)
    model = Recurrent(inputs=1, hidden=4, batch_first=True)
    x = torch.randn(2, 50, 1)
    optimizer = ps.optim.PathSGD(model.parameters(), ps.trace(model, x), refresh_every=5)
    model(x).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for tensor in (value for value in state.values() if torch.is_tensor(value)):
            assert tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
