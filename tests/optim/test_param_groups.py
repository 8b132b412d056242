"""Param groups from the trace, against groups named by hand and against the graph of autograd."""

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import BY_NAME, ZOO, mlp, traced

KINDS = ("hidden", "fused", "filters", "embeddings", "readouts", "vectors", "outside")


def names(groups):
    return {kind: sorted(getattr(groups, kind)) for kind in KINDS if getattr(groups, kind)}


class Block(nn.Module):
    """A block of a transformer: softmax and GELU cut the network."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(*[self.norm(x)] * 3, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places))).softmax(-1)


def of_transformer(*, tied=False):
    return ps.optim.param_groups(
        ps.trace(Transformer(tied=tied), torch.zeros(1, 5, dtype=torch.long))
    )


def test_of_a_transformer():
    found = names(of_transformer())
    assert found.pop("hidden") == sorted(
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.out_proj", "up", "down")
    )
    assert found.pop("fused") == [f"blocks.{i}.attention.in_proj_weight" for i in (0, 1)]
    assert found.pop("embeddings") == ["places", "tokens.weight"]
    assert found.pop("readouts") == ["head.weight"]
    assert found.keys() == {"vectors"}
    assert of_transformer().blocks["blocks.0.attention.in_proj_weight"] == (8, 8, 8)


def test_a_tied_matrix_is_in_one_group():
    groups = of_transformer(tied=True)
    assert "tokens.weight" in groups.embeddings
    assert not groups.readouts


class Mixed(nn.Module):
    """A recurrent layer that cuts the network, between two matrices; a gain of two dimensions; filters."""

    def __init__(self):
        super().__init__()
        self.conv, self.deep = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(4, 6))
        self.before, self.lstm, self.after = (
            nn.Linear(4, 4),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        x = self.deep(self.conv(x).relu()) * self.gain
        return self.after(self.lstm(self.before(x.transpose(1, 2).relu()))[0])


def test_of_convolutions_and_a_layer_that_is_cut():
    found = names(ps.optim.param_groups(ps.trace(Mixed(), torch.zeros(1, 2, 6))))
    assert found["embeddings"] == ["conv.weight"]
    assert found["filters"] == ["deep.weight"]
    assert found["hidden"] == ["before.weight"]
    assert found["readouts"] == ["after.weight"]
    assert found["vectors"] == ["after.bias", "before.bias", "conv.bias", "deep.bias", "gain"]
    assert all(name.startswith("lstm.") for name in found["outside"])


def test_gains_of_normalized_weights_are_no_matrices():
    layers = [
        nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)) for sizes in ((3, 5), (5, 5))
    ]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(5, 2))
    found = names(ps.optim.param_groups(ps.trace(model, torch.zeros(1, 3))))
    assert found["embeddings"] == ["0.parametrizations.weight.original1"]
    assert found["hidden"] == ["2.parametrizations.weight.original1"]
    assert "2.parametrizations.weight.original0" in found["vectors"]


@pytest.mark.parametrize("outside", ["0", "2", "4"])
def test_modules_left_outside_have_a_place(outside):
    every = {"0": "embeddings", "2": "hidden", "4": "readouts"}
    model = nn.Sequential(mlp(3, 5, 5, 2), nn.ReLU())[0]
    found = names(ps.optim.param_groups(ps.trace(model, torch.zeros(1, 3), outside=outside)))
    assert found["outside"] == [f"{outside}.bias", f"{outside}.weight"]
    for layer, kind in every.items():
        if layer != outside:
            assert found[kind] == [f"{layer}.weight"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rnn", {"embeddings": ["rnn.weight_ih_l0"], "hidden": ["rnn.weight_hh_l0"]}),
        (
            "stacked rnn",
            {
                "embeddings": ["rnn.weight_ih_l0"],
                "hidden": sorted(
                    [f"rnn.weight_hh_l{i}" for i in range(3)]
                    + [f"rnn.weight_ih_l{i}" for i in (1, 2)]
                ),
            },
        ),
    ],
)
def test_of_recurrent_layers(name, expected):
    found = names(ps.optim.param_groups(traced(BY_NAME[name], torch.float64)[1]))
    assert {kind: found[kind] for kind in expected} == expected


def uses(outputs, parameters):
    """Return (name, whether matrices come before it, whether after it) for each use of a matrix in autograd's graph."""
    names_of = {id(p): name for name, p in parameters.items()}
    matrices, below = {}, {}

    def walk(node):
        if node not in below:
            others = [n for n, _ in node.next_functions if n is not None]
            read = [leaf for n in others if (leaf := leaf_behind(n)) is not None]
            matrices[node] = [
                names_of[id(leaf.variable)] for leaf in read if id(leaf.variable) in names_of
            ]
            below[node] = set().union(*({n} | walk(n) for n in others if leaf_behind(n) is None))
        return below[node]

    walk(outputs.grad_fn)
    users = {node for node, read in matrices.items() if read}
    for node in users:
        above = any(node in below[other] for other in users)
        for name in matrices[node]:
            yield name, bool(below[node] & users), above


def leaf_behind(node):
    """Return the leaf that a node is a transposition of; None for anything else."""
    while node is not None and not hasattr(node, "variable"):
        if type(node).__name__ not in ("TBackward0", "TransposeBackward0", "ViewBackward0"):
            return None
        node = node.next_functions[0][0]
    return node


@pytest.mark.parametrize(
    "name",
    ["mlp", "skip", "deep residual", "same layer twice", "small resnet", "hand-written loop"],
)
def test_ends_are_those_of_the_graph_of_autograd(name):
    model, network = traced(BY_NAME[name], torch.float32)
    matrices = {n: p for n, p in model.named_parameters() if p.dim() > 1}
    groups = ps.optim.param_groups(network)
    hidden, first = set(), set()
    for matrix, before, after in uses(model(BY_NAME[name].inputs(2)), matrices):
        if before and after:
            hidden.add(matrix)
        if after and not before:
            first.add(matrix)
    assert {*groups.hidden, *groups.filters} == hidden
    assert {*groups.embeddings} == first - hidden
    assert {*groups.readouts} == matrices.keys() - hidden - first


@pytest.mark.parametrize("case", ZOO[::6], ids=lambda case: case.name)
def test_every_parameter_is_in_one_group(case):
    model, network = traced(case, torch.float32)
    ids = [id(p) for group in ps.optim.param_groups(network) for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}


def test_optimizers_take_them():
    model = mlp(3, 5, 5, 2)
    network = ps.trace(model, torch.zeros(1, 3))
    groups = ps.optim.param_groups(network)
    assert [(g["kind"], g["use_muon"]) for g in groups] == [
        ("hidden", True),
        ("embeddings", False),
        ("readouts", False),
        ("vectors", False),
    ]
    muon = torch.optim.Muon(groups.hidden.values(), lr=0.01)
    adamw = torch.optim.AdamW([g for g in groups if g["kind"] != "hidden"], lr=0.01)
    path_muon = ps.optim.PathMuon(groups, network, lr=0.01)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.randn(4, 3)).square().sum().backward()
    for optimizer in (muon, adamw, path_muon):
        optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())
    assert len(path_muon.param_groups) == 4


def test_prints_a_line_for_each_group():
    text = str(ps.optim.param_groups(ps.trace(mlp(3, 5, 5, 2), torch.zeros(1, 3))))
    assert "hidden             25 weights  2.weight" in text
    assert "outside             0 weights" in text
