"""Types that operations are asked for: integers round activations and are refused, other real types are followed."""
# ruff: noqa: ARG005

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.read, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.mask = nn.Buffer(torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self._function = function

    def forward(self, x):
        return self.out(self._function(self, self.read(x).relu()).to(self.out.weight.dtype))


def written(h):
    whole = torch.zeros(h.shape, dtype=torch.int64)
    whole[:, :] = h
    return whole


def written_in_part(h):
    whole = torch.zeros_like(h, dtype=torch.int32)
    whole[:, 1:] = h[:, 1:]
    return whole


ROUNDED = {
    "long": lambda m, h: h.long(),
    "short": lambda m, h: h.short(),
    "byte": lambda m, h: h.byte(),
    "to": lambda m, h: h.to(torch.int32),
    "to, by name": lambda m, h: h.to(dtype=torch.int32),
    "type": lambda m, h: h.type(torch.int64),
    "type, as a string": lambda m, h: h.type("torch.LongTensor"),
    "type, as a class": lambda m, h: h.type(torch.LongTensor),
    "type_as": lambda m, h: h.type_as(torch.zeros(1, dtype=torch.int64)),
    "sum": lambda m, h: h.sum(1, keepdim=True, dtype=torch.int64).expand(h.shape),
    "sum of all": lambda m, h: torch.sum(h, dtype=torch.int64) + h,
    "cumsum": lambda m, h: h.cumsum(1, dtype=torch.int64),
    "cumsum, by place": lambda m, h: torch.cumsum(h, 1, dtype=torch.int32),
    "mean": lambda m, h: h.mean(1, keepdim=True, dtype=torch.int64) + h,
    "prod": lambda m, h: h.prod(1, keepdim=True, dtype=torch.int64) + h,
    "cumprod": lambda m, h: h.cumprod(1, dtype=torch.int64),
    "nansum": lambda m, h: h.nansum(1, keepdim=True, dtype=torch.int64) + h,
    "softmax": lambda m, h: functional.softmax(h, 1, dtype=torch.int64),
    "log_softmax": lambda m, h: h.log_softmax(1, torch.int64),
    "vector_norm": lambda m, h: torch.linalg.vector_norm(h, dtype=torch.int64),
    "complex": lambda m, h: h.sum(1, dtype=torch.complex64),
    "written into whole numbers": lambda m, h: written(h),
    "written into whole numbers in part": lambda m, h: written_in_part(h),
    "truncated": lambda m, h: h.trunc(),
    "of a weight": lambda m, h: h + m.read.weight.sum(1, dtype=torch.int64),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_whole_numbers_are_refused(name):
    with pytest.raises(ps.UntraceableError, match="rounds activations to whole numbers"):
        ps.trace(Model(ROUNDED[name]), torch.zeros(2, 3), strict=True)


KEPT = {
    "sum": lambda m, h, t: h.sum(1, keepdim=True, dtype=t).expand(h.shape),
    "mean": lambda m, h, t: h.mean(1, keepdim=True, dtype=t).expand(h.shape),
    "cumsum": lambda m, h, t: h.cumsum(1, dtype=t),
    "to": lambda m, h, t: h.to(t),
    "type": lambda m, h, t: h.type(t),
    "its own type": lambda m, h, t: h.to(t).type(h.to(t).type()),
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", KEPT)
def test_other_real_types_are_followed(name, dtype):
    """The squared network is computed in one type, so it is the same; what the model sees has the type it asked for."""
    seen = []

    def asked(m, h):
        made = KEPT[name](m, h, dtype)
        seen.append(made.dtype)
        return made

    torch.manual_seed(0)
    model = Model(asked)
    norm = ps.paths.squared_path_norm(ps.trace(model, torch.zeros(2, 3)))
    assert set(seen) == {dtype}
    model._function = lambda m, h: KEPT[name](m, h, torch.float32)
    assert norm == ps.paths.squared_path_norm(ps.trace(model, torch.zeros(2, 3)))


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bool), lambda m: m.bool(), lambda m: m > 0])
def test_a_buffer_may_become_whole_numbers(cast):
    torch.manual_seed(0)
    model = Model(lambda m, h: h.masked_fill(~cast(m.mask), 0.0))
    network = ps.trace(model, torch.zeros(2, 3))
    squares = {name: p.detach().square() for name, p in model.named_parameters()}
    hidden = (squares["read.weight"].sum(1) + squares["read.bias"]) * model.mask
    expected = (squares["out.weight"] @ hidden + squares["out.bias"]).sum().item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(expected)


def test_data_may_become_whole_numbers():
    model = nn.Sequential(nn.Embedding(5, 3), nn.ReLU(), nn.Linear(3, 2))

    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x.type("torch.LongTensor"))

    assert ps.trace(Rounds(), torch.zeros(2, 3)).num_classes == 3
