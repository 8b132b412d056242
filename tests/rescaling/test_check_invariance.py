"""The report that anyone can run on their own model and optimizer."""

import copy
import dataclasses
import math
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, INVARIANCE


def path_sgd(model, network):
    return ps.optim.PathSGD(model.parameters(), network, lr=0.05)


def sgd(model, network):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model, network):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def check(case, make_optimizer, **options):
    return ps.rescaling.check_invariance(
        case.model(), case.example(4), case.loss, make_optimizer, **options
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", INVARIANCE, ids=str)
def test_passes_path_sgd(case):
    report = check(case, path_sgd, steps=12)
    assert report.passed
    assert report.outputs_equal
    assert report.weights_equal
    assert report.differs_from_sgd
    assert report.largest_output_difference == 0
    assert report.largest_weight_difference == 0
    assert report.steps == 12


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "make_optimizer"),
    [pytest.param(case, (sgd, adam)[n % 2], id=str(case)) for n, case in enumerate(INVARIANCE)],
)
def test_fails_methods_that_depend_on_the_scales(case, make_optimizer):
    report = check(case, make_optimizer, steps=10, low=0.5, high=2)
    assert not report.passed
    assert not report.outputs_equal
    assert report.largest_output_difference != 0
    assert report.differs_from_sgd is (make_optimizer is adam)


def test_steps_are_seen_under_autocast():
    """It keeps copies of weights in half precision, and knows nothing of changes in place."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = check(BY_NAME["mlp"], adam, steps=10, low=0.5, high=2)
    assert not report.outputs_equal
    assert report.largest_output_difference != 0


class Idle(torch.optim.SGD):
    """An update loop that never runs, as over a generator that was read once."""

    def step(self, closure=None):
        return closure


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.0), lambda p: Idle(p, lr=0.05)])
def test_fails_a_step_that_is_none(make):
    """It is invariant and useless: plain SGD at a rate of 0, or nothing at all."""
    report = check(BY_NAME["mlp"], lambda m, _: make(m.parameters()), steps=5)
    assert report.outputs_equal
    assert not report.moved
    assert not report.passed
    assert not report.within(1.0)


def test_gives_a_closure_to_an_optimizer_that_asks_for_one():
    report = check(BY_NAME["mlp"], lambda m, _: torch.optim.LBFGS(m.parameters(), lr=0.01), steps=2)
    assert report.moved
    assert not report.outputs_equal


def test_gives_a_closure_to_a_rule_that_asks_for_one():
    def make(model, network):
        return ps.optim.Invariant(model.parameters(), network, torch.optim.LBFGS, lr=0.1)

    assert check(BY_NAME["mlp"], make, steps=3).passed


def test_compares_the_outputs_that_are_picked():
    """A model may return what no one can look into, and states that change with the scale."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = BY_NAME["mlp"].model()

        def forward(self, x):
            h = self.inner[0](x)
            return SimpleNamespace(state=h, scores=self.inner[1:](h))

    def report(make_optimizer):
        return ps.rescaling.check_invariance(
            Wrapped(),
            BY_NAME["mlp"].example(4),
            lambda r: r.scores.square().mean(),
            make_optimizer,
            steps=3,
            output=lambda r: r.scores,
        )

    assert report(path_sgd).passed
    assert not report(adam).outputs_equal


def test_arbitrary_factors_are_compared_to_rounding():
    case = BY_NAME["mlp"]
    report = ps.rescaling.check_invariance(
        case.model(torch.float64),
        case.example(4, torch.float64),
        case.loss,
        path_sgd,
        steps=50,
        low=1e-3,
        high=1e3,
        powers_of_two=False,
    )
    assert report.largest_output_difference < 1e-12
    assert report.largest_weight_difference < 1e-12


class InPlace(torch.nn.Linear):
    """It writes into its input."""

    def forward(self, x):
        return super().forward(x.sub_(0.5))


class Ruled(torch.optim.SGD):
    rule = "descent"  # a word of its own, no optimizer inside


def test_an_optimizer_may_have_a_rule_that_is_none():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    report = ps.rescaling.check_invariance(
        model,
        torch.rand(5, 3),
        lambda y: y.square().mean(),
        lambda m, _: Ruled(m.parameters(), lr=0.1),
        steps=2,
    )
    assert not report.passed


def test_a_model_that_writes_into_its_input_sees_one_example():
    model = torch.nn.Sequential(InPlace(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.rand(5, 3)
    given = x.clone()
    report = ps.rescaling.check_invariance(
        model,
        x,
        lambda y: y.square().mean(),
        lambda m, network: ps.optim.PathSGD(m.parameters(), network, lr=0.1),
        steps=3,
    )
    assert report.passed
    ps.rescaling.balance_(ps.trace(model, x), x)
    assert torch.equal(x, given)


def test_leaves_the_model_and_the_random_state_alone():
    case = BY_NAME["rnn"]
    model = case.model()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ps.rescaling.check_invariance(model, case.example(4), case.loss, path_sgd, steps=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trains_whatever_mode_it_is_called_in(mode):
    case = BY_NAME["mlp"]
    model, example = case.model(), case.example(4)
    with mode():
        report = ps.rescaling.check_invariance(model, example, case.loss, path_sgd, steps=5)
        assert not torch.is_grad_enabled()
    assert report.passed


def test_follows_its_seed():
    def differences(seed):
        report = check(BY_NAME["mlp"], sgd, steps=3, low=0.5, high=2, seed=seed)
        return report.largest_output_difference, report.largest_weight_difference

    assert differences(1) == differences(1)
    assert differences(1) != differences(2)


def test_a_parameter_without_elements_is_equal_to_itself():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
            )
            self.none = torch.nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.layers(x)

    report = ps.rescaling.check_invariance(
        Model(),
        torch.randn(3, 3),
        lambda y: y.square().mean(),
        lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.1),
    )
    assert report.passed


def test_a_report_is_printed_as_a_verdict():
    report = check(BY_NAME["mlp"], path_sgd, steps=1)
    assert str(report) == "passed: bitwise the same in 1 step"
    report = check(BY_NAME["mlp"], sgd, steps=2)
    assert str(report) == (
        f"not passed in 2 steps: outputs differ by {report.largest_output_difference:.2g} (relative), weights differ "
        f"by {report.largest_weight_difference:.2g} (relative), the steps are those of plain SGD"
    )


@pytest.mark.parametrize(
    "fault", ["outputs_equal", "weights_equal", "differs_from_sgd", "finite", "moved"]
)
def test_a_verdict_names_each_fault(fault):
    """As many as `passed` counts."""
    sound = check(BY_NAME["mlp"], path_sgd, steps=1)
    faulty = dataclasses.replace(sound, **{fault: False})
    assert not faulty.passed
    assert str(faulty).startswith("not passed in 1 step: ")


def test_report_is_frozen():
    report = check(BY_NAME["mlp"], path_sgd, steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.passed = False


def test_weights_that_overflow_in_the_last_step_are_not_finite():
    """No output shows them any more."""

    class Bursting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    group["params"][0].fill_(float("inf"))

    model, x = (
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)),
        torch.randn(5, 3),
    )
    report = ps.rescaling.check_invariance(
        model,
        x,
        lambda out: out.square().mean(),
        lambda m, _: Bursting(m.parameters(), lr=0.01),
        steps=1,
    )
    assert not report.finite
    assert not report.passed
    assert report.largest_weight_difference == math.inf  # inf - inf is no small difference


def test_the_last_step_shows_in_the_weights_alone():
    """Outputs are those before a step, so one step of a method that sees the scales leaves them equal."""
    report = check(BY_NAME["mlp"], adam, steps=1, low=0.5, high=2)
    assert report.outputs_equal
    assert report.largest_output_difference == 0
    assert not report.weights_equal
    assert not report.passed
    apart = report.largest_weight_difference
    assert apart > 0
    assert report.within(apart)
    assert not report.within(0.99 * apart)


class Noisy(torch.nn.Sequential):
    """It leaves out hidden units, and keeps the masks."""

    masks: ClassVar[list[torch.Tensor]] = []

    def forward(self, x):
        h = self[0](x).relu()
        self.masks.append(torch.rand_like(h) < 0.5)
        return self[1](h * self.masks[-1])


def test_random_numbers_are_those_of_the_copies_and_others_at_every_step():
    model = Noisy(torch.nn.Linear(3, 40), torch.nn.Linear(40, 2))
    Noisy.masks.clear()
    report = ps.rescaling.check_invariance(
        model, torch.randn(1, 3), lambda y: y.square().mean(), sgd, steps=3, low=0.5, high=2, seed=7
    )
    assert not report.differs_from_sgd  # which draws the same
    steps = Noisy.masks[-9:]  # two copies in turn, then plain SGD
    for i in range(3):
        assert torch.equal(steps[2 * i], steps[2 * i + 1])
        assert torch.equal(steps[2 * i], steps[6 + i])
        assert not torch.equal(steps[2 * i], steps[2 * (i + 1) % 6])


class Detour(torch.optim.SGD):
    """Goes elsewhere at its first step, where the scales show, and comes back at its second."""

    def __init__(self, parameters, there):
        super().__init__(parameters, lr=0.05)
        self.there, self.start = there, None

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        parameters = self.param_groups[0]["params"]
        if self.start is None:
            self.start = [p.clone() for p in parameters]
            parameters[0].add_(self.there)
        else:
            for p, start in zip(parameters, self.start, strict=True):
                p.copy_(start)


def test_what_happened_on_the_way_counts():
    """Both copies end where they began."""
    case = BY_NAME["mlp"]
    report = check(case, lambda m, _: Detour(m.parameters(), 0.1), steps=3, low=0.5, high=2)
    assert report.weights_equal
    assert not report.outputs_equal
    assert report.largest_output_difference > 0
    assert report.finite
    assert not check(
        case, lambda m, _: Detour(m.parameters(), math.inf), steps=3, low=0.5, high=2
    ).finite


@pytest.mark.parametrize(
    "steps", [(math.inf, 0.0), (0.0, math.inf)], ids=["the first", "the second"]
)
def test_either_copy_may_cease_to_be_finite(steps):
    of_copies = iter(steps)
    report = check(
        BY_NAME["mlp"],
        lambda m, _: Detour(m.parameters(), next(of_copies)),
        steps=1,
        low=0.5,
        high=2,
    )
    assert not report.finite
    assert report.largest_weight_difference == math.inf


class Policy(torch.nn.Module):
    """Scores of actions, those that are not allowed filled in."""

    def __init__(self, fill):
        super().__init__()
        self.scores = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )
        self.fill = fill

    def forward(self, x, allowed):
        return self.scores(x).masked_fill(~allowed, self.fill)


ALLOWED = torch.tensor([[True, False, True], [True, True, True]])


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_masked_outputs_are_neither_a_difference_nor_a_divergence(fill):
    def check_policy(make):
        return ps.rescaling.check_invariance(
            Policy(fill),
            (torch.randn(2, 4), ALLOWED),
            lambda scores: torch.nn.functional.cross_entropy(scores, torch.tensor([0, 2])),
            make,
            steps=3,
        )

    assert check_policy(lambda m, n: ps.optim.PathAdam(m.parameters(), n, lr=0.01)).passed
    report = check_policy(lambda m, _: torch.optim.Adam(m.parameters(), lr=0.01))
    # beside the scores, not beside what was filled in
    assert report.largest_output_difference > 1e-3


def test_a_loss_that_is_not_finite_is_told():
    mlp = BY_NAME["mlp"]
    case = SimpleNamespace(
        model=mlp.model, example=mlp.example, loss=lambda out: 0 * out.sum() + math.inf
    )
    assert not check(case, path_sgd, steps=1).finite


class Signs(torch.optim.Optimizer):
    """A rule whose step has another name than lr, and one that has none."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.01 * p.grad.sign()


@pytest.mark.parametrize("options", [{"eta": 0.01}, {"lr": None}])
def test_an_optimizer_may_have_no_learning_rate(options):
    alone = check(BY_NAME["mlp"], lambda m, _: Signs(m.parameters(), **options), steps=2)
    assert not alone.outputs_equal
    assert alone.differs_from_sgd
    wrapped = check(
        BY_NAME["mlp"],
        lambda m, n: ps.optim.Invariant(m.parameters(), n, Signs, points=(), **options),
        steps=2,
    )
    assert wrapped.passed
