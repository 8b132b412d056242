"""The runs of the comparison: problems, methods, settings, and the training of one network.

A problem is the sum, product or difference of two marked numbers of a long sequence. A method is a
rule, how much of kappa is in its metric, and what is done to kappa as a control.

A network is trained until it has learned its problem, or its steps are over. Every step draws a
fresh batch, so the loss before a step is an error on sequences that were never seen; where its mean
over the last 20 steps is below the target, the test sequences decide.

Sources: S. Hochreiter and J. Schmidhuber (1997), in the form of Q. Le, N. Jaitly and G. Hinton
    (2015); the product is theirs of 1997, too.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn
from torch.optim import AdamW

import pathspace as ps
from pathspace.experiments.errors import unknown_name
from pathspace.experiments.layers import (
    CONFIG,
    Count,
    NotNegative,
    Positive,
    Several,
    Share,
    known,
)
from pathspace.experiments.models import ReluRNN
from pathspace.experiments.run import factor
from pathspace.experiments.settings import Seeds
from pathspace.experiments.storage import finite
from pathspace.experiments.tasks.task import marked_sequences
from pathspace.experiments.terminal import ProgressCallback, unheard
from pathspace.optim.rules.muon import MuonAdamW
from pathspace.optim.rules.soap import SOAP

RECURRENT = "rnn.weight_hh_l0"
INTO_UNITS = ("rnn.weight_ih_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0")
OUTPUT = "readout.weight"
SOAP_FREQUENCY = 40  # as in `ps.optim.PathSOAP`

# By rule: the optimizer of the path metric, the one without a metric, and options of both.
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "muon": (ps.optim.PathMuon, MuonAdamW, {}),
    "muon-hidden": (ps.optim.PathMuon, MuonAdamW, {}),
    "soap": (ps.optim.PathSOAP, SOAP, {"precondition_frequency": SOAP_FREQUENCY}),
    "adamw": (ps.optim.PathAdam, AdamW, {"weight_decay": 0.0}),
}


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables call it.
        rule: A name in `RULES`. With "muon-hidden" Muon has the recurrent matrix alone, as Muon's
            authors advise.
        power: How much of kappa is in the metric, as in `ps.metrics.Path`; 0: none.
        balanced: Whether the start is balanced once; an invariant method does the same from any
            scaling.
        of: The parameters whose kappa is used; the others have the metric of the balanced network.
            Empty: all.
        once: kappa of the first step for good.
        permuted: Units of kappa in a random order, the same in all parameters and at all steps of a
            run.
    """

    label: str
    rule: str
    power: float = 0.0
    balanced: bool = True
    of: tuple[str, ...] = ()
    once: bool = False
    permuted: bool = False

    @property
    def is_control(self) -> bool:
        """True if kappa is changed."""
        return self.once or self.permuted or bool(self.of)

    @property
    def group(self) -> str:
        """The kind of metric: "path", "balanced once", "the weights", or "control" for a part of kappa."""
        if self.is_control:
            return "control"
        if self.power:
            return "path"
        return "balanced once" if self.balanced else "the weights"


class ChangedKappa(ps.metrics.Metric):
    """The metric of a control: kappa of the path norm, what a method does to it, and the order of permuted units."""

    def __init__(self, method: Method, order: Tensor, **options: Any) -> None:
        super().__init__(method.power, **options)
        self.method, self.order = method, order
        self.first: Mapping[str, Tensor] = {}

    def values(self, network: ps.Network, names: Sequence[str]) -> Mapping[str, Tensor]:
        """See `ps.metrics.Metric`."""
        if self.first:
            return self.first
        kappa = ps.paths.kappa(network)
        if self.method.permuted:
            kappa = {name: self._permuted(value) for name, value in kappa.items()}
        if self.method.once:
            self.first = {name: value.clone() for name, value in kappa.items()}
        # without any kappa a parameter has the metric of the balanced network
        chosen = self.method.of or names
        return {
            name: kappa[name] if name in chosen else torch.zeros_like(kappa[name]) for name in names
        }

    def _permuted(self, kappa: Tensor) -> Tensor:
        for dim, size in enumerate(kappa.shape):
            if size == len(self.order):
                kappa = kappa.index_select(dim, self.order)
        return kappa


METHODS = {
    "path-muon": Method("PathMuon", "muon", 1.0),
    "path-muon-half": Method("PathMuon, power 1/2", "muon", 0.5),
    "path-muon-hidden": Method("PathMuon, PathAdam", "muon-hidden", 1.0),
    "path-soap": Method("PathSOAP", "soap", 1.0),
    "path-adam": Method("PathAdam", "adamw", 1.0),
    "balanced-muon": Method("Muon", "muon"),
    "balanced-muon-hidden": Method("Muon, AdamW", "muon-hidden"),
    "balanced-soap": Method("SOAP", "soap"),
    "balanced-adamw": Method("AdamW", "adamw"),
    "muon": Method("Muon on the weights", "muon", balanced=False),
    "soap": Method("SOAP on the weights", "soap", balanced=False),
    "adamw": Method("AdamW on the weights", "adamw", balanced=False),
    # controls: what of kappa does it
    "once": Method("kappa of the first step", "muon", 1.0, once=True),
    "permuted": Method("kappa's units permuted", "muon", 1.0, permuted=True),
    "recurrent-only": Method("kappa of W_rec alone", "muon", 1.0, of=(RECURRENT,)),
    "input-only": Method("kappa of W_in and b alone", "muon", 1.0, of=INTO_UNITS),
    "output-only": Method("kappa of W_out alone", "muon", 1.0, of=(OUTPUT,)),
}


@dataclass(frozen=True)
class Problem:
    """A problem, and the error below which it is learned.

    Attributes:
        answer: From the two marked numbers.
        target: A test error below this is a success: 6 % of what the best constant answer gets.
    """

    answer: Callable[[Tensor, Tensor], Tensor]
    target: float

    def draw(self, generator: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw sequences (count, length, 2) and their answers (count,)."""
        inputs, marked = marked_sequences(count, length, generator)
        return inputs, self.answer(marked[:, 0], marked[:, 1])


PROBLEMS = {
    "addition": Problem(torch.add, 0.01),
    "multiplication": Problem(torch.mul, 0.003),
    "subtraction": Problem(torch.sub, 0.01),
}


@validated(frozen=True, config=CONFIG)
class Protocol:
    """The settings of the table.

    Attributes:
        problems: Names in `PROBLEMS`.
        lengths: T of the sequences, each with each problem and size.
        hidden: H of the networks.
        methods: Names in `methods.METHODS`.
        reference: The method that all others are tested against.
        learning_rates: The grid.
        tuning_seeds: Seeds of every rate; the rate of most successes is chosen, of equals that of
            least steps.
        seeds: Reported seeds, which no rate was chosen on.
        steps_per_length: Most steps of a run, for every step of a sequence: 15 T.
        batch_size: B.
        warmup: The part of a run over which the rate rises.
        clip_norm: Largest norm of a gradient in a method's coordinates; 0 does not clip.
        refresh_every: Steps between two computations of kappa.
        damping: Added to kappa, as a fraction of its mean.
        test_size: Sequences that decide whether a run has learned the problem.
    """

    problems: Several[Annotated[str, known(PROBLEMS)]] = ("addition",)
    lengths: Several[Annotated[int, Field(ge=2)]] = (100,)
    hidden: Several[Count] = (64,)
    methods: Several[Annotated[str, known(METHODS)]] = tuple(METHODS)
    reference: str = "path-muon"
    learning_rates: Several[Positive] = (0.0003, 0.001, 0.003, 0.01, 0.03)
    tuning_seeds: Seeds = 12
    seeds: Seeds = 40
    steps_per_length: Count = 15
    batch_size: Count = 32
    warmup: Share = 0.05
    clip_norm: NotNegative = 1.0
    refresh_every: Count = 10
    damping: NotNegative = 0.01
    test_size: Count = 2000

    def __post_init__(self) -> None:
        if self.reference not in self.methods:
            raise unknown_name("method", self.reference, self.methods, "the setting 'reference'")


@dataclass(frozen=True)
class Setting:
    """A problem, the length T of its sequences, and the network's hidden units H."""

    problem: str
    length: int
    hidden: int


@dataclass(frozen=True)
class Cell:
    """A run."""

    setting: Setting
    method: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """A file name."""
        s = self.setting
        return f"{s.problem}-{s.length}-{s.hidden}-{self.method}-at-{self.rate:g}-seed-{self.seed}"


CHECK_EVERY = 20
TEST_SEED = 999_983
# added to a run's seed, so that starts, data and orders are independent
BATCHES, PERMUTATIONS = 1_000_000, 2_000_000


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        steps: Steps until it had learned the problem; None if it never had.
        error: Of the test sequences, in the end; None if it diverged.
        seconds: Processor time that it took.
    """

    cell: Cell
    steps: int | None
    error: float | None
    seconds: float

    @property
    def words(self) -> str:
        """The result as one line of text."""
        cell = self.cell
        where = f"{cell.setting.problem}, T = {cell.setting.length}, H = {cell.setting.hidden}"
        how = "did not learn it" if self.steps is None else f"learned it in {self.steps} steps"
        return f"{cell.method} at {cell.rate:g}, seed {cell.seed} ({where}): {how}, {self.seconds:.0f} s"


class Trainer:
    """A network in training, from the identity, with PyTorch's own input and output weights."""

    def __init__(self, cell: Cell, protocol: Protocol) -> None:
        self.cell = cell
        self.protocol = protocol
        self.step = 0
        self.steps = protocol.steps_per_length * cell.setting.length
        self.problem = PROBLEMS[cell.setting.problem]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(cell.seed)
            self.model = ReluRNN(2, 1, hidden=cell.setting.hidden, start="identity-recurrent")
        ps.nn.fast_(self.model)
        network = ps.trace(self.model, torch.zeros(1, cell.setting.length, 2))
        if METHODS[cell.method].balanced:
            ps.rescaling.balance_(network)
        self.optimizer = _optimizer(cell, protocol, self.model, network)
        self.batches = _generator(BATCHES + cell.seed)

    def advance(self) -> float | None:
        """Take a step; return the loss before it, or None if the loss, the gradient or the step is not finite."""
        protocol = self.protocol
        x, y = self.problem.draw(self.batches, protocol.batch_size, self.cell.setting.length)
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        rate = self.cell.rate * factor("cosine", protocol.warmup, self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # a method with a metric clips in its own coordinates
        if not METHODS[self.cell.method].power:
            most = protocol.clip_norm or math.inf
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
            if not torch.isfinite(norm):
                return None
        try:
            self.optimizer.step()
        except FloatingPointError:  # how the library's optimizers refuse to spoil the weights
            return None
        self.step += 1
        value = loss.item()
        return value if math.isfinite(value) else None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error on sequences and their answers."""
        return (self.model(x)[:, 0] - y).square().mean()


def _optimizer(
    cell: Cell, protocol: Protocol, model: nn.Module, network: ps.Network
) -> torch.optim.Optimizer:
    """Return the optimizer of a run; one with a metric clips in the coordinates of the metric."""
    method = METHODS[cell.method]
    on_paths, plain, own = RULES[method.rule]
    params: list[Any] = [*model.parameters()]
    if method.rule == "muon-hidden":
        recurrent = model.get_parameter(RECURRENT)
        others = [p for p in params if p is not recurrent]
        params = [{"params": [recurrent]}, {"params": others, "use_muon": False}]
    if not method.power:
        return plain(params, **own)
    options = {"damping": protocol.damping, "refresh_every": protocol.refresh_every}
    metric: ps.metrics.Metric = ps.metrics.Path(method.power, **options)
    if method.is_control:
        units = _generator(PERMUTATIONS + cell.seed)
        order = torch.randperm(cell.setting.hidden, generator=units)
        metric = ChangedKappa(method, order, **options)
    return on_paths(params, network, clip_norm=protocol.clip_norm or None, metric=metric, **own)


def compute(cell: Cell, protocol: Protocol, report: ProgressCallback = unheard) -> Result:
    """Train until the run has learned the problem, diverged, or taken all its steps.

    The numbers are the same each time, on one machine and version.
    """
    began = time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: more threads only wait for each other
    try:
        with warnings.catch_warnings():
            # at the highest rates it is, and the table says so
            warnings.filterwarnings("ignore", message="training is running away")
            steps, error = _train(Trainer(cell, protocol), report)
    finally:
        torch.set_num_threads(threads)
    return Result(cell, steps, error, round(time.process_time() - began, 2))


def _train(trainer: Trainer, report: ProgressCallback) -> tuple[int | None, float | None]:
    """Return the steps until the problem was learned, and the error in the end; see `Result`."""
    steps, target = trainer.steps, trainer.problem.target
    test = _generator(TEST_SEED)
    x, y = trainer.problem.draw(test, trainer.protocol.test_size, trainer.cell.setting.length)

    @torch.no_grad()
    def tested() -> float:
        return trainer.loss(x, y).item()

    recent: deque[float] = deque(maxlen=CHECK_EVERY)
    while trainer.step < steps:
        loss = trainer.advance()
        if loss is None:
            return None, None
        recent.append(loss)
        report(trainer.step / steps, f"step {trainer.step}/{steps}, loss {loss:.4g}")
        checks = trainer.step % CHECK_EVERY == 0 or trainer.step == steps
        if checks and sum(recent) / len(recent) < target:
            error = tested()
            if error < target:
                return trainer.step, error
    return None, finite(tested())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
