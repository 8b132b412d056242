"""Every figure that this library publishes of a GPU, in one run of less than eleven minutes.

    python benchmarks/gpu.py --output benchmarks/results/gpu-h200.json
    python benchmarks/gpu.py --device cpu --tiny        # that it runs, on a machine without a GPU
    python benchmarks/gpu.py --sections steps --turns 4

Sections:

* ``steps``: a whole training step beside that of torch's plain rule, eager and with
  ``torch.compile`` for the model.
* ``captured``: the same, where forward pass, backward pass and step are one CUDA graph, with a
  refresh before every tenth replay.
* ``refresh``: a refresh of kappa, recorded and operation by operation, up to ResNet-50 and GPT-2.
* ``equality``: how far weights on the GPU are from those on the processor after twelve steps in
  float64.
* ``rnn``: ``ps.nn.RNN``, which is ``torch.nn.RNN`` on a GPU.

Two optimizers take turns of ten steps in one process; the figure is the median of the ratios of
neighbouring turns. A section that begins after ``--seconds`` is left out, and said to be. One JSON
line per figure; besides torch it needs transformers for GPT-2 alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paired
import pathspace as ps
import step_cost
import trace_cost
from pathspace.optim.rules.soap import SOAP
from pathspace.paths.kernel.recording import SWITCH

Figure = dict[str, Any]
KERNELS = (torch.optim.SGD, torch.optim.AdamW)
"""Whose whole step is a kernel of torch's on a GPU, if it is asked for."""


@dataclass(frozen=True)
class Pair:
    """An optimizer of ours, and the plain rule beside it."""

    ours: Callable[..., torch.optim.Optimizer]
    plain: Callable[..., Any]
    refreshes: bool = True  # whether it has a metric that is computed every tenth step


def invariant(
    rule: type[torch.optim.Optimizer], **more: Any
) -> Callable[..., torch.optim.Optimizer]:
    """A function that makes ``Invariant`` around a rule."""

    def make(params: Any, network: ps.Network, **options: Any) -> torch.optim.Optimizer:
        return ps.optim.Invariant(params, network, rule, **more, **options)

    return make


PAIRS = {
    "PathSGD": Pair(ps.optim.PathSGD, torch.optim.SGD),
    "PathAdam": Pair(ps.optim.PathAdam, torch.optim.AdamW),
    "Invariant(AdamW)": Pair(invariant(torch.optim.AdamW), torch.optim.AdamW),
    "PathMuon": Pair(ps.optim.PathMuon, step_cost.MuonBesideAdamW),
    "PathRMSprop": Pair(ps.optim.PathRMSprop, torch.optim.RMSprop),
    "PathSOAP": Pair(ps.optim.PathSOAP, SOAP),
    "GSGD": Pair(ps.optim.GSGD, torch.optim.SGD),
    "GAdam": Pair(ps.optim.GAdam, torch.optim.AdamW),
    "DDPSGD": Pair(ps.optim.DDPSGD, torch.optim.SGD),
    "DDPAdam": Pair(ps.optim.DDPAdam, torch.optim.AdamW),
}
OF_TRANSFORMER = ("PathSGD", "PathAdam", "Invariant(AdamW)", "PathMuon")


def transformer_25m() -> nn.Module:
    """Eight causal pre-norm layers of width 512: 25 million weights."""
    return step_cost.Transformer(64, 512, 64, 512, layers=8)


CASES = {
    **{
        name: step_cost.CASES[name]
        for name in ("rnn-100x28", "rnn-100x784", "mlp", "cnn", "transformer")
    },
    "transformer-25m": step_cost.Case(transformer_25m, (32, 512, 64), 64, 4),
}
TINY = {
    "rnn-100x28": replace(CASES["rnn-100x28"], inputs=(4, 28, 28), turns=1),
    "mlp": replace(CASES["mlp"], inputs=(4, 784), turns=1),
    "transformer-25m": step_cost.Case(
        lambda: step_cost.Transformer(8, 16, 8, 8, layers=2), (2, 8, 8), 8, 1
    ),
}


@dataclass(frozen=True)
class Setting:
    """What the sections are run with."""

    device: str
    cases: dict[str, step_cost.Case]
    turns: int | None
    tiny: bool
    optimizers: list[str]

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of some optimizers that were asked for."""
        return [name for name in names if name in self.optimizers]

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def turns_of(self, name: str) -> int:
        most = self.turns or 12
        return min(most, 4) if name in ("transformer-25m", "rnn-100x784") else most


class Training:
    """A fresh copy of a case, trained by one rule.

    Args:
        case: the case.
        pair: the rules.
        device: where.
        plain: take the plain rule.
        half: run the model in bfloat16 by ``torch.autocast``.
        compiled: compile the model.
        options: of the rule.
    """

    def __init__(
        self,
        case: step_cost.Case,
        pair: Pair,
        device: str,
        *,
        plain: bool,
        half: bool = False,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = case.model().to(device)
        self.x = torch.randn(case.inputs, device=device)
        with torch.no_grad():
            self.y = torch.randint(case.classes, self.model(self.x).shape[:1], device=device)
        if plain and pair.plain in (*KERNELS, step_cost.MuonBesideAdamW) and self.x.is_cuda:
            options = {"fused": True, **options}
        # so small a rate that no copy diverges while it is timed
        self.rule: Any
        if plain:
            self.rule = pair.plain(self.model.parameters(), lr=1e-6, **options)
        else:
            self.rule = pair.ours(
                self.model.parameters(), ps.trace(self.model, self.x), lr=1e-6, **options
            )
        self.run: Any = torch.compile(self.model) if compiled else self.model
        self._context = lambda: (
            torch.autocast(self.x.device.type, torch.bfloat16) if half else nullcontext()
        )

    def step(self) -> None:
        self.rule.zero_grad()
        with self._context():
            loss = nn.functional.cross_entropy(self.run(self.x).float(), self.y)
        loss.backward()
        self.rule.step()


def compared(
    ours: Callable[[], None], plain: Callable[[], None], turns: int, *, cuda: bool
) -> Figure:
    """The median ratio of turns of two trainings, and the milliseconds of a step of each."""
    timed = [
        step_cost.turn(paired.timed(step, time.perf_counter, cuda=cuda)) for step in (ours, plain)
    ]
    ratios, seconds = paired.alternate(timed[0], timed[1], turns, warmup=2)
    return {
        "turns": turns,
        "plain_milliseconds": paired.milliseconds(seconds),
        **paired.summary(ratios),
    }


def measured(measure: Callable[[], Figure]) -> Figure:
    """A figure, or what went wrong: one failure must not cost the others on a machine that is lent for minutes."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def steps(setting: Setting) -> Iterator[Figure]:
    """Whole steps beside those of the plain rules."""
    for name, case in setting.cases.items():
        large = name == "transformer-25m"
        for optimizer in setting.of(OF_TRANSFORMER if large else PAIRS):
            variants: list[dict[str, bool]] = [{}]
            if large:
                variants.append({"half": True})
            if (
                setting.cuda
                and optimizer in ("PathSGD", "PathAdam")
                and name in ("mlp", "transformer-25m")
            ):
                variants.append({"compiled": True, "half": large})
            for variant in variants:
                yield {
                    "case": name,
                    "optimizer": optimizer,
                    "variant": "+".join(key for key, on in variant.items() if on) or "eager",
                    **measured(partial(of_steps, case, PAIRS[optimizer], setting, name, variant)),
                }


def of_steps(
    case: step_cost.Case, pair: Pair, setting: Setting, name: str, variant: dict[str, bool]
) -> Figure:
    plain = Training(case, pair, setting.device, plain=True, **variant)
    ours = Training(case, pair, setting.device, plain=False, **variant)
    figure = compared(ours.step, plain.step, setting.turns_of(name), cuda=setting.cuda)
    return {**figure, **recorded(ours.rule)}


def recorded(rule: Any) -> Figure:
    """Whether the refreshes of an optimizer were recorded, or why not."""
    metric = getattr(rule, "metric", None)
    if metric is None:
        return {}
    return {
        "recorded": metric._kappa_recording.is_recorded,
        "failure": metric._kappa_recording.failure,
    }


def captured(setting: Setting) -> Iterator[Figure]:
    """Steps that are one CUDA graph."""
    if not setting.cuda:
        return
    rules = {
        "PathSGD": (PAIRS["PathSGD"], {}, {}),
        "Invariant(AdamW)": (
            Pair(invariant(torch.optim.AdamW, capturable=True, fused=True), torch.optim.AdamW),
            {},
            {"capturable": True},
        ),
    }
    for name, case in setting.cases.items():
        for optimizer in setting.of(rules):
            pair, of_ours, of_plain = rules[optimizer]
            make = partial(of_captured, case, pair, setting, name, of_ours, of_plain)
            yield {
                "case": name,
                "optimizer": optimizer,
                "variant": "one CUDA graph",
                **measured(make),
            }


def of_captured(
    case: step_cost.Case, pair: Pair, setting: Setting, name: str, of_ours: Figure, of_plain: Figure
) -> Figure:
    plain = Training(case, pair, setting.device, plain=True, **of_plain)
    ours = Training(case, pair, setting.device, plain=False, **of_ours)
    replay_plain, replay = replayed(plain), replayed(ours)
    count = iter(range(10**9))

    def step() -> None:
        if next(count) % 10 == 0:
            ours.rule.refresh()
        replay()

    return compared(step, replay_plain, setting.turns_of(name), cuda=True)


def replayed(training: Training) -> Callable[[], None]:
    """A function that repeats a step of a training by a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(15):
            training.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    training.rule.zero_grad()
    with torch.cuda.graph(graph):
        training.step()
    return graph.replay


def refresh(setting: Setting) -> Iterator[Figure]:
    """Refreshes alone."""
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        name: lambda case=case: (case.model(), torch.randn(case.inputs))
        for name, case in setting.cases.items()
    }
    if not setting.tiny:
        models |= {"resnet50": trace_cost.resnet50, "gpt2": gpt2}
    for name, make in models.items():
        yield {"case": name, **measured(partial(of_refresh, make, setting))}


def gpt2() -> tuple[nn.Module, Any]:
    import trace_models

    return trace_models.MODELS["gpt2"]()


def of_refresh(make: Callable[[], tuple[nn.Module, Any]], setting: Setting) -> Figure:
    torch.manual_seed(0)
    model, example = make()
    model = model.to(setting.device)
    example = on(example, setting.device)
    network = ps.trace(model, example)
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=1e-6)
    for p in model.parameters():
        p.grad = torch.zeros_like(p).add_(1e-3)
    for _ in range(3):
        optimizer.step()
    run = paired.timed(optimizer.refresh, time.perf_counter, cuda=setting.cuda)
    figure: Figure = {"parameters": sum(p.numel() for p in model.parameters())}
    for key, switch in (("milliseconds", "1"), ("eager_milliseconds", "0")):
        os.environ[SWITCH] = switch
        for _ in range(3):
            optimizer.refresh()
        figure[key] = round(1e3 * statistics.median(run() for _ in range(9)), 3)
        if switch == "1":
            figure |= recorded(optimizer)
    os.environ[SWITCH] = "1"
    return figure


def on(example: Any, device: str) -> Any:
    """An example on a device."""
    if isinstance(example, dict):
        return {key: on(value, device) for key, value in example.items()}
    return example.to(device) if isinstance(example, Tensor) else example


def equality(setting: Setting) -> Iterator[Figure]:
    """Weights on the device beside those on the processor."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    model, x, y = model.double(), torch.randn(64, 20, dtype=torch.float64), torch.randint(4, (64,))
    for optimizer in setting.of(PAIRS):
        pair = PAIRS[optimizer]
        if optimizer.startswith("DDP"):
            continue  # they draw signs, which every device does in its own way
        trained = [weights_after(pair, model, x, y, device) for device in ("cpu", setting.device)]
        moved = torch.linalg.vector_norm(trained[0] - flat(model))
        apart = torch.linalg.vector_norm(trained[0] - trained[1])
        yield {"optimizer": optimizer, "steps": 12, "relative_distance": float(apart / moved)}


def weights_after(pair: Pair, model: nn.Module, x: Tensor, y: Tensor, device: str) -> Tensor:
    model, x, y = copy.deepcopy(model).to(device), x.to(device), y.to(device)
    rule = pair.ours(model.parameters(), ps.trace(model, x), lr=1e-2)
    for _ in range(12):
        rule.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        rule.step()
    return flat(model).cpu()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rnn(setting: Setting) -> Iterator[Figure]:
    """The recurrent layer, forward and backward."""
    sizes = [(8, 4, 5)] if setting.tiny else [(64, 100, 28), (64, 32, 100), (64, 512, 200)]
    for batch, hidden, length in sizes:
        x = torch.randn(batch, length, 8, device=setting.device)
        layers = [
            kind(8, hidden, nonlinearity="relu", batch_first=True).to(setting.device)
            for kind in (ps.nn.RNN, nn.RNN)
        ]

        def passes(layer: nn.Module, x: Tensor = x) -> Callable[[], None]:
            return lambda: layer(x)[0][:, -1].sum().backward()

        figure = compared(
            passes(layers[0]), passes(layers[1]), setting.turns or 12, cuda=setting.cuda
        )
        yield {"batch": batch, "hidden": hidden, "steps": length, **figure}


SECTIONS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "equality": equality,
    "steps": steps,
    "refresh": refresh,
    "captured": captured,
    "rnn": rnn,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--optimizers", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--turns", type=int, help="of ten steps each")
    parser.add_argument("--tiny", action="store_true", help="small models, one turn")
    parser.add_argument(
        "--seconds", type=float, default=600, help="no section begins after so many"
    )
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--eager", action="store_true", help="record no refreshes")
    options = parser.parse_args()
    os.environ[SWITCH] = "0" if options.eager else "1"
    cases = TINY if options.tiny else CASES
    cases = {name: case for name, case in cases.items() if name in options.cases}
    setting = Setting(
        options.device,
        cases,
        1 if options.tiny else options.turns,
        options.tiny,
        options.optimizers,
    )
    card = torch.cuda.get_device_name() if setting.cuda else "none"
    figures: list[Figure] = []
    begin = time.monotonic()
    for section in options.sections:
        for figure in SECTIONS[section](setting):
            line = {
                "benchmark": "gpu",
                "section": section,
                "card": card,
                **figure,
                **paired.versions(),
            }
            figures.append(line)
            print(json.dumps(line), flush=True)
            paired.write(figures, options.output)
            if time.monotonic() - begin > options.seconds:
                print(f"{section} was broken off after {options.seconds:.0f} s", file=sys.stderr)
                break


if __name__ == "__main__":
    main()
