"""Checkpoints of a run: complete or absent, and refused by a run of another configuration."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import RunConfig, RunState, Validation
from pathspace.experiments.storage import make_folder, write_atomically

FILE = "checkpoint.pt"


def exists(folder: Path) -> bool:
    """Say whether `folder` holds a checkpoint."""
    return (folder / FILE).exists()


def remove(folder: Path) -> None:
    """Delete the checkpoint of a run that is done."""
    (folder / FILE).unlink(missing_ok=True)


def save(folder: Path, config: RunConfig, state: RunState) -> None:
    """Write all that the rest of the run depends on, atomically."""
    make_folder(folder)
    content = {
        "config": json.dumps(config.as_dict()),
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "carried": None if state.carried is None else list(state.carried),
        "step": state.step,
        "seconds": state.seconds,
        "diverged_at": state.diverged_at,
        "losses": torch.tensor(state.losses, dtype=torch.float64),
        "durations": torch.tensor(state.durations, dtype=torch.float64),
        "validations": torch.tensor([(v.loss, v.error) for v in state.validations], dtype=torch.float64),
        "validation_steps": [v.step for v in state.validations],
    }
    write_atomically(folder / FILE, lambda file: torch.save(content, file))


def load(folder: Path, config: RunConfig, state: RunState) -> None:
    """Bring `state` and torch's random state to what they were when the checkpoint was written.

    Raises:
        ConfigurationError: The file is broken or belongs to another configuration.
    """
    path = folder / FILE
    try:
        content = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ConfigurationError(
            f"The checkpoint {str(path)!r} cannot be read ({error}): delete it and start the run again."
        ) from error
    # What an older version did not write stood at its default.
    stored = RunConfig(**json.loads(content["config"])).as_dict()
    asked = json.loads(json.dumps(config.as_dict()))
    for name in asked:
        if stored.get(name) != asked[name]:
            raise ConfigurationError(
                f"The checkpoint {str(path)!r} was written with {name} = {stored.get(name)!r}, not "
                f"{asked[name]!r}: resume with the same settings or choose another output folder."
            )
    state.model.load_state_dict(content["model"])
    state.optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["random"])
    carried = content.get("carried")
    state.carried = None if carried is None else tuple(carried)
    state.step = content["step"]
    state.seconds = content["seconds"]
    state.diverged_at = content["diverged_at"]
    state.losses = content["losses"].tolist()
    state.durations = content["durations"].tolist() if "durations" in content else []
    values = content["validations"].reshape(-1, 2).tolist()
    state.validations = [
        Validation(step, loss, error)
        for step, (loss, error) in zip(content["validation_steps"], values, strict=True)
    ]
