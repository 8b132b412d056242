"""What every optimizer of the library must pass, whatever its rule.

An optimizer enters by one line in `REGISTRY`: a name, a factory and its claims.
optim/test_conformance.py runs the checks on every entry, and on controls that must fail them.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from cases import Case, call, trace, traced

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """An optimizer with fixed hyper-parameters, and what it claims."""

    name: str
    make: Callable[..., torch.optim.Optimizer]  # (parameters, network, **options)
    invariant: bool = True
    # the rule of the same family for parameters outside the network; None where it is checked
    # elsewhere
    plain_rule: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    # the same update whether the parameters come in one group or in several
    separable: bool = True
    # length of the runs that show invariance: two refreshes of the metric at their usual distance,
    # and a few steps more
    steps: int = 24
    # whether invariance is checked on every network, or only on the small ones
    thorough: bool = True
    # how far rounding may be amplified there
    rounding: float = 1e-12

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.name.split()[0]

    @property
    def is_plain(self) -> bool:
        """Whether it has no options but learning rates."""
        return self.name == self.kind

    def __str__(self) -> str:
        return self.name


def _steps(options: dict[str, Any]) -> int:
    return 2 * options.get("refresh_every", 10) + 4


def _refreshed(options: dict[str, Any], *, thorough: bool) -> dict[str, Any]:
    """Options under which a short run sees two refreshes at their usual distance; the thorough keep the default."""
    return options if thorough else {"refresh_every": 3, **options}


def _path_sgd(
    name: str,
    *,
    plain: dict[str, Any] | None = None,
    thorough: bool = False,
    **fixed: Any,
) -> Entry:
    fixed = _refreshed({"lr": 0.05, **fixed}, thorough=thorough)
    steps = _steps(fixed)

    def make(parameters: Parameters, network: Any, **options: Any) -> torch.optim.Optimizer:
        return ps.optim.PathSGD(parameters, network, **{**fixed, **options})

    def plain_rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=fixed["lr"], **(plain or {}))

    rule = None if plain is None else plain_rule
    return Entry(f"PathSGD {name}".strip(), make, plain_rule=rule, thorough=thorough, steps=steps)


def _sgd_like(
    optimizer: str,
    name: str = "",
    *,
    plain: dict[str, Any] | None = None,
    thorough: bool = False,
    steps: int | None = None,
    rounding: float = 1e-10,
    **fixed: Any,
) -> Entry:
    """An optimizer that takes SGD's rule outside the network."""
    fixed = _refreshed(fixed, thorough=thorough)

    def make(parameters: Parameters, network: Any, **options: Any) -> torch.optim.Optimizer:
        return getattr(ps.optim, optimizer)(parameters, network, **{**fixed, **options})

    def plain_rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=fixed["lr"], **(plain or {}))

    return Entry(
        f"{optimizer} {name}".strip(),
        make,
        plain_rule=None if plain is None else plain_rule,
        thorough=thorough,
        steps=_steps(fixed) if steps is None else steps,
        rounding=rounding,
    )


def _adam_like(
    optimizer: str,
    name: str = "",
    *,
    plain: dict[str, Any] | None = None,
    invariant: bool = True,
    thorough: bool = False,
    steps: int | None = None,
    rounding: float = 1e-10,
    **fixed: Any,
) -> Entry:
    """An optimizer that takes AdamW's rule outside the network."""
    fixed = {"lr": 0.01, **fixed}
    fixed = fixed if optimizer == "GAdam" else _refreshed(fixed, thorough=thorough)

    def make(parameters: Parameters, network: Any, **options: Any) -> torch.optim.Optimizer:
        return getattr(ps.optim, optimizer)(parameters, network, **{**fixed, **options})

    def plain_rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, **{"lr": fixed["lr"], "weight_decay": 0.0, **(plain or {})}
        )

    return Entry(
        f"{optimizer} {name}".strip(),
        make,
        invariant=invariant,
        plain_rule=None if plain is None else plain_rule,
        thorough=thorough,
        steps=_steps(fixed) if steps is None else steps,
        rounding=rounding,
    )


def _g_sgd(
    name: str,
    *,
    plain: dict[str, Any] | None = None,
    thorough: bool = False,
    steps: int = 25,
    **fixed: Any,
) -> Entry:
    fixed = {"lr": 0.02, **fixed}

    def make(parameters: Parameters, network: Any, **options: Any) -> torch.optim.Optimizer:
        return ps.optim.GSGD(parameters, network, **{**fixed, **options})

    def plain_rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=fixed["lr"], **(plain or {}))

    rule = None if plain is None else plain_rule
    return Entry(
        f"GSGD {name}".strip(), make, plain_rule=rule, thorough=thorough, steps=steps, rounding=1e-9
    )


def _invariant(rule: str, name: str = "", *, thorough: bool = False, **fixed: Any) -> Entry:
    """`Invariant` with one of torch's rules."""
    fixed = _refreshed(fixed, thorough=thorough)
    ours = {"power", "damping", "refresh_every", "second_term", "normalization", "frame"}
    metric = {key: fixed[key] for key in fixed.keys() & ours}
    clip = {key: fixed[key] for key in fixed.keys() & {"clip_norm"}}
    rules = {key: value for key, value in fixed.items() if key not in metric | clip}

    def make(parameters: Parameters, network: Any, **options: Any) -> torch.optim.Optimizer:
        changed = {key: options.pop(key) for key in options.keys() & ours}
        kind, geometry = getattr(torch.optim, rule), ps.metrics.Path(**{**metric, **changed})
        return ps.optim.Invariant(
            parameters, network, kind, metric=geometry, **clip, **{**rules, **options}
        )

    def plain_rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return getattr(torch.optim, rule)(parameters, **rules)

    plain = None if clip else plain_rule
    title = f"Invariant {rule} {name}".strip()
    return Entry(
        title, make, plain_rule=plain, thorough=thorough, steps=_steps(metric), rounding=1e-6
    )


REGISTRY = [
    _path_sgd("", plain={}, thorough=True),
    _path_sgd("raw", normalization="none", lr=0.01, plain={}, thorough=True),
    _path_sgd("frozen", normalization="frozen", plain={}),
    _path_sgd("one mean", normalization="network", plain={}),
    _path_sgd("momentum", momentum=0.9, lr=0.02, plain={"momentum": 0.9}),
    _path_sgd(
        "nesterov", momentum=0.9, nesterov=True, lr=0.02, plain={"momentum": 0.9, "nesterov": True}
    ),
    _path_sgd("weight decay", weight_decay=0.1),
    _path_sgd("path decay", path_decay=1e-3),
    _path_sgd("clipped", clip_norm=0.05),
    _path_sgd("short steps", clip_step=0.05, momentum=0.9, lr=0.02, refresh_every=3),
    _path_sgd("stale", refresh_every=7),
    _path_sgd("second term", second_term=True),
    _path_sgd("damped", damping=1e-2),
    _path_sgd("measure", frame="measure"),
    _path_sgd(
        "everything",
        thorough=True,
        lr=0.02,
        momentum=0.5,
        nesterov=True,
        weight_decay=0.05,
        path_decay=1e-3,
        clip_norm=0.5,
        refresh_every=3,
        second_term=True,
        damping=1e-3,
        normalization="frozen",
    ),
    _adam_like("PathAdam", plain={}, thorough=True),
    _adam_like("PathAdam", "raw", normalization="none", plain={}),
    _adam_like("PathAdam", "power 0.3", power=0.3, plain={}),
    _adam_like("PathAdam", "measure", frame=ps.metrics.Frame("measure", alpha=0.5)),
    _adam_like(
        "PathAdam",
        "everything",
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        amsgrad=True,
        power=0.5,
        refresh_every=3,
        second_term=True,
        normalization="frozen",
        damping=1e-3,
        clip_norm=0.5,
    ),
    _adam_like(
        "PathRMSprop",
        "everything",
        momentum=0.5,
        eps=1e-6,
        power=0.5,
        refresh_every=3,
        clip_norm=0.5,
    ),
    _invariant("AdamW", thorough=True, lr=0.01, weight_decay=0.1),
    _invariant(
        "AdamW",
        "everything",
        lr=0.01,
        betas=(0.8, 0.95),
        weight_decay=0.1,
        amsgrad=True,
        power=0.5,
        refresh_every=3,
        second_term=True,
        normalization="frozen",
        clip_norm=0.5,
    ),
    _invariant(
        "SGD", lr=0.02, momentum=0.9, weight_decay=0.01, refresh_every=3
    ),  # which looks at the coordinates
    _invariant("ASGD", lr=0.02, refresh_every=3),  # which keeps a point
    _invariant("Adafactor", lr=0.01, refresh_every=3),
    *(
        _invariant(rule, refresh_every=4)
        for rule in ("Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    ),
    _adam_like("PathGradientAdam", invariant=False, plain={}),
    _adam_like(
        "PathGradientAdam",
        "everything",
        invariant=False,
        weight_decay=0.1,
        amsgrad=True,
        refresh_every=3,
        second_term=True,
        normalization="refreshed",
        damping=1e-3,
        clip_norm=0.5,
    ),
    _adam_like("PathGradientAdam", "scaled", invariant=False, plain={}, scale="gradient"),
    # SOAP looks at differences of gradients in their eigenbasis, where entries that are nothing but
    # rounding take steps as large as the others
    _adam_like(
        "PathSOAP",
        plain={"betas": (0.95, 0.95), "eps": 1e-6},
        eps=1e-6,
        thorough=True,
        steps=20,
        rounding=1e-5,
        precondition_frequency=3,
    ),
    _adam_like(
        "PathSOAP",
        "everything",
        rounding=1e-5,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.1,
        precondition_frequency=5,
        max_precondition_size=4,
        power=0.5,
        refresh_every=3,
        second_term=True,
        normalization="frozen",
        damping=1e-3,
        clip_norm=0.5,
    ),
    _adam_like("PathMuon", plain={}, thorough=True),
    _adam_like(
        "PathMuon",
        "everything",
        momentum=0.8,
        nesterov=False,
        weight_decay=0.1,
        adjust_lr="original",
        ns_steps=3,
        power=0.5,
        refresh_every=3,
        second_term=True,
        normalization="frozen",
        damping=1e-3,
        clip_norm=0.5,
    ),
    _g_sgd("", plain={}, thorough=True, steps=40),
    _g_sgd("momentum", momentum=0.9, lr=0.005, plain={"momentum": 0.9}, steps=12),
    _g_sgd("weight decay", weight_decay=0.1, steps=12),
    _g_sgd("clipped", clip_norm=0.05, steps=12),
    _g_sgd("cyclic exact", skeleton="cyclic", clamp=None, plain={}, lr=0.01, steps=12),
    _g_sgd(
        "random clamped",
        skeleton="random",
        seed=3,
        clamp=1.001,
        skeleton_rate=1.0,
        plain={},
        lr=0.01,
        steps=12,
    ),
    _g_sgd(
        "nesterov", momentum=0.9, nesterov=True, lr=0.005, plain={"momentum": 0.9, "nesterov": True}
    ),
    _g_sgd(
        "everything",
        lr=0.005,
        momentum=0.5,
        nesterov=True,
        weight_decay=0.05,
        clip_norm=0.5,
        clamp=1.5,
        units="none",
        steps=20,
    ),
    _adam_like("GAdam", plain={}, steps=25),
    _adam_like("GAdam", "raw", units="none", plain={}, lr=0.001, steps=12),
    _adam_like(
        "GAdam", "cyclic clipped", skeleton="cyclic", clamp=None, clip_norm=0.05, lr=0.002, steps=12
    ),
    _adam_like(
        "GAdam",
        "everything",
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        amsgrad=True,
        clip_norm=0.5,
        clamp=1.2,
        units="none",
        steps=20,
    ),
    _sgd_like("DDPSGD", plain={}, thorough=True, lr=0.02, steps=12),
    _sgd_like(
        "DDPSGD",
        "everything",
        steps=8,
        lr=0.01,
        momentum=0.5,
        nesterov=True,
        weight_decay=0.05,
        path_decay=1e-3,
        clip_norm=0.5,
        clip_step=0.2,
        refresh_every=3,
        alpha=0.7,
        sharing="edges",
        estimator="signs",
        averaging=0.8,
        damping=1e-3,
        normalization="frozen",
    ),
    _adam_like(
        "DDPAdam",
        "everything",
        steps=8,
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        amsgrad=True,
        power=0.5,
        refresh_every=3,
        alpha=0.7,
        statistic="covariance",
        estimator="signs",
        damping=1e-3,
        normalization="frozen",
        clip_norm=0.5,
    ),
    _sgd_like("QuasiDiagonal", plain={}, lr=0.01, steps=8, rounding=1e-8),
    _sgd_like(
        "QuasiDiagonal",
        "everything",
        steps=8,
        lr=0.005,
        momentum=0.5,
        nesterov=True,
        weight_decay=0.05,
        clip_norm=0.5,
        refresh_every=3,
        alpha=0.7,
        statistic="covariance",
        estimator="signs",
        damping=1e-1,
        normalization="frozen",
    ),
]


# --- running --------------------------------------------------------------------------------------


@dataclass
class Run:
    """A model in training: its network, its optimizer, and the outputs so far."""

    case: Case
    model: nn.Module
    network: Any
    optimizer: torch.optim.Optimizer
    outputs: list[Tensor]
    steps: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def example(self) -> Any:
        return self.case.example(4, self.dtype, seed=10 + self.steps % 5)

    def gradients(self, sign: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        output = call(self.model, self.example())
        loss = sign * self.case.loss(output)
        loss.backward()
        self.outputs.append(self.case.picked(output).detach().clone())
        return loss

    def advance(self, steps: int = 1, sign: float = 1.0) -> Run:
        for _ in range(steps):
            self.gradients(sign)
            self.optimizer.step()
            self.steps += 1
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def start(
    entry: Entry,
    case: Case,
    dtype: torch.dtype = torch.float32,
    factors: Tensor | None = None,
    training: bool = False,
    **options: Any,
) -> Run:
    """A fresh run of an entry on a case, from weights rescaled by `factors`."""
    if training and not case.training:
        model = case.model(dtype).train()
        network = trace(case, model)
    else:
        model, network = traced(case, dtype)
    if factors is not None:
        ps.rescaling.rescale_(network, factors.to(dtype))
    optimizer = entry.make(model.parameters(), network, **options)
    return Run(case, model, network, optimizer, [])


# --- invariance -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Largest difference between two runs, in outputs, in weights after undoing the rescaling, and in states."""

    outputs: float
    weights: float
    states: float
    finite: bool

    @property
    def none(self) -> bool:
        return self.outputs == 0 and self.weights == 0 and self.states == 0


def power_of_two_factors(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-10, 11, (number,), generator=generator).double()


def arbitrary_factors(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 10.0 ** (6 * torch.rand(number, generator=generator, dtype=torch.float64) - 3)


def difference(
    entry: Entry,
    case: Case,
    dtype: torch.dtype,
    factors: Tensor,
    steps: int | None = None,
    training: bool = False,
) -> Difference:
    """Train from the given start and from its rescaling, and compare relative to the largest value."""
    steps = entry.steps if steps is None else steps
    plain = start(entry, case, dtype, training=training).advance(steps)
    rescaled = start(entry, case, dtype, factors, training=training).advance(steps)
    ps.rescaling.rescale_(rescaled.network, (1 / factors).to(dtype))
    ours, theirs = torch.stack(plain.outputs), torch.stack(rescaled.outputs)
    weights = [(p, rescaled.weights()[name]) for name, p in plain.weights().items()]
    return Difference(
        outputs=_relative(ours, theirs),
        weights=max(_relative(p, q) for p, q in weights),
        states=max((_relative(a, b) for a, b in _states(plain, rescaled, factors)), default=0.0),
        finite=bool(torch.isfinite(ours).all())
        and all(bool(torch.isfinite(p).all()) for p, _ in weights),
    )


def _states(plain: Run, rescaled: Run, factors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What two optimizers keep of gradients: velocities follow the weights, moments in coordinates stay."""
    found = []
    pairs = zip(plain.optimizer.param_groups, rescaled.optimizer.param_groups, strict=True)
    for p, q in (
        pair for one, other in pairs for pair in zip(one["params"], other["params"], strict=True)
    ):
        name = plain.network.names_by_id.get(id(p))
        if rule := getattr(plain.optimizer, "rule", None):
            ours, theirs = (
                rule.state[plain.optimizer._shadows[p]],
                rescaled.optimizer.rule.state[rescaled.optimizer._shadows[q]],
            )
            found += [
                (ours[k], theirs[k])
                for k in ours
                if isinstance(ours[k], Tensor) and ours[k].numel()
            ]
        elif (
            name
            and isinstance(plain.optimizer, ps.optim.PathSGD)
            and "momentum_buffer" in plain.optimizer.state[p]
        ):
            moved = plain.network.edge_factors(name, factors).to(p.dtype)
            ours, theirs = plain.optimizer.state[p], rescaled.optimizer.state[q]
            found.append((ours["momentum_buffer"], theirs["momentum_buffer"] / moved))
    return found


def _relative(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    value = ((ours - theirs).abs().max() / ours.abs().max()).item()
    return value if value == value else float("inf")


def steps_cosine(entry: Entry, case: Case) -> float:
    """Cosine between the first step and the gradient, over all parameters: 1 for plain SGD of any rate."""
    run = start(entry, case, torch.float64)
    before = run.weights()
    run.advance()
    step = torch.cat(
        [(p.detach() - before[name]).flatten() for name, p in run.model.named_parameters()]
    )
    gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    if not step.any():
        return 1.0  # a step that never happens is no step of its own
    return -torch.nn.functional.cosine_similarity(step, gradient, dim=0).item()


# --- resuming -------------------------------------------------------------------------------------


def resumed(run: Run, entry: Entry, *, through_file: bool, **options: Any) -> Run:
    """What goes on after the end of a process: a new model, network and optimizer from the saved states."""
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    if through_file:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    else:
        state = copy.deepcopy(state)
    fresh, network = traced(run.case, run.dtype)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(state["model"])
    optimizer = entry.make(fresh.parameters(), network, **options)
    optimizer.load_state_dict(state["optimizer"])
    return Run(run.case, fresh, network, optimizer, [], run.steps)
