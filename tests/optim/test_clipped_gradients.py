"""Gradients that arrive clipped are noticed, and others are not."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import pathspace as ps
from cases import Recurrent, mlp

INSTEAD = {
    "PathSGD": "clip_step", "DDPSGD": "clip_step", "PathAdam": "clip_norm", "QuasiDiagonal": "clip_norm",
    "PathMuon": "clip_norm", "GSGD": "clip_norm", "GAdam": "clip_norm",
}  # fmt: skip


def training(name="PathSGD", model=None, lr=0.01, **options):
    torch.manual_seed(0)
    model = mlp(4, 12, 8, 3) if model is None else model
    network = ps.trace(model, torch.zeros(1, 4))
    return model, getattr(ps.optim, name)(model.parameters(), network, lr=lr, **options)


def train(model, optimizer, steps=60, clip=None, batch: int | None = 16, seed=0):
    """Steps on random batches; the messages of all warnings."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(200, 4, generator=generator), torch.randint(3, (200,), generator=generator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            some = torch.randint(200, (batch,), generator=generator) if batch else slice(None)
            optimizer.zero_grad()
            functional.cross_entropy(model(x[some]).float(), y[some]).backward()
            if clip and (not callable(clip) or clip(i)):
                clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    assert all(w.filename == __file__ for w in caught)  # it points to the line of the user
    return [str(w.message) for w in caught]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", INSTEAD)
def test_clipped_gradients_are_told_once_with_the_argument_to_pass(name):
    model, optimizer = training(name)
    (message,) = train(model, optimizer, clip=True)
    assert f"{name}(..., {INSTEAD[name]}=0.05)" in message
    assert "max_grad_norm=0" in message
    assert "gradient_clip_val=None" in message


def test_rules_of_others_are_told_too():
    model = mlp(4, 12, 8, 3)
    network = ps.trace(model, torch.zeros(1, 4))
    optimizer = ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=0.01)
    (message,) = train(model, optimizer, clip=True)
    assert "Invariant(..., clip_norm=0.05)" in message


def test_what_is_not_invariant_anyhow_is_not_told():
    assert not train(*training("PathGradientAdam"), clip=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("options", [{}, {"clip_step": 0.05}], ids=str)
def test_gradients_that_nobody_clipped_pass(batch, options):
    assert not train(*training(**options), steps=210, batch=batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("lr", [0.0, 1e-4, 0.01, 0.3])
def test_all_of_the_data_at_every_step_passes(lr, momentum):
    """Norms change slowly or not at all, but so do gradients."""
    model, optimizer = training(lr=lr, momentum=momentum)
    assert not train(model, optimizer, steps=210, batch=None)


def test_one_gradient_over_and_over_passes():
    model, optimizer = training()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(20):
        optimizer.step()


def test_clipping_that_begins_late_is_told():
    model, optimizer = training()
    assert not train(model, optimizer, steps=90)
    assert len(train(model, optimizer, steps=30, clip=True)) == 1


def test_clipping_of_three_gradients_in_five_is_told():
    assert len(train(*training(), steps=5, clip=lambda i: i in (0, 2, 3))) == 1


def test_parameters_that_take_turns_are_looked_at_one_set_after_the_other():
    model, optimizer = training()
    for i, p in enumerate(model.parameters()):
        if i % 2:
            p.requires_grad_(False)
    assert not train(model, optimizer, steps=3, clip=True)
    for p in model.parameters():
        p.requires_grad_(True)
    assert not train(model, optimizer, steps=4, clip=True)
    assert len(train(model, optimizer, steps=1, clip=True, seed=1)) == 1


def test_gradients_of_two_types_are_looked_at_together():
    torch.manual_seed(0)
    model = mlp(4, 12, 8, 3)
    model[2].double()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            h = self.inner[1](self.inner[0](x))
            return self.inner[4](self.inner[3](self.inner[2](h.double()).float()))

    mixed = Mixed()
    assert len(train(*training(model=mixed), clip=True)) == 1


def test_millions_of_weights_whose_norm_float32_rounds():
    torch.manual_seed(0)
    model = mlp(4, 1500, 1500, 3)
    assert len(train(*training(model=model), steps=5, clip=True)) == 1


def test_a_recurrent_network_in_float64():
    torch.manual_seed(0)
    model = Recurrent(inputs=4).double()
    network = ps.trace(model, torch.zeros(3, 2, 4).double(), batch_dim=1)
    optimizer = ps.optim.PathAdam(model.parameters(), network)

    def step():
        optimizer.zero_grad()
        model(torch.randn(3, 5, 4).double()).square().sum().backward()
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    for _ in range(4):
        step()
    with pytest.warns(UserWarning, match="different gradients of the same norm"):
        step()


def test_looking_changes_no_bit_and_is_no_part_of_the_state():
    model, optimizer = training("PathAdam")
    watched = copy.deepcopy((model, optimizer))
    optimizer._clipped = None
    train(model, optimizer)
    train(*watched)
    for p, q in zip(model.parameters(), watched[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.state_dict().keys() == watched[1].state_dict().keys()


def test_of_a_thousand_steps_few_are_looked_at(monkeypatch):
    from pathspace.optim.base import clipped_gradients

    looked = []
    monkeypatch.setattr(
        clipped_gradients, "_norms", lambda g: looked.append(watch._step) or torch.rand(len(g))
    )
    watch = clipped_gradients.ClippedGradients("PathSGD", "clip_step")
    for _ in range(1000):
        watch.look([torch.ones(1)])
    assert looked == [s + i for s in (0, 50, 100, 200, 400, 800) for i in range(1, 6)]
    assert math.isfinite(watch._start)
