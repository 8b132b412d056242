import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import pathspace
from cases import slow_besides
from experiments.rules import EACH_RULE
from pathspace.experiments.compare import check_symmetry, representative, run_distinct
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS, balance_once_, move_to_start
from pathspace.experiments.models import build_model
from pathspace.experiments.recipes import load_recipe
from pathspace.experiments.run import RunConfig, RunResult
from pathspace.experiments.settings import settings_from
from pathspace.experiments.tasks.task import Task
from pathspace.experiments.tasks.texts import Cutting, next_symbol

Config = Callable[..., RunConfig]
OPTIONS = {
    "epochs": 3,
    "momentum": 0.9,
    "clip_norm": 1.0,
    "rescale_exponent": 6,
    "weight_decays": [0.1],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "method", slow_besides(["balanced-sgd", "balanced-muon", *EACH_RULE], METHODS)
)
@pytest.mark.parametrize("start", ["balanced", "rescaled"])
def test_a_representative_is_the_same_computation(
    tiny_config: Config, tiny_task: Task, method: str, start: str
) -> None:
    # the rules as printed run away at any rate that others take
    rate = METHODS[method].learning_rate if method.endswith("published") else 0.01
    config = tiny_config(method, start, rate, **OPTIONS)
    stands = representative(config)
    if stands != config:
        one, other = run(config, tiny_task), run(stands, tiny_task)
        assert (one.losses, one.validations, one.test_error) == (
            other.losses,
            other.validations,
            other.test_error,
        )
    chosen = METHODS[method]
    assert (stands == config) == (
        not (chosen.invariant and start == "rescaled") and not chosen.balances_first
    )


GATES = ("swiglu", "squared-relu")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "gate"),
    [
        (m, GATES[number % 2])
        for number, m in enumerate(load_recipe("transformer").settings["methods"])
    ],
)
def test_a_transformer_trains_the_same_from_a_rescaled_start(method: str, gate: str) -> None:
    """Every method of the recipe but the rules on the weights, to the last bit."""
    text = torch.randint(5, (3, 200), generator=torch.Generator().manual_seed(0))
    task = next_symbol("characters", "noise", list(text), 5, Cutting(8))
    small = {"model_options": {"hidden": 8, "layers": 2, "heads": 2, "gate": gate}, "epochs": 2}
    settings = settings_from(*load_recipe("transformer").layers("small"), ("a test", small))
    one, other = (
        run(settings.run_config(method, start, 0.01, 0, evaluate_test=False), task)
        for start in ("balanced", "rescaled")
    )
    assert one.diverged_at is None
    plain = method in ("adamw", "muon")
    assert (one.losses == other.losses) == (not plain)
    assert one.losses[0] == other.losses[0]


def test_factors_that_round_and_other_starts_have_no_representative(tiny_config: Config) -> None:
    for config in (
        tiny_config("path-sgd", "rescaled", rescale_factor=100),
        tiny_config("path-sgd", "default"),
    ):
        assert representative(config) == config


@pytest.fixture
def doing(
    tiny_task: Task,
) -> tuple[Callable[[Sequence[RunConfig], str], list[RunResult]], list[str]]:
    done: list[str] = []

    def do(configs: Sequence[RunConfig], title: str) -> list[RunResult]:
        done.extend(config.label for config in configs)
        return [run(config, tiny_task) for config in configs]

    return do, done


@pytest.fixture
def configs(tiny_config: Config) -> list[RunConfig]:
    return [
        tiny_config(method, start, seed=seed, epochs=1)
        for method in ("sgd", "path-sgd", "balanced-sgd")
        for start in ("balanced", "rescaled")
        for seed in range(2)
    ]


def test_every_computation_is_done_once(configs: list[RunConfig], doing) -> None:
    do, done = doing
    whole = [result.losses for result in do(configs, "")]
    done.clear()
    results = run_distinct(configs, do, "")
    assert [result.losses for result in results] == whole
    assert [result.config for result in results] == configs
    assert len(done) == len(set(done)) == 2 * 3  # SGD from both starts, and Path-SGD


def test_the_check_does_the_runs_that_others_stand_for(configs: list[RunConfig], doing) -> None:
    do, done = doing
    check_symmetry(configs, do, "")
    assert sorted(done) == sorted(
        config.label for config in configs if (config.method, config.start) != ("sgd", "rescaled")
    )


def test_runs_that_are_lost_alike_pass_the_check(tiny_config: Config, tiny_task: Task) -> None:
    # one step an epoch, after which the validation loss is not finite
    config = tiny_config("balanced-sgd", rate=1e30, batch_size=64)
    lost: list[RunResult] = []

    def do(some: Sequence[RunConfig], _title: str) -> list[RunResult]:
        lost.extend(run(each, tiny_task) for each in some)
        return lost

    check_symmetry([config], do, "")
    assert len(lost) == 2
    assert not any(math.isfinite(each.validations[-1].loss) for each in lost)


def test_a_method_without_the_symmetry_that_it_claims_is_found_out(
    configs: list[RunConfig], doing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "sgd", replace(METHODS["sgd"], invariant=True))
    with pytest.raises(
        ConfigurationError, match="should be the same computation as 'sgd, balanced"
    ):
        check_symmetry(configs, doing[0], "")


@pytest.mark.parametrize(
    ("start", "factor"), [("balanced", 0), ("rescaled", 0), ("rescaled", 100), ("default", 0)]
)
@pytest.mark.sample(2)
def test_balancing_once_ends_at_the_balanced_start(start: str, factor: float) -> None:
    def parameters(start: str, factor: float = 0.0, *, balanced: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = build_model("relu-rnn", 3, 2, {"hidden": 6})
        network = pathspace.trace(model, torch.zeros(2, 4, 3))
        move_to_start(network, start, seed=1, exponent=5, factor=factor)
        if balanced:
            balance_once_(network)
        return [p.detach() for p in model.parameters()]

    wanted = parameters("balanced", balanced=False)
    found = parameters(start, factor, balanced=True)
    exact = start != "default" and not factor
    for p, q in zip(wanted, found, strict=True):
        assert torch.equal(p, q) if exact else torch.allclose(p, q, rtol=1e-5, atol=0)
    moved = parameters("rescaled", factor, balanced=False)
    assert any(not torch.allclose(p, q, rtol=1e-2) for p, q in zip(wanted, moved, strict=True))
