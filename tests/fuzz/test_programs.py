"""Random programs against their squared network, interpreted by hand, and against their own rescalings.

A program that was ever traced wrong stays in `EVER_WRONG`, written out: what a seed draws may
change.
"""

from collections import Counter

import pytest
import torch

import pathspace as ps
from fuzz.programs import Model, Program, Statement, drawn, squared_path_norm
from pathspace.rescaling.permutation import groups_of, state_of

COUNT, MANY, BATCHES = 30, 10_000, (1, 3)
TIMES = 3
"""How many times the steps longer inputs have."""
UNSURE = ("share memory", "shares memory")
"""What a program may be refused for that has a place in path geometry: a copy or a view, nobody knows."""


def rows(*statements):
    """A program on rows ``[B, 3]`` between two layers."""
    first, last = (
        Statement("linear", (0, 0)),
        Statement("linear", (1 + sum(s.name in NEW for s in statements), 1)),
    )
    return Program(0, None, 3, [(3, 3, True), (3, 2, True)], [], [first, *statements, last])


def steps(*statements):
    """A program on steps ``[B, 2, 3]`` between two layers."""
    program = rows(*statements)
    return Program(0, 2, 3, program.layers, [], program.statements)


NEW = ("picked", "weighed", "part", "mixed", "into_integers", "viewed", "scaled")
EVER_WRONG = {
    "indices changed after a read": rows(Statement("picked", (1, [0, 2, 1]), 1)),
    "indices changed after index_select": rows(Statement("picked", (1, [0, 2, 1]), 2)),
    "a constant cast to the type of units": rows(Statement("weighed", (1, [2, -3, 0.5]), 1)),
    "zeros in place": rows(Statement("weighed_in_place", (1, [0, 0, 0]))),
    "zeros of whole numbers in place": rows(Statement("weighed_in_place", (1, [0, 0, 0]), 1)),
    "zeros in place of a view": rows(Statement("viewed", (1,)), Statement("weighed_in_place", (1, [0, 0, 0]))),
    "a part times zeros": rows(Statement("cleared", (1, 0, 2), 2)),
    "steps times zeros": steps(Statement("weighed", (1, [0, 0, 0])), Statement("weighed_in_place", (1, [0, 0, 0]))),
    "rows mixed": rows(Statement("mixed", (1,))),
    "steps mixed": steps(Statement("mixed", (1,))),
    "steps turned twice, in a product": Program(
        0, 3, 2, [(2, 3, True), (3, 3, False), (3, 3, True)], [], [
            Statement("linear", (0, 0)), Statement("turned", (1,)), Statement("turned", (2,)),
            Statement("linear", (1, 1)), Statement("product_in_place", (3, 4)),
            Statement("step", (3, 2)), Statement("linear", (5, 2)),
        ],
    ),
    "states whose scale is a product": Program(
        0, 3, 4, [(4, 2, True), (2, 3, True), (3, 3, True), (3, 3, True), (3, 4, False)], [], [
            Statement("linear", (0, 0)), Statement("linear", (1, 1)), Statement("linear", (2, 2)),
            Statement("inner", (2, 3)), Statement("loop", (2, 2, 3), 23), Statement("linear", (5, 4)),
        ],
    ),
    "units that are written to after their last use": Program(
        0, None, 3, [(3, 3, True), (3, 3, True), (3, 2, True)], [], [
            Statement("linear", (0, 0)), Statement("weighed_in_place", (1, [0, 0, 0])),
            Statement("linear", (1, 1), 23), Statement("linear", (2, 2)),
            Statement("added_in_place", (2, 2)),
        ],
    ),
    "written into whole numbers": rows(Statement("into_integers", (1,))),
}  # fmt: skip


def run(model: Model, x: torch.Tensor) -> torch.Tensor:
    """What a program returns with the draws of its own seed."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(model.program.seed)
        return model(x)


def run_longer(model: Model) -> torch.Tensor | None:
    """The same for a longer input; None for a program that does not take any."""
    if model.program.steps is None:
        return None
    try:
        return run(model, model.program.input(2, TIMES))
    except (RuntimeError, IndexError):
        return None


def on_paths(network: ps.network.Network, kappa: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which unit classes some path goes through, bool [C]; the others have no scale of their own."""
    ends = [(*c.incoming, *c.outgoing) for c in network.unit_classes]
    found = [any(kappa[name][index] > 0 for name, index in edges) for edges in ends]
    return torch.tensor(found, dtype=torch.bool)


def check(program: Program) -> str:
    """Compare a program; returns what became of it: traced, refused rightly or out of caution, or none at all."""
    seed, model = program.seed, Model(program)
    try:
        before, longer = [run(model, program.input(batch)) for batch in BATCHES], run_longer(model)
    except RuntimeError as error:  # a tensor written into another view of itself
        if "single memory location" not in str(error):
            raise
        return "impossible"
    try:
        network = ps.trace(model, program.input(program.examples))
    except ps.UntraceableError as error:
        if program.refused:
            return "refused"
        if any(words in str(error) for words in UNSURE):
            return "unsure"
        raise
    assert not program.refused, "it mixes examples, or writes whole numbers, and was traced"
    norm, kappa = squared_path_norm(program, model)
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm, rtol=1e-9, atol=1e-12
    )
    for name, found in ps.paths.kappa(network).items():
        torch.testing.assert_close(
            found, kappa[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    slopes = {f"vectors.{s.args[1]}" for s in program.statements if s.name == "prelu"}
    for name in {*network.outside} - slopes:  # on no path
        assert not kappa[name].any(), name
    generator, gauge = (
        torch.Generator().manual_seed(seed),
        ps.rescaling.balance.balancing_factors(network),
    )
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=generator
    )
    after = ps.rescaling.balance.balancing_factors(network)
    alive = on_paths(network, kappa)
    after, gauge = (after * factors)[alive], gauge[alive]
    torch.testing.assert_close(after, gauge, rtol=1e-9, atol=0, msg=lambda m: f"gauge: {m}")
    for batch, known in zip(BATCHES, before, strict=True):
        assert torch.equal(run(model, program.input(batch)), known), (
            f"the function moved at batch size {batch}"
        )
    if longer is not None:
        assert torch.equal(run_longer(model), longer), "the function moved for longer inputs"
    check_untied(program, model, network)
    return "traced"


def check_untied(program: Program, model: Model, network: ps.network.Network) -> None:
    """A layer that no longer shares its weight makes another network."""
    used = [pair for pair in program.tied if f"layers.{pair[0]}.weight" in network.parameters]
    if used:
        layer = model.layers[used[0][1]]
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        with pytest.raises(RuntimeError, match="were one parameter when the model was traced"):
            network.check_current()


def outcomes(seeds, check=check):
    found = Counter()
    for seed in seeds:
        try:
            found[check(drawn(seed))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {drawn(seed)}") from error
    return found


def test_programs():
    found = outcomes(range(COUNT))
    assert found["traced"] > 0.75 * COUNT
    assert found["refused"] > 0.03 * COUNT
    assert found["impossible"] < 0.03 * COUNT


WITHOUT_GRADIENTS = {"cut", "gated", "divided", "normalized", "attention"}
"""Statements whose part of kappa on data is no gradient of what the model returns."""


def check_on_data(program: Program) -> str:
    """Compare kappa from data alone with the mean over examples of squared gradients, summed over the outputs."""
    model, x = Model(program).requires_grad_(), program.input(3)
    if program.refused or {"dropped", *WITHOUT_GRADIENTS} & {s.name for s in program.statements}:
        return "no gradients"
    try:
        outputs = model(x).flatten()
        sum(outputs).backward(retain_graph=True)
        network = ps.trace(model, x)
        found = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    except (ps.UntraceableError, ps.network.UnmatchedForwardError, RuntimeError) as error:
        if "same for all examples" in str(error):  # a layer of learned units
            return "refused"
        if any(
            words in str(error)
            for words in (*UNSURE, "in-place", "inplace", "single memory location")
        ):
            return "impossible"
        raise
    if network.cuts:
        return "no gradients"
    parameters = [network.parameters[name] for name in found]
    squares = [torch.zeros_like(p) for p in parameters]
    for output in outputs:
        slopes = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        for square, slope in zip(squares, slopes, strict=True):
            square += 0 if slope is None else slope.square() / len(x)
    torch.testing.assert_close(list(found.values()), squares, rtol=1e-8, atol=1e-10)
    return "compared"


def test_programs_on_data():
    found = outcomes(range(COUNT), check_on_data)
    assert found["compared"] > 0.2 * COUNT


FEW = 1000
"""Paths of a program that are listed."""


def check_listed(program: Program) -> str:
    """Compare the squares of listed paths with the squared network, and their sum on data with the model."""
    if program.refused or any(s.name == "dropped" for s in program.statements):
        return "refused"
    model, x = Model(program), program.input(2)
    with torch.no_grad():
        try:
            network = ps.trace(model, x)
            # a cut may mix examples
            outputs = torch.cat([model(one).flatten(1) for one in x.split(1)])
            paths = ps.paths.enumerate_paths(network, limit=FEW)
        except (ps.UntraceableError, ps.paths.TooManyPathsError, RuntimeError) as error:
            known = isinstance(error, (ps.UntraceableError, ps.paths.TooManyPathsError))
            if known or "single memory location" in str(error):
                return "refused"
            raise
        values = paths.factor * paths.values(network.parameters)
        norm = ps.paths.squared_path_norm(network)
        torch.testing.assert_close(values.square().sum(), norm, rtol=1e-9, atol=1e-12)
        found = paths.output(network.parameters, ps.paths.activity(network, x))
        # what enters cuts comes after
        torch.testing.assert_close(
            found[:, : outputs.shape[1]], outputs, rtol=1e-9, atol=1e-9, equal_nan=True
        )
    return "listed"


def test_paths_of_programs():
    found = outcomes(range(COUNT // 2), check_listed)
    assert found["listed"] > 0.1 * COUNT


def check_permuted(program: Program) -> str:
    """Shuffle the units of all groups; the function must stay, for other numbers of examples and longer inputs, too."""
    model = Model(program)
    if any(s.name == "dropped" for s in program.statements):
        return "dropped"  # the units of one draw are not alike
    try:
        before, longer = [run(model, program.input(batch)) for batch in BATCHES], run_longer(model)
        network = ps.trace(model, program.input(program.examples))
    except (RuntimeError, ps.UntraceableError):
        return "not traced"
    groups = groups_of(network)
    state = state_of(network)
    values = {name: value.detach() for name, value in state.items()}
    for group in groups:
        values = group.permuted(values, torch.arange(len(group)).flip(0))
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(values[name])
    for batch, known in zip(BATCHES, before, strict=True):
        torch.testing.assert_close(run(model, program.input(batch)), known, rtol=1e-9, atol=1e-9)
    if longer is not None:
        torch.testing.assert_close(run_longer(model), longer, rtol=1e-9, atol=1e-9)
    return "permuted" if groups else "without units"


def test_units_of_programs_in_another_order():
    found = outcomes(range(20), check_permuted)
    assert found["permuted"] >= 8, found


@pytest.mark.slow
def test_units_of_many_programs_in_another_order():
    found = outcomes(range(1_000, 1_300), check_permuted)
    assert found["permuted"] >= 100, found


@pytest.mark.slow
def test_paths_of_many_programs():
    found = outcomes(range(COUNT, COUNT + MANY // 10), check_listed)
    assert found["listed"] > 0.02 * MANY


@pytest.mark.slow
def test_many_programs_on_data():
    found = outcomes(range(COUNT, COUNT + MANY), check_on_data)
    assert found["compared"] > 0.2 * MANY


@pytest.mark.slow
def test_many_programs():
    found = outcomes(range(COUNT, COUNT + MANY))
    assert found["traced"] > 0.75 * MANY


@pytest.mark.parametrize("name", EVER_WRONG)
def test_what_was_wrong_once(name):
    program = EVER_WRONG[name]
    assert check(program) == ("refused" if program.refused else "traced")
