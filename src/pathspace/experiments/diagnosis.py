"""The commands `pathspace paths` and `check-scale`: a model in path space, and its distance from balance.

Letters: e = (u -> v) a weight, A_u and B_v the products of weights along the skeleton into u and
out of v.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.utils import _pytree as pytree

from pathspace import paths
from pathspace.experiments.errors import ConfigurationError, unknown_name
from pathspace.experiments.model_source import in_words_of_commands, load_model, trace_model
from pathspace.experiments.storage import finite, picture_file, write_picture
from pathspace.experiments.terminal import output_console, print_json, print_line
from pathspace.network import Network, UntraceableError
from pathspace.network.call import arguments_in
from pathspace.network.program import told
from pathspace.paths.listing.listing import count_in_words
from pathspace.paths.space.condensation import cover
from pathspace.paths.space.skeleton import Rule, Skeleton
from pathspace.rescaling.imbalance import imbalance
from pathspace.tools.progress import steps_shown

WRAPPERS = ("module.", "_orig_mod.")
"""What data parallelism and `torch.compile` put before the names in a state dict."""

NONE = "–"  # noqa: RUF001 (an en dash marks an empty cell)
LARGEST_JACOBIAN = 20_000_000  # numbers in a matrix whose rank is computed


RULES: tuple[Rule, ...] = ("largest", "cyclic", "random")


@dataclass(frozen=True)
class PathSummary:
    """Figures of path space for a model: classes, paths and degrees of freedom.

    Attributes:
        weights: Elements of its parameters that are edges.
        outside: Elements of its other parameters.
        classes: Unit classes.
        paths: Paths of the network written out over time and positions, or None where it cannot be.
        basis_paths: How many values determine those of all paths; None where the network has no
            such basis.
        rank: Of the path-Jacobian, from all paths; None where it was not computed.
        degrees_of_freedom: Weights minus classes, of those on a path.
        unused: Weights on no path.
        examples: How many examples dead units were looked for on.
        examples_used: How many of them the following number comes from.
        degrees_on_data: Rank of the outputs' derivative over these; None where the matrix is too
            large.
        derivatives: Rows of that matrix, an upper bound of its rank.
        dead_units: Classes through which nothing flows on any example.
        incomplete: Classes without skeleton edges.
        multipliers: Smallest, middle and largest 1 / (A_u B_v)^2 over weights outside the skeleton;
            None where the network has no basis.
        cuts: Where the network is cut, a line for each operation and place.
        no_paths: Why the network was not written out, or None.
        no_rank: Why the rank was not computed, or None.
    """

    weights: int
    outside: int
    classes: int
    paths: int | None = field(default=None, kw_only=True)
    basis_paths: int | None
    rank: int | None = field(default=None, kw_only=True)
    degrees_of_freedom: int
    unused: int
    examples: int
    examples_used: int
    degrees_on_data: int | None
    derivatives: int
    dead_units: int
    incomplete: int
    multipliers: tuple[float, float, float] | None
    cuts: tuple[str, ...] = ()
    no_paths: str | None = None
    no_rank: str | None = None


def summarize(
    model: nn.Module,
    examples: Any,
    *,
    rule: Rule = "largest",
    limit: int = 10_000,
    seed: int = 0,
    begin: Callable[[str], object] = lambda _: None,
) -> tuple[PathSummary, Network, Skeleton]:
    """Trace a model and count; returns the numbers, the traced network and its skeleton.

    Args:
        model: The model.
        examples: A batch of what it is called with.
        rule: How skeleton edges are chosen.
        limit: How many paths may be listed for the rank.
        seed: For the rule `"random"`.
        begin: Is called with the name of each step as it begins; by default nothing is shown.
    """
    begin("Tracing the model")
    network, outputs = _traced(model, examples)
    derivatives = sum(t.numel() for t in outputs)
    count = _count(network, examples)
    if not count or not all(t.isfinite().all() for t in outputs):
        raise ConfigurationError(
            "The model's outputs are not finite, or there are none: check its weights, and give one example at least."
        )
    begin("Choosing the skeleton")
    skeleton = paths.skeleton(network, rule, generator=torch.Generator().manual_seed(seed))
    graph = paths.reduction_graph(network)
    begin("Writing out the paths")
    written = _written_out(network, graph.num_edges, limit)
    begin("Counting degrees of freedom")
    on_a_path = paths.used_edges(network, graph)
    without_basis = graph.signed or bool(network.tape.product)
    multipliers = None if without_basis else _multipliers(network, skeleton, on_a_path)
    # a few times as many derivatives as weights are enough, and quick
    enough = min(count, -(-3 * graph.num_edges * count // max(1, derivatives)))
    some = _first(network, examples, enough)
    used = _count(network, some)
    derivatives = derivatives * used // count
    small = derivatives * graph.num_edges <= LARGEST_JACOBIAN // 4
    summary = PathSummary(
        weights=graph.num_edges,
        outside=sum(model.get_parameter(name).numel() for name in network.outside),
        classes=graph.num_classes,
        basis_paths=None if without_basis else len(paths.basis_paths(network, skeleton)),
        degrees_of_freedom=paths.degrees_of_freedom(network),
        unused=int((~on_a_path).sum()),
        examples=count,
        examples_used=used,
        degrees_on_data=paths.degrees_of_freedom(network, some) if small else None,
        derivatives=derivatives,
        dead_units=int(paths.dead_units(network, examples).sum()),
        incomplete=len(skeleton.incomplete) if not without_basis else 0,
        multipliers=multipliers,
        cuts=tuple(told(network.cuts)),
        **written,
    )
    return summary, network, skeleton


def _traced(model: nn.Module, examples: Any) -> tuple[Network, list[Tensor]]:
    """Trace a model, and call it; returns the network and the model's outputs."""
    try:
        network = trace_model(model, examples)
        if not network.parameters:
            raise ConfigurationError(
                "The model has no path: all of its parameters stand at operations that are cut."
            )
        if any(p.is_meta for p in network.parameters.values()):
            raise ConfigurationError("The model is on the meta device: build it with values.")
        args, kwargs = arguments_in(examples)
        with torch.no_grad():
            return network, network.returned(model(*args, **kwargs))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(in_words_of_commands(error, examples)) from error
    except RuntimeError as error:  # the model's own, from a forward pass
        said = in_words_of_commands(error, examples)
        raise ConfigurationError(f"The model does not take such an example: {said}") from error


def _written_out(network: Network, edges: int, limit: int) -> dict[str, Any]:
    """Return those fields of a summary that say how many paths there are, and the rank of their Jacobian."""
    try:
        unrolled = paths.unroll(network)
    except UntraceableError as error:
        reason = f"{error.operation!r}: {error.reason}"
        return {"no_paths": reason, "no_rank": "paths are not written out"}
    number = unrolled.num_paths
    if number > limit:
        return {"paths": number, "no_rank": f"more than {limit:,} paths (--limit)"}
    if number * edges > LARGEST_JACOBIAN:
        return {"paths": number, "no_rank": "the path-Jacobian is too large"}
    listed = paths.enumerate_paths(network, limit, graph=unrolled)
    return {"paths": number, "rank": paths.path_rank(paths.path_jacobian(network, listed))}


def _count(network: Network, examples: Any) -> int:
    batch = network.call.batch_dim
    first = next(t for t in pytree.tree_leaves(examples) if isinstance(t, Tensor))
    return 1 if batch is None else first.shape[batch]


def _first(network: Network, examples: Any, count: int) -> Any:
    """Return so many examples of a batch; all where they are no single tensor."""
    batch = network.call.batch_dim
    if batch is None or not isinstance(examples, Tensor):
        return examples
    return examples.narrow(batch, 0, count)


def _multipliers(
    network: Network, skeleton: Skeleton, on_a_path: Tensor
) -> tuple[float, float, float] | None:
    """Smallest, middle and largest of 1 / (A_u B_v)^2: what a unit step of e in path space is in its weight."""
    graph = skeleton.graph
    products = skeleton.products(network.parameters).cpu()
    a, b = (products[cover(node, graph.num_classes)] for node in (graph.source, -graph.target))
    chosen = torch.zeros(graph.num_edges, dtype=torch.bool)
    chosen[skeleton.edges[skeleton.edges >= 0]] = True
    values = (a * b)[~chosen & on_a_path & (a * b != 0)].square().reciprocal()
    if not values.numel():
        return None
    return float(values.min()), float(values.median()), float(values.max())


def print_summary(title: str, summary: PathSummary, console: Console) -> None:
    """Print a summary as a table of two columns."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("what it is", style="dim")
    for row in _rows(summary):
        table.add_row(*map(escape, row))
    console.print(table)


def _rows(summary: PathSummary) -> list[tuple[str, str, str]]:
    paths_are = "from inputs to outputs, written out over time and positions"
    if summary.no_paths is not None:
        paths_are = f"not written out; {summary.no_paths}"
    rank_is = "of the path-Jacobian, from all paths"
    if summary.no_rank is not None:
        rank_is = f"not computed: {summary.no_rank}"
    degrees_are = "rank of the outputs' derivative"
    if summary.degrees_on_data == summary.derivatives:
        degrees_are = "at most that many"
    degrees_are += f": {summary.examples_used} examples, {summary.derivatives:,} outputs"
    of_basis = "weights - classes, of those on a path"
    dead_are = f"classes that say nothing on {summary.examples} examples"
    all_paths = NONE if summary.paths is None else count_in_words(summary.paths)
    rows = [
        ("weights", _number(summary.weights), "edges of the reduction graph"),
        ("unit classes", _number(summary.classes), "its nodes; what may be rescaled"),
        ("paths", all_paths, paths_are),
        ("basis paths", _number(summary.basis_paths), "their values determine all others"),
        ("rank", _number(summary.rank), rank_is),
        ("degrees of freedom", _number(summary.degrees_of_freedom), of_basis),
        ("degrees on the data", _number(summary.degrees_on_data), degrees_are),
        ("dead units", _number(summary.dead_units), dead_are),
    ]
    return rows + _rows_of_the_rest(summary)


def _rows_of_the_rest(summary: PathSummary) -> list[tuple[str, str, str]]:
    """Return rows about what is not covered, and about G-SGD, where there is anything to say."""
    rows = []
    if summary.unused:
        rows.append(("unused weights", _number(summary.unused), "on no path"))
    if summary.outside:
        plain = "no edges; they take the plain rule"
        rows.append(("other weights", _number(summary.outside), plain))
    what = "what enters counts as an output, what leaves as an input"
    for line in summary.cuts:
        rows.append((f"cut at {line}", "", what))
        what = ""
    if summary.incomplete:
        without = "without a skeleton edge in or out"
        rows.append(("incomplete classes", _number(summary.incomplete), without))
    if summary.multipliers is not None:
        low, middle, high = summary.multipliers
        what = f"1 / (A B)^2 outside the skeleton; median {middle:.2g}"
        rows.append(("multipliers", f"{low:.2g} to {high:.2g}", what))
    return rows


def _number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


@dataclass(frozen=True)
class ModelRequest:
    """A model that a command looks at, and where its findings go.

    Attributes:
        source, shape, seed: See `model_source.load_model`.
        picture: A PNG file to be drawn; None for none.
        as_json: Whether the findings are printed as JSON.
        quiet: Whether no step is shown.
    """

    source: str
    shape: Sequence[int] | None
    seed: int
    picture: Path | None
    as_json: bool
    quiet: bool

    @contextmanager
    def steps(self) -> Iterator[Callable[[str], None]]:
        """Give the function that shows a step of the command; what a model prints meanwhile is no JSON."""
        with (
            steps_shown(Console(stderr=True), quiet=self.quiet) as begin,
            redirect_stdout(sys.stderr if self.as_json else sys.stdout),
            warnings.catch_warnings(),
        ):
            begin("Loading the model")
            yield begin

    def load(self) -> tuple[nn.Module, Any]:
        """Return the model and examples for it."""
        return load_model(self.source, self.shape, self.seed)


def _shown_as_a_line(message: Warning | str, *_: Any) -> None:
    """Show a warning without its place in the library's code, which tells nobody anything."""
    print(f"Warning: {message}", file=sys.stderr)


def run_paths(asked: ModelRequest, *, rule: str, limit: int) -> None:
    """Do what `pathspace paths` was asked for; see there."""
    if rule not in RULES:
        raise unknown_name("rule", rule, RULES, "--rule")
    file = picture_file(asked.picture)
    with asked.steps() as begin:
        warnings.showwarning = _shown_as_a_line
        model, examples = asked.load()
        summary, network, skeleton = summarize(
            model, examples, rule=cast("Rule", rule), limit=limit, seed=asked.seed, begin=begin
        )
    if file is not None:
        from pathspace.experiments.report.reduction_figure import draw_reduction

        write_picture(file, draw_reduction(network, skeleton, asked.source))
    if asked.as_json:
        content = {"model": asked.source, "rule": rule, **asdict(summary)}
        if summary.multipliers is not None:
            content["multipliers"] = [finite(value) for value in summary.multipliers]
        print_json({**content, "picture": asked.picture and str(asked.picture)})
        return
    console = output_console()
    title = f"{asked.source}: paths, with the skeleton of the rule {rule!r}"
    print_summary(title, summary, console)
    if asked.picture is not None:
        print_line(console, f"Picture: {asked.picture}")


def run_check_scale(asked: ModelRequest, *, weights: Path | None) -> None:
    """Do what `pathspace check-scale` was asked for; see there."""
    file = picture_file(asked.picture)
    with asked.steps() as begin:
        warnings.simplefilter("ignore")
        model, examples = asked.load()
        if weights is not None:
            _load(model, weights)
        try:
            begin("Tracing the model")
            network = trace_model(model, examples)
            begin("Measuring the scales")
            found = imbalance(network)
        # some errors are the model's own, from a forward pass
        except (ValueError, TypeError, IndexError, RuntimeError, FloatingPointError) as error:
            said = in_words_of_commands(error, examples)
            raise ConfigurationError(f"{asked.source!r}: {said}") from error
    if file is not None:
        buffer = io.BytesIO()
        found.figure().savefig(buffer, format="png", dpi=120)
        write_picture(file, buffer.getvalue())
    if asked.as_json:
        content = asdict(found) | {"scales": found.scales.tolist()}
        print_json({"model": asked.source, **content, "verdict": found.verdict})
        return
    print(found)
    if file is not None:
        print(f"Picture: {file}")


def _load(model: nn.Module, file: Path) -> None:
    """Load a file with a state dict into a model; no code in it is run."""
    option = f"--weights {str(file)!r}"
    if not file.is_file():
        raise ConfigurationError(f"{option}: there is no such file.")
    # without torch's own words, which advise to run the code in the file
    unreadable = ConfigurationError(
        f"{option}: this is no state dict that torch.save wrote. Save one with torch.save(model.state_dict(), FILE)."
    )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: bytes that are no pickle may mean anything
        raise unreadable from error
    state = content
    if isinstance(content, Mapping):
        state = content.get("model", content.get("state_dict", content))
    if not isinstance(state, Mapping):
        raise unreadable
    state = dict(state)
    for prefix in WRAPPERS:
        consume_prefix_in_state_dict_if_present(state, prefix)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"{option}: these weights do not fit the model: {error}"
        ) from error
