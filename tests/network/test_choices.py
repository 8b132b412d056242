"""Python that asks something of inputs: where the answer does not matter, a model traces; elsewhere it is refused."""
# ruff: noqa: ARG005, RUF034

import logging

import pytest
import torch
from torch import nn

import pathspace as ps

X, MASK = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), torch.ones(2, 3)
REFUSAL = "depends on the data it sees, on values of its inputs"


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.middle, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self._function = function

    def forward(self, x, mask):
        return self.out(self._function(self, self.read(x).relu(), mask))


def scores(m, h, mask=None):
    """A mask is added where it masks anything, as `transformers` does it."""
    products = h[:, :, None] * m.middle(h)[:, None]
    if mask is not None:
        products = products + mask[:, :1, None]
    return (products.softmax(-1) @ h[:, :, None])[:, :, 0]


def too_long(m, h, mask):
    if (mask > 5).any():
        raise ValueError("the mask is too large")
    return h


def checked(m, h, mask):
    assert (mask < 5).all()
    return h


def two_questions(m, h, mask):
    if mask.any() and not mask.all():
        logging.getLogger(__name__).debug("some are masked")
    return m.middle(h).relu()


def expanded(m, h, mask):
    """A movement more on one side, as of the keys of a group."""
    return h.expand(-1, 4) if mask.all() else h


NO_MATTER = {  # with the number of unit classes
    "a mask that masks nothing": (lambda m, h, mask: scores(m, h, None if mask.all() else mask), 1),
    "of the type bool": (lambda m, h, mask: scores(m, h, None if mask.bool().all() else mask), 1),
    "an error": (too_long, 4),
    "an assertion": (checked, 4),
    "two questions": (two_questions, 8),
    "a movement": (expanded, 4),
    "a member": (lambda m, h, mask: m.middle(h if 0 in mask else h.clone()), 8),
    "the same numbers": (
        lambda m, h, mask: h if torch.equal(mask, MASK.to(mask)) else h.reshape(-1, 4),
        4,
    ),
}


@pytest.mark.parametrize("name", NO_MATTER)
def test_an_answer_that_does_not_matter(name):
    function, classes = NO_MATTER[name]
    model = Model(function)
    network = ps.trace(model, (X, MASK))
    assert network.num_classes == classes
    masks = (MASK, MASK * torch.tensor([1.0, 1, 0]))
    before = [model(X, mask) for mask in masks]
    ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert all(map(torch.equal, before, (model(X, mask) for mask in masks)))


def until(m, h, mask):
    while (mask > 0).any():
        h, mask = m.middle(h).relu(), mask - 1
    return h


def some_steps(m, h, mask):
    for step in range(3):
        if not (mask > step).any():
            break
        h = m.middle(h).relu()
    return h


def many_questions(m, h, mask):
    for _ in range(12):
        if mask.all():
            mask = mask * 1
    return h


MATTERS = {
    "another activation": lambda m, h, mask: h if mask.any() else m.middle(h).tanh(),
    "another scale": lambda m, h, mask: h if mask.any() else h + 1,
    "a layer": lambda m, h, mask: m.middle(h) if mask.any() else h,
    "a product": lambda m, h, mask: h * m.middle(h) if mask.any() else m.middle(h),
    "a factor": lambda m, h, mask: h if mask.any() else 2 * h,
    "the batch": lambda m, h, mask: h.flip(0) if mask.any() else h,
    "a loop": until,
    "a loop that ends early": some_steps,
    "too many questions": many_questions,
    "its number": lambda m, h, mask: h * mask.sum().item(),
    "the places of ones": lambda m, h, mask: h[:, mask[0].nonzero()[:, 0]],
    "the places of ones, by where": lambda m, h, mask: h[:, torch.where(mask[0] > 0)[0]],
    "how many are ones": lambda m, h, mask: h * torch.bincount((mask > 0).long().flatten())[1],
    "its mean, printed": lambda m, h, mask: (f"{mask.double().mean():.2f}", h)[1],
}


@pytest.mark.parametrize("name", MATTERS)
def test_an_answer_that_matters_is_refused(name):
    with pytest.raises(ps.UntraceableError, match=f"{REFUSAL}|mixes the examples"):
        ps.trace(Model(MATTERS[name]), (X, MASK))


@pytest.mark.parametrize("function", [
    lambda m, h, mask: h if (h > 0).any() else h,
    lambda m, h, mask: h if h.sum() > 0 else h,
    lambda m, h, mask: h if (m.middle.weight > 0).any() else h,
    lambda m, h, mask: h if (mask * (h[:, :3] > 0)).any() else h,
])  # fmt: skip
def test_questions_of_activations_and_weights_are_refused(function):
    with pytest.raises(ps.UntraceableError):
        ps.trace(Model(function), (X, MASK))


def test_a_strict_trace_refuses_questions():
    with pytest.raises(ps.UntraceableError, match=REFUSAL):
        ps.trace(Model(two_questions), (X, MASK), strict=True)


def test_a_model_that_refuses_every_input_says_so():
    def never(m, h, mask):
        if mask.any():
            raise ValueError("no mask, please")
        raise ValueError("a mask, please")

    with pytest.raises(ValueError, match="no mask, please"):
        ps.trace(Model(never), (X, MASK))
