"""The command ``pathspace sequence fit``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from pathspace.cli.options import INTERRUPTED
from pathspace.sequences.checkpoints import beside, clear, is_begun
from pathspace.sequences.cli.console import console, errors, per_symbol
from pathspace.sequences.cli.files import (
    After,
    AsJson,
    AsText,
    InputPath,
    Kind,
    Quiet,
    kind_of,
    kind_read,
    may_become_model,
    standard_output,
    writable,
)
from pathspace.sequences.cli.fit_texts import SHARE, Choices, Texts
from pathspace.sequences.cli.gains import Enough, Gains
from pathspace.sequences.cli.result import Result, look_at_contexts, mix
from pathspace.sequences.cli.resumed import (
    PASSES,
    check_resumed,
    network_of,
    set_budget,
    what_ended,
)
from pathspace.sequences.cli.worth import baseline_bits
from pathspace.sequences.estimators import CLASSES
from pathspace.sequences.mixed import Mixed
from pathspace.sequences.passes import Metric, WritingStep
from pathspace.sequences.sequence_model import SequenceModel
from pathspace.sequences.training import Training, looked
from pathspace.tools.progress import shown

_LENGTHS = ("passes", "seconds", "patience", "restarts", "grow")
"""Options that say how long to train."""


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
        self._show = show
        self._passes = passes
        self._seconds = seconds
        self._symbols = symbols
        self._held = held
        self._number = 1
        self.last: Training | None = None
        self.gains: Gains | None = None

    def __call__(self, training: Training) -> None:
        if self.last is not None and training.passes <= self.last.passes:
            self._number += 1
        self.last = training
        done = training.passes / max(self._passes, 1)
        if self._seconds is not None:
            done = max(done, training.seconds / self._seconds if self._seconds else 1.0)
        state = f"network {self._number}  " if self._number > 1 else ""
        state += f"pass {training.passes}  {per_symbol(-training.log_likelihood / math.log(2), self._symbols):.4f}"
        if self._held and not math.isnan(training.validation_bits):  # parts of a text have no look
            state += f" train {per_symbol(training.validation_bits, self._held):.4f} valid"
        state += f" bits/symbol  rates {training.rate_w:.2g} {training.rate_tau:.2g}"
        self._show(min(done, 1.0), state)
        if self.gains is not None:
            self.gains.look(training)


def fit(
    command: typer.Context,
    file: InputPath,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Model file to write; -: standard output.",
            callback=standard_output,
        ),
    ] = Path("model.safetensors"),
    model: Annotated[str, typer.Option(help="Kind of network: pcnn, cnn or rnn.")] = "pcnn",
    units: Annotated[int, typer.Option(help="Hidden units.", min=1)] = 32,
    connectivity: Annotated[
        int, typer.Option(help="Edges out of each unit; 0: to every unit.", min=0)
    ] = 3,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric of transition steps: rbp, rutsd, rbp-qd, rutsd-qd, fb or bp; default rbp, for an RNN rbp-qd."
        ),
    ] = None,
    writing: Annotated[
        str, typer.Option(help="Rule of writing steps: qdh, dh, fisher or bp.")
    ] = "qdh",
    damping: Annotated[
        float, typer.Option(help="Added to the diagonal of the metric.", min=0)
    ] = 1.0,
    writing_damping: Annotated[
        float,
        typer.Option(help="Damping of writing steps, times the frequency of the symbol.", min=0),
    ] = 1.0,
    reach: Annotated[
        float,
        typer.Option(
            help="Largest change, in one step, of what a symbol adds to a unit; 0: no bound.", min=0
        ),
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
        int, typer.Option(help="Stop after this many passes without improvement; 0: never.", min=0)
    ] = 300,
    restarts: Annotated[
        int, typer.Option(help="Train this many networks and keep the best.", min=1)
    ] = 1,
    heat: Annotated[
        int,
        typer.Option(
            help="After this many passes end all restarts but the best quarter; 0: end none.",
            min=0,
        ),
    ] = 100,
    ensemble: Annotated[int, typer.Option(help="Restarts to merge into one model.", min=1)] = 1,
    folds: Annotated[
        int,
        typer.Option(
            help="Cut the file into this many parts that take turns as the validation part; 1: use the last tenth.",
            min=1,
        ),
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes for the restarts.", min=1)] = 1,
    grow: Annotated[
        bool,
        typer.Option(
            "--grow",
            help="Begin on a part of a long file, and double it. Better within seconds, worse within minutes.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the graph and the start values.", min=0)] = 0,
    text: AsText = False,
    tokens: Annotated[
        str | None,
        typer.Option(help="What a symbol is: bytes, characters, words or lines; default bytes."),
    ] = None,
    after: After = None,
    mask_numbers: Annotated[
        bool,
        typer.Option(
            "--mask-numbers",
            help="Read every number as 0, so that new numbers do not surprise; `lines` then does so too.",
        ),
    ] = False,
    alphabet: Annotated[
        Path | None,
        typer.Option(
            help="File with more symbols that the model has to know.", exists=True, dir_okay=False
        ),
    ] = None,
    context: Annotated[
        bool | None,
        typer.Option(
            "--context/--no-context",
            help="Keep the mixture with contexts, whose file holds the training text, or the network alone. Default: "
            "the mixture, the network or contexts, by the bits on the validation part.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Train the model in the output file further, with the options stored in it. May be given anew: "
            "--passes, --seconds, --jobs, --share, --after, --context and files."
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start over, and drop the checkpoints of a stopped fit."),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Learn a file and write the model.

    First a context model counts what followed the last symbols, the word and the longest match.
    This takes seconds, and is enough for most logs and English text. Then a network is trained and
    mixed with the contexts. The last tenth of the file is held out as the validation part. The
    model file keeps the mixture, the network or the contexts alone: the one that needs the fewest
    bits there. Without a validation part it keeps the contexts. With --folds it keeps the network
    if that needs fewer bits on the parts held out.

    With contexts the model file holds the training text, packed. --no-context keeps the network
    alone, without the text; --context always keeps the mixture.

    Without --passes, --seconds, --patience, --restarts and --grow the command decides when to stop.
    It looks after 25 passes and each time they have doubled, and stops when the network no longer
    saves the contexts 1 % of the bits of the validation part.

    At the end it prints bits per symbol of the validation part beside those of bzip2, xz and
    context tree weighting (not with --after or --folds).

    With --tokens a symbol is a word or a line, and so are predictions and samples. Use lines for a
    file with one event name on each line.

    After a kill or a failure the same command resumes from a folder of checkpoints beside the
    output. Ctrl-C saves the network so far, for --resume; an older model file stays. A file that is
    no model is never overwritten.

    \b
    Examples:
      pathspace sequence fit log.txt -o log.safetensors --seconds 60
      pathspace sequence fit log.txt -o log.safetensors --seconds 120 --resume  # a minute more
      pathspace sequence fit book.txt --text --units 64 --restarts 8 --jobs 2
      pathspace sequence fit secret.txt -o small.safetensors --no-context
      pathspace sequence fit xor.txt -o xor.safetensors --after =
      pathspace sequence fit events.txt -o events.safetensors --tokens lines
      pathspace sequence fit log.txt -o lines.safetensors --mask-numbers  # for `pathspace sequence lines`
    """  # noqa: D301 (click wants the character, not the letters)
    with errors():
        writable(output, file, validation, alphabet)
        _check_output(output, resume)
        _check_folds(restarts, ensemble, folds, validation, share)
        _check_names(model, metric, writing)
        kind = kind_of(tokens, text)
        options = {
            "units": units,
            "connectivity": connectivity or None,
            "metric": metric,
            "writing": writing,
            "damping": damping,
            "writing_damping": writing_damping,
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
        choices = Choices(context, after, share, validation is not None, mask_numbers)
        if resume:
            asked = _asked(command, {**options, "model": model})
            network = network_of(output)
            check_resumed(network, output, _given_kind(tokens, text), asked)
            set_budget(network, passes, seconds)
            choices = choices.over(network.told_, output)
            kind = kind_read(network)
        else:
            network = CLASSES[model](**options)
        choices = choices.settled()
        network.told_ = asdict(choices)
        texts = Texts.read(file, kind, choices, validation, alphabet, folds)
        # the model of another fit, which only a whole one may replace
        replaces = not resume and output.is_file()
        with beside(output, fresh) as checkpoint:
            place = _Place(output, checkpoint, resume, fresh, replaces)
            contexts = None
            if choices.context is not False:
                contexts = look_at_contexts(network, texts, quiet, fitted=resume)
            gains = None if resume else _gains(command, network, contexts, texts)
            interrupted = _train(network, texts, place, choices.context, quiet, gains)
            result = _mix(network, texts, place, contexts, gains, quiet, interrupted)
        is_comparable = folds == 1 and choices.after is None
        others = _others(texts, result, quiet, as_json) if is_comparable else {}
    result.say(others, as_json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_output(output: Path, resume: bool) -> None:
    """Refuse a file that holds anything but a model, or none to go on from."""
    if not resume:
        may_become_model(output)
    elif not output.exists():
        raise ValueError(
            f"there is no {output} to go on from: leave out --resume, or give its --output"
        )


def _given_kind(tokens: str | None, text: bool) -> Kind | None:
    """Return the kind of symbols that the options ask for; None if they do not."""
    return kind_of(tokens, text) if text or tokens else None


def _gains(
    command: typer.Context, network: SequenceModel, contexts: Mixed | None, texts: Texts
) -> Gains | None:
    """Return what tells when to stop a fit whose length was not asked for; None if nothing can."""
    if contexts is None or network.folds > 1 or not texts.held_counted:
        return None
    if _asked(command, dict.fromkeys(_LENGTHS)):
        return None
    return Gains(contexts, texts)


def _others(texts: Texts, result: Result, quiet: bool, as_json: bool) -> dict[str, float]:
    """Return the bits per symbol of the validation part by compressors; none without such a part.

    Raises:
        KeyboardInterrupt: after the result was said, since the model is written.
    """
    if not texts.held_counted:
        return {}
    if not quiet:
        console.print("setting it beside bzip2, xz and context trees", highlight=False)
    try:
        return baseline_bits(*texts.parts())
    except KeyboardInterrupt:
        replace(result, interrupted=True).say({}, as_json)
        raise


def _check_folds(
    restarts: int, ensemble: int, folds: int, validation: Path | None, share: float | None
) -> None:
    """Refuse numbers of networks that do not fit together."""
    if ensemble > restarts:
        raise ValueError(
            f"--ensemble is {ensemble}, and --restarts {restarts}: give --restarts {ensemble} or more"
        )
    if restarts % folds or ensemble % folds:
        raise ValueError(
            f"--restarts {restarts} and --ensemble {ensemble} must be multiples of --folds {folds}, as every fold has "
            f"the same number of networks: give, for example, --restarts {folds} --ensemble {folds}"
        )
    if folds > 1 and (validation is not None or share):
        option = "--share" if validation is None else "--validation"
        raise ValueError(f"the --folds take turns as the validation part: leave out {option}")


def _check_names(model: str, metric: str | None, writing: str) -> None:
    """Refuse names that there are not."""
    for option, name, names in (
        ("model", model, CLASSES),
        ("metric", metric, (None, *get_args(Metric))),
        ("writing", writing, get_args(WritingStep)),
    ):
        if name not in names:
            choices = ", ".join(filter(None, names))
            raise ValueError(f"unknown {option} {name!r} in --{option}, choose from {choices}")


def _asked(command: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    asked = {}
    for name, value in options.items():
        source = command.get_parameter_source(name)
        if source and source.name != "DEFAULT":
            asked[name] = value
    return asked


@dataclass(frozen=True)
class _Place:
    """Files of a fit, and how it goes on.

    Args:
        output: the model file.
        checkpoint: the folder of checkpoints; None beside a device or a pipe.
        resume: whether a model that is there goes on.
        fresh: whether what was begun there is left.
        replaces: whether it takes the place of the model of another fit.
    """

    output: Path
    checkpoint: Path | None
    resume: bool
    fresh: bool
    replaces: bool

    @property
    def begun(self) -> bool:
        return self.checkpoint is not None and is_begun(self.checkpoint)

    @property
    def saves_first(self) -> bool:
        """True if the bare network is saved first, so that interrupting the mixing loses nothing. Never for a pipe."""
        return self.checkpoint is not None and not self.replaces

    @property
    def again(self) -> str:
        """The command that goes on with this one."""
        if self.resume:
            return "--resume"
        return "the same command without --fresh" if self.fresh else "the same command"

    @property
    def after_interruption(self) -> str:
        """The words of a message about a fit that ends with nothing to save."""
        told = "nothing is saved"
        if self.begun:
            told = f"{self.again} goes on from its checkpoints"
        return f"{self.output} stays as it was, {told}" if self.replaces else told


def _train(
    network: SequenceModel,
    texts: Texts,
    place: _Place,
    context: bool | None,
    quiet: bool,
    gains: Gains | None,
) -> bool:
    """Train and save the network, and say whether that was interrupted with something to save.

    With gains the training ends where they do.

    Raises:
        KeyboardInterrupt: it was, with nothing to save.
    """
    if place.begun and not quiet:
        _say(f"going on from {place.checkpoint} (--fresh starts over)")
    begun = network.training_.passes if place.resume else 0
    with shown("fit", console, quiet=quiet, bound="at most") as show:
        report = _FitReport(
            show, network.passes, network.seconds, max(texts.counted, 1), texts.held_counted
        )
        report.gains = gains
        interrupted = _fit_network(network, texts, place, quiet, report)
        if place.resume and network.training_.passes == begun:
            _warn_of_no_pass(network, is_mixed=context is not False and begun > 0)
        if place.saves_first and place.checkpoint is not None:
            network.save(place.output)
            if place.resume or interrupted:
                # --resume goes on from the output, and takes these for another fit's
                clear(place.checkpoint)
    return interrupted


def _warn_of_no_pass(network: SequenceModel, *, is_mixed: bool) -> None:
    if network.training_.broke_off:
        return
    mixes = ", and the network is mixed as it was" if is_mixed else ""
    warnings.warn(f"no pass was made{mixes}: {what_ended(network)}", RuntimeWarning, stacklevel=2)


def _fit_network(
    network: SequenceModel, texts: Texts, place: _Place, quiet: bool, report: _FitReport
) -> bool:
    """Train the network, and return whether that was interrupted with something to save."""
    try:
        network.fit(
            texts.text,
            texts.held,
            alphabet=texts.known,
            tokens=texts.mode,
            resume=place.resume,
            report=report,
            checkpoint=place.checkpoint,
            **texts.masks,
        )
    except Enough as enough:
        assert report.last is not None
        network.training_ = looked(report.last, texts.fold(network.alphabet_).validation)
        if not quiet:
            _say(str(enough))
    except KeyboardInterrupt:
        if report.last is None or network.restarts > 1 or place.replaces:
            _say(f"interrupted: {place.after_interruption}")
            raise
        fold = texts.fold(network.alphabet_)
        network.training_ = looked(report.last, fold.validation)
        _say("interrupted: what has been learned is saved, go on with --resume")
        return True
    return False


def _mix(
    network: SequenceModel,
    texts: Texts,
    place: _Place,
    contexts: Mixed | None,
    gains: Gains | None,
    quiet: bool,
    interrupted: bool,
) -> Result:
    """Mix the network with contexts unless that is refused, save what is kept, and return what the fit has come to."""
    counts = texts.counted, texts.held_counted
    result = Result(
        place.output, network.training_, *counts, network.ensemble > 1, interrupted=interrupted
    )
    kept: SequenceModel | Mixed = network
    if contexts is not None:
        context = network.told_["context"]
        # without a validation part of its own nothing tells whether a mixture is better, and it is
        # not kept
        measured = texts.held is not None and (gains is None or gains.has_any)
        try:
            mixtures = mix(network, texts, contexts, quiet, mixed=bool(context) or measured)
        except KeyboardInterrupt:
            if place.checkpoint is not None:
                again = "--resume" if interrupted else place.again
                holds = "holds the network alone" if place.saves_first else "stays as it was"
                _say(f"interrupted: {place.output} {holds}, {again} goes on to mix the network")
            raise
        result = result.beside(mixtures, context)
        kept = mixtures.get(result.kept, network)
    if kept is not network or not place.saves_first:
        kept.save(place.output)
    return result


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
