"""Writes through what may be the tensor itself, a view of it or a copy, in torch's many ways to say so.

The oracle is the model: the outputs of a rescaled copy, on the traced input and on others.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps

DOUBLE = {"dtype": torch.float64}

ALIASES = {
    "real": lambda h: h.real,
    "torch.real": torch.real,
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "conj": lambda h: h.conj(),
    "resolve_conj": lambda h: h.resolve_conj(),
    "resolve_neg": lambda h: h.resolve_neg(),
    "positive": torch.positive,
    "unary plus": lambda h: +h,
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(torch.float64),
    "double": lambda h: h.double(),
    "type_as": lambda h: h.type_as(h),
    "cpu": lambda h: h.cpu(),
    "view": lambda h: h.view(-1, 6),
    "view_as": lambda h: h.view_as(h),
    "expand_as": lambda h: h.expand_as(h),
    "reshape": lambda h: h.reshape(-1, 6),
    "flatten": lambda h: h.flatten(1),
    "ravel": lambda h: h.ravel().view(-1, 6),
    "atleast_2d": torch.atleast_2d,
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h)[0],
    "broadcast_to": lambda h: h.broadcast_to(h.shape),
    "transposed twice": lambda h: h.mT.mT,
    "adjoint": lambda h: h.mH.mH,
    "unsqueeze": lambda h: h.unsqueeze(1).squeeze(1),
    "select": lambda h: h[None].select(0, 0),
    "narrow": lambda h: h.narrow(1, 0, 6),
    "hsplit": lambda h: h.hsplit(1)[0],
    "tensor_split": lambda h: h.tensor_split(1, 1)[0],
    "unsafe_chunk": lambda h: h.unsafe_chunk(1, 1)[0],
    "ellipsis": lambda h: h[...],
    "identity": nn.Identity(),
    "dropout in evaluation": lambda h: functional.dropout(h, 0.5, False),
    "alpha dropout in evaluation": lambda h: functional.alpha_dropout(h, 0.5, False),
    "requires_grad_": lambda h: h.requires_grad_(True),
    "clone": lambda h: h.clone(),
    "double of a float": lambda h: h.float().double(),
    "plus nothing": lambda h: h + 0,
    "relu in place": lambda h: functional.relu(h, inplace=True),
}


class Writes(nn.Module):
    def __init__(self, alias, write):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.o = nn.Linear(4, 6, **DOUBLE), nn.Linear(6, 2, **DOUBLE)
        self._alias, self._write = alias, write

    def forward(self, x):
        with torch.no_grad():
            h = self.a(x).relu().clone()
            self._write(self._alias(h))
        return self.o(h)


def _assigned(h):
    h[:, 0] = 3.0


WRITES = {
    "an assignment": _assigned,
    "a sum in place": lambda h: h.add_(1.0),
    "a product in place": lambda h: h.mul_(h.clone()),
}


@pytest.mark.sample(60)
@pytest.mark.filterwarnings("ignore:the network has no unit class")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias", ALIASES)
def test_a_write_through_an_alias_is_followed_or_refused(alias, write):
    model, x = Writes(ALIASES[alias], WRITES[write]), torch.randn(5, 4, **DOUBLE)
    before = model(x)
    try:
        network = ps.trace(model, x)
    except ps.UntraceableError:
        return
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ps.rescaling.random_rescale_(network, powers_of_two=True, generator=generator)
        assert torch.equal(model(x), before)


def test_most_aliases_are_followed():
    """Refusing all of them would pass the test above."""
    traced = 0
    for alias in ALIASES.values():
        try:
            traced += (
                ps.trace(Writes(alias, _assigned), torch.randn(5, 4, **DOUBLE)).num_classes > 0
            )
        except ps.UntraceableError:
            continue
    assert traced >= 28
