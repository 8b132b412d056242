"""What the commands of the command line do, once their options are read; `reproduce` has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pathspace.experiments import invariance
from pathspace.experiments.compare import Comparison
from pathspace.experiments.configuration import Configuration
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.execution import Surroundings, execute
from pathspace.experiments.layers import Layer
from pathspace.experiments.own import options_of_file
from pathspace.experiments.report.document import print_report
from pathspace.experiments.settings import OF_A_TABLE, refuse_unused, settings_from
from pathspace.experiments.tasks import OWN
from pathspace.experiments.terminal import output_console, print_json
from pathspace.progress import shown

COMPARE_TITLE = "The same network from two starts of the same function"


def run_compare(options: Layer, around: Surroundings) -> Comparison:
    """Do what `pathspace compare` was asked for; see there."""
    asked = Configuration("compare", COMPARE_TITLE, settings_from(options))
    done = execute(asked, around, given=bool(options[1]))
    print_report(done.report, done.folder, as_json=around.as_json)
    return done.comparison


QUICK: Mapping[str, Any] = {
    "seeds": 1,
    "tuning_seeds": 1,
    "tuning": "grid",
    "learning_rates": [0.003, 0.03, 0.3],
    "tuning_epochs": 1,
    "epochs": 3,
}
"""The settings of a first table, which shows that all works and little more."""


def with_own_file(options: Mapping[str, Any], file: Path | None, *, quick: bool) -> dict[str, Any]:
    """Return the options of `compare` with those of a file of the user's, and of a quick table below them.

    Raises:
        ConfigurationError: There is no such file, or the options name a task or a model beside it.
    """
    given = {**QUICK, **options} if quick else dict(options)
    if file is None:
        return given
    for name in ("task", "task_options", "model", "model_options"):
        if name in options:
            raise ConfigurationError(f"The file {str(file)!r} is task and model: leave {name!r} out.")
    of_file = options_of_file(file)
    return {**given, "task": OWN, "task_options": of_file, "model_options": of_file}


def run_train(
    method: str,
    start: str,
    learning_rate: float,
    seed: int,
    options: Layer,
    around: Surroundings,
    *,
    given: bool,
) -> Comparison:
    """Do what `pathspace train` was asked for; see there. `given`: whether any of the settings was chosen."""
    where, values = options
    one = {
        "methods": [method],
        "starts": [start],
        "learning_rates": [learning_rate],
        "seeds": 1,
        "tuning_seeds": 1,
    }
    refuse_unused(
        (*one, *OF_A_TABLE, "method_rates", "tuning_epochs"),
        values,
        "A single run has no setting {!r}: leave it out, and choose by --method, --start, --lr and --seed.",
    )
    settings = settings_from((where, {**values, **one}))
    if len(settings.weight_decays) > 1:
        raise ConfigurationError(
            "A single run has one weight decay: give one, such as --set weight_decays=[0.1]."
        )
    asked = Configuration("train", f"One run of {method} from the {start} start", settings, seed=seed)
    done = execute(asked, around, given=given or bool(values))
    print_report(done.report, done.folder, as_json=around.as_json)
    return done.comparison


def run_check_invariance(
    optimizers: Sequence[str] | None,
    networks: Sequence[str] | None,
    *,
    steps: int,
    seed: int,
    as_json: bool,
    quiet: bool = False,
) -> bool:
    """Do what `pathspace check-invariance` was asked for; None stands for all. Says whether every claim held."""
    optimizers, networks = optimizers or list(invariance.CANDIDATES), networks or list(invariance.NETWORKS)
    for kind, asked, known in (
        ("optimizer", optimizers, invariance.CANDIDATES),
        ("network", networks, invariance.NETWORKS),
    ):
        for name in asked:
            if name not in known:
                raise unknown_name(kind, name, known, f"--{kind}s")
    import torch

    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for each other
    whole, done = len(optimizers) * len(networks), 0
    with shown("checked", Console(stderr=True), quiet=quiet) as show:

        def told(verdict: invariance.Verdict) -> None:
            nonlocal done
            done += 1
            show(done / whole, f"{done}/{whole}, {verdict.optimizer} on {verdict.network}")

        verdicts = invariance.check_all(optimizers, networks, steps=steps, seed=seed, told=told)
    if as_json:
        print_json(invariance.as_json(verdicts))
    else:
        invariance.print_verdicts(verdicts, output_console())
    return not any(verdict.broken for verdict in verdicts)
