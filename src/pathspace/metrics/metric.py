"""The base of the metrics of optimizers: kappa in a frame of the network, normalized, damped, and kept for some steps.

    D' = (kappa' / c + damping)^power                  (kappa' = f^2 kappa, see ``gauge``; c its mean)
    D  = D' / f^2

D transforms like kappa, as (s_u / s_v)^2 for an edge u -> v, so sqrt(D) w and g / sqrt(D) do not
change under node-wise rescaling. Raw kappa has no natural unit: its mean for a recurrent matrix
runs from 4e-8 to 1e2 over common starts, so a learning rate for g / kappa means something else for
every network. With c, which rescaling does not change, it has about the size that it has for plain
gradients on the balanced network.

Letters: e an edge u -> v, f_e its gauge, c the normalizer of one parameter.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import Tensor

from pathspace.metrics.checks import check_counts, check_not_negative
from pathspace.metrics.finish import FinishRecording
from pathspace.metrics.gauge import (
    Gauge,
    far_scales,
    gauges,
    into_frame,
    multiply_,
    powers,
    recentred,
)
from pathspace.metrics.own_values import report_of
from pathspace.metrics.power import Power, Shift, means_of_blocks
from pathspace.metrics.replicas import any_replica, root_mean_square
from pathspace.network import Network
from pathspace.network.errors import expect_network, expect_values
from pathspace.paths.kernel import recording
from pathspace.paths.kernel.norm import squared_path_norm
from pathspace.paths.kernel.recording import Recording
from pathspace.paths.kernel.safe_type import RangeReport, Values
from pathspace.replay.latest_batch import LatestBatch
from pathspace.rescaling.frames import Frame, FrameName, expect_finite_scales, scales_of
from pathspace.rescaling.optimizer_states import State, times_
from pathspace.squared.precision import full_precision
from pathspace.squared.sharding import local_rows, to_local, totals
from pathspace.squared.squares import Outer
from pathspace.torch_private import foreach_add_, foreach_div_, foreach_pow_

Normalization = Literal["refreshed", "frozen", "network", "none"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
Form = Literal["inverse", "root", "balanced"]
"""The form of a metric that an optimizer asks for: the factor 1 / D or 1 / sqrt(D), or D' itself."""
_EXPONENTS = {"inverse": -1.0, "root": -0.5, "balanced": 1.0}  # of D'
_FACTORS = {"inverse": 2, "root": 1, "balanced": 0}  # the power of f in it
_KEPT = (
    "age", "gauge_rows", "gauge_columns", "scales", "mean", "normalizer", "empty", "zeros", "exponent", "factor",
)  # fmt: skip

DAMPING = 0.1
"""No weight's step is longer than ten times the plain one on the balanced network. Curvature does not vanish where
kappa does: at 0.01 Path-SGD ran away on a residual MLP with RMSNorm at SGD's rate, and at 0
PathAdam did on MNIST rows (docs/safety.md, docs/results/winner.md)."""
_RAN_AWAY = (
    "training is running away: sums over the paths of the network are beyond float64 (a lower learning rate, "
    "clip_norm=1.0). Until they are within it, steps are those of the network balanced at the first step"
)


class MetricOptions(TypedDict, total=False):
    """The options of all metrics that optimizers divide by."""

    power: float
    damping: float | None
    refresh_every: int
    normalization: Normalization
    frame: Frame | FrameName


class Metric:
    """The base of all metrics, and of your own: what an optimizer divides by, and when it is computed.

    .. code-block:: text

        D' = (kappa' / c + damping)^power,   kappa' = f^2 kappa,   D = D' / f^2

    A subclass says in :meth:`values` what kappa is. The base does the rest: f is the gauge of the
    network, measured once, at the first step, in which kappa' does not depend on the scales of the
    weights. One object serves one network, and may serve several optimizers of its parameters at
    one cost.

    Args:
        power: how much of kappa is in the metric: 1 all of it; 0 none, D = 1 / f^2, which is the
            metric of the network balanced once, at the first step.
        damping: added to kappa in the balanced frame, as a fraction of its mean there; invariant,
            unlike a constant added to kappa. It bounds the steps of weights on paths of little
            mass: in the balanced network they are at most damping^-power (for Adam's and Muon's
            rules damping^(-power / 2)) times as long as without a metric. None: 0.1, or 0 where
            ``normalization`` is ``"none"``, the rules of the papers.
        refresh_every: steps between two computations of kappa. Each of the first ``refresh_every``
            steps computes it, since it moves fast then. Stale values stay invariant.
        normalization: ``"refreshed"``: c is the present mean of kappa' over the elements of the
            parameter; ``"frozen"``: that of the first step, for good, or 1 where it is 0;
            ``"network"``: the present mean over the elements of all parameters that take a step, so
            that tensors keep their proportions; ``"none"``: c = 1, the rule of the papers, whose
            learning rate has another unit for every network. Damping is a fraction of the
            parameter's own mean anyhow.
        frame: the member of the rescaling class whose gauge f is: ``"balanced"``, ``"measure"``,
            ``"layers"``, ``"weights"`` (the network as it is: not invariant), or a :class:`Frame`
            with options. ``"measure"`` reads the batch that the model was last called with before
            the first step, with gradients enabled; give ``Frame("measure", data=x)`` where
            ``torch.compile`` hides it.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> import torch, pathspace as ps
        >>> class Mine(ps.metrics.Metric):
        ...     def values(self, network, names):
        ...         return ps.paths.kappa(network)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> metric = Mine(damping=0.01)
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=1e-3, metric=metric)
    """

    process_group: Any = "default"
    """The processes over whose batches a frame on data is averaged."""

    def __init__(
        self,
        power: float = 1.0,
        *,
        damping: float | None = None,
        refresh_every: int = 10,
        normalization: Normalization = "refreshed",
        frame: Frame | FrameName = "balanced",
    ) -> None:
        if damping is None:
            damping = 0.0 if normalization == "none" else DAMPING
        check_not_negative(power=power, damping=damping)
        check_counts(refresh_every=refresh_every)
        if normalization not in NORMALIZATIONS:
            known = ", ".join(map(repr, NORMALIZATIONS))
            raise ValueError(f"normalization must be one of {known}, got {normalization!r}")
        self.power = power
        self.damping = damping
        self.refresh_every = refresh_every
        self.normalization: Normalization = normalization
        self.frame = frame if isinstance(frame, Frame) else Frame(frame)
        self._latest: LatestBatch | None = None
        # by parameter name: the dicts of the optimizers' states
        self.state: dict[str, State] = {}
        self._network: Network | None = None
        self._forms: dict[str, Form] = {}  # of the parameters that some optimizer asks for
        # computed for another optimizer's step to come -> a parameter of the one that computed it
        self._ahead: dict[str, str] = {}
        self._gauges: dict[str, Gauge] = {}
        self._rescalings = 0
        self.frozen = False
        self.rehearses = False  # whether a step is being taken that will be forgotten
        # of the two halves of a refresh on a GPU
        self._kappa_recording = Recording()
        self._finish = FinishRecording()
        self._held: dict[str, Tensor] = {}  # what CUDA graphs of the user read

    @property
    def takes_parts(self) -> bool:
        """True if FSDP may shard the parameters, so that a process computes its rows of the values."""
        return False

    def values(self, network: Network, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return kappa of some parameters: the one method that a metric of your own needs.

        kappa must transform as the square of a gradient does: if a weight is multiplied by c when
        the network is rescaled, its kappa is divided by c^2.
        :func:`pathspace.rescaling.check_invariance` tells whether it does.

        It is called at the first steps and at every refresh, inside ``step()``, with gradients
        disabled and still in ``.grad``. The result is copied. Where several processes train
        replicas, return the same in all of them: average first what comes from their batches.

        Args:
            network: the network that the optimizer trains.
            names: the parameters that are asked for. Values of others are ignored.

        Returns:
            Parameter name -> tensor of the parameter's shape, finite and not negative, as
            :func:`pathspace.paths.kappa` returns. In float64 it serves networks whose scales are
            beyond what float32 holds.
        """
        del network, names
        kind = type(self).__name__
        raise NotImplementedError(
            f"{kind} has no method that says what its kappa is: write values(self, network, names) in it, which "
            "returns a dict from names to tensors"
        )

    # -- one network -------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """The network that it belongs to.

        Raises:
            RuntimeError: no optimizer has taken it yet.
        """
        if self._network is None:
            raise RuntimeError(
                f"{type(self).__name__} belongs to no network yet: give it to an optimizer"
            )
        return self._network

    def bind(self, network: Network, names: Sequence[str], form: Form) -> None:
        """Let an optimizer ask for the metric of some parameters.

        Raises:
            ValueError: the metric belongs to another network, or gives another form to one of the
                parameters.
        """
        expect_network(network)
        if self._network is None:
            self._network = network
            self._rescalings = network.rescalings["done"]
        taken = next((name for name in names if self._forms.get(name, form) != form), None)
        if taken or self._network is not network:
            whose = f"another rule for '{taken}'" if self._network is network else "another network"
            raise ValueError(
                f"this {type(self).__name__} metric belongs to {whose}: give each its own"
            )
        for name in names:
            self._forms[name] = form
        self._watch_batches()

    def __deepcopy__(self, memo: dict[int, Any]) -> Metric:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(
            {n: self._copied(n, value, memo) for n, value in self.__dict__.items()}
        )
        return copied

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        """Return an attribute of a copy for a copy of the network."""
        if name == "_latest" and value is not None:
            return value.for_copy(self.network, memo)
        if isinstance(value, Recording):
            return type(value)()
        if name == "_held":
            return {}
        return copy.deepcopy(value, memo)

    def _watch_batches(self) -> None:
        """Look at the model's calls while the frame needs the batch of a first step, and no longer."""
        begun = all("gauge_rows" in self.state.get(name, {}) for name in self._forms)
        needed = self.frame.needs_batch and not begun
        if needed and self._latest is None:
            self._latest = LatestBatch(self.network, look=True)
        if not needed and self._latest is not None:
            self._latest.remove()
            self._latest = None

    def _frame_scales(self) -> Tensor:
        """Return the scales b_c of the frame for the present weights."""
        frame = self.frame
        # a rehearsal, whose state is forgotten, may come before the first batch
        reads_batch = frame.needs_batch and not self.rehearses
        data = self._frame_batch() if reads_batch else frame.data
        scales = scales_of(self.network, frame.name, data, frame.alpha)
        if reads_batch:
            scales = root_mean_square(scales, self.process_group)
        # only now: a process that stopped before would leave the others waiting
        expect_finite_scales(scales)
        return scales

    def _frame_batch(self) -> Any:
        if self._latest is None or self._latest.inputs is None:
            raise RuntimeError(
                "the frame 'measure' needs a batch, and the model was not called with gradients enabled before step(), "
                "or torch.compile hid the call: give the batch with frame=ps.metrics.Frame('measure', data=inputs)"
            )
        return self._latest.inputs

    # -- steps -------------------------------------------------------------------------------------

    def advance(self, states: Mapping[str, State], own: Callable[[], Set[str]]) -> None:
        """Put the metric into the states as "factor", in the form that the optimizer asked for; compute it if due.

        For a far network 1 / D is that of the member near balance (see ``gauge``), and 1 / sqrt(D)
        that of the weights.

        Args:
            states: the optimizer's states of the parameters that take a step, by name. The metric
                keeps its own entries in them.
            own: returns the names of all of the optimizer's parameters, with a gradient or without.

        Raises:
            RuntimeError: the network was rescaled after the first step, or moved to another device.
            FloatingPointError: kappa is not finite; nothing is changed then. But after the first
                step, where kappa of finite weights is beyond float64, the metric is that of the
                balanced network, with a warning.
        """
        first = next(iter(states))
        if self.network.parameters[first].is_cuda and torch.cuda.is_current_stream_capturing():
            self._hold(states)
            return
        if self._ahead:
            for name in states.keys() & self._ahead.keys():
                states[name].update(self.state[name])
        self.state.update(states)
        self._check_network(states)
        others: list[str] = []
        if any(map(self.is_due, states)):
            others = self._due_of_others(first, own())
            self._refresh_due(states, others)
        if self._ahead:
            # another optimizer no longer gets what was computed before the last step of this one
            mine = own()
            ahead = self._ahead.items()
            self._ahead = {n: by for n, by in ahead if n not in states and by not in mine}
        self._ahead |= dict.fromkeys(others, first)
        for state in states.values():
            state["age"] += 1

    def _due_of_others(self, first: str, own: Set[str]) -> list[str]:
        """Return the parameters of other optimizers that are due, so that one refresh serves all.

        Args:
            first: a parameter that takes a step.
            own: the names of all parameters of the optimizer that takes it.
        """
        # at the first step of this optimizer the others have just had their refresh
        if "factor" not in self.state[first]:
            return []
        others = [n for n in self.state if n not in own and self.is_due(n)]
        # their optimizer takes the new values at its own step, and works with the old ones until then
        for name in others:
            self.state[name] = copy.deepcopy(self.state[name])
        return others

    def _refresh_due(self, states: Mapping[str, State], others: Sequence[str]) -> None:
        """Compute the metric of the parameters of a step, and of ``others`` together with them."""
        some = self.network.parameters[next(iter(states))]
        expect_values(some)
        due = list(states)
        if self.power == 0 or self.frozen:
            due = [name for name in states if self.is_due(name)]
        with full_precision(some):
            self._refresh([*due, *others])

    def refresh(self, names: Sequence[str]) -> None:
        """Compute the metric of some parameters that have one, whatever its age.

        Raises:
            RuntimeError, FloatingPointError: as :meth:`advance`.
        """
        if self.power == 0 or self.frozen:
            return
        self._check_network({name: self.state[name] for name in names})
        with full_precision(self.network.parameters[names[0]]):
            self._refresh(list(names))

    def _hold(self, states: Mapping[str, State]) -> None:
        """Let what a captured step reads stay where it is.

        Raises:
            RuntimeError: some of it is not there yet.
        """
        for name, state in states.items():
            if "factor" not in state:
                raise RuntimeError(
                    f"a CUDA graph captures a step, and the metric of '{name}' was not computed yet: take some steps "
                    "before the capture, and call refresh() between replays"
                )
            self._held[name] = state["factor"]

    def is_due(self, name: str) -> bool:
        """Return whether the next step of a parameter needs a new metric."""
        state = self.state.get(name, {})
        # a loaded state may be that of a rule that works with another form
        if "factor" not in state or state.get("exponent") not in (None, self._exponent(name)):
            return True
        age = state["age"]
        if age >= self.refresh_every and age % self.refresh_every:
            return False
        return not (self.power == 0 or self.frozen or name in self._ahead)

    def _exponent(self, name: str) -> float:
        """Return the exponent of kappa' in the form of the metric that the optimizer asks for."""
        return self.power * _EXPONENTS[self._forms[name]]

    def gauge(self, name: str) -> Gauge:
        """Return the gauge of a parameter that has taken a step."""
        gauge = self._gauges.get(name)
        if gauge is None:
            state = self.state[name]
            far = None if "scales" not in state else powers(self.network, name, state["scales"])
            p = self.network.parameters[name]
            rows, columns = (local_rows(state[end], p) for end in ("gauge_rows", "gauge_columns"))
            gauge = self._gauges[name] = Gauge(rows, columns, far)
        return gauge

    def near_parameters(self) -> dict[str, Tensor] | None:
        """Return the parameters of the member near balance; None for a network that is not far."""
        scales = self._far()
        return None if scales is None else recentred(self.network, scales)

    def reset(self, states: Mapping[str, State], own: Set[str]) -> None:
        """Take other states of ``own`` parameters, because they were loaded; they belong to the present weights."""
        self.state = {name: state for name, state in self.state.items() if name not in own} | dict(
            states
        )
        self._gauges.clear()
        self._ahead.clear()
        self._rescalings = self.network.rescalings["done"]
        self._watch_batches()

    @property
    def served(self) -> Set[str]:
        """The names of the parameters that optimizers ask it for."""
        return self._forms.keys()

    def follow(self, name: str, state: State, factors: Tensor) -> Tensor:
        """Let what the metric keeps of a parameter follow a rescaling of the network.

        Args:
            name: of the parameter.
            state: what is kept of it.
            factors: s, shape ``[num_classes]``.

        Returns:
            The factors by which the member near balance is rescaled (see ``gauge``), which is the
            network itself if that is not far.
        """
        network = self.network
        near = factors
        if "scales" in state:
            # powers of two go into m, so that the member near balance stays as it is
            nearest = factors.log2().round().exp2().to(state["scales"])
            state["scales"] = state["scales"] * nearest
            near = factors / nearest.to(factors)
        if "gauge_rows" not in state:
            return near
        # f_e becomes s_e f_e
        added = gauges(network, [name], near.double())[name]
        state["gauge_rows"] = state["gauge_rows"] * added.rows
        state["gauge_columns"] = state["gauge_columns"] * added.columns
        form = self._forms[name]
        if "factor" in state:
            scales = factors if form == "root" else near
            times_(state["factor"], network.edge_factors(name, scales), _FACTORS[form])
        self._follow_data(name, state, near)
        return near

    def _follow_data(self, name: str, state: State, near: Tensor) -> None:
        """Let averages over data follow a rescaling of the member near balance."""

    def note_rescaling(self) -> None:
        """Take note that the states have followed a rescaling."""
        self._gauges.clear()
        self._rescalings = self.network.rescalings["done"]

    def agreed(self, refused: bool) -> bool:
        """Return whether a step is refused in any process with which this one computes the metric."""
        # while batches are watched, the step may average a frame over the processes
        return refused if self._latest is None else any_replica(refused, self.process_group)

    def release(self, own: Set[str]) -> None:
        """Let go of the states of ``own`` parameters, as if they had taken no step."""
        self.state = {name: state for name, state in self.state.items() if name not in own}
        self._ahead = {
            name: by for name, by in self._ahead.items() if name not in own and by not in own
        }
        for name in own:
            self._gauges.pop(name, None)
        self._watch_batches()

    def _forget(self, names: Iterable[str]) -> None:
        """Let go of a first step that was refused: the weights may be others when it is taken."""
        for name in names:
            for key in _KEPT:
                self.state[name].pop(key, None)
            self._gauges.pop(name, None)

    def _check_network(self, states: Mapping[str, State]) -> None:
        done = self.network.rescalings["done"]
        if done != self._rescalings:
            if any("gauge_rows" in state for state in self.state.values()):
                raise RuntimeError(
                    "the network was rescaled after the first step of the optimizer, whose gauge and velocities belong "
                    "to the weights before: make a new optimizer, or rescale before the first step"
                )
            self._rescalings = done
        name, state = next(iter(states.items()))
        rows = state.get("gauge_rows")
        place = self.network.parameters[name].device
        if rows is not None and rows.device != place:
            raise RuntimeError(
                f"the parameters are on {place} and the optimizer's state is on {rows.device}: the model "
                "was moved after the optimizer had taken steps; let the state follow with "
                "optimizer.load_state_dict(optimizer.state_dict())"
            )

    # -- computing it ------------------------------------------------------------------------------

    def _refresh(self, names: list[str]) -> None:
        """Compute the metric of some parameters; the states change when all is well."""
        new = self._begun(names)
        try:
            for name in names:  # so that there are never two of them in memory
                self.state[name].pop("factor", None)
            kappa = None if self.power == 0 else self._report(names)
        except BaseException as error:
            if new or not isinstance(error, FloatingPointError) or not self._ran_away():
                self._forget(new)
                raise
            kappa = None
        if new:
            self._watch_batches()
        if kappa is None:
            self._take_balanced(names)
            return
        self._warn_of_unreached(kappa)
        self._set_normalizers(kappa, new)
        for name, factor in self._finished_values(names, kappa).items():
            self.state[name]["factor"] = self._where_held(name, factor)

    def _take_balanced(self, names: Sequence[str]) -> None:
        """Let some parameters have the metric of the balanced network, in which D' is one."""
        for name in names:
            self.state[name] |= {"zeros": False, "exponent": self._exponent(name)}
        ones = {name: self._ones(name) for name in names}
        for name, factor in self._as_factors(ones).items():
            self.state[name]["factor"] = factor

    def _where_held(self, name: str, factor: Tensor) -> Tensor:
        """Return a factor in the memory that a captured step reads, if one was captured."""
        held = self._held.get(name)
        if held is None or held.shape != factor.shape or held.device != factor.device:
            return factor
        if held.data_ptr() == factor.data_ptr():
            return factor
        return held.copy_(factor)

    def _ran_away(self) -> bool:
        """Return whether weights are finite and sums over their paths are not, not even in float64; tells of it."""
        near = self.near_parameters() or self.network.parameters
        wide = {name: p.detach().double() for name, p in near.items()}
        bad = [1.0 - torch.isfinite(to_local(p)).all().double() for p in wide.values()]
        if float(totals(torch.stack(bad), wide.values()).sum()):
            return False
        if bool(torch.isfinite(squared_path_norm(self.network, wide))):
            return False
        warnings.warn(_RAN_AWAY, stacklevel=2)
        return True

    def _begun(self, names: Sequence[str]) -> list[str]:
        """States and gauges of parameters that take their first step; their names."""
        new = [name for name in names if "gauge_rows" not in self.state[name]]
        if new:
            far = self._far()
            network = self.network
            b = self._frame_scales()
            if all("gauge_rows" not in state for state in self.state.values()):
                far = far_scales(network, b)
            for name, gauge in gauges(network, new, b, far).items():
                self._gauges.pop(name, None)  # of an optimizer that the metric served before
                kept = {"age": 0, "gauge_rows": gauge.rows, "gauge_columns": gauge.columns}
                self.state[name].update(kept | ({} if far is None else {"scales": far}))
        return new

    def _far(self) -> Tensor | None:
        """Return the scales of a network that was far from balance at the first step."""
        return next((state["scales"] for state in self.state.values() if "scales" in state), None)

    def _in_frame(self, values: Values) -> Values:
        """kappa' = F^2 kappa."""
        seen = into_frame(values, {name: self.gauge(name) for name in values})
        # two factors save memory and time on a processor alone
        return {
            n: v.dense() if isinstance(v, Outer) and recording.is_launched(v.rows) else v
            for n, v in seen.items()
        }

    def _report(self, names: Sequence[str]) -> RangeReport:
        """Return kappa' of some parameters, from ``values`` if a subclass has it, else from ``_kappa``."""
        has_values = type(self).values is not Metric.values
        kappa = self.values(self.network, names) if has_values else self._kappa(names)
        if isinstance(kappa, RangeReport):
            return kappa
        whose = f"the values of {type(self).__name__}"
        return report_of(kappa, whose, self.network, names, self._far(), self._in_frame)

    def _kappa(self, names: Sequence[str]) -> RangeReport | Mapping[str, Tensor]:
        """Return kappa' of some parameters with its means, as metrics of the library compute it; or kappa itself."""
        return self.values(self.network, names)

    def _set_normalizers(self, kappa: RangeReport, new: Sequence[str]) -> None:
        """Put the mean of kappa' and the normalizer c of each parameter into its state.

        Args:
            kappa: kappa' of some parameters.
            new: those that have no mean yet.
        """
        # one normalizer for all parameters, if the option says so
        shared = None
        if self.normalization == "none":
            shared = 1.0
        elif self.normalization == "network":
            shared = self._mean_of_all(kappa)
        for name in kappa.values:
            state = self.state[name]
            means = self._means(name, kappa)
            state["empty"] = _of_all([mean == 0 for mean in means])
            if self.normalization in ("refreshed", "network") or name in new:
                state["mean"] = _of_all([mean if mean > 0 else 1.0 for mean in means])
            state["normalizer"] = state["mean"] if shared is None else shared

    def _mean_of_all(self, kappa: RangeReport) -> float:
        """Return the mean of kappa' over the elements of all parameters, or 1 where it is 0."""
        counts = {name: self.network.parameters[name].numel() for name in kappa.values}
        total = math.fsum(count * kappa.mean(name) for name, count in counts.items())
        return total / sum(counts.values()) if total > 0 else 1.0

    def _blocks(self, name: str) -> tuple[int, ...]:
        """Return the numbers of rows of the blocks that a packed parameter consists of; () for any other."""
        return self.network.row_blocks.get(name, ())

    def _means(self, name: str, kappa: RangeReport) -> list[float]:
        """Return the mean of kappa' of a parameter, or of each of its blocks of rows."""
        sizes = self._blocks(name)
        if not sizes:
            return [kappa.mean(name)]
        return means_of_blocks(kappa.values[name], sizes, self.network.parameters[name])

    def _finished_values(self, names: Sequence[str], kappa: RangeReport) -> dict[str, Tensor]:
        """Return what the optimizers work with, from kappa' of some parameters."""
        for name in names:
            smallest = math.prod(low for low, _ in kappa.bounds[name])
            self.state[name]["zeros"] = not smallest > 0 and not self.damping
            self.state[name]["exponent"] = self._exponent(name)
        values = {name: kappa.values[name] for name in names}
        shifts = {name: self._shifts(name) for name in names}
        on_gpu = _on_one_gpu(values)
        if on_gpu is None:
            return self._finished(values, shifts)
        decisions = (
            tuple(self.state[name]["zeros"] for name in names),
            tuple(self._exponent(name) for name in names),
        )
        gauges = tuple(self.gauge(name) for name in names)
        return self._finish.finish(self._finished, on_gpu, shifts, decisions, gauges)

    def _finished(
        self, values: Mapping[str, Tensor | Outer], shifts: Mapping[str, Sequence[Shift]]
    ) -> dict[str, Tensor]:
        """Return what the optimizers work with, F^k D'^exponent, tensors in the memory of kappa'.

        It is zero where kappa' is: 0 / 0 = 0.
        """
        in_one_pass: dict[str, Tensor] = {}
        together: dict[str, Tensor] = {}
        powers: dict[str, Tensor] = {}
        for name, value in values.items():
            shift = shifts[name][0]
            is_plain = self._is_plain(name, shift)
            if is_plain and isinstance(value, Tensor):
                together[name] = value
            elif is_plain and isinstance(value, Outer) and self._damps_first_power:
                k = _FACTORS[self._forms[name]]
                factor = self._power_of(name).factor_of_outer(value, shift, k)
                in_one_pass[name] = self._shaped(name, factor)
            else:
                powers[name] = self._power(name, value, shifts[name])
        if together:
            self._raise_together_(together, [shifts[name][0] for name in together])
        powers |= together
        for name, power in powers.items():
            if self.state[name]["zeros"]:
                power.masked_fill_(power.isinf(), 0)
        return self._as_factors(powers) | in_one_pass

    def _is_plain(self, name: str, shift: Shift) -> bool:
        """Return whether a parameter is one block, whose kappa' is not all zero where it is damped."""
        return not self._blocks(name) and not (self.damping and shift.is_empty)

    @property
    def _damps_first_power(self) -> bool:
        """True if kappa' is damped and taken to the power 1."""
        return bool(self.damping) and self.power == 1

    def _power_of(self, name: str) -> Power:
        """Return the power that kappa' of a parameter is raised to."""
        return Power(self._exponent(name), bool(self.damping), self.gauge(name))

    def _power(self, name: str, value: Tensor | Outer, shifts: Sequence[Shift]) -> Tensor:
        """Return D'^exponent of a parameter by itself."""
        sizes = self._blocks(name)
        if not sizes:
            return self._power_of(name).of(value, shifts[0])
        return self._power_of(name).of_blocks(value, sizes, shifts, self.network.parameters[name])

    def _raise_together_(self, values: Mapping[str, Tensor], shifts: Sequence[Shift]) -> None:
        """(kappa' / c + damping mean / c)^exponent of some tensors, written over kappa'."""
        kappa = list(values.values())
        # numbers, or tensors of one where a CUDA graph reads them
        normalizers: list[Any] = [shift.normalizer for shift in shifts]
        added: list[Any] = [shift.added for shift in shifts]
        foreach_div_(kappa, normalizers)
        foreach_add_(kappa, added)
        foreach_pow_(kappa, [self._exponent(name) for name in values])

    def _as_factors(self, powers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return F^k D'^exponent of some parameters, in the memory of D'^exponent."""
        for k in sorted({_FACTORS[self._forms[name]] for name in powers} - {0}):
            names = [name for name in powers if _FACTORS[self._forms[name]] == k]
            multiply_([powers[name] for name in names], [self.gauge(name) for name in names], k)
        return {name: self._shaped(name, power) for name, power in powers.items()}

    def _shaped(self, name: str, factor: Tensor) -> Tensor:
        """Return a factor of the weights instead of the member near balance if that is asked for, in their shape."""
        far = self.gauge(name).far
        if self._forms[name] == "root" and far is not None:
            factor = factor * far
        return factor.view(to_local(self.network.parameters[name]).shape)

    def _ones(self, name: str) -> Tensor:
        """Return D'^exponent of the balanced network."""
        return torch.ones_like(
            to_local(self.network.parameters[name]),
            dtype=self.gauge(name).rows.dtype,
            memory_format=torch.contiguous_format,
        )

    def _shifts(self, name: str) -> list[Shift]:
        """Return how kappa' of a parameter is normalized and damped, or of each of its blocks."""
        state = self.state[name]
        count = len(self._blocks(name)) or 1
        # a number, if it was saved when blocks were not known
        each = (_for_each(state[key], count) for key in ("normalizer", "mean", "empty"))
        return [
            Shift(c, self.damping * mean / c, empty) for c, mean, empty in zip(*each, strict=True)
        ]

    def _warn_of_unreached(self, kappa: RangeReport) -> None:
        """Tell of gradients where kappa is zero because the trace knows no path; values of your own may be zero."""


def _on_one_gpu(values: Mapping[str, Tensor | Outer]) -> dict[str, Tensor] | None:
    """Return the values if all are tensors on one GPU; None otherwise."""
    tensors = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and recording.is_launched(value)
    }
    devices = {value.device for value in tensors.values()}
    return tensors if len(tensors) == len(values) and len(devices) == 1 else None


def _of_all(numbers: list[Any]) -> Any:
    """Return the number of a parameter, or a tuple of those of its blocks."""
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _for_each(numbers: Any, count: int) -> tuple[Any, ...]:
    """Return a number for each block of a parameter."""
    return numbers if isinstance(numbers, tuple) else (numbers,) * count
