"""Programs of torch.export against the modules that were exported; ATen operations against their other spelling."""

import functools
import importlib
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import pathspace as ps
from cases import PRODUCTS, ZOO, mlp
from pathspace.network.aten import DECOMPOSITIONS, aten

SAME = {"rtol": 1e-12, "atol": 0}


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2),
        )  # fmt: skip


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 3, nonlinearity="relu", batch_first=True, num_layers=2)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Transformer(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), nn.Linear(4, 2)
        )


MODELS = {
    "mlp": (lambda: mlp(4, 8, 8, 3), (4,)),
    "cnn": (Images, (2, 4, 4)),
    "rnn": (Sequences, (3, 2)),
    "transformer": (Transformer, (3, 4)),
}


def exported(model, inputs, **options):
    """Export a model whose batch may be of any size, without what torch says about itself."""
    shapes = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (inputs,), dynamic_shapes=shapes, **options)


@functools.cache
def pair(name):
    """A module and an input, and the program of the module, in float64: not to be changed."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().double().eval(), torch.randn(3, *shape, dtype=torch.float64)
    return model, x, exported(model, x)


def check_same(network, other):
    assert network.num_classes == other.num_classes
    assert list(network.parameters) == list(other.parameters)
    for a, b in zip(network.unit_classes, other.unit_classes, strict=True):
        assert (a.incoming, a.outgoing) == (b.incoming, b.outgoing)
    assert_close(ps.paths.kappa(network), ps.paths.kappa(other), **SAME)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_program_has_the_classes_and_kappa_of_its_module(name):
    model, x, program = pair(name)
    network = ps.trace(model, x)
    assert network.num_classes
    module = program.module()
    check_same(network, ps.trace(module, x))
    check_same(network, ps.trace(program, x))
    assert_close(module(x), model(x))  # it goes on as it was, and with any number of examples
    module(x[:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_decomposed_program_is_traced_too(name):
    model, x, program = pair(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = program.run_decompositions()
    check_same(ps.trace(model, x), ps.trace(program, x))


@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn"])
def test_quantities_on_data_are_those_of_the_module(name):
    model, x, program = pair(name)
    network, other = ps.trace(model, x), ps.trace(program, x)
    norms = [
        ps.paths.data_dependent_norm(n, x, statistic="second_moment") for n in (network, other)
    ]
    assert_close(*norms, **SAME)
    assert torch.equal(ps.paths.dead_units(network, x), ps.paths.dead_units(other, x))


def test_paths_of_a_program_are_listed():
    model, x, program = pair("mlp")
    network = ps.trace(program, x)
    paths = ps.paths.enumerate_paths(network)
    assert_close(paths.output(network.parameters, ps.paths.activity(network, x)), model(x))


@pytest.mark.parametrize("make", [
    lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.1),
    lambda m, n: ps.optim.DDPSGD(m.parameters(), n, lr=0.1),
])  # fmt: skip
def test_a_program_trains_invariantly(make):
    _, x, program = pair("mlp")
    report = ps.rescaling.check_invariance(
        program.module(), x, lambda out: out.square().mean(), make, steps=2
    )
    assert report.passed, report


class Accumulates(nn.Module):
    """Adds hidden units 0 and 1 up, by ``index_put`` or by ``index_add``."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how
        self.register_buffer("place", torch.tensor([0, 0, 1, 2]))

    def forward(self, x):
        h = torch.relu(self.first(x))
        empty = torch.zeros_like(h)
        if self.how == "index_add":
            return self.last(empty.index_add(1, self.place, h))
        if self.how == "index_put":
            summed = empty.t().index_put((self.place,), h.t(), accumulate=True)
            return self.last(summed.t())
        # both dimensions of a grid are indexed
        rows, columns = self.place // 2, self.place % 2
        return self.last(
            aten.index_put(empty.unflatten(1, (2, 2)), [None, rows, columns], h, True).flatten(1)
        )


@pytest.mark.parametrize("how", ["index_put", "grid"])
def test_values_put_at_one_place_are_added_up(how):
    x = torch.randn(3, 3, dtype=torch.float64)
    model, other = Accumulates("index_add").double(), Accumulates(how).double()
    other.load_state_dict(model.state_dict())
    network, summed = ps.trace(model, x), ps.trace(exported(other, x), x)
    check_same(network, summed)
    assert_close(ps.paths.sensitivity(network, x), ps.paths.sensitivity(summed, x))


def test_parameters_are_those_of_the_program():
    _, x, program = pair.__wrapped__("mlp")
    network = ps.trace(program, x)
    assert all(network.parameters[name] is p for name, p in program.named_parameters())
    before = program.module()(x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(program.module()(x), before)


def test_a_program_for_one_number_of_examples():
    model, x, _ = pair("mlp")
    program = torch.export.export(model, (x,))
    module = program.module()
    check_same(ps.trace(model, x), ps.trace(module, x))
    with pytest.raises(AssertionError, match="Guard failed"):
        module(x[:1])  # only copies go without the checks


def test_parts_cannot_be_left_outside():
    _, x, program = pair("mlp")
    with pytest.raises(ValueError, match="without modules that outside= could leave out"):
        ps.trace(program, x, outside=["0"])


def test_a_program_in_training_form_has_no_quantities_on_data():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    program = exported(model, x)
    network = ps.trace(program, x)
    check_same(ps.trace(model, x), network)
    with pytest.raises(ps.UntraceableError, match=r"exported in training form.*model.eval\(\)"):
        ps.paths.data_dependent_norm(network, x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [*ZOO, *PRODUCTS], ids=str)
def test_every_network_of_the_zoo_is_traced_as_a_program(case):
    model, x = case.model(torch.float64), case.example(3, torch.float64)
    by_name = isinstance(x, dict) and case.name == "siamese by keyword"
    args, kwargs = ((), x) if by_name else (x if isinstance(x, tuple) else (x,), {})

    def sizes(a, b):
        pairs = enumerate(zip(a.shape, b.shape, strict=True))
        return {d: torch.export.Dim.DYNAMIC for d, (m, n) in pairs if m != n}

    given = kwargs if by_name else args
    more = case.example(5, torch.float64)
    more = more if by_name or isinstance(more, tuple) else (more,)
    shapes = pytree.tree_map(sizes, given, more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    check_same(ps.trace(model, x, output=case.output), ps.trace(program, x, output=case.output))


def numbers(*shape):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


X, W, ONES = numbers(2, 4, 6, 6), numbers(4), torch.ones(4, dtype=torch.float64)
PLACES = torch.tensor([2, 0])
TWICE = torch.tensor([1, -3, 0])  # of four: the first two are one
CALLS = [
    (aten.batch_norm.default, (X, W, W, W, ONES, False, 0.1, 1e-5, False)),
    (aten.instance_norm.default, (X, W, W, None, None, True, 0.1, 1e-5, False)),
    (aten.layer_norm.default, (numbers(3, 4), [4], W, W, 1e-5, False)),
    (aten.group_norm.default, (X, 2, W, W, 1e-5, False)),
    (aten._native_batch_norm_legit_no_training.default, (X, W, W, W, ONES, 0.1, 1e-5)),
    (aten.native_layer_norm.default, (numbers(3, 4), [4], W, W, 1e-5)),
    (aten.native_group_norm.default, (X, W, W, 2, 4, 36, 2, 1e-5)),
    (aten.embedding.default, (numbers(5, 3), PLACES)),
    (aten.embedding_bag.default, (numbers(5, 3), PLACES, torch.tensor([0, 1]), False, 1)),
    (aten.slice.Tensor, (X, -1, 1, 2**63 - 1, 2)),
    (aten.slice.Tensor, (X, 0, 0, 2**63 - 1)),
    (aten.index.Tensor, (X, [None, PLACES])),
    (aten.index_put.default, (X, [None, PLACES], numbers(1))),
    (aten.index_put.default, (X, [None, PLACES], numbers(1), True)),
    (aten.index_put.default, (X, [TWICE % 2, TWICE], numbers(3, 6, 6), True)),
    (aten.index_put.default, (X, [None, TWICE], numbers(3, 6, 6), True)),
    (aten.index_put.default, (X, [None, TWICE.reshape(3, 1), TWICE], numbers(3, 6), True)),
    (aten.index_put.default, (X, [None, W > 0], numbers(1), True)),
    (aten.convolution.default, (X, numbers(4, 2, 3, 3), W, [1, 2], [1, 0], [1, 1], False, [0, 0], 2)),
    (aten.convolution.default, (X, numbers(4, 2, 3, 3), W, [2, 2], [1, 0], [1, 1], True, [1, 0], 2)),
    (aten.max_pool2d_with_indices.default, (X, [2, 2], [2, 2])),
    (aten.adaptive_max_pool2d.default, (X, [2, 3])),
    (aten._adaptive_avg_pool2d.default, (X, [2, 3])),
    (aten.squeeze.dims, (X[:1, :, :1], [0, -2])),
    (aten.squeeze.dim, (X[:1, :, :1], -2)),
    (aten.squeeze.default, (X[:1, :, :1],)),
    (aten.squeeze.dim, (X.sum(), -1)),
    (aten.constant_pad_nd.default, (X, [1, 0, 2, 1], 3.0)),
    (aten._to_copy.default, (X,)),
    (aten.alias.default, (X,)),
    (aten._unsafe_view.default, (X, [2, -1])),
    (aten.split_with_sizes.default, (X, [1, 3], 1)),
    (aten.einsum.default, ("ab,b->a", [numbers(3, 4), W])),
    (aten.upsample_nearest2d.vec, (X, None, [2.0, 2.0])),
    (aten.upsample_bilinear2d.vec, (X, [9, 9], True, None)),
    (aten._softmax.default, (X, 1, False)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args"), CALLS, ids=lambda part: str(part) if callable(part) else ""
)
def test_an_aten_operation_is_what_it_is_written_as(op, args):
    expected, found = op(*args), DECOMPOSITIONS[op.overloadpacket](*args)
    several = isinstance(expected, (tuple, list)) and op is not aten.split_with_sizes.default
    if several:  # statistics that a backward pass would read are left out
        expected, found = expected[0], found[0]
    assert_close(found, expected)


def test_private_names_of_torch_are_there():
    """Without them an exported module is refused for its hooks, or checks the sizes of inputs while it is traced."""
    unlift = importlib.import_module("torch.export._unlift")
    module = torch.export.export(nn.Linear(2, 1), (torch.zeros(3, 2),)).module()
    assert isinstance(module, unlift._StatefulGraphModule)
    assert any(isinstance(part, unlift.GuardsFn) for part in module.modules())
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    assert hooks
    assert all(hook.__module__ == unlift.__name__ for hook in hooks)
    assert isinstance(module.graph._codegen, torch.fx.graph.CodeGen)
