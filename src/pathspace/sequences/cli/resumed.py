"""``pathspace sequence fit --resume``: the network of a file, and what of it may be asked for anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pathspace.sequences.cli.files import Kind, kind_read
from pathspace.sequences.estimators import load
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.sequence_model import SequenceModel

PASSES = 1000


def network_of(output: Path) -> SequenceModel:
    """Return the network of a model file, to go on with."""
    estimator = load(output)
    network = estimator.model if isinstance(estimator, Mixed) else estimator
    if network is None:
        raise ValueError(
            f"{output} holds contexts alone, and no network to go on with: leave out --resume"
        )
    return network


def check_resumed(
    network: SequenceModel, output: Path, kind: Kind | None, asked: dict[str, Any]
) -> None:
    """Refuse options that were given and differ from those that the training was begun with."""
    metric = network.stored().settings.metric  # where the default was taken, its name
    begun = network.get_params() | {"model": network.kind, "metric": metric}
    for name, value in asked.items():
        if name not in ("passes", "seconds", "jobs") and value != begun[name]:
            shown, there = (0 if one is None else one for one in (value, begun[name]))
            raise ValueError(
                f"--{name.replace('_', '-')} {shown} is not what the model in {output} was begun with, {there}: leave "
                "it out, or begin anew without --resume"
            )
    there = kind_read(network)
    if kind not in (None, there):
        option = "--text" if (kind, there) == ("characters", "bytes") else "--tokens"
        raise ValueError(
            f"the model in {output} reads {there}: leave out {option}, or begin anew without --resume"
        )


def set_budget(network: SequenceModel, passes: int | None, seconds: float | None) -> None:
    """Give a network passes and seconds; those left out are what is not spent of the fit that was interrupted."""
    training = network.training_
    if passes is None and training.passes < network.passes:
        passes = network.passes
    left = network.seconds is not None and training.seconds < network.seconds
    if seconds is None and left:  # a budget that is spent would let no pass happen
        seconds = network.seconds
    network.set_params(passes=PASSES if passes is None else passes, seconds=seconds)


def what_ended(network: SequenceModel) -> str:
    """Say why a training goes no further, and what lets it."""
    training = network.training_
    if training.passes >= network.passes:
        return f"the model has made {training.passes} passes already: give more --passes"
    if network.seconds is not None and training.seconds >= network.seconds:
        return f"the model has had {training.seconds:.1f} seconds already: give more --seconds"
    return f"the validation part has not improved since pass {training.result_pass}, and --patience is spent"
