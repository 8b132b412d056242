"""Balancing by ranges of weights and of activations: closed forms, generic optimisation, and what they promise."""

import copy
import itertools
import math
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, ZOO, Recurrent, Skip, mlp, slow_besides, traced
from pathspace.rescaling.criteria import Scales, agreement, range_gap, rounded_edges

CRITERIA = ["range", "activations"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def balance(network, example, criterion, **options):
    options |= {"calibration": example} if criterion == "activations" else {}
    return ps.rescaling.balance_(network, criterion=criterion, **options)


def without_dead_units(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
    return model


def scrambled(model, example, seed=0, reach=16.0):
    network = ps.trace(model, example)
    ps.rescaling.random_rescale_(network, 1 / reach, reach, generator=generator(seed))
    return network


# --- by hand: ranges of every class, edge by edge -------------------------------------------------


def ranges(network):
    """The largest |w| of two dimensions or more into and out of every class, self-loops left out."""
    sizes = {
        name: p.detach().abs().numpy() for name, p in network.parameters.items() if p.dim() > 1
    }
    ranges = []
    for unit in network.unit_classes:
        loops = set(unit.incoming) & set(unit.outgoing)
        sides = []
        for edges in (unit.incoming, unit.outgoing):
            values = [sizes[name][index] for name, index in set(edges) - loops if name in sizes]
            sides.append(max(values, default=0.0))
        ranges.append(sides)
    return ranges


def assert_equalized(network, rel=1e-6):
    for into, out_of in ranges(network):
        assert (into or 1.0) == pytest.approx(out_of or 1.0, rel=rel)


def test_two_layers_have_the_closed_form_of_cross_layer_equalization():
    torch.manual_seed(0)
    model, x = mlp(3, 7, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    network = scrambled(model, x)
    first, second = model[0].weight.detach().abs().amax(1), model[2].weight.detach().abs().amax(0)
    factors = ps.rescaling.balance_(network, x, criterion="range")
    assert_close(factors, (second / first).sqrt(), rtol=1e-8, atol=0)
    assert_close(model[0].weight.detach().abs().amax(1), (first * second).sqrt(), rtol=1e-8, atol=0)


def test_two_layers_have_the_closed_form_of_smoothquant():
    torch.manual_seed(0)
    model, x = mlp(3, 7, 2).double(), torch.randn(50, 3, dtype=torch.float64)
    network = scrambled(model, x)
    for alpha, statistic in itertools.product((0.3, 0.5, 1.0), ("largest", "mean")):
        hidden = model[:2](x).detach()
        values = hidden.amax(0) if statistic == "largest" else hidden.mean(0)
        weights = model[2].weight.detach().abs().amax(0)
        factors = balance(network, x, "activations", alpha=alpha, statistic=statistic)
        assert_close(factors, weights ** (1 - alpha) / values**alpha, rtol=1e-7, atol=0)


# --- any network ----------------------------------------------------------------------------------


# Each kind of layer, and each way to put layers together, in one case; the others are slow.
PARTS = [
    BY_NAME[name]
    for name in (
        "mlp", "leaky mlp", "one layer", "skip", "scaled residual", "functional", "siamese", "same layer twice",
        "slices", "tied autoencoder", "cnn 2d", "depthwise", "convolution transposed", "pool twice",
        "average pool with padding", "adaptive pool", "paddings", "dense block", "reshapes", "small resnet",
        "batch norm in training", "layer norm", "rms norm", "group norm", "stacked bidirectional rnn",
        "recurrent tower", "rnn with a learned start", "rnn cell", "hand-written loop", "language model",
        "tied characters",
    )
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", slow_besides(PARTS, ZOO), ids=str)
def test_ranges_are_equal_in_every_class(case):
    _, network = traced(case, torch.float64)
    ps.rescaling.random_rescale_(network, 0.1, 10.0, generator=generator())
    ps.rescaling.balance_(network, case.example(3, torch.float64), criterion="range")
    if network.num_classes <= 60:
        assert_equalized(network)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("criterion", "name"),
    [
        *(("range", name) for name in ("mlp", "small resnet", "rnn", "tied characters")),
        *(("activations", name) for name in ("mlp", "stacked bidirectional rnn")),
    ],
)
def test_all_members_come_to_the_same_weights(name, criterion):
    """Bitwise, if they differ by powers of two; otherwise to rounding."""
    case = BY_NAME[name]
    example, results = case.example(3, torch.float64), []
    for change in (None, True, False):
        model, network = traced(case, torch.float64)
        if change is not None:
            ps.rescaling.random_rescale_(
                network, 2**-6, 2**6, powers_of_two=change, generator=generator()
            )
        balance(network, example, criterion)
        results.append([p.detach() for p in model.parameters()])
    assert_close(results[0], results[1], rtol=0, atol=0)
    assert_close(results[0], results[2], rtol=1e-6, atol=1e-12)


def attention_model():
    from pathspace.experiments.models import Transformer

    torch.manual_seed(0)
    return Transformer(7, 5, hidden=8, layers=1, heads=2).double(), torch.randint(7, (3, 6))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_attention_gates_and_norms_keep_their_function(criterion):
    model, symbols = attention_model()
    network, before = scrambled(model, symbols), model(symbols).detach()
    balance(network, symbols, criterion)
    assert_close(model(symbols).detach(), before)
    if criterion == "range":
        assert_equalized(network)


def test_queries_and_keys_get_the_same_range():
    model, symbols = attention_model()
    network = scrambled(model, symbols)
    balance(network, symbols, "activations")
    seen = {}
    for name in ("queries", "keys"):
        module = getattr(model.blocks[0].attention, name)
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.__setitem__(name, out.detach())
        )
    model(symbols)
    # by rotary pair (d, d + 2) of each of the two heads of four
    pairs = {name: h.abs().amax((0, 1)).reshape(2, 2, 2).amax(1) for name, h in seen.items()}
    assert_close(pairs["queries"], pairs["keys"], rtol=1e-6, atol=0)


# --- by generic optimisation ----------------------------------------------------------------------


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(3, 4),
            nn.ReLU(),
            nn.Linear(4, 5),
            nn.ReLU(),
            nn.Linear(5, 4),
            nn.ReLU(),
            nn.Linear(4, 2),
        )


MODELS = {
    "deep": (Deep, (20, 3)),
    "skip": (Skip, (20, 3)),
    "recurrent": (lambda: Recurrent(num_layers=2, batch_first=True), (20, 3, 2)),
}


class Ranges:
    """log of the largest |w| into and out of every class after a rescaling by exp(x), from the edges one by one."""

    def __init__(self, network):
        edges = {edge for unit in network.unit_classes for edge in (*unit.incoming, *unit.outgoing)}
        edges = sorted(edge for edge in edges if network.parameters[edge[0]].dim() > 1)
        self.size = (
            torch.tensor([network.parameters[n][i].abs().item() for n, i in edges]).double().log()
        )
        self.power = torch.zeros(len(edges), network.num_classes, dtype=torch.float64)
        place = {edge: i for i, edge in enumerate(edges)}
        for c, unit in enumerate(network.unit_classes):
            for sign, side in ((1, unit.incoming), (-1, unit.outgoing)):
                for edge in side:
                    if edge in place:
                        self.power[place[edge], c] += sign

    def __call__(self, x):
        scaled = (self.size + self.power @ x).unsqueeze(1)
        return tuple(
            torch.where(sign * self.power > 0, scaled, -torch.inf).amax(0) for sign in (1, -1)
        )


def minimize(function, classes, steps=600):
    """The x at which a function is least, by Adam with a rate that falls."""
    x = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for _ in range(steps):
        optimizer.zero_grad()
        function(x).backward()
        optimizer.step()
        schedule.step()
    return x.detach()


@pytest.mark.parametrize("name", MODELS)
def test_no_class_alone_lowers_the_larger_one_of_its_ranges(name):
    build, shape = MODELS[name]
    torch.manual_seed(1)
    model, example = build().double(), torch.randn(*shape, dtype=torch.float64)
    network = scrambled(model, example)
    ps.rescaling.balance_(network, example, criterion="range")
    at = Ranges(network)
    here = torch.stack(at(torch.zeros(network.num_classes, dtype=torch.float64))).amax(0)
    for c, reach in itertools.product(range(network.num_classes), (-1.0, -0.01, 0.01, 1.0)):
        x = torch.zeros(network.num_classes, dtype=torch.float64)
        x[c] = reach
        assert torch.stack(at(x)).amax(0)[c] > here[c]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_of_ranges_is_least_in_a_shallow_network_and_near_it_in_others(name):
    """sum_c (max in + max out), by a generic optimiser over all scales: the optimum of hidden layers by themselves."""
    build, shape = MODELS[name] if name != "deep" else (lambda: mlp(3, 6, 2), (20, 3))
    torch.manual_seed(1)
    model, example = build().double(), torch.randn(*shape, dtype=torch.float64)
    network = scrambled(model, example)
    at = Ranges(network)
    least = minimize(lambda x: torch.cat(at(x)).exp().sum(), network.num_classes)
    ps.rescaling.balance_(network, criterion="range")
    ours = torch.cat(Ranges(network)(torch.zeros_like(least))).exp().sum().item()
    reached = torch.cat(at(least)).exp().sum().item()
    assert ours == pytest.approx(reached, rel=1e-3 if name == "deep" else 0.1)


@pytest.mark.parametrize("name", ["deep", "skip"])
def test_a_feed_forward_network_has_one_member_of_equal_ranges(name):
    build, shape = MODELS[name]
    torch.manual_seed(3)
    network = scrambled(build().double(), torch.randn(*shape, dtype=torch.float64))
    ones = torch.ones(network.num_classes, dtype=torch.float64)
    gap = range_gap(rounded_edges(network, ones), Scales(network.num_classes, network.monomials))
    first = agreement(gap, torch.zeros_like(ones))
    for seed in range(3):
        start = 5 * torch.randn(len(ones), dtype=torch.float64, generator=generator(seed))
        assert_close(agreement(gap, start), first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["deep", "skip"])
@pytest.mark.slow
def test_activations_agree_with_a_generic_search(name):
    """log s that makes (1 - alpha) log max |w out| = alpha log max |h|, found by least squares on the model itself."""
    build, shape = MODELS[name]
    torch.manual_seed(2)
    alpha, model = 0.4, without_dead_units(build().double())
    example = torch.randn(*shape, dtype=torch.float64)
    network = scrambled(model, example, reach=4.0)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    free = network.num_classes
    values = torch.zeros(free, dtype=torch.float64)

    def note(module, args):
        name = next(n for n, p in network.parameters.items() if p is module.weight)
        labels = network.edges[name].source.reshape(-1)
        if (labels > 0).all():
            values[labels - 1] = args[0].detach().abs().amax(0)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    model(example)
    for hook in hooks:
        hook.remove()
    at = Ranges(network)

    def residual(x):
        return (1 - alpha) * at(x)[1] - alpha * (values.log() + x)

    found = minimize(lambda x: residual(x).square().sum(), free)
    assert residual(found).abs().max() < 1e-3
    assert_close(
        balance(network, example, "activations", alpha=alpha).log(), found, rtol=0, atol=1e-2
    )


# --- what the operations show of activations ------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2)),
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 3, groups=2)),
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=4)),
    ],
    ids=["grouped", "transposed", "depthwise"],
)
def test_channels_of_convolutions_are_measured(build):
    torch.manual_seed(0)
    model, images = build().double(), torch.randn(3, 2, 7, 7, dtype=torch.float64)
    network = scrambled(model, images)
    balance(network, images, "activations", alpha=1.0)
    assert_close(model[:2](images).detach().amax((0, 2, 3)), torch.ones(4, dtype=torch.float64))


def test_steps_of_a_recurrence_are_measured():
    torch.manual_seed(0)
    model = without_dead_units(Recurrent(num_layers=2, batch_first=True).double())
    example = torch.randn(6, 5, 2, dtype=torch.float64)
    network = scrambled(model, example[:2])
    balance(network, example, "activations", alpha=1.0)
    states, _ = model.rnn(example)
    assert states.detach().amax((0, 1)) == pytest.approx(torch.ones(3), rel=1e-6)


def test_channels_of_a_convolution_whose_groups_are_named_have_the_values_before_the_activation():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 3), nn.Parameter(torch.randn(6, 2, 3, 3))

        def forward(self, x):
            return nn.functional.conv2d(self.a(x).relu(), self.b, groups=2)

    torch.manual_seed(0)
    model, images = Named().double(), torch.randn(3, 2, 7, 7, dtype=torch.float64)
    balance(scrambled(model, images), images, "activations", alpha=1.0)
    assert_close(model.a(images).detach().abs().amax((0, 2, 3)), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("statistic", ["largest", "mean"])
def test_operations_that_do_not_tell_have_the_values_before_the_activation(statistic):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            return torch.einsum(
                "bi,io->bo", torch.relu(torch.einsum("bi,io->bo", x, self.a)), self.b
            )

    torch.manual_seed(0)
    model, x = Written().double(), torch.randn(9, 3, dtype=torch.float64)
    balance(scrambled(model, x), x, "activations", alpha=1.0, statistic=statistic)
    values = (x @ model.a).detach().abs()
    found = values.amax(0) if statistic == "largest" else values.mean(0)
    assert_close(found, torch.ones(4, dtype=torch.float64))


# --- what it promises -----------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
def test_powers_of_two_round_nothing(criterion):
    case = BY_NAME["small resnet"]
    model, network = traced(case, torch.float32)
    example = case.example(3)
    model.eval()
    before = model(example)
    factors = balance(network, example, criterion, powers_of_two=True)
    assert torch.equal(torch.log2(factors), torch.log2(factors).round())
    assert (factors != 1).any()
    assert torch.equal(model(example), before)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_path_balance_can_follow(criterion):
    case = BY_NAME["skip"] if "skip" in BY_NAME else BY_NAME["mlp"]
    model, network = traced(case, torch.float64)
    ps.rescaling.balance_(network)
    before = [p.detach().clone() for p in model.parameters()]
    balance(network, case.example(3, torch.float64), criterion)
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    ps.rescaling.balance_(network)
    assert_close([p.detach() for p in model.parameters()], before)


def test_what_moved_the_function_is_undone():
    model, x = mlp(3, 4, 2), torch.randn(5, 3)
    network = scrambled(model, x)
    model[1].register_forward_hook(lambda _m, _i, h: torch.tanh(h))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ps.rescaling.FunctionChangedError):
        ps.rescaling.balance_(network, x, criterion="range")
    assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_dead_units_and_units_without_readers_do_no_harm(criterion):
    model, x = mlp(3, 4, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[0].bias[0] = 0.0
        model[2].weight[:, 1] = 0.0
        model[0].weight[2] = 0.0
        model[2].weight[:, 2] = 0.0
    network, before = ps.trace(model, x), model(x).detach()
    assert balance(network, x, criterion).isfinite().all()
    assert_close(model(x).detach(), before)


def test_a_gain_in_front_lets_every_column_have_the_same_range():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    ps.rescaling.balance_(ps.trace(model, x), x, criterion="range")
    assert_close(model[1].weight.detach().abs().amax(0), torch.ones(5, dtype=torch.float64))


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", slow_besides(PARTS, ZOO), ids=str)
def test_all_of_the_strength_on_the_values_is_possible_everywhere(case):
    _, network = traced(case, torch.float64)
    example = case.example(3, torch.float64)
    if str(case) == "rnn with a learned start":
        with pytest.raises(ps.network.UnmatchedForwardError, match="initial state"):
            balance(network, example, "activations", alpha=1.0)
        return
    assert balance(network, example, "activations", alpha=1.0).isfinite().all()


@pytest.mark.slow
def test_twenty_layers_agree_after_hundreds_of_steps_and_not_thousands(monkeypatch):
    monkeypatch.setattr("pathspace.rescaling.criteria.SWEEPS", 600)
    torch.manual_seed(0)
    network = scrambled(mlp(*[4] * 21, 3).double(), torch.zeros(1, 4, dtype=torch.float64))
    ps.rescaling.balance_(network, criterion="range")
    ones = torch.ones(network.num_classes, dtype=torch.float64)
    gap = range_gap(rounded_edges(network, ones), Scales(network.num_classes, network.monomials))
    assert float(gap(ones.log()).abs().max()) < 1e-8


def test_the_search_takes_one_label_for_each_channel_of_a_convolution():
    network = ps.trace(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3)), torch.zeros(1, 3, 8, 8)
    )
    _, edges = rounded_edges(network, torch.ones(5, dtype=torch.float64))
    assert (edges.log.shape, edges.target.numel(), edges.source.numel()) == ((4, 5, 1, 1), 4, 5)


def test_a_search_that_does_not_end_says_so(monkeypatch):
    monkeypatch.setattr("pathspace.rescaling.criteria.SWEEPS", 2)
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(5, 3)
    network, before = ps.trace(model, x), model(x)
    with pytest.warns(
        UserWarning, match="after 2 steps the two sides of some unit class still differ"
    ) as seen:
        ps.rescaling.balance_(network, x, criterion="range")
    assert seen[0].filename == __file__
    assert_close(model(x), before)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"criterion": "l2"},
            "criterion must be one of 'path', .*'activations', .*'norm', .*, got 'l2'",
        ),
        ({"criterion": "activations"}, "give calibration, a batch"),
        (
            {"criterion": "range", "calibration": torch.zeros(1, 3)},
            "calibration is an option of criterion='act",
        ),
        (
            {"alpha": 0.5},
            "alpha is an option of criterion='activations' and 'measure', not of 'path'",
        ),
        ({"criterion": "range", "statistic": "mean"}, "statistic is an option"),
        *(
            (
                {"criterion": "activations", "calibration": torch.zeros(1, 3), "alpha": alpha},
                "alpha must be in",
            )
            for alpha in (0.0, -1.0, 1.5, math.nan, "half")
        ),
        (
            {"criterion": "activations", "calibration": torch.zeros(1, 3), "statistic": "median"},
            "statistic must be one of 'largest', 'mean', got 'median'",
        ),
        (
            {"criterion": "activations", "calibration": torch.full((1, 3), math.inf)},
            "values that are not finite",
        ),
    ],
)
def test_impossible_options_are_refused(options, says):
    model = mlp(3, 4, 2)
    network, before = ps.trace(model, torch.zeros(1, 3)), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        ps.rescaling.balance_(network, **options)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("data", "form"), [
    (torch.zeros(5, 4), "(n, 4) of numbers"), (torch.zeros(5), "(n) of numbers"),
    (torch.zeros(5, 3, dtype=torch.long), "(n, 3) of int64"),
    ((torch.zeros(5, 3), torch.zeros(5)), "(n, 3) of numbers, (n) of numbers"),
])  # fmt: skip
def test_calibration_of_another_form_is_refused(data, form):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    network, before = ps.trace(model, torch.zeros(1, 3)), copy.deepcopy(model.state_dict())
    message = f"traced with: tensors {form} in the place of (n, 3) of numbers. Give a batch"
    with pytest.raises(ValueError, match=re.escape(message)):
        ps.rescaling.balance_(network, criterion="activations", calibration=data)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_calibration_that_takes_another_way_is_refused():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x):
            h = torch.relu(self.a(x[:, 0]))
            for _ in range(1, x.shape[1]):
                h = torch.relu(self.b(h))
            return h.sum(1)

    network = ps.trace(Steps(), torch.zeros(2, 4, 2))
    with pytest.raises(ps.network.UnmatchedForwardError, match="trac"):
        balance(network, torch.zeros(2, 6, 2), "activations")


class Product(nn.Module):
    """relu(A x) times B x, or relu(A x) squared, and C of it."""

    def __init__(self, *, gated):
        super().__init__()
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)
        self.b = nn.Linear(6, 8) if gated else None

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.c(h * h if self.b is None else h * self.b(x))


@pytest.mark.sample(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("criterion", ["range", "activations"])
def test_a_product_counts_for_each_of_its_factors(gated, criterion):
    """What reads a product is what leaves both of its factors, its values are those of both."""
    torch.manual_seed(0)
    x, ends = torch.randn(32, 6, dtype=torch.float64), []
    for rescaled in (False, True):
        torch.manual_seed(1)
        model = Product(gated=gated).double()
        expected = model(x)
        network = ps.trace(model, x)
        if rescaled:
            ps.rescaling.random_rescale_(network, generator=generator(2))
        calibration = {"calibration": x} if criterion == "activations" else {}
        ps.rescaling.balance_(network, criterion=criterion, **calibration)
        assert_close(model(x), expected)
        ends.append([p.detach().clone() for p in model.parameters()])
        leaves = model.c.weight.abs().amax(0)
        if criterion == "range":
            assert_close(model.a.weight.abs().amax(1), leaves)
            if model.b is not None:
                assert_close(model.b.weight.abs().amax(1), leaves)
        else:
            h = torch.relu(model.a(x))
            values = (h * (h if model.b is None else model.b(x))).abs().amax(0)
            alive = values > 0  # without values a unit stays where it is
            assert alive.sum() > 6
            assert_close(values[alive], leaves[alive])
    # scales of both factors of a product that only their own weights tell apart stay those of the
    # balanced member
    assert_close(ends[0], ends[1])
