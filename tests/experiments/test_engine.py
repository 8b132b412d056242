import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from cases import slow_besides
from experiments.conftest import stopped
from experiments.rules import EACH_RULE
from pathspace.experiments import engine
from pathspace.experiments.engine import epoch_order, run, total_steps
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import RESCALABLE
from pathspace.experiments.run import CHECKPOINT, RunConfig, RunResult, Validation
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Split, Task

Config = Callable[..., RunConfig]


def same(one: RunResult, other: RunResult) -> bool:
    return (one.losses, one.validations, one.epochs, one.test_error, one.diverged_at) == (
        other.losses,
        other.validations,
        other.epochs,
        other.test_error,
        other.diverged_at,
    )


def start_for(method: str) -> str:
    return "rescaled" if METHODS[method].model in ("", *RESCALABLE) else "default"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "momentum"),
    [
        *slow_besides([(m, 0.9) for m in EACH_RULE], [(m, 0.9) for m in METHODS]),
        *((method, 0.0) for method in ("sgd", "path-sgd", "g-sgd", "ddp-sgd")),
    ],
)
def test_a_killed_run_resumes_exactly(
    tiny_config: Config, tiny_task: Task, tmp_path: Path, method: str, momentum: float
) -> None:
    config = tiny_config(
        method, start_for(method), 0.01, epochs=4, momentum=momentum, clip_norm=1.0
    )
    whole = run(config, tiny_task)
    assert len(whole.losses) == total_steps(config, tiny_task) == 16
    # Dies at step 7, in the middle of an epoch; the last checkpoint is from step 6; then again at
    # step 12.
    stopped(config, tiny_task, tmp_path, 7, checkpoint_every=3)
    stopped(config, tiny_task, tmp_path, 12, checkpoint_every=3, resume=True)
    assert same(run(config, tiny_task, folder=tmp_path, resume=True), whole)


def test_without_resume_an_old_checkpoint_is_ignored(
    tiny_config: Config, tiny_task: Task, tmp_path: Path
) -> None:
    config = tiny_config()
    run(config, tiny_task, folder=tmp_path, checkpoint_every=3)
    assert (tmp_path / CHECKPOINT).exists()
    assert same(run(config, tiny_task, folder=tmp_path), run(config, tiny_task))


@pytest.mark.parametrize(
    "change", [{"rate": 0.06}, {"seed": 1}, {"batch_size": 8}, {"model_options": {"hidden": 7}}]
)
def test_a_checkpoint_of_another_configuration_is_refused(
    tiny_config: Config, tiny_task: Task, tmp_path: Path, change: dict[str, Any]
) -> None:
    run(tiny_config(), tiny_task, folder=tmp_path, checkpoint_every=3)
    with pytest.raises(ConfigurationError, match="was written with"):
        run(tiny_config(**change), tiny_task, folder=tmp_path, resume=True)


def test_a_checkpoint_of_an_earlier_version_lacks_what_came_later(
    tiny_config: Config, tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunConfig.as_dict
    with monkeypatch.context() as earlier:
        earlier.setattr(
            RunConfig, "as_dict", lambda c: {k: v for k, v in whole(c).items() if k != "stop_error"}
        )
        stopped(tiny_config(), tiny_task, tmp_path, 5, checkpoint_every=3)
    with pytest.raises(ConfigurationError, match=r"was written with stop_error = 0.0, not 1.0"):
        run(replace(tiny_config(), stop_error=1.0), tiny_task, folder=tmp_path, resume=True)
    assert same(
        run(tiny_config(), tiny_task, folder=tmp_path, resume=True), run(tiny_config(), tiny_task)
    )


def test_a_broken_checkpoint_is_named(tiny_config: Config, tiny_task: Task, tmp_path: Path) -> None:
    for content in (b"nothing", b"", b"n" * 1000):
        (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(
            ConfigurationError, match=r"checkpoint\.pt' cannot be read \(.*\): delete it"
        ):
            run(tiny_config(), tiny_task, folder=tmp_path, resume=True)


def test_a_checkpoint_of_another_form_is_refused(
    tiny_config: Config, tiny_task: Task, tmp_path: Path
) -> None:
    run(tiny_config(), tiny_task, folder=tmp_path, checkpoint_every=3)
    content = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    torch.save(content | content.pop("plain"), tmp_path / CHECKPOINT)  # as it was before
    with pytest.raises(
        ConfigurationError, match=r"earlier version of pathspace: delete it and give"
    ):
        run(tiny_config(), tiny_task, folder=tmp_path, resume=True)


def test_runs_are_reproducible_and_leave_the_caller_alone(
    tiny_config: Config, tiny_task: Task
) -> None:
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    one = run(tiny_config(threads=threads + 1), tiny_task)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(4)
    assert same(one, run(tiny_config(threads=threads + 1), tiny_task))
    assert not same(one, run(tiny_config(seed=1), tiny_task))


# two refreshes in twelve steps
CLIPPED = {
    "momentum": 0.9,
    "clip_norm": 0.5,
    "refresh_every": 3,
    "epochs": 3,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *slow_besides(
            [(name, CLIPPED) for name in EACH_RULE if METHODS[name].invariant],
            [(name, CLIPPED) for name, entry in METHODS.items() if entry.invariant],
        ),
        *((name, {"epochs": 6}) for name in ("path-sgd", "path-adam", "g-sgd", "ddp-sgd")),
    ],
)
def test_invariant_methods_give_the_same_curve_from_a_rescaled_start(
    tiny_config: Config, tiny_task: Task, method: str, options: dict[str, float]
) -> None:
    rate = 1e-6 if method == "g-sgd-published" else 0.01  # its multipliers are as large
    balanced, rescaled = (
        run(tiny_config(method, start, rate, rescale_exponent=10, **options), tiny_task)
        for start in ("balanced", "rescaled")
    )
    assert balanced.losses == rescaled.losses
    assert balanced.validations == rescaled.validations


def test_all_starts_are_the_same_function_but_not_the_same_weights(
    tiny_config: Config, tiny_task: Task
) -> None:
    starts = [
        run(tiny_config("sgd", start), tiny_task) for start in ("default", "balanced", "rescaled")
    ]
    assert starts[1].validations[0] == starts[2].validations[0]
    assert starts[0].validations[0].loss == pytest.approx(starts[1].validations[0].loss, rel=1e-5)
    assert starts[1].losses[2] != starts[2].losses[2]


def test_a_run_that_diverges_ends_there(tiny_config: Config, tiny_task: Task) -> None:
    result = run(tiny_config("sgd", rate=1e20), tiny_task)
    assert result.diverged_at is not None
    assert len(result.losses) == result.diverged_at < total_steps(result.config, tiny_task)
    assert torch.tensor(result.losses).isfinite().all()
    assert result.test_error is None
    assert result.validation_score == (float("inf"), float("inf"))
    assert TypeAdapter(RunResult).validate_python(result.as_dict()) == result


def test_divergence_that_only_validation_shows_counts(tiny_config: Config, tiny_task: Task) -> None:
    # One step per epoch: the loss of the only batch is finite, the weights after it are not.
    result = run(tiny_config("sgd", rate=1e30, epochs=1, batch_size=64), tiny_task)
    assert len(result.losses) == 1
    assert result.diverged_at == 1


def test_a_test_error_that_overflows_counts_as_divergence(
    tiny_config: Config, tiny_task: Task
) -> None:
    # Of a loss of 800 nats the perplexity is not a float, and no JSON file can hold it.
    overflowing = replace(tiny_task, reported=lambda _mean: math.inf)
    result = run(tiny_config("sgd", rate=0.01, epochs=1), overflowing)
    assert result.test_error is None
    assert result.diverged_at == len(result.losses) == total_steps(result.config, tiny_task)
    json.dumps(result.as_dict(), allow_nan=False)


def test_a_run_learns(tiny_task: Task, tiny_config: Config) -> None:
    result = run(tiny_config("adam", rate=0.01, epochs=40), tiny_task)
    assert result.validations[-1].error < 0.5 * result.validations[0].error
    assert [v.step for v in result.validations] == list(range(0, 161, 4))


def test_the_test_split_is_looked_at_only_when_asked(
    tiny_task: Task, tiny_config: Config, tiny_settings: Callable[..., Any]
) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> None:
            raise AssertionError("the test split was touched")

    task = replace(tiny_task, test=Untouchable())  # type: ignore[arg-type]
    config = tiny_settings().run_config("sgd", "balanced", 0.1, 0, evaluate_test=False)
    assert run(config, task).test_error is None
    with pytest.raises(AssertionError, match="touched"):
        run(replace(config, evaluate_test=True), task)


def test_no_more_than_four_batches_are_evaluated_at_a_time(
    tiny_config: Config, tiny_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits into memory in training does so in evaluation, whatever the width of the model."""
    evaluated: list[int] = []

    def noted(_: object, split: Split, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if split is tiny_task.validation:
            evaluated.append(len(chosen))
        return split.inputs[chosen], split.targets[chosen]

    monkeypatch.setattr(engine._Training, "_batch", noted)
    config = replace(tiny_config(epochs=1), batch_size=2)
    found = run(config, tiny_task).validations[0]
    whole, last = divmod(len(tiny_task.validation.inputs), 8)
    assert evaluated[: whole + bool(last)] == [8] * whole + [last] * bool(last)
    assert whole > 1
    monkeypatch.setattr(engine, "BATCHES_EVALUATED_AT_A_TIME", 1000)
    assert run(config, tiny_task).validations[0].loss == pytest.approx(found.loss, rel=1e-5)


def test_an_epoch_goes_through_every_sequence_once_in_an_order_of_its_own() -> None:
    orders = [epoch_order(50, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_a_batch_larger_than_the_training_split_is_refused(
    tiny_config: Config, tiny_task: Task
) -> None:
    with pytest.raises(ConfigurationError, match="batch size 65 exceeds the 64 training sequences"):
        run(tiny_config(batch_size=65), tiny_task)


def test_the_gradient_of_plain_methods_is_clipped(tiny_config: Config, tiny_task: Task) -> None:
    free, clipped = (
        run(tiny_config("sgd", rate=0.5, clip_norm=norm), tiny_task) for norm in (0.0, 1e-6)
    )
    assert clipped.losses[0] == free.losses[0]
    assert clipped.validations[-1].loss == pytest.approx(clipped.validations[0].loss, rel=1e-4)
    assert free.validations[-1].loss < 0.9 * free.validations[0].loss


def test_a_setting_with_a_default_leaves_the_names_of_runs_as_they_are() -> None:
    config = RunConfig(
        "digits",
        {},
        "relu-rnn",
        {"hidden": 6},
        "sgd",
        "balanced",
        0.05,
        0,
        2,
        16,
        0.0,
        None,
        5,
        1,
        True,
    )
    assert config.key == "sgd-balanced-0.05-0-8b610bc0c3"
    assert replace(config, weight_decay=0.1).key != config.key


def test_steps_and_seconds_to_an_error_end_at_the_first_validation_that_reaches_it(
    tiny_config: Config, tiny_task: Task
) -> None:
    entries = tuple(
        Validation(step, 1.0, error) for step, error in ((0, 9.0), (4, 2.5), (8, 2.0), (12, 3.0))
    )
    result = replace(run(tiny_config(epochs=1), tiny_task), validations=entries, step_seconds=0.25)
    assert [result.steps_to(error) for error in (9.0, 3.0, 2.0, 1.9)] == [0, 4, 8, None]
    assert result.seconds_to(2.0) == 2.0
    assert result.seconds_to(1.9) is None


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", METHODS)
def test_weight_decay_shrinks_the_weights_of_every_method(
    tiny_config: Config, tiny_task: Task, method: str
) -> None:
    free, decayed = (
        run(
            tiny_config(
                method, start_for(method), 0.01, epochs=1, batch_size=32, weight_decays=[decay]
            ),
            tiny_task,
        )
        for decay in (0.0, 50.0)
    )
    assert free.losses[0] == decayed.losses[0]
    assert decayed.losses[1] != free.losses[1]


def test_models_that_cannot_be_rescaled_train_from_the_default_start_alone(
    tiny_config: Config, tiny_task: Task
) -> None:
    result = run(tiny_config("lstm-adam", "default", 0.01, epochs=5), tiny_task)
    assert result.validations[-1].loss < result.validations[0].loss
    for change in ({"start": "rescaled"}, {"method": "path-sgd"}):
        with pytest.raises(ConfigurationError, match="cannot be rescaled"):
            run(replace(result.config, **change), tiny_task)


def test_normalized_networks_are_what_the_method_says(tiny_config: Config, tiny_task: Task) -> None:
    results = {
        name: run(tiny_config(name, "balanced", 0.05, epochs=4, model="mlp"), tiny_task)
        for name in (
            "sgd",
            "path-norm",
            "ddp-norm",
            "ddp-norm-centred",
            "moment-norm",
            "batch-norm",
        )
    }
    assert len({result.losses for result in results.values()}) == len(results)
    assert all(result.test_error is not None for result in results.values())
    # normalizing follows balancing or rescaling, and does not undo it: the two starts are different
    # networks
    other = run(tiny_config("batch-norm", "rescaled", 0.05, epochs=4), tiny_task)
    assert other.losses[0] != results["batch-norm"].losses[0]


def test_recurrent_layers_run_compiled_unless_told_otherwise(
    tiny_config: Config, tiny_task: Task
) -> None:
    """Both give the same curve to rounding, and a result says which of them it comes from."""
    pytest.importorskip("numba")
    config = tiny_config("path-sgd", epochs=4)
    fast, plain = (run(replace(config, plain_rnn=choice), tiny_task) for choice in (False, True))
    assert fast.kernel is not None
    assert fast.kernel.startswith(("compiled", "torch.nn.RNN: "))
    assert plain.kernel is None
    assert (
        TypeAdapter(RunResult).validate_python(json.loads(json.dumps(fast.as_dict()))).kernel
        == fast.kernel
    )
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3)
    assert fast.config.key != plain.config.key
    assert "plain_rnn" not in {name for name, v in config.as_dict().items() if v is True}


def test_a_run_ends_with_the_first_epoch_that_is_good_enough(
    tiny_config: Config, tiny_task: Task, tmp_path: Path
) -> None:
    whole = run(tiny_config("path-adam", rate=0.03, epochs=4), tiny_task)
    ends = [v.error for v in whole.validations[1:]]
    assert ends == sorted(ends, reverse=True)
    # not below itself, so the second epoch is the first one
    config = tiny_config("path-adam", rate=0.03, epochs=4, stop_error=ends[0])
    short = run(config, tiny_task, folder=tmp_path, checkpoint_every=8)
    assert [epoch.step for epoch in short.epochs] == [4, 8]
    assert short.losses == whole.losses[:8]
    assert short.test_error == whole.epochs[1].test
    assert same(run(config, tiny_task, folder=tmp_path, resume=True), short)


def test_every_epoch_has_its_training_error_and_a_test_error(
    tiny_config: Config, tiny_task: Task
) -> None:
    result = run(tiny_config(epochs=3), tiny_task)
    # the task is regression: its errors are its losses
    means = [math.fsum(result.losses[i : i + 4]) / 4 for i in (0, 4, 8)]
    assert [epoch.training for epoch in result.epochs] == pytest.approx(means)
    assert [epoch.step for epoch in result.epochs] == [4, 8, 12]
    shorter = [run(tiny_config(epochs=epochs), tiny_task).test_error for epochs in (1, 2)]
    assert [epoch.test for epoch in result.epochs] == [*shorter, result.test_error]
    blind = run(replace(tiny_config(), evaluate_test=False), tiny_task)
    assert [epoch.test for epoch in blind.epochs] == [None, None]


def test_wrong_answers_are_counted_over_the_batches_of_an_epoch(tiny_config: Config) -> None:
    task, models = build_task("digits", {}), []
    config = replace(
        tiny_config(rate=1e-30), task="digits", task_options={}, epochs=2, batch_size=100
    )
    result = run(config, task, finished=models.append)
    used = 100 * (len(task.train) // 100)
    for epoch, entry in enumerate(result.epochs):  # the weights do not move
        batches = epoch_order(len(task.train), config.seed, epoch)[:used]
        with torch.no_grad():
            answers = models[0](task.train.inputs[batches]).argmax(dim=1)
        wrong = 100 * (answers != task.train.targets[batches]).double().mean().item()
        assert entry.training == pytest.approx(wrong)
