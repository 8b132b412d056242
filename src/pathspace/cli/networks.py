"""Commands about a network by itself: check-invariance, check-scale and paths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from pathspace.cli.options import (
    LARGEST_SEED,
    argument,
    clear_errors,
    grouped,
    names_in,
    numbers_in,
)
from pathspace.experiments.context import json_option, option, quiet_option
from pathspace.experiments.errors import ConfigurationError

MOST_NUMBERS = 1e15  # of an example: torch counts the bytes of a batch in 63 bits


def _seed_option(of: str) -> Any:
    return option(f"Seed of {of}.", default=0, min=0, max=LARGEST_SEED)


@dataclass(frozen=True)
class InvarianceOptions:
    """Options of `pathspace check-invariance`."""

    optimizers: str | None = option("Names separated by commas; default all.")
    networks: str | None = option("Names separated by commas; default all.")
    steps: int = option("Training steps of each check.", default=100, min=1)
    seed: int = _seed_option("weights, inputs and factors")
    as_json: bool = json_option()
    quiet: bool = quiet_option()
    listed: bool = option(
        "List the optimizers and networks, and do nothing else.", "--list", default=False
    )


@grouped
def check_invariance(own: InvarianceOptions) -> None:
    """Check which optimizers train alike from a rescaled start, on small networks of every kind.

    Every network is trained twice, the second time after a random rescaling by powers of two
    between 2^-10 and 2^10. The exit code is 1 when an optimizer that claims invariance fails.

    \b
    Examples:
      pathspace check-invariance
      pathspace check-invariance --list
      pathspace check-invariance --networks rnn,stacked-rnn --steps 20
      pathspace check-invariance --optimizers sgd,path-sgd-momentum --json
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("check-invariance"):
        from pathspace.experiments.invariance import list_candidates, run_check_invariance

        if own.listed:
            typer.echo(list_candidates())
            return
        if not run_check_invariance(
            names_in(own.optimizers, "--optimizers"),
            names_in(own.networks, "--networks"),
            steps=own.steps,
            seed=own.seed,
            as_json=own.as_json,
            quiet=own.quiet,
        ):
            raise typer.Exit(1)


@dataclass(frozen=True)
class ModelOptions:
    """The model that a command looks at."""

    model: str = argument(
        "A built-in network, FILE.py:FUNCTION, MODULE:FUNCTION or FILE.onnx.",
        ...,
        show_default=False,
    )
    shape: str | None = option(
        "Shape of one example, without the batch; needed if the function returns a model alone.",
        "--input",
    )


@dataclass(frozen=True)
class PathsOptions:
    """Options of `pathspace paths` alone."""

    rule: str = option("How to choose the skeleton: largest, cyclic or random.", default="largest")
    limit: int = option("Compute the rank only up to this many paths.", default=10_000, min=1)
    seed: int = _seed_option("weights and random examples")
    picture: Path | None = option("Draw the reduction graph into this PNG file.")


@dataclass(frozen=True)
class ScaleOptions:
    """Options of `pathspace check-scale` alone."""

    weights: Path | None = option("A state dict that torch.save wrote, for the model.")
    seed: int = _seed_option("weights and random examples")
    picture: Path | None = option("Draw the scales into this PNG file.")


@dataclass(frozen=True)
class PrintOptions:
    """Form of the findings, and of the progress."""

    as_json: bool = json_option()
    quiet: bool = quiet_option()


@grouped
def paths(of: ModelOptions, own: PathsOptions, how: PrintOptions) -> None:
    """Count paths, basis paths, degrees of freedom and dead units of a model, and draw its skeleton.

    The built-in networks are those of check-invariance. A function takes no arguments and returns a
    model, or a model and a batch of examples; its file is run. Files of weights are not opened.

    \b
    Examples:
      pathspace paths rnn
      pathspace paths mlp --rule cyclic --picture mlp.png
      pathspace paths my_model.py:build --input 3,32,32 --json
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("paths"):
        from pathspace.experiments.diagnosis import ModelRequest, run_paths

        asked = ModelRequest(of.model, _sizes(of.shape), own.seed, own.picture, **vars(how))
        run_paths(asked, rule=own.rule, limit=own.limit)


@grouped
def check_scale(of: ModelOptions, own: ScaleOptions, how: PrintOptions) -> None:
    """Tell how far the units of a model are from balance, layer by layer.

    The table has percentiles of the scales of each layer's unit classes, relative to the balanced
    network, where all are 1. A dead class cannot be balanced: no input reaches it, or it reaches no
    output.

    The built-in networks are those of check-invariance. A function takes no arguments and returns a
    model, or a model and a batch of examples; its file is run. Weights are read without running
    code in them.

    \b
    Examples:
      pathspace check-scale mlp
      pathspace check-scale my_model.py:build --input 3,32,32 --weights trained.pt --picture scales.png
      pathspace check-scale my_model.onnx --input 3,224,224
    """  # noqa: D301 (click wants the character, not the letters)
    with clear_errors("check-scale"):
        from pathspace.experiments.diagnosis import ModelRequest, run_check_scale

        asked = ModelRequest(of.model, _sizes(of.shape), own.seed, own.picture, **vars(how))
        run_check_scale(asked, weights=own.weights)


def _sizes(shape: str | None) -> list[int] | None:
    """Return the sizes that the option --input names."""
    if shape is None:
        return None
    numbers = numbers_in(shape, "--input", "28,28") or []
    if any(n < 1 or not n.is_integer() for n in numbers):
        raise ConfigurationError(
            f"The option --input is {shape!r}: give whole numbers from 1 on, such as 28,28."
        )
    if math.prod(numbers) > MOST_NUMBERS:
        raise ConfigurationError(
            f"The option --input is {shape!r}: give a shape that fits into memory."
        )
    return [int(n) for n in numbers]
