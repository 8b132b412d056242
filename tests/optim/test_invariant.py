"""Invariant: rules of others, what they keep, and one metric for two of them. torch's rules are in the registry."""

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, in_turn, mlp, slow_besides, trace, traced
from conformance import power_of_two_factors
from pathspace.optim.base.points import move_points_

po = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

OTHERS = {
    "SOAP": (po.SOAP, {"lr": 3e-3, "weight_decay": 0.01}),
    "Lion": (po.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "Prodigy": (po.Prodigy, {"lr": 1.0, "d0": 1e-3}),
    "AdamWScheduleFree": (schedulefree.AdamWScheduleFree, {"lr": 0.01, "weight_decay": 0.1}),
}


def run(case, make, steps=12, factors=None, dtype=torch.float32, wrap=None):
    """The outputs of a run, and its weights after undoing the rescaling."""
    model, network = traced(case, dtype)
    if factors is not None:
        ps.rescaling.rescale_(network, factors.to(dtype))
    optimizer, outputs = make(model.parameters(), network), []
    optimizer.train()  # of schedule-free rules; nothing for others
    for step in range(steps):
        example = case.example(4, dtype, seed=step % 5)

        def closure(example=example):
            optimizer.zero_grad()
            output = call(model, example)
            loss = case.loss(output)
            loss.backward()
            outputs.append(case.picked(output).detach().clone())
            return loss

        if wrap is None:
            closure()
            optimizer.step()
        else:
            wrap(optimizer, closure)
    if factors is not None:
        ps.rescaling.rescale_(network, (1 / factors).to(dtype))
    return torch.stack(outputs), [p.detach() for p in model.parameters()], optimizer


def alike(ours, theirs):
    return torch.equal(ours[0], theirs[0]) and all(map(torch.equal, ours[1], theirs[1]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "name"),
    slow_besides(
        in_turn(OTHERS, ("mlp", "rnn", "small resnet"), everywhere=["SOAP"]),
        itertools.product(OTHERS, ("mlp", "rnn", "small resnet")),
    ),
)
def test_rules_of_others_are_bitwise_invariant(rule, name):
    kind, options = OTHERS[rule]
    case = BY_NAME[name]

    def make(parameters, network):
        return ps.optim.Invariant(
            parameters, network, kind, metric=ps.metrics.Path(refresh_every=4), **options
        )

    plain = run(case, make)
    assert alike(plain, run(case, make, factors=power_of_two_factors(case.classes)))
    assert plain[0].isfinite().all()
    assert not torch.equal(plain[0][0], plain[0][5])


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (torch.optim.LBFGS, {"lr": 0.3, "max_iter": 3}),
        (
            lambda groups, **options: po.SAM(groups, torch.optim.SGD, **options),
            {"lr": 0.02, "rho": 0.01},
        ),
    ],
    ids=["LBFGS", "SAM"],
)
def test_rules_of_several_evaluations_go_through_the_closure(rule, options):
    case = BY_NAME["mlp"]

    def make(parameters, network):
        return ps.optim.Invariant(parameters, network, rule, points=(), **options)

    def wrap(optimizer, closure):
        loss = optimizer.step(closure)
        assert loss is None or loss.isfinite()  # SAM returns none

    plain = run(case, make, steps=5, wrap=wrap)
    assert len(plain[0]) > 5
    assert alike(
        plain, run(case, make, steps=5, factors=power_of_two_factors(case.classes), wrap=wrap)
    )
    balanced = ps.metrics.Balanced()
    once = run(
        case,
        lambda p, n: ps.optim.Invariant(p, n, rule, metric=balanced, points=(), **options),
        5,
        wrap=wrap,
    )
    assert not torch.equal(once[0], plain[0])  # the metric has a part in it


@pytest.mark.parametrize("rule", [torch.optim.LBFGS, lambda g: po.SAM(g, torch.optim.SGD, lr=0.1)])
def test_sparse_gradients_of_a_closure_are_refused(rule):
    model, words = (
        torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True), mlp(4, 6, 3)),
        torch.arange(4),
    )
    optimizer = ps.optim.Invariant(model.parameters(), ps.trace(model, words), rule, points=())

    def closure():
        loss = model(words).square().mean()
        loss.backward()
        return loss

    with pytest.raises(
        RuntimeError, match=r"Invariant does not support sparse gradients; use Embedding"
    ):
        optimizer.step(closure)


def test_without_freedom_it_is_the_rule():
    """One linear layer has no unit to rescale, and its kappa is 1."""
    x = torch.randn(9, 4, dtype=torch.float64)
    for kind, options in (
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (torch.optim.LBFGS, {"lr": 0.1}),
        (lambda groups, **named: po.SAM(groups, torch.optim.SGD, **named), {"lr": 0.1, "rho": 0.5}),
    ):
        ours, theirs = (nn.Linear(4, 3, bias=False).double() for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        network = ps.trace(ours, x[:1])
        metric = ps.metrics.Path(damping=0.0)
        for model, rule in (
            (
                ours,
                ps.optim.Invariant(
                    ours.parameters(), network, kind, metric=metric, points=(), **options
                ),
            ),
            (theirs, kind(theirs.parameters(), **options)),
        ):
            for _ in range(5):

                def closure(model=model, rule=rule):
                    rule.zero_grad()
                    loss = (model(x) - 1).square().mean()
                    loss.backward()
                    return loss

                closure()  # SAM begins with gradients
                rule.step(closure)
        assert_close(ours.weight, theirs.weight, rtol=1e-12, atol=1e-14)


def test_every_evaluation_is_clipped_and_moves_what_it_used():
    """One linear layer with its bias: clipping is torch's, and what was frozen since the gradients before it stays."""
    x, found = torch.randn(9, 4, dtype=torch.float64), []
    start = nn.Linear(4, 3).double()
    for ours in (True, False):
        model, options = (
            copy.deepcopy(start),
            {"base_optimizer": torch.optim.SGD, "lr": 0.1, "rho": 0.5},
        )
        if ours:
            options |= {"metric": ps.metrics.Balanced(), "points": (), "clip_norm": 0.05}
            optimizer = ps.optim.Invariant(
                model.parameters(), ps.trace(model, x[:1]), po.SAM, **options
            )
        else:
            optimizer = po.SAM(model.parameters(), **options)

        def closure(model=model, optimizer=optimizer, ours=ours):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            if not ours:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        for step in range(4):
            model.bias.requires_grad_(True)
            closure()
            model.bias.requires_grad_(step != 2)
            before = model.bias.detach().clone()
            optimizer.step(closure)
            assert torch.equal(model.bias, before) == (step == 2)
        found.append(model.weight.detach())
    assert_close(*found, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="LBFGS takes no clip_norm"):
        ps.optim.Invariant(
            model.parameters(), ps.trace(model, x[:1]), torch.optim.LBFGS, clip_norm=1.0
        )


def test_gradients_that_a_rule_has_cleared_are_not_added_to():
    """SAM clears them between its two evaluations, and many closures that it is given do not."""
    x, found = torch.randn(9, 4, dtype=torch.float64), []
    start, options = (
        nn.Linear(4, 3).double(),
        {"base_optimizer": torch.optim.SGD, "lr": 0.1, "rho": 0.5},
    )
    for ours in (True, False):
        model = copy.deepcopy(start)
        if ours:
            network, metric = ps.trace(model, x[:1]), ps.metrics.Balanced()
            optimizer = ps.optim.Invariant(
                model.parameters(), network, po.SAM, metric=metric, points=(), **options
            )
        else:
            optimizer = po.SAM(model.parameters(), **options)

        def closure(model=model):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.zero_grad()
            closure()
            optimizer.step(closure)
        found.append([p.detach() for p in model.parameters()])
    assert_close(*found)


@pytest.mark.parametrize(
    ("rule", "first", "options"),
    [
        (torch.optim.LBFGS, 2, {"max_iter": 3}),
        (po.SAM, 1, {"base_optimizer": torch.optim.SGD, "rho": 0.5}),
    ],
    ids=["LBFGS", "SAM"],
)
def test_what_a_later_evaluation_uses_takes_part(rule, first, options):
    """The bias, after the first evaluation in a step."""
    torch.manual_seed(0)
    x, found = torch.randn(9, 4, dtype=torch.float64), []
    start = nn.Linear(4, 3).double()
    for ours in (True, False):
        model, losses = copy.deepcopy(start), []
        if ours:
            optimizer = ps.optim.Invariant(
                model.parameters(),
                ps.trace(model, x[:1]),
                rule,
                metric=ps.metrics.Balanced(),
                points=(),
                lr=0.1,
                **options,
            )
        else:
            optimizer = rule(model.parameters(), lr=0.1, **options)

        def closure(model=model, optimizer=optimizer, losses=losses):
            optimizer.zero_grad()
            bias = model.bias if len(losses) >= first else None
            losses.append((nn.functional.linear(x, model.weight, bias) - 1).square().mean())
            losses[-1].backward()
            return losses[-1]

        closure()  # SAM begins with gradients
        optimizer.step(closure)
        found.append([p.detach() for p in model.parameters()])
    assert_close(*found)
    assert not torch.equal(found[0][1], start.bias)


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adafactor, po.Lion], ids=lambda k: k.__name__
)
def test_a_rate_of_zero_leaves_every_bit(kind):
    case = BY_NAME["rnn"]
    start = [p.detach() for p in case.model().parameters()]
    make = lambda p, n: ps.optim.Invariant(p, n, kind, lr=0.0, weight_decay=0.1)  # noqa: E731
    _, weights, _ = run(case, make, steps=3)
    assert all(map(torch.equal, weights, start))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_begins_where_a_gradient_comes_late(nesterov):
    """As with torch's own, whose fused kernel refuses it."""
    ours = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()  # without a unit to rescale
    theirs = copy.deepcopy(ours)
    options = {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0 if nesterov else 0.5,
        "nesterov": nesterov,
    }
    x = torch.randn(5, 3, dtype=torch.float64)
    rule = ps.optim.Invariant(
        ours.parameters(),
        ps.trace(ours, x),
        torch.optim.SGD,
        metric=ps.metrics.Balanced(),
        **options,
    )
    for model, each in ((ours, rule), (theirs, torch.optim.SGD(theirs.parameters(), **options))):
        for step in range(4):
            each.zero_grad()
            model(x).square().mean().backward()
            if step < 2:
                model[2].bias.grad = None
            each.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_points_move_with_the_metric():
    """A point u of the old coordinates stands for the weight r u, whatever r becomes; moments stay."""
    case = BY_NAME["mlp"]
    model = case.model(torch.float64)
    metric = ps.metrics.Path(refresh_every=1)
    optimizer = ps.optim.Invariant(
        model.parameters(), trace(case, model), torch.optim.ASGD, lr=0.1, t0=1e9, metric=metric
    )
    weight, stood_for = model[0].weight, None
    for step in range(4):
        optimizer.zero_grad()
        case.loss(model(case.example(4, torch.float64, seed=step))).backward()
        start = weight.detach().clone()
        optimizer.step()
        factor, state = (
            optimizer.state[weight]["factor"],
            optimizer.rule.state[optimizer._shadows[weight]],
        )
        # ax <- ax + mu (u - ax) with mu = 1 up to t0: the mean is where the weight is, in the
        # coordinates of this step
        assert_close(factor * state["ax"], weight.detach(), rtol=1e-9, atol=1e-12)
        stood_for, old = start, factor
    moved = {"ax": torch.rand_like(old), "exp_avg": torch.rand_like(old)}
    optimizer.rule.state[optimizer._shadows[weight]].update(
        {k: v.clone() for k, v in moved.items()}
    )
    new = torch.rand_like(old) + 0.1
    move_points_(optimizer.rule, ("ax",), optimizer._shadows[weight], weight, old, new)
    state = optimizer.rule.state[optimizer._shadows[weight]]
    assert_close(new * state["ax"], old * moved["ax"])
    assert torch.equal(state["exp_avg"], moved["exp_avg"])
    assert stood_for is not None


@pytest.mark.parametrize("estimator", ["exact", "signs"])
def test_points_move_with_a_metric_of_data(estimator):
    """The mean of weights that stand still is where they are, whatever the batches do to the coordinates."""
    case = BY_NAME["mlp"]
    model, network = traced(case)
    metric = ps.metrics.DataDependent(estimator=estimator, refresh_every=1)
    still = ps.optim.Invariant(
        model.parameters(), network, torch.optim.ASGD, lr=0.0, t0=0, metric=metric
    )
    for step in range(4):
        still.zero_grad()
        case.loss(model(case.example(4, seed=step))).backward()
        still.step()
        for p in model.parameters():
            assert_close(
                still.rule.state[still._shadows[p]]["ax"] * still.state[p]["factor"], p.detach()
            )


def test_a_point_alone_may_be_named_without_a_tuple():
    case, means = BY_NAME["mlp"], []
    for points in ("ax", ("ax",)):
        model = case.model(torch.float64)
        optimizer = ps.optim.Invariant(
            model.parameters(), trace(case, model), torch.optim.ASGD, lr=0.1, t0=1, points=points
        )
        for step in range(4):
            optimizer.zero_grad()
            case.loss(model(case.example(4, torch.float64, seed=step))).backward()
            optimizer.step()
        means.append(optimizer.rule.state[optimizer._shadows[model[0].weight]]["ax"])
    assert torch.equal(*means)


def test_a_rule_that_nobody_knows_keeps_its_first_metric():
    class Mine(torch.optim.SGD):
        pass

    class Unknown(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])

    case = BY_NAME["mlp"]
    model = case.model()
    with pytest.warns(UserWarning, match=r"whether Unknown keeps points.*points=\(\)"):
        frozen = ps.optim.Invariant(model.parameters(), trace(case, model), Unknown, lr=1e-3)
    assert frozen.metric.frozen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = ps.optim.Invariant(
            model.parameters(), trace(case, model), Unknown, lr=1e-3, points=()
        )
        known = ps.optim.Invariant(model.parameters(), trace(case, model), Mine, lr=1e-3)
    assert not told.metric.frozen
    assert not known.metric.frozen


def test_one_metric_serves_two_rules_with_one_refresh(monkeypatch):
    from pathspace.metrics import path

    case, calls = BY_NAME["mlp"], []
    original = path.kappa_report
    monkeypatch.setattr(path, "kappa_report", lambda *a, **k: calls.append(1) or original(*a, **k))
    model = case.model()
    network, metric = trace(case, model), ps.metrics.Path(refresh_every=3)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    muon = ps.optim.Invariant(matrices, network, torch.optim.Muon, lr=0.01, metric=metric)
    adam = ps.optim.Invariant(vectors, network, torch.optim.AdamW, lr=0.01, metric=metric)
    for step in range(10):
        case.loss(model(case.example(4, seed=step))).backward()
        muon.step()
        adam.step()
    # at the first step each for itself; fresh until the third, then every third: 0, 1, 2, 3, 6, 9
    assert len(calls) == 2 + 5
    other = case.model()
    with pytest.raises(ValueError, match="belongs to another network"):
        ps.optim.Invariant(other.parameters(), trace(case, other), torch.optim.AdamW, metric=metric)
    # which works with 1 / D
    with pytest.raises(ValueError, match=r"belongs to another rule for '.*weight'"):
        ps.optim.PathSGD(matrices, network, lr=0.01, metric=metric)
    ps.optim.Invariant(matrices, network, torch.optim.Muon, lr=0.01, metric=metric)


@pytest.mark.parametrize("kind", [ps.metrics.Path, ps.metrics.DataDependent])
def test_the_slower_of_two_rules_with_one_metric_takes_no_old_one(kind, monkeypatch):
    case, computed = BY_NAME["mlp"], {}
    model = case.model()
    network, metric = trace(case, model), kind(refresh_every=1)
    original = metric._refresh
    monkeypatch.setattr(
        metric,
        "_refresh",
        lambda names: computed.update(dict.fromkeys(names, step)) or original(names),
    )
    fast, slow = (
        ps.optim.Invariant(layer.parameters(), network, torch.optim.SGD, lr=0.1, metric=metric)
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)][:2]
    )
    for step in range(12):
        case.loss(model(case.example(4, seed=step))).backward()
        fast.step()
        if step % 4 == 3:
            slow.step()
            assert set(computed.values()) == {step}


def test_what_the_slower_of_two_rules_knows_of_data_waits_for_its_step():
    """The faster one computes the metric of both, in memory that must not be that of the other's average."""
    case = BY_NAME["mlp"]
    model = case.model()
    network, metric = (
        trace(case, model),
        ps.metrics.DataDependent(estimator="signs", refresh_every=1),
    )
    fast, slow = (
        ps.optim.Invariant(layer.parameters(), network, torch.optim.SGD, lr=0.1, metric=metric)
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)][:2]
    )
    kept = []
    for step in range(12):
        fast.zero_grad()
        case.loss(model(case.example(4, seed=step))).backward()
        fast.step()
        if step < 3:
            slow.step()
            kept = [
                (state["data_average"], state["data_average"].clone())
                for state in slow.state.values()
            ]
    assert kept
    assert all(torch.equal(*pair) for pair in kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_two_rules_with_one_metric_go_on_bit_by_bit(steps, order):
    case = BY_NAME["mlp"]

    def made(model, states):
        network, metric = trace(case, model), ps.metrics.Path()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        rules = [
            ps.optim.Invariant(part, network, torch.optim.AdamW, lr=0.01, metric=metric)
            for part in (matrices, vectors)
        ]
        for rule, state in list(zip(rules, states, strict=False))[::order]:
            rule.load_state_dict(state)
        return rules

    def train(model, rules, first, last):
        for step in range(first, last):
            model.zero_grad()
            case.loss(model(case.example(4, seed=step))).backward()
            for rule in rules:
                rule.step()

    model = case.model()
    rules = made(model, [])
    train(model, rules, 0, steps)
    again = copy.deepcopy(model)
    others = made(again, copy.deepcopy([rule.state_dict() for rule in rules]))
    train(model, rules, steps, steps + 12)
    train(again, others, steps, steps + 12)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
def test_a_metric_that_serves_a_new_optimizer_begins_anew(rule):
    """After a rescaling, which its old gauge does not know."""
    case, outputs = BY_NAME["mlp"], []
    for rescaled in (False, True):
        model, network = traced(case)
        metric = ps.metrics.Path()
        for steps in (5, 12):
            optimizer = ps.optim.Invariant(
                model.parameters(), network, rule, lr=0.01, metric=metric
            )
            for step in range(steps):
                optimizer.zero_grad()
                case.loss(model(case.example(4, seed=step))).backward()
                optimizer.step()
            if rescaled:
                ps.rescaling.rescale_(network, power_of_two_factors(network.num_classes))
        outputs.append(model(case.example(4)))
    assert torch.equal(*outputs)


def test_points_follow_a_metric_that_another_rule_has_computed():
    """The mean of weights that stand still is where they are, whatever becomes of the coordinates."""
    case = BY_NAME["mlp"]
    model = case.model()
    network, metric = trace(case, model), ps.metrics.Path(refresh_every=1)
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() == 2) is two] for two in (True, False)
    )
    moving = ps.optim.Invariant(matrices, network, torch.optim.SGD, lr=0.1, metric=metric)
    still = ps.optim.Invariant(vectors, network, torch.optim.ASGD, lr=0.0, t0=0, metric=metric)
    for step in range(6):
        model.zero_grad()
        case.loss(model(case.example(4, seed=step))).backward()
        moving.step()
        if step % 2 == 0:
            still.step()
        for p in vectors:
            mean = still.rule.state[still._shadows[p]]["ax"] * still.state[p]["factor"]
            assert_close(mean, p.detach())


def test_schedule_free_rules_switch_in_coordinates():
    kind, options = OTHERS["AdamWScheduleFree"]
    case = BY_NAME["rnn"]
    runs = []
    for factors in (None, power_of_two_factors(case.classes)):
        model, network = traced(case)
        if factors is not None:
            ps.rescaling.rescale_(network, factors.float())
        optimizer = ps.optim.Invariant(model.parameters(), network, kind, **options)
        optimizer.train()
        outputs = []
        for step in range(6):
            optimizer.zero_grad()
            case.loss(call(model, case.example(4, seed=step))).backward()
            optimizer.step()
            here = case.picked(call(model, case.example(4, seed=9))).detach()
            optimizer.eval()
            there = case.picked(call(model, case.example(4, seed=9))).detach()
            optimizer.train()
            back = case.picked(call(model, case.example(4, seed=9))).detach()
            assert step == 0 or not torch.equal(here, there)
            assert_close(here, back, rtol=1e-5, atol=1e-6)
            outputs += [here, there]
        runs.append(torch.stack(outputs))
    assert torch.equal(*runs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", OTHERS)
def test_rules_of_others_resume_exactly(rule):
    kind, options = OTHERS[rule]
    case = BY_NAME["mlp"]

    def fresh(model):
        return ps.optim.Invariant(
            model.parameters(),
            trace(case, model),
            kind,
            metric=ps.metrics.Path(refresh_every=2),
            **options,
        )

    def steps(model, optimizer, numbers):
        optimizer.train()
        for step in numbers:
            optimizer.zero_grad()
            case.loss(model(case.example(4, seed=step))).backward()
            optimizer.step()

    whole, part = case.model(), case.model()
    steps(whole, fresh(whole), range(9))
    first = fresh(part)
    steps(part, first, range(4))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = copy.deepcopy(part)
    second = fresh(again)
    second.load_state_dict(torch.load(file, weights_only=True))
    steps(again, second, range(4, 9))
    assert_close(list(again.parameters()), list(whole.parameters()), rtol=0, atol=0)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (torch.optim.LBFGS, {"lr": 0.3, "max_iter": 3}),
        (
            lambda groups, **options: po.SAM(groups, torch.optim.SGD, momentum=0.9, **options),
            {"lr": 0.02},
        ),
        *OTHERS.values(),
    ],
    ids=["LBFGS", "SAM", *OTHERS],
)
def test_a_copy_has_all_that_a_rule_of_others_keeps(rule, options):
    model, network = copy.deepcopy(traced(BY_NAME["mlp"], torch.float32))
    optimizer = ps.optim.Invariant(model.parameters(), network, rule, points=(), **options)
    optimizer.train()

    def train(model, optimizer, steps):
        for step in steps:
            x = BY_NAME["mlp"].example(4, torch.float32, seed=step)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    start = train(model, optimizer, range(3))
    ours, theirs = (
        train(*both, range(3, 6))
        for both in (copy.deepcopy((model, optimizer)), (model, optimizer))
    )
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(ours[0], start[0])


def test_wrong_calls_say_what_to_do():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    parameters = list(model.parameters())
    with pytest.raises(
        TypeError, match=r"metric must be an object such as pathspace.metrics.Path\(\)"
    ):
        ps.optim.Invariant(parameters, network, torch.optim.AdamW, metric="path")
    with pytest.raises(TypeError, match="power: give options of the metric to the metric itself"):
        ps.optim.PathAdam(parameters, network, metric=ps.metrics.Path(), power=0.5)
    with pytest.raises(ValueError, match="'clip_norm' is an option of Invariant as a whole"):
        ps.optim.Invariant([{"params": parameters, "clip_norm": 1.0}], network, torch.optim.AdamW)
    with pytest.raises(RuntimeError, match="give it to an optimizer"):
        ps.metrics.DataDependent().observe(torch.zeros(1, 3))
    with pytest.raises(
        TypeError, match=r"Lookahead copies parameters \('slow_params'\) when it is made"
    ):
        ps.optim.Invariant(
            parameters, network, lambda groups: po.Lookahead(torch.optim.SGD(groups)), points=()
        )
    optimizer = ps.optim.Invariant(parameters, network, torch.optim.AdamW)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [parameters[0]]})


def by_hand(model, network, rule, **options):
    """Outputs of a few steps on one batch."""
    optimizer, outputs = ps.optim.Invariant(model.parameters(), network, rule, **options), []
    x = torch.randn(
        16, model[0].in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def closure():
        optimizer.zero_grad()
        outputs.append(model(x))
        loss = (outputs[-1] - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        closure()
        optimizer.step(closure)
    return torch.stack(outputs).detach()


@pytest.mark.parametrize("several", [False, True])
def test_rules_may_put_other_memory_under_a_parameter(several):
    class Climbing(torch.optim.SGD):
        """A step to where the loss is higher, and back; written as many are."""

        def __init__(self, params, lr, assigns):
            super().__init__(params, lr)
            self.assigns = assigns

        @torch.no_grad()
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            start = [p.data.clone() for p in params]
            for p in params:
                p.data = p.data + 0.1 * p.grad if self.assigns else p.data.add_(p.grad, alpha=0.1)
            if closure is not None:
                closure()
            for p, before in zip(params, start, strict=True):
                if self.assigns:
                    p.data = before
                else:
                    p.data.copy_(before)
            return super().step()

    # the name says how often a rule evaluates the loss
    rule, ends = type("SAM" if several else "Climbing", (Climbing,), {}), []
    for assigns in (False, True):
        torch.manual_seed(0)
        model = mlp(4, 6, 2).double()
        network = ps.trace(model, torch.zeros(1, 4, dtype=torch.float64))
        ends.append(by_hand(model, network, rule, lr=0.1, assigns=assigns, points=()))
    assert_close(ends[1], ends[0], rtol=1e-12, atol=0)
    assert not torch.allclose(ends[0][0], ends[0][-1])


@pytest.mark.parametrize(
    ("rule", "point"), [(schedulefree.SGDScheduleFree, "z"), (torch.optim.ASGD, "ax")]
)
def test_points_are_where_weights_without_a_metric_stood(rule, point):
    """Undamped kappa in front of a readout that begins at zero is 0, so that the first step leaves u = 0."""
    torch.manual_seed(0)
    model = mlp(4, 6, 2).double()
    torch.nn.init.zeros_(model[2].weight)
    network = ps.trace(model, torch.zeros(1, 4, dtype=torch.float64))
    metric = ps.metrics.Path(damping=0.0, refresh_every=1)
    optimizer = ps.optim.Invariant(model.parameters(), network, rule, lr=1e-6, metric=metric)
    optimizer.train()
    start = model[0].weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.randn(8, 4, dtype=torch.float64)) - 1).square().mean().backward()
        optimizer.step()
        shadow, factor = (
            optimizer._shadows[model[0].weight],
            optimizer.state[model[0].weight]["factor"],
        )
        assert bool((factor == 0).all()) is (step == 0)
        if step:
            stands_for = optimizer.rule.state[shadow][point].view_as(factor) * factor
            assert_close(stands_for, start, rtol=1e-4, atol=1e-4)
    assert_close(model[0].weight.detach(), start, rtol=1e-4, atol=1e-4)


def test_points_stay_where_they_are_through_a_step_that_was_refused():
    ends = []
    for refused in (False, True):
        torch.manual_seed(0)
        model = mlp(4, 6, 2).double()
        network = ps.trace(model, torch.zeros(1, 4, dtype=torch.float64))
        metric = ps.metrics.Path(refresh_every=3)
        rule = schedulefree.SGDScheduleFree
        optimizer = ps.optim.Invariant(model.parameters(), network, rule, lr=0.1, metric=metric)
        optimizer.train()
        for step in range(12):
            if refused and step == 6:
                good = model[0].weight.detach().clone()
                with torch.no_grad():
                    model[0].weight[0, 0] = float("inf")
                with pytest.raises(FloatingPointError):
                    optimizer.step()
                with torch.no_grad():
                    model[0].weight.copy_(good)
            optimizer.zero_grad()
            x = torch.randn(
                8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
            )
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        ends.append(model[0].weight.detach().clone())
        optimizer.eval()
        assert not torch.equal(model[0].weight, ends[-1])
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore:it is not known whether Pulled")
def test_the_metric_that_is_kept_for_good_is_kept_where_a_parameter_joins():
    class Pulled(torch.optim.Optimizer):
        """Back to where it began."""

        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    begun = self.state[p].setdefault("begun", p.clone())
                    p.sub_(group["lr"] * (p.grad + 0.1 * (p - begun)))

    torch.manual_seed(0)
    model = mlp(4, 6, 2).double()
    network = ps.trace(model, torch.zeros(1, 4, dtype=torch.float64))
    optimizer = ps.optim.Invariant(model.parameters(), network, Pulled, lr=0.1)
    model[2].bias.requires_grad_(False)
    factors = []
    for step in range(6):
        if step == 3:
            model[2].bias.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        factors.append(optimizer.state[model[0].weight]["factor"].clone())
    assert all(torch.equal(factor, factors[0]) for factor in factors)


def test_what_a_rule_keeps_of_all_parameters_together_is_saved_and_loaded():
    class Counting(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.state["taken"], self.state["more"] = 0, {"k": torch.zeros(1)}

        def step(self, closure=None):
            self.state["taken"] += 1
            return super().step(closure)

    torch.manual_seed(0)
    model = mlp(4, 6, 2).double()
    network = ps.trace(model, torch.zeros(1, 4, dtype=torch.float64))
    optimizer = ps.optim.Invariant(model.parameters(), network, Counting, lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    other = ps.optim.Invariant(model.parameters(), network, Counting, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.rule.state["taken"] == 3
    assert other.rule.state["more"] == {"k": torch.zeros(1)}
    _, copied = copy.deepcopy((model, other))
    assert copied.rule.state["taken"] == 3


@pytest.mark.parametrize(("option", "value"), [("power", 0.0), ("refresh_every", 3)])
def test_options_of_the_metric_are_no_options_of_groups(option, value):
    model, network = traced(BY_NAME["mlp"])
    groups = [{"params": list(model.parameters()), option: value}]
    with pytest.raises(ValueError, match=f"'{option}' is an option of Invariant as a whole"):
        ps.optim.Invariant(groups, network, torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize(
    ("rule", "option"),
    [(torch.optim.Adafactor, {"eps": (1e-8, 1e-2)}), (po.Adan, {"betas": (0.9, 0.8, 0.9)})],
)
def test_a_group_takes_what_its_rule_takes(rule, option):
    """Two numbers as eps and three betas are refused by rules that have one and two."""
    ends = []
    for in_group in (True, False):
        torch.manual_seed(0)
        model = mlp(3, 4, 2)
        network, group = ps.trace(model, torch.zeros(1, 3)), {"params": list(model.parameters())}
        optimizer = ps.optim.Invariant(
            [{**group, **option} if in_group else group],
            network,
            rule,
            points=(),
            **({} if in_group else option),
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert_close(*ends, rtol=0, atol=0)


def test_options_of_the_metric_are_sent_to_the_metric():
    case = BY_NAME["mlp"]
    model, network = traced(case)
    with pytest.raises(
        TypeError, match=r"write metric=pathspace.metrics.Path\(damping=0.1, power=0.5\)"
    ):
        ps.optim.Invariant(
            model.parameters(), network, torch.optim.AdamW, lr=0.01, power=0.5, damping=0.1
        )


def test_a_rule_is_the_class_of_an_optimizer():
    model, network = traced(BY_NAME["mlp"])
    made = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(TypeError, match="not an object of the type SGD"):
        ps.optim.Invariant(model.parameters(), network, made)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.Adafactor, {"lr": 0.01}),  # sees the coordinates
        (torch.optim.ASGD, {"lr": 0.01}),  # keeps a point
    ],
    ids=lambda rule: getattr(rule, "__name__", None),
)
def test_parameters_step_one_after_the_other_as_they_do_together(rule, options, monkeypatch):
    from pathspace.optim.base import coordinates

    case = BY_NAME["mlp"]

    def make(params, network):
        params = list(params)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
        return ps.optim.Invariant(groups, network, rule, clip_norm=0.1, **options)

    together = run(case, make)
    monkeypatch.setattr(coordinates, "_TOGETHER", 1)
    apart = run(case, make)
    assert alike(apart, together)
    parts = {entry.chunk for entry in apart[2]._kept_views.values()}
    assert len(parts) == len(apart[1])
    assert len({part.u.data_ptr() for part in parts}) == 1
    assert [p for group in apart[2].param_groups for p in group["params"]] == list(
        apart[2]._shadows
    )


def test_a_rule_that_may_look_at_all_parameters_gets_them_at_once(monkeypatch):
    from pathspace.optim.base import coordinates

    monkeypatch.setattr(coordinates, "_TOGETHER", 1)
    seen = []

    class Counting(torch.optim.AdamW):
        def step(self, closure=None):
            seen.append(
                sum(p.grad is not None for group in self.param_groups for p in group["params"])
            )
            return super().step(closure)

    case = BY_NAME["mlp"]
    run(
        case,
        lambda params, network: ps.optim.Invariant(params, network, Counting, points=(), lr=0.01),
    )
    assert set(seen) == {len(list(case.model().parameters()))}
