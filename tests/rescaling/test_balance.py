"""The balanced member of a rescaling class: the least path mass in every class, and the function it keeps."""

import copy
import math
import warnings
from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, Recurrent, Skip, call, mlp, of_each_kind, trace, traced
from oracles.graph import layered, recurrent
from pathspace.paths.kernel.node_mass import node_mass


def spread(network):
    mass = node_mass(network)
    live = (mass.into > 0) & (mass.out_of > 0)
    if mass.even is not None:
        ratio = mass.into / mass.nodes / mass.even
    else:
        ratio = mass.into / (mass.nodes if mass.normalized else mass.out_of)
    return ratio.log()[live].abs()


# --- by brute force: masses written out from an explicit graph ------------------------------------


def masses(graph, weights):
    """Path mass into and out of every node, straight from gamma_v^2 = sum of gamma_u^2 w_uv^2, half of it at units."""
    entering, leaving = defaultdict(list), defaultdict(list)
    for source, target, parameter in graph.edges:
        square = weights[parameter] ** 2 / (1 if target in graph.outputs else 2)
        entering[target].append((source, square))
        leaving[source].append((target, square))

    @cache
    def into(node):
        return 1.0 if node in graph.inputs else math.fsum(into(u) * q for u, q in entering[node])

    @cache
    def out_of(node):
        return (node in graph.outputs) + math.fsum(q * out_of(v) for v, q in leaving[node])

    return into, out_of


def recurrent_case(model):
    """A stack of two layers, read at its last step: (graph, weights by key, nodes of every unit)."""
    graph, index = recurrent(2, [3, 3], 2, 3)
    rnn, values = model.rnn, {}
    for key in index:
        kind, *place = key
        if kind == "bias":  # two edges from the bias node
            layer, row = place
            biases = [getattr(rnn, f"bias_{x}h_l{layer}")[row].item() for x in "ih"]
            values[key] = math.hypot(*biases)
        elif kind in ("in", "rec"):
            layer, row, column = place
            values[key] = getattr(rnn, f"weight_{'i' if kind == 'in' else 'h'}h_l{layer}")[
                row, column
            ].item()
        else:
            values[key] = (model.out.weight if kind == "out" else model.out.bias)[
                tuple(place)
            ].item()
    return graph, index, values, lambda key: key[1:3] if key[0] == "in" else None


def skip_case(model):
    """Two hidden layers; the outputs read the input and both of them."""
    graph, index = layered([3, 4, 5, 2], skips=True)
    linear = {(0, 1): model.first, (1, 2): model.second, (2, 3): model.out}
    linear |= {(0, 3): model.from_input, (1, 3): model.from_first}
    values = {}
    for key in index:
        kind, *place = key
        if kind == "bias":
            values[key] = linear[place[0] - 1, place[0]].bias[place[1]].item()
        else:
            start, to, row, column = place
            there = linear.get((start, to))  # layer 2 does not read the input
            values[key] = 0.0 if there is None else there.weight[row, column].item()
    return (
        graph,
        index,
        values,
        lambda key: (key[2], key[3]) if key[0] == "weight" and key[2] < 3 else None,
    )


CASES = {
    "stacked rnn": (
        lambda: Recurrent(num_layers=2, batch_first=True),
        (4, 3, 2),
        recurrent_case,
        6,
    ),
    "skip": (Skip, (4, 3), skip_case, 9),
}


def brute_force(model, describe):
    """Mass into and out of every unit class of the model, by name of the unit."""
    graph, index, values, unit = describe(model)
    weights = [0.0] * len(index)
    for key, i in index.items():
        weights[i] = values[key]
    into, out_of = masses(graph, weights)
    nodes = defaultdict(set)
    for _, target, parameter in graph.edges:
        key = next(k for k, i in index.items() if i == parameter)
        if unit(key) is not None:
            nodes[unit(key)].add(target)
    return {
        name: (math.fsum(map(into, group)), math.fsum(map(out_of, group)))
        for name, group in nodes.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_no_other_member_has_less_path_mass_in_any_class(name):
    build, shape, describe, classes = CASES[name]
    torch.manual_seed(1)
    model = build().double()
    example = torch.zeros(*shape, dtype=torch.float64)
    start = sum(sum(pair) for pair in brute_force(model, describe).values())
    ps.rescaling.balance_(ps.trace(model, example))
    best = brute_force(model, describe)
    assert len(best) == classes
    for into, out_of in best.values():
        assert into == pytest.approx(out_of, rel=1e-9)
    assert sum(sum(pair) for pair in best.values()) < 0.999 * start
    generator = torch.Generator().manual_seed(0)
    for reach in (1.01, 1.5, 30.0):
        for _ in range(7):
            other = copy.deepcopy(model)
            ps.rescaling.random_rescale_(
                ps.trace(other, example), 1 / reach, reach, generator=generator
            )
            masses_there = brute_force(other, describe)
            assert all(sum(masses_there[unit]) > sum(best[unit]) for unit in best)


@pytest.mark.parametrize("name", ["skip", "tied characters", "bidirectional rnn"])
def test_all_masses_are_least_in_other_networks_too(name):
    case = BY_NAME[name]
    _model, network = traced(case, torch.float64)
    ps.rescaling.balance_(network)
    best = node_mass(network)
    torch.testing.assert_close(best.into, best.out_of)
    ps.rescaling.random_rescale_(network, 0.5, 2.0, generator=torch.Generator().manual_seed(0))
    other = node_mass(network)
    assert (other.into + other.out_of >= (best.into + best.out_of) * (1 - 1e-12)).all()
    assert (other.into + other.out_of).sum() > 1.01 * (best.into + best.out_of).sum()


class ZeroEnds(nn.Module):
    """Residual blocks whose second layers start at zero, as the readout does: H. Zhang et al., "Fixup", 2019."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4, bias=False), nn.Linear(4, 2)
        self.up = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(5, 4, bias=False) for _ in range(3))
        for layer in (*self.down, self.last):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        h = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(torch.relu(up(torch.relu(h))))
        return self.last(torch.relu(h))


def test_a_unit_in_front_of_zeros_has_the_rows_of_he_start():
    """Nothing leaves a unit, however often the skip is read: its row has the sum of squares 2, as half of it counts."""
    torch.manual_seed(0)
    model = ZeroEnds().double()
    network = ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0))
    ps.rescaling.balance_(network)
    for layer in (model.first, *model.up):
        squares = layer.weight.detach().square().sum(1)
        assert_close(squares, torch.full_like(squares, 2.0), rtol=1e-12, atol=0.0)


def test_a_channel_in_front_of_zeros_has_the_filters_of_he_start():
    """No gain can be made even where nothing leaves: there, too, the squares of a filter add up to 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.ReLU(), nn.Conv2d(3, 1, 2)).double()
    nn.init.zeros_(model[2].weight)
    network = ps.trace(model, torch.zeros(1, 2, 4, 4, dtype=torch.float64))
    ps.rescaling.balance_(network)
    squares = model[0].weight.detach().square().sum((1, 2, 3))
    assert_close(squares, torch.full_like(squares, 2.0), rtol=1e-12, atol=0.0)


def test_a_product_of_units_belongs_to_no_class():
    """y = o (a x)(b x) with half of what enters each unit: gamma_in is a^2 / 2, and gamma_out that of the other."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.o = (nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x):
            return self.o(self.a(x).relu() * self.b(x))

    model = Gated().double()
    for p, value in zip(model.parameters(), (2.0, 3.0, 5.0), strict=True):
        nn.init.constant_(p, value)
    ps.rescaling.balance_(ps.trace(model, torch.zeros(1, 1, dtype=torch.float64)))
    into_a, into_b = 2.0, 4.5
    out_of_a, out_of_b = 25.0 * into_b, 25.0 * into_a
    s_a, s_b = (out_of_a / into_a) ** 0.25, (out_of_b / into_b) ** 0.25
    found = [p.item() for p in model.parameters()]
    assert found == pytest.approx([2.0 * s_a, 3.0 * s_b, 5.0 / (s_a * s_b)], rel=1e-12)


class Filters(nn.Module):
    """Two convolutions, the second with a way around it, and a linear layer over all positions."""

    def __init__(self, around):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 3, padding=1)
        self.out, self.around = nn.Linear(4 * 6, 3), around

    def forward(self, x):
        h = torch.relu(self.first(x))
        branch = torch.relu(self.second(h))
        return self.out((h + branch if self.around else branch).flatten(1))


def mass_of(model, growth=1.0):
    """Path mass of the two layers' nodes ``[4, 6]`` and of the mean output, where all squares grow by a factor."""

    def square(parameter):
        return growth * parameter.detach().square()

    def convolve(x, layer, padding):
        return functional.conv1d(x, square(layer.weight), square(layer.bias), padding=padding)

    first = convolve(torch.ones(2, 8, dtype=torch.float64), model.first, 0).requires_grad_()
    second = convolve(first, model.second, 1)
    second.retain_grad()
    read = first + second if model.around else second
    out = functional.linear(read.flatten(), square(model.out.weight), square(model.out.bias)).mean()
    out.backward()
    return first, second, out


class RecurrentFilters(Filters):
    """The second convolution read three times, what enters added each time."""

    def forward(self, x):
        entering = self.first(x)
        h = torch.relu(entering)
        for _ in range(3):
            h = torch.relu(entering + self.second(h))
        return self.out(h.flatten(1))


def unrolled_mass_of(model, growth=1.0):
    """Path mass of all nodes of the four steps ``[4, 4, 6]``, that out of them, and the mean output's."""
    layers = model.first, model.second, model.out
    first, second, out = (growth * layer.weight.detach().square() for layer in layers)
    biases = [growth * layer.bias.detach().square() for layer in layers]
    entering = functional.conv1d(torch.ones(2, 8, dtype=torch.float64), first, biases[0])
    steps = [entering.requires_grad_()]
    for _ in range(3):
        steps.append(steps[0] + functional.conv1d(steps[-1], second, biases[1], padding=1))
    mean = functional.linear(steps[-1].flatten(), out, biases[2]).mean()
    out_of = torch.autograd.grad(mean, steps)
    return torch.stack(steps).detach(), torch.stack(out_of), mean.detach()


def balanced_filters(around, kind=Filters):
    torch.manual_seed(0)
    model = kind(around).double()
    example = torch.zeros(1, 2, 8, dtype=torch.float64)
    ps.rescaling.random_rescale_(
        ps.trace(model, example), generator=torch.Generator().manual_seed(0)
    )
    ps.rescaling.balance_(ps.trace(model, example))
    return model


def test_convolutions_have_the_same_gain_in_every_layer():
    model = balanced_filters(around=False)
    for layer in (model.first, model.second, model.out):
        nn.init.zeros_(layer.bias)
    ps.rescaling.balance_(ps.trace(model, torch.zeros(1, 2, 8, dtype=torch.float64)))
    first, second, out = mass_of(model)
    gain = out ** (1 / 3)
    assert_close(first.mean(1), gain.expand(4))
    assert_close(second.mean(1), (gain**2).expand(4))


def test_the_gain_is_even_by_the_mean_number_of_weights_on_a_path():
    model = balanced_filters(around=True)
    first, second, out = mass_of(model)
    shorter, longer = (mass_of(model, 1 + change) for change in (-1e-5, 1e-5))

    def slope(of):
        """Of the logarithm of a sum over the nodes of each channel, by that of the squares."""
        return (of(*longer[:2]) / of(*shorter[:2])).log() / 2e-5

    length = slope(lambda a, b: (a + b).sum(1))
    rest = slope(lambda a, b: (a.grad + b.grad).sum(1))
    assert 1.05 < length.min() < length.max() < 1.95  # the layers' two are one class
    size = (first + second).sum(1) / 12
    # the library measures lengths with a change of 1/1024
    assert_close(size, out ** (length / (length + rest)), rtol=1e-3, atol=0)


def test_recurrent_convolutions_have_an_even_gain_too():
    """By the lengths of paths through all steps."""
    model = balanced_filters(around=False, kind=RecurrentFilters)
    into, _, out = unrolled_mass_of(model)
    shorter, longer = (unrolled_mass_of(model, 1 + change) for change in (-1e-5, 1e-5))

    def slope(i):
        """Of the logarithm of a sum over the nodes of each channel, at all steps, by that of the squares."""
        return (longer[i].sum((0, 2)) / shorter[i].sum((0, 2))).log() / 2e-5

    length, rest = slope(0), slope(1)
    assert 1.1 < length.min() < length.max() < 4
    assert_close(into.sum((0, 2)) / 24, out ** (length / (length + rest)), rtol=1e-3, atol=0)


class Loop(nn.Module):
    """A hand-written recurrent layer whose states are stacked and read together."""

    def __init__(self):
        super().__init__()
        self.into, self.back, self.out = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        states = [self.into(x[:, 0])]
        for t in range(1, x.shape[1]):
            states.append(self.into(x[:, t]) + self.back(torch.relu(states[-1])))
        return self.out(torch.relu(torch.stack(states, 1)))


def test_recurrence_in_time_alone_is_balanced():
    """As much enters a unit as leaves it, though the read-out sees it at all steps at once, as at positions."""
    torch.manual_seed(0)
    network = ps.trace(Loop().double(), torch.zeros(1, 5, 2, dtype=torch.float64))
    assert any(labels.numel() > labels.unique().numel() for labels in network.nodes.values())
    ps.rescaling.balance_(network)
    mass = node_mass(network)
    assert mass.even is None
    assert_close(mass.into, mass.out_of)


@pytest.mark.sample(27)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_leaves_no_spread(case):
    _model, network = traced(case, torch.float64)
    ps.rescaling.random_rescale_(network, 1e-2, 1e2, generator=torch.Generator().manual_seed(0))
    ps.rescaling.balance_(network)
    assert not spread(network).numel() or spread(network).max() < 1e-9


def test_powers_of_two_leave_at_most_a_factor_of_four():
    case = BY_NAME["stacked bidirectional rnn"]
    _, network = traced(case, torch.float64)
    ps.rescaling.balance_(network, powers_of_two=True)
    assert 0 < spread(network).max() <= 2 * math.log(2) + 1e-12


# --- the check ------------------------------------------------------------------------------------


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*of_each_kind(ZOO, torch.float32), (BY_NAME["mlp"], torch.float64)],
    ids=str,
)
def test_the_check_passes_where_the_function_stays(case, dtype):
    _, network = traced(case, dtype)
    example = case.example(3, dtype)
    ps.rescaling.random_rescale_(network, 0.01, 100.0, generator=torch.Generator().manual_seed(0))
    ps.rescaling.balance_(network, example)
    assert not spread(network).numel() or spread(network).max() < 1e-3


class TwoOutputs(nn.Module):
    """A state that scales, two outputs in a dictionary, and a forward that can be spoilt."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 3, 2, nonlinearity="relu", batch_first=True)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.switch = SimpleNamespace(spoilt=False)  # which no trace watches

    def forward(self, x):
        steps, state = self.rnn(x)
        last = steps[:, -1]
        result = {"first": self.first(last), "state": state, "second": self.second(last)}
        if self.switch.spoilt:
            result["second"] = self.second(torch.tanh(last))
        return result


def two_outputs():
    torch.manual_seed(0)
    model, example = TwoOutputs(), torch.randn(3, 4, 2)
    network = ps.trace(model, example)
    ps.rescaling.random_rescale_(network, 0.1, 10.0, generator=torch.Generator().manual_seed(0))
    return model, network, example


def test_the_check_looks_at_all_outputs_and_at_no_state():
    model, network, example = two_outputs()
    before = model(example)
    ps.rescaling.balance_(network, example)
    after = model(example)
    assert not torch.allclose(after["state"], before["state"], rtol=1e-2)
    assert_close(after["first"], before["first"], rtol=1e-4, atol=1e-5)


class Deep(nn.Module):
    """A second head that is there in training only, as in Inception."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.switch = SimpleNamespace(spoilt=False)  # which no trace watches

    def forward(self, x):
        h = self.body(x).tanh() if self.switch.spoilt else self.body(x)
        return (self.first(h), self.second(h)) if self.training else self.first(h)


def test_a_head_that_is_there_in_training_only_is_balanced_too():
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(3, 3)
    network = ps.trace(model, x)
    before = model(x)
    factors = ps.rescaling.balance_(network, x)
    assert bool((factors != 1).all())
    for then, now in zip(before, model(x), strict=True):
        assert_close(now, then)
    model.switch.spoilt = True  # no longer the network that was traced
    ps.rescaling.random_rescale_(network, 0.1, 10.0, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ps.rescaling.FunctionChangedError, match="output 0"):
        ps.rescaling.balance_(network, x)


@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_the_check_undoes_what_moved_the_function(tolerance):
    model, network, example = two_outputs()
    model.switch.spoilt = True  # no longer the network that was traced
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ps.rescaling.FunctionChangedError, match=r"output 1 .* moved by 0\.\d+"):
        ps.rescaling.balance_(network, example, tolerance=tolerance)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    ps.rescaling.balance_(network, example, tolerance=10.0)  # whoever wants it
    assert not torch.equal(model.rnn.weight_ih_l0, before["rnn.weight_ih_l0"])


def test_the_check_undoes_what_a_model_refuses_to_run_with():
    class Careful(nn.Sequential):
        def forward(self, x):
            h = super().forward(x)
            if not h.is_meta and self[0].weight[0, 0] != 1:
                raise ArithmeticError("other weights")
            return h

    model, x = Careful(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    torch.nn.init.ones_(model[0].weight)
    network = ps.trace(model, x)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ArithmeticError, match="other weights"):
        ps.rescaling.balance_(network, x)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not network.rescalings["done"]


class Drifting(nn.Sequential):
    """Its outputs become larger once its weights are others, and it says which one is the largest."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.now = SimpleNamespace(start=0.0, drift=0.0)  # which no trace watches

    def forward(self, x):
        scores = super().forward(x)
        if self.now.drift and self[0].weight[0, 0] != self.now.start:
            scores = scores * (1 + self.now.drift)
        return scores, scores.argmax(1)


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 2.0**-11.5), (torch.float64, 2.0**-26)]
)
def test_half_of_the_digits_may_be_rounding(dtype, least):
    torch.manual_seed(0)
    model, x = (
        Drifting(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype),
        torch.randn(5, 3, dtype=dtype),
    )
    network = ps.trace(model, x)
    ps.rescaling.random_rescale_(network, 0.1, 10.0)
    model.now.start, model.now.drift = model[0].weight[0, 0].item(), 1.2 * least
    with pytest.raises(ps.rescaling.FunctionChangedError, match="output 0 "):
        ps.rescaling.balance_(network, x)
    model.now.drift = 0.8 * least
    ps.rescaling.balance_(network, x)
    assert model[0].weight[0, 0] != model.now.start


class Masking(nn.Sequential):
    """Its last output is filled in, and once its weights are others its scores may be, too."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.fill = -math.inf
        self.now = SimpleNamespace(start=0.0, drift=0.0)  # which no trace watches

    def forward(self, x):
        scores = super().forward(x)
        if self.now.drift and self[0].weight[0, 0] != self.now.start:
            scores = scores + self.now.drift
        return torch.cat([scores, torch.full_like(scores[:, :1], self.fill)], 1)


@pytest.mark.parametrize("fill", [-math.inf, math.inf, -1e9, 1e4])
def test_the_check_looks_past_what_is_filled_in(fill):
    model, x = Masking(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    model.fill = fill
    network = ps.trace(model, x)
    ps.rescaling.random_rescale_(network, 0.1, 10.0)
    model.now.start, model.now.drift = model[0].weight[0, 0].item(), 0.1
    with pytest.raises(ps.rescaling.FunctionChangedError, match=r"output 0 .* moved by 0\.1"):
        ps.rescaling.balance_(network, x)
    model.now.drift = 0.0
    ps.rescaling.balance_(network, x)
    assert model[0].weight[0, 0] != model.now.start


def test_the_check_refuses_what_is_not_finite():
    model = mlp(3, 4, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ps.rescaling.FunctionChangedError):
        ps.rescaling.balance_(network, torch.full((1, 3), torch.nan))
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_the_check_leaves_mode_buffers_gradients_and_random_state_alone():
    case = BY_NAME["small resnet"]
    model = case.model().train()
    example = case.example(3)
    call(model, example).sum().backward()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    ps.rescaling.balance_(trace(case, model), example)
    assert all(module.training for module in model.modules())
    assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    assert_close({n: p.grad for n, p in model.named_parameters()}, gradients, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("given", "tolerance"), [(False, 1e-3), (True, 0.0), (True, -1.0), (True, math.nan)]
)
def test_bad_tolerances(given, tolerance):
    network = ps.trace(mlp(3, 4, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="tolerance"):
        ps.rescaling.balance_(network, torch.zeros(1, 3) if given else None, tolerance=tolerance)


def quantized(model, bits=8):
    """Symmetric rounding to 2^bits - 1 levels, with one step size for each weight tensor."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                step = parameter.abs().max() / (2 ** (bits - 1) - 1)
                parameter.copy_((parameter / step).round() * step)
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("criterion", ["path", "range", "activations", "norm", "conditioning"])
def test_inference_mode_is_no_obstacle(criterion, dtype):
    """Weights are rescaled where they are used, with the data that are there."""
    torch.manual_seed(0)
    model = mlp(4, 6, 5, 3).to(dtype)
    other, x = copy.deepcopy(model), torch.randn(7, 4, dtype=dtype)
    calibration = {"calibration": x} if criterion == "activations" else {}
    ps.rescaling.balance_(ps.trace(model, x), x, criterion=criterion, **calibration)
    network = ps.trace(other, x)
    with torch.inference_mode():
        data = {name: value.clone() for name, value in calibration.items()}
        ps.rescaling.balance_(network, x.clone(), criterion=criterion, **data)
    assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)
    if criterion == "activations":
        with torch.inference_mode():
            inside = ps.paths.data_dependent_kappa(network, x.clone())
        assert_close(inside, ps.paths.data_dependent_kappa(network, x), rtol=0, atol=0)
    other(x).sum().backward()


@pytest.mark.parametrize("checked", [False, True])
def test_autocast_does_not_go_on_with_the_weights_before(checked):
    """It keeps the copies in half precision that it made, and knows nothing of changes in place."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    )
    x = torch.randn(5, 3)
    network = ps.trace(model, x)
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        factors = ps.rescaling.balance_(network, x if checked else None, criterion="range")
        assert float(factors.max()) < 0.5
        assert_close(model(x), before, rtol=0.02, atol=0.01)


def test_balancing_takes_the_damage_of_bad_scales_out_of_int8():
    torch.manual_seed(0)
    model, x = Recurrent(inputs=8, hidden=32, num_layers=2, batch_first=True), torch.rand(16, 10, 8)
    network = ps.trace(model, x)
    exact, errors = model(x), []
    for change in (lambda: None, lambda: ps.rescaling.random_rescale_(network, 1 / 16, 16), None):
        change() if change else ps.rescaling.balance_(network, x)
        errors.append(((quantized(model)(x) - exact).norm() / exact.norm()).item())
    assert errors[1] > 0.1 > 0.02 > errors[2]


def test_a_deep_network_from_hes_start_is_nearly_balanced():
    """Counted with the half that a ReLU keeps back, path mass doubles from layer to layer, and scales part by 2^8."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(16)]
    for layer in layers:
        torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        torch.nn.init.zeros_(layer.bias)
    model = torch.nn.Sequential(
        *(m for layer in layers for m in (layer, torch.nn.ReLU())), torch.nn.Linear(32, 32)
    )
    factors = ps.rescaling.balance_(ps.trace(model, torch.zeros(1, 32)))
    assert factors.max() / factors.min() < 16


def test_a_normalized_network_is_brought_to_unit_masses():
    """As it starts: balancing the gain against the average behind it trained worse than the start."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2),
    )
    x = torch.randn(4, 3, 8, 8)
    before = [p.detach().clone() for p in model.parameters()]
    ps.rescaling.balance_(ps.trace(model, x), x)
    torch.testing.assert_close(list(model.parameters()), before)
    ps.rescaling.random_rescale_(ps.trace(model, x), 0.1, 10.0)
    ps.rescaling.balance_(ps.trace(model, x), x)
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], before, rtol=1e-4, atol=1e-5
    )


def test_large_factors_are_told():
    torch.manual_seed(0)
    model = mlp(3, 5, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    ps.rescaling.balance_(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.rescaling.balance_(network)
    factors = torch.ones(5, dtype=torch.float64)
    factors[2] = 1000.0
    ps.rescaling.rescale_(network, factors)
    with pytest.warns(UserWarning, match="1 of 5 unit classes by more than 100 .* by 0.001"):
        ps.rescaling.balance_(network)


def test_the_function_in_training_form_stays():
    """With BatchNorm's own statistics, which balance_ does not compare: free units stand behind it alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 2),
    ).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    network = ps.trace(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.empty_like(p).uniform_(0.1, 3.0))
    before = model(x)
    ps.rescaling.balance_(network, x)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-12)
    assert model.training


class ActorCritic(nn.Module):
    """Two heads, one of which another method reads."""

    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = mlp(3, 4, 4), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x):
        return self.actor(self.trunk(x).relu())

    def value(self, x):
        return self.critic(self.trunk(x).relu())


class Both(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x), self.model.value(x)


def test_heads_that_took_no_part_in_the_trace_are_named():
    model, x = ActorCritic(), torch.randn(5, 3)
    with pytest.warns(UserWarning, match=r"critic\.weight took no part in the forward pass"):
        ps.rescaling.balance_(ps.trace(model, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.rescaling.balance_(ps.trace(model, x, outside=["critic"]))  # known to the caller
        ps.rescaling.balance_(ps.trace(Both(model), x))


class Positions(nn.Module):
    """A table of positions that a short example reads the first rows of."""

    def __init__(self):
        super().__init__()
        self.token, self.position, self.out = (
            nn.Embedding(10, 4),
            nn.Embedding(8, 4),
            nn.Linear(4, 2),
        )

    def forward(self, tokens):
        return self.out((self.token(tokens) + self.position(torch.arange(tokens.shape[1]))).relu())


class Steps(nn.Module):
    """A recurrence by hand whose first step multiplies zeros."""

    def __init__(self):
        super().__init__()
        self.into, self.on, self.out = nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = (self.into(step) + self.on(h)).relu()
        return self.out(h)


class Rest(nn.Module):
    """Layers that a short example leaves nothing for: the input of one is empty, what is taken of the other is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.rest, self.out = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        parts = self.first(x[:, :1]), self.second(x)[:, 1:2], self.rest(x[:, 2:])
        return self.out(torch.cat(parts, 1).relu())


@pytest.mark.parametrize(
    ("model", "short", "long", "named"),
    [
        (Positions(), torch.ones(2, 3, dtype=torch.long), torch.ones(2, 8, dtype=torch.long), "position.weight"),
        (Steps(), torch.randn(2, 1, 3), torch.randn(2, 4, 3), "on.weight"),
    ],
    ids=["rows of a table", "zeros"],
)  # fmt: skip
def test_parameters_of_which_a_short_example_uses_a_part_are_named(model, short, long, named):
    whole = ps.trace(model, long)
    with pytest.warns(
        UserWarning, match=f"{named} took no part in the forward pass that was traced, or a part"
    ):
        ps.rescaling.balance_(ps.trace(model, short))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.rescaling.balance_(whole, long)
    # a longer example than the traced one reaches what has no kappa
    for damping, takes in (
        (0.01, "takes the step that damping alone bounds"),
        (0.0, "does not move"),
    ):
        network = ps.trace(model, short)
        said = takes if named == "position.weight" else "gradients reach it"
        optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01, damping=damping)
        model(long).square().mean().backward()
        with pytest.warns(UserWarning, match=f"'{named}' .*{said}"):
            optimizer.step()
        optimizer = ps.optim.PathSGD(model.parameters(), whole, lr=0.01, damping=damping)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


def test_layers_of_which_a_short_example_shows_nothing_are_outside_and_named():
    model, x = Rest(), torch.randn(2, 1, 3)
    network = ps.trace(model, x)
    assert network.outside == ("second.weight", "second.bias", "rest.weight", "rest.bias")
    with pytest.warns(
        UserWarning, match=r"second\.weight, second\.bias, rest\.weight and 1 more took no part"
    ):
        ps.rescaling.balance_(network, x)
    assert ps.trace(model, torch.randn(2, 3, 3)).outside == ()


def decayed(kind):
    """A network with a dead unit, as weight decay leaves them in networks that others trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        if kind == "into":
            model[0].weight[3], model[0].bias[3] = 1e-28, 0.0
            model[2].weight[0, 3] = 3e-41
        elif kind == "out of":
            model[2].weight[:, 3] = 1e-44
        elif kind == "both":
            model[0].weight[3], model[0].bias[3] = 1e-44, 1e-44
            model[2].weight[:, 3] = 1e-44
        else:  # large and small side by side
            model[0].weight[3, 0], model[0].weight[3, 1] = 1e30, 1e-40
            model[2].weight[:, 3] = 1e-37
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize(
    "criterion", ["path", "range", "measure", "layers", "norm", "conditioning"]
)
@pytest.mark.parametrize("kind", ["into", "out of", "both", "side by side"])
@pytest.mark.filterwarnings("ignore:balance_ multiplies")
def test_a_unit_that_is_nearly_dead_does_not_refuse_the_network(kind, criterion, powers_of_two):
    model, x = decayed(kind), torch.randn(16, 4)
    before, weights = model(x), [p.detach().clone() for p in model.parameters()]
    network = ps.trace(model, x)
    factors = ps.rescaling.balance_(network, x, criterion=criterion, powers_of_two=powers_of_two)
    assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    for now, then in zip(model.parameters(), weights, strict=True):
        assert torch.equal(now == 0, then == 0)
        assert now.isfinite().all()
    if powers_of_two:
        assert torch.equal(factors, factors.log2().round().exp2())
    # of the second layer, too, if the criterion looks at one unit alone
    healthy = [i for i in range(8) if i != 3]
    if criterion == "path" and kind == "out of":
        model = decayed(kind).double()  # where nothing needs a bound
        exact = ps.rescaling.balance_(ps.trace(model, x.double()), powers_of_two=powers_of_two)
        assert_close(factors[healthy], exact[healthy])


class Gates(nn.Module):
    """Products of units, a recurrence by hand and a convolution, all with weights of every kind."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate, self.on = nn.Conv1d(2, 6, 3), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        h = self.conv(x).relu().mean(-1)
        h = h * self.gate(h).relu()
        return self.out(self.on(self.on(h).relu()).relu())


def _one_in_each_row(layer):
    layer.weight.flatten(1)[
        torch.arange(len(layer.weight)), torch.arange(len(layer.weight)) % 2
    ] = 1e-42


SPECKS = {
    "a pixel": (
        lambda: nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        ),
        (5, 6),
        lambda m: m[0].weight[:, 0].fill_(1e-42),
    ),
    "biases": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)),
        (5, 6),
        lambda m: m[0].bias.fill_(-1e-42),
    ),
    "between units": (
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        ),
        (5, 6),
        lambda m: m[2].weight.diagonal().fill_(1e-42),
    ),
    "filters and gates": (
        Gates,
        (5, 2, 7),
        lambda m: [_one_in_each_row(m.conv), _one_in_each_row(m.gate)],
    ),
    "a recurrence": (
        lambda: Recurrent(num_layers=1, batch_first=True),
        (5, 4, 2),
        lambda m: m.rnn.weight_hh_l0[0, 1:].fill_(1e-42),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("criterion", ["path", "range"])
@pytest.mark.parametrize("name", SPECKS)
@pytest.mark.filterwarnings("ignore:balance_ multiplies what enters .* by more than")
def test_specks_in_healthy_units_hold_no_factor(name, criterion):
    """The factors are those of float64, where nothing underflows."""
    build, shape, change = SPECKS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(*shape)
    network = ps.trace(model, x)
    factors = torch.exp2(torch.linspace(7, 13, network.num_classes).round())
    ps.rescaling.rescale_(network, factors)
    with torch.no_grad():
        change(model)
    wide = copy.deepcopy(model).double()
    before, weights = wide(x.double()), [p.detach().clone() for p in model.parameters()]
    exact = ps.rescaling.balance_(ps.trace(wide, x.double()), criterion=criterion)
    found = ps.rescaling.balance_(network, x, criterion=criterion)
    assert_close(found, exact, rtol=1e-5, atol=0)
    assert_close(model(x).double(), before, rtol=1e-5, atol=1e-5)
    for now, then in zip(model.parameters(), weights, strict=True):
        assert torch.equal(now.sign(), then.sign())


class Loose(nn.Module):
    """Units that one number ties together, so that they have one factor whatever their sizes are."""

    def __init__(self):
        super().__init__()
        self.first, self.gain = nn.Linear(3, 4, bias=False), nn.Parameter(torch.ones(()))
        self.out = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.out((self.gain * self.first(x)).relu())


def test_a_speck_that_the_outputs_depend_on_holds_its_factor():
    torch.manual_seed(0)
    model, x = Loose(), torch.randn(5, 3)
    with torch.no_grad():
        model.first.weight.mul_(1e10)
        model.first.weight[0] = 1e-33
        model.out.weight.mul_(1e-10)
        model.out.weight[:, 0] = 1e33
    network = ps.trace(model, x)
    before = model(x)
    with pytest.warns(
        UserWarning, match=r"what enters 2 of 2 unit classes by a factor nearer to 1"
    ):
        ps.rescaling.balance_(network, criterion="range")
    assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_factors_that_give_way_are_counted():
    model, x = decayed("both"), torch.randn(16, 4)
    with pytest.warns(
        UserWarning, match=r"what enters 1 of 16 unit classes by a factor nearer to 1 than"
    ):
        ps.rescaling.balance_(ps.trace(model, x), criterion="measure")


class Heads(nn.Module):
    """Two heads that read the same units: one is normalized, so that its size does not show, and one is not."""

    def __init__(self, u, v, dtype=torch.float32):
        super().__init__()
        self.first, self.u, self.v = nn.Linear(4, 5), nn.Linear(5, 3, bias=False), nn.Linear(5, 2)
        with torch.no_grad():
            self.first.weight.div_(v)
            self.first.bias.div_(v)
            self.u.weight.mul_(u)
            self.v.weight.mul_(v)
        self.to(dtype)

    def forward(self, x):
        h = self.first(x).relu()
        u = self.u(h)
        return u / u.norm(dim=1, keepdim=True), self.v(h)


class PlainHeads(Heads):
    """The heads as they are."""

    def forward(self, x):
        h = self.first(x).relu()
        return self.u(h), self.v(h)


class ConvolvedHeads(Heads):
    """Two filters over the units."""

    def forward(self, x):
        h = self.first(x).relu().unsqueeze(-1)
        u, v = self.u.weight.unsqueeze(-1), self.v.weight.unsqueeze(-1)
        return functional.conv1d(h, u), functional.conv1d(h, v, self.v.bias)


class Gain(nn.Module):
    """Units that are outputs behind a gain for each, beside a head of large weights."""

    def __init__(self, u, v, dtype=torch.float32):
        super().__init__()
        self.first, self.v = nn.Linear(4, 5), nn.Linear(5, 2)
        self.gain = nn.Parameter(torch.linspace(1, 2, 5) * u)
        with torch.no_grad():
            self.gain[0] = 1.0
            self.first.weight.div_(v)
            self.first.bias.div_(v)
            self.v.weight.mul_(v)
        self.to(dtype)

    def forward(self, x):
        h = self.first(x).relu()
        return self.gain * h, self.v(h)


class Behind(nn.Module):
    """A head that reads units in equal parts: large ones by small weights, which a large head reads too, and small."""

    def __init__(self, u, v, dtype=torch.float32):
        super().__init__()
        self.small, self.large = nn.Linear(4, 5), nn.Linear(4, 5)
        self.u, self.v = nn.Linear(10, 3, bias=False), nn.Linear(5, 2)
        with torch.no_grad():
            self.small.weight.mul_(u)
            self.small.bias.mul_(u)
            self.u.weight[:, 5:] *= u
            self.v.weight.mul_(v)
        self.to(dtype)

    def forward(self, x):
        small, large = self.small(x).relu(), self.large(x).relu()
        return self.u(torch.cat([small, large], 1)), self.v(large)


class BehindUnits(Behind):
    """The same with a layer of units in front of the outputs."""

    def forward(self, x):
        u, v = super().forward(x)
        return u.relu() @ torch.ones(3, 1, dtype=x.dtype), v


class Summand(nn.Module):
    """A small value that a head reads by itself, and added to a large one."""

    def __init__(self, u, v, dtype=torch.float32):
        super().__init__()
        self.first, self.large = nn.Linear(4, 5), nn.Linear(4, 5)
        self.small, self.alone = nn.Linear(5, 5), nn.Linear(5, 3, bias=False)
        self.out, self.v = nn.Linear(5, 2), nn.Linear(5, 2)
        with torch.no_grad():
            self.first.weight.div_(v)
            self.first.bias.div_(v)
            self.v.weight.mul_(v)
            self.small.weight.mul_(u)
            self.small.bias.mul_(u)
            self.large.weight.mul_(v)
            self.out.weight.div_(v)
        self.to(dtype)

    def forward(self, x):
        h = self.first(x).relu()
        small = self.small(h)
        return self.alone(small), self.out(self.large(x).relu() + small), self.v(h)


def _exact(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


@pytest.mark.sample(5, each=lambda build, **_: build)
@pytest.mark.parametrize(
    ("u", "v", "dtype"),
    [
        (1e-30, 1e16, torch.float32),
        (1e-36, 1e6, torch.float32),
        (2e-3, 3e4, torch.float16),
    ],
)
@pytest.mark.parametrize(
    "build", [Heads, PlainHeads, ConvolvedHeads, Gain, Behind, BehindUnits, Summand]
)
@pytest.mark.filterwarnings("ignore:balance_ multiplies")
def test_every_output_stays_at_its_own_scale(build, u, v, dtype):
    """Against the same network in float64: each output moves by no more than a rounding of each weight."""
    torch.manual_seed(0)
    model, x = build(u, v, dtype), torch.randn(6, 4).to(dtype)
    before = _exact(model, x)
    ps.rescaling.balance_(ps.trace(model, x))
    for now, then in zip(_exact(model, x), before, strict=True):
        size = then.abs().amax(0)
        assert bool(((now - then).abs().amax(0) <= 8 * torch.finfo(dtype).eps * size).all())
