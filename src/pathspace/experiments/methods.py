"""The registries of starts and of training methods: which weights a run begins with, and what takes its steps.

A start is a member of one rescaling class, or a network whose skeleton weights are 1. A method says
what happens to the start once, and which optimizer takes the steps. A new optimizer is one entry in
`GROUPS`. Every method gets the same budget, the same batches, the same grid of learning rates, the
same momentum and the same clipping norm; what a method clips is its own choice (see
`Method.clips_itself`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pathspace.experiments.errors import ConfigurationError, unknown_name

if TYPE_CHECKING:
    from torch import nn, optim

    from pathspace.experiments.run import RunConfig
    from pathspace.network import Network


STARTS = {
    "default": "PyTorch's initialisation as it is",
    "balanced": "PyTorch's initialisation, every unit rescaled so that equal path mass enters and leaves it",
    "rescaled": "the balanced start with every unit rescaled by a random factor; the same function",
    "skeleton-ones": "PyTorch's initialisation with the weights of the cyclic skeleton set to 1; another function",
}
SKELETON_ONES = "skeleton-ones"  # where S19's Algorithm 2 has to begin
# how far from 1 the factors that would balance a network may be, for it to be balanced
BALANCED = 1e-5


def move_to_start(
    network: Network, start: str, *, seed: int, exponent: int, factor: float = 0.0
) -> None:
    """Bring freshly initialised weights to a start, in place; but for skeleton-ones the function stays.

    Args:
        network: The traced model.
        start: A name in `STARTS`.
        seed: Chooses the random factors.
        exponent: k; the factors of the rescaled start are powers of two between 2^-k and 2^k, so
            nothing is rounded.
        factor: f; where it is not 0, the factors are any numbers between 1/f and f instead,
            log-uniform.
    """
    check_start(start)
    if start == "default":
        return
    import torch

    from pathspace import paths, rescaling

    if start == SKELETON_ONES:
        paths.skeleton_ones_(network, "cyclic")
        return
    rescaling.balance_(network)
    if start == "rescaled":
        try:
            rescaling.random_rescale_(
                network,
                low=1 / factor if factor else 2.0**-exponent,
                high=factor or 2.0**exponent,
                powers_of_two=not factor,
                generator=torch.Generator().manual_seed(seed),
            )
        except OverflowError as error:
            named = f"'rescale_exponent' is {exponent}"
            if factor:
                named = f"'rescale_factor' is {factor:g}"
            raise ConfigurationError(
                f"The setting {named}, which the weights' type cannot hold: give a smaller number."
            ) from error


def balance_once_(network: Network) -> None:
    """Balance a network, in place; one that is balanced already keeps every bit.

    Factors that are powers of two come first, and the rest only where they do not suffice. So the
    balanced start, and that start rescaled by powers of two, end as the same weights to the last
    bit.
    """
    from pathspace import rescaling
    from pathspace.paths.kernel.node_mass import node_mass
    from pathspace.rescaling.balance import balancing_factors

    rescaling.rescale_(network, balancing_factors(network, powers_of_two=True))
    apart = node_mass(network).gauge()
    if bool(((apart - 1).abs() > BALANCED).any()):
        rescaling.rescale_(network, balancing_factors(network))


def are_one_function(starts: Sequence[str]) -> bool:
    """Return whether a network computes the same from all of these starts."""
    return len(starts) == 1 or SKELETON_ONES not in starts


def check_start(start: Any, where: str = "--start") -> None:
    """Raise a `ConfigurationError` unless there is a start of this name."""
    if start not in STARTS:
        raise unknown_name("start", start, STARTS, where)


Build = Callable[["nn.Module", Any, "RunConfig"], "optim.Optimizer"]
"""From a model, its traced network and the configuration of a run to the optimizer."""


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        label: What tables and figures call it.
        about: What it is, in one line.
        build: See `Build`.
        balances_first: Whether the start is balanced once, function unchanged, before the first
            step.
        clips_itself: Whether the optimizer clips its own, invariant norm. Otherwise the engine
            clips the norm of the plain gradient.
        clips_steps: Whether the optimizer has a bound `clip_step`.
        takes_bounds: Whether clipping in the settings changes it; a paper's rule as printed takes
            none.
        presumes: The start, a name in `methods.STARTS`, that the rule needs for its paper's rates;
            empty for any.
        otherwise: For a method that balances first, the same one without balancing: what it is from
            a start that is balanced already.
        invariant: Whether a rescaled start must give exactly the same curve.
        learning_rate: What `pathspace train` takes when none is given.
        model: The model of its own that the method trains, a name in `models.MODELS`; empty for
            that of the settings.
        model_options: Laid over those of the settings.
        refuses: Why it cannot train a model, by the name in `models.MODELS`; it can train those
            that are not there.
        normalizes: What `pathspace.nn.ddp_normalize` is told, for a method that trains the
            normalized network; the start is normalized as it is.
    """

    label: str
    about: str
    build: Build
    balances_first: bool = False
    clips_itself: bool = False
    clips_steps: bool = False
    takes_bounds: bool = True
    presumes: str = ""
    otherwise: str = ""
    invariant: bool = False
    learning_rate: float = 0.1
    model: str = ""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    normalizes: Mapping[str, Any] = field(default_factory=dict)


def _sgd(model: nn.Module, _network: Any, run: RunConfig) -> optim.Optimizer:
    from torch import optim

    from pathspace.experiments.plain_rules import SGD

    if not run.weight_decay:
        return optim.SGD(model.parameters(), lr=run.learning_rate, momentum=run.momentum)
    return SGD(model.parameters(), run.learning_rate, run.momentum, run.weight_decay)


def _ends_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups that leave the first and the last matrix to AdamW, as Muon's authors advise."""
    # a last matrix that is tied to the first stands at its own place, too
    matrices = [p for _, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1]
    ends = {id(p): p for p in (matrices[0], matrices[-1])}
    others = [p for p in model.parameters() if id(p) not in ends]
    return [{"params": others}, {"params": [*ends.values()], "use_muon": False}]


def _natural(model: nn.Module, network: Any, run: RunConfig) -> optim.Optimizer:
    from pathspace.experiments.plain_rules import NaturalGradient

    names = ("learning_rate", "momentum", "weight_decay", "damping", "clip_norm")
    return NaturalGradient(model, network, *(getattr(run, name) for name in names))


_METRIC = ("clip_norm", "refresh_every", "damping")
"""What optimizers in a metric take of the settings, besides rate and decay."""

_BOUNDS = ("clip_norm", "clip_step")
"""Of these, 0 and None set none."""

# What methods refuse.
_NO_SCALES: Mapping[str, str] = dict.fromkeys(("tanh-rnn", "lstm"), "its units cannot be rescaled")
NO_BASIS = {
    **_NO_SCALES,
    "transformer": "it multiplies activations, so that its outputs are no sums over paths",
}
_NO_ANSWER = {
    **_NO_SCALES,
    **dict.fromkeys(("transformer", "language-model"), "it has no single answer for each example"),
}
_NO_NODES: Mapping[str, str] = dict.fromkeys(
    ("relu-rnn", "tanh-rnn", "lstm", "recurrent-cnn", "language-model", "transformer"),
    "only the nodes of a feed-forward model can be normalized by a batch",
)


def _rule(
    place: str,
    *takes: str,
    clips: str = "clip_norm",
    least_damping: float = 0.0,
    groups: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> Build:
    """Return the builder of an optimizer by its place; one of `pathspace.optim` is given the network.

    Of the configuration it `takes` some besides rate and decay. Its option `clips` is what the
    clipping norm goes to; `groups` makes a model's param groups.
    """
    module, _, name = place.rpartition(".")

    def build(model: nn.Module, network: Any, run: RunConfig) -> optim.Optimizer:
        given = {
            take: getattr(run, take) for take in takes if getattr(run, take) or take not in _BOUNDS
        }
        if "clip_norm" in given:
            given = {clips: given.pop("clip_norm"), **given}
        if "damping" in given:
            given["damping"] = max(given["damping"], least_damping)
        given |= {"lr": run.learning_rate, "weight_decay": run.weight_decay, **options}
        params = model.parameters() if groups is None else groups(model)
        known = [network] if module == "pathspace.optim" else []
        return getattr(import_module(module), name)(params, *known, **given)

    return build


def _ours(name: str, *takes: str, **options: Any) -> Build:
    return _rule(f"pathspace.optim.{name}", *takes, **options)


def _blind(label: str, about: str, build: Build, learning_rate: float, **more: Any) -> Method:
    """Return a method that is blind to scales, if not said otherwise, and clips its own norm."""
    common = {"clips_itself": True, "invariant": True, "refuses": _NO_SCALES}
    return Method(label, about, build, learning_rate=learning_rate, **{**common, **more})


def _path(label: str, about: str, name: str, learning_rate: float, **options: Any) -> Method:
    # the natural gradient of one batch is long where that batch says little, and momentum would add
    # such steps up
    steepest = name in ("PathSGD", "DDPSGD")
    build = _ours(name, *_METRIC, *(("momentum", "clip_step") if steepest else ()), **options)
    return _blind(label, about, build, learning_rate, clips_steps=steepest)


def _on_the_weights(label: str, about: str, **options: Any) -> Method:
    steps = _path(label, about, "PathSGD", 0.01, clips="clip_step", frame="weights", **options)
    return replace(steps, invariant=False)


def _published(
    label: str,
    about: str,
    name: str,
    learning_rate: float,
    refuses: Mapping[str, str] = _NO_SCALES,
    presumes: str = "",
    **options: Any,
) -> Method:
    build = _ours(name, **options)  # a paper's rule: of the settings it takes rate and decay alone
    more = {"takes_bounds": False, "presumes": presumes, "refuses": refuses}
    return _blind(label, about, build, learning_rate, **more)


def _balanced(name: str, plain: Method) -> Method:
    return replace(
        plain,
        label=f"balanced once, then {plain.label}",
        about=f"the start balanced, function unchanged; then {plain.label} on the weights",
        balances_first=True,
        refuses=_NO_SCALES,
        otherwise=name,
    )


def _normalized(label: str, about: str, alpha: float, statistic: str) -> Method:
    measure = {"alpha": alpha, "statistic": statistic}
    return Method(label, about, _sgd, normalizes=measure, refuses=_NO_NODES)


def _with(of: Method, label: str, about: str, model: str, **model_options: Any) -> Method:
    return replace(of, label=label, about=about, model=model, model_options=model_options)


_ADAM = _rule("torch.optim.AdamW")
_SOAP = _rule("pathspace.optim.rules.soap.SOAP", precondition_frequency=40)
_MUON = _rule("pathspace.optim.rules.muon.MuonAdamW")
_MUON_HIDDEN = _rule("pathspace.optim.rules.muon.MuonAdamW", groups=_ends_apart)
_PLAIN = {
    "sgd": Method("SGD", "stochastic gradient descent, with the momentum of the settings", _sgd),
    "adam": Method("Adam", "torch's AdamW, which without decay is Adam", _ADAM,
        learning_rate=0.003),
    "adamw": Method("AdamW", "the same, named for runs with weight decay", _ADAM,
        learning_rate=0.003),
    "soap": Method("SOAP", "Adam in the eigenbasis of Shampoo's preconditioner", _SOAP,
        learning_rate=0.003),
    "muon": Method("Muon", "orthogonalized momentum; AdamW where no matrix is", _MUON,
        learning_rate=0.003),
    "muon-hidden": Method("Muon, hidden", "the same; AdamW for the first and the last matrix, too",
        _MUON_HIDDEN, learning_rate=0.003),
}  # fmt: skip
_PATH = {
    "path-sgd": _path("Path-SGD", "steepest descent in the path metric, clipped in that metric",
        "PathSGD", 0.1),
    "path-sgd-short": _path("Path-SGD, short steps",
        "the same; clip_norm bounds the step on balanced weights instead", "PathSGD", 0.1,
        clips="clip_step"),
    "path-sgd-half": _path("Path-SGD, power 1/2",
        "short steps, with the square root of kappa as the metric", "PathSGD", 0.1,
        clips="clip_step", power=0.5),
    "path-sgd-short-both": _path("Path-SGD, short steps, both terms",
        "short steps, with the second term of kappa", "PathSGD", 0.1, clips="clip_step",
        second_term=True),
    "path-sgd-weights": _on_the_weights("Path-SGD on the weights",
        "mean of kappa and bound of the step on the weights; not blind to scales"),
    "path-sgd-weights-one": _on_the_weights("Path-SGD on the weights, one mean",
        "the same, with one mean of kappa for the whole network", normalization="network"),
    "path-adam": _path("Path-Adam", "Adam in the coordinates of the path metric", "PathAdam",
        0.003),
    "path-adam-half": _path("Path-Adam, power 1/2", "the same, with the square root of kappa",
        "PathAdam", 0.003, power=0.5),
    "path-gradient-adam": _blind("Adam on path gradients",
        "Adam fed with g / kappa, as the first paper did; not blind to scales",
        _ours("PathGradientAdam", *_METRIC), 0.003, invariant=False),
    "path-gradient-adam-scaled": _blind("Adam on path gradients, scaled",
        "the same, g / kappa made as long as g at every step",
        _ours("PathGradientAdam", *_METRIC, scale="gradient"), 0.003, invariant=False),
    "path-soap": _path("PathSOAP", "SOAP in the coordinates of the path metric", "PathSOAP",
        0.003),
    "path-muon": _path("PathMuon", "Muon in the coordinates of the path metric", "PathMuon",
        0.003),
    "path-muon-hidden": _path("PathMuon, hidden",
        "the same; Adam in these coordinates for the first and the last matrix, too", "PathMuon",
        0.003, groups=_ends_apart),
}  # fmt: skip
# they compute no kappa, which nothing damps or ages
_BASIS = {
    "g-sgd": _blind("G-SGD", "SGD on the values of basis paths",
        _ours("GSGD", "clip_norm", "momentum"), 0.1, refuses=NO_BASIS),
    "g-adam": _blind("G-Adam", "Adam on the values of basis paths", _ours("GAdam", "clip_norm"),
        0.003, refuses=NO_BASIS),
}  # fmt: skip
_RAW_KAPPA: dict[str, Any] = {"normalization": "none", "refresh_every": 1, "damping": 0.0}
_RAW_PATHS: dict[str, Any] = {"skeleton": "cyclic", "units": "none", "clamp": None}
# beside the rows above: what fails, and why ours differ
_PUBLISHED = {
    "path-sgd-published": _published("Path-SGD, as printed",
        "g / kappa with kappa as it is, fresh at every step", "PathSGD", 0.001, **_RAW_KAPPA),
    "path-sgd-published-both": _published("Path-SGD, both terms, as printed",
        "the same, with the second term of kappa", "PathSGD", 0.001, **_RAW_KAPPA,
        second_term=True),
    "g-sgd-published": _published("G-SGD, as printed",
        "S19's Eq. (6), cyclic skeleton; its Algorithm 2 from the start skeleton-ones", "GSGD",
        1e-6, NO_BASIS, presumes="skeleton-ones", **_RAW_PATHS),
    "g-adam-published": _published("G-Adam, as printed", "Adam on the values of the same paths",
        "GAdam", 0.001, NO_BASIS, presumes="skeleton-ones", **_RAW_PATHS),
}  # fmt: skip
_BALANCED = {f"balanced-{name}": _balanced(name, plain) for name, plain in _PLAIN.items()}
_IDENTITY = {"model": "relu-rnn", "start": "identity"}
_SHORT, _BOTH = _PATH["path-sgd-short"], _PATH["path-sgd-short-both"]
_OTHER_MODELS = {
    "irnn-sgd": _with(_PLAIN["sgd"], "IRNN, SGD", "SGD on a ReLU RNN from an identity start",
        **_IDENTITY),
    "irnn-adam": _with(_PLAIN["adam"], "IRNN, Adam", "Adam on the same", **_IDENTITY),
    "irnn-path-sgd-short": _with(_SHORT, "IRNN, Path-SGD", "path-sgd-short on the same",
        **_IDENTITY),
    "irnn-path-sgd-short-both": _with(_BOTH, "IRNN, Path-SGD, both terms",
        "path-sgd-short-both on the same", **_IDENTITY),
    "np-rnn-sgd": _with(_PLAIN["sgd"], "np-RNN, SGD",
        "SGD on a ReLU RNN from a positive definite recurrent matrix", model="relu-rnn",
        start="positive-definite"),
    "tanh-sgd": _with(_PLAIN["sgd"], "tanh RNN, SGD", "SGD on a tanh RNN", "tanh-rnn"),
    "tanh-adam": _with(_PLAIN["adam"], "tanh RNN, Adam", "Adam on a tanh RNN", "tanh-rnn"),
    "lstm-sgd": _with(_PLAIN["sgd"], "LSTM, SGD", "SGD on an LSTM", "lstm"),
    "lstm-adam": _with(_PLAIN["adam"], "LSTM, Adam", "Adam on an LSTM", "lstm"),
}  # fmt: skip
# the nodes' own way to use a measure R = alpha S + (1 - alpha) D
_NORMALIZED = {
    "path-norm": _normalized("path-normalization", "by the path measure D alone", 0.0,
        "second_moment"),
    "ddp-norm": _normalized("DDP-Norm, M and D", "by half M (second moments), half D", 0.5,
        "second_moment"),
    "ddp-norm-centred": _normalized("DDP-Norm, C and D",
        "by half C (variances of a batch), half D", 0.5, "covariance"),
    "moment-norm": _normalized("normalization by M", "by M alone", 1.0, "second_moment"),
    "batch-norm": _normalized("BatchNorm", "by C alone", 1.0, "covariance"),
}  # fmt: skip
_COVARIANCE, _MOMENT = {"statistic": "covariance"}, {"statistic": "second_moment"}
_DATA = {
    # At alpha = 1 a weight that no example of a batch used has no metric, and undamped steps
    # diverge.
    "ddp-sgd": _path("DDP-SGD, M and D", "along half M, half D", "DDPSGD", 0.1, alpha=0.5,
        **_MOMENT),
    "ddp-sgd-centred": _path("DDP-SGD, C and D", "along half C, half D", "DDPSGD", 0.1, alpha=0.5,
        **_COVARIANCE),
    "diagonal-natural": _path("diagonal natural gradient", "along M alone", "DDPSGD", 0.1,
        alpha=1.0, least_damping=0.01, clips="clip_step", **_MOMENT),
    "covariance-sgd": _path("descent along C", "along C alone", "DDPSGD", 0.1, alpha=1.0,
        least_damping=0.01, clips="clip_step", **_COVARIANCE),
    "quasi-diagonal": _path("quasi-diagonal natural gradient",
        "along M, with the column of the bias beside its diagonal; without momentum",
        "QuasiDiagonal", 0.03, least_damping=0.01),
    "natural": _blind("natural gradient",
        "along M whole, by conjugate gradients; fifty times a step of SGD", _natural, 0.03,
        refuses=_NO_ANSWER),
}  # fmt: skip

GROUPS: dict[str, dict[str, Method]] = {
    "On the weights as they are; none is blind to scales": _PLAIN,
    "In the path metric; blind to scales": _PATH,
    "On basis paths; blind to scales": _BASIS,
    "The papers' rules as printed: no momentum, no damping, no clipping; blind to scales": _PUBLISHED,
    "Balanced once, then on the weights; blind to the scales of the start": _BALANCED,
    "On other models and starts that papers compare with": _OTHER_MODELS,
    "SGD on the network normalized by a measure of its nodes; for feed-forward models": _NORMALIZED,
    "Descent along the same measures of the data; blind to scales": _DATA,
}
METHODS = {name: method for group in GROUPS.values() for name, method in group.items()}


# what a comparison shows by default: the rules that people use, each on the weights and made
# invariant
MAIN_METHODS = ("sgd", "path-sgd", "adamw", "path-adam", "muon", "path-muon")


def method(name: str, where: str = "--methods") -> Method:
    """Return the method called `name`."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, where)
    return METHODS[name]


def list_methods() -> str:
    """Return all names by groups, a line for each."""
    indent = 2 + max(map(len, METHODS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<{indent}}{one.about}" for name, one in group.items())])
        for title, group in GROUPS.items()
    )
    return "\n\n".join(groups)
