"""The checkpoint of a run: complete or absent, and refused by a run of another configuration."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import CHECKPOINT, Epoch, RunConfig, RunState, Validation
from pathspace.experiments.storage import make_folder, write_atomically

PLAIN = ("step", "seconds", "diverged_at", "losses", "durations", "errors")
"""What of a run is numbers and lists of them."""


def save(folder: Path, config: RunConfig, state: RunState) -> None:
    """Write all that the rest of the run depends on, atomically."""
    device = torch.device(state.devices[-1])
    make_folder(folder)
    content = {
        "config": json.dumps(config.as_dict()),
        # On the processor, so that the run can go on where the device is missing.
        "model": _on_cpu(dict(state.model.state_dict())),
        "optimizer": _on_cpu(state.optimizer.state_dict()),
        "random": torch.get_rng_state(),
        "devices": state.devices,
        "device_random": _random_state(device),
        "carried": None if state.carried is None else _on_cpu(list(state.carried)),
        "validations": [astuple(validation) for validation in state.validations],
        "epochs": [astuple(epoch) for epoch in state.epochs],
        "plain": {name: getattr(state, name) for name in PLAIN},
    }
    write_atomically(folder / CHECKPOINT, lambda file: torch.save(content, file))


def load(
    folder: Path,
    config: RunConfig,
    state: RunState,
    noted: Callable[[str], object] = lambda _: None,
) -> None:
    """Bring `state` and torch's random state to what they were when the checkpoint was written.

    A checkpoint of another device goes on here, and `noted` is told so in a sentence: from there on the
    run is not the one that a single device would have done, to the last bits.
    """
    _restore(_read(folder / CHECKPOINT, config), state, noted)


def _read(path: Path, config: RunConfig) -> dict[str, Any]:
    """Read a checkpoint of this configuration."""
    try:
        # torch does not look at the checksums of its own file
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise ValueError("its checksum does not fit")
        content = torch.load(path, weights_only=True)
    except Exception as error:  # of many kinds, for damage may be anywhere
        raise ConfigurationError(
            f"The checkpoint {str(path)!r} cannot be read ({error}): delete it and give the command again, which "
            "starts this run anew."
        ) from error
    if "plain" not in content:
        raise ConfigurationError(
            f"The checkpoint {str(path)!r} was written by an earlier version of pathspace: delete it and give the "
            "command again, which starts this run anew."
        )
    stored = {**RunConfig.defaults(), **json.loads(content["config"])}
    asked = json.loads(json.dumps(config.as_dict()))
    for name in asked:
        if stored[name] != asked[name]:
            raise ConfigurationError(
                f"The checkpoint {str(path)!r} was written with {name} = {stored[name]!r}, not "
                f"{asked[name]!r}: resume with the same settings or choose another output folder."
            )
    return content


def _restore(content: dict[str, Any], state: RunState, noted: Callable[[str], object]) -> None:
    state.model.load_state_dict(content["model"])
    state.optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["random"])
    device = torch.device(state.devices[-1])
    before = content["devices"]
    if before[-1] == str(device):
        state.devices = before
        if content["device_random"] is not None:
            of_device = content["device_random"]
            torch.get_device_module(device).set_rng_state(of_device, device)
    else:
        state.devices = [*before, str(device)]
        noted(
            f"The checkpoint of step {content['plain']['step']} was computed on {before[-1]}, and the run goes on on "
            f"{device}: rounding, and random numbers in dropout, differ from here on from those of a run on one device."
        )
    carried = content["carried"]
    state.carried = None if carried is None else tuple(one.to(device) for one in carried)
    state.validations = [Validation(*entry) for entry in content["validations"]]
    state.epochs = [Epoch(*entry) for entry in content["epochs"]]
    for name in PLAIN:
        setattr(state, name, content["plain"][name])


def _random_state(device: torch.device) -> torch.Tensor | None:
    """Return the random state of a device beside the processor; None for the processor, whose state is torch's own."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).get_rng_state(device).cpu()


def _on_cpu(values: Any) -> Any:
    """Return nested values, such as the state of an optimizer, with every tensor on the processor."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), values)
