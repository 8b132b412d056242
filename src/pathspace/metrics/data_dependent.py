"""The data-dependent metric of an optimizer (D16 Section 4): kappa between paths and data, averaged over its refreshes.

    kappa = path + alpha data       (see ``paths.data.data_dependent``)

The two terms are computed by running the model once more on the batch that it saw (``DataTerms``); here they become
kappa: averaged over draws and replicas, in a type that holds them, in the gauge.

Letters: kappa as above, a the decay of the average of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pathspace.metrics.data_terms import AVERAGED, DataTerms
from pathspace.metrics.replicas import mean_over_replicas
from pathspace.network.errors import expect_finite
from pathspace.paths.data.data_dependent import KappaTerms, check_finite, fits
from pathspace.paths.kernel.safe_type import Surveyed, Values, survey
from pathspace.squared.squares import dense


class DataDependent(DataTerms):
    """The metric of the data-dependent path norm: what an optimizer divides by, and where its data comes from.

    .. code-block:: text

        kappa = (1 - alpha) psi_v gamma_u^2 + alpha sum over nodes o of psi_o stat_i[h_u^i dz_o^i/dz_v^i]
        D' = (f^2 kappa / c + damping)^power,   D = D' / f^2                 (as in :class:`Path`)

    alpha = 0 is :class:`Path`. alpha = 1 with the second moment is the diagonal natural gradient of a Gaussian output
    (D16 Theorem 2), without shared weights and for convolutions; for recurrent networks it is the diagonal of the
    Fisher information.

    The metric needs data: it remembers what the model was last called with while gradients were enabled, by a forward
    pre-hook that only looks (:meth:`close` removes it), or takes the batch that :meth:`observe` is given. A step for
    which it is due runs the model's code once more on that batch, in evaluation form, on a copy. With several calls for
    one step, the last one's batch counts. A model inside ``torch.compile`` or ``torch.func`` may not show its batches:
    use :meth:`observe`.

    Args:
        alpha: share of the data, in [0, 1].
        statistic: ``"second_moment"`` (R = M) or ``"covariance"`` (R = C).
        sharing: whether the edges of a parameter are added before the statistic (``"parameters"``) or after it
            (``"edges"``); see :func:`pathspace.paths.data_dependent_kappa`.
        estimator: ``"exact"``, ``"signs"`` or ``"auto"``; see there.
        averaging: decay of the average of the data term over refreshes; None: 0.9 for random signs, and no average of
            exact values.
        seed: of the random signs, which are drawn by a generator of their own; the state keeps how many were drawn.
        examples: look at the first so many examples of a batch only, or at a share of them below 1, such as 0.25:
            cheaper and noisier, and the average over refreshes makes up for it; None: at all of them.
        watch: whether to look at the model's calls; if not, every batch comes by :meth:`observe`.
        process_group: the processes of data-parallel training, over whose parts of a batch the metric is averaged at
            every refresh, so that replicas stay alike; ``"default"``: those of torch.distributed, where it is
            initialised; None: no others.
        options: those of :class:`Path`, but ``second_term``. With alpha = 1 a weight that no example of a batch used
            has kappa = 0, and so have output biases for the covariance: damping bounds their steps.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> network = ps.trace(model, torch.zeros(1, 4))
        >>> metric = ps.metrics.DataDependent(alpha=0.5)
        >>> optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.RMSprop, lr=1e-3, metric=metric)
    """

    # -- from two terms to kappa ------------------------------------------------------------------------------

    def _kappa(self, names: Sequence[str]) -> Surveyed:
        if self.alpha == 0:
            return super()._kappa(names)
        if self.alpha == 1:  # else a path norm shows it
            expect_finite(self.network.parameters.values())
        draws = self._draws(names)
        if self._is_wide():
            surveyed, kept = self._averaged(names, draws, self._in_float64(names, draws))
        else:
            surveyed, kept = self._averaged(names, draws, self._terms(names, draws))
            types = {name: surveyed.values[name].dtype for name in names}
            if not (surveyed.moderate and fits(surveyed, types, self._request(draws))):
                surveyed, kept = self._averaged(names, draws, self._in_float64(names, draws))
                if surveyed.moderate and fits(surveyed, types, self._request(draws)):
                    narrow: Values = {name: dense(k).to(types[name]) for name, k in surveyed.values.items()}
                    surveyed = survey(narrow, with_means=True)
        check_finite(surveyed)
        for name, new in kept.items():
            self._keep(name, new)
        for name, ((low, high),) in surveyed.bounds.items():
            if low < 0:  # rounding
                surveyed.bounds[name] = ((0.0, high),)
                dense(surveyed.values[name]).clamp_min_(0)
        return surveyed

    def _averaged(
        self, names: Sequence[str], draws: int, terms: KappaTerms
    ) -> tuple[Surveyed, dict[str, dict[str, Any]]]:
        """Kappa' with the data's averages, and what the states are to keep if it is good."""
        terms = mean_over_replicas(terms, self.process_group)
        decay = (AVERAGED if terms.drawn else 0.0) if self.averaging is None else self.averaging
        kappa: Values = {}
        kept: dict[str, dict[str, Any]] = {}
        for name in names:
            state, new = self.state[name], {"draws": draws + 1}
            kept[name] = new
            data, weight = _mean_so_far(state, new, "data", terms.data[name], decay)
            kappa[name] = terms.kappa(name, data, self.alpha / weight)
            if name in terms.cross:
                cross, weight = _mean_so_far(state, new, "cross", terms.cross[name], decay)
                new |= self._paired(name, terms.bias_of[name], cross * (self.alpha / weight))
        return survey(self._in_frame(kappa), with_means=True), kept

    def _paired(self, name: str, bias: str, cross: Tensor) -> dict[str, Any]:
        """What a state keeps of products with another parameter, the bias."""
        del name, bias, cross
        return {}

    def _keep(self, name: str, new: dict[str, Any]) -> None:
        """Put new averages in a state; the memory of the old one is that of the next statistic."""
        state, place = self.state[name], f"{name}, data"
        average, memory = new.get("data_average"), self._memory.get(place)
        if average is not None and memory is not None and memory.data_ptr() == average.data_ptr():
            before = state.get("data_average")
            if before is None:
                del self._memory[place]
            else:
                self._memory[place] = before
        state.update(new)

    def _warn_of_unreached(self, kappa: Surveyed) -> None:
        if self.alpha == 0:  # data leave zeros of their own
            super()._warn_of_unreached(kappa)


def _mean_so_far(
    state: dict[str, Any], new: dict[str, Any], key: str, data: Tensor, decay: float
) -> tuple[Tensor, float]:
    """The average m = a m + (1 - a) data, and 1 - a^t, which it is to be divided by, as Adam's moments are.

    It is written over the data; the state keeps its own until that is known to be good.
    """
    if not decay:
        return data, 1.0
    average, weight = f"{key}_average", f"{key}_weight"
    if average not in state:
        new[average], new[weight] = data * (1 - decay), 1 - decay
    else:
        new[average] = torch.lerp(state[average].to(data.dtype), data, 1 - decay, out=data)
        new[weight] = state[weight] + (1 - decay) * (1 - state[weight])
    return new[average], new[weight]
