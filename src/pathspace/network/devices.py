"""Tables of labels and numbers lie on the CPU, whatever device ``torch.set_default_device`` makes tensors on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def tables_on_the_cpu() -> Iterator[None]:
    """Return a context manager, also a decorator, in which tensors made without a device are on the CPU."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield
