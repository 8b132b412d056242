"""Steps in path space against path values and path gradients computed by brute force."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, Case, call, mlp, of_each_kind, slow_besides, trace, traced
from fixture_nets import NETS, load, load_rnn
from oracles.basis import PathValues, as_skeleton
from pathspace.paths.space import frame

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "path_space.json").read_text())
UNTIED = [case for case in ZOO if case.name != "tied characters"]
RAW = {"units": "none", "clamp": None}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("GSGD", {}), ("GSGD", {"momentum": 0.9}), ("GSGD", {"clip_norm": 1.0}), ("GAdam", {})],
)
def test_a_batch_with_nan_is_refused_and_leaves_nothing_behind(kind, options):
    ends = []
    for refused in (False, True):
        torch.manual_seed(0)
        model = mlp(3, 5, 2)
        optimizer = getattr(ps.optim, kind)(
            model.parameters(), ps.trace(model, torch.zeros(1, 3)), lr=0.01, **options
        )
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            if refused and step == 3:
                optimizer.zero_grad()
                model(x / 0).square().mean().backward()
                with pytest.raises(FloatingPointError, match="not finite"):
                    optimizer.step()
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(
    ("kind", "plain", "options"),
    [
        ("GSGD", torch.optim.SGD, {"momentum": 0.9}),
        ("GAdam", torch.optim.AdamW, {"weight_decay": 0.0}),
    ],
)
def test_outside_the_network_a_rate_of_zero_is_the_plain_rule_s(kind, plain, options):
    model = mlp(3, 5, 2).double()
    network = ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))
    ours, theirs = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    pair = (
        getattr(ps.optim, kind)([*model.parameters(), ours], network, lr=0.02, **options),
        plain([theirs], lr=0.02, **options),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(rule, lambda step: step / 4) for rule in pair]
    for step in range(4):
        for rule in pair:
            rule.zero_grad()
        (
            model(torch.randn(4, 3, dtype=torch.float64)).sum()
            + (ours**2 + theirs**2).sum() / (1 + step)
        ).backward()
        for rule, schedule in zip(pair, schedules, strict=True):
            rule.step()
            schedule.step()
    assert_close(ours, theirs, rtol=1e-10, atol=0)


# --- known numbers --------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(NETS))
def test_step_is_that_of_the_fixture(name):
    known = KNOWN["nets"][name]
    for step in known["gsgd"]:
        net = load(name)
        network = ps.trace(net.model, net.x)
        skeleton = as_skeleton(network, net, known["skeleton"])
        optimizer = ps.optim.GSGD(
            net.model.parameters(), network, lr=step["eta"], skeleton=skeleton, **RAW
        )
        net.loss(net.model(net.x)).backward()
        optimizer.step()
        weights = {name: p.detach() for name, p in net.model.named_parameters()}
        assert_close(weights, net.as_tensors(step["new_params"]), rtol=1e-10, atol=1e-12)


def test_recurrent_step_is_that_of_the_fixture():
    model, x = load_rnn()
    known = KNOWN["nn_rnn"]
    network = ps.trace(model, x)
    optimizer = ps.optim.GSGD(
        model.parameters(), network, lr=known["eta"], skeleton="cyclic", **RAW
    )
    (model(x).square().sum(-1) / 2).mean().backward()
    optimizer.step()
    for name, value in known["new_state"].items():
        expected = torch.tensor(value, dtype=torch.float64)
        assert_close(model.get_parameter(name).detach(), expected, rtol=1e-10, atol=1e-12)


def test_path_gradients_are_those_of_the_fixture():
    for name, known in KNOWN["nets"].items():
        net = load(name)
        network = ps.trace(net.model, net.x)
        values = PathValues(network, as_skeleton(network, net, known["skeleton"]))
        net.loss(net.model(net.x)).backward()
        for number, gradient in zip(values.places, values.gradient().tolist(), strict=True):
            fixture_number = net.as_tensors(list(range(len(net.net["params"]))))
            at = values.graph.edge(number)
            assert gradient == pytest.approx(
                known["dL_dv"][str(int(fixture_number[at[0]][at[1]]))], rel=1e-9, abs=1e-13
            )


# --- every path takes its step --------------------------------------------------------------------


def follow(case, make, rule, steps=4, skeleton_rule="largest", training=False):
    """Train a network, and the values of its basis paths by `rule` as if they were parameters; compare."""
    model, network = traced(case, torch.float64)
    if training != case.training:
        model.train(training)
        network = trace(case, model)
    skeleton = ps.paths.skeleton(network, skeleton_rule, generator=torch.Generator().manual_seed(2))
    values = PathValues(network, skeleton)
    paths = torch.nn.Parameter(values.now())
    optimizer, by_hand = make(model.parameters(), network, skeleton), rule([paths])
    before = paths.detach().clone()
    for step in range(steps):
        optimizer.zero_grad()
        case.loss(call(model, case.example(4, torch.float64, seed=step))).backward()
        paths.grad = values.gradient()
        optimizer.step()
        by_hand.step()
        assert_close(values.now(), paths.detach(), rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            paths.copy_(values.now())
    assert (paths.detach() - before).abs().max() > 1e-6


def g_sgd(**options):
    return lambda params, network, skeleton: ps.optim.GSGD(
        params, network, skeleton=skeleton, **RAW, **options
    )


class OneGain(torch.nn.Module):
    """A residual branch with one learned number in front, as in ReZero."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.out = (torch.nn.Linear(*n) for n in ((3, 4), (4, 4), (4, 2)))
        self.gain = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        h = self.first(x).relu()
        return self.out(h + self.gain * self.branch(h).relu())


MODELS = [
    Case("one gain", OneGain, lambda n: torch.randn(n, 3), 2),
    Case(
        "recurrent cnn",
        lambda: ps.nn.RecurrentCNN(1, 2, maps=2, layers=3, unfoldings=3),
        lambda n: torch.randn(n, 1, 6, 6),
        3 * 4,
    ),
    Case(
        "stacked relu rnn",
        lambda: ps.nn.StackedReLURNN(2, [3, 3, 6], weight_drop=0.3, hidden_dropout=0.3),
        lambda n: torch.randn(n, 4, 2),
        6,
        output=lambda out: out[0],
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        *of_each_kind((*UNTIED, *MODELS), "largest"),
        *slow_besides(
            [(case, "random") for case in (*UNTIED, *MODELS)[::9]],
            [(case, "random") for case in (*UNTIED, *MODELS)[::3]],
        ),
        *(
            (BY_NAME[name], "cyclic")
            for name in ("mlp", "small resnet", "stacked bidirectional rnn")
        ),
    ],
    ids=str,
)
def test_every_basis_path_takes_a_gradient_step(case, rule):
    """v_e <- v_e - lr dL/dv_e, with a rate at which some path loses or gains a third of its value."""
    model, network = traced(case, torch.float64)
    skeleton = ps.paths.skeleton(network, rule, generator=torch.Generator().manual_seed(2))
    values = PathValues(network, skeleton)
    case.loss(call(model, case.example(4, torch.float64, seed=0))).backward()
    before, gradient = values.now(), values.gradient()
    changing = before != 0
    lr = 0.3 / float((gradient / before)[changing].abs().max())
    ps.optim.GSGD(model.parameters(), network, lr=lr, skeleton=skeleton, **RAW).step()
    assert_close(values.now(), before - lr * gradient, rtol=1e-10, atol=1e-12)
    assert ((values.now() - before) / before)[changing].abs().max() > 0.25


ONE_CLASS = Case(  # every column of the second matrix leaves the same unit class
    "one channel",
    lambda: torch.nn.Sequential(
        torch.nn.Conv2d(1, 1, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4, 2)
    ),
    lambda n: torch.randn(n, 1, 3, 3),
    1,
)
TALL = Case(  # matrices of many rows, and two that leave the same classes
    "tall", lambda: Skipping(3, 40, 2), lambda n: torch.randn(n, 3), 80
)


class Skipping(torch.nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.read, self.up = torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, hidden)
        self.out, self.across = torch.nn.Linear(hidden, outputs), torch.nn.Linear(hidden, outputs)

    def forward(self, x):
        h = self.read(x).relu()
        return self.out(self.up(h).relu()) + self.across(h)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [ONE_CLASS, TALL], ids=str)
def test_sums_over_what_leaves_a_class_are_whole(case):
    follow(case, g_sgd(lr=1e-5), lambda p: torch.optim.SGD(p, lr=1e-5))


SOME = [
    BY_NAME[name] for name in ("skip", "cnn 2d", "stacked rnn", "deep residual", "small resnet")
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_momentum_is_kept_on_path_gradients(case):
    options = {"lr": 1e-5, "momentum": 0.9, "nesterov": True}
    follow(case, g_sgd(**options), lambda p: torch.optim.SGD(p, **options))


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_adam_runs_on_path_gradients(case):
    options = {"lr": 1e-5, "weight_decay": 0.1, "amsgrad": True}

    def make(params, network, skeleton):
        return ps.optim.GAdam(params, network, skeleton=skeleton, **RAW, **options)

    follow(case, make, lambda p: torch.optim.AdamW(p, **options))


class DecayedAndClipped(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01, error_if_nonfinite=True)
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * 0.1)
        return super().step(closure)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_decay_and_clipping_act_on_paths(case):
    make = g_sgd(lr=1e-3, weight_decay=0.1, clip_norm=0.01, momentum=0.5)
    follow(case, make, lambda p: DecayedAndClipped(p, lr=1e-3, momentum=0.5))


@pytest.mark.sample(2)
@pytest.mark.parametrize("clip_norm", [None, 1e9])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_groups_give_their_paths_rates_and_decay_of_their_own(case, clip_norm):
    """The path through e = (u -> v) takes the options of the group that e is in; others on it do not count."""
    model, network = traced(case, torch.float64)
    skeleton = ps.paths.skeleton(network, "cyclic")
    values = PathValues(network, skeleton)
    options = [
        {"lr": 1e-4 * (i + 1), "weight_decay": 10.0 * i} for i in range(len(network.parameters))
    ]
    groups = [
        {"params": [p], **own} for p, own in zip(network.parameters.values(), options, strict=True)
    ]
    optimizer = ps.optim.GSGD(groups, network, skeleton=skeleton, clip_norm=clip_norm, **RAW)
    case.loss(call(model, case.example(4, torch.float64, seed=0))).backward()
    before, gradient = values.now(), values.gradient()
    optimizer.step()
    names = [values.graph.edge(number)[0] for number in values.places]
    own = [options[list(network.parameters).index(name)] for name in names]
    lr, decay = (
        torch.tensor([o[key] for o in own], dtype=torch.float64) for key in ("lr", "weight_decay")
    )
    assert_close(values.now(), (1 - lr * decay) * before - lr * gradient, rtol=1e-10, atol=1e-13)


def test_oracle_tells_other_steps():
    """Planted faults: plain SGD, momentum on dL/dw, and a skeleton output that is not held."""
    case = BY_NAME["stacked rnn"]
    with pytest.raises(AssertionError, match="not close"):
        follow(
            case,
            lambda p, *_: torch.optim.SGD(p, lr=1e-5),
            lambda p: torch.optim.SGD(p, lr=1e-5),
            steps=1,
        )
    with pytest.raises(AssertionError, match="not close"):
        follow(case, g_sgd(lr=1e-5), lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9))
    with pytest.raises(AssertionError, match="not close"):
        follow(case, g_sgd(lr=1.1e-5), lambda p: torch.optim.SGD(p, lr=1e-5))


def test_units_give_every_path_a_rate_that_stays():
    """The default: v_e <- v_e - lr a_e^2 dL/dv_e with a_e frozen, 1 for a weight of the balanced network."""
    case = BY_NAME["stacked rnn"]
    model, network = traced(case, torch.float64)
    ps.rescaling.balance_(network)
    skeleton = ps.paths.skeleton(network)
    values = PathValues(network, skeleton)
    optimizer = ps.optim.GSGD(model.parameters(), network, lr=1e-3, skeleton=skeleton, clamp=None)
    rates = []
    for step in range(3):
        optimizer.zero_grad()
        case.loss(call(model, case.example(4, torch.float64, seed=step))).backward()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient, before = values.gradient(), values.now()
        optimizer.step()
        rates.append(
            torch.where(gradient.abs() > 1e-9, (before - values.now()) / gradient / 1e-3, torch.nan)
        )
        if step == 0:  # no R divides a weight that comes from an input
            moved = weights["rnn.bias_ih_l1"] - model.rnn.bias_ih_l1.detach()
            assert_close(moved, 1e-3 * model.rnn.bias_ih_l1.grad, rtol=1e-9, atol=0)
    both = ~(rates[0].isnan() | rates[1].isnan() | rates[2].isnan())
    assert both.sum() > 20
    assert (rates[0][both] > 0).all()
    assert_close(rates[0][both], rates[1][both], rtol=1e-6, atol=0)
    assert_close(rates[0][both], rates[2][both], rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_steps_are_the_same_with_deterministic_algorithms(make):
    def weights():
        torch.manual_seed(0)
        model = mlp(3, 6, 5, 2)
        model[2].weight = torch.nn.Parameter(model[2].weight.detach().t().contiguous().t())
        x = torch.randn(8, 3)
        optimizer = make(model.parameters(), ps.trace(model, x), lr=0.05)
        for _ in range(3):
            one_step(optimizer, model, x)
        return {name: p.detach() for name, p in model.named_parameters()}

    expected = weights()
    torch.use_deterministic_algorithms(True)
    try:
        assert_close(weights(), expected, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_gradients_may_come_and_go(make):
    """The frames of steps with other sets of parameters do not disturb one another."""

    def weights(together):
        torch.manual_seed(0)
        model = mlp(3, 6, 5, 2).double()
        x = torch.randn(8, 3, dtype=torch.float64)
        skeleton = ps.paths.skeleton(ps.trace(model, x))
        optimizer = make(model.parameters(), ps.trace(model, x), lr=0.05, skeleton=skeleton)
        optimizer.choose_skeleton(skeleton)
        for step in range(9):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            if step % 3 == 1:
                model[0].weight.grad = None
            if step % 3 == 2:
                model[4].bias.grad = None
            if not together:
                optimizer._frames.clear()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    assert_close(weights(True), weights(False), rtol=0, atol=0)


# --- the skeleton ---------------------------------------------------------------------------------


def one_step(optimizer, model, x):
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_skeleton_outputs_are_held_and_choosing_anew_changes_nothing(make):
    torch.manual_seed(0)
    model = mlp(3, 6, 5, 2)
    x = torch.randn(8, 3)
    network = ps.trace(model, x)
    optimizer = make(model.parameters(), network, lr=0.05)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert optimizer.skeleton is None
    for _ in range(3):
        one_step(optimizer, model, x)
    first = optimizer.skeleton
    for name, index in first.outgoing:
        assert model.get_parameter(name)[index] == start[name][index]
    weights, output = {n: p.detach().clone() for n, p in model.named_parameters()}, model(x)
    second = optimizer.choose_skeleton("random", torch.Generator().manual_seed(4))
    assert optimizer.skeleton is second
    assert second.outgoing != first.outgoing
    assert_close({n: p.detach() for n, p in model.named_parameters()}, weights, rtol=0, atol=0)
    assert torch.equal(model(x), output)
    one_step(optimizer, model, x)
    for name, index in second.outgoing:
        assert model.get_parameter(name)[index] == weights[name][index]


def test_no_skeleton_asks_for_the_largest():
    torch.manual_seed(0)
    model = mlp(3, 6, 2)
    x = torch.randn(8, 3)
    network = ps.trace(model, x)
    optimizer = ps.optim.GSGD(model.parameters(), network, skeleton=None)
    expected = ps.paths.skeleton(network, "largest")
    one_step(optimizer, model, x)
    assert optimizer.skeleton.incoming == expected.incoming
    assert optimizer.skeleton.outgoing == expected.outgoing
    with pytest.raises(ValueError, match="'random' or None, got 'longest'"):
        ps.optim.GSGD(model.parameters(), network, skeleton="longest")


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_random_skeletons_are_decided_by_their_seed(make):
    def edges(seed):
        torch.manual_seed(0)
        model = mlp(3, 6, 5, 2)
        x = torch.randn(8, 3)
        optimizer = make(
            model.parameters(), ps.trace(model, x), lr=0.01, skeleton="random", seed=seed
        )
        before = torch.get_rng_state()
        one_step(optimizer, model, x)
        assert torch.equal(torch.get_rng_state(), before)
        return optimizer.skeleton.edges

    assert torch.equal(edges(1), edges(1))
    assert not torch.equal(edges(1), edges(2))


def test_ratios_are_clamped_and_counted():
    """A unit of a single hidden layer has the ratio by which the weight I(c) grows."""
    found, x = {}, torch.randn(8, 3)
    for clamp in (1.5, None):
        torch.manual_seed(0)
        model = mlp(3, 6, 2)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = ps.optim.GSGD(
            model.parameters(), ps.trace(model, x), clamp=clamp, lr=100.0, skeleton_rate=1.0
        )
        one_step(optimizer, model, x)
        ratios = torch.stack(
            [
                model.get_parameter(n)[i].detach() / start[n][i]
                for n, i in optimizer.skeleton.incoming
            ]
        )
        found[clamp] = ratios, optimizer.diagnostics()
    (ratios, clamped), (exact, free) = found[1.5], found[None]
    assert_close(ratios, exact.clamp(1 / 1.5, 1.5))
    assert clamped["clamped"] == ((exact < 1 / 1.5) | (exact > 1.5)).sum() > 1
    assert clamped["flipped"] == free["clamped"] == 0
    assert free["flipped"] == (exact < 0).sum() > 1
    for r, told in ((ratios, clamped), (exact, free)):  # of sizes
        assert told["smallest_ratio"] == pytest.approx(r.abs().min().item(), rel=1e-5)
        assert told["largest_ratio"] == pytest.approx(r.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("rate", [0.03, 0.5])
def test_paths_of_skeleton_edges_alone_have_a_rate_by_how_far_they_move_the_others(rate):
    """v_I <- v_I - lr rate (w_O / l)^2 dL/dv_I in the balanced network, with l^2 the squares of all that R moves.

    R multiplies I(c) and divides what leaves c, but for O(c): l^2 = 1 + sum of (w / w_I)^2 over
    these weights.
    """
    torch.manual_seed(0)
    model, x = mlp(3, 5, 4).double(), torch.randn(8, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    ps.rescaling.balance_(network)
    skeleton = ps.paths.skeleton(network)
    values = PathValues(network, skeleton)
    optimizer = ps.optim.GSGD(
        model.parameters(), network, lr=1e-3, skeleton=skeleton, skeleton_rate=rate, clamp=None
    )
    (model(x) - 1).square().mean().backward()
    before, gradient = values.now(), values.gradient()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    taken = ((before - values.now()) / gradient / 1e-3).tolist()
    places = [values.graph.edge(number) for number in values.places]
    for (_, (unit, feature)), (_, (output, _)) in zip(
        skeleton.incoming, skeleton.outgoing, strict=True
    ):
        w_in, leaving = weights["0.weight"][unit, feature], weights["2.weight"][:, unit]
        moved = leaving.square().sum() - leaving[output].square()
        expected = rate * leaving[output] ** 2 / (1 + moved / w_in**2)
        assert taken[places.index(("0.weight", (unit, feature)))] == pytest.approx(
            expected.item(), rel=1e-6
        )


def test_diagnostics_show_the_conditioning():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    network = ps.trace(model, torch.zeros(1, 50))
    with torch.no_grad():
        model[0].weight[7], model[0].bias[7] = 0, 0
    spread = {}
    for rule in ("largest", "cyclic"):
        optimizer = ps.optim.GSGD(model.parameters(), network)
        with pytest.raises(RuntimeError, match="first step"):
            optimizer.diagnostics()
        optimizer.choose_skeleton(rule)
        found = optimizer.diagnostics()
        smallest, middle, largest = found["multipliers"]
        assert smallest <= middle <= largest
        spread[rule] = largest
        assert found["classes"] == 99
        assert found["incomplete"] == [network.class_names[7]]
        assert (found["smallest_ratio"], found["largest_ratio"], found["clamped"]) == (1, 1, 0)
    assert spread["cyclic"] > 100 * spread["largest"]


def test_dead_units_come_alive():
    """Nothing leaves the units: their weights out have gradients all the same, and an invariant step."""
    torch.manual_seed(0)
    model = mlp(3, 6, 2)
    with torch.no_grad():
        model[2].weight.zero_()
    x = torch.randn(8, 3)
    optimizer = ps.optim.GSGD(model.parameters(), ps.trace(model, x), lr=0.1)
    for _ in range(3):
        one_step(optimizer, model, x)
    assert len(optimizer.diagnostics()["incomplete"]) == 6
    assert (model[2].weight != 0).sum() > 6
    optimizer.choose_skeleton()
    assert len(optimizer.diagnostics()["incomplete"]) < 3


@pytest.mark.parametrize("clamp", [2.0, None])
def test_skeleton_weights_that_are_set_to_zero_hold_their_class_until_another_is_chosen(clamp):
    torch.manual_seed(0)
    model = mlp(3, 6, 5, 2)
    x = torch.randn(8, 3)
    optimizer = ps.optim.GSGD(model.parameters(), ps.trace(model, x), lr=0.05, clamp=clamp)
    one_step(optimizer, model, x)
    name, index = optimizer.skeleton.incoming[2]
    with torch.no_grad():
        model.get_parameter(name)[index] = 0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        one_step(optimizer, model, x)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.equal(model[2].weight[:, 2], before["2.weight"][:, 2])
    assert not torch.equal(model[2].weight[:, 3], before["2.weight"][:, 3])
    assert optimizer.diagnostics()["smallest_ratio"] == 0
    optimizer.choose_skeleton()
    one_step(optimizer, model, x)
    assert not torch.equal(model[2].weight[:, 2], before["2.weight"][:, 2])


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", ["0.weight", "2.weight", "2.bias", "4.weight"])
def test_invariant_with_frozen_parameters(frozen):
    outputs = []
    for factor in (1.0, 1024.0):
        torch.manual_seed(0)
        model = mlp(3, 6, 5, 2)
        x = torch.randn(8, 3)
        network = ps.trace(model, x)
        ps.rescaling.rescale_(network, torch.tensor([factor, 1 / factor] * 5 + [1.0]))
        model.get_parameter(frozen).requires_grad_(False)
        optimizer = ps.optim.GSGD(model.parameters(), network, lr=0.05, momentum=0.5)
        for _ in range(10):
            one_step(optimizer, model, x)
        outputs.append(model(x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_units_without_basis_paths_are_rescaled_before_the_first_step(make):
    case = BY_NAME["tied characters"]
    model, network = traced(case, torch.float64)
    optimizer = make(model.parameters(), network, lr=0.01)

    def step():
        optimizer.zero_grad()
        case.loss(call(model, case.example(4, torch.float64, seed=1))).backward()
        optimizer.step()

    scales = 2.0 ** torch.arange(network.num_classes, dtype=torch.float64).remainder(3)
    ps.rescaling.rescale_(network, scales)
    step()
    ps.rescaling.rescale_(network, scales)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="rescaled after the first step"):
        step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.choose_skeleton()
    step()


@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
def test_a_warm_up_may_begin_at_zero(make):
    torch.manual_seed(0)
    model, x = mlp(3, 6, 2), torch.randn(8, 3)
    optimizer = make(model.parameters(), ps.trace(model, x), lr=0.01, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    for moves in (False, True):
        before = [p.detach().clone() for p in model.parameters()]
        one_step(optimizer, model, x)
        schedule.step()
        assert (
            any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            is moves
        )


# --- options and states ---------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("make", [ps.optim.GSGD, ps.optim.GAdam])
@pytest.mark.parametrize(
    "bad",
    [
        {"clamp": 1.0},
        {"clip_norm": 0.0},
        {"units": "metres"},
        {"skeleton": "best"},
        {"skeleton_rate": 0.0},
        {"weight_decay": -1.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(make, bad):
    case = BY_NAME["mlp"]
    model = case.model()
    with pytest.raises(ValueError, match=next(iter(bad))):
        make(model.parameters(), trace(case, model), **bad)


def test_nesterov_needs_momentum_and_parameters_their_network():
    case = BY_NAME["mlp"]
    model = case.model()
    with pytest.raises(ValueError, match="momentum"):
        ps.optim.GSGD(model.parameters(), trace(case, model), nesterov=True)
    with pytest.raises(ValueError, match="belongs to the network"):
        ps.optim.GSGD(case.model().parameters(), trace(case, model))
    other = ps.paths.skeleton(trace(BY_NAME["rnn"], BY_NAME["rnn"].model()))
    with pytest.raises(ValueError, match="another network"):
        ps.optim.GSGD(model.parameters(), trace(case, model), skeleton=other)
    with pytest.raises(ValueError, match="another network"):
        ps.optim.GSGD(model.parameters(), trace(case, model)).choose_skeleton(other)


@pytest.mark.parametrize("bad", ["other", "nan"])
def test_a_choice_that_is_refused_keeps_what_was_kept(bad):
    case = BY_NAME["mlp"]
    model = case.model()
    optimizer = ps.optim.GSGD(model.parameters(), trace(case, model), momentum=0.9)
    case.loss(call(model, case.example(4, torch.float32, seed=0))).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    if bad == "other":
        with pytest.raises(ValueError, match="another network"):
            optimizer.choose_skeleton(
                ps.paths.skeleton(trace(BY_NAME["rnn"], BY_NAME["rnn"].model()))
            )
    else:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        with pytest.raises(FloatingPointError, match="not finite"):
            optimizer.choose_skeleton()
    after = optimizer.state_dict()
    assert before["state"].keys() == after["state"].keys()
    for number, state in before["state"].items():
        assert torch.equal(state["momentum_buffer"], after["state"][number]["momentum_buffer"])


def test_states_of_other_optimizers_are_refused():
    case = BY_NAME["mlp"]
    model = case.model()
    optimizer = ps.optim.GSGD(model.parameters(), trace(case, model))
    with pytest.raises(KeyError, match="path_space"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["GSGD", "GAdam"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused(kind, bad):
    model = mlp(3, 4, 2)
    optimizer = getattr(ps.optim, kind)(
        model.parameters(), ps.trace(model, torch.zeros(1, 3)), lr=0.01
    )
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight[1, 1] = bad
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert all(
        torch.equal(p.nan_to_num(), q.nan_to_num())
        for p, q in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["GSGD", "GAdam", "QuasiDiagonal", "PathSGD"])
@pytest.mark.parametrize("steps", [1, 12])
def test_infinite_weights_of_a_unit_that_is_dead_on_all_data_are_refused(kind, steps):
    """No output and no gradient shows them."""
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    optimizer = getattr(ps.optim, kind)(
        model.parameters(), ps.trace(model, torch.zeros(1, 3)), lr=0.01
    )

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.rand(5, 3)).square().mean().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()

    train(steps)
    with torch.no_grad():
        model[0].weight[1, 1] = -torch.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        train(10)


class Unread(torch.nn.Module):
    """A layer that feeds nothing back in the one step that it has, and whose reading of the units nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.r = torch.nn.Linear(4, 4, bias=False)
        self.double()

    def forward(self, x):
        h = (self.a(x) + self.r(x.new_zeros(len(x), 4))).relu()
        self.r(h).relu()
        return self.c(h)


class UnreadProduct(Unread):
    """The scales of two layers are tied by a sum of products that nobody uses."""

    def forward(self, x):
        h = self.a(x).relu()
        g = self.r(h).relu()
        (h * g).sum(-1)
        return self.c(h) + g[:, :2]


@pytest.mark.parametrize("name", ["GSGD", "GAdam"])
def test_weights_on_no_path_do_not_pace_the_others(name):
    x, found = torch.randn(5, 3, dtype=torch.float64), []
    for scaled in (False, True):
        model = Unread()
        network = ps.trace(model, x)
        if scaled:
            generator = torch.Generator().manual_seed(0)
            ps.rescaling.random_rescale_(
                network, 2.0**-6, 2.0**6, powers_of_two=True, generator=generator
            )
        optimizer = getattr(ps.optim, name)(model.parameters(), network, lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(model(x))
    assert torch.equal(*found)


def test_scales_tied_by_an_unread_product_are_refused():
    model, x = UnreadProduct(), torch.randn(5, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    assert len(network.monomials)
    with pytest.raises(ValueError, match="in a part that no output reads"):
        ps.optim.GSGD(model.parameters(), network)


def test_sums_over_rows_are_the_same_some_rows_at_a_time(monkeypatch):
    torch.manual_seed(0)
    start = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 6, 2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3),
    ).double()  # fmt: skip
    x = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    ends = []
    for cached in (frame._CACHED, 16):
        monkeypatch.setattr(frame, "_CACHED", cached)
        model = copy.deepcopy(start)
        optimizer = ps.optim.GSGD(model.parameters(), ps.trace(model, x), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert_close(*ends, rtol=1e-12, atol=1e-14)
