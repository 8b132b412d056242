import math
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.conftest import asked, stopped
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.run import RunConfig, factor
from pathspace.experiments.tasks.task import Task

Config = Callable[..., RunConfig]


class StoppedError(Exception):
    pass


def test_a_constant_rate_is_not_touched() -> None:
    assert {factor("constant", 0.0, step, 10) for step in range(10)} == {1.0}


def test_the_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    # 5 % of 100 steps are five steps of warm-up; then 95 steps of half a cosine
    values = [factor("cosine", 0.05, step, 100) for step in range(100)]
    assert values[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert values[5 + 19] == pytest.approx((1 + math.cos(math.pi / 5)) / 2)
    assert values[99] == pytest.approx((1 - math.cos(math.pi / 95)) / 2)
    assert all(0 < value <= 1 for value in values)
    assert values[5:] == sorted(values[5:], reverse=True)
    assert [factor("constant", 0.5, step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_the_rate_falls_to_a_tenth_at_a_half_three_quarters_and_seven_eighths() -> None:
    values = [factor("steps", 0.0, step, 16) for step in range(16)]
    assert values == pytest.approx([1.0] * 8 + [0.1] * 4 + [0.01] * 2 + [0.001] * 2)
    assert factor("steps", 0.5, 0, 4) == 0.5


def test_the_rate_falls_to_a_tenth_at_four_fifths_and_to_a_hundredth_at_the_end() -> None:
    values = [factor("drop", 0.0, step, 20) for step in range(20)]
    assert values == pytest.approx([1.0] * 16 + [0.1] * 3 + [0.01])


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="Unknown schedule 'linear' in the setting 'schedule'"
    ):
        asked({"schedule": "linear"})


def test_sgd_takes_the_steps_that_the_schedule_says(tiny_config: Config, tiny_task: Task) -> None:
    # the second of two steps: with warm-up over both, the first one has half the rate
    options = {"epochs": 1, "batch_size": 32}
    half = run(tiny_config("sgd", rate=0.05, **options), tiny_task)
    risen = run(tiny_config("sgd", rate=0.1, warmup=0.99, **options), tiny_task)
    whole = run(tiny_config("sgd", rate=0.1, **options), tiny_task)
    assert half.losses[1] == risen.losses[1] != whole.losses[1]


@pytest.mark.parametrize("method", ["sgd", "path-soap", "balanced-muon"])
def test_a_run_on_a_schedule_resumes_exactly(
    tiny_config: Config, tiny_task: Task, tmp_path: Path, method: str
) -> None:
    config = tiny_config(
        method,
        "rescaled",
        0.03,
        epochs=4,
        schedule="cosine",
        warmup=0.2,
        weight_decays=[0.1],
        validate_every=3,
    )
    whole = run(config, tiny_task)
    assert [entry.step for entry in whole.validations] == [0, 3, 4, 6, 8, 9, 12, 15, 16]

    stopped(config, tiny_task, tmp_path, 7, checkpoint_every=3)
    resumed = run(config, tiny_task, folder=tmp_path, resume=True)
    assert (resumed.losses, resumed.validations, resumed.test_error) == (
        whole.losses,
        whole.validations,
        whole.test_error,
    )
    assert run(tiny_config(method, "rescaled", 0.03, epochs=4), tiny_task).losses != whole.losses
