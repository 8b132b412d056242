"""Runs that an exact symmetry makes the same to the last bit, so that one of them can stand for the others.

Factors that are powers of two round nothing. With them an invariant method, and one that balances
first, sees the rescaled start as it sees the balanced one; and balancing leaves a balanced start
alone. That is a claim about code, so every comparison that uses it checks it by runs of its own:
see `Settings.verified_seeds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.run import RunConfig, RunResult

Run = Callable[[Sequence[RunConfig], str], list[RunResult]]


def representative(config: RunConfig) -> RunConfig:
    """Return the run that is the same computation as `config`, from the balanced start; or `config` itself."""
    method = METHODS[config.method]
    if config.start not in ("balanced", "rescaled") or config.rescale_factor:
        return config
    if method.balances_first and method.otherwise:
        return replace(config, start="balanced", method=method.otherwise)
    return replace(config, start="balanced") if method.invariant else config


def run_distinct(configs: Sequence[RunConfig], run: Run, title: str) -> list[RunResult]:
    """Return the results of all runs, doing each computation once.

    Args:
        configs: The runs that results are wanted of.
        run: Does runs, under a title, and returns their results in order.
        title: What this stage is called.

    Returns:
        One result per configuration. A run that another one stood for has that one's numbers.
    """
    distinct = list({stands.key: stands for stands in map(representative, configs)}.values())
    results = {result.config.key: result for result in run(distinct, title)}
    return [replace(results[representative(config).key], config=config) for config in configs]


def check_symmetry(configs: Iterable[RunConfig], run: Run, title: str) -> None:
    """Do the runs that others stand for, and these, and compare them bit by bit.

    Args:
        configs: Runs of every method and start; those that stand for themselves are left out.
        run: See `run_distinct`.
        title: See `run_distinct`.

    Raises:
        ConfigurationError: A run differs from what was to stand for it.
    """
    pairs = [(config, representative(config)) for config in configs]
    pairs = [(config, stands) for config, stands in pairs if config != stands]
    needed = {config.key: config for pair in pairs for config in pair}
    results = {result.config.key: result for result in run(list(needed.values()), title)}
    for config, stands in pairs:
        if _curves(results[config.key]) != _curves(results[stands.key]):
            raise ConfigurationError(
                f"The run {config.label!r} should be the same computation as {stands.label!r} and is not: the method "
                "does not have the symmetry that it claims. Set verified_seeds = 0 to do every run."
            )


def _curves(result: RunResult) -> tuple[object, ...]:
    # as plain values: a loss that is not finite equals itself there, and is what it becomes on disk
    values = result.as_dict()
    return result.losses, values["validations"]
