"""What happens to optimizers besides stepping: copies, pickles, conversions, groups that join, models that change."""

import copy
import functools
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.testing import assert_close

import pathspace as ps
from cases import mlp, slow_besides

OPTIONS = {
    "PathSGD": {"lr": 0.05, "momentum": 0.9},
    "PathAdam": {"lr": 0.01, "amsgrad": True},
    "PathGradientAdam": {"lr": 0.01},
    "PathSOAP": {"lr": 0.01, "precondition_frequency": 3, "eps": 1e-6},
    "PathMuon": {"lr": 0.01},
    "GSGD": {"lr": 0.05, "momentum": 0.9},
    "GAdam": {"lr": 0.01},
    "DDPSGD": {"lr": 0.02, "momentum": 0.9},
    "DDPAdam": {"lr": 0.01, "estimator": "signs"},
    "QuasiDiagonal": {"lr": 0.01},
}
ALL = pytest.mark.parametrize("name", OPTIONS)
# one optimizer of each base class, and those with states of their own, for what the base classes do
SOME = ("PathSGD", "PathAdam", "PathSOAP", "GSGD", "DDPAdam", "QuasiDiagonal")
FIRST = pytest.mark.parametrize("name", slow_besides(SOME, OPTIONS))
OF_KAPPA = pytest.mark.parametrize(
    "name", [name for name in OPTIONS if name not in ("GSGD", "GAdam")]
)


@functools.cache
def traced(dtype):
    torch.manual_seed(0)
    model = mlp(4, 12, 8, 3).to(dtype)
    return model, ps.trace(model, torch.zeros(1, 4, dtype=dtype))


def build(name, dtype=torch.float32, **options):
    model, network = copy.deepcopy(traced(dtype))
    torch.manual_seed(0)
    return model, getattr(ps.optim, name)(
        model.parameters(), network, **{**OPTIONS[name], **options}
    )


def train(model, optimizer, steps=3, first=0):
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(i)
        x, y = (
            torch.randn(16, 4, generator=generator),
            torch.randint(0, 3, (16,), generator=generator),
        )
        optimizer.zero_grad()
        functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "refresh_every"),
    slow_besides(
        [
            (name, 1 if name in ("GSGD", "GAdam") else (4, 1)[n % 2])
            for n, name in enumerate(OPTIONS)
        ],
        [(name, n) for name in OPTIONS for n in (1, 4) if n == 1 or name not in ("GSGD", "GAdam")],
    ),
)
def test_a_copy_with_its_model_goes_on_alike(name, refresh_every):
    model, optimizer = build(
        name, **({"refresh_every": refresh_every} if refresh_every > 1 else {})
    )
    schedule = lr_scheduler.StepLR(optimizer, 2)  # puts a method of its own in the place of step
    train(model, optimizer)
    schedule.step()
    other, copied = copy.deepcopy((model, optimizer))
    assert copied.network.model is other
    before = [p.detach().clone() for p in model.parameters()]
    theirs = train(other, copied, first=3)
    assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert_close(train(model, optimizer, first=3), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["PathAdam", "GSGD", "DDPSGD"])
def test_a_model_may_keep_its_network(name):
    """It is then reached while the model itself is being copied: by averages of weights, passes on data, tracing."""
    model, optimizer = build(name)
    model.network = optimizer.network
    train(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert average.module.network.model is average.module
    assert ps.trace(model, torch.ones(2, 4)).num_classes == model.network.num_classes
    copies = [copy.deepcopy((model, optimizer)), copy.deepcopy((optimizer, model))[::-1]]
    expected = train(model, optimizer, first=3)
    for other, copied in copies:
        assert copied.network is other.network is not model.network
        assert_close(train(other, copied, first=3), expected, rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["PathSGD", "GSGD", "DDPSGD", "QuasiDiagonal"])
def test_a_model_may_keep_its_optimizer(name):
    """As agents do that are copied now and then; dropout asks the data's metrics for a pass of their own."""
    torch.manual_seed(0)
    model = mlp(4, 8, 3).insert(2, nn.Dropout(0.3)).eval()
    other = copy.deepcopy(model)
    for one in (model, other):
        network = ps.trace(one, torch.zeros(1, 4))
        optimizer = getattr(ps.optim, name)(one.parameters(), network, **OPTIONS[name])
        if one is model:
            model.optimizer = optimizer

    def trained(model, optimizer, first):
        torch.manual_seed(0)
        return train(model.train(), optimizer, steps=12, first=first)

    assert_close(trained(model, model.optimizer, 0), trained(other, optimizer, 0), rtol=0, atol=0)
    copied, (its, another) = copy.deepcopy(model), copy.deepcopy((model.optimizer, model))
    assert ps.trace(copied.eval(), torch.zeros(1, 4)).num_classes == 8
    expected = trained(other, optimizer, 12)
    for one in (model, copied, another):
        assert_close(trained(one, one.optimizer, 12), expected, rtol=0, atol=0)
    assert its is another.optimizer


def test_a_pass_on_data_copies_no_optimizer(monkeypatch):
    model = mlp(4, 8, 3)
    model.optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(
        torch.optim.AdamW, "__deepcopy__", lambda *_: pytest.fail("copied"), raising=False
    )
    network = ps.trace(model, torch.zeros(1, 4))
    ps.paths.data_dependent_kappa(network, torch.ones(2, 4))
    ps.rescaling.balance_(network, torch.ones(2, 4))


@pytest.mark.sample(2)
@FIRST
def test_channels_last_is_a_matter_of_memory(name):
    ends = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = (
            nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Conv2d(4, 2, 2))
            .double()
            .to(memory_format=form)
        )
        x = torch.randn(5, 3, 4, 4, dtype=torch.float64).to(memory_format=form)
        optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), **OPTIONS[name])
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        ends.append([p.detach().contiguous() for p in model.parameters()])
    assert_close(*ends, rtol=1e-6, atol=1e-9)


@pytest.mark.sample(2)
@FIRST
def test_a_compiled_training_step_is_the_same(name):
    """Who compiles a whole training step compiles the optimizer's, too."""
    ends = []
    with warnings.catch_warnings():
        # torch's own compiler warns of things that are none of ours
        warnings.simplefilter("ignore")
        for compiled in (False, True):
            model, optimizer = build(name)
            step = (
                torch.compile(lambda o=optimizer: o.step(), backend="eager")
                if compiled
                else optimizer.step
            )
            for i in range(4):
                optimizer.zero_grad()
                model(
                    torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
                ).square().mean().backward()
                step()
            ends.append([p.detach() for p in model.parameters()])
    torch.compiler.reset()
    assert_close(*ends, rtol=0, atol=0)


@ALL
def test_hooks_on_states_are_run(name):
    model, optimizer = build(name)
    train(model, optimizer)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(o))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("note")))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [optimizer, 1, optimizer]


@pytest.mark.sample(2)
@FIRST
def test_a_hook_may_put_a_state_in_the_order_of_other_parameters(name):
    """As torch's recipe does; it sees a state before anything is checked, and another one what was loaded."""
    model, optimizer = build(name)
    train(model, optimizer)
    again, _ = build(name)
    again.load_state_dict(model.state_dict())
    network, kind = ps.trace(again, torch.zeros(1, 4)), getattr(ps.optim, name)
    other, steps = kind(list(again.parameters())[::-1], network, **OPTIONS[name]), []

    def in_reverse(_, state):
        state["state"] = {5 - i: kept for i, kept in state["state"].items()}

    other.register_load_state_dict_pre_hook(in_reverse)
    other.register_load_state_dict_post_hook(lambda o: steps.append(len(o.state_dict()["state"])))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps == [6]
    assert_close(train(again, other, first=3), train(model, optimizer, first=3), rtol=0, atol=0)


@ALL
@pytest.mark.parametrize("how", [pickle.dumps, lambda o: torch.save(o, io.BytesIO()), copy.copy])
def test_pickling_says_what_to_save_instead(name, how):
    _, optimizer = build(name)
    with pytest.raises(TypeError, match=rf"{name} cannot be pickled.*state_dict\(\)"):
        how(optimizer)


@pytest.mark.sample(2)
@FIRST
def test_a_state_may_be_loaded_again_and_again(name):
    model, optimizer = build(name)
    for first in (0, 2, 4):
        train(model, optimizer, 2, first=first)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_close(list(model.parameters()), train(*build(name), 6), rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("other", ["QuasiDiagonal", "Balanced"])
def test_a_state_of_another_metric_does_not_set_the_length_of_steps(other, back):
    """Rules whose groups have the same options take each other's states, and took ten steps or all by their metrics."""

    def built(path):
        if path:
            return build("PathSGD", lr=0.0, momentum=0.0)
        name, options = (
            ("PathSGD", {"metric": ps.metrics.Balanced()}) if other == "Balanced" else (other, {})
        )
        return build(name, lr=0.0, momentum=0.0, **options)

    ends = []
    for state in (built(not back), None):
        model, optimizer = built(back)
        if state is not None:
            train(*state, 12)  # that stand still
            optimizer.load_state_dict(state[1].state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        ends.append(train(model, optimizer, 1))
    assert_close(*ends, rtol=1e-6, atol=1e-8)


# --- conversions ----------------------------------------------------------------------------------


@pytest.mark.sample(6)
@FIRST
@pytest.mark.parametrize("steps", [0, 3])
def test_a_model_may_be_converted_to_more_digits(name, steps):
    model, optimizer = build(name)
    train(model, optimizer, steps)
    before = [p.detach().clone() for p in model.double().parameters()]
    after = train(model, optimizer, first=steps)
    for old, new in zip(before, after, strict=True):
        assert new.dtype == torch.float64
        assert torch.isfinite(new).all()
        assert not torch.equal(old, new)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    train(model, optimizer, first=9)


@FIRST
@pytest.mark.sample(3)
def test_a_model_may_be_converted_from_half_precision_and_back(name):
    model, optimizer = build(name, torch.bfloat16)
    train(model, optimizer)
    train(model.float(), optimizer, first=3)
    velocities = [
        state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state
    ]
    assert all(velocity.dtype == torch.float32 for velocity in velocities)
    after = train(model.bfloat16(), optimizer, first=6)
    assert all(torch.isfinite(p).all() and p.dtype == torch.bfloat16 for p in after)


class Mixed(nn.Module):
    """Layers of two types; the values that go from one to the other are cast."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 12).to(first), nn.Linear(12, 3).to(second)

    def forward(self, x):
        return self.b(self.a(x.to(self.a.weight.dtype)).relu().to(self.b.weight.dtype))


TYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]
OF_WEIGHTS = [name for name in OPTIONS if name.startswith(("Path", "G"))]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "types"),
    slow_besides(
        [
            *((name, TYPES[number % 3]) for number, name in enumerate(OF_WEIGHTS)),
            *((name, types) for name in ("PathSGD", "GSGD") for types in TYPES),
        ],
        itertools.product(OF_WEIGHTS, TYPES),
    ),
)
def test_models_of_several_types(name, types):
    outputs = []
    for power in (0.0, 3.0):
        model = Mixed(*types)
        network = ps.trace(model, torch.zeros(1, 4))
        ps.rescaling.rescale_(
            network, 2.0 ** (power * torch.linspace(-1, 1, 12, dtype=torch.float64)).round()
        )
        optimizer = getattr(ps.optim, name)(model.parameters(), network, **OPTIONS[name])
        for i in range(5):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
            outputs.append(model(x))
            optimizer.zero_grad()
            outputs[-1].float().square().mean().backward()
            optimizer.step()
        assert [p.dtype for p in model.parameters()] == [types[0]] * 2 + [types[1]] * 2
    assert torch.isfinite(outputs[-1]).all()
    assert not torch.equal(outputs[0], outputs[4])
    alike = all(torch.equal(a, b) for a, b in zip(outputs[:5], outputs[5:], strict=True))
    assert alike != (name == "PathGradientAdam")


# --- groups ---------------------------------------------------------------------------------------


@ALL
def test_options_of_the_whole_optimizer_are_refused_in_a_group(name):
    model, optimizer = build(name)
    kind, network = type(optimizer), optimizer.network
    of_metric = [] if name in ("GSGD", "GAdam") else ["refresh_every"]
    for option in ("clip_norm", *of_metric):
        group = {"params": list(model.parameters()), option: 1}
        with pytest.raises(ValueError, match=f"'{option}' is an option of {name} as a whole"):
            kind([group], network, **OPTIONS[name])


@pytest.mark.sample(10)
@ALL
@pytest.mark.parametrize("option", [{"lr": -0.1}, {"weight_decay": float("nan")}])
def test_options_of_a_group_are_checked(name, option):
    model, _ = build(name)
    network = ps.trace(model, torch.zeros(1, 4))
    kind = getattr(ps.optim, name)
    optimizer = kind(model[0].parameters(), network, **OPTIONS[name])
    with pytest.raises(ValueError, match=f"{next(iter(option))} must not be negative"):
        optimizer.add_param_group({"params": list(model[2].parameters()), **option})
    assert len(optimizer.param_groups) == 1


@ALL
@pytest.mark.sample(5)
def test_groups_that_take_the_place_of_others_are_obeyed(name):
    model, optimizer = build(name)
    before = train(model, optimizer)
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    after = train(model, optimizer, first=3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0


@ALL
def test_several_numbers_are_no_rate(name):
    model, optimizer = build(name)
    with pytest.raises(TypeError, match=r"lr must be a number, got tensor\(\[0.1"):
        type(optimizer)(model.parameters(), optimizer.network, lr=torch.tensor([0.1, 0.2]))


def test_the_momentum_of_a_group_is_checked_as_that_of_all_is():
    model, optimizer = build("PathMuon")
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.5"):
        ps.optim.PathMuon([{"params": model.parameters(), "momentum": 1.5}], optimizer.network)


@ALL
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_stands_twice_in_a_group_is_refused(name):
    model, _ = build(name)
    network, kind = ps.trace(model, torch.zeros(1, 4)), getattr(ps.optim, name)
    # as a layer that two modules share, listed with both
    twice = [
        *model[2].parameters(),
        model[2].weight,
    ]
    with pytest.raises(ValueError, match="stands twice in a group"):
        kind(twice, network, **OPTIONS[name])
    optimizer = kind(model[0].parameters(), network, **OPTIONS[name])
    with pytest.raises(ValueError, match="stands twice in a group"):
        optimizer.add_param_group({"params": twice})
    optimizer.add_param_group({"params": model[2].parameters()})


@ALL
def test_complex_parameters_beside_the_model_are_refused(name):
    model, _ = build(name)
    phases = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="a parameter is complex: give it to an optimizer of torch"):
        getattr(ps.optim, name)(
            [*model.parameters(), phases], ps.trace(model, torch.zeros(1, 4)), **OPTIONS[name]
        )


@ALL
@pytest.mark.sample(5)
def test_names_of_parameters_and_of_groups_are_welcome(name):
    model, _ = build(name)
    network = ps.trace(model, torch.zeros(1, 4))
    groups = [{"params": list(model.named_parameters()), "name": "all", "initial_lr": 1.0}]
    optimizer = getattr(ps.optim, name)(groups, network, **OPTIONS[name])
    train(model, optimizer)
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


@pytest.mark.sample(3)
@OF_KAPPA
def test_a_group_may_join_between_two_refreshes(name):
    model, _ = build(name)
    network = ps.trace(model, torch.zeros(1, 4))
    optimizer = getattr(ps.optim, name)(
        model[0].parameters(), network, **OPTIONS[name], refresh_every=5
    )
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    train(model, optimizer, 7, first=2)
    assert not torch.equal(model[2].weight, before)


# --- models that change ---------------------------------------------------------------------------


def _layer_replaced(model):
    model[2] = nn.Linear(12, 8)


def _reparametrized(model):
    parametrizations.weight_norm(model[2])


def _loaded_by_assignment(model):
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def _activation_replaced(model):
    model[1] = nn.Tanh()


CHANGES = [_layer_replaced, _activation_replaced, _reparametrized, _loaded_by_assignment]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("name", "change", "refresh_every"),
    [(n, c, (1, 10)[(i + j) % 2]) for i, n in enumerate(OPTIONS) for j, c in enumerate(CHANGES)],
)
def test_a_model_that_lost_traced_parts_is_refused(name, change, refresh_every):
    """Each rule and each change once, every other pair where a refresh is due and the others where none is."""
    refreshed = {} if name in ("GSGD", "GAdam") else {"refresh_every": refresh_every}
    model, optimizer = build(name, **refreshed)
    train(model, optimizer, 2)
    change(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"'[012].*' .*was replaced after tracing.*trace the model again"
    ):
        train(model, optimizer, 1)
    assert_close(list(model.parameters()), before, rtol=0, atol=0)


@pytest.mark.sample(2)
@FIRST
def test_rescaling_under_a_running_optimizer_is_refused_or_changes_nothing(name):
    expected = train(*build(name, torch.float64), 5)
    model, optimizer = build(name, torch.float64)
    factors = ps.rescaling.random_rescale_(optimizer.network, 0.25, 4.0, powers_of_two=True)
    ps.rescaling.rescale_(optimizer.network, 1 / factors)  # before the first step all may change
    train(model, optimizer, 2)
    ps.rescaling.rescale_(optimizer.network, factors)
    if name not in ("GSGD", "GAdam"):
        with pytest.raises(
            RuntimeError, match=r"was rescaled after the first step of .*: make a new optimizer"
        ):
            train(model, optimizer, 1)
        return
    train(model, optimizer, 3, first=2)
    ps.rescaling.rescale_(optimizer.network, 1 / factors)
    assert_close([p.detach() for p in model.parameters()], expected)


@OF_KAPPA
@pytest.mark.sample(4)
def test_rescaling_by_another_trace_of_the_model_is_refused(name):
    model, optimizer = build(name)
    train(model, optimizer, 2)
    ps.rescaling.balance_(ps.trace(model, torch.zeros(1, 4)))
    with pytest.raises(RuntimeError, match="was rescaled after the first step"):
        train(model, optimizer, 1)


@pytest.mark.sample(2)
@FIRST
def test_copies_of_several_networks_of_a_rescaled_model_go_on(name):
    model, optimizer = build(name)
    ps.rescaling.balance_(optimizer.network)
    train(model, optimizer, 2)
    other = ps.trace(model, torch.zeros(1, 4))
    again, resumed, _ = copy.deepcopy((model, optimizer, other))
    theirs = train(again, resumed, 2, first=2)
    assert_close(theirs, train(model, optimizer, 2, first=2), rtol=0, atol=0)


@pytest.mark.sample(2)
@OF_KAPPA
def test_a_run_may_be_resumed_in_a_network_that_was_rescaled_at_its_start(name):
    model, optimizer = build(name)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = build(name)
    # with another gauge than the one that is loaded
    ps.rescaling.random_rescale_(resumed.network, 0.25, 4.0)
    train(other, resumed, 1)
    # as at every start of the program, before it looks for a checkpoint
    ps.rescaling.balance_(resumed.network)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    theirs = train(other, resumed, 2, first=2)
    assert_close(theirs, train(model, optimizer, 2, first=2), rtol=0, atol=0)


@FIRST
@pytest.mark.sample(3)
def test_compiling_a_part_after_tracing_replaces_nothing(name):
    model, optimizer = build(name)
    expected = train(*build(name))
    model[2] = torch.compile(model[2], backend="eager")  # a wrapper round the same parameters
    torch.compiler.set_stance("force_eager")
    try:
        assert_close(train(model, optimizer), expected)
    finally:
        torch.compiler.set_stance("default")


# --- a part of the parameters ---------------------------------------------------------------------


def parts_of_a_model(*kinds, frozen=False):
    """A model, and an optimizer for each of its layers but the last ones; they share nothing but the network."""
    torch.manual_seed(0)
    model = mlp(4, 8, 6, 3)
    network = ps.trace(model, torch.zeros(1, 4))
    layers = [model[0], model[2], model[4]]
    for layer in layers[len(kinds) :]:
        layer.requires_grad_(not frozen)
    return model, [
        kind(layer.parameters(), network) for kind, layer in zip(kinds, layers, strict=False)
    ]


def train_parts(model, optimizers, steps=6):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "GSGD", "DDPSGD"])
def test_parameters_that_nobody_was_given_are_named_once(name):
    model, optimizers = parts_of_a_model(getattr(ps.optim, name))
    told = r"given 2 of the 6 parameters.*'2.weight', '2.bias', '4.weight' and 1 more.*requires_grad_\(False\)"
    with pytest.warns(UserWarning, match=told) as caught:
        train_parts(model, optimizers, 20)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_so_are_those_of_a_plain_rule_beside_it():
    model, optimizers = parts_of_a_model(ps.optim.PathSGD, torch_sgd, torch_sgd)
    with pytest.warns(
        UserWarning, match=r"given 2 of the 6 parameters.*or another rule moves them"
    ):
        train_parts(model, optimizers)


def torch_sgd(parameters, _):
    return torch.optim.SGD(parameters, lr=0.01)


def test_other_parts_are_nothing_to_warn_of():
    """Frozen ones, those beside another optimizer of the network, and those that a group adds early."""
    train_parts(*parts_of_a_model(ps.optim.PathSGD, frozen=True))
    model, optimizers = parts_of_a_model(ps.optim.PathSGD, ps.optim.PathAdam, ps.optim.PathMuon)
    train_parts(*copy.deepcopy((model, optimizers)))
    train_parts(model, optimizers)
    train_parts(*parts_of_a_model(ps.optim.PathSGD, ps.optim.PathAdam))
    model, (optimizer,) = parts_of_a_model(ps.optim.PathSGD)
    train_parts(model, [optimizer], 2)
    optimizer.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()]})
    train_parts(model, [optimizer])
