"""Refreshes that are recorded and repeated, on the processor: a log of operations stands for a CUDA graph.

Like a CUDA graph, the log repeats operations on the memory that they had, and none of the Python
between them. It shows whether anything that a refresh reads has moved or changed since, and whether
it would wait for a GPU. That CUDA itself can record a refresh is tested where there is a GPU, in
`test_cuda.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import pathspace as ps
from pathspace.optim.base import coordinates
from pathspace.optim.base.coordinates import CoordinateView
from pathspace.paths.kernel import recording
from pathspace.paths.kernel.recording import Recording


class Log(TorchDispatchMode):
    """A stand-in for a CUDA graph: operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        # what operations changed, and what it was before
        self.changed: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the GPU")
        if func._schema.is_mutable:
            self.changed += [
                (t, t.clone()) for t in pytree.tree_leaves(args[0]) if isinstance(t, Tensor)
            ]
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            if func.is_view:
                continue
            again = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


def logged(device: torch.device, evaluate: Callable[[], Any]) -> tuple[Any, Any]:
    """What `recording.capture` does on a GPU, where a capture computes nothing: results are there after a replay."""
    assert device.type == "cpu"
    log = Log()
    with log:
        result = evaluate()
    own = _own(log)
    for tensor in own:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    for tensor, before in reversed(log.changed):
        if not any(tensor is made for made in own):
            tensor.copy_(before)
    return log, result


def _own(log: Log) -> list[Tensor]:
    """The tensors that operations of a log made in memory of their own."""
    made = [m for func, *_, m in log.operations if not func.is_view and not func._schema.is_mutable]
    return [tensor for tensor in pytree.tree_leaves(made) if isinstance(tensor, Tensor)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor be taken for a GPU."""
    monkeypatch.setenv("PATHSPACE_RECORD", "1")
    monkeypatch.setattr(recording, "is_launched", lambda _: True)
    monkeypatch.setattr(recording, "capture", logged)


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(3, 6, 2, nonlinearity="relu", batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
        (8, 7),
    ),
    "normalized CNN": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
        ),
        (8, 2, 8, 8),
    ),
    "nn.RNN": (LastStep, (8, 5, 3)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
            nn.Flatten(), nn.Linear(40, 4),
        ),
        (8, 5, 8),
    ),
}  # fmt: skip
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "PathSGD": ("PathSGD", {"momentum": 0.9}),
    "PathAdam": ("PathAdam", {"weight_decay": 0.1}),
    "Invariant": ("Invariant", {"rule": torch.optim.NAdam, "clip_norm": 0.1}),
    "both terms": ("PathSGD", {"metric": ("second_term",)}),
    "no damping": ("PathSGD", {"damping": 0.0, "normalization": "network"}),
}


class Training:
    """A model in training."""

    def __init__(self, case: str, rule: str, dtype: torch.dtype = torch.float32) -> None:
        make, shape = MODELS[case]
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = make().to(dtype)
        self.x = torch.randn(shape, generator=generator).to(dtype)
        self.y = torch.randint(4, shape[:1], generator=generator)
        network = ps.trace(self.model, self.x)
        name, options = RULES[rule]
        if "metric" in options:
            options = {"metric": ps.metrics.Path(second_term=True)}
        self.optimizer = getattr(ps.optim, name)(
            self.model.parameters(), network, lr=1e-2, **options
        )

    def steps(self, count: int) -> list[Tensor]:
        for _ in range(count):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.x).float(), self.y).backward()
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """The processor keeps some products as factors, and a GPU does not, so that rounding differs."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", MODELS)
def test_recorded_refreshes_are_the_operations(
    case: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Training(case, rule)
    trained = recorded.steps(25)
    metric = recorded.optimizer.metric
    if (case, rule) == ("attention", "both terms"):  # the second term asks whether there are pairs
        assert "waits" in metric._kappa_recording.failure
    else:
        assert metric._kappa_recording.is_recorded, metric._kappa_recording.failure
        assert metric._finish.is_recorded, metric._finish.failure
    monkeypatch.setenv("PATHSPACE_RECORD", "0")
    one_by_one = Training(case, rule)
    expected = one_by_one.steps(25)
    assert not one_by_one.optimizer.metric._kappa_recording.is_recorded
    assert all(map(torch.equal, trained, expected))
    if RULES[rule][0] == "PathSGD":  # rules by Adam enlarge the rounding of gradients that are zero
        monkeypatch.undo()
        close(trained, Training(case, rule).steps(25))


@pytest.mark.usefixtures("gpu")
def test_what_moves_or_changes_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        training = Training("normalized CNN", "PathAdam")
        training.steps(13)
        copied = copy.deepcopy((training.model, training.optimizer))
        first = training.model[0].weight
        first.data = first.detach().clone()
        training.steps(3)
        training.model[1].running_var = torch.full((5,), 2.0)
        training.steps(3)
        training.model[-1].bias.requires_grad_(False)
        training.steps(3)
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        result = training.steps(12)
        training.model, training.optimizer = copied
        return result + training.steps(12)

    recorded = trained()
    monkeypatch.setenv("PATHSPACE_RECORD", "0")
    assert all(map(torch.equal, recorded, trained()))


@pytest.mark.usefixtures("gpu")
def test_half_precision_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("perceptron", "PathSGD", torch.bfloat16)
    trained = training.steps(14)
    assert training.optimizer.metric._kappa_recording.is_recorded
    monkeypatch.setenv("PATHSPACE_RECORD", "0")
    assert all(
        map(torch.equal, trained, Training("perceptron", "PathSGD", torch.bfloat16).steps(14))
    )


@pytest.mark.usefixtures("gpu")
def test_a_refresh_between_steps_leaves_the_metric_where_it_is() -> None:
    training = Training("nn.RNN", "PathSGD")
    training.steps(13)
    states = [training.optimizer.state[p] for p in training.model.parameters()]
    places = [state["factor"].data_ptr() for state in states]
    before = [state["factor"].clone() for state in states]
    training.steps(2)
    training.optimizer.refresh()
    assert [state["factor"].data_ptr() for state in states] == places
    assert not all(map(torch.equal, before, [state["factor"] for state in states]))


def test_refresh_computes_the_metric_of_the_present_weights() -> None:
    training = Training("perceptron", "PathAdam")
    with pytest.raises(RuntimeError, match="take a step first"):
        training.optimizer.refresh()
    training.steps(11)
    training.steps(4)
    fresh = ps.optim.PathAdam(training.model.parameters(), training.optimizer.network, lr=0.0)
    fresh.step()
    training.optimizer.refresh()
    name = "2.weight"
    weight = dict(training.model.named_parameters())[name]
    # the frames differ, as that of the old one was measured at its first step
    ratio = training.optimizer.state[weight]["factor"] / fresh.state[weight]["factor"]
    assert float(ratio.amax() / ratio.amin()) < 1.2


def test_rules_with_points_have_no_refresh() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    network = ps.trace(model, torch.zeros(1, 3))
    optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.ASGD, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="its steps alone compute it"):
        optimizer.refresh()


@pytest.mark.usefixtures("gpu")
def test_what_waits_for_a_result_is_not_recorded() -> None:
    x, recorded = torch.ones(3), Recording()
    for _ in range(3):
        assert recorded([x], (), lambda: x.sum().item()) == 3.0
    assert not recorded.is_recorded
    assert "waits" in recorded.failure


@pytest.mark.parametrize("rule", ["PathAdam", "Invariant"])
def test_gradients_read_together_are_those_read_one_by_one(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(CoordinateView, "has_one_type", property(lambda _: False))
        expected = Training("perceptron", rule).steps(12)
    calls = []
    together = coordinates.foreach_addcmul_
    monkeypatch.setattr(
        coordinates, "foreach_addcmul_", lambda *lists: (calls.append(1), together(*lists))[1]
    )
    monkeypatch.setattr(CoordinateView, "is_launched", property(lambda view: view.r is not None))
    trained = Training("perceptron", rule).steps(12)
    assert len(calls) == 12
    assert all(map(torch.equal, trained, expected))
