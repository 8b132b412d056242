"""What the table of rules says of each, tried on the rule itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

from pathspace.optim.rules.traits import RULES, traits_of

KINDS = [kind for kind in RULES if kind is not torch.optim.LBFGS]
OPTIONS: dict[str, dict[str, Any]] = {"LBFGS": {}, "SOAP": {"precondition_frequency": 1}}


def moved(kind: type[Optimizer], start: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    """How far a rule leads from a start, [steps, ...]."""
    p = nn.Parameter(start.clone())
    rule = kind([p], **{"lr": 0.01, **OPTIONS.get(kind.__name__, {}), **options})
    steps = []
    for g in gradients:
        before, p.grad = p.detach().clone(), g.clone()
        rule.step()
        steps.append(p.detach() - before)
    return torch.stack(steps)


def drawn(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_whether_a_step_depends_on_the_point(kind: type[Optimizer]) -> None:
    gradients = drawn(4, 3)
    plain = {"weight_decay": 0.0} if kind is not torch.optim.Rprop else {}
    here = moved(kind, torch.zeros(4, 3, dtype=torch.float64), gradients, **plain)
    there = moved(kind, torch.full((4, 3), 2.0, dtype=torch.float64), gradients, **plain)
    if traits_of(kind).reads_points:
        return  # it may, and is given the points
    assert_close(here, there, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_whether_elements_step_by_themselves(kind: type[Optimizer]) -> None:
    start, gradients = drawn(4, 3, count=1)[0], drawn(4, 3)
    together = moved(kind, start, gradients)
    apart = moved(kind, start[:2], [g[:2] for g in gradients])
    alike = torch.allclose(together[:, :2], apart, rtol=1e-9)
    assert alike == (traits_of(kind).reach == "element")


DECOUPLED = [kind for kind in KINDS if traits_of(kind).decays == "decoupled"]


@pytest.mark.parametrize("kind", DECOUPLED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_decoupled_decay_is_a_factor_of_the_point(kind: type[Optimizer]) -> None:
    start, gradients = drawn(4, 3, count=1)[0], drawn(4, 3)
    plain = moved(kind, start, gradients, weight_decay=0.0)
    decayed = moved(kind, start, gradients, weight_decay=0.1)
    point = start
    for step, with_decay in zip(plain, decayed, strict=True):
        assert_close(with_decay, step - 0.01 * 0.1 * point, rtol=1e-6, atol=1e-9)
        point = point + with_decay


@pytest.mark.parametrize(
    ("name", "bases", "points"),
    [
        ("Lion", (), ()),
        ("Prodigy", (), ("p0",)),
        ("AdamWScheduleFree", (), ("z",)),
        ("Mine", (torch.optim.AdamW,), ()),
        ("Mine", (torch.optim.ASGD,), ("ax",)),
        ("Mine", (), None),
    ],
)
def test_rules_of_others_go_by_their_names(
    name: str, bases: tuple[type, ...], points: tuple[str, ...] | None
) -> None:
    traits = traits_of(type(name, bases or (Optimizer,), {}))
    assert traits.points == points
    assert traits.reads_points
    assert traits.reach == "all"
    assert traits.by_sign == (name == "Lion")


def test_what_evaluates_a_closure_several_times() -> None:
    assert traits_of(torch.optim.LBFGS).evaluates
    assert traits_of(type("SAM", (Optimizer,), {})).evaluates
    assert not traits_of(torch.optim.AdamW).evaluates
