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
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)
        )
    with Large() as large:
        ps.trace(model, torch.zeros(2, WIDTH))
    assert not large.bytes
