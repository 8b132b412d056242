"""The data-dependent metric of an optimizer (D16 Section 4): kappa between paths and data, averaged over its refreshes.

    kappa = path + alpha data       (see ``paths.data.data_dependent``)

The two terms are computed by running the model once more on the batch that it saw. They become
kappa by averages over draws and replicas, in a type that holds them, in the gauge.

Letters: kappa as above, a the decay of the average of data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from pathspace.metrics.checks import check_names, check_numbers
from pathspace.metrics.metric import Form, MetricOptions
from pathspace.metrics.path import Path
from pathspace.metrics.replicas import any_replica, mean_over_replicas, rank_and_size
from pathspace.network import Network
from pathspace.network.call import Arguments
from pathspace.network.errors import expect_finite
from pathspace.paths.data.chain_terms import chain_terms
from pathspace.paths.data.data_dependent import (
    EXACT_UNITS,
    Estimator,
    KappaTerms,
    Request,
    check_estimation,
    check_finite,
    fits,
    in_float64,
    is_exact,
    kappa_terms,
)
from pathspace.paths.data.edge_statistics import Sharing
from pathspace.paths.data.node_measure import Statistic, check_options
from pathspace.paths.kernel.safe_type import RangeReport, Values, narrowed, range_report
from pathspace.replay.arguments import first_examples
from pathspace.replay.chain import Cell, Chain, chain_of, chain_pass
from pathspace.replay.latest_batch import LatestBatch
from pathspace.replay.replay import Replay, replay
from pathspace.rescaling.optimizer_states import State, times_
from pathspace.squared.squares import dense

_AVERAGED = 0.9
"""The decay of the average over refreshes for random signs, if nothing else is asked for."""
_ENOUGH = 10  # draws in the average, before a part of a batch is enough for the next


class DataOptions(MetricOptions, total=False):
    """The options of :class:`pathspace.metrics.DataDependent`, as the named optimizers take them."""

    statistic: Statistic
    sharing: Sharing
    estimator: Estimator
    averaging: float | None
    seed: int
    examples: float | None
    watch: bool
    process_group: Any


class DataDependent(Path):
    """The metric of the data-dependent path norm: what an optimizer divides by, and where its data comes from.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        D' = (f^2 kappa / c + damping)^power,   D = D' / f^2                 (as in :class:`Path`)

    alpha = 0 is :class:`Path`. alpha = 1 with the second moment is the diagonal natural gradient of
    a Gaussian output (D16 Theorem 2), without shared weights and for convolutions; for recurrent
    networks it is the diagonal of the Fisher information.

    The metric needs data: it remembers what the model was last called with while gradients were
    enabled, by a forward pre-hook that only looks (:meth:`close` removes it), or takes the batch
    that :meth:`observe` is given. A step for which it is due runs the captured steps of the model
    on that batch, in evaluation form; the first one traces the model once more for it. With several
    calls for one step, the last one's batch counts. A model inside ``torch.compile`` or
    ``torch.func`` may not show its batches: use :meth:`observe`.

    Args:
        alpha: share of the data, in [0, 1].
        statistic: ``"second_moment"`` (R = M) or ``"covariance"`` (R = C).
        sharing: whether the edges of a parameter are added before the statistic (``"parameters"``)
            or after it (``"edges"``); see :func:`pathspace.paths.data_dependent_kappa`.
        estimator: ``"exact"``, ``"signs"`` or ``"auto"``; see there.
        averaging: decay of the average of the data term over refreshes; None: 0.9 for random signs,
            and no average of exact values.
        seed: of the random signs, which are drawn by a generator of their own; the state keeps how
            many were drawn.
        examples: look at the first so many examples of a batch only, or at a share of them below 1,
            such as 0.25: cheaper and noisier, and the average over refreshes makes up for it; None:
            at all of them.
        watch: whether to look at the model's calls; if not, every batch comes by :meth:`observe`.
        process_group: the processes of data-parallel training, over whose parts of a batch the
            metric is averaged at every refresh, so that replicas stay alike; ``"default"``: those
            of torch.distributed, where it is initialised; None: no others.
        options: those of :class:`Path`, but ``second_term``. With alpha = 1 a weight that no
            example of a batch used has kappa = 0, and so have output biases for the covariance:
            damping bounds their steps.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> metric = ps.metrics.DataDependent(alpha=0.5)
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.RMSprop, lr=1e-3, metric=metric)
    """

    pairs: Callable[[Network, Replay], dict[str, str]] | None = None
    """Finds the parameters whose products with another one are wanted too."""

    def __init__(
        self,
        alpha: float = 0.5,
        statistic: Statistic = "second_moment",
        *,
        sharing: Sharing = "parameters",
        estimator: Estimator = "auto",
        averaging: float | None = None,
        seed: int = 0,
        examples: float | None = None,
        watch: bool = True,
        process_group: Any = "default",
        **options: Unpack[MetricOptions],
    ) -> None:
        check_names(self, options, MetricOptions.__annotations__)
        super().__init__(**options)
        check_options(alpha, statistic)
        check_estimation(sharing, estimator, averaging, examples)
        check_numbers(seed=seed)
        self.alpha = alpha
        self.averaging = averaging
        self.seed = int(seed)
        self.statistic: Statistic = statistic
        self.sharing: Sharing = sharing
        self.estimator: Estimator = estimator
        self.examples = examples
        self.process_group = process_group
        self._watch = watch
        self._source: torch.Generator | None = None

    def bind(self, network: Network, names: Sequence[str], form: Form) -> None:
        """Let an optimizer ask for the metric of some parameters; see :meth:`Metric.bind`."""
        if self._network is None:
            self._chain = chain_of(network)
        super().bind(network, names, form)

    def _watch_batches(self) -> None:
        """Look at the model's calls as long as there is an optimizer."""
        if self._latest is None:
            needed = self.alpha > 0 or self.frame.needs_batch
            self._latest = LatestBatch(self.network, look=self._watch and needed)

    def _frame_batch(self) -> Any:
        return self._batch()

    @property
    def takes_parts(self) -> bool:
        """False: the pass over data needs a whole model, so FSDP may not shard it."""
        return False

    def agreed(self, refused: bool) -> bool:
        """Return whether a step is refused in any process whose batches are in the metric."""
        return any_replica(refused, self.process_group)

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Give the batch for the next refresh of the metric, instead of the one that the model was last called with.

        Args:
            args: what the model is called with.
            kwargs: likewise.
        """
        self._batches.give(args, kwargs)

    def close(self) -> None:
        """Remove the hook by which the metric sees batches; from then on they come by :meth:`observe` alone."""
        self._batches.remove()

    @property
    def _batches(self) -> LatestBatch:
        if self._latest is None:
            raise RuntimeError(
                f"{type(self).__name__} belongs to no network yet: give it to an optimizer"
            )
        return self._latest

    def _copied(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        if name == "process_group":
            return value
        if name == "_source":
            return None
        return super()._copied(name, value, memo)

    def _short_chain(self) -> Chain | None:
        """Return the network as a chain, if ``chain_terms`` can compute kappa: random signs, no other products."""
        chain = self._chain
        if chain is None:
            return None
        units = self._units(chain.readout) * (chain.steps if chain.every else 1)
        if self.alpha < 1:
            units += chain.steps * sum(map(self._units, chain.cells))
        if is_exact(self.estimator, units, EXACT_UNITS) or self.pairs is not None:
            return None
        return chain

    def _units(self, cell: Cell) -> int:
        return len(self.network.parameters[cell.weight])

    # -- the terms ---------------------------------------------------------------------------------

    def _batch(self) -> Arguments:
        if self._batches.inputs is None:
            raise RuntimeError(
                "the optimizer's metric has seen no batch: call the model with gradients enabled before step(), or "
                "give the batch with observe(inputs), as is needed where torch.compile had compiled the model's code "
                "before the optimizer was made"
            )
        return first_examples(self.network, self._batches.inputs, self.examples)

    def _terms(self, names: Sequence[str], draws: int, *, wide: bool) -> KappaTerms:
        """Return the terms of kappa; they may be overwritten. ``wide`` asks for float64."""
        batch = self._batch()
        near = self.near_parameters()
        chain = self._short_chain()
        request = self._request(draws)
        generator = self._generator(draws)
        if chain is not None and not wide:
            seen = chain_pass(self.network, chain, batch, near)
            if seen is not None:
                return chain_terms(seen, request, generator, names)
        replayed = (
            in_float64(self.network, batch, near)
            if wide
            else replay(self.network, batch, parameters=near)
        )
        return kappa_terms(self.network, replayed, request, generator, names)

    def _request(self, draws: int) -> Request:
        """Return the options of ``kappa_terms`` for a refresh after ``draws`` others."""
        decay = _AVERAGED if self.averaging is None else self.averaging
        # only one example may use a weight: before it is left out, it must be in the average
        has_average = draws >= _ENOUGH and decay >= _AVERAGED
        return Request(
            self.alpha,
            self.statistic,
            self.sharing,
            self.estimator,
            self.pairs,
            part=has_average,
            place=rank_and_size(self.process_group),
        )

    def _is_wide(self) -> bool:
        """Return whether kappa once needed a wider type than the parameters have, and is in float64 from then on."""
        averages = (state.get("data_average") for state in self.state.values())
        wide = any(average is not None and average.dtype == torch.float64 for average in averages)
        return wide and all(p.dtype != torch.float64 for p in self.network.parameters.values())

    def _generator(self, draws: int) -> torch.Generator:
        """Return what draws the signs of a refresh."""
        device = next(iter(self.network.parameters.values())).device
        # a seed has 32 bits on a CPU; an odd factor takes those of different runs far apart
        far = self.seed * 2654435761
        if self._source is None or self._source.device != device:
            self._source = torch.Generator(device)
        return self._source.manual_seed((far + draws) % 2**32)

    # -- from two terms to kappa -------------------------------------------------------------------

    def _kappa(self, names: Sequence[str]) -> RangeReport:
        if self.alpha == 0:
            return super()._kappa(names)
        if self.alpha == 1:  # else a path norm shows it
            expect_finite(self.network.parameters.values())
        # how often signs were drawn
        draws = max(self.state[name].get("draws", 0) for name in names)
        report, kept = self._in_type_that_fits(names, draws)
        check_finite(report)
        for name, new in kept.items():
            self.state[name].update(new)
        for name, ((low, high),) in report.bounds.items():
            if low < 0:  # rounding
                report.bounds[name] = ((0.0, high),)
                dense(report.values[name]).clamp_min_(0)
        return report

    def _in_type_that_fits(
        self, names: Sequence[str], draws: int
    ) -> tuple[RangeReport, dict[str, State]]:
        """Return averaged kappa' and the new entries of the states, in float64 if needed."""
        request = self._request(draws)
        wide = self._is_wide()
        report, kept = self._averaged(names, draws, wide=wide)
        types = {name: report.values[name].dtype for name in names}
        if wide or (report.well_scaled and fits(report, types, request)):
            return report, kept
        report, kept = self._averaged(names, draws, wide=True)
        if report.well_scaled and fits(report, types, request):
            report = narrowed(report, types, with_means=True)
        return report, kept

    def _averaged(
        self, names: Sequence[str], draws: int, *, wide: bool
    ) -> tuple[RangeReport, dict[str, State]]:
        """Return kappa' from the averages over batches, and the new entries of the states, by name.

        The states take these only after kappa' was checked.
        """
        terms = mean_over_replicas(self._terms(names, draws, wide=wide), self.process_group)
        decay = self.averaging
        if decay is None:
            decay = _AVERAGED if terms.drawn else 0.0
        kappa: Values = {}
        kept: dict[str, State] = {}
        for name in names:
            state = self.state[name]
            new = {"draws": draws + 1}
            kept[name] = new
            data, weight = _mean_so_far(state, new, "data", terms.data[name], decay)
            kappa[name] = terms.kappa(name, data, self.alpha / weight)
            if name in terms.cross:
                cross, weight = _mean_so_far(state, new, "cross", terms.cross[name], decay)
                new |= self._paired(name, terms.bias_of[name], cross * (self.alpha / weight))
        return range_report(self._in_frame(kappa), with_means=True), kept

    def _follow_data(self, name: str, state: State, near: Tensor) -> None:
        scale = self.network.edge_factors(name, near)
        if "data_average" in state:
            times_(state["data_average"], scale, -2)

    def _paired(self, name: str, bias: str, cross: Tensor) -> dict[str, Any]:
        """Return what a state keeps of products with another parameter, the bias."""
        del name, bias, cross
        return {}

    def _warn_of_unreached(self, kappa: RangeReport) -> None:
        if self.alpha == 0:  # data leave zeros of their own
            super()._warn_of_unreached(kappa)


def _mean_so_far(
    state: State, new: dict[str, Any], key: str, data: Tensor, decay: float
) -> tuple[Tensor, float]:
    """Return the average m <- a m + (1 - a) data and its weight 1 - a^t, by which it is divided as Adam's moments are.

    Args:
        state: the average and the weight so far, which stay as they are.
        new: receives the new ones.
        key: the beginning of their names.
        data: what is averaged; the average may be written into it.
        decay: a.
    """
    if not decay:
        return data, 1.0
    average = f"{key}_average"
    weight = f"{key}_weight"
    if average not in state:
        new[average] = data * (1 - decay)
        new[weight] = 1 - decay
    else:
        new[average] = torch.lerp(state[average].to(data.dtype), data, 1 - decay, out=data)
        new[weight] = state[weight] + (1 - decay) * (1 - state[weight])
    return new[average], new[weight]
