"""A comparison on the user's own model and data: a Python file with `model()` and `batches()`.

    def model():                    a new, untrained nn.Module, made from torch's random state
    def batches():                  pairs (inputs, targets), such as a DataLoader
    def loss(outputs, targets):     the mean loss of a batch; by default cross-entropy, or the squared error

Every run trains a model of its own, on the same examples.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.model_source import module_of_file, run_users
from pathspace.experiments.tasks import OWN
from pathspace.experiments.tasks.task import (
    Split,
    Task,
    classification,
    described,
    split_in_three,
)

MOST_EXAMPLES = 100_000
"""How many examples are taken from `batches()`: what it yields is held in memory."""
LEAST_EXAMPLES = 20
WANTED = "`def model()`, which returns a new nn.Module, and `def batches()`, which yields pairs (inputs, targets)"
QUICK: Mapping[str, Any] = {
    "seeds": 1,
    "tuning_seeds": 1,
    "tuning": "grid",
    "learning_rates": [0.003, 0.03, 0.3],
    "tuning_epochs": 1,
    "epochs": 3,
}
"""The settings of a first table, which shows that all works and little more."""


PRESETS: dict[str, dict[str, Any]] = {
    OWN: {
        "model": OWN,
        "batch_size": 32,
        "epochs": 10,
        "learning_rates": [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3],
        "tuning": "one standard error",
        "tuning_seeds": 2,
        "tuning_epochs": 5,
        "seeds": 3,
    }
}

TRAIN, VALIDATION = 0.7, 0.15  # of the examples; the others are the test set


def with_own_file(options: Mapping[str, Any], file: Path | None, *, quick: bool) -> dict[str, Any]:
    """Return the options of `compare` with those of a file of the user's, and of a quick table below them."""
    given = {**QUICK, **options} if quick else dict(options)
    if file is None:
        return given
    for name in ("task", "task_options", "model", "model_options"):
        if name in options:
            option = "--task" if name == "task" else f"--set {name}"
            raise ConfigurationError(
                f"The file {str(file)!r} brings its own data and model: leave out {option}."
            )
    of_file = options_of_file(file)
    return {**given, "task": OWN, "task_options": of_file, "model_options": of_file}


def options_of_file(file: Path) -> dict[str, str]:
    """Return the options by which a file is the task and the model of a comparison.

    Its digest is one of them: results of another version of the file are not taken for those of
    this one.
    """
    path = file.expanduser().resolve()
    return {"file": str(path), "digest": _digest(path)}


def make_model(file: str, digest: str) -> nn.Module:
    """Return a new model of the file's."""
    made = _call(file, digest, "model")
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"Expected an nn.Module from model() in {file!r}, got {type(made).__name__}."
        )
    return made


def examples_of(file: str, digest: str) -> tuple[Tensor, Tensor]:
    """Return all inputs and all targets of the file, at most `MOST_EXAMPLES`.

    Every process and every run reads the same examples: the global random states are seeded, for
    a `DataLoader` that shuffles or data that are drawn.
    """
    with _seeded():
        inputs, targets = _all_examples(file, digest)
    _check_finite(file, "inputs", inputs)
    _check_finite(file, "targets", targets)
    with _seeded():
        _check_repeatable(file, digest, inputs, targets)
    return inputs, targets


def _all_examples(file: str, digest: str) -> tuple[Tensor, Tensor]:
    """Return what `batches()` yields, joined, at most `MOST_EXAMPLES`."""
    pairs: list[tuple[Tensor, Tensor]] = []
    taken = 0
    for pair in _pairs(file, digest):
        pairs.append(pair)
        taken += len(pair[0])
        if taken >= MOST_EXAMPLES:
            break
    if taken < LEAST_EXAMPLES:
        raise ConfigurationError(
            f"batches() in {file!r} has {taken} examples: give {LEAST_EXAMPLES} at least, of which 70 % train, 15 % "
            "choose learning rates and 15 % test."
        )
    try:
        inputs, targets = (
            torch.cat(parts).cpu()[:MOST_EXAMPLES] for parts in zip(*pairs, strict=True)
        )
    except RuntimeError as error:
        raise ConfigurationError(
            f"The batches in {file!r} cannot be joined: give examples of one shape and type. {error}"
        ) from error
    return inputs, targets


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global random generators of torch, NumPy and Python, and restore their states afterwards."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002 -- the state that the user's code draws from
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def _check_finite(file: str, name: str, values: Tensor) -> None:
    """Refuse examples with NaN or infinity; the message says how many there are, and which is the first."""
    if not values.is_floating_point():
        return
    is_finite = values.reshape(len(values), -1).isfinite().all(1)
    examples = torch.nonzero(~is_finite).flatten()
    if len(examples):
        raise ConfigurationError(
            f"batches() in {file!r} yields {name} with NaN or infinity in {len(examples)} of {len(values)} examples, "
            f"the first of which is number {int(examples[0])} (from 0): leave these examples out, or fill the values."
        )


def _check_repeatable(file: str, digest: str, inputs: Tensor, targets: Tensor) -> None:
    """Refuse data of which a second call yields other examples: runs could not be compared."""
    pair = next(_pairs(file, digest))
    for first, again in zip((inputs, targets), pair, strict=True):
        again = again[: len(first)].cpu()
        if not torch.equal(first[: len(again)], again):
            raise ConfigurationError(
                f"batches() in {file!r} yields other examples when it is called again, so runs cannot be compared: "
                "give its random generator a fixed seed inside the function."
            )


def own(*, file: str = "", digest: str = "", data_dir: Path | None = None) -> Task:
    """Return the examples of a file as a task."""
    del data_dir
    if not file:
        raise ConfigurationError(
            "The task 'own' is a Python file of yours: give it as `pathspace compare FILE.py`."
        )
    inputs, targets = examples_of(file, digest)
    ends = (int(TRAIN * len(inputs)), int((TRAIN + VALIDATION) * len(inputs)))
    splits = split_in_three(inputs, targets, ends)
    shape = " x ".join(map(str, inputs.shape[1:])) or "1 number"
    words = described(f"{Path(file).name}, examples of {shape}", splits, "examples")
    loss = getattr(_module(file, digest), "loss", None)
    task = _task(loss, words, splits, targets)
    _check_once(file, digest, task, loss)
    return task


def _task(loss: Any, words: str, splits: list[Split], targets: Tensor) -> Task:
    if loss is None and not targets.is_floating_point():
        if targets.dim() == 1 and not targets.is_complex():
            return classification(OWN, words, splits, int(targets.max()) + 1)
        raise ConfigurationError(
            f"The targets of the file are {targets.dtype} of shape {tuple(targets.shape)}: define loss(outputs, "
            "targets) there, or give a class number (N,) or real numbers."
        )
    return Task(
        OWN,
        words,
        *splits,
        input_size=0,  # the model of the file knows
        output_size=0,
        loss=loss or _squared_error,
        errors=functools.partial(_mean_of_all, loss) if loss else _squared_errors,
        metric="loss" if loss else "mean squared error",
        error_of_loss=float,
    )


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # which torch would stretch
        classes = outputs.dim() == 2 and targets.dim() == 1 and outputs.shape[1] > 1
        advice = "if the targets are class numbers, yield targets.long(); else " if classes else ""
        raise ConfigurationError(
            f"The model gives outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            f"{advice}give both one shape, or define loss(outputs, targets) in the file."
        )
    return functional.mse_loss(outputs, targets)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).double().square().reshape(len(targets), -1).mean(1)


def _mean_of_all(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
) -> Tensor:
    """The mean loss of a batch as the error of each of its examples."""
    return loss(outputs, targets).double().expand(len(targets))


def _check_once(file: str, digest: str, task: Task, own_loss: Any) -> None:
    """Run the model and the loss once, on two examples, and refuse what fails, or a loss that is not one number."""
    inputs = task.train.inputs[:2]
    targets = task.train.targets[:2]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make_model(file, digest)
        outputs = _outputs(file, model, inputs)
        if own_loss is None and not targets.is_floating_point():
            _check_classes(file, outputs, task.output_size)
        value = run_users(f"{file}: the loss", lambda: task.loss(outputs, targets))
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigurationError(
            f"The loss in {file!r} of outputs and targets is {shape}: return the mean over the batch, one number."
        )


def _outputs(file: str, model: nn.Module, inputs: Tensor) -> Any:
    """Return what the model makes of inputs, or say that it may want real numbers."""
    try:
        return run_users(f"{file}: the model", lambda: model(inputs))
    except ConfigurationError as error:
        if inputs.is_floating_point():
            raise
        raise ConfigurationError(
            f"{error} batches() yields inputs of {inputs.dtype}: if the model wants real numbers, yield inputs.float()."
        ) from error


def _check_classes(file: str, outputs: Any, classes: int) -> None:
    """Refuse a model with fewer outputs than the file has classes."""
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        return
    if outputs.shape[1] < classes:
        raise ConfigurationError(
            f"The model in {file!r} has {outputs.shape[1]} outputs, and the targets of batches() have {classes} "
            f"classes, 0 to {classes - 1}: give the model an output for each class."
        )


def _call(file: str, digest: str, name: str) -> Any:
    function = getattr(_module(file, digest), name, None)
    if not callable(function):
        raise ConfigurationError(f"{file!r} has no function {name}(): give {WANTED}.")
    return run_users(f"{file}:{name}", function)


@functools.lru_cache(maxsize=1)
def _module(file: str, digest: str) -> Any:
    path = Path(file)
    if _digest(path) != digest:
        raise ConfigurationError(
            f"{file!r} has changed since these runs began: start over with --fresh, or bring the old file back."
        )
    # data that the module itself draws are the same in every process
    with _seeded():
        return module_of_file(path)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigurationError(
            f"There is no file {str(path)!r} ({error.strerror}): give a Python file with {WANTED}."
        ) from None


def _pairs(file: str, digest: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of `batches()`, whose making is the user's code too."""
    batches = _call(file, digest, "batches")
    if not isinstance(batches, Iterable):
        raise ConfigurationError(
            f"Expected pairs (inputs, targets) from batches() in {file!r}, got {type(batches).__name__}: "
            "yield pairs, or return a DataLoader."
        )
    iterator = iter(batches)
    end = object()
    while (batch := run_users(f"{file}:batches", lambda: next(iterator, end))) is not end:
        yield _pair(file, batch)


def _pair(file: str, batch: Any) -> tuple[Tensor, Tensor]:
    found = f"a {type(batch).__name__}"
    is_two = isinstance(batch, (tuple, list)) and len(batch) == 2
    if is_two and all(isinstance(t, Tensor) for t in batch):
        x, y = batch
        if x.dim() and y.dim() and len(x) == len(y):
            return x, y
        found = f"tensors of shape {tuple(x.shape)} and {tuple(y.shape)}"
    raise ConfigurationError(
        f"batches() in {file!r} yields {found}: give pairs of tensors (inputs, targets) with as many examples each."
    )
