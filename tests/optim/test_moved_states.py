"""What optimizers keep moves with the weights: the next steps are those that there would have been."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, mlp
from conformance import REGISTRY, power_of_two_factors, start

INVARIANT = [entry for entry in REGISTRY if entry.invariant]


def of_its_kind(entry, **_):
    return entry.kind


def goes_on(entry, case, before, after, move):
    """Whether a run that is moved after some steps has the outputs of one that is not, to the last bit."""
    plain, moved = start(entry, case).advance(before), start(entry, case).advance(before)
    move(moved)
    plain.advance(after)
    moved.advance(after)
    return torch.equal(torch.stack(plain.outputs), torch.stack(moved.outputs))


@pytest.mark.sample(5, each=of_its_kind)
@pytest.mark.parametrize("entry", INVARIANT, ids=str)
def test_next_steps_are_bitwise_the_same(entry):
    def move(run):
        factors = power_of_two_factors(run.network.num_classes)
        ps.rescaling.rescale_(run.network, factors, optimizer=run.optimizer)

    # between two refreshes of a metric, one of which follows
    assert goes_on(entry, BY_NAME["mlp"], 5, 8, move)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "entry",
    [e for e in INVARIANT if e.name in ("PathSGD everything", "PathAdam everything")],
    ids=str,
)
@pytest.mark.parametrize("name", ["rnn", "small resnet", "gated", "layer norm"])
def test_on_other_networks(entry, name):
    def move(run):
        ps.rescaling.balance_(run.network, powers_of_two=True, optimizer=run.optimizer)
        ps.rescaling.random_rescale_(run.network, powers_of_two=True, optimizer=[run.optimizer])

    assert goes_on(entry, BY_NAME[name], 4, 6, move)


def test_of_a_network_far_from_balance():
    entry = next(e for e in INVARIANT if e.name == "PathSGD everything")
    case = BY_NAME["mlp"]
    runs = [start(entry, case, factors=torch.full((9,), 2.0**20)).advance(4) for _ in range(2)]
    assert runs[0].optimizer.metric._far() is not None
    factors = power_of_two_factors(9) * 1.5
    ps.rescaling.rescale_(runs[1].network, factors, optimizer=runs[1].optimizer)
    for run in runs:
        run.advance(6)
    assert_close(torch.stack(runs[0].outputs), torch.stack(runs[1].outputs), rtol=1e-4, atol=1e-5)


def pair(make):
    """A trained network with its optimizer, and a copy of both."""
    torch.manual_seed(0)
    model, x = mlp(4, 8, 3), torch.randn(16, 4)
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer, x


RULES = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], 0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(
        m.parameters(), eps=1e-20, centered=True, momentum=0.5
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", RULES)
def test_moments_of_plain_rules_are_those_of_the_rescaled_network(rule):
    """A rule at rest collects gradients of one network, and of its rescaling: moved, the states are the same."""
    torch.manual_seed(0)
    model, x = mlp(4, 8, 3), torch.randn(16, 4)
    other = copy.deepcopy(model)
    networks = [ps.trace(m, x) for m in (model, other)]
    factors = power_of_two_factors(8)
    ps.rescaling.rescale_(networks[1], factors)
    optimizers = [RULES[rule](m) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for k in range(3):
            optimizer.zero_grad()
            m((k + 1.0) * x).square().mean().backward()
            optimizer.step()
    ps.rescaling.rescale_(networks[0], factors, optimizer=optimizers[0])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)
        ours, theirs = optimizers[0].state.get(p, {}), optimizers[1].state.get(q, {})
        for key in ours.keys() - {"acc_delta"}:
            assert_close(ours[key], theirs[key], rtol=1e-6, atol=0)


def test_a_step_of_sgd_with_no_memory_of_scales_is_undone():
    """There and back again, nothing of weights, moments and gradients has changed."""
    model, optimizer, x = pair(RULES["Adam"])
    network = ps.trace(model, x)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
    factors = power_of_two_factors(8)
    for one in (factors, 1 / factors):
        ps.rescaling.rescale_(network, one, optimizer=optimizer)
    for p, q in zip(model.parameters(), before[0], strict=True):
        assert torch.equal(p, q)
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][i][key]) for key, value in state.items())


def test_loaded_moments_of_a_plain_rule_move():
    model, plain, x = pair(RULES["AdamW"])
    outputs = []
    for moves in (False, True):
        m = copy.deepcopy(model)
        network = ps.trace(m, x)
        optimizer = ps.optim.Invariant(m.parameters(), network, torch.optim.AdamW, lr=0.01)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        if moves:
            ps.rescaling.rescale_(network, power_of_two_factors(8), optimizer=optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        outputs.append(m(x))
    assert torch.equal(*outputs)


def test_a_failed_balance_moves_nothing(monkeypatch):
    model, optimizer, x = pair(RULES["Adam"])
    network = ps.trace(model, x)
    before = copy.deepcopy(optimizer.state_dict())

    def fails(self, tolerance):
        raise ps.rescaling.FunctionChangedError("no")

    monkeypatch.setattr("pathspace.rescaling.balance._Probe.check", fails)
    with pytest.raises(ps.rescaling.FunctionChangedError):
        ps.rescaling.balance_(network, x, optimizer=optimizer)
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][i][key]) for key, value in state.items())


def two_of_one_metric():
    model = mlp(4, 8, 3)
    network = ps.trace(model, torch.zeros(1, 4))
    metric = ps.metrics.Path()
    return network, [
        ps.optim.PathSGD(layer.parameters(), network, lr=0.1, momentum=0.9, metric=metric)
        for layer in (model[0], model[2])
    ]


def test_optimizers_of_one_metric_move_together():
    outputs = []
    for moves in (False, True):
        torch.manual_seed(0)
        network, optimizers = two_of_one_metric()
        x = torch.randn(16, 4)
        for step in range(14):
            for turn, optimizer in enumerate(optimizers):
                network.model.zero_grad()
                network.model(x).square().mean().backward()
                optimizer.step()
                # while the metric holds what the second one is about to ask for
                if moves and (step, turn) in ((3, 0), (11, 0), (12, 1)):
                    factors = power_of_two_factors(8, seed=step)
                    ps.rescaling.rescale_(network, factors, optimizer=optimizers)
        outputs.append(network.model(x))
    assert torch.equal(*outputs)


def test_refuses_what_cannot_move():
    model, x = mlp(4, 8, 3), torch.randn(16, 4)
    network = ps.trace(model, x)
    lbfgs = torch.optim.LBFGS(model.parameters(), 0.01)

    def closure():
        lbfgs.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"LBFGS keeps .* not known how that follows a rescaling"):
        ps.rescaling.balance_(network, optimizer=lbfgs)
    with pytest.raises(ValueError, match="has no parameter of this network"):
        ps.rescaling.balance_(network, optimizer=torch.optim.SGD(mlp(4, 2).parameters()))
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer .* got Linear"):
        ps.rescaling.balance_(network, optimizer=nn.Linear(1, 1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    network, optimizers = two_of_one_metric()
    with pytest.raises(ValueError, match="serves another optimizer"):
        ps.rescaling.balance_(network, optimizer=optimizers[0])
    other = ps.optim.PathSGD(network.model.parameters(), network)
    with pytest.raises(ValueError, match="has no parameter of this network"):
        ps.rescaling.balance_(ps.trace(mlp(4, 8, 3), x), optimizer=other)


def test_another_trace_of_the_model_serves_too():
    torch.manual_seed(0)
    model, x = mlp(4, 8, 3), torch.randn(16, 4)
    optimizer = ps.optim.PathAdam(model.parameters(), ps.trace(model, x))
    model(x).square().mean().backward()
    optimizer.step()
    ps.rescaling.balance_(ps.trace(model, x), x, optimizer=optimizer)
    optimizer.step()
