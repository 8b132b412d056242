"""Compare two traces of one model.

Two polynomials in many variables are the same if they, and their derivatives, agree at a random
point: that they do so by chance has probability zero. What is compared is the path mass of every
output, weighed by random numbers, as a function of squared weights, squared inputs and the numbers
in buffers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pathspace.network.network import Network
from pathspace.network.program import Program
from pathspace.squared.precision import full_precision

_ROUNDING = 1e-9
"""The largest relative difference of sums in float64 that counts as rounding."""


def same_network(a: Network, b: Network) -> bool:
    """Return whether two networks of one model have the same operations, unit classes and paths."""
    if not _same_form(a, b) or not _same_tables(a, b):
        return False
    return same_paths(a, b)


def same_arguments(a: Program, b: Program) -> bool:
    """Return whether the operations of two programs take the same tensors: running statistics may have gone."""
    return [o.shapes for o in a.operations] == [o.shapes for o in b.operations]


def same_slots(a: Program, b: Program) -> bool:
    """Return whether two programs name their values alike, so that one may stand for the other."""
    if a.outputs != b.outputs or a.nodes.keys() != b.nodes.keys():
        return False
    if [o.results for o in a.operations] != [o.results for o in b.operations]:
        return False
    return all(torch.equal(labels, b.nodes[slot]) for slot, labels in a.nodes.items())


def _same_form(a: Network, b: Network) -> bool:
    """Return whether the operations and the names of parts are the same; parameters outside may have been added."""
    if a.parameters.keys() != b.parameters.keys() or not set(a.outside) <= set(b.outside):
        return False
    if any(b.parameters[name] is not parameter for name, parameter in a.parameters.items()):
        return False
    return _form(a) == _form(b)


def _form(network: Network) -> tuple[Any, ...]:
    """Return what is equal, part by part, for equal networks."""
    program = network.program
    call = network.call
    operations = [(o.name, o.module, o.kind, o.shapes[-1:]) for o in program.operations]
    biases = {name: edges.bias for name, edges in network.edges.items()}
    of_program = operations, program.cuts, program.by_batch
    of_call = call.batch_dim, set(call.unused), call.constants.keys()
    return of_program, of_call, network.class_names, network.returned, biases


def _same_tables(a: Network, b: Network) -> bool:
    """Return whether all labels, and the values of buffers that decided on them, are the same."""
    pairs = zip(_tables(a), _tables(b), strict=False)
    return all(torch.equal(of_a, of_b) for of_a, of_b in pairs)


def _tables(network: Network) -> list[Tensor]:
    """Return the labels of a network, and the values of buffers that decided on them."""
    tables = [network.monomials]
    for edges in network.edges.values():
        tables += [edges.target, edges.source]
    return [*tables, *network.call.constants.values()]


@torch.inference_mode(False)
def same_paths(a: Network, b: Network) -> bool:
    """Return whether path mass is the same polynomial, for networks with parameters of the same names and shapes."""
    if not a.parameters:
        return True
    squares = _random_squares(a.parameters)
    first = _at_random_inputs(a, squares)
    second = _at_random_inputs(b, squares)
    if [t.shape for t in first] != [t.shape for t in second]:
        return False
    pairs = zip(first, second, strict=True)
    return all(torch.allclose(x, y, rtol=_ROUNDING, atol=0.0) for x, y in pairs)


def _random_squares(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random squared weights under which path mass neither grows nor shrinks much from layer to layer."""
    draw = _numbers("weights")
    result = {}
    for name, parameter in parameters.items():
        fan_in = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 1
        square = draw(parameter.shape).to(parameter.device) / max(1, fan_in)
        result[name] = square.requires_grad_()
    return result


def _at_random_inputs(network: Network, squares: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the path mass, and a random weighted sum of its derivatives by each parameter; NaN where not finite."""
    of_sums = _numbers("sums")
    with full_precision(next(iter(squares.values()))), torch.enable_grad():
        total = mass_at_random(network, squares)
        gradients = torch.autograd.grad(total, list(squares.values()), materialize_grads=True)
    sums = [total.detach()]
    for gradient in gradients:
        weights = of_sums(gradient.shape).to(gradient.device)
        sums.append((gradient * weights).sum())
    return [torch.where(t.isfinite(), t, torch.nan) for t in sums]


def mass_at_random(network: Network, squares: Mapping[str, Tensor]) -> Tensor:
    """Return a random weighted sum of the path mass of all outputs, for random inputs and buffers; the same every time.

    Args:
        network: a traced network.
        squares: squared weights by name, in float64.
    """
    of_inputs = _numbers("inputs")
    of_outputs = _numbers("outputs")
    like = next(iter(squares.values()))
    tape = network.tape

    def live(name: str) -> Tensor:
        """Return other numbers than a buffer has now, as it may be zero today, or equal to another one."""
        value = network.live(name)
        if not value.is_floating_point():
            return value
        return _numbers(f"buffer {name}")(value.shape).to(value)

    def inputs(shape: tuple[int, ...]) -> Tensor:
        return of_inputs(shape).to(like.device)

    _, outputs = tape.run(squares, live, tape.outputs, inputs=inputs)
    total = like.new_zeros(())
    for output in outputs:
        weights = of_outputs(output.shape).to(like.device)
        total = total + (output * weights).sum()
    return total


def _numbers(what: str) -> Callable[[tuple[int, ...]], Tensor]:
    """Return a function that draws float64 numbers between 0.5 and 1.5, the same ones whenever it is for the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    return lambda shape: 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
