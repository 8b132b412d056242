"""The command ``pathspace sequence fit``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from pathspace.progress import shown
from pathspace.sequences.checkpoints import beside, clear, is_begun
from pathspace.sequences.estimators import CLASSES, load
from pathspace.sequences.folds import fold_of
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.passes import Metric, WritingStep
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.text import Text
from pathspace.sequences.training import Training, looked

from .console import console, errors, per_symbol
from .files import After, AsJson, AsText, InputPath, Quiet, mask_after, read, read_for, writable
from .result import Result, mix
from .worth import baseline_bits

PASSES, SHARE = 1000, 0.1


class _FitReport:
    """The progress of a fit, as the part that is done and a few words."""

    def __init__(
        self,
        show: Callable[[float, str], None],
        passes: int,
        seconds: float | None,
        symbols: int,
        held: int,
    ) -> None:
        self._show, self._passes, self._seconds = show, passes, seconds
        self._symbols, self._held = symbols, held
        self._number = 1
        self.last: Training | None = None

    def __call__(self, training: Training) -> None:
        if self.last is not None and training.passes <= self.last.passes:
            self._number += 1
        self.last = training
        done = training.passes / max(self._passes, 1)
        if self._seconds is not None:
            done = max(done, training.seconds / self._seconds if self._seconds else 1.0)
        state = f"network {self._number}  " if self._number > 1 else ""
        state += (
            f"pass {training.passes}  {per_symbol(-training.log_likelihood / math.log(2), self._symbols):.4f}"
        )
        if self._held and not math.isnan(training.validation_bits):  # parts of a text have no look
            state += f" train {per_symbol(training.validation_bits, self._held):.4f} valid"
        state += f" bits/symbol  rates {training.rate_w:.2g} {training.rate_tau:.2g}"
        self._show(min(done, 1.0), state)


def fit(
    command: typer.Context,
    file: InputPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write.")] = Path(
        "model.safetensors"
    ),
    model: Annotated[str, typer.Option(help="Kind of network: pcnn, cnn or rnn.")] = "pcnn",
    units: Annotated[int, typer.Option(help="Hidden units.", min=1)] = 32,
    connectivity: Annotated[
        int, typer.Option(help="Edges that leave each unit, at most all; 0: all.", min=0)
    ] = 3,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Of transition steps: rbp, rutsd, rbp-qd, rutsd-qd or fb; default rbp, of an RNN rbp-qd."
        ),
    ] = None,
    writing: Annotated[str, typer.Option(help="Rule of writing steps: qdh or dh.")] = "qdh",
    damping: Annotated[float, typer.Option(help="Added to the diagonal of the metric.", min=0)] = 1.0,
    reach: Annotated[
        float,
        typer.Option(help="Bound on how much a step changes what a symbol adds to a unit; 0: none.", min=0),
    ] = 0.0,
    prior_writing: Annotated[
        float, typer.Option(help="Precision of a prior on writing weights.", min=0)
    ] = 0.0,
    prior_transition: Annotated[
        float, typer.Option(help="Precision of a prior on transition weights.", min=0)
    ] = 0.0,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="File to validate on, for early stopping; default: the last tenth.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help=f"Share of the file held out without --validation; 0: none; default {SHARE}.",
            min=0,
            max=0.99,
        ),
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option(
            help=f"Most passes over the file; default {PASSES}, with --resume what an interrupted fit was given.",
            min=0,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Most seconds of training, those before --resume included; with --resume alone what an interrupted "
            "fit was given.",
            min=0,
        ),
    ] = None,
    patience: Annotated[
        int, typer.Option(help="Passes without improvement before it stops; 0: never.", min=0)
    ] = 300,
    restarts: Annotated[int, typer.Option(help="Networks to train, of which the best is kept.", min=1)] = 1,
    heat: Annotated[
        int,
        typer.Option(
            help="Passes after which all but the best quarter of the restarts end; 0: none does.", min=0
        ),
    ] = 100,
    ensemble: Annotated[int, typer.Option(help="Restarts to merge into one model.", min=1)] = 1,
    folds: Annotated[
        int,
        typer.Option(
            help="Parts of the file that take turns as the validation part; 1: the last tenth.", min=1
        ),
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes for the restarts.", min=1)] = 1,
    grow: Annotated[
        bool,
        typer.Option(
            "--grow",
            help="Begin on a part of a long file, which doubles: better within seconds, worse within minutes.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the graph and the start values.", min=0)] = 0,
    text: AsText = False,
    after: After = None,
    alphabet: Annotated[
        Path | None,
        typer.Option(help="File whose symbols the model shall know too.", exists=True, dir_okay=False),
    ] = None,
    context: Annotated[
        bool | None,
        typer.Option(
            "--context/--no-context",
            help="Mix the network with contexts, so that the file holds the training text. Default: the mixture, the "
            "network or contexts alone, whichever needs the fewest bits.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Go on from the output file, with its options; new, if given: --passes, --seconds, --jobs, --share, "
            "--after, --context, files."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, whatever a stopped fit has left beside the output.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn a file and write the model; the best by the validation part is kept.

    Then the network is mixed with contexts: what followed the last symbols, the word, the longest match. Logs and
    English text need that. The mixture, the network or contexts alone are kept, whichever need the fewest bits on the
    validation part, and where there is none, not the network, which is no measure of itself. With contexts the file
    holds the training text, packed; --no-context keeps the network alone.

    At the end, the bits per symbol of the validation part stand beside those of bzip2, xz and context tree weighting
    after the same training part; not so with --after, whose symbols they cannot single out, and with --folds.

    Checkpoints lie in a folder beside the output until it is written. After a kill or a failure the same command goes
    on from there. Ctrl-C saves what a network has learned, for --resume; a model that was there before stays, and the
    same command goes on.

    \b
    Examples:
      pathspace sequence fit log.txt -o log.safetensors --seconds 60
      pathspace sequence fit log.txt -o log.safetensors --seconds 120 --resume  # a minute more
      pathspace sequence fit book.txt --text --units 64 --restarts 8 --jobs 2
      pathspace sequence fit secret.txt -o small.safetensors --no-context
      pathspace sequence fit xor.txt -o xor.safetensors --after =
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        writable(output, file, validation, alphabet)
        if resume and not output.exists():
            raise ValueError(f"there is no {output} to go on from: leave out --resume, or give its --output")
        if ensemble > restarts:
            raise ValueError(
                f"the option --ensemble is {ensemble}: give at most the {restarts} of --restarts"
            )
        if restarts % folds or ensemble % folds:
            raise ValueError(
                f"--restarts {restarts} and --ensemble {ensemble} must be multiples of --folds {folds}: every fold has "
                "as many networks as the others"
            )
        if folds > 1 and (validation is not None or share):
            option = "--share" if validation is None else "--validation"
            raise ValueError(f"the --folds take turns as the validation part: leave out {option}")
        for option, name, names in (
            ("model", model, CLASSES),
            ("metric", metric, (None, *get_args(Metric))),
            ("writing", writing, get_args(WritingStep)),
        ):
            if name not in names:
                choices = ", ".join(filter(None, names))
                raise ValueError(f"unknown {option} {name!r} in --{option}, choose from {choices}")
        options = {
            "units": units,
            "connectivity": connectivity or None,
            "metric": metric,
            "writing": writing,
            "damping": damping,
            "reach": reach or None,
            "prior_writing": prior_writing,
            "prior_transition": prior_transition,
            "passes": PASSES if passes is None else passes,
            "seconds": seconds,
            "patience": patience or None,
            "grow": grow,
            "restarts": restarts,
            "heat": heat,
            "ensemble": ensemble,
            "folds": folds,
            "jobs": jobs,
            "seed": seed,
        }
        if resume:
            estimator = _network_of(output)
            asked = {
                name: value
                for name, value in [*options.items(), ("model", model)]
                if (source := command.get_parameter_source(name)) and source.name != "DEFAULT"
            }
            _check_resumed(estimator, output, text, asked)
            if passes is None and estimator.training_.passes < estimator.passes:
                passes = estimator.passes
            left = estimator.seconds is not None and estimator.training_.seconds < estimator.seconds
            if seconds is None and left:  # a budget that is spent would let no pass happen
                seconds = estimator.seconds
            estimator.set_params(passes=PASSES if passes is None else passes, seconds=seconds)
            told = estimator.told_
            context = told.get("context") if context is None else context
            after = told.get("after") if after is None else after
            if told.get("validation") and validation is None and share is None:
                # the last tenth of the file, in its place, has been learned
                raise ValueError(
                    f"the model in {output} was begun with a --validation file: give it again, or --share 0 for none"
                )
            first = 0.0 if told.get("validation") else told.get("share")
            if validation is None and share is not None and first is not None and share > first:
                raise ValueError(
                    f"--share {share:g} holds back text that the model in {output} has learned: give at most "
                    f"{first:g}, which it has not seen, or a --validation file"
                )
            share = told.get("share") if share is None else share
        else:
            estimator = CLASSES[model](**options)
        share = SHARE if share is None else share
        held_back = {"share": share, "validation": validation is not None}
        estimator.told_ = {"context": context, "after": after, **held_back}
        training_text = read_for(estimator, file) if resume else read(file, text)
        # folds take turns, and need no validation part of their own
        held: Text | float | None = (share or None) if folds == 1 else None
        if validation is not None:
            held = read(validation, isinstance(training_text, str))
        mask, held_mask = mask_after(training_text, after, file), None
        counted, held_counted = len(training_text) if mask is None else int(mask.sum()), 0
        if isinstance(held, str | bytes) and validation is not None:
            held_mask = mask_after(held, after, validation)
            held_counted = len(held) if held_mask is None else int(held_mask.sum())
        elif held is not None:
            size = int(len(training_text) * held)
            held_counted = size if mask is None else int(mask[len(mask) - size :].sum())
            counted -= held_counted
            if mask is not None and size and not (counted and held_counted):
                part = "training part" if held_counted else "last part, which is held out for validation,"
                raise ValueError(
                    f"no symbol of the {part} of {file} comes right after {after!r}, which --after names: give another "
                    "--share or a --validation file"
                )
        elif folds > 1:
            held_counted = counted
        known = None if alphabet is None else read(alphabet, isinstance(training_text, str))
        # the model of another fit, which only a whole one may replace
        replaces = not resume and output.is_file()
        begun = estimator.training_.passes if resume else 0
        again = "--resume" if resume else "the same command without --fresh" if fresh else "the same command"
        with beside(output, fresh) as checkpoint:
            if checkpoint is not None and is_begun(checkpoint) and not quiet:
                console.print(
                    f"going on from {checkpoint} (--fresh starts over)", highlight=False, markup=False
                )
            with shown("fit", console, quiet=quiet, bound="at most") as show:
                report = _FitReport(show, estimator.passes, seconds, max(counted, 1), held_counted)
                interrupted = False
                try:
                    estimator.fit(
                        training_text,
                        held,
                        mask=mask,
                        validation_mask=held_mask,
                        alphabet=known,
                        resume=resume,
                        report=report,
                        checkpoint=checkpoint,
                    )
                except KeyboardInterrupt:
                    if report.last is None or estimator.restarts > 1 or replaces:
                        going_on = checkpoint is not None and is_begun(checkpoint)
                        told = f"{again} goes on from its checkpoints" if going_on else "nothing is saved"
                        stays = f"{output} stays as it was, " if replaces else ""
                        told = f"interrupted: {stays}{told}"
                        console.print(told, highlight=False, markup=False, soft_wrap=True)
                        raise
                    fold = fold_of(estimator.alphabet_, training_text, held, mask, held_mask)
                    estimator.training_, interrupted = looked(report.last, fold.validation), True
                    console.print("interrupted: what has been learned is saved, go on with --resume")
                if resume and estimator.training_.passes == begun and not estimator.training_.broke_off:
                    mixes = "" if context is False else ", and the network is mixed as it was"
                    warnings.warn(
                        f"no pass was made{mixes}: {_what_ended(estimator)}", RuntimeWarning, stacklevel=1
                    )
                is_saved = False
                if checkpoint is not None and not replaces:
                    # mixing may be stopped; a device or a pipe is written to once
                    estimator.save(output)
                    is_saved = True
                    if (
                        resume or interrupted
                    ):  # --resume goes on from the output, and takes these for another fit's
                        clear(checkpoint)
            result = Result(output, estimator.training_, counted, held_counted, estimator.ensemble > 1)
            kept: SequenceModel | Mixed = estimator
            if context is not False:
                masks = {"mask": mask, "validation_mask": held_mask}
                try:
                    mixtures = mix(estimator, training_text, held, quiet, **masks)
                except KeyboardInterrupt:
                    if checkpoint is not None:
                        again = "--resume" if interrupted else again
                        holds = "holds the network alone" if is_saved else "stays as it was"
                        told = f"interrupted: {output} {holds}, {again} goes on to mix the network"
                        console.print(told, highlight=False, markup=False, soft_wrap=True)
                    raise
                result = result.beside(mixtures, context)
                kept = mixtures.get(result.kept, estimator)
            if kept is not estimator or not is_saved:
                kept.save(output)
        others = {}
        if folds == 1 and after is None and held_counted:
            if not quiet:
                console.print("setting it beside bzip2, xz and context trees", highlight=False)
            try:
                others = baseline_bits(*_parts(training_text, held))
            except KeyboardInterrupt:  # the model is written: say what it has come to
                result.say({}, as_json)
                raise
    result.say(others, as_json)


def _network_of(output: Path) -> SequenceModel:
    """Return the network of a model file, to go on with."""
    estimator = load(output)
    network = estimator.model if isinstance(estimator, Mixed) else estimator
    if network is None:
        raise ValueError(f"{output} holds contexts alone, and no network to go on with: leave out --resume")
    return network


def _what_ended(estimator: SequenceModel) -> str:
    """Say why a training goes no further, and what lets it."""
    training = estimator.training_
    if training.passes >= estimator.passes:
        return f"the model has made {training.passes} passes already: give more --passes"
    if estimator.seconds is not None and training.seconds >= estimator.seconds:
        return f"the model has had {training.seconds:.1f} seconds already: give more --seconds"
    return f"the validation part has not improved since pass {training.result_pass}, and --patience is spent"


def _check_resumed(estimator: SequenceModel, output: Path, text: bool, asked: dict[str, Any]) -> None:
    """Refuse options that were given and differ from those that the training was begun with."""
    metric = estimator.stored().settings.metric  # where the default was taken, its name
    begun = estimator.get_params() | {"model": estimator.kind, "metric": metric}
    for name, value in asked.items():
        if name not in ("passes", "seconds", "jobs") and value != begun[name]:
            shown, there = (0 if one is None else one for one in (value, begun[name]))
            raise ValueError(
                f"--{name.replace('_', '-')} {shown} is not what the model in {output} was begun with, {there}: leave "
                "it out, or begin anew without --resume"
            )
    if text and not isinstance(estimator.alphabet_.symbols, str):
        raise ValueError(
            f"the model in {output} reads bytes: leave out --text, or begin anew without --resume"
        )


def _parts(training_text: Text, held: Text | float | None) -> tuple[Text, Text]:
    """Return the held-out text, and what comes before it."""
    if isinstance(held, str | bytes):
        return held, training_text
    cut = len(training_text) - int(len(training_text) * (held or 0.0))
    return training_text[cut:], training_text[:cut]
