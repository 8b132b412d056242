"""What tracing keeps of large parameters: nothing that grows with the number of their elements."""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pathspace as ps

WIDTH = 256


class Large(TorchDispatchMode):
    """Remembers the bytes of every memory on the processor that holds about as many elements as a matrix."""

    def __init__(self):
        super().__init__()
        self.bytes, self.kept = {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, Tensor) and not t.is_meta and t.untyped_storage().nbytes() > WIDTH**2:
                self.kept.append(t)  # so that no address is used again
                self.bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return result


def test_no_table_of_all_elements():
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 3),
        )
    with Large() as large:
        ps.trace(model, torch.zeros(2, WIDTH))
    assert not large.bytes


class Turned(nn.Module):
    """A matrix that is read as it is, and one that is read the other way round, as GPT-2 has them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.empty(3, WIDTH))

    def forward(self, x):
        return torch.relu(x @ self.first) @ self.second.t()


def test_nor_for_matrices_that_are_read_the_other_way_round():
    with torch.device("meta"):
        model = Turned()
    with Large() as large:
        network = ps.trace(model, torch.zeros(2, WIDTH))
    assert not large.bytes
    assert network.num_classes == WIDTH
    target, source = network.edges["first"].target, network.edges["first"].source
    assert target.expand(2, WIDTH)[1].tolist() == list(range(1, WIDTH + 1))
    assert not source.any()
    assert network.edges["second"].source.expand(3, WIDTH)[2].tolist() == list(range(1, WIDTH + 1))
