"""Models and trainings in safetensors files: no code in the file, nothing half-written on disk.

tensors   last.w, last.tau, last.rho, last.V0, best.* likewise if a validation has kept parameters,
          centre.* if there is a prior; sources, targets
metadata  "pathspace.sequences": JSON with the version, the alphabet, the settings, the counters and a checksum of
          all that and of the tensors
"""

from __future__ import annotations

import json
import lzma
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from pathspace.sequences.graph import Graph
from pathspace.sequences.parameters import Parameters
from pathspace.sequences.text import Alphabet
from pathspace.sequences.tokens import alphabet_from, described
from pathspace.sequences.training import Settings, Training

Built = TypeVar("Built")

_KEY = "pathspace.sequences"
VERSION = 4
"""3 had nine contexts, 2 had characters and bytes alone, an untrained network twice, and mixers in float64."""
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
WHOLE = {
    "passes",
    "restarts",
    "ensemble",
    "folds",
    "jobs",
    "heat",
    "units",
    "validate_every",
    "seed",
}
"""Options that a file holds as whole numbers of at least 0."""
_WHOLE_COUNTERS = {"passes", "tries", "best_pass"}


class ModelFileError(ValueError):
    """A file is not a sequence model that this version can read."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Content of a model file."""

    training: Training
    alphabet: Alphabet
    settings: Settings
    options: dict[str, Any]


def parts(stored: Stored) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the description of a model, without a checksum, and its tensors."""
    training = stored.training
    graph = stored.training.model.graph
    tensors = {"sources": graph.sources, "targets": graph.targets}
    tensors |= {f"last.{name}": getattr(training.model, name) for name in _ARRAYS}
    best_is_last = training.passes == 0 and training.best is training.model
    for place, parameters in (
        ("best", None if best_is_last else training.best),
        ("centre", training.centre),
    ):
        if parameters is not None:
            tensors |= {f"{place}.{name}": getattr(parameters, name) for name in _ARRAYS}
    description = {
        "version": VERSION,
        "kind": training.model.kind,
        "squash": training.model.squash,
        "units": graph.units,
        "alphabet": described(stored.alphabet),
        "end": stored.alphabet.end,
        "settings": asdict(stored.settings),
        "counters": {name: getattr(training, name) for name in _COUNTERS},
        "options": stored.options,
        "best_is_last": best_is_last,
    }
    return description, {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def dump(stored: Stored) -> bytes:
    """Return the bytes of a model file."""
    description, tensors = parts(stored)
    description["checksum"] = checksum(description, tensors)
    return save(tensors, {_KEY: json.dumps(description)})


def checksum(description: dict[str, Any], tensors: dict[str, np.ndarray]) -> int:
    """Return the CRC-32 of all that a file says, but the checksum itself."""
    said = {name: value for name, value in description.items() if name != "checksum"}
    said["tensors"] = {name: [str(array.dtype), array.shape] for name, array in tensors.items()}
    check = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].tobytes(), zlib.crc32(name.encode(), check))
    return check


def contents(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of a safetensors file.

    Raises:
        OSError: if it cannot be read.
        ModelFileError: if it is no such file.
    """
    with path.open("rb"):
        pass
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (
        SafetensorError,
        TypeError,
        AttributeError,
    ) as error:
        # the latter of types that NumPy lacks
        raise ModelFileError(
            f"{path} is no model of pathspace ({error}): give a file that `pathspace sequence fit` wrote"
        ) from error


def contents_of(content: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of the bytes that `dump` returns."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return header["__metadata__"], load_tensors(content)


def load(path: Path) -> Stored:
    """Return what a model file holds.

    Raises:
        OSError: if it cannot be read.
        ModelFileError: if it is not a model file, of a later version, or damaged.
    """
    return read(path, *contents(path))


def read(path: str | Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> Stored:
    """Return what a model file holds, of its `contents`; raises as `load` does."""
    if _KEY not in metadata:
        raise ModelFileError(f"{path} is a safetensors file, but holds no pathspace sequence model")
    return checked(path, metadata[_KEY], tensors, build)


def checked(
    path: str | Path,
    said: str,
    tensors: dict[str, np.ndarray],
    build: Callable[[dict[str, Any], dict[str, np.ndarray]], Built],
) -> Built:
    """Return what `build` makes of a description in JSON and its tensors.

    Args:
        path: where they are from, for the error.
        said: the description, with a version and a checksum.
        tensors: by name.
        build: takes the description and the tensors, and may raise what damaged ones lead to.

    Raises:
        ModelFileError: if the file is of a later version, or damaged.
    """
    try:
        description = json.loads(said)
        if description["version"] > VERSION:
            raise ModelFileError(f"{path} was written by a later version, this one reads {VERSION}")
        # JSON makes a list of a tuple, which the checksum writes alike
        if description["checksum"] != checksum(description, tensors):
            raise ModelFileError(f"{path} is damaged: its checksum does not fit")
        return build(description, tensors)
    except ModelFileError:
        raise
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
        lzma.LZMAError,
    ) as error:
        raise ModelFileError(f"{path} is damaged: {error!r}") from error


def build(description: dict[str, Any], tensors: dict[str, np.ndarray]) -> Stored:
    """Return the model of a description and its tensors; raises what a damaged one leads to."""
    graph = _graph(description["units"], tensors)

    def parameters(name: str) -> Parameters | None:
        if not any(f"{name}.{array}" in tensors for array in _ARRAYS):
            return None
        arrays = {array: tensors[f"{name}.{array}"] for array in _ARRAYS}
        found = Parameters(description["kind"], description["squash"], graph, **arrays)
        if not found.is_finite:
            raise ValueError(f"the parameters {name!r} are not finite")
        return found

    counters = {name: _number(description["counters"], name) for name in _COUNTERS}
    last = parameters("last")
    if last is None:
        raise ValueError("there are no parameters")
    best = last if description.get("best_is_last") else parameters("best")
    training = Training(model=last, best=best, centre=parameters("centre"), **counters)
    alphabet = alphabet_from(description["alphabet"], description.get("end"))
    if len(alphabet) != training.model.symbols:
        raise ValueError(f"{len(alphabet)} symbols for {training.model.symbols} rows of weights")
    if not (math.isfinite(training.rate_w) and math.isfinite(training.rate_tau)):
        raise ValueError("the rates are not finite")
    options = dict(description["options"])
    for name in WHOLE & options.keys():
        if type(options[name]) is not int or options[name] < 0:
            raise ValueError(f"the option {name} is {options[name]!r}")
    return Stored(training, alphabet, _settings(description["settings"]), options)


def _settings(said: dict[str, Any]) -> Settings:
    """Return the settings of a description, without those that other versions have."""
    known = {field.name for field in fields(Settings)}
    return Settings(**{name: value for name, value in said.items() if name in known})


def _graph(units: Any, tensors: dict[str, np.ndarray]) -> Graph:
    """Return the graph, whose size the tensors must bear out before it takes any memory."""
    sources = tensors["sources"]
    targets = tensors["targets"]
    V0 = tensors["last.V0"]
    if type(units) is not int or V0.shape != (units + 1,):
        raise ValueError(f"units={units!r} does not fit start values of shape {V0.shape}")
    if (
        sources.ndim != 1
        or sources.shape != targets.shape
        or not sources.dtype == targets.dtype == np.int64
    ):
        raise ValueError("the edges have no two ends each")
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    graph = Graph.from_edges(units, ((i, j) for i, j in pairs if i > 0))
    if not (np.array_equal(graph.sources, sources) and np.array_equal(graph.targets, targets)):
        raise ValueError("the edges are not in order")
    return graph


def _number(counters: dict[str, Any], name: str) -> Any:
    value = counters[name]
    whole = name in _WHOLE_COUNTERS
    if type(value) not in ((int,) if whole else (int, float)) or (whole and value < 0):
        raise ValueError(f"the counter {name} is {value!r}")
    return value
