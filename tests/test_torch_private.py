"""Torch's private names do what the library takes them for. Each case says what breaks where one no longer does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close

import pathspace as ps
from pathspace import torch_private

ROOT = Path(ps.__file__).parent


def tensors(*numbers: float) -> list[torch.Tensor]:
    """Tensors of two elements, each a multiple of the first one."""
    return [torch.tensor([number, 2 * number]) for number in numbers]


A = tensors(1.0, -3.0)
B = tensors(5.0, 0.5)
C = tensors(2.0, 4.0)
BETWEEN = [a + 0.25 * (b - a) for a, b in zip(A, B, strict=True)]


class Case(NamedTuple):
    """A call on the list A.

    Attributes:
        arguments: after A.
        expected: what plain torch makes of the elements.
        users: what breaks where it is something else.
        options: arguments by name.
    """

    arguments: tuple[Any, ...]
    expected: list[torch.Tensor]
    users: str
    options: Mapping[str, float] = MappingProxyType({})


IN_PLACE = {
    "foreach_add_": Case(
        (B,),
        [a - 0.1 * b for a, b in zip(A, B, strict=True)],
        "steps of PathSGD and PathMuon, and the damping of a metric",
        {"alpha": -0.1},
    ),
    "foreach_addcmul_": Case(
        (B, C, 0.5),
        [a + 0.5 * b * c for a, b, c in zip(A, B, C, strict=True)],
        "steps of PathSGD, and those of other rules mapped back to the weights",
    ),
    "foreach_copy_": Case((B,), B, "gradients in coordinates on a GPU"),
    "foreach_div_": Case(
        (C,), [a / c for a, c in zip(A, C, strict=True)], "the normalizer of a metric"
    ),
    "foreach_lerp_": Case((B, 0.25), BETWEEN, "momenta of NAdam and PathMuon"),
    "foreach_mul_": Case(
        (0.5,), [a * 0.5 for a in A], "weight decay, momenta, and the gauge of a metric"
    ),
    "foreach_pow_": Case(([2.0, 3.0],), [A[0] ** 2.0, A[1] ** 3.0], "the power of a metric"),
}
RETURNED = {
    "foreach_lerp": Case((B, 0.25), BETWEEN, "Nesterov's momentum of PathMuon"),
    "foreach_mul": Case(
        (B,),
        [a * b for a, b in zip(A, B, strict=True)],
        "kappa of vectors in the frame, and clipped steps on a GPU",
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_on_lists_write_over_the_first(name: str) -> None:
    case = IN_PLACE[name]
    written = [a.clone() for a in A]
    getattr(torch_private, name)(written, *case.arguments, **case.options)
    assert_close(written, case.expected, msg=f"torch._{name} changed, which breaks {case.users}")


@pytest.mark.parametrize("name", RETURNED)
def test_operations_on_lists_return_new_tensors(name: str) -> None:
    case = RETURNED[name]
    before = [a.clone() for a in A]
    returned = getattr(torch_private, name)(A, *case.arguments)
    message = f"torch._{name} changed, which breaks {case.users}"
    assert_close(list(returned), case.expected, msg=message)
    assert_close(A, before, msg=message)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_fused_adam_is_adams_step(amsgrad: bool, maximize: bool) -> None:
    """Else PathAdam's direction is wrong, and RMSprop and NAdam in fewer passes are."""
    p, g = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.25])
    m, v, largest = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4]), torch.tensor([1.0, 0.1])
    beta1, beta2, lr, eps, t = 0.9, 0.99, 0.1, 1e-3, 3
    signed = -g if maximize else g
    m_after = beta1 * m + (1 - beta1) * signed
    v_after = beta2 * v + (1 - beta2) * g**2
    divisor = torch.maximum(largest, v_after) if amsgrad else v_after
    step = (m_after / (1 - beta1**t)) / ((divisor / (1 - beta2**t)).sqrt() + eps)
    expected = p - lr * step
    torch_private.fused_adam_(
        [p],
        [g],
        [m],
        [v],
        [largest] if amsgrad else [],
        [torch.tensor(float(t))],
        amsgrad=amsgrad,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        maximize=maximize,
    )
    assert_close([p, m, v], [expected, m_after, v_after])


def test_a_function_can_be_kept_out_of_compilation() -> None:
    """Else parts of a step, compiled one by one with a whole training step, round otherwise."""

    @torch_private.disable_dynamo
    def compiling() -> bool:
        return torch.compiler.is_dynamo_compiling()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if compiling() else x

    compiled = torch.compile(outer, backend="eager")
    assert compiled(torch.zeros(1)).item() == 0


def test_views_share_the_id_of_a_storage() -> None:
    """Else whole weights, gathered from a sharded model, stay in memory until the backward pass."""
    tensor = torch.zeros(4, 2)
    assert torch_private.storage_id(tensor[1:].t()) == torch_private.storage_id(tensor)
    assert torch_private.storage_id(tensor.clone()) != torch_private.storage_id(tensor)
    weak = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    assert weak.cdata == torch_private.storage_id(tensor)


def test_trees_of_arguments_are_mapped_leaf_by_leaf() -> None:
    """Else models are called with other arguments than the user's example has."""
    tree = {"a": (torch.ones(1), 2), "b": [torch.zeros(1)]}
    leaves, form = torch_private.pytree.tree_flatten(tree)
    assert [type(leaf) for leaf in leaves] == [torch.Tensor, int, torch.Tensor]
    assert torch_private.pytree.tree_unflatten(leaves, form) == tree
    found = torch_private.pytree.tree_map_only(torch.Tensor, torch.Tensor.item, tree)
    assert found == {"a": (1.0, 2), "b": [0.0]}
    assert torch_private.pytree.tree_leaves(found) == [1.0, 2, 0.0]


def test_every_name_has_a_case() -> None:
    own = {"disable_dynamo", "fused_adam_", "pytree", "storage_id", *IN_PLACE, *RETURNED}
    names = re.findall(
        r"^(?:def )?([a-z]\w+)(?: = |\()", Path(torch_private.__file__).read_text(), re.M
    )
    assert set(names) == own


def test_private_operations_stand_in_one_file() -> None:
    private = re.compile(r"torch\._(foreach|fused)|_disable_dynamo")
    users = {path.name for path in ROOT.rglob("*.py") if private.search(path.read_text())}
    assert users == {"torch_private.py"}
