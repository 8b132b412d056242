"""Networks aligned, compared and merged up to permutation and rescaling of their units."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, mlp, traced
from network.test_real_models import MODELS
from pathspace.rescaling.align import _Matching, _write
from pathspace.rescaling.assignment import best_assignment
from pathspace.rescaling.equal_norms import equal_norm_factors
from pathspace.rescaling.permutation import groups_of, state_of

NAMES = [
    *("mlp", "deep residual", "scaled residual", "siamese", "slices", "cnn 1d", "cnn 2d", "cnn 3d"),
    *(
        "dense block",
        "reshapes",
        "stacked bidirectional rnn",
        "tied characters",
        "hand-written loop",
    ),
    *("convolution transposed", "gated", "squared relu"),
    *("batch norm", "layer norm", "group norm", "small resnet"),
]


def shuffled(network, seed=1):
    """A copy whose units are permuted at random, and rescaled."""
    other = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    state = state_of(other)
    values = {name: value.detach() for name, value in state.items()}
    for group in groups_of(other):
        values = group.permuted(values, torch.randperm(len(group), generator=generator))
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(values[name])
    if other.num_classes:
        ps.rescaling.random_rescale_(other, 1 / 8, 8, generator=generator)
    return other


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_assignment_is_the_best_of_all(n):
    torch.manual_seed(n)
    values = torch.randn(n, n).double()
    best = max(
        itertools.permutations(range(n)),
        key=lambda order: sum(values[i, j] for i, j in enumerate(order)),
    )
    assert best_assignment(values).tolist() == list(best)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_order_and_scales_are_found_again(name):
    case = BY_NAME[name]
    model, network = traced(case, torch.float64)
    assert groups_of(network)
    other = shuffled(network)
    x = case.example(3, torch.float64)
    before = case.picked(call(model, x))
    assert_close(case.picked(call(other.model, x)), before)
    assert any(
        not torch.equal(p, q)
        for p, q in zip(model.parameters(), other.model.parameters(), strict=True)
    )
    assert ps.rescaling.equivalent(network, other)
    ps.rescaling.align_(other, to=network)
    assert_close(case.picked(call(other.model, x)), before)


@pytest.mark.sample(3)
@pytest.mark.parametrize("by", ["paths", "weights", "activations"])
@pytest.mark.parametrize("name", ["mlp", "cnn 1d", "dense block"])
def test_aligned_weights_are_those_of_the_other_network(name, by):
    case = BY_NAME[name]
    network = traced(case, torch.float64)[1]
    other = shuffled(network)
    examples = case.example(16, torch.float64) if by == "activations" else None
    done = ps.rescaling.align_(other, network, by=by, examples=examples)
    for key, p in network.parameters.items():
        assert_close(other.parameters[key], p, rtol=1e-6, atol=1e-8)
    assert done.held == 0
    assert sorted(done.order.tolist()) == list(range(network.num_classes))


def test_alignment_does_not_see_how_either_network_is_scaled():
    case = BY_NAME["mlp"]
    a = traced(case, torch.float64)[1]
    b = ps.trace(case.model(torch.float64, seed=7), case.example(3, torch.float64))
    orders = []
    for seed in (None, 3):
        one, other = copy.deepcopy(a), copy.deepcopy(b)
        if seed is not None:
            for network in (one, other):
                ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(seed))
        orders += [
            ps.rescaling.align_(other, one, by=by).order.tolist() for by in ("paths", "weights")
        ]
    assert orders[:2] == orders[2:]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "cnn 1d", "stacked rnn", "tied characters", "gated"])
def test_the_member_with_equal_norms(name):
    assert_is_the_member_with_equal_norms(traced(BY_NAME[name], torch.float64)[1])


@pytest.mark.parametrize("seed", [6, 11])
def test_equal_norms_where_scales_are_products_of_several(seed):
    """The scales of units that are multiplied with others depend on each other."""

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

        def forward(self, x):
            a = self.layers[0](x)
            b = self.layers[1](a)
            c = self.layers[2](b)
            self.alike = [(x * y).sum(-1) for x, y in ((a, b), (b, c))]
            return self.layers[3](c)

    torch.manual_seed(seed)
    model = Products()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.randn_like(p).exp())
    network = ps.trace(model.double(), torch.zeros(1, 4).double())
    assert network.monomials.shape[1] == 3
    assert_is_the_member_with_equal_norms(network)


def assert_is_the_member_with_equal_norms(network):
    def balanced(network):
        ps.rescaling.rescale_(network, equal_norm_factors(network))
        return [p.detach().clone() for p in network.parameters.values()]

    other = copy.deepcopy(network)
    ps.rescaling.random_rescale_(other)
    for p, q in zip(balanced(network), balanced(other), strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-9)
    # no rescaling has less squared weight in all
    s = torch.ones(network.num_classes, dtype=torch.float64, requires_grad=True)
    total = sum(
        (p.detach() * network.edge_factors(n, s)).square().sum()
        for n, p in network.parameters.items()
    )
    assert torch.autograd.grad(total, s)[0].abs().max() < 1e-6 * total


def test_tells_the_first_class_that_differs():
    case = BY_NAME["mlp"]
    network = traced(case, torch.float64)[1]
    other = shuffled(network)
    assert str(ps.rescaling.equivalent(network, other)) == "equal up to permutation and rescaling"
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.parameters["2.weight"][1, 2] += 0.1
    found = ps.rescaling.equivalent(network, shuffled(changed))
    assert not found
    assert found.where == "'linear in '0'[2]'"
    assert "not equal up to permutation and rescaling: 'linear in '0'[2]' differs by" in str(found)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.parameters["4.bias"][0] += 0.1
    assert ps.rescaling.equivalent(network, changed).where == "a weight at inputs or outputs"


def test_signs_and_buffers_are_told_apart():
    network = traced(BY_NAME["mlp"], torch.float64)[1]
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.parameters["0.weight"].neg_()
    assert not ps.rescaling.equivalent(network, other)
    network = traced(BY_NAME["batch norm"], torch.float64)[1]
    other = copy.deepcopy(network)
    ps.rescaling.random_rescale_(other)
    assert ps.rescaling.equivalent(network, other)
    next(other.model.buffers()).add_(1.0)
    found = ps.rescaling.equivalent(network, other)
    assert "buffer" in found.where
    assert str(found).endswith("differs")


def test_merged_copies_of_one_network_are_that_network():
    case = BY_NAME["deep residual"]
    model, network = traced(case, torch.float64)
    x = case.example(3, torch.float64)
    before = [p.clone() for p in model.parameters()]
    merged = ps.rescaling.merge([network, shuffled(network), shuffled(network, seed=2)])
    assert_close(case.picked(call(merged, x)), case.picked(call(model, x)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_merges_better_than_the_plain_mean():
    def trained(seed):
        torch.manual_seed(seed)
        model = mlp(2, 32, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(150):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        return ps.trace(model, x)

    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (x[:, :1] * x[:, 1:]).abs()
    networks = [trained(seed) for seed in (1, 2)]
    plain = copy.deepcopy(networks[0].model)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), networks[1].model.parameters(), strict=True):
            p.add_(q).div_(2)
    losses = [(m(x) - y).square().mean().item() for m in (plain, ps.rescaling.merge(networks))]
    assert losses[1] < 0.5 * losses[0]


class Picks(nn.Module):
    """An operation after the first layer that treats its units differently."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(3, 6), nn.Linear(6, 2), operation

    def forward(self, x):
        return self.last(self.operation(torch.relu(self.first(x))))


ORDERED = {
    "one unit": lambda h: h * 1.0 + h[:, :1],
    "a running sum": lambda h: h.cumsum(1),
    "numbers of units": lambda h: h * torch.arange(1, 7),
    "neighbours": lambda h: h + h.roll(1, 1),
    "sorted": lambda h: h.sort(1).values,
    "another order": lambda h: h[:, torch.tensor([1, 0, 2, 3, 5, 4])],
    "halves": lambda h: torch.cat([h[:, :3] + h[:, 3:], h[:, :3]], 1),
}
FREE = {"one unit": [5], "halves": [3]}  # the sizes of groups, where some units may change places


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.sample(4)
def test_what_cannot_be_permuted_keeps_its_order_and_is_told(name):
    torch.manual_seed(0)
    model = Picks(ORDERED[name]).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    network = ps.trace(model, x)
    groups = groups_of(network)
    assert [len(group) for group in groups] == FREE.get(name, [])
    other = shuffled(network)
    assert_close(other.model(x), model(x))
    if name not in FREE and network.num_classes:
        with pytest.warns(UserWarning, match="unit classes keep their order, beginning with"):
            done = ps.rescaling.align_(other, network)
        assert done.held
    assert_close(other.model(x), model(x))


class GPT(nn.Module):
    """Two pre-norm blocks, one fused projection each; the embedding is the read-out, too."""

    def __init__(self, symbols=11, width=12, heads=3, positions=6):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(symbols, width), heads
        self.positions = nn.Parameter(torch.randn(positions, width))
        self.blocks = nn.ModuleList(self.block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        self.head.weight = self.embedding.weight

    @staticmethod
    def block(width):
        layers = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 5),
            "down": (5, width),
        }
        return nn.ModuleDict(
            {name: nn.Linear(*sizes) for name, sizes in layers.items()}
            | {name: nn.LayerNorm(width) for name in ("first", "second")}
        )

    def forward(self, x):
        h = self.embedding(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for t in block["qkv"](block["first"](h)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + block["out"](mixed.transpose(1, 2).flatten(2))
            h = h + block["down"](nn.functional.gelu(block["up"](block["second"](h))))
        return self.head(self.norm(h))


class Queries(nn.Module):
    """Attention of four heads of queries for two of keys and values, with something done to queries and keys."""

    def __init__(self, prepare):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 16), nn.Linear(5, 8), nn.Linear(5, 8)
        self.out, self.prepare = nn.Linear(16, 3), prepare

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        q, k = self.prepare(q), self.prepare(k)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """Turns pairs of features by an angle that depends on the position."""

    def forward(self, t):
        angles = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.1])
        one, other = t.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True, **options)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(8, 3),
    )


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.read = nn.LSTM(3, 5, 2, batch_first=True), nn.Linear(5, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.read(self.lstm(x)[0][:, -1]).relu())


def queries():
    return torch.randn(2, 6, 5)


class UnitLength(nn.Module):
    def forward(self, x):
        return nn.functional.normalize(x, dim=-1)


def weights_with_gains(normalize, dim=0):
    return nn.Sequential(
        normalize(nn.Conv1d(3, 6, 3), dim=dim),
        nn.ReLU(),
        normalize(nn.Conv1d(6, 5, 3), dim=dim),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4, 2),
    )


# model, its input, and how many units there are in each group: residual stream, heads, features of
# queries and keys of each head, features of values of each head, hidden units
WHOLE = {
    "GPT": (GPT, lambda: torch.randint(0, 11, (2, 6)), [12, *2 * [3, *3 * [4, 4], 5]]),
    "post-norm encoder": (encoder, lambda: torch.randn(2, 4, 5), [8, *2 * [2, *2 * [4], 6]]),
    "pre-norm encoder": (
        lambda: encoder(norm_first=True, activation="gelu"),
        lambda: torch.randn(2, 4, 5),
        [8, *2 * [2, *2 * [4], 6]],
    ),
    "as they are": (lambda: Queries(nn.Identity()), queries, [2, *2 * [2], *2 * [4], *2 * [4]]),
    "one gain for all heads": (lambda: Queries(nn.RMSNorm(4)), queries, [2, *2 * [2], *2 * [4], 4]),
    "LSTM": (LSTM, lambda: torch.randn(2, 4, 3), [5, 5, 6]),
    "queries and keys of unit length": (
        lambda: Queries(UnitLength()),
        queries,
        [2, *2 * [2], *2 * [4], *2 * [4]],
    ),
}


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_with_gains_are_put_in_order(dim):
    """Directions and gains; slices that belong to inputs, or to a whole layer, keep their order."""
    torch.manual_seed(0)
    model = weights_with_gains(nn.utils.parametrizations.weight_norm, dim).double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    network = ps.trace(model, x)
    assert sorted(len(group) for group in groups_of(network)) == [5, 6]
    other = shuffled(network)
    assert_close(other.model(x), model(x))
    assert ps.rescaling.equivalent(network, other)
    with pytest.warns(UserWarning, match="keep their order, beginning with '_weight_norm"):
        ps.rescaling.align_(other, network)
    own, theirs = (m.state_dict().values() for m in (model, other.model))
    assert_close(list(theirs), list(own), rtol=1e-9, atol=1e-9)


def test_an_alignment_prints_how_much_was_moved():
    alignment = ps.rescaling.Alignment(
        torch.tensor([1, 0, 2]), torch.tensor([0.5, 1.0, 4.0]).double(), 0, (3,)
    )
    assert str(alignment) == (
        "Alignment(2 of 3 unit classes moved, factors 0.5 to 4, 0 held, 3 units of 1 group may stand in any order)"
    )


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.sample(2)
def test_units_without_a_scale_are_put_in_order_too(name):
    """Exactly as before they were shuffled: of the layers in front of a normalization, and of heads."""
    make, example, sizes = WHOLE[name]
    torch.manual_seed(0)
    model = make().double().eval()
    x = example()
    x = x.double() if x.is_floating_point() else x
    network = ps.trace(model, x)
    assert sorted(len(group) for group in groups_of(network)) == sorted(sizes)
    other = shuffled(network)
    assert_close(other.model(x), model(x))
    assert ps.rescaling.equivalent(network, other)
    done = ps.rescaling.align_(other, network)
    assert sorted(done.groups) == sorted(sizes)
    assert not done.held
    for own, theirs in zip(
        model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert_close(theirs, own, rtol=1e-9, atol=1e-9)


def test_features_move_with_heads_that_change_places_later():
    torch.manual_seed(0)
    network = ps.trace(Queries(nn.Identity()).double(), queries().double())
    groups, other = groups_of(network), shuffled(network)
    start = [torch.randperm(len(group)) for group in groups]
    start[[len(group) for group in groups].index(2)] = torch.tensor([1, 0])
    orders = _Matching(network, other, groups, "weights", None).orders(start)
    found = {name: value.detach() for name, value in state_of(other).items()}
    for group, order in zip(groups, orders, strict=True):
        found = group.permuted(found, order)
    _write(other, found)
    assert ps.rescaling.equivalent(network, other)
    done = ps.rescaling.align_(other, network)
    assert done.order.tolist() == list(range(network.num_classes))


def test_rotary_positions_hold_heads_and_what_they_turn():
    """Halves of features are turned against each other; only the features of values are left."""
    torch.manual_seed(0)
    network = ps.trace(Queries(Rotary()).double(), queries().double())
    assert [len(group) for group in groups_of(network)] == [4, 4]


class QueriesAndKeys(nn.Module):
    """Attention of two heads, queries and keys of which one layer makes and a matrix product meets."""

    def __init__(self):
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_features_of_queries_keep_the_order_of_those_of_keys():
    """The four features of each head move alone, in queries and keys at once, and so do the two heads."""
    torch.manual_seed(0)
    model = QueriesAndKeys().double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    network = ps.trace(model, x)
    groups = groups_of(network)
    assert sorted(len(group) for group in groups) == [2, 4, 4, 4, 4]
    before = model(x).detach()
    for group in groups:  # one alone, which shows whether it needs another one
        state = state_of(network)
        values = {name: value.detach().clone() for name, value in state.items()}
        for name, value in group.permuted(values, torch.arange(len(group)).flip(0)).items():
            state[name].data.copy_(value)
        assert_close(model(x), before, rtol=1e-12, atol=1e-12)
        for name, value in values.items():
            state[name].data.copy_(value)


class Dropped(nn.Module):
    """A network whose dropout has forgotten that evaluation form is another one.

    Args:
        factors: those of the units, which are dropped, too; None if units are dropped themselves.
    """

    def __init__(self, factors=None):
        super().__init__()
        self.first, self.last, self.factors = nn.Linear(3, 2), nn.Linear(2, 4), factors

    def forward(self, x):
        h = self.first(x).relu()
        if self.factors is None:
            return self.last(nn.functional.dropout(h, 0.9))
        return self.last(h * nn.functional.dropout(torch.tensor(self.factors, dtype=h.dtype), 0.9))


@pytest.mark.parametrize(
    ("factors", "sizes"), [(None, [2]), ((2.0, 2.0), [2]), ((2.0, 0.5), [])], ids=str
)
def test_dropout_does_not_decide_on_units(factors, sizes):
    """All of a draw may be dropped, which says nothing about the order of units."""
    torch.manual_seed(0)
    network = ps.trace(Dropped(factors).double(), torch.zeros(2, 3).double())
    assert [[len(group) for group in groups_of(network)] for _ in range(10)] == [sizes] * 10


def test_refuses_what_does_not_fit():
    a, b = (ps.trace(mlp(3, n, 2), torch.zeros(1, 3)) for n in (4, 5))
    for function in (lambda: ps.rescaling.align_(b, a), lambda: ps.rescaling.equivalent(a, b)):
        with pytest.raises(ValueError, match="expected two networks of one architecture"):
            function()
    with pytest.raises(ValueError, match="expected two networks or more to merge, got 1"):
        ps.rescaling.merge([a])
    with pytest.raises(
        ValueError, match="by must be one of 'paths', 'weights', 'activations', got 'kernel'"
    ):
        ps.rescaling.align_(a, a, by="kernel")
    with pytest.raises(ValueError, match="by='activations' without examples"):
        ps.rescaling.align_(a, a, by="activations")
    with pytest.raises(
        ValueError, match="the model does not take the examples; give a batch as it is called with"
    ):
        ps.rescaling.align_(a, a, by="activations", examples=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="by='paths' with examples"):
        ps.rescaling.align_(a, a, examples=torch.zeros(2, 3))


def test_dead_units_are_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        model[0].weight[1:3] = 0
        model[0].bias[1:3] = 0
        model[2].weight[:, 2:4] = 0
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert ps.rescaling.equivalent(network, shuffled(network))


def test_places_that_are_dead_on_one_example_keep_their_order():
    """Where all of them are zero, as on the first input that is drawn, any order gives the same outputs."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="no unit class"):
        network = ps.trace(model.double(), torch.zeros(1, 1, 3, 5).double())
    assert not groups_of(network)


def test_units_in_front_of_a_zero_layer_are_put_in_order():
    torch.manual_seed(0)
    model = mlp(3, 6, 6, 2).double()
    nn.init.zeros_(model[-1].weight)  # no path goes through any unit
    network = ps.trace(model, torch.zeros(1, 3).double())
    other = shuffled(network)
    assert ps.rescaling.equivalent(network, other)
    ps.rescaling.align_(other, network)
    for p, q in zip(network.parameters.values(), other.parameters.values(), strict=True):
        assert_close(q, p)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mistral", "opt", "bert", "vit", "convnext", "mobilenet", "resnet"]
)
def test_all_units_of_models_of_others_are_put_in_order(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    model = model.double().eval()
    inputs = {key: t.double() if t.is_floating_point() else t for key, t in inputs.items()}
    network = ps.trace(model, inputs)
    other = shuffled(network)
    for one, two in zip(
        network.returned(model(**inputs)), network.returned(other.model(**inputs)), strict=True
    ):
        assert_close(two, one, rtol=1e-5, atol=1e-6)  # some compute in float32
    found = ps.rescaling.equivalent(network, other)
    assert found, found
    assert not ps.rescaling.align_(other, network).held
