"""Models and trainings in safetensors files: no code in the file, nothing half-written on disk.

tensors   last.w, last.tau, last.rho, last.V0, best.* likewise if the validation has kept other parameters,
          centre.* if there is a prior; sources, targets
metadata  "pathspace.sequences": JSON with the version, the alphabet, the settings, the counters and a checksum of
          the tensors
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .graph import Graph
from .parameters import Parameters
from .text import Alphabet
from .training import Settings, Training

_KEY = "pathspace.sequences"
_VERSION = 1
_ARRAYS = ("w", "tau", "rho", "V0")
_COUNTERS = (
    "rate_w",
    "rate_tau",
    "passes",
    "tries",
    "seconds",
    "log_likelihood",
    "best_bits",
    "best_pass",
    "validation_bits",
)


class ModelFileError(ValueError):
    """A file is not a sequence model that this version can read."""


@dataclass(frozen=True, eq=False)
class Stored:
    """What a model file holds."""

    training: Training
    alphabet: Alphabet
    settings: Settings
    options: dict[str, Any]


def dump(stored: Stored) -> bytes:
    """Return the bytes of a model file."""
    training, graph = stored.training, stored.training.model.graph
    tensors = {"sources": graph.sources, "targets": graph.targets}
    tensors |= {f"last.{name}": getattr(training.model, name) for name in _ARRAYS}
    for place, parameters in (("best", training.best), ("centre", training.centre)):
        if parameters is not None:
            tensors |= {f"{place}.{name}": getattr(parameters, name) for name in _ARRAYS}
    symbols = stored.alphabet.symbols
    description = {
        "version": _VERSION,
        "kind": training.model.kind,
        "squash": training.model.squash,
        "units": graph.units,
        "alphabet": list(symbols) if isinstance(symbols, bytes) else symbols,
        "settings": asdict(stored.settings),
        "counters": {name: getattr(training, name) for name in _COUNTERS},
        "options": stored.options,
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    description["checksum"] = _checksum(tensors)
    return save(tensors, {_KEY: json.dumps(description)})


def _checksum(tensors: dict[str, np.ndarray]) -> int:
    check = 0
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].tobytes(), zlib.crc32(name.encode(), check))
    return check


def load(path: Path) -> Stored:
    """Return what a model file holds.

    Raises:
        OSError: if it cannot be read.
        ModelFileError: if it is not a model file, of a later version, or damaged.
    """
    with path.open("rb"):
        pass
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelFileError(f"{path} is not a safetensors file: {error}") from error
    if _KEY not in metadata:
        raise ModelFileError(f"{path} is a safetensors file, but holds no pathspace sequence model")
    try:
        description = json.loads(metadata[_KEY])
        version = description["version"]
        if version > _VERSION:
            raise ModelFileError(
                f"{path} was written by a later version ({version}, this one reads {_VERSION})"
            )
        # files of earlier versions have none
        if description.get("checksum", check := _checksum(tensors)) != check:
            raise ModelFileError(f"{path} is damaged: the checksum of its tensors does not fit")
        return _build(description, tensors)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} is damaged: {error!r}") from error


def _build(description: dict[str, Any], tensors: dict[str, np.ndarray]) -> Stored:
    units = int(description["units"])
    pairs = zip(tensors["sources"].tolist(), tensors["targets"].tolist(), strict=True)
    graph = Graph.from_edges(units, ((i, j) for i, j in pairs if i > 0))
    if not np.array_equal(graph.sources, tensors["sources"]):
        raise ValueError("the edges are not in order")

    def parameters(name: str) -> Parameters | None:
        if f"{name}.w" not in tensors:
            return None
        arrays = {array: tensors[f"{name}.{array}"] for array in _ARRAYS}
        return Parameters(description["kind"], description["squash"], graph, **arrays)

    symbols = description["alphabet"]
    alphabet = Alphabet(symbols if isinstance(symbols, str) else bytes(symbols))
    counters = {name: description["counters"][name] for name in _COUNTERS}
    last = parameters("last")
    if last is None:
        raise ValueError("there are no parameters")
    training = Training(model=last, best=parameters("best"), centre=parameters("centre"), **counters)
    if len(alphabet) != training.model.symbols:
        raise ValueError(f"{len(alphabet)} symbols for {training.model.symbols} rows of weights")
    if not all(math.isfinite(rate) for rate in (training.rate_w, training.rate_tau)):
        raise ValueError("the rates are not finite")
    known = {field.name for field in fields(Settings)}
    settings = Settings(**{name: v for name, v in description["settings"].items() if name in known})
    return Stored(training, alphabet, settings, dict(description["options"]))
