"""Every optimizer and quantity on a GPU, against the same on the processor, in float64; skipped where there is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from cases import OPTIMIZERS

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that PyTorch can use", allow_module_level=True)

STEPS = 12  # beyond the first refresh of kappa


class LastStep(nn.Module):
    """A recurrent layer read at its last step."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.out = rnn, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def normalized_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (8, 7)),
    "normalized CNN": (normalized_cnn, (8, 2, 8, 8)),
    "nn.RNN": (lambda: LastStep(nn.RNN(3, 6, 2, nonlinearity="relu", batch_first=True)), (8, 5, 3)),
    "ps.nn.RNN": (lambda: LastStep(ps.nn.RNN(3, 6, batch_first=True)), (8, 5, 3)),
    "LSTM": (lambda: LastStep(nn.LSTM(3, 6, batch_first=True)), (8, 5, 3)),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
            nn.Flatten(), nn.Linear(40, 4),
        ),
        (8, 5, 8),
    ),
    "recurrent CNN": (lambda: ps.nn.RecurrentCNN(1, 4, maps=4, layers=2, unfoldings=2), (8, 1, 8, 8)),
}  # fmt: skip
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in OPTIMIZERS if name != "Invariant"},
    # every device draws random signs of its own
    **{name: (name, {"estimator": "exact"}) for name in ("DDPSGD", "DDPAdam", "QuasiDiagonal")},
    "Invariant": ("Invariant", {"rule": torch.optim.NAdam}),
    "PathSGD, momentum": ("PathSGD", {"momentum": 0.9, "second_term": True}),
}
# of how far the steps led: its orthogonalisation computes in bfloat16
TOLERANCE = {"PathMuon": 0.1}


def trained(
    device: str, model: nn.Module, x: Tensor, y: Tensor, rule: str, options: dict[str, Any]
) -> list[Tensor]:
    """Return the parameters after some steps on a device."""
    model, x, y = copy.deepcopy(model).to(device), x.to(device), y.to(device)
    network = ps.trace(model, x)
    optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=1e-2, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(p.device.type == device for p in model.parameters())
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    ("case", "name"),
    # attention multiplies activations, so its paths have no basis
    [(c, n) for c in MODELS for n in RULES if c != "attention" or n not in ("GSGD", "GAdam")],
)
def test_steps_are_those_of_the_processor(case: str, name: str) -> None:
    make, shape = MODELS[case]
    rule, options = RULES[name]
    torch.manual_seed(0)
    model = make().double()
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(4, shape[:1])
    expected = trained("cpu", model, x, y, rule, options)
    start = [p.detach() for p in model.parameters()]
    moved = max((e - s).abs().max().item() for e, s in zip(expected, start, strict=True))
    for found, wanted in zip(trained("cuda", model, x, y, rule, options), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE.get(rule, 1e-6) * moved)


@pytest.mark.parametrize(
    "case", ["perceptron", "normalized CNN", "nn.RNN", "ps.nn.RNN", "recurrent CNN"]
)
def test_quantities_are_those_of_the_processor(case: str) -> None:
    make, shape = MODELS[case]
    torch.manual_seed(0)
    model = make().double().eval()
    there = copy.deepcopy(model).cuda()
    x = torch.randn(shape, dtype=torch.float64)
    here, on_gpu = ps.trace(model, x), ps.trace(there, x.cuda())
    for one, other in zip(
        ps.paths.kappa(here).values(), ps.paths.kappa(on_gpu).values(), strict=True
    ):
        torch.testing.assert_close(other.cpu(), one)
    torch.testing.assert_close(
        ps.paths.squared_path_norm(on_gpu).cpu(), ps.paths.squared_path_norm(here)
    )
    ps.rescaling.random_rescale_(on_gpu, generator=torch.Generator("cuda").manual_seed(1))
    torch.testing.assert_close(there(x.cuda()).cpu(), model(x))
    ps.rescaling.balance_(on_gpu)
    torch.testing.assert_close(there(x.cuda()).cpu(), model(x))


METRIC_RULES = {
    "PathSGD": ("PathSGD", {}),
    "PathSGD, clipped": ("PathSGD", {"momentum": 0.9, "clip_norm": 0.1, "clip_step": 0.1}),
    "PathAdam": ("PathAdam", {"weight_decay": 0.1}),
    "PathMuon": ("PathMuon", {}),
    "Invariant": ("Invariant", {"rule": torch.optim.AdamW, "clip_norm": 0.1}),
    "no damping": ("PathSGD", {"damping": 0.0, "normalization": "network"}),
}


class Training:
    """A model in training on a GPU, float32."""

    def __init__(self, case: str, rule: str, options: dict[str, Any]) -> None:
        make, shape = MODELS[case]
        torch.manual_seed(0)
        self.model = make().cuda()
        self.x, self.y = torch.randn(shape).cuda(), torch.randint(4, shape[:1]).cuda()
        network = ps.trace(self.model, self.x)
        self.optimizer = getattr(ps.optim, rule)(
            self.model.parameters(), network, lr=1e-2, **options
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("rule", METRIC_RULES)
@pytest.mark.parametrize("case", MODELS)
def test_recorded_refreshes_are_the_operations_to_the_last_bit(
    case: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setenv("PATHSPACE_RECORD", "1")
    recorded = Training(case, *METRIC_RULES[rule])
    for _ in range(25):
        recorded.step()
    metric = recorded.optimizer.metric
    assert (metric._kappa_recording.failure, metric._finish.failure) == ("", "")
    assert metric._kappa_recording.is_recorded
    assert metric._finish.is_recorded
    monkeypatch.setenv("PATHSPACE_RECORD", "0")
    eager = Training(case, *METRIC_RULES[rule])
    for _ in range(25):
        eager.step()
    assert not eager.optimizer.metric._kappa_recording.is_recorded
    assert all(map(torch.equal, recorded.weights(), eager.weights()))


@pytest.mark.parametrize("rule", METRIC_RULES)
def test_no_step_waits_for_the_gpu_between_refreshes(rule: str) -> None:
    training = Training("perceptron", *METRIC_RULES[rule])
    for _ in range(11):
        training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(9):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", ["perceptron", "nn.RNN", "attention"])
@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("PathSGD", {"momentum": 0.9, "clip_norm": 0.1}),
        ("Invariant", {"rule": torch.optim.AdamW, "capturable": True, "fused": True}),
    ],
)
def test_a_captured_step_trains_as_others_do(
    case: str, switch: str, rule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATHSPACE_RECORD", switch)
    plain, captured = (Training(case, rule, options) for _ in range(2))
    for _ in range(40):
        plain.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    captured.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        captured.step()
    for i in range(20):
        if i % 10 == 0:
            captured.optimizer.refresh()
        graph.replay()
    for ours, theirs in zip(captured.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_step_is_not_captured_before_there_is_a_metric() -> None:
    training = Training("perceptron", "PathSGD", {})
    nn.functional.cross_entropy(training.model(training.x), training.y).backward()
    with (
        pytest.raises(RuntimeError, match="take some steps"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        training.optimizer.step()
