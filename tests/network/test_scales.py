"""Scale variables against a union-find written the plain way, one pair at a time."""

import torch
from torch import nn

import pathspace as ps
from pathspace.network.trace.scales import FIXED, WILD, Scales


class Plain:
    """Variables with values in the free group of signs: v = sign * parent."""

    def __init__(self, count):
        self.parent = {v: v for v in range(count)}

    def find(self, label):
        sign = 1 if label >= 0 else -1
        v = abs(label)
        while abs(self.parent[v]) != v:
            sign, v = sign * (1 if self.parent[v] >= 0 else -1), abs(self.parent[v])
        return sign * v

    def union(self, a, b):
        a, b = self.find(a), self.find(b)
        if a == b or WILD in (a, b):
            return
        keep, drop = (a, b) if abs(a) < abs(b) else (b, a)
        keep = FIXED if a == -b else keep
        self.parent[abs(drop)] = keep if drop > 0 else -keep


def test_pairs_merged_at_once_agree_with_pairs_merged_one_by_one():
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        scales = Scales()
        scales.fresh(20, "here")
        plain = Plain(22)
        for _ in range(3):
            size = int(torch.randint(1, 9, (), generator=generator))
            a, b = (torch.randint(-21, 22, (size,), generator=generator) for _ in range(2))
            a, b = (torch.where(t.abs() == WILD, WILD, t) for t in (a, b))
            merged = scales.unify(a, b)
            for x, y in zip(a.tolist(), b.tolist(), strict=True):
                plain.union(x, y)
            known = torch.tensor([plain.find(v) for v in range(22)])
            assert torch.equal(scales.resolve(torch.arange(22)), known)
            assert torch.equal(scales.resolve(-torch.arange(2, 22)), -known[2:])
            kept = torch.where(a == WILD, b, a)
            assert torch.equal(scales.resolve(merged), scales.resolve(kept))


def test_a_long_chain_is_one_class():
    scales = Scales()
    chain = scales.fresh(1000, "here")
    scales.unify(chain[1:], -chain[:-1])  # s_2 = 1/s_1, s_3 = 1/s_2, ...
    signs = torch.where(torch.arange(1000) % 2 == 0, 1, -1)
    assert torch.equal(scales.resolve(chain), chain[0] * signs)
    scales.unify(chain[:1], chain[1:2])
    assert not scales.resolve(chain).any()


def test_origins_count_within_their_batch():
    scales = Scales()
    first, second = scales.fresh(3, "first"), scales.fresh(2, "second")
    assert [scales.origin(v) for v in [*first.tolist(), *second.tolist()]] == [
        ("first", 0), ("first", 1), ("first", 2), ("second", 0), ("second", 1),
    ]  # fmt: skip


def test_labels_of_large_weights_take_little_memory():
    """A channel's label stands once, not once for every weight and pixel."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 36, 10),
    )  # fmt: skip
    network = ps.trace(model, torch.zeros(1, 3, 16, 16))
    for name in ("0.weight", "3.weight"):
        for labels in (network.edges[name].target, network.edges[name].source):
            assert labels.untyped_storage().nbytes() <= 64 * 8
    for labels in network.nodes.values():
        assert labels.untyped_storage().nbytes() <= 64 * 8


def test_a_merge_goes_through_the_labels_that_it_is_given(monkeypatch):
    """Not through all variables: the time to trace would grow with the square of the number of layers."""
    scales = Scales()
    scales.fresh(100_000, "here")
    for first in range(2, 2000, 2):
        scales.unify(torch.tensor([first]), torch.tensor([first + 1]))
    gone_through, through_all = [], Scales.representatives
    monkeypatch.setattr(
        Scales, "representatives", lambda self: gone_through.append(self) or through_all(self)
    )
    labels = torch.arange(2, 1000)
    for _ in range(90):
        scales.resolve(labels)
    assert not gone_through
    for _ in range(20):
        scales.resolve(labels)
    assert len(gone_through) == 1


def test_labels_of_a_sum_are_merged_at_once(monkeypatch):
    calls = []
    merge = Scales._merge
    monkeypatch.setattr(
        Scales, "_merge", lambda self, a, b: calls.append(len(a)) or merge(self, a, b)
    )
    scales = Scales()
    labels = torch.cat(
        [scales.fresh(9, "here"), -scales.fresh(2, "there"), torch.tensor([WILD])]
    ).reshape(3, 4)
    common = scales.unify_along(labels, (1,))
    assert calls == [8]
    assert torch.equal(common, torch.tensor([[2], [6], [10]]))
    assert torch.equal(scales.resolve(labels), common.expand(3, 4).where(labels != WILD, WILD))
    assert torch.equal(scales.unify_along(torch.full((2, 3), WILD), (0,)), torch.full((1, 3), WILD))


def test_indices_of_parameters_take_no_memory():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(10**6, 10**6, device="meta"))

        def forward(self, x):
            return nn.functional.embedding(x, self.w).relu()

    assert ps.trace(Words(), torch.zeros(2, 5, dtype=torch.long)).outside == ()
