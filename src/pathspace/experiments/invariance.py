"""Optimizers times networks: does a node-wise rescaling of the start change what training does?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn, optim

import pathspace.optim
from pathspace.experiments.errors import unknown_name
from pathspace.experiments.model_source import NETWORKS, build_network, example_loss
from pathspace.experiments.storage import finite
from pathspace.experiments.terminal import output_console, print_json
from pathspace.tools.progress import shown


@dataclass(frozen=True)
class Candidate:
    """An optimizer to check: what builds it for a model and its network, its claim that rescaling changes nothing."""

    build: Callable[[nn.Module, Any], optim.Optimizer]
    invariant: bool
    words: str = ""


@dataclass(frozen=True)
class Verdict:
    """Result of checking one optimizer, which may claim invariance, on one network."""

    optimizer: str
    network: str
    claimed: bool
    report: Any

    @property
    def broken(self) -> bool:
        """True if a claim failed."""
        return self.claimed and not self.report.passed


def _of(name: str, *, invariant: bool = True, rule: Any = None, **options: Any) -> Candidate:
    """Return an optimizer of the library, or one of `torch.optim`, which knows no network."""
    of_torch = name.startswith("torch.")

    def build(model: nn.Module, network: Any) -> optim.Optimizer:
        if of_torch:
            return getattr(optim, name.rpartition(".")[2])(model.parameters(), **options)
        given = [network] if rule is None else [network, rule]
        return getattr(pathspace.optim, name)(model.parameters(), *given, **options)

    told = [] if rule is None else [f"torch.optim.{rule.__name__}"]
    told += [f"{key}={value}" for key, value in options.items()]
    return Candidate(build, invariant and not of_torch, f"{name}({', '.join(told)})")


CANDIDATES = {
    "sgd": _of("torch.optim.SGD", lr=0.05),
    "adam": _of("torch.optim.Adam", lr=0.003),
    "path-sgd": _of("PathSGD", lr=0.05),
    "path-sgd-momentum": _of("PathSGD", lr=0.02, momentum=0.9),
    "path-sgd-nesterov": _of("PathSGD", lr=0.02, momentum=0.9, nesterov=True),
    "path-sgd-decay": _of("PathSGD", lr=0.05, weight_decay=0.01),
    "path-sgd-clipping": _of("PathSGD", lr=0.05, clip_norm=0.1),
    "path-sgd-fresh": _of("PathSGD", lr=0.05, refresh_every=1),
    "invariant-adamw": _of("Invariant", rule=optim.AdamW, lr=0.003, weight_decay=0.1),
    "path-adam": _of("PathAdam", lr=0.003),
    "path-soap": _of("PathSOAP", lr=0.003),
    "path-muon": _of("PathMuon", lr=0.003),
    "path-gradient-adam": _of("PathGradientAdam", lr=0.003, invariant=False),
    "g-sgd": _of("GSGD", lr=0.02),
    "g-sgd-momentum": _of("GSGD", lr=0.005, momentum=0.9),
    "g-adam": _of("GAdam", lr=0.003),
    "ddp-sgd": _of("DDPSGD", lr=0.01, clip_norm=1.0),
    "ddp-sgd-centred": _of("DDPSGD", lr=0.01, clip_norm=1.0, statistic="covariance"),
    "ddp-adam": _of("DDPAdam", lr=0.003),
    "quasi-diagonal": _of("QuasiDiagonal", lr=0.003, damping=0.1, clip_norm=1.0),
}


def _other_optimizers() -> dict[str, Candidate]:
    """Return the optimizers of the library that have no row above, as they come: PathRMSprop as path-rmsprop."""
    there = {candidate.words.partition("(")[0] for candidate in CANDIDATES.values()}
    found = {}
    for name in pathspace.optim.__all__:
        kind = getattr(pathspace.optim, name)
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and name not in there:
            found[re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()] = _of(name)
    return found


# whoever adds a class need not name it here
CANDIDATES |= _other_optimizers()


def list_candidates() -> str:
    """Return the names of all optimizers, by what they claim, and of all networks, a line for each."""
    indent = 2 + max(map(len, CANDIDATES))
    claims = {"Optimizers that claim invariance": True, "Optimizers that do not": False}
    lines = []
    for title, claimed in claims.items():
        lines.append(f"{title}:")
        chosen = {name: one for name, one in CANDIDATES.items() if one.invariant is claimed}
        lines += [f"  {name:<{indent}}{one.words}" for name, one in chosen.items()]
        lines.append("")
    lines.append("Networks:")
    lines += [f"  {name:<{indent}}{about}" for name, (about, _) in NETWORKS.items()]
    return "\n".join(lines)


def check_all(
    optimizers: Sequence[str], networks: Sequence[str], *, steps: int = 100, seed: int = 0
) -> Iterator[Verdict]:
    """Check every optimizer on every network, in float32 with random powers of two between 2^-10 and 2^10."""
    from pathspace.rescaling import check_invariance

    for network in networks:
        model, example = build_network(network, seed)
        for optimizer in optimizers:
            candidate = CANDIDATES[optimizer]
            report = check_invariance(
                model, example, example_loss, candidate.build, steps=steps, seed=seed
            )
            yield Verdict(optimizer, network, candidate.invariant, report)


def print_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print one row per optimizer and one column per network, with the largest difference of the outputs."""
    found = {(verdict.optimizer, verdict.network): verdict for verdict in verdicts}
    networks = list(dict.fromkeys(verdict.network for verdict in verdicts))
    claims = {verdict.optimizer: verdict.claimed for verdict in verdicts}
    table = Table(
        title="Largest difference of the outputs, training from two starts of the same function",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("optimizer")
    table.add_column("invariant?")
    for network in networks:
        table.add_column(network, justify="right")
    for optimizer, claimed in claims.items():
        cells = [_cell(found[optimizer, network]) for network in networks]
        table.add_row(optimizer, "claimed" if claimed else "no", *cells)
    # in a narrower terminal names and numbers would lose their ends
    table.width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table, crop=False)
    broken = [verdict for verdict in verdicts if verdict.broken]
    for verdict in broken:
        console.print(f"[red]{verdict.optimizer} on {verdict.network}: {_reason(verdict.report)}")
    if not broken:
        console.print("Every optimizer that claims invariance kept it, bitwise.")


def verdicts_as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts as plain values."""
    of_report = (
        "passed", "outputs_equal", "largest_output_difference", "weights_equal", "largest_weight_difference",
        "differs_from_sgd", "steps",
    )  # fmt: skip
    found = []
    for verdict in verdicts:
        which = {"optimizer": verdict.optimizer, "network": verdict.network}
        values = {name: getattr(verdict.report, name) for name in of_report}
        for name in ("largest_output_difference", "largest_weight_difference"):
            values[name] = finite(values[name])
        found.append({**which, "claims_invariance": verdict.claimed, **values})
    return found


def _cell(verdict: Verdict) -> str:
    difference = verdict.report.largest_output_difference
    text = "0.0" if verdict.report.outputs_equal else f"{difference:.2g}"
    if verdict.broken:
        return f"[red]{text} ✗"
    return f"[green]{text} ✓" if verdict.report.passed else text


def _reason(report: Any) -> str:
    if not report.outputs_equal:
        return f"outputs differ by up to {report.largest_output_difference:.2g}."
    if not report.weights_equal:
        return f"weights differ by up to {report.largest_weight_difference:.2g} after undoing the rescaling."
    return "its steps equal those of plain SGD, so nothing was shown."


def run_check_invariance(
    optimizers: Sequence[str] | None,
    networks: Sequence[str] | None,
    *,
    steps: int,
    seed: int,
    as_json: bool,
    quiet: bool = False,
) -> bool:
    """Do what `pathspace check-invariance` was asked for; None stands for all. Says whether every claim held."""
    optimizers, networks = optimizers or list(CANDIDATES), networks or list(NETWORKS)
    for kind, names, known in (
        ("optimizer", optimizers, CANDIDATES),
        ("network", networks, NETWORKS),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(kind, name, known, f"--{kind}s")
    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for each other
    whole = len(optimizers) * len(networks)
    verdicts = []
    with shown("checked", Console(stderr=True), quiet=quiet) as show:
        for verdict in check_all(optimizers, networks, steps=steps, seed=seed):
            verdicts.append(verdict)
            done = len(verdicts)
            show(done / whole, f"{done}/{whole}, {verdict.optimizer} on {verdict.network}")
    if as_json:
        print_json(verdicts_as_json(verdicts))
    else:
        print_verdicts(verdicts, output_console())
    return not any(verdict.broken for verdict in verdicts)
