"""A model that nobody holds is gone at once, with its network and optimizer; no garbage needs to be collected."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import pathspace as ps


def examples():
    return torch.randn(4, 5)


def traced(model):
    return ps.trace(model, examples())


def trained_by(rule, **options):
    def train(model):
        make = getattr(ps.optim, rule)
        optimizer = make(model.parameters(), traced(model), lr=0.01, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(examples()).square().sum().backward()
            optimizer.step()

    return train


USES = {
    "trace": traced,
    "kappa": lambda m: ps.paths.kappa(traced(m)),
    "kappa on data": lambda m: ps.paths.data_dependent_kappa(traced(m), examples()),
    "paths": lambda m: ps.paths.enumerate_paths(traced(m)),
    "balance": lambda m: ps.rescaling.balance_(traced(m), examples(), criterion="range"),
    "align": lambda m: ps.rescaling.align_(traced(m), to=traced(copy.deepcopy(m))),
    "PathSGD": trained_by("PathSGD"),
    "DDPSGD": trained_by("DDPSGD"),
    "GSGD": trained_by("GSGD"),
    "QuasiDiagonal": trained_by("QuasiDiagonal"),
}


@pytest.mark.parametrize("use", USES)
def test_weights_go_with_the_model(use):
    def of_new_model():
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        USES[use](model)
        return weakref.ref(model[0].weight)

    of_new_model()  # what is made once in a process is made by now
    gc.collect()
    gc.disable()
    try:
        assert of_new_model()() is None
    finally:
        gc.enable()
