"""Both terms of kappa against brute force, in double and in single precision, and their symmetry."""

import copy
import functools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, HandLoop, Recurrent, half, mlp, of_each_kind, oracle, traced
from fixture_nets import Loop, loop_entry
from oracles import graph
from oracles.squared import Oracle
from pathspace.paths.kernel.kappa import squared_gradients
from pathspace.squared.squares import Outer, dense


@functools.cache
def brute(case):
    """kappa1 and kappa1 + kappa2 by brute force: in float64, whatever the precision of the model."""
    known = oracle(case)
    return known.kappa1(), known.kappa()


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_first_term_equals_brute_force(case):
    _, network = traced(case, torch.float64)
    assert_close(dict(ps.paths.kappa(network)), brute(case)[0], rtol=1e-10, atol=1e-13)


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_second_term_equals_brute_force(case):
    _model, network = traced(case, torch.float64)
    first, both = brute(case)
    second = {name: both[name] - first[name] for name in both}
    assert_close(dict(ps.paths.second_term(network)), second, rtol=1e-9, atol=1e-12)
    assert_close(dict(ps.paths.kappa(network, second_term=True)), both, rtol=1e-9, atol=1e-12)


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_single_precision_comes_close(case):
    _model, network = traced(case, torch.float32)
    first, both = brute(case)
    for value, expected in (
        (ps.paths.kappa(network), first),
        (ps.paths.kappa(network, second_term=True), both),
    ):
        for name, tensor in value.items():
            assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.sample(11)
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_is_named_and_shaped_as_the_parameters(case):
    model, network = traced(case)
    parameters = dict(model.named_parameters())
    for value in (ps.paths.kappa(network), ps.paths.second_term(network)):
        assert set(value) == set(network.parameters) == set(parameters)
        for name, tensor in value.items():
            assert tensor.shape == parameters[name].shape
            assert not tensor.requires_grad
            assert (tensor >= 0).all()


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_times_squared_weight_is_invariant(case):
    """kappa transforms as (s_u/s_v)^2, so kappa p^2 does not change; nor does the path norm."""
    _model, network = traced(case, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for second_term in (False, True):
        before = ps.paths.kappa(network, second_term=second_term)
        before = {
            name: value * network.parameters[name].detach() ** 2 for name, value in before.items()
        }
        norm = ps.paths.squared_path_norm(network).item()
        ps.rescaling.random_rescale_(network, generator=generator)
        after = ps.paths.kappa(network, second_term=second_term)
        after = {
            name: value * network.parameters[name].detach() ** 2 for name, value in after.items()
        }
        assert_close(after, before, rtol=1e-10, atol=1e-14)
        assert ps.paths.squared_path_norm(network).item() == pytest.approx(norm, rel=1e-11)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", of_each_kind(ZOO), ids=str)
def test_tensors_are_the_callers_own(case):
    """Writing into one changes neither another (the two biases of a layer have equal kappa) nor the next answer."""
    _, network = traced(case)
    for function in (ps.paths.kappa, ps.paths.second_term):
        value = function(network)
        copies = {name: tensor.clone() for name, tensor in value.items()}
        for name, tensor in value.items():
            tensor.add_(1)
            assert_close(tensor, copies[name] + 1)
        assert_close(dict(value), {name: tensor + 1 for name, tensor in copies.items()})
        assert_close(dict(function(network)), copies)


def test_follows_the_weights_and_leaves_them_alone():
    case = BY_NAME["stacked rnn"]
    model, network = traced(case, torch.float64)
    ps.paths.kappa(network, second_term=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_close(
        dict(ps.paths.kappa(network)), oracle(case, model).kappa1(), rtol=1e-10, atol=1e-13
    )
    assert_close(
        {name: p.detach() for name, p in model.named_parameters()}, weights, rtol=0, atol=0
    )
    assert all(p.grad is None for p in model.parameters())


def test_second_term_of_a_weight_that_is_zero_is_zero():
    """Though others of the parameter have pairs of edges: by unit G = 3 + 2 q + q^2, and kappa2 = 4 q."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[2.0, 0.0], [0.0, 3.0]]))

        def forward(self, x):
            h, outputs = x[:, 0], [x[:, 0]]
            for t in range(1, x.shape[1]):
                h = (h @ self.weight).relu() + x[:, t]
                outputs.append(h)
            return torch.stack(outputs, 1)

    found = ps.paths.second_term(ps.trace(Steps(), torch.zeros(1, 3, 2)))["weight"]
    assert_close(found, torch.tensor([[16.0, 0.0], [0.0, 36.0]]))


def test_is_zero_for_dead_weights_and_so_is_the_gradient():
    """A unit that reaches no output: kappa1 = 0 before it, and the loss does not depend on those weights."""
    model = mlp(3, 4, 2).double()
    with torch.no_grad():
        model[2].weight[:, 1] = 0
    x = torch.randn(5, 3, dtype=torch.float64)
    kappa1 = ps.paths.kappa(ps.trace(model, x))
    model(x).square().sum().backward()
    assert (kappa1["0.weight"][1] == 0).all()
    assert kappa1["0.bias"][1] == 0
    for name, p in model.named_parameters():
        assert (p.grad[kappa1[name] == 0] == 0).all()
    assert (kappa1["2.weight"] > 0).all()


def test_a_parameter_without_paths_does_not_change_the_type():
    """Zeros look like what has vanished, and are computed in float64 to see that they have not."""
    model = mlp(3, 4, 2)
    nn.init.zeros_(model[2].weight)
    found = ps.paths.kappa(ps.trace(model, torch.zeros(1, 3)))
    assert {k.dtype for k in found.values()} == {torch.float32}
    assert not found["0.weight"].any()
    assert found["2.weight"].all()


def recurrent_reference(
    model: nn.Module, steps: int, *, every: bool = False
) -> dict[str, torch.Tensor]:
    """The plain loop over time of one squared recurrent layer, in float64."""
    weights = {name: p.detach().double() ** 2 for name, p in model.named_parameters()}
    square = weights["rnn.weight_hh_l0"]
    start = (
        weights["rnn.weight_ih_l0"].sum(1) + weights["rnn.bias_ih_l0"] + weights["rnn.bias_hh_l0"]
    )
    columns = weights["out.weight"].sum(0)
    h, states = torch.zeros_like(start), []
    for _ in range(steps):
        h = start + square @ h
        states.append(h)
    delta, deltas = columns, [columns]
    for _ in range(steps - 1):
        delta = square.T @ delta + (columns if every else 0)
        deltas.append(delta)
    states, deltas = torch.stack(states), torch.stack(deltas[::-1])
    inward = deltas.sum(0)
    return {
        "rnn.weight_ih_l0": inward[:, None].expand_as(weights["rnn.weight_ih_l0"]),
        "rnn.weight_hh_l0": deltas[1:].T @ states[:-1],
        "rnn.bias_ih_l0": inward,
        "rnn.bias_hh_l0": inward,
        "out.weight": (states.sum(0) if every else states[-1]).expand_as(weights["out.weight"]),
        "out.bias": torch.full_like(weights["out.bias"], steps if every else 1),
    }


def test_recurrent_reference_is_right():
    for emit in ("last", "all"):
        model = Recurrent(emit=emit).double()
        known = Oracle(model, torch.zeros(6, 1, 2)).kappa1()
        assert_close(recurrent_reference(model, 6, every=emit == "all"), known, check_stride=False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("emit", ["last", "all"])
@pytest.mark.parametrize("bound", ["identity", 0.2, 0.05])
def test_long_sequences_in_single_precision(bound, emit):
    """784 steps: an identity start, one that leaves float32 (about 1e100), and one that contracts."""
    model = Recurrent(emit=emit, inputs=1, hidden=100)
    with torch.no_grad():
        if bound == "identity":
            model.rnn.weight_hh_l0.copy_(torch.eye(100))
        else:
            model.rnn.weight_hh_l0.uniform_(-bound, bound)
    kappa1 = ps.paths.kappa(ps.trace(model, torch.randn(784, 2, 1)))
    for name, expected in recurrent_reference(model, 784, every=emit == "all").items():
        assert torch.isfinite(kappa1[name]).all()
        assert_close(kappa1[name].double(), expected, rtol=1e-4, atol=0, check_stride=False)


def _recurrent_matrices() -> dict[str, torch.Tensor]:
    """Matrices on which shortcuts for long sequences are tempted to stop too early, or never."""
    shift = torch.roll(torch.eye(6, dtype=torch.float64), 1, 0)
    nilpotent = torch.ones(6, 6, dtype=torch.float64).tril(-1)
    blocks = torch.block_diag(
        *(scale * torch.eye(2, dtype=torch.float64) for scale in (0.1, 0.9, 1.0))
    )
    coupled = blocks + 0.01 * torch.ones(6, 6, dtype=torch.float64).triu(1)
    generator = torch.Generator().manual_seed(5)
    random = torch.rand(6, 6, generator=generator, dtype=torch.float64) - 0.5
    sparse = random * (torch.rand(6, 6, generator=generator) < 0.3)
    dead = random.clone()
    dead[2], dead[:, 4] = 0, 0
    return {
        "zero": torch.zeros(6, 6, dtype=torch.float64),
        "shift": shift,
        "shrinking shift": 0.95 * shift,
        "slowly shrinking": 0.999 * torch.eye(6, dtype=torch.float64),
        "slowly growing": 1.001 * torch.eye(6, dtype=torch.float64),
        "nilpotent": nilpotent,
        "blocks": blocks,
        "coupled blocks": coupled,
        "random": random,
        "sparse": sparse,
        "with dead units": dead,
    }


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "emit", "steps"), half(_recurrent_matrices(), ["last", "all"], [5, 60, 900])
)
def test_long_sequences_in_double_precision(name, emit, steps):
    torch.manual_seed(1)
    model = Recurrent(emit=emit, inputs=2, hidden=6).double()
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(_recurrent_matrices()[name])
        # two units have no input of their own, and two are not read out
        model.rnn.weight_ih_l0[1:3], model.rnn.bias_ih_l0[1:3], model.rnn.bias_hh_l0[1:3] = 0, 0, 0
        model.out.weight[:, 3:5] = 0
    kappa1 = ps.paths.kappa(ps.trace(model, torch.randn(steps, 2, 2, dtype=torch.float64)))
    known = recurrent_reference(model, steps, every=emit == "all")
    for parameter, expected in known.items():
        assert_close(kappa1[parameter], expected, rtol=1e-11, atol=0, check_stride=False)


@pytest.mark.slow
def test_long_hand_written_loop_in_single_precision():
    model = HandLoop(1, 20)
    with torch.no_grad():
        model.step.weight.uniform_(-0.5, 0.5)  # squared: about 1.67 per step, 1e90 at the end
    network = ps.trace(model, torch.randn(2, 400, 1))
    kappa1 = ps.paths.kappa(network)
    same = Recurrent(inputs=1, hidden=20)
    with torch.no_grad():
        same.rnn.weight_ih_l0.copy_(model.read.weight)
        same.rnn.weight_hh_l0.copy_(model.step.weight)
        same.rnn.bias_ih_l0.copy_(model.read.bias)
        same.rnn.bias_hh_l0.zero_()
        same.out.load_state_dict(model.out.state_dict())
    known = recurrent_reference(same, 400)
    for name, twin in {
        "read.weight": "rnn.weight_ih_l0",
        "read.bias": "rnn.bias_ih_l0",
        "step.weight": "rnn.weight_hh_l0",
        "out.weight": "out.weight",
    }.items():
        assert torch.isfinite(kappa1[name]).all()
        assert_close(kappa1[name].double(), known[twin], rtol=1e-4, atol=0, check_stride=False)


@pytest.mark.parametrize("function", [ps.paths.second_term, ps.paths.squared_path_norm])
def test_growing_sequences_are_never_not_a_number(function):
    """About 1e100 after 784 steps: a number in float64, or a clear refusal."""
    model = Recurrent(inputs=1, hidden=100)
    with torch.no_grad():
        model.rnn.weight_hh_l0.uniform_(-0.2, 0.2)
    network = ps.trace(model, torch.randn(784, 2, 1))
    try:
        value = function(network)
    except FloatingPointError:
        return
    for tensor in value.values() if isinstance(value, dict) else [value]:
        assert not tensor.isnan().any()
        if isinstance(value, dict):
            assert tensor.isfinite().all()


def test_long_identity_start_in_single_precision():
    model = Recurrent(hidden=20)
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(torch.eye(20))
    network = ps.trace(model, torch.randn(784, 2, 2))
    first, second = ps.paths.kappa(network), ps.paths.second_term(network)
    name = "rnn.weight_hh_l0"
    ratio = (second[name].double() / first[name].double()).diagonal()
    assert_close(ratio, torch.full((20,), 4 * 782 / 3, dtype=torch.float64), rtol=1e-4, atol=0)
    double = ps.trace(copy.deepcopy(model).double(), torch.randn(784, 2, 2).double())
    norm = ps.paths.squared_path_norm(double).item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("steps", [2, 3, 8, 50])
def test_second_term_of_an_identity_start(steps):
    """W_rec = I with the output at T only: kappa2/kappa1 = 4 (T - 2) / 3 on the diagonal, 0 off it."""
    model = Recurrent(hidden=4).double()
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(torch.eye(4))
    network = ps.trace(model, torch.randn(steps, 2, 2).double())
    first, second = ps.paths.kappa(network), ps.paths.second_term(network)
    ratio = second["rnn.weight_hh_l0"] / first["rnn.weight_hh_l0"]
    assert_close(ratio, 4 * (steps - 2) / 3 * torch.eye(4).double(), rtol=1e-10, atol=1e-12)
    assert all((value == 0).all() for name, value in second.items() if name != "rnn.weight_hh_l0")


@st.composite
def convolutional_networks(draw):
    """One or two convolutions, plain or transposed, in one to three dimensions, with a pool between or not."""
    spatial = draw(st.integers(1, 3))
    channels, layers = draw(st.integers(1, 2)), []
    convolution = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d)}.get(
        spatial, (nn.Conv3d, nn.ConvTranspose3d)
    )
    size = draw(st.integers(3, 4 if spatial == 3 else 6))
    shape = (channels, *(size for _ in range(spatial)))
    for _ in range(draw(st.integers(1, 2))):
        groups = draw(st.sampled_from([1, channels]))
        out = groups * draw(st.integers(1, 2))
        stride, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        layers.append(
            convolution[draw(st.booleans())](
                channels,
                out,
                kernel,
                stride=stride,
                padding=draw(st.integers(0, kernel - 1)),
                dilation=draw(st.integers(1, 2)),
                groups=groups,
                bias=draw(st.booleans()),
            )
        )
        layers.append(nn.ReLU())
        channels = out
        kind = draw(st.sampled_from(["none", "max", "average", "adaptive"]))
        if kind == "max":
            pool = getattr(nn, f"MaxPool{spatial}d")
            layers.append(
                pool(2, draw(st.integers(1, 2)), padding=1, ceil_mode=draw(st.booleans()))
            )
        elif kind == "average":
            pool = getattr(nn, f"AvgPool{spatial}d")
            padded = draw(st.booleans())
            layers.append(pool(2, draw(st.integers(1, 2)), padding=1, count_include_pad=padded))
        elif kind == "adaptive":
            layers.append(getattr(nn, f"AdaptiveAvgPool{spatial}d")(2))
    return nn.Sequential(*layers[:-1] if isinstance(layers[-1], nn.ReLU) else layers), shape


@settings(max_examples=15, deadline=None)
@given(convolutional_networks(), st.integers(0, 2**16))
def test_random_convolutions_by_derivatives(drawn, seed):
    model, shape = drawn
    torch.manual_seed(seed)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    x = torch.randn(2, *shape, dtype=torch.float64)
    model = model.double()
    try:
        before = model(x)
    except (RuntimeError, ValueError):
        assume(False)  # the image shrank to nothing
    known = Oracle(model, x[:1])
    network = ps.trace(model, x)
    norm = ps.paths.squared_path_norm(network).item()
    assert norm == pytest.approx(known.squared_path_norm().item(), rel=1e-10)
    assert_close(dict(ps.paths.kappa(network)), known.kappa1(), rtol=1e-9, atol=1e-12)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(seed))
    assert_close(model(x), before, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.booleans(), st.integers(0, 2**16))
def test_random_layers_by_enumeration(widths, bias, seed):
    torch.manual_seed(seed)
    model = mlp(*widths, bias=bias).double()
    paths, number = graph.layered(widths, bias=bias)
    entries = {}
    for key, index in number.items():
        layer = 2 * ((key[2] if key[0] == "weight" else key[1]) - 1)
        entries[index] = (f"{layer}.{key[0]}", key[3:] if key[0] == "weight" else key[2:])
    _compare_with_enumeration(model, torch.randn(2, widths[0]).double(), paths, entries)


@settings(max_examples=12, deadline=None)
@given(
    hidden=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    steps=st.integers(1, 4),
    emit=st.sampled_from(["last", "all"]),
    seed=st.integers(0, 2**16),
)
def test_random_loops_by_enumeration(hidden, steps, emit, seed):
    torch.manual_seed(seed)
    model = Loop(1, hidden, 2, emit=emit).double()
    paths, number = graph.recurrent(1, hidden, 2, steps, emit=emit)
    entries = {index: loop_entry(key) for key, index in number.items()}
    _compare_with_enumeration(model, torch.randn(2, steps, 1).double(), paths, entries)


def _compare_with_enumeration(model, x, paths, entries):
    network = ps.trace(model, x)
    state = dict(model.named_parameters())
    weights = [state[entries[index][0]][entries[index][1]].item() for index in range(len(entries))]
    norm = ps.paths.squared_path_norm(network).item()
    assert norm == pytest.approx(graph.squared_path_norm(paths, weights), rel=1e-10)
    for ours, theirs in (
        (ps.paths.kappa(network), graph.kappa1(paths, weights)),
        (ps.paths.second_term(network), graph.kappa2(paths, weights)),
    ):
        for index, (name, at) in entries.items():
            assert ours[name][at].item() == pytest.approx(theirs[index], rel=1e-10, abs=1e-13)


@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    emit=st.sampled_from(["last", "all"]),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_random_recurrent_networks_by_double_derivatives(
    widths, bidirectional, bias, batch_first, emit, steps, seed
):
    torch.manual_seed(seed)
    model = Recurrent(
        emit=emit,
        hidden=widths[0],
        num_layers=len(widths),
        bidirectional=bidirectional,
        bias=bias,
        batch_first=batch_first,
    ).double()
    shape = (3, steps, 2) if batch_first else (steps, 3, 2)
    network = ps.trace(model, torch.randn(shape).double(), batch_dim=0 if batch_first else 1)
    known = Oracle(model, torch.zeros((1, steps, 2) if batch_first else (steps, 1, 2)))
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(
        known.squared_path_norm().item(), rel=1e-10
    )
    assert_close(dict(ps.paths.kappa(network)), known.kappa1(), rtol=1e-10, atol=1e-13)
    assert_close(
        dict(ps.paths.kappa(network, second_term=True)), known.kappa(), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("scale", [0.3, 0.9, 1.0])
def test_second_term_of_a_long_layer_ends_when_the_rest_is_rounding(scale, dtype, monkeypatch):
    """Against all its terms, in float64; and with fewer products where the layer contracts."""
    from pathspace.paths.kernel import pairs

    torch.manual_seed(0)
    S = torch.rand(12, 12, dtype=torch.float64)
    S = scale * S / torch.linalg.eigvals(S).abs().max()
    S[0, 3:] = 0
    before, delta = (
        torch.rand(150, 12, dtype=torch.float64),
        torch.rand(150, 12, dtype=torch.float64),
    )
    exact = torch.zeros_like(S)
    for m in range(149):
        exact += torch.matrix_power(S, m).t() * (delta[m + 1 :].t() @ before[: 149 - m])
    looks = []
    look = pairs._negligible
    monkeypatch.setattr(pairs, "_negligible", lambda *a: looks.append(look(*a)) or looks[-1])
    found = pairs.recurrent_second_term(S.to(dtype), before.to(dtype), delta.to(dtype))
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(found.double(), 4 * S * exact, rtol=rtol, atol=1e-30)
    if scale == 0.3:
        assert looks[-1]
        assert len(looks) < 6
    elif scale == 1.0:
        assert not any(looks)


class _Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.again, self.out = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.enter(x[:, 0]).relu()
        for t in range(1, x.shape[1]):
            h = (self.enter(x[:, t]) + self.again(h)).relu()
        return self.out(h), None


@pytest.mark.parametrize("exponent", [10, 20, 28])
@pytest.mark.parametrize(
    "build",
    [lambda: nn.RNN(2, 6, 2, nonlinearity="relu", batch_first=True), _Loop],
    ids=["layers", "loop"],
)
def test_second_term_does_not_lose_digits_to_the_scales_of_weights(build, exponent):
    torch.manual_seed(0)
    network = ps.trace(build(), torch.zeros(1, 12, 2), output=lambda r: r[0])
    before = ps.paths.kappa(network, second_term=True)
    factors = 2.0 ** (exponent * torch.tensor([1.0, -1.0]).double()).repeat(
        network.num_classes // 2
    )
    ps.rescaling.rescale_(network, factors)
    for name, after in ps.paths.kappa(network, second_term=True).items():
        undone = after.double() * network.edge_factors(name, factors).square()
        assert torch.equal(undone, before[name].double()), name


class Twice(nn.Module):
    """A matrix used twice, one that several positions enter, and one used once."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.row = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.once = nn.Linear(15, 2, bias=False)

    def forward(self, x):
        h = torch.relu(self.tied(torch.relu(self.tied(x))))
        return self.once(torch.relu(self.row(h)).flatten(1))


def test_first_term_of_a_matrix_that_one_vector_enters_once_stays_a_product():
    torch.manual_seed(0)
    example = torch.randn(1, 5, 4, dtype=torch.float64)
    network = ps.trace(Twice().double(), example)
    values = squared_gradients(network, network.parameters, list(network.parameters))
    assert {name for name, value in values.items() if isinstance(value, Outer)} == {"once.weight"}
    q = {name: p.detach().square().requires_grad_() for name, p in network.parameters.items()}
    expected = torch.autograd.grad(network.squared(q), list(q.values()))
    for (name, value), g in zip(values.items(), expected, strict=True):
        assert_close(dense(value), g, rtol=1e-12, atol=0, msg=name)
