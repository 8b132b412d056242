"""The device of a run: the processor, or a GPU.

Batches, initial weights and starts are made on the processor for every device, so that a run begins
with the same numbers everywhere. From the first step on rounding differs, and so do the random
numbers of dropout and the random signs of data-dependent metrics, which are drawn where the model
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda", "auto")


def chosen_device(name: str) -> str:
    """Return the device that `--device` asks for; `auto` is a GPU where there is one, else the processor.

    Raises:
        ConfigurationError: There is no such device.
    """
    if name.lower() == "gpu":  # whose spelling is nearest to cpu
        raise ConfigurationError(
            f"Unknown device {name!r} in --device: choose from {', '.join(DEVICES)}. Did you mean 'cuda'?"
        )
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES, "--device")
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.get_device_module(name).is_available():
        raise ConfigurationError(
            f"--device {name}: PyTorch {torch.__version__} sees no such device here: give --device cpu, or install a "
            "PyTorch that was built for the GPU and its driver."
        )
    return name


@contextmanager
def forked_random_state(device: torch.device) -> Iterator[None]:
    """Leave the random states of processor and device as they were."""
    import torch

    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
        return
    index = (
        torch.get_device_module(device).current_device() if device.index is None else device.index
    )
    with torch.random.fork_rng(devices=[index], device_type=device.type):
        yield


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the random state of a device beside the processor; None for the processor, whose state is torch's own."""
    import torch

    return (
        None
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device).cpu()
    )


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Undo `random_state`."""
    import torch

    torch.get_device_module(device).set_rng_state(state, device)


def on_cpu(values: Any) -> Any:
    """Return nested values, such as the state of an optimizer, with every tensor on the processor."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), values)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given, so that a clock sees it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
