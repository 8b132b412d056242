"""What may change in a traced model, and what may not."""

import copy
import functools
import random
import warnings
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import pathspace as ps


def traced(**options):
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.1), nn.Sequential(nn.Linear(4, 2))
    )
    return model, ps.trace(model, torch.zeros(2, 3), **options)


def _replaced(model):
    model[1] = nn.LeakyReLU()


def _taken_away(model):
    del model[3][0]


def _appended(model):
    model[3].append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _replaced,
            r"module '1' \(ReLU\) was replaced after tracing, by LeakyReLU: trace the model again",
        ),
        (_taken_away, r"module '3\.0' \(Linear\) was removed after tracing"),
        (_appended, "'3' had 1 modules in a row when it was traced and has 2 now"),
    ],
)
def test_another_network_is_refused(change, says):
    model, network = traced()
    network.check_current()
    change(model)
    with pytest.raises(RuntimeError, match=says):
        network.check_current()


def test_what_is_no_part_of_the_network_may_change():
    model, network = traced(outside=["3"])
    model[2] = nn.Identity()  # instead of dropout
    model[3][0] = nn.Linear(4, 2)  # outside
    model.probe = nn.Module()
    model[0].probe = nn.Linear(2, 2)
    del model.probe
    network.check_current()


def test_a_wrapper_round_a_module_replaces_nothing():
    model, network = traced()
    model[1] = nn.Sequential(model[1])
    network.check_current()


@pytest.mark.sample(5)
@pytest.mark.parametrize("rule", ["PathSGD", "GSGD", "DDPSGD"])
@pytest.mark.parametrize(
    "change", [prune.random_unstructured, nn.utils.weight_norm, nn.utils.spectral_norm]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_pruned_and_normalized_modules_may_be_left_outside(rule, change):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        torch.randn(5, 3),
    )
    change(model[2], *(["weight", 0.5] if change is prune.random_unstructured else []))
    network = ps.trace(model, x, outside=["2"])
    assert set(network.parameters) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    before = model.eval()(x)  # in training every call changes what spectral_norm divides by
    ps.rescaling.random_rescale_(network, 0.25, 4.0)
    ps.rescaling.balance_(network, x)
    assert_close(model(x), before)
    model.train()
    optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("change", [prune.random_unstructured, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_models_with_pruned_and_normalized_modules_are_copied(change):
    torch.manual_seed(0)
    layers = [
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
        nn.ReLU(),
        nn.Linear(3, 1),
    ]
    model, x = nn.Sequential(*layers), torch.randn(5, 3)
    change(model[2], *(["weight", 0.5] if change is prune.random_unstructured else []))
    before = model(x)  # torch does not copy what a hook has made with gradients
    network = ps.trace(model, x, outside=["2"])
    assert ps.paths.enumerate_paths(network).counts.sum() > 0
    assert_close(ps.paths.activity(network, x).outputs[:, :1].float(), before)
    assert ps.paths.degrees_of_freedom(network, x) >= 1
    assert ps.paths.dead_units(network, x).shape == (3,)
    assert ps.nn.fold(ps.nn.ddp_normalize(model, network))(x).shape == before.shape
    report = ps.rescaling.check_invariance(
        model,
        x,
        lambda out: out.square().mean(),
        lambda m, network: ps.optim.PathSGD(m.parameters(), network, lr=0.01),
        steps=2,
        outside=["2"],
    )
    assert report.passed
    assert_close(model(x), before, rtol=0, atol=0)


def test_hooks_on_gradients_are_the_users_own():
    model, network = traced()
    calls = []
    for module in model.modules():
        module.register_full_backward_hook(lambda *_: calls.append("after"))
        module.register_full_backward_pre_hook(lambda *_: calls.append("before"))
    x = torch.randn(5, 3)
    ps.paths.dead_units(network, x)
    ps.paths.degrees_of_freedom(network, x)
    ps.paths.data_dependent_kappa(network, x)
    assert not calls
    model(x.requires_grad_()).sum().backward()
    assert "after" in calls
    assert "before" in calls


class Masked(nn.Module):
    """A function of units and of a buffer between two layers."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.read, self.mix, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        for name, values in buffers.items():
            self.register_buffer(name, values)
        self._function = function

    def forward(self, x):
        h = self.read(x).relu()
        return self.out(self._function(self, h, self.mix(h).relu()))


def written(values):
    result = torch.zeros(2, 4)
    result[1, 2:] = values[:2]
    return result.sum(0)


def into(mask, other):
    mask |= other
    return mask


def through_a_view(number):
    result = torch.zeros(2, 2)
    seen = result.view(-1)
    seen[:2] = number * 0.5
    return result.view(-1)


def marked(index):
    result = torch.zeros(4, dtype=torch.bool)
    result[index] = True
    return result


CONDITION, INDEX = torch.tensor([True, False, True, True]), torch.tensor([2, 0, 3, 1])
DECIDES = {
    "where": (lambda m, h, z: torch.where(m.own, h, z), CONDITION),
    "its opposite": (lambda m, h, z: z + h * ~m.own, CONDITION),
    "filled": (lambda m, h, z: z + h.masked_fill(m.own, 0), CONDITION),
    "index": (lambda m, h, z: z + h[:, m.own], INDEX),
    "sorted first": (lambda m, h, z: z + h[:, m.own.argsort()], INDEX),
    "gathered": (lambda m, h, z: z + h.gather(1, m.own.expand(len(h), 4)), INDEX),
    "compared": (lambda m, h, z: torch.where(m.own > 1, h, z), INDEX),
    "as numbers": (lambda m, h, z: z + h * (1 - m.own.float()), CONDITION),
    "an order of numbers": (lambda m, h, z: z + h[:, m.own.argsort()], torch.rand(4)),
    "written by it": (lambda m, h, z: torch.where(marked(m.own), h, z), INDEX[:2]),
    "turned": (lambda m, h, z: torch.where(m.own.clone().logical_not_(), h, z), CONDITION),
    "copied": (
        lambda m, h, z: torch.where(torch.zeros(4, dtype=torch.bool).copy_(m.own), h, z),
        CONDITION,
    ),
}


@pytest.mark.parametrize("name", DECIDES)
def test_a_buffer_that_decided_which_units_belong_together_keeps_its_values(name):
    function, values = DECIDES[name]
    model, x = Masked(function, own=values.clone()), torch.randn(5, 3)
    network = ps.trace(model, x)
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
    model(x).sum().backward()
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    optimizer.step()
    model.own.copy_(values.roll(1) if len(values) == 4 else values + 1)
    before = [p.clone() for p in model.parameters()]
    for use in (optimizer.step, network.check_current, lambda: ps.rescaling.balance_(network)):
        with pytest.raises(
            RuntimeError, match=r"buffer 'own' has other values .* trace the model again"
        ):
            use()
    assert all(map(torch.equal, before, model.parameters()))
    model.own = values.clone()  # another tensor with the old values
    optimizer.step()


MAY_CHANGE = {
    "a factor": (lambda m, _, z: z * m.own, torch.rand(4)),
    "a factor with zeros": (lambda m, _, z: z * m.own, CONDITION.float()),
    "a deviation": (lambda m, _, z: z / (m.own + 1e-5).sqrt(), torch.rand(4)),
    "a number of examples": (lambda m, _, z: z / m.own, torch.tensor(3)),
    "a load": (lambda m, _, z: z - m.own / 7, torch.tensor([1, 3, 2, 4])),
    "a rotation": (
        lambda m, h, z: z * (torch.arange(4) * m.own).cos() + h * (torch.arange(4) * m.own).sin(),
        torch.rand(4),
    ),
    "a step that is compared": (lambda m, h, z: torch.where(m.own < 4, h, z), torch.tensor(3)),
    "numbers that are compared": (
        lambda m, h, z: torch.where(m.own > 0.5, h, z),
        CONDITION.float(),
    ),
    "numbers that leave out": (lambda m, _, z: z.masked_fill(m.own == 0, 0.5), CONDITION.float()),
    "a time to begin": (lambda m, h, z: z + h * (m.own >= 4), torch.tensor(3)),
    "a slow beginning": (lambda m, h, z: z + h * ((m.own - 3) / 9).clamp(0, 1), torch.tensor(3)),
    "edges between near ones": (
        lambda m, h, z: z + h @ ((m.own[:, None] - m.own).abs() < 0.5).float(),
        torch.arange(4.0),
    ),
    "a difference": (lambda m, _, z: z + (m.own - m.own[0]), torch.ones(4)),
    "a choice in place": (
        lambda m, h, z: z + h * into(torch.zeros(4, dtype=torch.bool), m.own > 1),
        torch.zeros(4),
    ),
    "a number in a part of a mask": (lambda m, _, z: z + through_a_view(m.own), torch.tensor(0)),
    "a load that begins at zero": (lambda m, _, z: z - m.own / 7, torch.zeros(4, dtype=torch.long)),
    "a time that begins at zero": (lambda m, _, z: z + m.own / 7, torch.tensor(0)),
    "a mean that begins at zero": (
        lambda m, _, z: z - 2 * m.own,
        torch.tensor([0.0, 0.0, 1.0, 0.0]),
    ),
    "its sum": (lambda m, _, z: z - m.own.sum(), torch.zeros(4)),
    "a part of it that is written": (lambda m, _, z: z - written(2 * m.own), torch.zeros(4)),
    "as many as there are": (
        lambda m, h, z: torch.cat([z[:, :2] - (2 * m.own).nonzero().flatten(), h[:, 2:]], 1),
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
    ),
    "places": (lambda m, _, z: z - torch.eye(2)[m.own].flatten(), torch.tensor([0, 1])),
    "one that fades in": (lambda m, h, z: m.own * h + (1 - m.own) * z, torch.ones(())),
    "one that fades out": (lambda m, h, z: h - h.mul(2 * m.own) + z * (3 * m.own), torch.zeros(4)),
    "a bound": (lambda m, h, z: (z - 2 * h).clamp(min=2 * m.own), torch.tensor(0.0)),
    "a learned factor": (lambda m, _, z: z + m.read.bias * (2 * m.own), torch.zeros(4)),
    "a factor of inputs": (
        lambda m, _, z: z + torch.rand(4).ge(-1).float() * (2 * m.own),
        torch.zeros(4),
    ),
    "what is larger": (lambda m, _, z: torch.maximum(z, 2 * m.own), torch.zeros(4)),
    "filled in": (lambda m, _, z: torch.where(CONDITION, z, 2 * m.own), torch.zeros(4)),
    "edges": (lambda m, h, z: z + h @ (2 * m.own).diag(), torch.tensor([1.0, 0.0, 0.0, 1.0])),
    "all edges": (lambda m, h, z: z + h @ (2 * m.own.expand(4, 4)), torch.zeros(4)),
    "a state": (
        lambda m, _, z: torch.rnn_relu_cell(z, (2 * m.own).expand(len(z), 4), *[m.mix.weight] * 2),
        torch.zeros(4),
    ),
    "a counter": (lambda m, _, z: (m.own.add_(1), z)[1], torch.tensor(3)),
    "what a call writes first": (
        lambda m, h, z: (m.own.fill_(False), torch.where(m.own, h, z))[1],
        CONDITION,
    ),
}


@pytest.mark.parametrize("name", MAY_CHANGE)
@pytest.mark.sample(17)
def test_other_buffers_may_change(name):
    function, values = MAY_CHANGE[name]
    torch.manual_seed(2)  # so that all units are alive
    model, x = Masked(function, own=values.clone()), torch.randn(5, 3)
    network = ps.trace(model, x)
    model.own.copy_(values.roll(1) if len(values.unique()) > 1 else values + 1)
    output = model(x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), output)
    assert ps.trace(model, x).num_classes == network.num_classes


GENERIC = [
    name
    for name, (_, values) in MAY_CHANGE.items()
    if values.is_floating_point()
    and name not in ("as many as there are", "edges", "edges between near ones")
]


@pytest.mark.parametrize("name", GENERIC)
def test_a_zero_of_today_frees_no_more_and_no_less_than_any_number(name):
    function, values = MAY_CHANGE[name]
    counts = [
        ps.trace(Masked(function, own=own), torch.randn(5, 3)).num_classes
        for own in (values, torch.rand(values.shape) + 0.1)
    ]
    assert counts[0] == counts[1]


WRITES = {
    "turned": lambda m: m.own.logical_not_(),
    "turned by a view": lambda m: m.own.view(2, 2).logical_not_(),
    "or": lambda m: into(m.own, torch.tensor([True, False, False, False])),
    "and": lambda m: m.own.__iand__(torch.tensor([True, True, False, False])),
    "xor": lambda m: m.own.__ixor__(torch.tensor([True, True, False, False])),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_mask_is_written_once(name):
    """As often as the model does, and what it masks is what the model masks."""

    def function(m, h, z):
        WRITES[name](m)
        return torch.where(m.own, h, z)

    model, x = Masked(function, own=CONDITION.clone()), torch.randn(5, 3)
    network = ps.trace(model, x)
    assert torch.equal(model.own, CONDITION)
    outputs = []
    for change in (lambda: None, lambda: ps.rescaling.random_rescale_(network, powers_of_two=True)):
        model.own.copy_(CONDITION)
        change()
        outputs.append(model(x))
    assert network.num_classes > 0
    assert torch.equal(*outputs)


def test_dropout_of_a_constant_draws_nothing():
    model = Masked(
        lambda m, h, z: h * functional.dropout(torch.ones(4)) + z + functional.dropout(m.own),
        own=torch.zeros(4),
    )
    state = torch.get_rng_state()
    network = ps.trace(model, torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    model.own.copy_(torch.rand(4) + 1)
    assert ps.trace(model.eval(), torch.randn(5, 3)).num_classes == network.num_classes


STARTS = {
    "zeros": lambda _, x: torch.zeros(len(x), 4),
    "new zeros of indices": lambda m, x: m.indices.new_zeros(len(x), 4, dtype=x.dtype),
    "zeros like a table": lambda m, x: torch.zeros_like(m.table[: len(x)]),
}
LEAKS = {
    "a factor": lambda m, h, z: (1 - m.leak) * h + m.leak * z,
    "lerp": lambda m, h, z: torch.lerp(h, z, m.leak),
    "a decay": lambda m, h, z: h * torch.exp(-m.leak) + z,
    "a matrix": lambda m, h, z: h @ (m.leak * torch.eye(4)) + z,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("start", STARTS)
def test_a_recurrence_by_hand_begins_at_zeros_of_any_scale(start, leak):
    """Whatever buffer they are multiplied with, or have their type of."""

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.mix, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("leak", torch.tensor(0.5))
            self.register_buffer("indices", torch.arange(4))
            self.register_buffer("table", torch.rand(9, 4))

        def forward(self, x):
            h = STARTS[start](self, x)
            for step in x.unbind(1):
                h = LEAKS[leak](self, h, (self.read(step) + self.mix(h)).relu())
            return self.out(h)

    assert len(ps.trace(Leaky(), torch.randn(5, 6, 3)).unit_classes) == 4


def test_a_running_mean_may_decide_what_is_left_out():
    model = Masked(lambda m, _, z: z.masked_fill(m.own < 1e-6, 0.0), own=torch.ones(4))
    network = ps.trace(model, torch.randn(5, 3))
    model.own.lerp_(torch.rand(4) + 1, 0.1)
    network.check_current()


def test_a_mask_may_grow_and_be_made_anew():
    model = Masked(
        lambda m, h, z: torch.where(m.own[:, : h.shape[1]], z, h), own=CONDITION[None].clone()
    )
    network = ps.trace(model, torch.randn(5, 3))
    model.own = torch.cat([model.own, model.own], 1)
    network.check_current()
    for other in (model.own[:, :3], ~model.own, model.own[0]):
        model.own = other
        with pytest.raises(RuntimeError, match="buffer 'own' has other values"):
            network.check_current()
    model.own = None
    network.check_current()


@pytest.mark.slow
def test_a_compiled_part_keeps_its_masks():
    part = Masked(lambda m, h, z: torch.where(m.own, h, z), own=CONDITION.clone())
    model = nn.Sequential(nn.Linear(3, 3), part)
    network = ps.trace(model, torch.randn(5, 3))
    model[1] = torch.compile(part)
    network.check_current()
    part.own.logical_not_()
    with pytest.raises(RuntimeError, match=r"buffer '1\.own' has other values"):
        network.check_current()


class Scaled(nn.Module):
    """Layers whose attributes the forward pass reads, and some that it does not."""

    factor, unread = 1.0, 1.0

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=2)
        self.norm, self.pool = nn.BatchNorm1d(4), nn.MaxPool1d(2)
        self.out = nn.Linear(4, 2)
        self.slope, self.act, self.sizes, self.calls = 0.1, functional.relu, [1, 2], 0
        self.dropped, self.note, self.keep = 0.5, "unused", torch.tensor([True, True, True, True])
        self.gain, self.drop_last = 1.0, False
        self.used = nn.Linear(4, 4)

    def forward(self, x):
        self.calls += 1
        h = self.pool(self.act(self.norm(self.conv(x)))).mean(-1)
        return self.finish(functional.dropout(h, self.dropped * 0) * self.keep)

    def finish(self, h):
        h = functional.leaky_relu(self.used(h), getattr(self, "slope"))  # noqa: B009 -- read by its name
        if self.drop_last:
            return h[:, :2]
        return self.out(h) * self.sizes[0] * self.factor * getattr(self, "gain")  # noqa: B009


def _class_swapped(model):
    model.norm.__class__ = nn.Identity


def _forward_swapped(model):
    model.pool.forward = lambda x: x


def _untied(model):
    model.used.weight = nn.Parameter(model.used.weight.detach().clone())


WATCHED = {
    "dilation": (
        lambda m: setattr(m.conv, "dilation", (2,)),
        r"attribute 'conv\.dilation' was \(1,\)",
    ),
    "padding mode": (
        lambda m: setattr(m.conv, "padding_mode", "circular"),
        r"'conv\.padding_mode'",
    ),
    "kernel of a pool": (
        lambda m: setattr(m.pool, "kernel_size", 3),
        r"'pool\.kernel_size' was 2 .* is 3 now",
    ),
    "number by name": (
        lambda m: setattr(m, "gain", 0.2),
        r"attribute 'gain' was 1\.0 .* is 0\.2 now",
    ),
    "flag of what is dropped": (
        lambda m: setattr(m, "drop_last", True),
        r"'drop_last' was False .* is True now",
    ),
    "what is gone": (lambda m: delattr(m, "slope"), r"'slope' was 0\.1 .* is gone"),
    "function": (lambda m: setattr(m, "act", torch.tanh), "attribute 'act'"),
    "list": (lambda m: m.sizes.__setitem__(0, 3), r"'sizes' was \[1, 2\] .* is \[3, 2\] now"),
    "mask in an attribute": (lambda m: m.keep.__setitem__(1, False), "'keep' has other values"),
    "method": (lambda m: setattr(m, "finish", lambda h: m.out(h)), "attribute 'finish'"),
    "attribute over that of the class": (
        lambda m: setattr(m, "factor", 2.0),
        r"'factor' was 1\.0 .* is 2\.0 now",
    ),
    "class": (_class_swapped, "forward of the module 'norm'"),
    "forward": (_forward_swapped, "forward of the module 'pool'"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("copied", [False, True])
def test_what_the_forward_pass_may_read_is_watched(name, copied):
    change, says = WATCHED[name]
    torch.manual_seed(0)
    model = Scaled()
    network = ps.trace(model, torch.randn(3, 1, 8))
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
    change(model)
    if copied:
        model, network = copy.deepcopy((model, network))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=says):
        ps.rescaling.random_rescale_(network)
    if not copied:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=says):
            optimizer.step()
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


GENERATED = {"relu": functional.relu}
exec("def generated(module, h):\n    return relu(h) * module.gain", GENERATED)
generated = GENERATED["generated"]


class CallsGenerated(nn.Module):
    """Calls a function of generated code, which belongs to no Python module."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(3, 4), nn.Linear(4, 2), 1.0

    def forward(self, x):
        return self.last(generated(self, self.first(x)))


def test_what_generated_code_reads_is_watched():
    assert generated.__module__ is None
    model = CallsGenerated()
    network = ps.trace(model, torch.randn(2, 3))
    model.gain = 0.5
    with pytest.raises(RuntimeError, match=r"attribute 'gain' was 1\.0 .* is 0\.5 now"):
        network.check_current()


def test_what_the_forward_pass_does_not_read_may_change():
    model = Scaled()
    network = ps.trace(model, torch.randn(3, 1, 8))
    model(torch.randn(3, 1, 8))  # counts its calls
    model.note, model.dropped, model.norm.momentum, model.epoch = "other", 0.1, 0.5, 3
    model.conv.register_forward_hook(lambda *_: None)
    network.check_current()
    model.forward = torch.compile(model.forward)
    network.check_current()


class DropPath(nn.Module):
    """Stochastic depth as timm has it."""

    def __init__(self, prob):
        super().__init__()
        self.drop_prob, self.p, self.prob = prob, prob, prob

    def forward(self, x):
        keep = 1 - max(self.drop_prob, self.p, self.prob) * self.training
        return x * (torch.rand(len(x), 1) < keep) / keep


class Counted(nn.Module):
    """A residual network that counts the passes that are made of it, on data or without."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.drop, self.path = nn.Dropout(0), DropPath(0.0)
        self.norm = nn.BatchNorm1d(4)
        self.slope, self.epoch, self.scale, self.shift = 0.1, 0, 1.0, 0
        self.gradient_checkpointing, self.dtype, self.place = (
            False,
            torch.float32,
            torch.device("cpu"),
        )
        self.stats, self.sizes, self.table = {"seen": 0}, [1, 2], {str(i): 1 for i in range(200)}
        self.passes = []

    def forward(self, x):
        object.__getattribute__(self, "tally").append(1)
        h = self.norm(self.first(x.to(self.place, self.dtype)))
        if self.epoch >= 3:
            h = h * 2
        h = functional.leaky_relu(h, self.slope) * self.sizes[0] * self.table["7"]
        self.note(len(x))
        h = self.path(self.drop(h)) + self.scale * self.branch(h).roll(self.shift, 1)
        return self.out(h)

    def note(self, count):
        stats = self.stats
        if count > 4:
            stats["seen"] += count
            self.passes.append(count)

    def branch(self, h):
        h = h.clone()
        h[:, 0] = self.sizes[1] * h[:, 1]
        if self.gradient_checkpointing:
            return checkpoint(self.inner, h, use_reentrant=False)
        return self.inner(h)


TALLY = []
Counted.tally = property(lambda _: TALLY)


def counted():
    torch.manual_seed(0)
    TALLY.clear()
    model = Counted()
    network = ps.trace(model, torch.randn(2, 3))
    TALLY.clear()
    return model, network


def _schedule(model):
    model.drop.p, model.path.drop_prob, model.path.p, model.path.prob = 0.3, 0.2, 0.2, 0.2


def _count(model):
    model.stats["seen"] = 7
    model.passes.append(3)


def _place(model):
    model.dtype, model.place = torch.float64, torch.device("meta")


@pytest.mark.parametrize(
    "change", [_schedule, _count, _place, lambda m: m.norm.__dict__.update(momentum=0.5)]
)
def test_what_no_scale_depends_on_costs_no_trace(change):
    model, network = counted()
    change(model)
    network.check_current()
    assert not TALLY


NEUTRAL = {
    "slope": lambda m: setattr(m, "slope", 0.3),
    "eps": lambda m: setattr(m.norm, "eps", 1e-3),
    "statistics": lambda m: setattr(m.norm, "track_running_stats", False),
    "epoch": lambda m: setattr(m, "epoch", 2),
    "a longer table": lambda m: m.table.update(more=2),
    "checkpoints": lambda m: setattr(m, "gradient_checkpointing", True),
    "method": lambda m: setattr(m, "branch", MethodType(lambda m, h: Counted.branch(m, h), m)),
    "forward": lambda m: setattr(m, "forward", MethodType(lambda m, x: Counted.forward(m, x), m)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_change_that_leaves_the_network_the_same_is_taken(name):
    model, network = counted()
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01)
    NEUTRAL[name](model)
    model.eval()  # the network goes on in the form in which it was traced
    before = {key: value.clone() for key, value in ps.paths.kappa(network).items()}
    traced_once = len(TALLY)
    network.check_current()
    copied = copy.deepcopy(network)
    copied.check_current()
    assert len(TALLY) == traced_once > 0
    fresh = ps.paths.kappa(ps.trace(model.train(), torch.randn(2, 3)))
    assert before.keys() == fresh.keys()
    for key, value in fresh.items():
        assert_close(before[key], value)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert ps.paths.data_dependent_kappa(network, torch.randn(5, 3)).keys() == fresh.keys()


NOT_NEUTRAL = {
    "a later epoch": (lambda m: setattr(m, "epoch", 3), "'epoch' was 0"),
    "of a branch that is zero": (lambda m: setattr(m, "scale", 2.0), "'scale' was 1.0"),
    "where values go": (lambda m: setattr(m, "shift", 1), "'shift' was 0"),
    "a size beside a write": (lambda m: m.sizes.__setitem__(1, 3), r"'sizes' was \[1, 2\]"),
    "a long table": (
        lambda m: setattr(m, "table", {**m.table, "7": 3}),
        "'table' had 200 entries .* others now",
    ),
}


@pytest.mark.parametrize("name", NOT_NEUTRAL)
@pytest.mark.sample(3)
def test_a_change_of_the_network_is_refused_whatever_its_weights_are(name):
    change, says = NOT_NEUTRAL[name]
    model, network = counted()
    nn.init.zeros_(model.inner.weight)
    nn.init.zeros_(model.inner.bias)
    network.check_current()
    change(model)
    for use in (network.check_current, lambda: ps.paths.kappa(network)):
        with pytest.raises(RuntimeError, match=f"{says}.* trace the model again"):
            use()


def test_another_long_table_with_the_same_entries_is_no_change():
    model, network = counted()
    for _ in range(3):
        model.table = dict(model.table)
        network.check_current()
    assert not TALLY


def test_eps_in_evaluation_form_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    network = ps.trace(model, torch.randn(5, 3))
    model[1].eps = 1e-3
    with pytest.raises(RuntimeError, match=r"'1\.eps'"):
        network.check_current()


def test_a_second_trace_leaves_the_model_alone():
    model, network = counted()
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append("after"))
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
        module.register_full_backward_hook(lambda *_: calls.append("back"))
    model(torch.randn(5, 3, requires_grad=True)).sum().backward()
    calls.clear()
    model.eval()
    model.inner.train()
    model.gradient_checkpointing = True
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    drawn = torch.get_rng_state(), random.getstate()
    held = [dict(vars(module)) for module in model.modules()]
    network.check_current()
    assert TALLY
    assert not calls
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert [module.training for module in model.modules()] == modes
    assert [dict(vars(module)) for module in model.modules()] == held
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[key]) for key, p in model.named_parameters())


def test_a_model_that_draws_in_a_second_trace_keeps_the_random_state():
    class Layered(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.layerdrop = nn.Linear(3, 3), nn.Linear(3, 2), 0

        def forward(self, x):
            if self.layerdrop and random.random() < self.layerdrop:
                return self.b(x)
            return self.b(self.a(x).relu())

    model = Layered()
    network = ps.trace(model, torch.randn(2, 3))
    model.layerdrop = 0.5
    before = random.getstate()
    with pytest.raises(RuntimeError, match="'layerdrop' was 0"):
        network.check_current()
    assert random.getstate() == before


def test_what_changes_at_every_step_is_named_once():
    model, network = counted()
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01)
    told = []
    for step in range(8):
        model.slope = 0.1 + 0.01 * step
        model(torch.randn(5, 3)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told += [str(one.message) for one in caught if "changes at every step" in str(one.message)]
    assert len(told) == 1
    assert told[0].startswith("the attribute 'slope' changes at every step")


def test_a_model_that_holds_its_network_is_traced_again():
    model, network = counted()
    model.network = network
    model.epoch = 1
    network.check_current()
    model.scale = 2.0
    with pytest.raises(RuntimeError, match="'scale'"):
        network.check_current()


class Cached(nn.Module):
    """Positions that are made anew for the longest input so far, as rotary embeddings keep theirs."""

    grown, times = False, 0

    def __init__(self):
        super().__init__()
        self.a, self.b, self.longest = nn.Linear(3, 4), nn.Linear(4, 2), 5

    def forward(self, x):
        if x.shape[1] > self.longest and not (self.grown or self.times):
            self._grow(x.shape[1])
        return self.b(self.a(x).relu())

    def _grow(self, length):
        self.longest = length
        self.__dict__["grown"] = True
        setattr(self, "times", self.times + 1)  # noqa: B010 -- by its name


def test_a_cache_may_grow():
    model = Cached()
    network = ps.trace(model, torch.randn(2, 4, 3))
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.1)
    model(torch.randn(2, 9, 3)).sum().backward()
    optimizer.step()
    assert model.longest == 9


class Inherits(Scaled):
    """Its methods and attributes are those of its base."""


@pytest.mark.parametrize("kind", [Scaled, Inherits])
def test_a_method_replaced_in_the_class_is_refused(monkeypatch, kind):
    network = ps.trace(kind(), torch.randn(3, 1, 8))
    monkeypatch.setattr(Scaled, "unread", 2.0)
    network.check_current()
    monkeypatch.setattr(Scaled, "finish", lambda self, h: self.out(h))
    with pytest.raises(RuntimeError, match="attribute 'finish'"):
        network.check_current()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, t):
        return self.head(torch.relu(self.between(torch.relu(self.embed(t)))))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_shared_parameter_that_is_untied_is_refused(name, copied):
    model = Tied()
    network = ps.trace(model, torch.arange(7))
    layer = getattr(model, name)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    if copied:
        model, network = copy.deepcopy((model, network))
    for use in (ps.paths.kappa, ps.rescaling.random_rescale_, ps.rescaling.balance_):
        with pytest.raises(RuntimeError, match=r"one parameter when|was replaced after tracing"):
            use(network)
    with pytest.raises(RuntimeError, match=r"one parameter when|was replaced after tracing"):
        ps.optim.PathSGD(model.parameters(), network, lr=0.1)


def test_a_module_replaced_before_the_first_use_is_refused():
    model, network = traced()
    model[1] = nn.Tanh()
    with pytest.raises(
        RuntimeError, match=r"module '1' \(ReLU\) was replaced after tracing, by Tanh"
    ):
        ps.paths.kappa(network)


def test_a_hook_on_all_modules_is_told_of():
    _, network = traced()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: given[-1])
    try:
        with pytest.warns(UserWarning, match="a forward hook on all modules was registered"):
            network.check_current()
        network.check_current()  # told once
    finally:
        handle.remove()


class Gated(nn.Module):
    """Two branches that numbers in buffers and attributes weigh."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("gate", torch.zeros(()))
        self.register_buffer("p", torch.ones(()))
        self.register_buffer("q", torch.ones(()))
        self.register_module("between", None)
        self.after = nn.Identity()
        self.factor, self.which, self.of_buffer, self.sizes = 1, "p", False, [1.0, 1.0]

    def forward(self, x):
        h = self.first(x).relu() * getattr(self, self.which) * (self.q if self.of_buffer else 1.0)
        h = h + self.gate * (self.factor * self.second(h).relu())
        h = h if self.between is None else self.between(h)
        return self.out(self.after(h * self.sizes[0]))


def _squares(module, x):
    return module.out(module.first(x).relu() ** 2)


def _wrapped_squares(model):
    model.forward = MethodType(functools.wraps(model.forward.__func__)(_squares), model)


HIDDEN = {
    "what a gate of zero hides": lambda model: setattr(model, "factor", 2),
    "a buffer of the same number": lambda model: setattr(model, "which", "q"),
    "a buffer in place of a number": lambda model: setattr(model, "of_buffer", True),
    "a tensor in place of a number": lambda model: setattr(model, "factor", torch.tensor(1.0)),
    "tensors in place of numbers": lambda model: setattr(
        model, "sizes", [torch.ones(4), torch.ones(4)]
    ),
    "a wrapper that squares": _wrapped_squares,
    "a module in place of Identity": lambda model: setattr(model, "after", nn.Softmax(1)),
    "a module in place of None": lambda model: setattr(model, "between", nn.Softmax(1)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_change_that_the_present_numbers_hide_is_refused(name):
    model = Gated()
    network = ps.trace(model, torch.zeros(2, 3))
    HIDDEN[name](model)
    with pytest.raises(RuntimeError, match="trace the model again"):
        network.check_current()


def test_a_module_in_place_of_identity_that_does_nothing_is_taken_once():
    model = Gated()
    network = ps.trace(model, torch.zeros(2, 3))
    model.after = nn.Sequential()
    network.check_current()
    model.after = nn.Softmax(1)
    with pytest.raises(
        RuntimeError, match="'after' was Sequential when the model was traced and is a Softmax now"
    ):
        network.check_current()


def test_why_a_second_trace_failed_is_told():
    model = Gated()
    network = ps.trace(model, torch.zeros(2, 3))
    model.which = "no buffer"
    with pytest.raises(
        RuntimeError, match=r"was 'p' when.*a second trace failed: AttributeError: .*no buffer"
    ):
        network.check_current()
