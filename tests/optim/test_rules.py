"""The plain rules that torch does not have, or not as one (SOAP, Muon with AdamW), and torch's own in fewer passes."""

import copy
import runpy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from pathspace.network.errors import expect_finite
from pathspace.optim.rules import adafactor, nadam, rmsprop
from pathspace.optim.rules.adafactor import Adafactor
from pathspace.optim.rules.moments import adam_direction
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.nadam import NAdam
from pathspace.optim.rules.rmsprop import RMSprop
from pathspace.optim.rules.soap import SOAP


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    return model, torch.randn(16, 5, dtype=torch.float64)


def trained(model, inputs, make, sign=1.0):
    model = copy.deepcopy(model)
    optimizer = make(model)
    for _ in range(12):
        optimizer.zero_grad()
        (sign * model(inputs).square().mean()).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("plain", "invariant"), [(SOAP, ps.optim.PathSOAP), (MuonAdamW, ps.optim.PathMuon)]
)
def test_the_plain_rule_is_the_invariant_one_where_the_metric_is_one(plain, invariant):
    model, inputs = network()

    def outside(model):
        # a network beside the model: all parameters of the model take the rule with D = 1
        other = nn.Linear(2, 2).double()
        traced = ps.trace(other, torch.zeros(1, 2, dtype=torch.float64))
        return invariant(
            [*model.parameters(), *other.parameters()], traced, lr=0.01, weight_decay=0.1
        )

    same = {"precondition_frequency": 40} if plain is SOAP else {}
    one = trained(model, inputs, lambda m: plain(m.parameters(), 0.01, weight_decay=0.1, **same))
    other = trained(model, inputs, outside)
    for p, q, start in zip(one, other, model.parameters(), strict=True):
        assert_close(p, q, rtol=0, atol=1e-12)
        assert not torch.allclose(p, start)


def test_muon_is_torchs_on_matrices_and_adamw_on_vectors():
    model, inputs = network()
    ours = trained(
        model, inputs, lambda m: MuonAdamW(m.parameters(), 0.01, weight_decay=0.1, momentum=0.9)
    )

    def theirs(m, *, fused):
        matrices, vectors = (
            [p for p in m.parameters() if (p.dim() == 2) is kind] for kind in (True, False)
        )
        muon = torch.optim.Muon(
            matrices, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.1, fused=fused)

        class Both:
            def zero_grad(self):
                m.zero_grad()

            def step(self):
                muon.step()
                adam.step()

        return Both()

    in_one_call = trained(model, inputs, lambda m: theirs(m, fused=True))
    one_by_one = trained(model, inputs, lambda m: theirs(m, fused=False))
    assert_close(ours, in_one_call, rtol=0, atol=0)
    assert_close(ours, one_by_one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [SOAP, MuonAdamW])
def test_maximizing_the_negative_is_minimizing(rule):
    model, inputs = network()
    down = trained(model, inputs, lambda m: rule(m.parameters(), 0.01))
    up = trained(model, inputs, lambda m: rule(m.parameters(), 0.01, maximize=True), sign=-1.0)
    assert_close(down, up, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [SOAP, MuonAdamW])
def test_rules_resume_exactly(rule):
    model, inputs = network()
    other, optimizer = copy.deepcopy(model), None
    whole = rule(model.parameters(), 0.01)
    for step in range(8):
        if step == 4:
            other.load_state_dict(model.state_dict())
            optimizer = rule(other.parameters(), 0.01)
            optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
        for m, o in ((model, whole), (other, optimizer)):
            if o is not None:
                o.zero_grad()
                m(inputs).square().mean().backward()
                o.step()
    assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=0)


def assert_trains_as(rule, torchs, **options):
    """Train copies of a network by both rules; both move all parameters, and by the same."""
    model, inputs = network()
    one, other = (
        trained(model, inputs, lambda m, kind=kind: kind(m.parameters(), 0.01, **options))
        for kind in (rule, torchs)
    )
    for p, q, start in zip(one, other, model.parameters(), strict=True):
        assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(p, start)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.0},
        {"alpha": 1.0, "eps": 1.0},
        {"momentum": 0.9},
        {"centered": True},
        {"weight_decay": 0.1},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.sample(6)
def test_rmsprop_is_torchs(options, maximize):
    assert_trains_as(RMSprop, torch.optim.RMSprop, maximize=maximize, **options)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.5, "d": 1.5, "beta2_decay": -0.3},
        {"eps": (1e-2, 0.5)},
        {"weight_decay": 0.1},
        {"foreach": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.sample(6)
def test_adafactor_is_torchs(options, maximize):
    """Of vectors, matrices and filters."""
    torch.manual_seed(0)
    starts = [torch.randn(shape, dtype=torch.float64) for shape in ((5,), (4, 6), (3, 4, 2, 2))]
    gradients = [[torch.randn_like(start) for start in starts] for _ in range(8)]
    ends = []
    for kind in (Adafactor, torch.optim.Adafactor):
        params = [nn.Parameter(start.clone()) for start in starts]
        rule = kind(params, maximize=maximize, **options)
        for step, drawn in enumerate(gradients):
            for p, g in zip(params, drawn, strict=True):
                p.grad = g.clone()
            if step == 3:
                params[1].grad = None
            rule.step()
        ends.append(params)
    assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)
    assert not any(map(torch.allclose, ends[0], starts))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.0, 0.9)},
        {"momentum_decay": 0.1, "eps": 1e-3},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.sample(6)
def test_nadam_is_torchs(options, maximize):
    assert_trains_as(NAdam, torch.optim.NAdam, maximize=maximize, **options)


def test_nadam_counts_the_steps_of_each_parameter():
    """Some have no gradient in every third step, and one of them joins late."""
    torch.manual_seed(0)
    starts = [torch.randn(4, dtype=torch.float64) for _ in range(3)]
    ends = []
    for kind in (NAdam, torch.optim.NAdam):
        params = [nn.Parameter(start.clone()) for start in starts]
        rule = kind(params[:2], 0.1)
        for step in range(9):
            if step == 4:
                rule.add_param_group({"params": params[2:], "lr": 0.2})
            for p in params:
                p.grad = p.detach() + step
            if step % 3 == 0:
                params[1].grad = None
            rule.step()
        assert [int(rule.state[p]["step"]) for p in params] == [9, 6, 5]
        ends.append(params)
    assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


FEWER_PASSES = [
    (RMSprop, torch.optim.RMSprop, rmsprop),
    (NAdam, torch.optim.NAdam, nadam),
    (Adafactor, torch.optim.Adafactor, adafactor),
]


@pytest.mark.parametrize(("ours", "theirs"), [pair[:2] for pair in FEWER_PASSES])
def test_rules_in_fewer_passes_go_on_from_torchs_state(ours, theirs):
    model, inputs = network()
    kinds, weights = [theirs, ours], []
    for first in kinds:
        for second in kinds:
            m = copy.deepcopy(model)
            before, after = first(m.parameters(), 0.01), second(m.parameters(), 0.01)
            for step in range(8):
                optimizer = before if step < 4 else after
                if step == 4:
                    after.load_state_dict(before.state_dict())
                optimizer.zero_grad()
                m(inputs).square().mean().backward()
                optimizer.step()
            assert {float(state["step"]) for state in after.state.values()} == {8}
            weights.append(list(m.parameters()))
    for other in weights[1:]:
        assert_close(other, weights[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs", "module"), FEWER_PASSES)
def test_rules_in_fewer_passes_are_torchs_where_imported_with_another_default_device(
    ours, theirs, module
):
    model, inputs = network()
    with torch.device("meta"):
        imported = runpy.run_path(module.__file__)
    one, other = (
        trained(model, inputs, lambda m, kind=kind: kind(m.parameters(), 0.01))
        for kind in (imported[ours.__name__], theirs)
    )
    assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_direction_is_the_same_however_gradients_lie_in_memory(amsgrad):
    torch.manual_seed(0)
    flat: dict[str, Any] = {}
    turned: dict[str, Any] = {}
    for _ in range(5):
        g = torch.randn(4, 6, dtype=torch.float64)
        one = adam_direction(g, flat, (0.8, 0.9), 1e-3, amsgrad)
        other = adam_direction(g.t().contiguous().t(), turned, (0.8, 0.9), 1e-3, amsgrad)
        assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert not turned["exp_avg"].is_contiguous()
    assert flat["step"] == turned["step"] == 5


def test_finite_weights_may_have_a_sum_that_is_not():
    large = torch.full((4,), 3e38)
    expect_finite([large, torch.ones(2), torch.empty(0)])
    with pytest.raises(FloatingPointError, match="weights are not finite"):
        expect_finite([large, torch.tensor([torch.inf, -torch.inf])])
    expect_finite([])
