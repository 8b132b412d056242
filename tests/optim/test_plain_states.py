"""States of plain rules and of ours: taken over with their moments in the right coordinates, or refused by name."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing import assert_close

import pathspace as ps
from cases import mlp, slow_besides

F64 = torch.float64
X = torch.randn(32, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(32, 3, dtype=F64, generator=torch.Generator().manual_seed(1))

# rule, options -> the power of a weight's unit in which each entry is counted: a gradient has -1
KNOWN = {
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, {"momentum_buffer": -1}),
    "Adam": (
        torch.optim.Adam,
        {"amsgrad": True},
        {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2},
    ),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}, {"exp_avg": -1, "exp_avg_sq": -2}),
    "NAdam": (torch.optim.NAdam, {}, {"exp_avg": -1, "exp_avg_sq": -2}),
    "RAdam": (torch.optim.RAdam, {}, {"exp_avg": -1, "exp_avg_sq": -2}),
    "Adamax": (torch.optim.Adamax, {}, {"exp_avg": -1, "exp_inf": -1}),
    "Adagrad": (torch.optim.Adagrad, {}, {"sum": -2}),
    "Adadelta": (torch.optim.Adadelta, {}, {"square_avg": -2, "acc_delta": 2}),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.9, "centered": True},
        {"square_avg": -2, "grad_avg": -1, "momentum_buffer": 0},
    ),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-4}, {"prev": -1, "step_size": 1}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-5, "t0": 0}, {"ax": 1}),
}
EVERY = pytest.mark.parametrize("name", KNOWN)


def uneven(seed=0):
    """A network whose unit classes stand at very different scales."""
    torch.manual_seed(seed)
    model = mlp(4, 8, 6, 3).to(F64)
    ps.rescaling.random_rescale_(ps.trace(model, X), 2**-6, 2**6, powers_of_two=True)
    return model


def train(model, optimizer, steps):
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(X)
        (output - Y).square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def trained(name, steps=5):
    rule, options, _ = KNOWN[name]
    model = uneven()
    plain = rule(model.parameters(), **options)
    train(model, plain, steps)
    return model, plain


def around(name, model, metric=None, **more):
    rule, options, _ = KNOWN[name]
    network = ps.trace(model, X)
    return ps.optim.Invariant(model.parameters(), network, rule, metric=metric, **options, **more)


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- from the plain rule --------------------------------------------------------------------------


@pytest.mark.sample(3)
@EVERY
def test_moments_are_those_of_gradients_in_coordinates(name):
    """By hand, with r = 1 / sqrt(D) of an optimizer that began at these weights."""
    model, plain = trained(name)
    fresh = around(name, copy.deepcopy(model))
    train(fresh.network.model, fresh, 1)
    optimizer = around(name, model)
    optimizer.load_state_dict(through_file(plain.state_dict()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seen = {}
    optimizer.rule.register_step_pre_hook(
        lambda rule, *_: seen.update({s: copy.deepcopy(kept) for s, kept in rule.state.items()})
    )
    optimizer.step()
    units = KNOWN[name][2]
    for p, q in zip(model.parameters(), fresh.network.model.parameters(), strict=True):
        r = fresh.state[q]["factor"]
        for key, power in units.items():
            expected = plain.state[p][key] * r ** (-power)
            assert_close(seen[optimizer._shadows[p]][key], expected, rtol=1e-12, atol=0)
        assert_close(optimizer.state[p]["factor"], r)
        if "step" in plain.state[p]:
            assert float(seen[optimizer._shadows[p]]["step"]) == 5


@EVERY
@pytest.mark.sample(6)
def test_goes_on_as_the_plain_rule_where_there_is_nothing_to_rescale(name):
    """Without hidden units r is 1 with the metric of the balanced network."""
    rule, options, _ = KNOWN[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).to(F64)
    plain = rule(model.parameters(), **options)
    train(model, plain, 6)
    other = copy.deepcopy(model)
    optimizer = ps.optim.Invariant(
        other.parameters(), ps.trace(other, X), rule, metric=ps.metrics.Balanced(), **options
    )
    optimizer.load_state_dict(plain.state_dict())
    assert_close(train(other, optimizer, 8), train(model, plain, 8), rtol=1e-12, atol=1e-14)


@pytest.mark.sample(3)
@EVERY
def test_goes_on_as_the_plain_rule_on_the_balanced_network(name):
    """With moments that are mapped there by hand."""
    model, plain = trained(name)
    balanced = copy.deepcopy(model)
    network = ps.trace(balanced, X)
    ps.rescaling.balance_(network)
    rule, options, units = KNOWN[name]
    theirs = rule(balanced.parameters(), **options)
    state = copy.deepcopy(plain.state_dict())
    for index, (p, q) in enumerate(zip(model.parameters(), balanced.parameters(), strict=True)):
        for key, power in units.items():
            state["state"][index][key] *= (q.detach() / p.detach()) ** power
    theirs.load_state_dict(state)
    optimizer = around(name, model, ps.metrics.Balanced())
    optimizer.load_state_dict(plain.state_dict())
    # eps stands beside moments in coordinates
    assert_close(train(model, optimizer, 8), train(balanced, theirs, 8), rtol=1e-6, atol=1e-6)


@pytest.mark.sample(2)
@EVERY
def test_is_invariant_after_the_switch(name):
    """Two networks that differ by powers of two, each with the state that the plain rule would have there."""
    outputs = []
    for exponent in (0, 3):
        model, plain = trained(name)
        before = [p.detach().clone() for p in model.parameters()]
        network = ps.trace(model, X)
        factors = 2.0 ** (exponent * torch.arange(network.num_classes) % 7 - 3 * bool(exponent))
        ps.rescaling.rescale_(network, factors.to(F64))
        state = copy.deepcopy(plain.state_dict())
        for index, (p, w) in enumerate(zip(model.parameters(), before, strict=True)):
            for key, power in KNOWN[name][2].items():
                state["state"][index][key] *= (p.detach() / w) ** power
        optimizer = around(name, model)
        optimizer.load_state_dict(state)
        outputs.append(train(model, optimizer, 14))
    assert all(map(torch.equal, *outputs))


@EVERY
@pytest.mark.sample(6)
def test_there_and_back_again(name):
    model, plain = trained(name)
    optimizer = around(name, model)
    optimizer.load_state_dict(plain.state_dict())
    # not taken over yet
    assert_close(optimizer.plain_state_dict()["state"], plain.state_dict()["state"])
    train(model, optimizer, 1)
    back = copy.deepcopy(optimizer.plain_state_dict())
    again = around(name, copy.deepcopy(model))
    again.load_state_dict(back)
    theirs = KNOWN[name][0](model.parameters(), **KNOWN[name][1])
    theirs.load_state_dict(through_file(back))
    for p in model.parameters():
        r, ours = optimizer.state[p]["factor"], optimizer.rule.state[optimizer._shadows[p]]
        for key, power in KNOWN[name][2].items():
            assert_close(theirs.state[p][key], ours[key] * r**power, rtol=1e-12, atol=0)
    train(model, theirs, 2)


def test_named_optimizers_take_the_state_of_their_plain_rule():
    for kind, rule in (("PathAdam", torch.optim.AdamW), ("PathRMSprop", torch.optim.RMSprop)):
        model = uneven()
        plain = rule(model.parameters(), lr=1e-3, weight_decay=0.0)
        train(model, plain, 3)
        optimizer = getattr(ps.optim, kind)(model.parameters(), ps.trace(model, X), lr=1e-3)
        optimizer.load_state_dict(plain.state_dict())
        train(model, optimizer, 3)
        assert all(float(kept["step"]) == 6 for kept in optimizer.rule.state.values())


def test_a_state_that_was_loaded_may_be_saved_before_a_step():
    model, plain = trained("AdamW")
    other = copy.deepcopy(model)
    first, second = around("AdamW", model), around("AdamW", other)
    first.load_state_dict(plain.state_dict())
    second.load_state_dict(through_file(first.state_dict()))
    assert all(map(torch.equal, train(model, first, 4), train(other, second, 4)))


def test_a_parameter_without_a_gradient_is_taken_over_at_its_first_step():
    model, plain = trained("AdamW")
    optimizer = around("AdamW", model)
    optimizer.load_state_dict(plain.state_dict())
    optimizer.zero_grad()
    model(X).square().mean().backward()
    held = model[2].weight
    held.grad = None
    optimizer.step()
    kept = optimizer.rule.state[optimizer._shadows[held]]
    assert torch.equal(kept["exp_avg"], plain.state[held]["exp_avg"])
    other = around("AdamW", copy.deepcopy(model))
    other.load_state_dict(through_file(optimizer.state_dict()))
    model(X).square().mean().backward()
    optimizer.step()
    r = optimizer.state[held]["factor"]
    expected = 0.9 * plain.state[held]["exp_avg"] * r + 0.1 * held.grad * r
    assert_close(kept["exp_avg"], expected)
    assert other._plain == {other.network.parameters["2.weight"]}


def test_the_network_may_not_be_rescaled_in_between():
    model, plain = trained("AdamW")
    optimizer = around("AdamW", model)
    optimizer.load_state_dict(plain.state_dict())
    ps.rescaling.balance_(optimizer.network)
    with pytest.raises(
        RuntimeError, match=r"rescaled after a state of plain AdamW was loaded.*balance it first"
    ):
        train(model, optimizer, 1)


def test_parameters_of_fewer_bits():
    model = uneven().to(torch.bfloat16)
    x = X.to(torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters())
    model(x).square().mean().backward()
    plain.step()
    optimizer = ps.optim.PathAdam(model.parameters(), ps.trace(model, x))
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()
    assert all(kept["exp_avg"].dtype == torch.float32 for kept in optimizer.rule.state.values())


# --- to the plain rule ----------------------------------------------------------------------------

OURS = {
    "PathAdam": {},
    "PathRMSprop": {},
    "PathMuon": {},
    "PathSOAP": {},
    "PathGradientAdam": {},
    "GAdam": {},
    "DDPAdam": {},
    "GSGD": {"momentum": 0.9},
    **{f"Invariant {name}": {} for name in (*KNOWN, "Adafactor", "Muon")},
}
PLAIN = {
    "PathRMSprop": torch.optim.RMSprop,
    "PathGradientAdam": torch.optim.Adam,
    "GSGD": torch.optim.SGD,
}


def ours(name):
    kind, _, rule = name.partition(" ")
    model = uneven() if rule != "Muon" else nn.Sequential(*map(without_bias, uneven()))
    options = {"lr": 1e-3, **OURS[name], **({"rule": getattr(torch.optim, rule)} if rule else {})}
    if rule in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    optimizer = getattr(ps.optim, kind)(model.parameters(), ps.trace(model, X), **options)
    train(model, optimizer, 2)
    return model, optimizer


def without_bias(layer):
    if isinstance(layer, nn.Linear):
        layer.bias = None
    return layer


def plain_rule(name, model):
    """The rule of torch whose entries have the same names."""
    around = name.partition(" ")[2]
    rule = getattr(torch.optim, around) if around else PLAIN.get(name, torch.optim.AdamW)
    options = {"momentum": 0.9} if rule in (torch.optim.SGD, torch.optim.RMSprop) else {}
    return rule(model.parameters(), lr=1e-3, **options)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OURS)
def test_plain_rules_refuse_our_states_by_name(name):
    model, optimizer = ours(name)
    plain = plain_rule(name, model)
    with pytest.raises(
        ValueError, match=r"state of an optimizer of pathspace.*load it into that optimizer"
    ):
        plain.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="state of an optimizer of pathspace"):
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OURS)
def test_plain_rules_refuse_our_states_from_a_file(name):
    """Those whose loader reads no entry stop at their first step, at a word in the place of a tensor."""
    model, optimizer = ours(name)
    plain, state = plain_rule(name, model), through_file(optimizer.state_dict())
    reads_steps = name not in ("GSGD", "Invariant SGD", "Invariant Muon")
    if reads_steps:
        with pytest.raises(ValueError, match="state of an optimizer of pathspace"):
            plain.load_state_dict(state)
        return
    with pytest.raises((TypeError, AttributeError, KeyError)):
        load_and_step(plain, state)


def load_and_step(plain, state):
    plain.load_state_dict(state)
    plain.step()


@pytest.mark.parametrize("name", slow_besides(["PathAdam", "GSGD", "Invariant SGD"], OURS))
def test_our_own_take_them_back(name):
    model, optimizer = ours(name)
    other = copy.deepcopy(model)
    rule = {"rule": type(optimizer.rule)} if name.startswith("Invariant") else {}
    if name == "Invariant RMSprop":
        rule = {"rule": torch.optim.RMSprop}
    kind = getattr(ps.optim, name.partition(" ")[0])
    again = kind(other.parameters(), ps.trace(other, X), lr=1e-3, **OURS[name], **rule)
    again.load_state_dict(through_file(optimizer.state_dict()))
    assert all(map(torch.equal, train(model, optimizer, 3), train(other, again, 3)))


@pytest.mark.parametrize("full", [False, True])
def test_tools_that_go_through_states_find_nothing_that_stops_them(full):
    model, optimizer = ours("PathAdam")
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    other, again = ours("PathAdam")
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(
        other, again, copy.deepcopy(state), options=StateDictOptions(full_state_dict=full)
    )
    assert all(map(torch.equal, train(model, optimizer, 3), train(other, again, 3)))


def test_a_path_sgd_needs_no_refusal():
    """Its velocity is one of the weights, as SGD's is."""
    model = uneven()
    optimizer = ps.optim.PathSGD(model.parameters(), ps.trace(model, X), lr=1e-4, momentum=0.9)
    train(model, optimizer, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert all(
        torch.equal(plain.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
        for p in plain.state
    )
