"""Every optimizer of the library through one suite; and controls that must fail it."""

import copy
import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import (
    BY_NAME,
    INVARIANCE,
    OPTIMIZERS,
    PRODUCTS,
    ZOO,
    call,
    mlp,
    of_each_kind,
    slow_besides,
    trace,
    traced,
)
from conformance import (
    REGISTRY,
    Entry,
    arbitrary_factors,
    difference,
    power_of_two_factors,
    resumed,
    start,
    steps_cosine,
)

CONTROLS = [
    Entry("SGD", lambda params, _, lr=0.05: torch.optim.SGD(params, lr=lr), invariant=False),
    Entry("Adam", lambda params, _, lr=0.01: torch.optim.Adam(params, lr=lr), invariant=False),
]
INVARIANT = [entry for entry in REGISTRY if entry.invariant]
DEPENDENT = [entry for entry in REGISTRY if not entry.invariant]
THOROUGH = [entry for entry in INVARIANT if entry.thorough]
IN_PATH_SPACE = ("GSGD", "GAdam")  # which refuse products of activations
SMALL = [BY_NAME[name] for name in ("mlp", "rnn", "tied characters")]

# Of every class, the rule as it is and one with most of its options at once: what an option adds is
# in the latter too, where it meets others, so that the former is slow. One rule of each class is
# enough for what no option has a part in.
FULL = [entry for entry in REGISTRY if entry.name.endswith("everything")]
MANY = [
    entry for entry in REGISTRY if entry.is_plain or entry in FULL or entry.name == "PathSGD stale"
]
SHOWN = [entry.name for entry in REGISTRY if entry in MANY or entry.thorough]
ONE_OF_EACH = list({e.kind: e for e in reversed(MANY)}.values())

MOST = pytest.mark.parametrize("entry", slow_besides(FULL, MANY), ids=str)
EACH = pytest.mark.parametrize("entry", ONE_OF_EACH, ids=str)


def of_its_kind(entry, **_):
    """What cases are drawn of by default: one of every class at least."""
    return entry.kind


SHARING = ("siamese", "same layer twice", "tied autoencoder", "tied characters")
LARGER = [case for case in [*INVARIANCE, *PRODUCTS] if case not in SMALL]


def brief(entry):
    """The same rule with a refresh every three steps, in a run that sees two of them: the schedule knows no network."""
    refreshed = entry.kind not in IN_PATH_SPACE
    make = functools.partial(entry.make, refresh_every=3) if refreshed else entry.make
    return replace(entry, make=make, steps=min(entry.steps, 10))


def larger_networks_for(entries):
    """Pairs with networks that are not small: all of them for one rule of each kind of metric, two or three for others.

    Options act on the gradient and the metric of one parameter, whatever network these come from,
    so that each network meets some of these rules in turn. QuasiDiagonal has a metric of its own
    and no other rule that shows it.
    """
    turns = 0
    for entry in entries:
        everywhere = entry.name in (
            "PathSGD",
            "PathAdam",
            "GSGD",
            "DDPSGD",
            "QuasiDiagonal everything",
        )
        if not everywhere and entry not in (*THOROUGH, *FULL):
            continue
        possible = [c for c in LARGER if c not in PRODUCTS or entry.kind not in IN_PATH_SPACE]
        number = len(possible) if everywhere else 2 + (entry in THOROUGH)
        for place in range(number):
            yield brief(entry), possible[(turns + place) % len(possible)]
        turns += 0 if everywhere else number


def small_networks_for(entries):
    """Pairs with the small networks: all of them for one rule as it is and one with many options, others in turn.

    The usual schedule of refreshes, which takes longer to see, is shown on the recurrent one.
    """
    for number, entry in enumerate(entries):
        for place, case in enumerate(SMALL):
            if entry in MANY or place == number % len(SMALL):
                yield (entry if case == SMALL[1] else brief(entry)), case


def one_small_network_for(entries):
    """Every rule with one of the small networks, in turn."""
    return [
        (entry if case == SMALL[1] else brief(entry), case)
        for number, entry in enumerate(entries)
        for case in [SMALL[number % len(SMALL)]]
    ]


def one_larger_network_for(entries):
    """One rule of each kind of metric with all of the networks that are not small, and each other one with the next."""
    kinds = ("PathSGD", "GSGD", "DDPSGD", "QuasiDiagonal everything")
    pairs = [(str(entry), entry, case) for entry, case in larger_networks_for(entries)]
    met = {name: (entry, case) for name, entry, case in pairs if name not in kinds}
    return [*((entry, case) for name, entry, case in pairs if name in kinds), *met.values()]


def test_every_class_and_every_variant_takes_part():
    names = set(OPTIMIZERS)
    assert {entry.kind for entry in REGISTRY} == {entry.kind for entry in ONE_OF_EACH} == names
    assert {entry.kind for entry in FULL} == names


# --- invariance -----------------------------------------------------------------------------------


@pytest.mark.sample(2, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "case"),
    slow_besides(
        [*one_small_network_for(INVARIANT), *one_larger_network_for(INVARIANT)],
        [*small_networks_for(INVARIANT), *larger_networks_for(INVARIANT)],
    ),
    ids=str,
)
def test_is_bitwise_invariant_under_powers_of_two(entry, case):
    apart = difference(entry, case, torch.float32, power_of_two_factors(case.classes))
    assert apart.finite
    assert apart.none


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PathSGD momentum", "PathAdam", "PathMuon", "GSGD", "DDPSGD"])
def test_stays_bitwise_invariant_in_long_runs(name):
    entry, case = next(e for e in REGISTRY if e.name == name), BY_NAME["rnn"]
    apart = difference(entry, case, torch.float32, power_of_two_factors(case.classes), steps=300)
    assert apart.finite
    assert apart.none


@pytest.mark.sample(2, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "case"),
    slow_besides(
        [pair for pair in one_small_network_for(INVARIANT) if pair[0].name in SHOWN],
        [
            *one_small_network_for(INVARIANT),
            *small_networks_for(THOROUGH),
            *(pair for n, pair in enumerate(larger_networks_for(THOROUGH)) if n % 3 == 0),
        ],
    ),
    ids=str,
)
def test_is_invariant_to_rounding_under_any_factors(entry, case):
    apart = difference(entry, case, torch.float64, arbitrary_factors(case.classes))
    assert apart.finite
    assert apart.outputs <= entry.rounding
    assert apart.weights <= entry.rounding


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case", of_each_kind(case for case in ZOO if case.classes and case not in INVARIANCE), ids=str
)
def test_default_is_bitwise_invariant_on_the_rest_of_the_zoo(case):
    apart = difference(brief(REGISTRY[0]), case, torch.float32, power_of_two_factors(case.classes))
    assert apart.finite
    assert apart.none


@pytest.mark.sample(2, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "name"),
    slow_besides(
        [
            *((e, ("batch norm", "batch norm of vectors")[n % 2]) for n, e in enumerate(THOROUGH)),
            *((e, "small resnet") for e in THOROUGH if e.name in ("PathSGD", "DDPSGD")),
        ],
        [(e, "small resnet") for e in THOROUGH if e.name in ("PathAdam", "GSGD")],
    ),
    ids=str,
)
def test_is_bitwise_invariant_while_normalising_by_the_batch(entry, name):
    """Training mode: the statistics are the batch's, and the running ones, read by kappa, move."""
    case = BY_NAME[name]
    factors = power_of_two_factors(case.classes)
    apart = difference(brief(entry), case, torch.float32, factors, training=True)
    assert apart.finite
    assert apart.none


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_is_bitwise_invariant_in_half_precision(case, dtype):
    factors = power_of_two_factors(case.classes).clamp(0.25, 4)
    apart = difference(REGISTRY[0], case, dtype, factors, steps=10)
    assert apart.finite
    assert apart.none


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("control", "case", "dtype"),
    slow_besides(
        [
            ([*CONTROLS, *DEPENDENT][n % 4], case, (torch.float32, torch.float64)[n // 4 % 2])
            for n, case in enumerate(INVARIANCE)
        ],
        [
            (control, case, (torch.float32, torch.float64)[(n + m) % 2])
            for n, control in enumerate([*CONTROLS, *DEPENDENT])
            for m, case in enumerate(INVARIANCE)
        ],
    ),
    ids=str,
)
def test_suite_tells_methods_that_depend_on_the_scales(control, case, dtype):
    # factors of at most 2, so that nothing overflows and the difference is one of kind
    factors = 2.0 ** torch.randint(-1, 2, (case.classes,)).double()
    factors[0] = 2.0
    apart = difference(control, case, dtype, factors, steps=8)
    assert not apart.none
    assert apart.outputs > 1e-4


# --- its step -------------------------------------------------------------------------------------


@pytest.mark.sample(9, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "case"),
    slow_besides(
        one_small_network_for(REGISTRY),
        [*small_networks_for(REGISTRY), *larger_networks_for(REGISTRY)],
    ),
    ids=str,
)
def test_step_differs_from_that_of_plain_sgd(entry, case):
    assert steps_cosine(entry, case) < 0.999


def test_suite_tells_plain_sgd_and_idleness():
    assert steps_cosine(CONTROLS[0], BY_NAME["mlp"]) == pytest.approx(1.0)
    idle = Entry("idle", lambda params, _: torch.optim.SGD(params, lr=0.0))
    assert steps_cosine(idle, BY_NAME["mlp"]) == pytest.approx(1.0)


@pytest.mark.sample(3, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "case"),
    slow_besides(
        [(e, SMALL[n % len(SMALL)]) for n, e in enumerate(REGISTRY) if e in MANY],
        [(e, SMALL[n % len(SMALL)]) for n, e in enumerate(REGISTRY)],
    ),
    ids=str,
)
def test_descends(entry, case):
    run = start(entry, case, torch.float64)
    example = run.example()

    def loss():
        return case.loss(call(run.model, example)).item()

    before = loss()
    run.advance(10)
    assert loss() < before


@MOST
def test_leaves_gradients_and_random_state_alone(entry):
    run = start(entry, BY_NAME["stacked bidirectional rnn"])
    run.advance(2)
    run.gradients()
    gradients = {name: p.grad for name, p in run.model.named_parameters()}
    values = copy.deepcopy(gradients)
    buffers = copy.deepcopy(dict(run.model.named_buffers()))
    random = torch.get_rng_state()
    run.optimizer.step()
    assert torch.equal(torch.get_rng_state(), random)
    for name, p in run.model.named_parameters():
        assert p.grad is gradients[name]
        assert torch.equal(p.grad, values[name])
        assert p.is_leaf
        assert p.requires_grad
    assert_close(dict(run.model.named_buffers()), buffers, rtol=0, atol=0)


@MOST
def test_works_in_place(entry):
    run = start(entry, BY_NAME["mlp"])
    parameters = [(p, p.data_ptr()) for p in run.model.parameters()]
    run.advance(2)
    assert [(p, p.data_ptr()) for p in run.model.parameters()] == parameters


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("entry", "name"),
    slow_besides(
        [(e, ("mlp", "rnn")[n % 2]) for n, e in enumerate(FULL)],
        itertools.product(MANY, ("mlp", "rnn")),
    ),
    ids=str,
)
def test_parameters_without_gradient_are_untouched(entry, name):
    run = start(entry, BY_NAME[name])
    run.advance(2)
    run.optimizer.zero_grad(set_to_none=True)
    before = run.weights()
    run.optimizer.step()
    assert_close(run.weights(), before, rtol=0, atol=0)
    run.gradients()
    first, *others = run.model.parameters()
    first.grad = None
    run.optimizer.step()
    assert first.grad is None
    after = run.weights()
    unchanged = [name for name in before if torch.equal(after[name], before[name])]
    assert unchanged == [next(iter(before))]
    assert others


@MOST
def test_frozen_parameters_are_untouched(entry):
    case = BY_NAME["mlp"]
    model = case.model()
    model[0].weight.requires_grad_(False)
    network = trace(case, model)
    frozen = model[0].weight.clone()
    optimizer = entry.make([p for p in model.parameters() if p.requires_grad], network)
    for _ in range(3):
        optimizer.zero_grad()
        case.loss(model(case.example(4))).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert all(torch.isfinite(p).all() for p in model.parameters())


# --- the interface of torch.optim -----------------------------------------------------------------


@pytest.mark.sample(5)
@MOST
def test_closures_return_the_loss_and_do_the_same(entry):
    case = BY_NAME["rnn"]
    by_hand, closed = start(entry, case), start(entry, case)
    for _ in range(4):
        loss = by_hand.gradients()
        by_hand.optimizer.step()
        with torch.no_grad():
            returned = closed.optimizer.step(lambda: closed.gradients())
        assert returned.item() == loss.item()
    assert_close(by_hand.weights(), closed.weights(), rtol=0, atol=0)


@pytest.mark.sample(4)
@MOST
def test_maximizing_the_negative_is_minimizing(entry):
    case = BY_NAME["rnn"]
    down = start(entry, case).advance(4)
    up = start(entry, case, maximize=True).advance(4, sign=-1.0)
    assert_close(down.weights(), up.weights(), rtol=0, atol=0)
    wrong = start(entry, case, maximize=True).advance(4)
    assert not torch.equal(wrong.weights()["rnn.weight_hh_l0"], down.weights()["rnn.weight_hh_l0"])


@MOST
def test_schedulers_change_the_rate(entry):
    case = BY_NAME["mlp"]
    scheduled, by_hand, constant = (start(entry, case) for _ in range(3))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled.optimizer, 0.5)
    for _ in range(3):
        scheduled.advance()
        scheduler.step()
        by_hand.advance()
        for group in by_hand.optimizer.param_groups:
            group["lr"] *= 0.5
    constant.advance(3)
    assert_close(scheduled.weights(), by_hand.weights(), rtol=0, atol=0)
    assert not torch.equal(scheduled.weights()["0.weight"], constant.weights()["0.weight"])


@EACH
def test_one_cycle_schedules_run(entry):
    run = start(entry, BY_NAME["mlp"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        run.optimizer, max_lr=0.05, total_steps=10, cycle_momentum=False
    )
    for _ in range(9):
        run.advance()
        scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] < 1e-4


@MOST
def test_groups_have_rates_of_their_own(entry):
    case = BY_NAME["mlp"]
    model, network = traced(case)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    groups.append({"params": model[4].parameters(), "lr": 0.001})
    optimizer = entry.make(groups, network)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        case.loss(model(case.example(4))).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[0].bias, before["0.bias"])
    for name in ("2.weight", "2.bias", "4.weight", "4.bias"):
        assert not torch.equal(model.get_parameter(name), before[name])


@MOST
def test_groups_do_not_change_the_step(entry):
    if not entry.separable:
        pytest.skip("this rule looks at each group by itself")
    case = BY_NAME["rnn"]
    together = start(entry, case).advance(5)
    apart = start(entry, case)
    apart.model, apart.network = traced(case)
    groups = [{"params": [p]} for p in apart.model.parameters()]
    apart.optimizer = entry.make(groups, apart.network)
    apart.advance(5)
    assert_close(apart.weights(), together.weights(), rtol=1e-6, atol=1e-7)


@MOST
def test_groups_may_be_added(entry):
    case = BY_NAME["mlp"]
    model, network = traced(case)
    optimizer = entry.make(model[0].parameters(), network)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # SOAP's first step of a matrix only measures its basis
        optimizer.zero_grad()
        case.loss(model(case.example(4))).backward()
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"0.weight", "0.bias", "2.weight", "2.bias"}


@EACH
def test_named_parameters_are_accepted(entry):
    case = BY_NAME["mlp"]
    plain = start(entry, case).advance(3)
    named = start(entry, case)
    named.optimizer = entry.make(named.model.named_parameters(), named.network)
    named.advance(3)
    assert_close(named.weights(), plain.weights(), rtol=0, atol=0)


# --- outside the network --------------------------------------------------------------------------


@pytest.mark.sample(11, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "added_later"),
    slow_besides(
        [
            *((e, False) for e in REGISTRY if e in MANY or e.kind == "Invariant"),
            *((e, True) for e in FULL),
        ],
        [(e, later) for e in REGISTRY for later in (False, True) if not later or e in MANY],
    ),
    ids=str,
)
def test_parameters_outside_follow_the_plain_rule(entry, added_later):
    """A temperature that multiplies the loss is no part of the network, and is not skipped."""
    case = BY_NAME["mlp"]
    ours, theirs = nn.Parameter(torch.tensor([1.5, 0.5])), nn.Parameter(torch.tensor([1.5, 0.5]))
    run = start(entry, case)
    parameters = list(run.model.parameters())
    if added_later:
        run.optimizer = entry.make(parameters, run.network)
        run.optimizer.add_param_group({"params": [ours]})
    else:
        run.optimizer = entry.make([*parameters, ours], run.network)
    before = ours.detach().clone()
    rule = None if entry.plain_rule is None else entry.plain_rule([theirs])
    for step in range(3):
        run.gradients()
        ours.grad = torch.tensor([0.3, -0.2 * (step + 1)])
        run.optimizer.step()
        if rule is not None:
            theirs.grad = ours.grad.clone()
            rule.step()
    assert not torch.equal(ours, before)
    assert torch.isfinite(ours).all()
    if rule is not None:
        assert_close(ours, theirs)


LIKE_SGD = ("PathSGD", "DDPSGD", "QuasiDiagonal", "GSGD")


@pytest.mark.parametrize("kind", [*LIKE_SGD, "PathAdam", "PathGradientAdam", "GAdam"])
def test_what_is_outside_is_clipped_with_all_others(kind):
    """The norm is that of all, so a long gradient outside scales those inside down as much as itself."""
    moved, bound = [], 2.0
    for clip_norm in (bound, None):
        torch.manual_seed(0)
        model, x = mlp(3, 4, 2).double(), torch.randn(5, 3, dtype=torch.float64)
        beside = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        options = {} if kind in LIKE_SGD else {"eps": 1.0}
        optimizer = getattr(ps.optim, kind)(
            [*model.parameters(), beside],
            ps.trace(model, x),
            lr=0.01,
            clip_norm=clip_norm,
            **options,
        )
        before = model[0].weight.detach().clone()
        (1e-4 * model(x).square().mean()).backward()
        beside.grad = torch.tensor([300.0, -400.0], dtype=torch.float64)
        optimizer.step()
        moved.append((beside.detach(), model[0].weight.detach() - before))
    (outside, inside), (_, free) = moved
    clipped = beside.grad * bound / 500
    expected = clipped if kind in LIKE_SGD else clipped / (clipped.abs() + 1)
    assert_close(outside, -0.01 * expected, rtol=1e-6, atol=0)
    assert_close(inside, free * bound / 500, rtol=1e-3, atol=1e-14)
    assert free.abs().max() > 1e-9


@functools.cache
def _normalized():
    """A model with a layer that is left outside, its network and an input: to be copied."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    x = torch.randn(5, 3)
    return model, ps.trace(model, x, outside=["3"]), x


@MOST
def test_gradients_may_be_reused(entry):
    """Zeroing gradients in place gives the same run: nothing that is kept shares memory with them."""

    def weights(set_to_none):
        model, network, x = copy.deepcopy(_normalized())
        optimizer = entry.make(model.parameters(), network)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_close(weights(True), weights(False), rtol=0, atol=0)


@MOST
def test_modules_left_outside_are_trained(entry):
    model, network, x = copy.deepcopy(_normalized())
    optimizer = entry.make(model.parameters(), network)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.sample(2, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "case", "through_file"),
    slow_besides(
        [
            # a file holds what a state does, and many options at once all that they add to it;
            # torch's rules have states of their own
            *((e, SMALL[0], True) for e in REGISTRY if e in MANY or e.kind == "Invariant"),
            *((e, SMALL[1 + n % 2], False) for n, e in enumerate(FULL)),
        ],
        [(e, case, False) for e in MANY for case in SMALL[1:]],
    ),
    ids=str,
)
def test_resumes_exactly(entry, case, through_file):
    whole = start(entry, case).advance(7)
    part = start(entry, case).advance(4)
    rest = resumed(part, entry, through_file=through_file).advance(3)
    assert_close(rest.weights(), whole.weights(), rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(whole.outputs[4:], rest.outputs, strict=True))


@pytest.mark.sample(2, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "dtype"),
    slow_besides(
        [(e, (torch.bfloat16, torch.float16)[n % 2]) for n, e in enumerate(FULL)],
        itertools.product(MANY, (torch.bfloat16, torch.float16)),
    ),
    ids=str,
)
def test_resumes_exactly_in_half_precision(entry, dtype):
    """What is kept in float32 for half-precision parameters must come back in float32."""
    case = BY_NAME["mlp"]
    whole = start(entry, case, dtype).advance(7)
    part = start(entry, case, dtype).advance(4)
    rest = resumed(part, entry, through_file=True).advance(3)
    assert_close(rest.weights(), whole.weights(), rtol=0, atol=0)
    ours, theirs = rest.optimizer.state_dict(), whole.optimizer.state_dict()
    assert_close(ours["state"], theirs["state"], rtol=0, atol=0)
    assert ours["param_groups"] == theirs["param_groups"]


@EACH
def test_resumes_with_the_saved_rate(entry):
    run = start(entry, BY_NAME["mlp"]).advance(2)
    run.optimizer.param_groups[0]["lr"] = 0.0123
    assert resumed(run, entry, through_file=True).optimizer.param_groups[0]["lr"] == 0.0123


@pytest.mark.sample(6, each=of_its_kind)
@pytest.mark.parametrize(
    "entry",
    slow_besides([e for e in REGISTRY if e in FULL or e.kind == "Invariant"], MANY),
    ids=str,
)
def test_resumes_before_the_first_step(entry):
    """Adagrad has a state by then."""
    case = BY_NAME["mlp"]
    fresh = resumed(start(entry, case), entry, through_file=True).advance(3)
    assert_close(fresh.weights(), start(entry, case).advance(3).weights(), rtol=0, atol=0)


@pytest.mark.sample(5)
@EACH
def test_resumes_exactly_after_a_step_without_a_gradient(entry):
    """A frozen parameter, or one that a batch does not use; when its metric is due, too."""
    entry = brief(entry)

    def with_a_gap():
        run = start(entry, BY_NAME["mlp"]).advance(3)
        run.gradients()
        next(run.model.parameters()).grad = None
        run.optimizer.step()
        return run

    whole, rest = with_a_gap(), resumed(with_a_gap(), entry, through_file=True)
    assert_close(rest.advance(4).weights(), whole.advance(4).weights(), rtol=0, atol=0)


# --- awkward parameters ---------------------------------------------------------------------------


@functools.cache
def _perceptron():
    torch.manual_seed(0)
    model = mlp(3, 5, 4, 2)
    return model, ps.trace(model, torch.zeros(1, 3))


@pytest.mark.sample(9, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "side"),
    slow_besides(
        [
            *((e, "both") for e in MANY),
            *((e, ("nothing enters", "nothing leaves")[n % 2]) for n, e in enumerate(MANY)),
        ],
        [(e, "both") for e in REGISTRY],
    ),
    ids=str,
)
def test_dead_units_do_no_harm(entry, side):
    """kappa = 0 and a gradient of 0: the step is 0, and every other weight moves on."""
    model, network = copy.deepcopy(_perceptron())
    with torch.no_grad():
        if side != "nothing leaves":
            model[0].weight[1] = 0
            model[0].bias[1] = 0
        if side != "nothing enters":
            model[2].weight[:, 1] = 0
    x = torch.randn(6, 3)
    optimizer = entry.make(model.parameters(), network)
    start_weight = model[0].weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model[0].weight[0], start_weight[0])


@pytest.mark.sample(10, each=of_its_kind)
@pytest.mark.parametrize("entry", slow_besides(MANY, REGISTRY), ids=str)
def test_a_start_of_zeros_does_no_harm(entry):
    model, network = copy.deepcopy(_perceptron())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x = torch.randn(6, 3)
    optimizer = entry.make(model.parameters(), network)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model[4].bias.abs().min() > 0


@functools.cache
def _contiguous(transposed):
    torch.manual_seed(0)
    model = mlp(3, 4, 2).double()
    for layer in (model[0], model[2]) if transposed else ():
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model, ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))


@MOST
def test_parameters_need_not_be_contiguous(entry):
    x = torch.randn(5, 3, dtype=torch.float64)
    (plain, _), (transposed, _) = pairs = [copy.deepcopy(_contiguous(on)) for on in (False, True)]
    assert not any(transposed[layer].weight.is_contiguous() for layer in (0, 2))
    for model, network in pairs:
        optimizer = entry.make(model.parameters(), network)
        for _ in range(4):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), transposed.parameters(), strict=True):
        assert_close(p, q, rtol=1e-10, atol=entry.rounding, check_stride=False)
    assert transposed[0].weight.stride() == (1, 4)


@pytest.mark.sample(6, each=of_its_kind)
@pytest.mark.parametrize(
    ("entry", "name"),
    slow_besides(
        [
            *((e, SHARING[n % 4]) for n, e in enumerate(ONE_OF_EACH)),
            *(
                (e, name)
                for e in ONE_OF_EACH
                if e.name in ("PathSGD", "GSGD", "DDPSGD")
                for name in SHARING
            ),
        ],
        itertools.product(ONE_OF_EACH, SHARING),
    ),
    ids=str,
)
def test_shared_parameters_are_stepped_once(entry, name):
    """Whatever the ways to a shared parameter, it is one, and its step is one."""
    case = BY_NAME[name]
    once = start(entry, case, torch.float64).advance(3)
    listed_by_name = start(entry, case, torch.float64)
    unique = {id(p): p for _, p in listed_by_name.model.named_parameters(remove_duplicate=False)}
    listed_by_name.optimizer = entry.make(list(unique.values()), listed_by_name.network)
    listed_by_name.advance(3)
    assert_close(once.weights(), listed_by_name.weights(), rtol=0, atol=0)


@EACH
def test_sparse_gradients_are_refused(entry):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.embedding(x).relu())

    model = Sparse()
    x = torch.tensor([[1], [4]])
    optimizer = entry.make(model.parameters(), ps.trace(model, x))
    model(x).square().sum().backward()
    before = model.out.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"(?i)sparse"):
        optimizer.step()
    assert torch.equal(model.out.weight, before)


@EACH
@pytest.mark.parametrize("bad", [{"lr": -0.1}])
def test_impossible_rates_are_refused(entry, bad):
    run = start(entry, BY_NAME["mlp"])
    with pytest.raises(ValueError, match=r"lr|learning rate"):
        entry.make(run.model.parameters(), run.network, **bad)
