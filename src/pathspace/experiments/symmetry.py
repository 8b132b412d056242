"""Runs that an exact symmetry makes the same to the last bit, so that one of them can stand for the others.

Factors that are powers of two round nothing. With them an invariant method, and one that balances first, sees the
rescaled start as it sees the balanced one; and balancing leaves a balanced start alone. That is a claim about code, so
every comparison that uses it confirms it by runs of its own: see `Settings.verified_seeds`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def run_distinct(
    configs: Sequence[RunConfig], run: Run, title: str, *, verified_seeds: int
) -> list[RunResult]:
    """Return the results of all runs, doing each computation once beyond the verified seeds.

    Args:
        configs: The runs that results are wanted of.
        run: Does runs, under a title, and returns their results in order.
        title: What this stage is called.
        verified_seeds: Runs of so many seeds are done whatever stands for them, and compared with that; 0 does
            every run.

    Returns:
        One result per configuration. A run that another one stood for has that one's numbers.

    Raises:
        ConfigurationError: A run differs from what was to stand for it, in any bit of its losses.
    """
    if not verified_seeds:
        return run(configs, title)
    stands = {config.key: representative(config) for config in configs}
    checked = [c for c in configs if c.seed < verified_seeds]
    wanted = [*checked, *(stands[c.key] for c in configs)]
    results = _by_key(run, wanted, title)
    for c in checked:
        other = stands[c.key]
        if results[c.key].losses != results[other.key].losses:
            raise ConfigurationError(
                f"The run {c.label!r} should be the same computation as {other.label!r} and is not: the method does "
                "not have the symmetry that it claims. Set verified_seeds = 0 to do every run."
            )
    return [
        results[c.key] if c.key in results else replace(results[stands[c.key].key], config=c) for c in configs
    ]


def _by_key(run: Run, configs: Sequence[RunConfig], title: str) -> dict[str, RunResult]:
    distinct = list({config.key: config for config in configs}.values())
    return {result.config.key: result for result in run(distinct, title)}
