"""Commands about a network by itself: check-invariance, check-scale and paths."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pathspace.cli.options import LARGEST_SEED, clear_errors, names_in, numbers_in
from pathspace.experiments.context import JsonOption, QuietOption
from pathspace.experiments.errors import ConfigurationError

MOST_NUMBERS = 1e15  # of an example: torch counts the bytes of a batch in 63 bits

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A built-in network, FILE.py:FUNCTION, MODULE:FUNCTION or FILE.onnx.",
        show_default=False,
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="Shape of one example, without the batch; needed if the function returns a model alone.",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of weights and random examples."),
]


def check_invariance(
    optimizers: Annotated[
        str | None, typer.Option("--optimizers", help="Names separated by commas; default all.")
    ] = None,
    networks: Annotated[
        str | None, typer.Option("--networks", help="Names separated by commas; default all.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Training steps of each check.")
    ] = 100,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=LARGEST_SEED, help="Seed of weights, inputs and factors."
        ),
    ] = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the optimizers and networks, and do nothing else.")
    ] = False,
) -> None:
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
        if listed:
            typer.echo(import_module("pathspace.experiments.invariance").list_candidates())
            return
        from pathspace.experiments.invariance import run_check_invariance

        if not run_check_invariance(
            names_in(optimizers, "--optimizers"),
            names_in(networks, "--networks"),
            steps=steps,
            seed=seed,
            as_json=as_json,
            quiet=quiet,
        ):
            raise typer.Exit(1)


def paths(
    model: ModelArgument,
    shape: ShapeOption = None,
    rule: Annotated[
        str, typer.Option("--rule", help="How to choose the skeleton: largest, cyclic or random.")
    ] = "largest",
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Compute the rank only up to this many paths.")
    ] = 10_000,
    seed: SeedOption = 0,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the reduction graph into this PNG file.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
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

        asked = ModelRequest(model, _sizes(shape), seed, picture, as_json, quiet)
        run_paths(asked, rule=rule, limit=limit)


def check_scale(
    model: ModelArgument,
    shape: ShapeOption = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="A state dict that torch.save wrote, for the model."),
    ] = None,
    seed: SeedOption = 0,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Draw the scales into this PNG file.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
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

        asked = ModelRequest(model, _sizes(shape), seed, picture, as_json, quiet)
        run_check_scale(asked, weights=weights)


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
