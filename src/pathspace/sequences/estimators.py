"""PCNN, CNN and RNN; models from files; several models made one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pathspace.sequences import mixed_storage, storage
from pathspace.sequences.merging import merge_parameters
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.reader import Reader
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.training import Training


class PCNN(SequenceModel):
    """Persistent contextual neural network: units that keep what they know, rewired by each symbol read.

    .. code-block:: text

        V_j^{t+1} = V_j^t + sum_i tau[i,j,x_t] s(V_i^t)
        pi_t(y) is proportional to exp sum_i w[i,y] s(V_i^t)

    Args:
        units: N.
        connectivity: edges that leave each unit, its loop included, drawn at random; None, or N and
            more, for all N.
        metric: of the transition steps: "rbp" or "rutsd", whole; "rbp-qd" or "rutsd-qd",
            quasi-diagonal; "fb", frequency-adjusted backpropagation; "bp", backpropagation. None:
            "rbp", or "rbp-qd" for an RNN.
        writing: step of the writing weights, "qdh" (quasi-diagonal), "dh" (diagonal Hessian),
            "fisher" (the whole Fisher matrix, for small networks of few symbols) or "bp" (the
            gradient).
        squash: "tanh" or "logistic"; invariant metrics learn the same with both where the two
            dampings are 0.
        damping: added to the diagonal of the transition metric. Where few symbols are to be
            predicted, long after what they depend on, its sums are small and a damping of 1
            outweighs them.
        writing_damping: factor of the damping of the writing metric, which is the frequency of each
            symbol plus 2.2e-16. With 0, and a damping of 0, tanh and logistic networks learn the
            same.
        reach: most that one step may change what one symbol adds to a unit V_j: each unit's step at
            each symbol is shortened to it, by itself. With little damping the step of one unit may
            be huge, and without a bound the one rate of all shrinks until nothing else moves. None:
            no bound. A bound that acts is not invariant.
        prior_writing: precision of a Gaussian prior of the writing weights; about 0.01 to 0.1
            against overfitting, 0 for none. A prior is not invariant.
        prior_transition: the same for the transition weights between units, around their start
            values.
        rate: first learning rate, 1/N if None; it steers itself from there.
        passes: most passes, each a step of the writing weights or of all others.
        seconds: most seconds of training, all restarts together, or None.
        patience: passes without a shorter validation text before it stops, or None.
        validate_every: passes between two looks at the validation text; there is one more at the
            end.
        grow: begin on a part of a text of at least 2^15 symbols, which doubles until it is the
            whole: better on megabytes in seconds, worse in minutes.
        batch: how many of the training texts each writing step and the transition step after it are
            made on, in a random order; 1 is online training. A step is kept where the batch does
            not lose. None: all texts.
        restarts: trainings with seeds seed, seed + 1, ..., the best of which is kept.
        heat: passes after which all but the better quarter of the restarts are dropped, or all but
            the ensemble if that is more; 0 drops none.
        ensemble: how many of the restarts, the best by the validation text, are merged into one
            network. Their weights are those with which the validation text is shortest, for which
            it is no unseen text; less overfitting than any one of them.
        folds: into how many parts the training text is divided, each of which is the validation
            text of its share of the restarts, so that nothing is lost to validation. Whole texts
            are dealt out if there are at least as many; else each is cut. Restarts and ensemble
            must be multiples of it. Code lengths of the training then are sums over what the folds
            held back, by weights fitted to it. 1: the validation text is that of `fit`.
        jobs: processes for the restarts.
        seed: of the random graph and the start values.

    Example:
        >>> model = PCNN(units=5, passes=20).fit("abcabcabcabcabc")
        >>> round(sum(model.predict("ab").values()), 9)
        1.0

    Source:
        Y. Ollivier, *Riemannian metrics for neural networks II*, there called gated leaky neural
        network too.
    """

    kind = "pcnn"


class CNN(SequenceModel):
    """Contextual neural network: the transition weights depend on the symbol read.

    .. code-block:: text

        V_j^{t+1} = sum_i tau[i,j,x_t] s(V_i^t)

    Arguments as for `PCNN`.
    """

    kind = "cnn"


class RNN(SequenceModel):
    """Recurrent neural network reading symbols.

    .. code-block:: text

        V_j^{t+1} = rho[j,x_t] + sum_i tau[i,j] s(V_i^t)

    Arguments as for `PCNN`, but the metric must be "rbp-qd", "rutsd-qd", "fb" or "bp".
    """

    kind = "rnn"


CLASSES: dict[str, type[SequenceModel]] = {"pcnn": PCNN, "cnn": CNN, "rnn": RNN}
"""The networks by kind."""


def load(path: str | Path) -> SequenceModel | Mixed:
    """Return the model in a file written by `SequenceModel.save` or `Mixed.save`.

    Raises:
        OSError: if the file cannot be read.
        ModelFileError: if it is no model file, of a later version, or damaged.
    """
    stored = mixed_storage.load(Path(path))
    if isinstance(stored, storage.Stored):
        return _restored(stored)
    return Mixed.restored(stored, None if stored.network is None else _restored(stored.network))


def _restored(stored: storage.Stored) -> SequenceModel:
    model = CLASSES[stored.training.model.kind]()
    known = model.get_params()
    model.set_params(**{name: value for name, value in stored.options.items() if name in known})
    model.told_ = {name: value for name, value in stored.options.items() if name not in known}
    model.restore(stored.alphabet, stored.training)
    return model


def merge(
    models: Sequence[SequenceModel],
    weights: Sequence[float] | np.ndarray | None = None,
    offsets: Sequence[float] | np.ndarray | None = None,
) -> SequenceModel:
    """Return one model that predicts the normalised geometric mean of several.

    pi(y) proportional to exp(b_y) prod_k pi_k(y)^{c_k}, c_k = 1/K and b_y = 0 unless given; its
    units are those of all.

    Args:
        models: fitted models of one class, squash and alphabet.
        weights: the c_k.
        offsets: the b_y, in the order of the alphabet.

    Raises:
        ValueError: if there is none, or they do not fit together.
        NotFittedError: if one is not fitted.
        TypeError: if they are no list of networks, or one is `Mixed`.

    Example:
        >>> models = [PCNN(units=3, passes=4, seed=seed).fit("abab") for seed in (0, 1)]
        >>> merge(models).parameters_.units
        6
    """
    _check_networks(models)
    parameters = merge_parameters([model.parameters_ for model in models], weights, offsets)
    alphabets = {model.alphabet_.symbols for model in models}
    if len(alphabets) > 1:
        raise ValueError("networks to merge must share their alphabet")
    merged = type(models[0])(**models[0].get_params())
    merged.set_params(units=parameters.units, restarts=1, ensemble=1, folds=1)
    merged.restore(models[0].alphabet_, Training.begin(parameters, merged.rate))
    return merged


def _check_networks(models: Any) -> None:
    """Refuse anything but a list of networks, with one at least."""
    several = isinstance(models, Sequence)
    foreign = [each for each in (models if several else [models]) if not isinstance(each, Reader)]
    if foreign or not several:
        got = type(foreign[0] if foreign else models).__name__
        raise TypeError(f"merge takes a list of networks, [model, other], got {got}")
    if not models:
        raise ValueError("there is no network to merge")
    if any(isinstance(model, Mixed) for model in models):
        raise TypeError(
            "contexts cannot be merged: merge the networks, mixed.model, and mix what comes out"
        )
