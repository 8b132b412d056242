"""The command `pathspace check-scale`: the distance of a model from balance."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.model_source import in_words_of_commands, load_model, trace_model
from pathspace.experiments.storage import make_folder, picture_file, write_bytes
from pathspace.experiments.terminal import print_json
from pathspace.network import UntraceableError
from pathspace.rescaling.imbalance import Imbalance, imbalance
from pathspace.tools.progress import steps_shown

WRAPPERS = ("module.", "_orig_mod.")
"""What data parallelism and `torch.compile` put before the names in a state dict."""


def run_check_scale(
    source: str,
    shape: Sequence[int] | None,
    *,
    weights: Path | None,
    seed: int,
    picture: Path | None,
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Do what `pathspace check-scale` was asked for; see there."""
    file = picture_file(picture)
    with (
        steps_shown(Console(stderr=True), quiet=quiet) as begin,
        redirect_stdout(sys.stderr if as_json else sys.stdout),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        begin("Loading the model")
        model, examples = load_model(source, shape, seed)
        if weights is not None:
            _load(model, weights)
        try:
            begin("Tracing the model")
            network = trace_model(model, examples)
            begin("Measuring the scales")
            found = imbalance(network)
        except (
            UntraceableError,
            ValueError,
            TypeError,
            IndexError,
            RuntimeError,
            FloatingPointError,
        ) as error:
            said = in_words_of_commands(error, examples)
            raise ConfigurationError(f"{source!r}: {said}") from error
    if file is not None:
        write_bytes(make_folder(file.parent) / file.name, _png(found))
    if as_json:
        content = asdict(found) | {"scales": found.scales.tolist()}
        print_json({"model": source, **content, "verdict": found.verdict})
    else:
        print(found)
        if file is not None:
            print(f"Picture: {file}")


def _load(model: nn.Module, file: Path) -> None:
    """Load a file with a state dict into a model; no code in it is run."""
    if not file.is_file():
        raise ConfigurationError(f"--weights {str(file)!r}: there is no such file.")
    option = f"--weights {str(file)!r}"
    # without torch's own words, which advise to run the code in the file
    unreadable = ConfigurationError(
        f"{option}: this is no state dict that torch.save wrote. Save one with torch.save(model.state_dict(), FILE)."
    )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: bytes that are no pickle may mean anything
        raise unreadable from error
    if not isinstance(content, Mapping):
        raise unreadable
    state = content.get("model", content.get("state_dict", content))
    if not isinstance(state, Mapping):
        raise unreadable
    state = dict(state)
    for prefix in WRAPPERS:
        consume_prefix_in_state_dict_if_present(state, prefix)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"{option}: these weights do not fit the model: {error}"
        ) from error


def _png(found: Imbalance) -> bytes:
    buffer = io.BytesIO()
    found.figure().savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
