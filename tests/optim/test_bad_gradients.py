"""A batch whose gradients are not finite moves nothing, in every optimizer, and says so."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, mlp, slow_besides, trace
from conformance import REGISTRY, start

FULL = [entry for entry in REGISTRY if entry.is_plain or entry.name.endswith("everything")]
EVERY = pytest.mark.parametrize(
    "entry",
    slow_besides([e for e in REGISTRY if e in FULL or e.kind == "Invariant"], REGISTRY),
    ids=str,
)
REFUSED = "not finite.*are not changed"


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def bad_step(run, bad, where):
    """A step along gradients of which one element is bad."""
    run.gradients()
    run.steps += 1
    list(run.model.parameters())[where].grad.view(-1)[-1] = bad
    run.optimizer.step()


@pytest.mark.sample(11, each=lambda entry, **_: entry.kind)
@EVERY
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(("bad", "where"), [(torch.nan, 0), (torch.inf, -1), (-torch.inf, 1)])
def test_weights_and_state_stay(entry, steps, bad, where):
    run = start(entry, BY_NAME["mlp"]).advance(steps)
    weights, state = run.weights(), state_of(run.optimizer)
    with pytest.raises(FloatingPointError, match=REFUSED):
        bad_step(run, bad, where)
    assert_close(run.weights(), weights, rtol=0, atol=0)
    after = state_of(run.optimizer)
    assert after["param_groups"] == state["param_groups"]
    assert_close(after["state"], state["state"], rtol=0, atol=0)


@pytest.mark.sample(7, each=lambda entry, **_: entry.kind)
@EVERY
def test_training_goes_on_as_if_the_batch_had_not_been(entry):
    """From the first step on, after a refresh of the metric, and in between."""
    ends = []
    for bad_ones in ((), (0, 3, 5)):
        run = start(entry, BY_NAME["mlp"])
        for step in range(7):
            if step in bad_ones:
                with pytest.raises(FloatingPointError, match=REFUSED):
                    bad_step(run, torch.nan, 0)
                run.steps -= 1
            run.advance()
        ends.append(run.weights())
    assert_close(*ends, rtol=0, atol=0)


@EVERY
def test_a_batch_of_no_numbers_under_a_closure(entry):
    run = start(entry, BY_NAME["mlp"]).advance(2)
    weights = run.weights()

    def closure():
        run.optimizer.zero_grad()
        loss = run.case.loss(call(run.model, run.example() * torch.nan))
        loss.backward()
        return loss

    with pytest.raises(FloatingPointError, match=REFUSED):
        run.optimizer.step(closure)
    assert_close(run.weights(), weights, rtol=0, atol=0)
    run.advance()
    assert all(w.isfinite().all() for w in run.weights().values())


@EVERY
def test_parameters_outside_the_network_are_looked_at_too(entry):
    case = BY_NAME["mlp"]
    model = case.model()
    head = nn.Linear(3, 2)
    optimizer = entry.make([*model.parameters(), *head.parameters()], trace(case, model))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    on_data = (ps.optim.DDPSGD, ps.optim.DDPAdam, ps.optim.QuasiDiagonal)
    if isinstance(optimizer, on_data) or "measure" in str(entry):
        call(model, case.example(4, torch.float32))
    optimizer.step()
    before = copy.deepcopy([*model.parameters(), *head.parameters()])
    head.bias.grad[1] = torch.nan
    with pytest.raises(FloatingPointError, match=REFUSED):
        optimizer.step()
    assert_close([*model.parameters(), *head.parameters()], before, rtol=0, atol=0)


def test_the_gradient_is_named():
    model = mlp(3, 4, 2)
    optimizer = ps.optim.PathAdam(model.parameters(), ps.trace(model, torch.zeros(1, 3)))
    model(torch.ones(2, 3)).sum().backward()
    model[2].bias.grad[0] = torch.inf
    with pytest.raises(
        FloatingPointError, match=r"gradient of '2\.bias' is not finite.*lower the learning rate"
    ):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_beyond_the_type_are_no_reason(dtype):
    """Finite gradients whose sum is not finite."""
    model = mlp(3, 4, 2).to(dtype)
    optimizer = ps.optim.PathAdam(
        model.parameters(), ps.trace(model, torch.zeros(1, 3, dtype=dtype))
    )
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.2 * torch.finfo(dtype).max)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("line_search", "good"), [(None, 0), (None, 1), (None, 3), ("strong_wolfe", 0)]
)
def test_closures_that_are_called_several_times(line_search, good):
    """LBFGS: weights stay, and what it knows of the curvature."""
    torch.manual_seed(0)
    model = mlp(3, 4, 2)
    x = torch.randn(8, 3)
    optimizer = ps.optim.Invariant(
        model.parameters(),
        ps.trace(model, x),
        torch.optim.LBFGS,
        lr=0.1,
        line_search_fn=line_search,
    )
    calls = 0
    failing = False

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        if failing and calls > good:
            loss = loss * torch.nan
        loss.backward()
        return loss

    optimizer.step(closure)
    weights, state = copy.deepcopy(list(model.parameters())), state_of(optimizer)
    failing, calls = True, 0
    with pytest.raises(FloatingPointError, match=REFUSED):
        optimizer.step(closure)
    assert_close(list(model.parameters()), weights, rtol=0, atol=0)
    rule = {key: kept for key, kept in state["state"][0].items() if not key.startswith("metric_")}
    now = {
        key: kept
        for key, kept in state_of(optimizer)["state"][0].items()
        if not key.startswith("metric_")
    }
    assert_close(now, rule, rtol=0, atol=0)
    failing = False
    assert optimizer.step(closure).isfinite()


class LastStep(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.rnn = nn.RNN(2, 16, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(16, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(start * torch.eye(16))
            self.rnn.weight_ih_l0.mul_(0.01)
            self.rnn.bias_hh_l0.zero_()
            self.rnn.bias_ih_l0.zero_()

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore:training is running away")
@pytest.mark.parametrize("start", [1.0, 1.03, 1.05])
def test_a_recurrence_that_leaves_the_type_over_many_steps_of_time(start):
    """The gradient of a long recurrence overflows before its outputs do, and the step used to spoil all weights."""
    torch.manual_seed(0)
    model, x, y = LastStep(start), torch.rand(8, 2000, 2), torch.randn(8, 1)
    network = ps.trace(model, x)
    ps.rescaling.random_rescale_(network, 2**-10, 2**10, powers_of_two=True)
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=1e-4)

    def train():
        for _ in range(6):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    with pytest.raises(FloatingPointError, match=REFUSED):
        train()
    assert all(p.isfinite().all() for p in model.parameters())


def wide(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(4, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96 * 16, 40), nn.ReLU(), nn.Linear(40, 2)),
    )
    x = torch.randn(8, 4, 4, 4)
    return model, x, ps.optim.PathAdam(model.parameters(), ps.trace(model, x), lr=1e-3)


def train_wide(model, x, optimizer):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.sample(3)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("where", ["input", "a pixel", "of a hidden layer"])
def test_of_large_gradients_rows_and_columns_show_a_bad_example(steps, where):
    model, x, optimizer = wide()
    for _ in range(steps):
        train_wide(model, x, optimizer)
    before = copy.deepcopy(list(model.parameters()))
    if where == "input":
        x[3] = torch.nan
    elif where == "a pixel":
        x[3, 1, 0, 0] = torch.inf
    else:
        model[4].register_full_backward_pre_hook(
            lambda _, g: (torch.where(g[0] == g[0].max(), torch.nan, g[0]),)
        )
    with pytest.raises(FloatingPointError, match=REFUSED):
        train_wide(model, x, optimizer)
    assert_close(list(model.parameters()), before, rtol=0, atol=0)


def test_one_element_of_a_large_gradient_is_refused_at_the_next_step_at_the_latest():
    model, x, optimizer = wide()
    train_wide(model, x, optimizer)
    model[2].weight.grad[5, 7, 1, 1] = torch.nan
    optimizer.step()
    with pytest.raises(FloatingPointError, match=REFUSED):
        train_wide(model, x, optimizer)
