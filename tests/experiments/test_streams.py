"""Streams: the order of segments, the state that is carried, and runs that go on where they were broken off."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.conftest import asked, stopped
from pathspace.experiments.engine import contiguous_order, run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.models import build_model
from pathspace.experiments.run import RunConfig
from pathspace.experiments.settings import Settings
from pathspace.experiments.tasks import build_task
from pathspace.experiments.tasks.task import Task, prediction, windows

LENGTH, STREAMS, SYMBOLS = 5, 3, 6
OPTIONS = {"hidden": 5, "embedding": 4, "layers": 2}
DROPS = {"hidden_dropout": 0.3, "output_dropout": 0.2, "weight_drop": 0.3, "embedding_dropout": 0.1}


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(SYMBOLS, (n,), generator=generator) for n in (110, 163, 157)]


@pytest.fixture
def task() -> Task:
    splits = (windows(text, LENGTH) for text in texts())
    return prediction("words", "a test", splits, symbols=SYMBOLS, metric="perplexity", stream=True)


def settings(**changes: Any) -> Settings:
    return asked(
        {
            "task": "words",
            "task_options": {"stream": True},
            "model": "language-model",
            "model_options": OPTIONS,
            "epochs": 2,
            "batch_size": STREAMS,
            "momentum": 0.0,
            "clip_norm": 0.0,
            **changes,
        }
    )


def config(
    method: str = "sgd", start: str = "default", rate: float = 0.1, **changes: Any
) -> RunConfig:
    return settings(**changes).run_config(method, start, rate, 0, evaluate_test=True)


def test_segments_of_a_stream_follow_one_another() -> None:
    order = contiguous_order(11, 3)
    assert order.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]  # segments 9 and 10 are left out
    assert contiguous_order(2, 2).tolist() == [0, 1]


def columns(text: torch.Tensor, streams: int) -> torch.Tensor:
    """The text beside itself, straight from its definition: one symbol more than each stream predicts."""
    segments = (len(text) - 1) // LENGTH // streams
    return torch.stack(
        [text[i * segments * LENGTH :][: segments * LENGTH + 1] for i in range(streams)]
    )


def test_a_run_is_truncated_backpropagation_along_the_text(task: Task) -> None:
    """The engine against a loop written out, with the same start."""
    result = run(config(), task)
    torch.manual_seed(0)
    model = build_model("language-model", SYMBOLS, SYMBOLS, OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, _, test = texts()
    losses = []
    for _ in range(2):
        text, states = columns(train, STREAMS), None
        for start in range(0, text.shape[1] - 1, LENGTH):
            scores, states = model(text[:, start : start + LENGTH], states)
            targets = text[:, start + 1 : start + 1 + LENGTH]
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert list(result.losses) == pytest.approx(losses, rel=1e-6)
    assert len(losses) == 2 * 7
    model.eval()
    text = columns(test, 10)
    with torch.no_grad():
        scores, _ = model(text[:, :-1])  # in one piece: what carrying the state comes to
    nats = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).item()
    assert result.test_error == pytest.approx(math.exp(nats), rel=1e-5)


@pytest.mark.parametrize("stop", [1, 9])
def test_a_stream_that_was_broken_off_goes_on_bitwise(
    task: Task, tmp_path: Path, stop: int
) -> None:
    chosen = config("path-sgd", model_options={**OPTIONS, **DROPS}, momentum=0.9)
    whole = run(chosen, task)
    stopped(chosen, task, tmp_path, stop)
    resumed = run(chosen, task, folder=tmp_path, resume=True)
    assert resumed.losses == whole.losses
    assert resumed.test_error == whole.test_error


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["path-sgd", "path-adam", "g-sgd", "g-adam", "balanced-sgd"])
def test_invariant_methods_do_not_see_the_scale_of_the_stack(task: Task, method: str) -> None:
    options = {"model_options": {**OPTIONS, **DROPS}}
    runs = [run(config(method, start, **options), task) for start in ("balanced", "rescaled")]
    assert runs[0].losses == runs[1].losses
    plain = [run(config("sgd", start, **options), task) for start in ("balanced", "rescaled")]
    assert plain[0].losses[0] == plain[1].losses[0]
    assert plain[0].losses != plain[1].losses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "relu-rnn"}, "carries no state along a stream: set model to 'language-model'"),
        ({"task_options": {}}, "reads streams alone: set task_options.stream to true"),
        ({"model_options": {"weight_drop": 1}}, "'weight_drop' .* give less than 1"),
        ({"model_options": {"embedding": 0}}, "'embedding' .* give 1 or more"),
        ({"model_options": {"tied": "no"}}, "'tied' .* give true or false"),
        ({"model_options": {"output": "last"}}, "choose from every"),
    ],
)
def test_what_does_not_fit_a_stream_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(**changes)


def test_stream_is_true_or_false(tiny_corpora: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="'stream' of the task 'words' is 1: give true or false"
    ):
        build_task("words", {"stream": 1}, data_dir=tiny_corpora)


def test_streams_of_texts_have_no_context(tiny_corpora: Path) -> None:
    task = build_task("words", {"length": 3, "stream": True}, data_dir=tiny_corpora)
    assert task.stream
    assert task.train.inputs.shape[1] == task.test.inputs.shape[1] == 3
    assert "a stream read in segments of 3" in task.description
