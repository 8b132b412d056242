"""Code as libraries have it, which users cannot edit: traced rightly, or refused with advice that can be followed."""
# ruff: noqa: ARG005

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from oracles import enumerated

DOUBLE = {"dtype": torch.float64}


# --- weights standardised in the forward pass, as in BiT and NF-ResNets


class Centred(nn.Conv2d):
    def forward(self, input):
        w = self.weight
        mean, var = (
            w.mean(dim=(1, 2, 3), keepdim=True),
            w.var(dim=(1, 2, 3), keepdim=True, unbiased=False),
        )
        return functional.conv2d(input, (w - mean) / (var + 1e-5).sqrt(), self.bias)


class Together(nn.Conv2d):
    def forward(self, input):
        var, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        return functional.conv2d(input, (self.weight - mean) / torch.sqrt(var + 1e-10), self.bias)


class ByBatchNorm(nn.Conv2d):
    def forward(self, input):
        rows = self.weight.reshape(1, self.out_channels, -1)
        w = functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        return functional.conv2d(input, w.reshape_as(self.weight), self.bias)


class Scaled(nn.Conv2d):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, input):
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.3).view(-1)
        w = functional.batch_norm(
            rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6
        )
        return functional.conv2d(input, w.reshape_as(self.weight), self.bias)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Centred, Together, ByBatchNorm, Scaled])
def test_standardised_weights_are_refused_and_may_stay_outside(kind):
    layers = kind(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)
    model, x = nn.Sequential(*layers), torch.zeros(2, 3, 4, 4)
    with pytest.raises(ps.UntraceableError, match=r"in module '0'.*outside=\['0'\]"):
        ps.trace(model, x, strict=True)
    network = ps.trace(model, x, outside=["0"])
    assert network.num_classes == 5
    assert {name for name in network.outside if name.startswith("0.")} == set(network.outside)


def test_a_pooled_parameter_is_made_of_biases():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Parameter(torch.randn(1, 2, 4, **DOUBLE))
            self.out = nn.Linear(2, 3, **DOUBLE)

        def forward(self, x):
            return self.out(functional.max_pool1d(self.start, 2) + x)

    enumerated.check_paths(Pooled(), torch.randn(1, 2, 2, **DOUBLE), 0)


# --- normalization layers in their training form, where there is no data


class Excited(nn.Module):
    def __init__(self, norm, dim=2):
        super().__init__()
        conv, pool = (
            (nn.Conv2d, nn.AdaptiveAvgPool2d) if dim == 2 else (nn.Conv1d, nn.AdaptiveAvgPool1d)
        )
        self.read, self.out = conv(3, 4, 3), nn.Linear(4, 2)
        self.gate = nn.Sequential(pool(1), conv(4, 4, 1), norm, nn.Sigmoid())

    def forward(self, x):
        h = self.read(x).relu()
        return self.out((h * self.gate(h)).flatten(2).mean(2))


@pytest.mark.sample(5)
@pytest.mark.parametrize("batch_dim", ["auto", 0])
@pytest.mark.parametrize(("norm", "dim"), [
    (lambda: nn.BatchNorm2d(4), 2), (lambda: nn.BatchNorm1d(4), 1), (lambda: nn.InstanceNorm2d(4), 2),
    (lambda: nn.GroupNorm(4, 4), 2), (lambda: nn.BatchNorm2d(4, track_running_stats=False), 2),
])  # fmt: skip
def test_a_normalization_outside_needs_no_more_than_one_value(norm, dim, batch_dim):
    shape = (1, 3, 4, 4)[: 2 + dim]
    network = ps.trace(
        Excited(norm(), dim), torch.zeros(shape), outside=["gate"], batch_dim=batch_dim
    )
    assert {name.split(".")[0] for name in network.parameters} == {"read", "out"}


def test_inputs_may_be_normalized_by_their_batch():
    model = nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    assert ps.trace(model, torch.zeros(1, 3)).num_classes == 4


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("outside", [[], ["1"]])
def test_models_with_batch_norm_may_be_on_the_meta_device(mode, outside):
    def made():
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        return nn.Sequential(*layers).train(mode)

    with torch.device("meta"):
        empty = made()
    found = ps.trace(empty, torch.zeros(2, 3, 4, 4), outside=outside)
    known = ps.trace(made(), torch.zeros(2, 3, 4, 4), outside=outside)
    assert (found.num_classes, list(found.parameters)) == (
        known.num_classes,
        list(known.parameters),
    )
    with pytest.raises(RuntimeError, match=r"meta device.*trace it again"):
        ps.paths.kappa(found)


# --- division that rounds


class Model(nn.Module):
    def __init__(self, function, **parts):
        super().__init__()
        self.read, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, x, *rest):
        return self.out(self._function(self, self.read(x).relu(), *rest))


@pytest.mark.parametrize("function", [
    lambda m, h: torch.div(h, 2, rounding_mode="floor"), lambda m, h: h.div(2, rounding_mode="trunc"),
    lambda m, h: h.div_(2, rounding_mode="floor"), lambda m, h: h // 2, lambda m, h: torch.floor_divide(h, 2),
    lambda m, h: h % 2, lambda m, h: torch.fmod(h, 2), lambda m, h: h.frac(),
])  # fmt: skip
def test_division_that_rounds_is_refused(function):
    with pytest.raises(ps.UntraceableError, match="rounds activations"):
        ps.trace(Model(function), torch.zeros(2, 4), strict=True)


def test_other_division_is_not():
    ours = ps.trace(model := Model(lambda m, h: h.div(2, rounding_mode=None)), torch.zeros(2, 4))
    norm = ps.paths.squared_path_norm(ours)
    model._function = lambda m, h: h / 2
    assert ps.paths.squared_path_norm(ps.trace(model, torch.zeros(2, 4))) == norm

    class Ends(Model):
        def forward(self, x):
            return torch.div(self.out(self.read(x).relu()), 2, rounding_mode="floor")

    assert ps.trace(Ends(None), torch.zeros(2, 4)).num_classes == 6


# --- graphs

EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])


class Convolution(nn.Module):
    """As graph libraries write it: loops added, and each edge divided by the roots of two degrees."""

    def __init__(self, width, out):
        super().__init__()
        self.lin, self.bias = nn.Linear(width, out, bias=False), nn.Parameter(torch.randn(out))

    def forward(self, x, edges):
        n = x.size(0)
        loops = torch.arange(n, device=x.device).unsqueeze(0).repeat(2, 1)
        weight = torch.ones(edges.size(1), dtype=x.dtype, device=x.device)
        edges = torch.cat([edges, loops], dim=1)
        weight = torch.cat([weight, torch.full((n,), 1.0, dtype=x.dtype, device=x.device)])
        row, col = edges[0], edges[1]
        degree = torch.zeros(n, dtype=x.dtype, device=x.device).scatter_add_(0, col, weight)
        root = degree.pow_(-0.5)
        root.masked_fill_(root == float("inf"), 0)
        weight = root[row] * weight * root[col]
        said = weight.view(-1, 1) * self.lin(x).index_select(0, row)
        heard = said.new_zeros(n, said.size(1)).scatter_add_(
            0, col.view(-1, 1).expand_as(said), said
        )
        return heard + self.bias


class Mean(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.own, self.others = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x, edges):
        row, col = edges
        count = x.new_zeros(x.shape[0]).scatter_add_(0, col, x.new_ones(col.shape[0])).clamp_(min=1)
        heard = x.new_zeros(x.shape).index_add_(0, col, x[row]) / count.view(-1, 1)
        return self.own(x) + self.others(heard)


class Graph(nn.Module):
    def __init__(self, kind, edges=None):
        super().__init__()
        self.first, self.second = kind(3, 2), kind(2, 2)
        self.edges = None if edges is None else nn.Buffer(edges)

    def forward(self, x, edges=None):
        edges = self.edges if edges is None else edges
        return self.second(self.first(x, edges).relu(), edges)


@pytest.mark.sample(2)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", [Convolution, Mean])
def test_graph_networks_are_the_sum_over_their_paths(kind, given):
    torch.manual_seed(0)
    model, x = Graph(kind, None if given else EDGES).double(), torch.randn(4, 3, **DOUBLE)
    inputs = (x, EDGES) if given else x
    enumerated.check_paths(model, inputs, 2)
    enumerated.check_rescaling(model, inputs, [lambda p, n: ps.optim.PathSGD(p, n, lr=0.01)])


@pytest.mark.parametrize("kind", [Convolution, Mean])
def test_a_graph_layer_may_stay_outside(kind):
    network = ps.trace(Graph(kind), (torch.zeros(4, 3), EDGES), outside=["first"])
    assert {name.split(".")[0] for name in network.parameters} == {"second"}


SPARSE = torch.eye(3).to_sparse()


def by_hand(m, h):
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    return torch.sparse.mm(
        torch.sparse_coo_tensor(indices, torch.ones(3), (3, 3), check_invariants=True), h
    )


SPARSE_CASES = {
    "a constant": (lambda m, h: torch.sparse.mm(SPARSE, h), {}, ()),
    "a buffer": (lambda m, h: torch.sparse.mm(m.a, h), {"a": SPARSE}, ()),
    "a buffer, by an operator": (lambda m, h: m.a @ h, {"a": SPARSE}, ()),
    "an input": (lambda m, h, a: torch.sparse.mm(a, h), {}, (SPARSE,)),
    "made in the forward pass": (by_hand, {}, ()),
}


def test_a_sparse_input_of_mm_is_a_matrix_like_any_other():
    # torch.mm
    model, inputs = (
        Around(Part(lambda m, h, a: torch.spmm(a, h))),
        (torch.randn(3, 4), SPARSE),
    )
    network, before = ps.trace(model, inputs), model(*inputs)
    assert network.num_classes == 6
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert torch.equal(model(*inputs), before)


class Part(nn.Module):
    def __init__(self, function, **buffers):
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self._function = function

    def forward(self, *inputs):
        return self._function(self, *inputs)


class Around(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.read, self.part, self.out = nn.Linear(4, 6), part, nn.Linear(6, 2)

    def forward(self, x, *rest):
        return self.out(self.part(self.read(x).relu(), *rest))


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_tensors_are_refused_and_may_stay_outside(name):
    function, buffers, more = SPARSE_CASES[name]
    model, inputs = Around(Part(function, **copy.deepcopy(buffers))), (torch.zeros(3, 4), *more)
    with pytest.raises(
        ps.UntraceableError, match=r"sparse tensors are not known.*outside=\['part'\]"
    ):
        ps.trace(model, inputs, strict=True)
    assert set(ps.trace(model, inputs, outside=["part"]).parameters) == {
        "read.weight", "read.bias", "out.weight", "out.bias"
    }  # fmt: skip


# --- what a module left outside may do


def degrees(m, h):
    return torch.zeros(h.shape[0], 6).index_add(
        0, torch.tensor([0, 0]), h[torch.tensor([0, 0])] * torch.ones(6)
    )


@pytest.mark.parametrize("function", [
    lambda m, h: h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.ones(6), degrees,
    lambda m, h: torch.stack([row.softmax(0) for row in h]), lambda m, h: functional.relu(h, inplace=True) * 2,
])  # fmt: skip
def test_a_part_outside_may_use_constants(function):
    assert (
        len(ps.trace(Around(Part(function)), torch.zeros(2, 4), outside=["part"]).parameters) == 4
    )


@pytest.mark.parametrize("function", [
    lambda m, h: h if h.sum().item() > 0 else -h, lambda m, h: h + h[h > 0].sum(),
    lambda m, h: torch.from_numpy(h.detach().numpy()), lambda m, h: h * torch.bincount((h > 0).long().flatten())[1],
])  # fmt: skip
def test_a_part_outside_whose_form_depends_on_values_is_refused(function):
    with pytest.raises(
        ps.UntraceableError, match=r"module 'part'.*depends on values.*Leave a larger module"
    ):
        ps.trace(Around(Part(function)), torch.zeros(2, 4), outside=["part"])


@pytest.mark.parametrize("change", [
    lambda h: h.mul_(2), lambda h: h.sigmoid_(), lambda h: h[:, :2].add_(1), lambda h: h.__setitem__(0, 0.0),
    lambda h: functional.elu(h, inplace=True), lambda h: h.__ipow__(2),
])  # fmt: skip
def test_a_part_outside_that_changes_what_enters_it_is_refused(change):
    def changing(m, h):
        change(h)
        return h * 2

    with pytest.raises(ps.UntraceableError, match="changes in place what entered it"):
        ps.trace(Around(Part(changing)), torch.zeros(2, 4), outside=["part"])
