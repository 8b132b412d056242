"""Checkpoints of a run: complete or absent, and refused by a run of another configuration.

checkpoint.pt         what `torch.save` wrote, then its SHA-256 as a line of text
checkpoint-before.pt  the one before, which a run goes on from if the last one is damaged
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from pathspace.experiments.devices import on_cpu, random_state, set_random_state
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import Epoch, RunConfig, RunState, Validation
from pathspace.experiments.storage import make_folder, write_atomically

FILE, BEFORE = "checkpoint.pt", "checkpoint-before.pt"
_MARK = b"\nsha256 "
_ENDING = len(_MARK) + 64
_BLOCK = 1 << 20


class DamagedError(Exception):
    """A checkpoint is not what was written."""


def exists(folder: Path) -> bool:
    """Say whether `folder` holds a checkpoint."""
    return any((folder / name).exists() for name in (FILE, BEFORE))


def remove(folder: Path) -> None:
    """Delete the checkpoints of a run that is done."""
    for name in (FILE, BEFORE):
        (folder / name).unlink(missing_ok=True)


def save(folder: Path, config: RunConfig, state: RunState) -> None:
    """Write all that the rest of the run depends on, atomically, and keep the checkpoint before."""
    device = torch.device(state.devices[-1])
    make_folder(folder)
    content = {
        "config": json.dumps(config.as_dict()),
        # On the processor, so that the run can go on where the device is missing.
        "model": on_cpu(dict(state.model.state_dict())),
        "optimizer": on_cpu(state.optimizer.state_dict()),
        "random": torch.get_rng_state(),
        "devices": state.devices,
        "device_random": random_state(device),
        "carried": None if state.carried is None else on_cpu(list(state.carried)),
        "step": state.step,
        "seconds": state.seconds,
        "diverged_at": state.diverged_at,
        "losses": torch.tensor(state.losses, dtype=torch.float64),
        "durations": torch.tensor(state.durations, dtype=torch.float64),
        "validations": torch.tensor([(v.loss, v.error) for v in state.validations], dtype=torch.float64),
        "validation_steps": [v.step for v in state.validations],
        "epochs": [(epoch.step, epoch.training, epoch.test) for epoch in state.epochs],
        "errors": state.errors,
    }

    def write(file: IO[bytes]) -> None:
        hashed = _Hashed(file)
        torch.save(content, cast(IO[bytes], hashed))
        file.write(_MARK + hashed.digest.hexdigest().encode())

    write_atomically(folder / FILE, write, keep=folder / BEFORE)


class _Hashed:
    """A file that is written to, and the digest of what is."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def load(
    folder: Path, config: RunConfig, state: RunState, noted: Callable[[str], object] = lambda _: None
) -> None:
    """Bring `state` and torch's random state to what they were when the checkpoint was written.

    A damaged checkpoint is replaced by the one before it. A checkpoint of another device goes on here, and `noted` is
    told: from there on the run is not the one that a single device would have done, to the last bits.

    Args:
        folder: Of the run.
        config: Of the run.
        state: Of the run, at its start.
        noted: Told in a sentence if a checkpoint is damaged, its name and where the run goes on; and if the device is
            another one.

    Raises:
        ConfigurationError: No file is whole, or it belongs to another configuration.
    """
    _restore(_read_whole(folder, config, noted), state, noted)


def _read_whole(folder: Path, config: RunConfig, noted: Callable[[str], object]) -> dict[str, Any]:
    """Read a checkpoint, or the one before it, of this configuration."""
    path = folder / FILE
    try:
        content = _read(path)
    except (OSError, DamagedError) as error:
        content = _before(folder, error)
        if path.exists():
            noted(
                f"The checkpoint {str(path)!r} is damaged ({error}): going on from the one before it, of step "
                f"{content['step']}."
            )
        # From here on the last one is a good one, so that the next save puts no damaged one in the place before.
        (folder / BEFORE).replace(path)
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
            set_random_state(device, content["device_random"])
    else:
        state.devices = [*before, str(device)]
        noted(
            f"The checkpoint of step {content['step']} was computed on {before[-1]}, and the run goes on on {device}: "
            "rounding, and random numbers in dropout, differ from here on from those of a run on one device."
        )
    carried = content["carried"]
    state.carried = None if carried is None else tuple(one.to(device) for one in carried)
    state.step = content["step"]
    state.seconds = content["seconds"]
    state.diverged_at = content["diverged_at"]
    state.losses = content["losses"].tolist()
    state.durations = content["durations"].tolist()
    values = content["validations"].reshape(-1, 2).tolist()
    state.validations = [
        Validation(step, loss, error)
        for step, (loss, error) in zip(content["validation_steps"], values, strict=True)
    ]
    state.epochs = [Epoch(*entry) for entry in content["epochs"]]
    state.errors = content["errors"]


def _before(folder: Path, error: Exception) -> dict[str, Any]:
    try:
        return _read(folder / BEFORE)
    except (OSError, DamagedError) as other:
        raise ConfigurationError(
            f"The checkpoint {str(folder / FILE)!r} cannot be read ({error}), nor the one before it, {BEFORE!r} "
            f"({other}): delete them and start the run again."
        ) from other


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - _ENDING
        digest = hashlib.sha256()
        for begin in range(0, size, _BLOCK):
            digest.update(file.read(min(_BLOCK, size - begin)))
        file.seek(max(size, 0))
        if file.read() != _MARK + digest.hexdigest().encode():
            raise DamagedError("its checksum does not fit")
        file.seek(0)
        try:
            return torch.load(file, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise DamagedError(str(error)) from error
