"""The registry of training methods: what happens to the start once, and which optimizer takes the steps.

A new optimizer is one entry in `METHODS`. Every method gets the same budget, the same batches, the same grid
of learning rates, the same momentum and the same clipping norm; what a method clips is its own choice (see
`Method.clips_itself`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import unknown_name

if TYPE_CHECKING:
    from torch import nn, optim


@dataclass(frozen=True)
class Hyperparameters:
    """What all methods are given alike.

    Attributes:
        learning_rate: From the grid.
        momentum: For the methods that have one in this sense; Adam keeps its own two decay rates.
        clip_norm: Largest norm of a step's gradient; None does not clip.
        weight_decay: Decoupled from the gradient: every parameter times 1 - learning_rate weight_decay.
        refresh_every: Steps between two computations of kappa, for the methods that use it.
        damping: What they add to kappa, as a fraction of its mean.
    """

    learning_rate: float
    momentum: float = 0.0
    clip_norm: float | None = None
    weight_decay: float = 0.0
    refresh_every: int = 1
    damping: float = 0.0


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables and figures call it.
        build: (model, traced network, hyper-parameters) -> the optimizer.
        balances_first: Whether the start is balanced once, function unchanged, before the first step.
        clips_itself: Whether the optimizer clips its own, invariant norm. Otherwise the engine clips the norm
            of the plain gradient.
        otherwise: For a method that balances first, the same one without balancing: what it is from a start that
            is balanced already.
        invariant: Whether a rescaled start must give exactly the same curve.
        learning_rate: What `pathspace train` takes when none is given.
        model: The model of its own that the method trains, a name in `models.MODELS`; empty for that of the settings.
        model_options: Laid over those of the settings.
        normalizes: What `pathspace.nn.ddp_normalize` is told, for a method that trains the normalized network; the
            start is normalized as it is.
    """

    label: str
    build: Callable[[nn.Module, Any, Hyperparameters], optim.Optimizer]
    balances_first: bool = False
    clips_itself: bool = False
    otherwise: str = ""
    invariant: bool = False
    learning_rate: float = 0.1
    model: str = ""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    normalizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_network(self) -> bool:
        """Whether the method needs a model that can be traced."""
        return self.balances_first or self.clips_itself or self.invariant or bool(self.normalizes)


def _sgd(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from torch import optim

    from pathspace.experiments.plain_rules import SGD

    if not hyper.weight_decay:
        return optim.SGD(model.parameters(), lr=hyper.learning_rate, momentum=hyper.momentum)
    return SGD(model.parameters(), hyper.learning_rate, hyper.momentum, hyper.weight_decay)


def _adam(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from torch import optim

    return optim.AdamW(model.parameters(), lr=hyper.learning_rate, weight_decay=hyper.weight_decay)


def _soap(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from pathspace.optim.rules.soap import SOAP

    rate, decay = hyper.learning_rate, hyper.weight_decay
    return SOAP(model.parameters(), rate, weight_decay=decay, precondition_frequency=40)


def _muon(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:  # noqa: ARG001
    from pathspace.optim.rules.muon import MuonAdamW

    return MuonAdamW(model.parameters(), hyper.learning_rate, weight_decay=hyper.weight_decay)


def _in_path_space(
    name: str, *, least_damping: float = 0.0, clips: str = "clip_norm", **options: Any
) -> Callable[[nn.Module, Any, Hyperparameters], optim.Optimizer]:
    """Return the builder of the optimizer `name` of `pathspace.optim`, with what these all take alike.

    Its option `clips` is what the clipping norm goes to.
    """

    def build(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:
        import pathspace.optim

        momentum = {"momentum": hyper.momentum} if name in ("PathSGD", "DDPSGD", "QuasiDiagonal") else {}
        return getattr(pathspace.optim, name)(
            model.parameters(),
            network,
            lr=hyper.learning_rate,
            weight_decay=hyper.weight_decay,
            refresh_every=hyper.refresh_every,
            damping=max(hyper.damping, least_damping),
            **{clips: hyper.clip_norm},
            **momentum,
            **options,
        )

    return build


def _in_basis_paths(
    name: str, **options: Any
) -> Callable[[nn.Module, Any, Hyperparameters], optim.Optimizer]:
    """Return the builder of an optimizer of basis path values; it computes no kappa, which nothing damps or ages."""

    def build(model: nn.Module, network: Any, hyper: Hyperparameters) -> optim.Optimizer:
        import pathspace.optim

        momentum = {"momentum": hyper.momentum} if name == "GSGD" else {}
        return getattr(pathspace.optim, name)(
            model.parameters(),
            network,
            lr=hyper.learning_rate,
            weight_decay=hyper.weight_decay,
            clip_norm=hyper.clip_norm,
            **momentum,
            **options,
        )

    return build


def _path(label: str, name: str, learning_rate: float, **options: Any) -> Method:
    build = _in_path_space(name, **options)
    return Method(label, build, clips_itself=True, invariant=True, learning_rate=learning_rate)


def _balanced(label: str, build: Any, learning_rate: float, otherwise: str) -> Method:
    return Method(
        f"balanced once, then {label}",
        build,
        balances_first=True,
        otherwise=otherwise,
        learning_rate=learning_rate,
    )


METHODS = {
    "sgd": Method("SGD", _sgd),
    "adam": Method("Adam", _adam, learning_rate=0.003),
    "adamw": Method("AdamW", _adam, learning_rate=0.003),
    "soap": Method("SOAP", _soap, learning_rate=0.003),
    "muon": Method("Muon", _muon, learning_rate=0.003),
    "path-sgd": _path("Path-SGD", "PathSGD", 0.1),
    "path-sgd-short": _path("Path-SGD, short steps", "PathSGD", 0.1, clips="clip_step"),
    "path-sgd-half": _path("Path-SGD, power 1/2", "PathSGD", 0.1, clips="clip_step", power=0.5),
    "path-sgd-short-both": _path(
        "Path-SGD, short steps, both terms", "PathSGD", 0.1, clips="clip_step", second_term=True
    ),
    "path-adam": _path("Path-Adam", "PathAdam", 0.003),
    "path-adam-half": _path("Path-Adam, power 1/2", "PathAdam", 0.003, power=0.5),
    "path-gradient-adam": Method(
        "Adam on path gradients", _in_path_space("PathGradientAdam"), clips_itself=True, learning_rate=0.003
    ),
    "path-soap": _path("PathSOAP", "PathSOAP", 0.003),
    "path-muon": _path("PathMuon", "PathMuon", 0.003),
    "g-sgd": Method("G-SGD", _in_basis_paths("GSGD"), clips_itself=True, invariant=True),
    "g-adam": Method(
        "G-Adam", _in_basis_paths("GAdam"), clips_itself=True, invariant=True, learning_rate=0.003
    ),
    "balanced-sgd": _balanced("SGD", _sgd, 0.1, "sgd"),
    "balanced-adam": _balanced("Adam", _adam, 0.003, "adam"),
    "balanced-adamw": _balanced("AdamW", _adam, 0.003, "adamw"),
    "balanced-soap": _balanced("SOAP", _soap, 0.003, "soap"),
    "balanced-muon": _balanced("Muon", _muon, 0.003, "muon"),
}


_IDENTITY = {"start": "identity"}
METHODS |= {
    # Other models and starts that papers compare with, trained by the methods above.
    "irnn-sgd": replace(METHODS["sgd"], label="IRNN, SGD", model="relu-rnn", model_options=_IDENTITY),
    "irnn-adam": replace(METHODS["adam"], label="IRNN, Adam", model="relu-rnn", model_options=_IDENTITY),
    "irnn-path-sgd-short": replace(
        METHODS["path-sgd-short"], label="IRNN, Path-SGD", model="relu-rnn", model_options=_IDENTITY
    ),
    "irnn-path-sgd-short-both": replace(
        METHODS["path-sgd-short-both"],
        label="IRNN, Path-SGD, both terms",
        model="relu-rnn",
        model_options=_IDENTITY,
    ),
    "tanh-sgd": replace(METHODS["sgd"], label="tanh RNN, SGD", model="tanh-rnn"),
    "tanh-adam": replace(METHODS["adam"], label="tanh RNN, Adam", model="tanh-rnn"),
    "lstm-sgd": replace(METHODS["sgd"], label="LSTM, SGD", model="lstm"),
    "lstm-adam": replace(METHODS["adam"], label="LSTM, Adam", model="lstm"),
}

_COVARIANCE, _MOMENT = {"statistic": "covariance"}, {"statistic": "second_moment"}
METHODS |= {
    # SGD on the network normalized by R = alpha S + (1 - alpha) D: the nodes' own way to use a measure.
    "path-norm": replace(METHODS["sgd"], label="path-normalization", normalizes={"alpha": 0.0, **_MOMENT}),
    "ddp-norm": replace(METHODS["sgd"], label="DDP-Norm, M and D", normalizes={"alpha": 0.5, **_MOMENT}),
    "ddp-norm-centred": replace(
        METHODS["sgd"], label="DDP-Norm, C and D", normalizes={"alpha": 0.5, **_COVARIANCE}
    ),
    "moment-norm": replace(METHODS["sgd"], label="normalization by M", normalizes={"alpha": 1.0, **_MOMENT}),
    "batch-norm": replace(METHODS["sgd"], label="BatchNorm", normalizes={"alpha": 1.0, **_COVARIANCE}),
}

METHODS |= {
    # Steepest descent in the data-dependent path norm, with the same measures. At alpha = 1 a weight that no example of
    # a batch used has no metric, and undamped steps diverge.
    "ddp-sgd": _path("DDP-SGD, M and D", "DDPSGD", 0.1, alpha=0.5, **_MOMENT),
    "ddp-sgd-centred": _path("DDP-SGD, C and D", "DDPSGD", 0.1, alpha=0.5, **_COVARIANCE),
    "diagonal-natural": _path(
        "diagonal natural gradient", "DDPSGD", 0.1, alpha=1.0, least_damping=0.01, **_MOMENT
    ),
    "covariance-sgd": _path("descent along C", "DDPSGD", 0.1, alpha=1.0, least_damping=0.01, **_COVARIANCE),
    # The same with the column of the bias beside the diagonal of M.
    "quasi-diagonal": _path("quasi-diagonal natural gradient", "QuasiDiagonal", 0.03, least_damping=0.01),
}

MAIN_METHODS = (
    "sgd",
    "adam",
    "path-sgd",
    "balanced-sgd",
    "balanced-adam",
)  # what a comparison shows by default


def method(name: str, where: str = "--methods") -> Method:
    """Return the method called `name`.

    Raises:
        ConfigurationError: There is none, with the names there are; `where` is the option that asked for it.
    """
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, where)
    return METHODS[name]
