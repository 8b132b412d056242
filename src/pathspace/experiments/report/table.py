"""The table of a comparison in words, and what has to be known in order to trust it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from pathspace.experiments.compare import Comparison, Row
from pathspace.experiments.methods import METHODS, SKELETON_ONES, are_one_function
from pathspace.experiments.recipes import Published
from pathspace.experiments.report import NOTHING, Table, number_label, titled_table
from pathspace.experiments.report.statistics import Interval, rank, t_interval
from pathspace.experiments.settings import Settings

# Per cents of some thousand sequences have two decimals; squared errors may be of any size.
DIGITS = {"error, %": ".2f", "bits per character": ".3f", "perplexity": ".1f"}


def digits_of(metric: str) -> str:
    """Return the format of an error."""
    return DIGITS.get(metric, ".2e")


def build_table(comparison: Comparison, published: Published | None = None) -> Table:
    """Put a comparison into words, with published numbers beside them."""
    beside = [_beside(comparison, row, published) for row in comparison.rows]
    title = ""
    if published is not None and not set(beside) <= {NOTHING}:
        title = _published_title(comparison, published)
    rows = [
        _cells(comparison, row) | ({title: words} if title else {})
        for row, words in zip(comparison.rows, beside, strict=True)
    ]
    return titled_table(comparison.task_description, rows, notes(comparison), _marks(comparison))


def _cells(comparison: Comparison, row: Row) -> dict[str, str]:
    """Return the cells of a row by the titles of their columns."""
    settings = comparison.settings
    several = len(settings.starts) > 1  # else there is nothing to tell apart
    cells = {"optimizer": METHODS[row.method].label}
    if several:
        cells["start"] = start_label(comparison, row)
    rate = "rate" if settings.weight_decays == (0.0,) else "rate, decay"
    cells[rate] = rate_label(comparison, row)
    cells[f"test {comparison.metric}"] = error_label(comparison, row)
    cells["seconds"] = f"{row.mean_seconds:.2f}"
    if several:
        cells["same curve"] = {None: NOTHING, 0.0: "yes"}.get(row.difference, "no")
        cells["difference"] = difference_label(row.difference)
    return cells


def _marks(comparison: Comparison) -> list[dict[str, str]]:
    """Mark the errors of rows of the same start that lie apart, and whether a curve is the same, by column."""
    marks: list[dict[str, str]] = []
    for row in comparison.rows:
        mark = "same" if row.difference == 0.0 else "differs"
        known = row.difference is not None
        marks.append({"same curve": mark, "difference": mark} if known else {})
    for start in comparison.settings.starts:
        here = [place for place, row in enumerate(comparison.rows) if row.start == start]
        standings = rank([error_interval(comparison.rows[place]) for place in here])
        if {"worse", "diverged"}.isdisjoint(standings):
            continue  # nothing is shown to be good or bad
        for place, standing in zip(here, standings, strict=True):
            good = standing in ("best", "level")
            marks[place][f"test {comparison.metric}"] = "good" if good else "bad"
    return marks


def start_label(comparison: Comparison, row: Row) -> str:
    """Name the start of a row, and whether it runs at a rate of its own."""
    own = row.start != comparison.settings.starts[0] and row.rate_chosen_from == row.start
    return f"{row.start}, own rate" if own else row.start


def rate_label(comparison: Comparison, row: Row) -> str:
    """Print a learning rate; a star marks the edge of the grid."""
    choice = comparison.choices.get((row.method, row.rate_chosen_from))
    decay = f", {row.weight_decay:g}" if comparison.settings.weight_decays != (0.0,) else ""
    return f"{row.learning_rate:g}{'*' if choice is not None and choice.at_edge else ''}{decay}"


def error_label(comparison: Comparison, row: Row) -> str:
    """Print the mean test error ± its deviation, or how many runs diverged."""
    if row.diverged:
        return share_label("diverged", row.diverged, len(row.runs))
    return number_label(row.mean_test_error, digits_of(comparison.metric), row.test_error_deviation)


def share_label(word: str, some: int, number: int) -> str:
    """Print what happened to some runs, and to how many where not to all."""
    return word if some == number else f"{word} ({some} of {number})"


def error_interval(row: Row) -> Interval | None:
    """Return the interval of the mean test error, infinite for one seed; None where a run has no test error."""
    errors = [run.test_error for run in row.runs if run.test_error is not None]
    return t_interval(errors) if errors and len(errors) == len(row.runs) else None


def difference_label(difference: float | None) -> str:
    """Print the largest difference of two curves; exactly 0.0 only if it is."""
    if difference is None:
        return NOTHING
    if difference == 0.0:
        return "0.0"
    return "one diverged" if math.isinf(difference) else f"{difference:.2g}"


def early_end(settings: Settings) -> str:
    """Return the words that say when a run ends before its last epoch; empty where none does."""
    if not settings.stop_error:
        return ""
    return f", or the first with a validation error below {settings.stop_error:g}"


def notes(comparison: Comparison) -> tuple[str, ...]:
    """Say what a reader has to know in order to trust the table."""
    settings = comparison.settings
    over = f"mean ± standard deviation over {settings.seeds} seeds, " if settings.seeds > 1 else ""
    sentences = [
        f"Test error: {over}after {count(settings.epochs, 'epoch')}{early_end(settings)}. "
        f"Seconds: training steps of one run, {count(settings.threads, 'thread')}."
    ]
    sentences += _weights_note(comparison)
    sentences += _rates_note(comparison)
    if settings.schedule != "constant" or settings.warmup:
        sentences.append(
            f"Schedule of the learning rate: {settings.schedule}, after {100 * settings.warmup:g} % warm-up."
        )
    if len(settings.starts) > 1:
        sentences += _starts_note(settings)
    if settings.verified_seeds:
        shorter = "shorter " if 0 < settings.tuning_epochs < settings.epochs else ""
        sentences.append(
            f"Runs that a symmetry makes equal were done once, after {shorter}runs of "
            f"{count(settings.tuning_epochs or settings.epochs, 'epoch')} had shown that they are equal."
        )
    sentences += _choices_note(comparison)
    sentences += devices_note(comparison)
    return tuple(sentences)


def _rates_note(comparison: Comparison) -> list[str]:
    """Say how learning rates and weight decays were chosen."""
    settings = comparison.settings
    if not comparison.tuning:
        return [given_rates(settings)] if comparison.choices else []
    rates = numbers(sorted(settings.learning_rates))
    length = f", {count(settings.tuning_epochs, 'epoch')}" if settings.tuning_epochs else ""
    sentence = (
        "Learning rates were chosen on the validation split, by the same grid for every method and "
        f"start ({rates}; {count(settings.tuning_seeds, 'other seed')}{length})."
    )
    if settings.tuning == "one standard error" and settings.tuning_seeds > 1:
        sentence += " The least rate within one standard error of the best."
    sentences = [sentence, *own_grids(settings)]
    if settings.weight_decays != (0.0,):
        decays = numbers(settings.weight_decays)
        sentences.append(f"Weight decays, chosen along with the rates: {decays}.")
    return sentences


def _starts_note(settings: Settings) -> list[str]:
    """Say how several starts differ."""
    functions = f"From {SKELETON_ONES} the network computes another function"
    if are_one_function(settings.starts):
        functions = "Every start is the same function"
    sentences = [
        f"{functions}, and a seed gives the same batches to all. Difference: the largest one between the "
        f"training-loss curves from this start and from {settings.starts[0]}, over all steps, with the same learning "
        "rate and seed."
    ]
    if any(METHODS[name].normalizes for name in settings.methods):
        sentences.append(
            "Normalizing a network makes it another function, from every start another one."
        )
    if "rescaled" in settings.starts:
        sentences.append(rescaled_by(settings))
    return sentences


def rescaled_by(settings: Settings) -> str:
    """Say what the rescaled start is."""
    factor, k = settings.rescale_factor, settings.rescale_exponent
    span = f"power of two between 2^-{k} and 2^{k}"
    if factor:
        span = f"factor between 1/{factor:g} and {factor:g}"
    return f"Rescaled: the weights of each unit of the balanced start times a random {span}."


def _choices_note(comparison: Comparison) -> list[str]:
    """Say where a chosen rate may not be the best one."""
    sentences = []
    if any(choice.at_edge for choice in comparison.choices.values()):
        sentences.append("* at the edge of the grid: a wider grid may do better.")
    for (method, start), choice in comparison.choices.items():
        if choice.all_diverged:
            sentences.append(
                f"{METHODS[method].label}, {start}: every learning rate diverged in validation; the smallest is shown."
            )
    return sentences


def own_grids(settings: Settings) -> list[str]:
    """Name the grids of the methods that have one of their own."""
    labels: dict[tuple[float, ...], list[str]] = {}
    for name in settings.methods:
        if name in settings.method_rates:
            labels.setdefault(settings.rates_of(name), []).append(METHODS[name].label)
    told = (f"{'; '.join(names)}: {numbers(sorted(rates))}." for rates, names in labels.items())
    return [f"A grid of its own, of as many rates, has: {' '.join(told)}"] if labels else []


def numbers(values: Iterable[float]) -> str:
    """Print numbers between commas."""
    return ", ".join(f"{value:g}" for value in values)


def given_rates(settings: Settings) -> str:
    """Name the one rate of all methods, and of those that have one of their own."""
    own = [
        f"{METHODS[name].label}: {settings.rates_of(name)[0]:g}"
        for name in settings.methods
        if name in settings.method_rates
    ]
    shared = [f"{settings.learning_rates[0]:g}"] if len(own) < len(settings.methods) else []
    return f"Learning rates were given: {'; '.join([*shared, *own])}."


def count(number: int, thing: str) -> str:
    """Put a number before a word, which takes its plural."""
    return f"{number} {thing}{'s' * (number != 1)}"


def _weights_note(comparison: Comparison) -> list[str]:
    """Name the number of weights, and the methods whose model has another one than that of the settings."""
    methods: dict[int, list[str]] = {}
    for name, count in comparison.weights.items():
        methods.setdefault(count, []).append(METHODS[name].label)
    if not methods:
        return []
    most = max(methods, key=lambda count: len(methods[count]))
    others = [
        f"{', '.join(labels)}: {count:,}." for count, labels in methods.items() if count != most
    ]
    return [" ".join([f"Weights: {most:,}.", *others])]


def devices_note(comparison: Comparison) -> list[str]:
    """Say where runs were computed, if not all by one process on the processor."""
    devices = Counter(run.device for run in [*comparison.tuning, *comparison.runs])
    if set(devices) <= {"cpu"}:
        return []
    told = "; ".join(f"{device} ({count(number, 'run')})" for device, number in devices.items())
    sentence = f"Computed on: {told}."
    if len(devices) > 1:
        sentence += " Between devices rounding differs and seconds cannot be compared."
    return [sentence]


def _beside(comparison: Comparison, row: Row, published: Published | None) -> str:
    # Papers start from one initialisation: their numbers belong beside the first start only.
    if published is None or row.start != comparison.settings.starts[0]:
        return NOTHING
    result = published.result(comparison.settings, row.method)
    return NOTHING if result is None else result.words


def _published_title(comparison: Comparison, published: Published) -> str:
    """Head the published column with our share of what the paper took: whoever reads a number reads that."""
    settings = comparison.settings
    paper = published.protocol(settings)
    size = settings.task_options.get("train_size")
    if size == 0:  # all of it
        data = "all of its data"
    elif paper.train_size is None or not isinstance(size, int):
        data = "its data: not given"
    else:
        data = f"{100 * size / paper.train_size:.3g} % of its data"
    epochs = f"{settings.epochs} of {paper.epochs or '?'} epochs"
    seeds = f"{len(comparison.rows[0].runs)} of {paper.seeds or '?'} seeds"
    return "\n".join(("published;", "ours has", data, epochs, seeds))
