"""Elements used twice, constants written to, states handed in: cases in which a trace could be silently wrong."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps


class Model(nn.Module):
    """A module from parts and a forward function."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = forward

    def forward(self, *inputs):
        return self._function(self, *inputs)


def parameter(*shape):
    return nn.Parameter(torch.rand(*shape, dtype=torch.float64) + 0.1)


def linear(a, b, **options):
    return nn.Linear(a, b, dtype=torch.float64, **options)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def out(model, inputs):
    result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return result[0] if isinstance(result, tuple) else result


def assert_rescaling_keeps_the_function(model, inputs, **options):
    network = ps.trace(model, inputs, **options)
    before = out(model, inputs)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out(model, inputs), before, rtol=1e-9, atol=1e-9)
    return network


REPEATS = {
    "repeated weight rows": lambda m, x: m.o(
        functional.linear(x, m.p.reshape(3, 3).repeat(2, 1)).relu()
    ),
    "expanded weight rows": lambda m, x: m.o(functional.linear(x, m.p[:3].expand(6, 3)).relu()),
    "repeated bias": lambda m, x: m.o((m.i(x) + m.p[:3].repeat(2)).relu()),
    "interleaved bias": lambda m, x: m.o((m.i(x) + m.p[:3].repeat_interleave(2)).relu()),
    "one gain for all": lambda m, x: m.o((m.i(x) * m.p[:1].expand(6)).relu()),
    "toeplitz weight": lambda m, x: m.o(
        functional.linear(x, m.p[(torch.arange(6)[:, None] - torch.arange(3)) % 9]).relu()
    ),
}


@pytest.mark.parametrize("name", REPEATS)
def test_elements_that_occur_twice_in_one_view_are_tied(name):
    torch.manual_seed(0)
    model = Model(REPEATS[name], p=parameter(9), i=linear(3, 6), o=linear(6, 2))
    assert_rescaling_keeps_the_function(model, normal(5, 3))


def test_a_table_of_positions_is_seen_whole_in_time_major_order():
    model = Model(
        lambda m, x: m.o((m.i(x) + m.pos[: x.size(0)].unsqueeze(1)).relu().mean(0)),
        i=linear(3, 4), o=linear(4, 2), pos=parameter(7, 4),
    )  # fmt: skip
    network = assert_rescaling_keeps_the_function(model, normal(7, 5, 3))
    assert bool((ps.paths.kappa(network)["pos"] > 0).all())


def test_positions_looked_up_by_number_are_biases():
    model = Model(
        lambda m, x: m.o((m.i(x) + m.pos(torch.arange(x.shape[1]))).relu()),
        i=linear(3, 4), o=linear(4, 2), pos=nn.Embedding(9, 4, dtype=torch.float64),
    )  # fmt: skip
    network = assert_rescaling_keeps_the_function(model, normal(5, 7, 3))
    kappa = ps.paths.kappa(network)["pos.weight"]
    assert bool((kappa[:7] > 0).all())
    assert not bool(kappa[7:].any())


def test_a_parameter_that_a_module_left_outside_owns_too_stays_outside():
    model = Model(
        lambda m, t: m.d(m.h(m.e(t)).relu()),
        e=nn.Embedding(5, 4, dtype=torch.float64), h=linear(4, 4), d=linear(4, 5),
    )  # fmt: skip
    model.d.weight = model.e.weight
    network = assert_rescaling_keeps_the_function(model, torch.randint(5, (3, 2)), outside=["e"])
    assert "e.weight" in network.outside


def test_writing_into_a_new_tensor_is_followed_or_refused():
    def followed(m, x):
        padded = x.new_zeros(x.shape[0], 5, 4)
        padded[:, 1:] = m.i(x).relu()
        return m.o(padded.flatten(1))

    def through_a_view(m, x):
        padded = x.new_zeros(x.shape[0], 5, 4)
        padded[:, 1:].copy_(m.i(x).relu())
        return m.o(padded.flatten(1))

    def through_an_unknown_view(m, x):
        padded = x.new_zeros(x.shape[0], 5, 4)
        padded.as_strided((x.shape[0], 4, 4), (20, 4, 1), 4).copy_(m.i(x))
        return m.o(padded.flatten(1))

    def joined_into(m, x):
        h, target = m.i(x[:, 0]), torch.zeros(x.shape[0], 20)
        torch.cat([h] * 5, 1, out=target)
        return m.o(target)

    parts = {"i": linear(3, 4), "o": linear(20, 2)}
    x = normal(6, 4, 3)
    for function in (followed, through_a_view):
        assert_rescaling_keeps_the_function(Model(function, **parts), x)
    with pytest.raises(ps.UntraceableError, match=r"'copy_'.* writes into a constant"):
        ps.trace(Model(through_an_unknown_view, **parts), x)
    with pytest.raises(ps.UntraceableError, match="out="):
        ps.trace(Model(joined_into, **parts), x)


def loop(m, x, h=None):
    h = torch.zeros(x.shape[0], 4, dtype=x.dtype).to(x.device) if h is None else h
    for t in range(x.shape[1]):
        h = torch.relu(m.i(x[:, t]) + m.r(h))
    return m.o(h), h


def test_a_state_handed_in_scales_with_its_units():
    model = Model(loop, i=linear(3, 4), r=linear(4, 4), o=linear(4, 2))
    x, h = normal(5, 6, 3), torch.zeros(5, 4, dtype=torch.float64)
    # an input like any other
    assert ps.trace(model, (x, h), output=lambda r: r[0]).num_classes == 0
    network = assert_rescaling_keeps_the_function(model, (x, h), output=lambda r: r[0], states=[1])
    assert network.num_classes == 4
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network),
        ps.paths.squared_path_norm(ps.trace(model, x, output=lambda r: r[0])),
    )


@dataclass
class Options:
    """What a model may have as an attribute: one of its fields gets a value later, or never."""

    size: int = 4
    found: torch.Tensor = field(init=False)


class Stream(nn.Module):
    """One step a call; what the last one left is in an attribute or in a buffer."""

    def __init__(self, place):
        super().__init__()
        self.i, self.r, self.o = linear(3, 4), linear(4, 4), linear(4, 2)
        self.rnn = nn.RNN(3, 4, nonlinearity="relu", batch_first=True, dtype=torch.float64)
        self.place, self.h, self.options = place, None, Options()
        if place == "buffer":
            del self.h
            self.register_buffer("h", torch.zeros(5, 4, dtype=torch.float64))

    def forward(self, x):
        if self.place == "nn.RNN":
            y, h = self.rnn(x[:, None], self.h)
            self.h = h.detach()
            return self.o(y[:, -1])
        h = x.new_zeros(len(x), 4) if self.h is None else self.h
        h = (self.i(x) + self.r(h)).relu()
        self.h, self.seen = h.detach(), 2 * h.detach()  # nothing reads what is seen
        return self.o(h)


@pytest.mark.parametrize(
    ("place", "called", "classes"),
    [("attribute", False, 0), ("attribute", True, 0), ("buffer", False, 0), ("nn.RNN", False, 4)],
)
@pytest.mark.filterwarnings("ignore:the network has no unit class")
def test_what_the_next_call_reads_has_the_scale_one_but_the_state_of_a_layer(
    place, called, classes
):
    """It was free, and the second call of a rescaled model returned something else than before."""
    torch.manual_seed(0)
    model, steps = Stream(place), normal(4, 5, 3)
    if called:
        model(steps[3])
    network = ps.trace(model, steps[0])
    assert network.num_classes == classes
    before = copy.deepcopy(model)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
    for x in steps:
        torch.testing.assert_close(model(x), before(x), rtol=1e-9, atol=1e-9)


def test_a_learned_start_of_a_stacked_rnn_is_a_bias_of_its_first_step():
    model = Model(
        lambda m, x: m.o(m.rnn(x, m.h0.expand(-1, x.shape[0], -1).contiguous())[0][:, -1]),
        rnn=nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True, dtype=torch.float64),
        h0=parameter(2, 1, 4), o=linear(4, 2),
    )  # fmt: skip
    network = assert_rescaling_keeps_the_function(model, normal(5, 6, 3))
    assert network.num_classes == 8
    assert bool((ps.paths.kappa(network)["h0"] > 0).all())


def test_a_gain_of_the_state_leaves_its_units_free():
    def independent(m, x):
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = torch.relu(m.i(x[:, t]) + m.u * h)
        return m.o(h)

    model = Model(independent, i=linear(3, 4), u=parameter(4), o=linear(4, 2))
    assert assert_rescaling_keeps_the_function(model, normal(5, 6, 3)).num_classes == 4


@pytest.mark.parametrize("prepare", [
    lambda x: x / 255, lambda x: (x - 0.1) / 0.3, lambda x: -x, lambda x: x.clamp(-1, 1), lambda x: x.float().double(),
])  # fmt: skip
def test_a_function_of_the_inputs_alone_counts_as_the_input(prepare):
    model = Model(lambda m, x: m.l(prepare(x)), l=linear(3, 2))
    plain = ps.paths.squared_path_norm(ps.trace(model.l, normal(4, 3)))
    torch.testing.assert_close(ps.paths.squared_path_norm(ps.trace(model, normal(4, 3))), plain)


def test_channels_shuffled_by_views_are_followed():
    def shuffled(m, x):
        h = m.c(x).relu()
        h = h.view(h.shape[0], 2, 2, 5, 5).transpose(1, 2).contiguous().view(h.shape[0], 4, 5, 5)
        return m.d(h).mean((2, 3))

    model = Model(
        shuffled,
        c=nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64),
        d=nn.Conv2d(4, 2, 1, dtype=torch.float64),
    )
    assert assert_rescaling_keeps_the_function(model, normal(2, 3, 5, 5)).num_classes == 4


def test_replaced_parameters_are_noticed():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    network = ps.trace(model, torch.zeros(1, 3))
    model[2] = nn.Linear(4, 2)
    factors = torch.ones(network.num_classes)
    for use in (
        ps.paths.kappa,
        ps.paths.squared_path_norm,
        lambda n: ps.rescaling.rescale_(n, factors),
    ):
        with pytest.raises(RuntimeError, match="replaced after tracing"):
            use(network)


def test_a_parameter_whose_elements_lie_in_the_same_memory_is_refused():
    model = nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 3))
    model[2].weight = nn.Parameter(torch.rand(1, 4).expand(3, 4))
    with pytest.raises(ValueError, match=r"'2.weight' has one element at several places.*clone"):
        ps.trace(model, torch.zeros(1, 4))


def test_parameters_in_the_same_memory_are_refused():
    """As an autoencoder is tied by data, where to rescale one parameter changes the other, and the function."""
    model = nn.Sequential(linear(3, 5), nn.ReLU(), linear(5, 3))
    model[2].weight.data = model[0].weight.data.t()
    with pytest.raises(
        ValueError, match=r"parameters '0.weight' and '2.weight' lie in the same memory"
    ):
        ps.trace(model, normal(2, 3))
    ps.trace(
        nn.Sequential(model, linear(3, 4), nn.ReLU(), linear(4, 1)), normal(2, 3), outside=["0"]
    )
    model[2].weight = nn.Parameter(model[2].weight.data.clone())
    ps.trace(model, normal(2, 3))


class Beside(nn.Module):
    """A network with a tensor that it keeps, and may read."""

    def __init__(self, keep, reads=True):
        super().__init__()
        self.read, self.out, self.reads = linear(3, 4), linear(4, 2), reads
        keep(self)

    def forward(self, x):
        return self.out(self.read(x).relu()) + (x @ self.own if self.reads else 0.0)


READ = {
    "buffer": lambda m: m.register_buffer("own", m.read.weight.data[:2].t()),
    "attribute": lambda m: setattr(m, "own", m.out.weight.detach()[:, 1:].t()),
    "by numpy": lambda m: setattr(
        m, "own", torch.from_numpy(m.out.weight.detach().numpy()).t()[:3]
    ),
    "computed": lambda m: setattr(m, "own", m.read.weight[:2].t() + 0),
    "computed, of another form": lambda m: setattr(m, "own", m.out.weight.sum(0)[1:, None]),
}
KEPT = {
    **READ,
    "in a list": lambda m: setattr(m, "kept", [m.out.bias.data]),
    "bytes": lambda m: setattr(m, "kept", m.read.bias.data.view(torch.uint8)[-3:]),
    "by name": lambda m: setattr(m, "kept", m.state_dict()),
    "complex numbers of it": lambda m: setattr(
        m, "kept", torch.view_as_complex(m.out.weight.view(2, 2, 2))
    ),
}


class SameWeight(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.data)


PARAMETERS = {
    "some elements": lambda m: setattr(m.out, "bias", nn.Parameter(m.read.weight.data[1, 1:])),
    "one outside": lambda m: setattr(m, "teacher", SameWeight(m.read)),
}


@pytest.mark.parametrize("how", PARAMETERS)
def test_parameters_that_share_some_memory_are_refused(how):
    model = Beside(PARAMETERS[how], reads=False)
    outside = ["teacher"] if how == "one outside" else []
    with pytest.raises(ValueError, match=r"parameters .* lie in the same memory"):
        ps.trace(model, normal(2, 3), outside=outside)


@pytest.mark.parametrize("how", READ)
def test_what_lies_in_the_memory_of_a_parameter_is_refused_where_it_is_read(how):
    with pytest.raises(
        ps.UntraceableError, match=r"made of one before or lies in its memory.*in forward"
    ):
        ps.trace(Beside(READ[how]), normal(2, 3))


@pytest.mark.parametrize("how", KEPT)
def test_what_lies_there_and_is_not_read_does_no_harm(how):
    assert_rescaling_keeps_the_function(Beside(KEPT[how], reads=False), normal(2, 3))


def test_tensors_that_lie_beside_each_other_in_one_memory_are_not():
    """Columns of one matrix have no element in common, though what they reach from and to overlaps."""

    def keep(model):
        whole = torch.rand(4, 8, dtype=torch.float64)
        model.read.weight = nn.Parameter(whole[:, :3])
        model.read.bias = nn.Parameter(whole[:, 3])
        model.register_buffer("own", whole.t()[5:, :2])
        model.seen, model.same = (
            [whole[:, 7], model.own, model.own[0]],
            [model.read.weight, whole[:, 4]],
        )

    assert ps.trace(Beside(keep, reads=False), normal(2, 3)).num_classes == 4


def test_wrong_uses_say_what_is_wrong():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match=r"5 features enter a weight for 3|1 features"):
        ps.trace(model, torch.randn(5, 1))
    with pytest.raises(ValueError, match="batch_dim must be"):
        ps.trace(model, torch.randn(5, 3), batch_dim=-1)
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        ps.trace(lambda x: x, torch.randn(5, 3))
    with pytest.raises(ValueError, match="no parameters"):
        ps.trace(nn.ReLU(), torch.randn(5, 3))


def test_kappa_of_a_very_deep_network_does_not_vanish():
    layers = [layer for _ in range(110) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 2))
    kappa = ps.paths.kappa(ps.trace(model, torch.zeros(1, 32)))
    assert all(bool((k > 0).all()) for k in kappa.values())


@pytest.mark.parametrize("break_", [
    lambda m: m[2].weight.data[:, 0].zero_(), lambda m: m[2].weight.data.zero_(), lambda m: m[0].weight.data[1].zero_(),
])  # fmt: skip
def test_units_without_paths_do_not_break_the_invariance(break_):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    break_(model)
    report = ps.rescaling.check_invariance(
        model, torch.randn(8, 3), lambda o: (o - 1).square().mean(),
        lambda m, network: ps.optim.PathSGD(m.parameters(), network, lr=0.01), steps=30,
    )  # fmt: skip
    assert report.passed
