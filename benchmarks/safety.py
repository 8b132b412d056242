"""Whether the defaults are safe: twenty networks, each optimizer beside its plain rule, at that rule's usual rate.

Trains every network of the zoo (``safety_zoo``) for 200 steps with the plain rules and with the
optimizers of pathspace, the defaults of all but the rate and the momentum, on the same batches from
the same start. A figure is the mean loss of the last 20 steps; ten seeds, compared in pairs. What
should hold:

* no optimizer of ours ends not finite where its plain rule is finite;
* the median over the seeds of PathSGD, PathAdam, PathSOAP, PathMuon, Invariant and the DDP
  optimizers is at most 5 % or 0.02 above the plain rule's; the same for SGD after ``balance_``
  (Balanced) beside SGD.

    python benchmarks/safety.py                                   # some hours on one core; Ctrl-C, and it goes on
    python benchmarks/safety.py --optimizers SGD PathSGD --cases mnasnet rnn-28 --seeds 2
    python benchmarks/safety.py --optimizers SGD PathSGD --factor 3             # three times the usual rates
    python benchmarks/safety.py --optimizers PathSGD --options '{"damping": 0.1}'
    python benchmarks/safety.py --table                           # of the runs that there are; trains nothing

Runs are appended to a file, one JSON line each, and those that are in it are not repeated: after a
change of the defaults give another file. The networks' data are read from ``PATHSPACE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import pathspace as ps
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.soap import SOAP
from run_file import finished, make_missing
from safety_zoo import ZOO, Case

STEPS, LAST, SEEDS = 200, 20, 10
MOMENTUM = 0.9
ADAM, MUON, SOAPS = 1e-3, 1e-3, 3e-3  # the defaults of torch.optim, and that of SOAP's authors
SHARE, AMOUNT = 0.05, 0.02  # by which a loss may be above the plain rule's

# case, optimizer -> seed -> loss, NaN if training diverged
Losses = dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True)
class Entry:
    """An optimizer of the comparison.

    Attributes:
        plain: the name of its plain rule, its own name for a plain rule.
        make: (model, an example, rate, more options) -> the optimizer.
        bound: whether it must keep level with its plain rule.
    """

    plain: str
    make: Callable[[nn.Module, Tensor, float, dict[str, Any]], Optimizer]
    bound: bool = True


class Muon(MuonAdamW):
    """Muon for matrices and, as its authors have it, for the filters of convolutions, which are rows."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self.matrices = {p: nn.Parameter(p.detach().flatten(1)) for p in params if p.dim() > 2}
        super().__init__([self.matrices.get(p, p) for p in params], **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for p in self.matrices:
            p.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for p, matrix in self.matrices.items():  # which is the same memory
            matrix.grad = None if p.grad is None else p.grad.flatten(1)
        return super().step(closure)


def _plain(name: str, rule: Callable[..., Optimizer], **fixed: Any) -> Entry:
    return Entry(
        name,
        lambda model, _, lr, options: rule(list(model.parameters()), lr=lr, **fixed, **options),
    )


def _ours(plain: str, make: Callable[..., Optimizer], *, bound: bool = True, **fixed: Any) -> Entry:
    def build(model: nn.Module, example: Tensor, lr: float, options: dict[str, Any]) -> Optimizer:
        return make(model.parameters(), ps.trace(model, example), lr=lr, **(fixed | options))

    return Entry(plain, build, bound)


def _balanced(model: nn.Module, example: Tensor, lr: float, options: dict[str, Any]) -> Optimizer:
    ps.rescaling.balance_(ps.trace(model, example))
    return SGD(model.parameters(), lr=lr, momentum=MOMENTUM, **options)


def _invariant(params: Any, network: ps.Network, **options: Any) -> Optimizer:
    return ps.optim.Invariant(params, network, SGD, **options)


OPTIMIZERS = {
    "SGD": _plain("SGD", SGD, momentum=MOMENTUM),
    "PathSGD": _ours("SGD", ps.optim.PathSGD, momentum=MOMENTUM),
    "Invariant": _ours("SGD", _invariant, momentum=MOMENTUM),
    "DDPSGD": _ours("SGD", ps.optim.DDPSGD, momentum=MOMENTUM),
    "Balanced": Entry("SGD", _balanced),
    "GSGD": _ours("SGD", ps.optim.GSGD, bound=False, momentum=MOMENTUM),
    "AdamW": _plain("AdamW", AdamW, weight_decay=0.0),
    "PathAdam": _ours("AdamW", ps.optim.PathAdam),
    "DDPAdam": _ours("AdamW", ps.optim.DDPAdam),
    "GAdam": _ours("AdamW", ps.optim.GAdam, bound=False),
    "Muon": _plain("Muon", Muon),
    "PathMuon": _ours("Muon", ps.optim.PathMuon),
    "SOAP": _plain("SOAP", SOAP, precondition_frequency=40),
    "PathSOAP": _ours("SOAP", ps.optim.PathSOAP),
}


def usual_rate(case: Case, name: str) -> float:
    """The rate at which an optimizer's plain rule stands by default, or by the usual recipe."""
    return {"SGD": case.lr, "AdamW": ADAM, "Muon": MUON, "SOAP": SOAPS}[OPTIMIZERS[name].plain]


def final_loss(case: Case, name: str, seed: int, factor: float = 1.0, options: Any = None) -> float:
    """The mean loss of the last steps; NaN if training diverged."""
    rate = factor * usual_rate(case, name)
    return trained_loss(
        case, seed, lambda model, x: OPTIMIZERS[name].make(model, x[:2], rate, options or {})
    )


def trained_loss(case: Case, seed: int, make: Callable[[nn.Module, Tensor], Optimizer]) -> float:
    """The mean loss of the last steps by an optimizer, made from the model and all inputs; NaN if it diverged."""
    x, y = case.data()
    torch.manual_seed(seed)
    model = case.make()
    rule = make(model, x)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(0, len(x), (case.batch,), generator=generator)
        scores = model(x[chosen])
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), y[chosen].flatten())
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.nan
        rule.zero_grad()
        loss.backward()
        try:
            rule.step()
        except FloatingPointError:
            return math.nan
    return statistics.mean(losses[-LAST:])


# -- the runs --------------------------------------------------------------------------------------


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one run from another."""
    options = json.dumps(run["options"], sort_keys=True)
    return run["case"], run["optimizer"], run["seed"], run["factor"], options


def train(wanted: list[dict[str, Any]], path: Path) -> None:
    """Make the runs that are missing."""
    make_missing(
        wanted,
        path,
        key_of,
        lambda run: final_loss(
            ZOO[run["case"]], run["optimizer"], run["seed"], run["factor"], run["options"]
        ),
    )


# -- the figures -----------------------------------------------------------------------------------


def losses_of(runs: Iterable[dict[str, Any]]) -> Losses:
    """Losses by case, optimizer and seed."""
    losses: Losses = {}
    for run in runs:
        loss = math.nan if run["loss"] is None else run["loss"]
        losses.setdefault((run["case"], run["optimizer"]), {})[run["seed"]] = loss
    return losses


def figure(losses: Losses, case: str, name: str) -> dict[str, Any] | None:
    """An optimizer on a network beside its plain rule, over the seeds that both have; None without any."""
    ours, plain = losses.get((case, name), {}), losses.get((case, OPTIMIZERS[name].plain), {})
    seeds = sorted(ours.keys() & plain.keys())
    if not seeds:
        return None
    pairs = [(ours[s], plain[s]) for s in seeds]
    worse = sum(math.isnan(a) and not math.isnan(b) for a, b in pairs)
    lost = sum(math.isnan(a) for a, _ in pairs)
    loss, reference = (middle([pair[i] for pair in pairs]) for i in (0, 1))
    differences = [a - b for a, b in pairs if not math.isnan(a + b)]
    level = math.isinf(reference) or loss <= max(reference * (1 + SHARE), reference + AMOUNT)
    return {
        "case": case,
        "optimizer": name,
        "seeds": len(seeds),
        "loss": _number(loss),
        "plain": _number(reference),
        "difference": round(statistics.median(differences), 4) if differences else None,
        "not_finite": lost,
        "not_finite_where_plain_is": worse,
        "holds": not worse and (level or not OPTIMIZERS[name].bound),
        "level": level,
    }


def middle(losses: list[float]) -> float:
    """The median, where a run that diverged counts as infinite."""
    return statistics.median(math.inf if math.isnan(loss) else loss for loss in losses)


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def table(losses: Losses, cases: list[str], names: list[str]) -> str:
    """Median losses in Markdown; what is above its plain rule by more than allowed stands in bold."""
    lines = ["| network | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for case in cases:
        cells = []
        for name in names:
            found = figure(losses, case, name)
            if found is None:
                cells.append("")
                continue
            cell = "not finite" if found["loss"] is None else f"{found['loss']:.3f}"
            if found["not_finite"]:
                cell += f" ({found['not_finite']} of {found['seeds']} not finite)"
            cells.append(
                cell if found["level"] and not found["not_finite_where_plain_is"] else f"**{cell}**"
            )
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="CASE")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=list(OPTIMIZERS),
        default=list(OPTIMIZERS),
        metavar="OPTIMIZER",
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the first seed: defaults are chosen on others than are published",
    )
    parser.add_argument("--factor", type=float, default=1.0, help="of the usual rates")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help="more options of the optimizers of ours, JSON",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/safety.jsonl"), help="the file of the runs"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the table of the runs that there are"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [
        {
            "case": case,
            "optimizer": name,
            "seed": seed,
            "factor": given.factor,
            "options": {}
            if OPTIMIZERS[name].plain == name or name == "Balanced"
            else given.options,
        }
        for seed in range(given.first, given.first + given.seeds)
        for case in given.cases
        for name in given.optimizers
    ]
    if not given.table:
        train(wanted, given.runs)
    done = finished(given.runs, key_of)
    losses = losses_of(done[key] for run in wanted if (key := key_of(run)) in done)
    figures = [
        f
        for case in given.cases
        for name in given.optimizers
        if (f := figure(losses, case, name)) is not None
    ]
    if given.table:
        print(table(losses, given.cases, given.optimizers))
    else:
        for one in figures:
            print(json.dumps(one))
    if given.json is not None:
        temporary = given.json.with_suffix(".tmp")
        temporary.write_text(
            json.dumps(
                {"torch": torch.__version__, "pathspace": ps.__version__, "figures": figures},
                indent=1,
            )
            + "\n"
        )
        temporary.replace(given.json)


if __name__ == "__main__":
    main()
