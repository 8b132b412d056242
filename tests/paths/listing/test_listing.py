"""Listed paths against written-out graphs made by hand, the path norm, and the model's own outputs."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import (
    BY_NAME,
    ZOO,
    NormalizedBlocks,
    RootMeanSquare,
    call,
    listed,
    of_each_kind,
    trace,
    traced,
)
from fixture_nets import NETS, load, load_rnn
from oracles.graph import enumerate_paths as oracle_paths

LONG = {
    "deep residual",
    "small resnet",
    "stacked bidirectional rnn",
    "recurrent tower",
    "paddings",
    "stacked rnn",
}
# paths are those of the evaluation form
LISTED = [case for case in ZOO if case.name not in LONG and not case.normalizes]
SAME = {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", list(NETS))
def test_the_fixtures_paths(name):
    net = load(name)
    network = ps.trace(net.model, net.x)
    paths = ps.paths.enumerate_paths(network)
    assert len(paths) == ps.paths.unroll(network).num_paths == net.net["n_paths"]
    assert bool((paths.factor == 1).all())
    # the same multiset of counting vectors as a graph written down by hand
    order = paths.reduction.flatten(net.as_tensors(list(range(len(net.net["params"])))))
    place = {int(number): i for i, number in enumerate(order.tolist())}
    expected = torch.zeros(len(paths), len(order), dtype=torch.long)
    for row, path in enumerate(oracle_paths(net.graph)):
        for _, _, number in path:
            if number >= 0:
                expected[row, place[number]] += 1
    assert sorted(paths.counts.tolist()) == sorted(expected.tolist())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(NETS))
def test_the_fixtures_outputs_are_sums_over_paths(name):
    net = load(name)
    network = ps.trace(net.model, net.x)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, net.x)
    output = paths.output(network.parameters, flow).detach()
    assert_close(
        output,
        torch.tensor(net.net["f"], dtype=torch.float64).reshape(output.shape),
        rtol=1e-10,
        atol=1e-12,
    )
    assert paths.values(network.parameters).square().sum().item() == pytest.approx(
        net.net["path_norm2"], rel=1e-10
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", of_each_kind(LISTED), ids=str)
def test_outputs_and_path_norm_are_sums_over_paths(case):
    model, network = traced(case, torch.float64)
    paths = listed(case)
    value = (paths.factor * paths.values(network.parameters)).square().sum()
    assert_close(value, ps.paths.squared_path_norm(network), **SAME)
    data = case.example(3, torch.float64)
    flow = ps.paths.activity(network, data)
    assert_close(paths.output(network.parameters, flow), flow.outputs, **SAME)
    picked = case.picked(call(model, data))
    if case.batch_dim == 0 and not isinstance(call(model, data), list):
        assert_close(flow.outputs, picked.flatten(1).detach(), **SAME)


@pytest.mark.parametrize("name", ["mlp", "rnn", "cnn 2d"])
def test_outputs_hold_for_other_weights_while_the_gates_do(name):
    """S19 Eq. (3) is linear in the path values: its gradient is the model's own."""
    case = BY_NAME[name]
    model, data = case.model(torch.float64), case.example(3, torch.float64)
    network = trace(case, model)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, data)
    names = list(network.parameters)
    mine = torch.autograd.grad(
        case.loss(paths.output(network.parameters, flow)), list(network.parameters.values())
    )
    theirs = torch.autograd.grad(case.loss(call(model, data)), list(network.parameters.values()))
    assert_close(dict(zip(names, mine, strict=True)), dict(zip(names, theirs, strict=True)), **SAME)


def test_a_gate_that_is_wrong_is_seen():
    net = load("mlp2-3-4-2b")
    network = ps.trace(net.model, net.x)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, net.x)
    assert set(flow.gates.unique().tolist()) == {0.0, 1.0}
    flow.gates[0] = 1 - flow.gates[0]
    assert (paths.output(network.parameters, flow) - flow.outputs).abs().max() > 1e-3


def test_values_do_not_change_under_rescaling():
    case = BY_NAME["stacked rnn with dropout"]
    _, network = traced(case, torch.float64)
    paths = ps.paths.enumerate_paths(network)
    before = paths.values(network.parameters).detach()
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert_close(paths.values(network.parameters).detach(), before, rtol=1e-13, atol=0)


def test_layer_and_loop_have_the_same_paths():
    model, x = load_rnn()
    network = ps.trace(model, x)
    flow = ps.paths.activity(network, x)
    paths = ps.paths.enumerate_paths(network)
    assert_close(paths.output(network.parameters, flow), model(x), **SAME)


class Loop(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.read, self.again, self.out = (
            nn.Linear(2, 3),
            nn.Linear(3, 3, bias=False),
            nn.Linear(3, 1),
        )
        self.start = start

    def forward(self, x):
        h = self.start(x)
        for t in range(x.shape[1]):
            h = (self.read(x[:, t]) + self.again(h) + h).relu()
        return self.out(h)


@pytest.mark.parametrize(
    "start",
    [
        lambda x: x.new_zeros(len(x), 3),
        lambda x: torch.zeros(len(x), 3, dtype=x.dtype),
        lambda x: torch.zeros_like(x[:, 0, :1]).expand(-1, 3),
    ],
    ids=["new_zeros", "zeros", "zeros_like"],
)
def test_no_path_starts_at_an_initial_state_of_zeros(start):
    model = Loop(start).double()
    network = ps.trace(model, torch.zeros(1, 2, 2, dtype=torch.float64))
    # at each of the two steps 3 ways in from a unit's 2 inputs and bias; 3 weights and the sum lead
    # on
    assert ps.paths.unroll(network).num_paths == 3 * 3 * 4 + 3 * 3 + 1
    rank = ps.paths.path_rank(ps.paths.path_jacobian(network))
    assert rank == ps.paths.degrees_of_freedom(network) == 9 + 9 + 4 - 3


class Again(nn.Module):
    """A weight that multiplies zeros first, as in the first step of a loop, and units then."""

    def __init__(self, first, then):
        super().__init__()
        self.read, self.again = nn.Linear(2, 3, bias=False), nn.Linear(3, 3, bias=False)
        self._first, self._then = first, then

    def forward(self, x):
        h = (self.read(x) + self._first(self.again, x.new_zeros(*x.shape[:-1], 3))).relu()
        return self._then(self.again.weight, h)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "then",
    [
        lambda w, h: nn.functional.linear(h, w),
        lambda w, h: h @ w.t(),
        lambda w, h: torch.matmul(h, w.mT),
        lambda w, h: torch.einsum("bti,oi->bto", h, w),
    ],
    ids=["linear", "@", "matmul", "einsum"],
)
@pytest.mark.parametrize(
    "first", [lambda a, zeros: a(zeros), lambda a, _: a.weight[0]], ids=["zeros", "a bias"]
)
def test_a_weight_that_stood_in_the_place_of_activations_is_a_weight_still(first, then):
    model, x = Again(first, then).double(), torch.randn(2, 3, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    paths = ps.paths.enumerate_paths(network)
    values = paths.factor * paths.values(network.parameters)
    assert_close(values.square().sum(), ps.paths.squared_path_norm(network))
    assert_close(
        paths.output(network.parameters, ps.paths.activity(network, x)), model(x).flatten(1)
    )


def test_what_enters_a_softmax_is_the_output():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.Softmax(-1)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    network = ps.trace(model, x)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
    assert_close(paths.output(network.parameters, flow).softmax(-1), model(x), **SAME)


def test_a_module_left_outside_ends_and_starts_paths():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    network = ps.trace(model, x, outside=["1"])
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
    assert len(paths) == (2 + 1) * 3 + 3 + 1
    output = paths.output(network.parameters, flow)
    expected = torch.cat([model(x), model[0](x)], 1)
    assert_close(output, expected, **SAME)


def test_running_statistics_may_be_of_any_sign():
    case = BY_NAME["batch norm of vectors"]
    _, network = traced(case, torch.float64)
    paths = ps.paths.enumerate_paths(network)
    assert bool((paths.factor < 0).any())


def test_compiled_parts_are_written_out_as_plain_python():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), torch.compile(nn.Linear(3, 1), backend=backend)
    )
    try:
        assert ps.paths.unroll(ps.trace(model, torch.zeros(1, 2))).num_paths == 10
    finally:
        torch.compiler.reset()
    assert not compiled


def test_too_many_paths_are_counted_and_refused():
    case = BY_NAME["small resnet"]
    _, network = traced(case)
    with pytest.raises(
        ps.paths.TooManyPathsError, match="6,104,366 paths, more than the limit of 1000"
    ):
        ps.paths.enumerate_paths(network, 1000)


def test_number_of_paths_of_a_long_recurrence():
    # a path enters at step s and takes T - s recurrent edges: D H^(T-s) H K of them
    rnn = nn.RNN(2, 3, nonlinearity="relu", bias=False, batch_first=True)
    network = ps.trace(rnn, torch.zeros(1, 40, 2), output=lambda r: r[0][:, -1])
    assert ps.paths.unroll(network).num_paths == sum(2 * 3 * 3**k for k in range(40))


def test_what_is_no_sum_over_paths_is_refused():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1)

        def forward(self, x):
            return self.out(self.norm(x))

    network = ps.trace(Normalised(), torch.randn(4, 3))
    with pytest.raises(ps.UntraceableError, match="batch_norm"):
        ps.paths.unroll(network)


@pytest.mark.parametrize("name", ["layer norm", "rms norm", "group norm"])
def test_statistics_of_what_enters_are_no_fixed_factors(name):
    case = BY_NAME[name]
    with pytest.raises(ps.UntraceableError, match=f"'{name.replace(' ', '_')}'.*statistic"):
        ps.paths.enumerate_paths(trace(case, case.model()))


def test_a_root_mean_square_by_hand_is_refused_too():
    model = NormalizedBlocks(RootMeanSquare)
    with pytest.raises(
        ps.UntraceableError, match=r"divides by a statistic of what enters, .* no sum over paths"
    ):
        ps.paths.unroll(ps.trace(model, torch.zeros(1, 3)))


def test_the_evaluation_form_is_written_out_whatever_the_form_of_the_trace():
    case = BY_NAME["batch norm of vectors"]
    model = case.model(torch.float64)
    found = []
    for training in (False, True):
        network = trace(case, model.train(training))
        paths = ps.paths.enumerate_paths(network)
        found.append((paths.factor, paths.values(network.parameters).detach()))
    assert_close(*found, rtol=0, atol=0)
    x = case.example(3, torch.float64)
    flow = ps.paths.activity(network, x)
    assert_close(paths.output(network.parameters, flow), model.eval()(x), **SAME)


WHOLE = torch.tensor([[1, 2, 0], [2, 2, 1], [0, 3, 1]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("add", [
    lambda h, n, p: h + nn.functional.one_hot(n[:, 0], 4)[:, :3] + p, lambda h, n, p: n - h - p,
    lambda h, n, p: h.add_(n > 1) + p, lambda h, n, p: h + n * p,
    lambda h, n, p: torch.cat([h[:, :1] + p[:1], n[:, 1:]], 1),
])  # fmt: skip
def test_whole_numbers_that_are_added_are_inputs(add):
    torch.manual_seed(0)

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out, self.gain = (
                nn.Linear(2, 3),
                nn.Linear(3, 1),
                nn.Parameter(torch.rand(3)),
            )

        def forward(self, x, n):
            return self.out(add(self.read(x).relu(), n, self.gain))

    model, data = Counted().double(), (torch.randn(3, 2, dtype=torch.float64), WHOLE)
    network = ps.trace(model, data)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, data)
    known = (paths.factor * paths.values(network.parameters)).square().sum()
    assert_close(known, ps.paths.squared_path_norm(network), **SAME)
    assert_close(paths.output(network.parameters, flow), model(*data), **SAME)


@pytest.mark.parametrize("draw", [
    lambda h: h + torch.randn(len(h), 3), lambda h: h * torch.empty(len(h), 1).bernoulli_(0.5),
    lambda h: h + torch.randn_like(h),
    lambda h: h.gather(1, torch.randint(0, 3, (len(h), 3))), lambda h: h.gather(1, h.argsort(1)),
])  # fmt: skip
@pytest.mark.sample(3)
def test_random_numbers_and_orders_of_activations_are_inputs(draw):
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.out = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.out(draw(self.read(x).relu()))

    torch.manual_seed(0)
    network = ps.trace(Drawn().double(), torch.zeros(1, 2))
    paths = ps.paths.enumerate_paths(network)
    known = (paths.factor * paths.values(network.parameters)).square().sum()
    assert_close(known, ps.paths.squared_path_norm(network), **SAME)


MOVED = {
    "reflected": lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicated": lambda x: nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "enlarged": lambda x: nn.functional.interpolate(x, scale_factor=2),
    "shuffled": lambda x: nn.functional.channel_shuffle(x, 2),
    "turned": lambda x: torch.rot90(x, 1, (2, 3)),
    "unfolded": lambda x: nn.functional.unfold(x, 2),
}


@pytest.mark.parametrize("name", MOVED)
def test_no_path_starts_at_a_border_of_zeros(name):
    class Bordered(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.out = nn.Linear(size, 2)

        def forward(self, x):
            return self.out(MOVED[name](nn.functional.pad(x, (1, 0, 1, 1))).flatten(1))

    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    size = MOVED[name](torch.zeros(1, 4, 4, 3)).numel()
    model = Bordered(size).double()
    network = ps.trace(model, x)
    paths = ps.paths.enumerate_paths(network)
    norm = (paths.factor * paths.values(network.parameters)).square().sum()
    assert_close(norm, ps.paths.squared_path_norm(network), **SAME)
    found = paths.output(network.parameters, ps.paths.activity(network, x))
    assert_close(found, model(x), **SAME)


def test_memory_that_is_not_filled_yet_has_no_values():
    """A circular border is written into empty memory, where anything may lie: here it is NaN."""
    torch.manual_seed(0)
    options = {"padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(nn.Conv2d(1, 2, 3, **options), nn.ReLU(), nn.Conv2d(2, 1, 3, **options))
    model = model.double()
    x = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        network = ps.trace(model, x)
        paths = ps.paths.enumerate_paths(network)
        found = paths.output(network.parameters, ps.paths.activity(network, x))
    finally:
        torch.use_deterministic_algorithms(before)
    assert_close(found, model(x).flatten(1), **SAME)


def test_data_of_another_form_are_refused():
    network = ps.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    for wrong in (
        torch.zeros(2, 4),
        (torch.zeros(2, 3),),
        torch.zeros(3),
        torch.zeros(2, 3, dtype=torch.long),
    ):
        with pytest.raises(ValueError, match="the data"):
            ps.paths.activity(network, wrong)


def test_a_carried_state_must_be_zero():
    rnn = nn.RNN(2, 3, nonlinearity="relu")
    network = ps.trace(rnn, (torch.zeros(4, 5, 2), torch.zeros(1, 5, 3)))
    zero = (torch.randn(4, 5, 2), torch.zeros(1, 5, 3))
    assert ps.paths.activity(network, zero).outputs.shape == (5, 12)
    with pytest.raises(ValueError, match="carried over"):
        ps.paths.activity(network, (torch.randn(4, 5, 2), torch.ones(1, 5, 3)))


def test_model_and_random_state_stay_as_they_are():
    case = BY_NAME["batch norm"]
    model = case.model().train()
    network = trace(case, model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    ps.paths.activity(network, case.example(2))
    ps.paths.enumerate_paths(network)
    ps.paths.dead_units(network, case.example(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_default_dtype() is dtype
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Constants(nn.Module):
    """A number added, a slope that is a parameter but no edge, a maximum, and statistics without gain and shift."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.slope = nn.Linear(3, 2), nn.Linear(2, 2), nn.PReLU()
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, x):
        h = self.slope(self.a(x))
        h = torch.maximum(h, self.b(h))
        return {"out": self.norm(self.b(h)) * 0.5 + 0.1, "sum": [h.sum(-1)]}


def test_constants_are_fixed_edges_from_the_bias_node():
    torch.manual_seed(0)
    model = Constants().double()
    x = torch.randn(6, 3, dtype=torch.float64)
    model(x)
    model.eval()
    network = ps.trace(model, x)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
    assert_close(paths.output(network.parameters, flow), flow.outputs, **SAME)
    assert bool((paths.weights == -1).all(1).any())  # a path without a weight
    assert_close(
        (paths.factor * paths.values(network.parameters)).square().sum(),
        ps.paths.squared_path_norm(network),
    )
    assert flow.outputs.std() > 0.1


class Reading(nn.Module):
    """A network that reads its input twice: as it is, and after a function of the input alone."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.out, self.encoder = (nn.Linear(3, 3) for _ in range(4))
        self.wide = nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 1]]))
        self.register_buffer("zeros", torch.zeros(1, 3))
        self.reading = forward

    def forward(self, x):
        return self.reading(self, x)

    def hidden(self, x):
        return self.a(x).relu()

    def filled(self, x, start):
        row = start(len(x), 4)
        row[:, :3] = x
        return self.wide(row.relu())

    def doubled(self, x):
        x = x.clone()
        h = self.hidden(x)
        x.mul_(2)
        return self.out(h) + self.b(x)

    def gained(self, x):
        h = x.new_zeros(len(x), 3)
        for _ in range(3):
            h = (self.b(x) + self.a.bias * h).relu()
        return self.out(h)

    def remembering(self, x, start, times=torch.mul):
        h = start.expand(len(x), 3)
        for _ in range(2):
            h = (times(x.sigmoid(), h) + self.a(x) - x * h).relu()
        return self.out(h)

    def gated_in_place(self, x):
        h = self.hidden(x)
        h *= x.sigmoid()
        h[:, :2].mul_(x[:, 1:])
        return self.out(h.div_(1 + x.abs()))

    def returned_to_the_input(self, x):
        x = x.clone()
        x[:, :1] = self.hidden(x)[:, :1]
        return self.b(x)


READINGS = {
    "masked weights": lambda m, x: m.out(
        nn.functional.linear(x, m.a.weight * m.mask, m.a.bias).relu()
    ),
    "a triangle of weights": lambda m, x: m.out(nn.functional.linear(x, m.a.weight.tril()).relu()),
    "a gate of the input": lambda m, x: m.out(m.hidden(x) * x.sigmoid()),
    "the centred input": lambda m, x: m.out(m.hidden(x)) + m.b(x - x.mean(1, keepdim=True)),
    "the squared input": lambda m, x: m.out(m.hidden(x)) + m.b(x * x),
    "the normalized input": lambda m, x: (
        m.out(m.hidden(x)) + m.b(nn.functional.normalize(x, dim=1))
    ),
    "a module outside": lambda m, x: m.out(m.hidden(x)) + m.b(m.encoder(x)),
    "the input returned": lambda m, x: (m.out(m.hidden(x)), x, x[:, :1]),
    "a row of zeros, filled": lambda m, x: m.filled(x, x.new_zeros),
    "a row of ones, filled": lambda m, x: m.filled(x, x.new_ones),
    "a padded input": lambda m, x: m.wide(nn.functional.pad(x, [0, 1])) + m.b(x)[:, :2],
    "a constant beside the input": lambda m, x: m.wide(
        torch.cat([x, x.new_full((len(x), 1), 3.0)], 1)
    ),
    "a choice with a learned value": lambda m, x: m.out(
        torch.where(x > 0, m.b(x), m.a.bias).relu()
    ),
    "a learned value masked": lambda m, x: m.out(
        (m.b(x) + m.a.bias.expand(len(x), 3).masked_fill(x > 0, 0.0)).relu()
    ),
    "learned values in an order": lambda m, x: m.out(
        (m.b(x) + m.a.bias.expand(len(x), 3).gather(1, x.argsort(1))).relu()
    ),
    "learned rows": lambda m, x: m.out(
        (m.b(x) + m.a.weight.index_select(0, (x[:, 0] > 0).long())).relu()
    ),
    "a gain of zeros, then of units": Reading.gained,
    "a gate of the input times a state of zeros": lambda m, x: m.remembering(x, x.new_zeros(1, 3)),
    "the same, the other way": lambda m, x: m.remembering(
        x, x.new_zeros(1, 3), lambda gate, h: h * gate
    ),
    "a gate of the input times a buffer of zeros": lambda m, x: m.remembering(x, m.zeros),
    "a gate of the input in place": Reading.gated_in_place,
    "a cut that no output reads": lambda m, x: (m.b(x).sigmoid(), m.out(m.hidden(x)))[1],
    "an input doubled in place": Reading.doubled,
    "an activation written to the input": Reading.returned_to_the_input,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("reading", READINGS)
def test_functions_of_inputs_and_masked_weights(reading):
    """The same sums as the path norm and the model itself have, and as many directions as weights and classes say."""
    torch.manual_seed(0)
    model, x = Reading(READINGS[reading]).double(), torch.randn(6, 3, dtype=torch.float64)
    network = ps.trace(model, x, outside=["encoder"])
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
    assert_close(
        (paths.factor * paths.values(network.parameters)).square().sum(),
        ps.paths.squared_path_norm(network),
        **SAME,
    )
    returned = model(x)
    expected = returned[0] if isinstance(returned, tuple) else returned
    assert_close(paths.output(network.parameters, flow), expected, **SAME)
    assert bool((paths.factor != 0).all())
    rank = ps.paths.path_rank(ps.paths.path_jacobian(network, paths))
    assert rank == ps.paths.degrees_of_freedom(network)
    basis = ps.paths.express(network, ps.paths.skeleton(network), paths)
    assert torch.equal(basis.exponents @ basis.counts, paths.counts)


def test_a_cut_that_the_chosen_output_does_not_read_is_passed_over():
    model = Reading(lambda m, x: (m.out(m.hidden(x)), m.b(x).sigmoid())).double()
    network = ps.trace(
        model, torch.zeros(2, 3, dtype=torch.float64), output=lambda result: result[0]
    )
    assert ps.paths.unroll(network).num_paths == 3 * 3 * 4 + 3


class GatedCell(nn.Module):
    """A gated recurrent unit that remembers a ReLU, written by hand."""

    def __init__(self, hidden):
        super().__init__()
        self.gates, self.read = nn.Linear(2 + hidden, 2 * hidden), nn.Linear(2 + hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.out.in_features)
        for _ in range(2):
            keep, reset = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
            h = keep * h + (1 - keep) * self.read(torch.cat([x, reset * h], 1)).relu()
        return self.out(h)


@pytest.mark.parametrize("hidden", [1, 2])
def test_a_gated_cell_starts_at_nothing(hidden):
    torch.manual_seed(0)
    network = ps.trace(GatedCell(hidden).double(), torch.randn(3, 2, dtype=torch.float64))
    paths = ps.paths.enumerate_paths(network)
    norm = (paths.factor * paths.values(network.parameters)).square().sum()
    assert_close(norm, ps.paths.squared_path_norm(network), **SAME)
    rank = ps.paths.path_rank(ps.paths.path_jacobian(network, paths))
    assert (
        rank
        == ps.paths.degrees_of_freedom(network)
        == 3 * hidden * (hidden + 3) + 1 + hidden - hidden
    )
    basis = ps.paths.express(network, ps.paths.skeleton(network), paths)
    assert torch.equal(basis.exponents @ basis.counts, paths.counts)


def test_weights_made_by_a_relu_are_refused():
    def forward(model, x):  # signs that are kept, as in Dale's law
        h = torch.zeros_like(x)
        for _ in range(2):
            h = (model.a(x) + h @ model.b.weight.relu()).relu()
        return model.out(h)

    with pytest.raises(ps.UntraceableError, match="a weight made by relu"):
        ps.paths.unroll(ps.trace(Reading(forward).double(), torch.zeros(2, 3, dtype=torch.float64)))


def test_a_language_model_in_evaluation_form():
    torch.manual_seed(0)
    model = ps.nn.LanguageModel(
        5, embedding=3, hidden=3, layers=2, weight_drop=0.2, embedding_dropout=0.2
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.7)
    symbols = torch.randint(5, (4, 2))
    network = ps.trace(model, symbols)
    paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, symbols)
    assert_close(paths.output(network.parameters, flow), flow.outputs, **SAME)
    assert_close(flow.outputs, model.eval()(symbols)[0].flatten(1), **SAME)
