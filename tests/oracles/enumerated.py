"""A traced network against the list of its paths, and against its own rescalings.

The list is found by probing the model's operations on real numbers (see ``ps.paths.unroll``), never
by the rules of the tracer, and it is checked first: what the model returns is the sum over its
paths.
"""

from __future__ import annotations

import copy

import pytest
import torch

import pathspace as ps


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def check_paths(model, inputs, classes) -> None:
    """The list of paths, the path norm and both terms of kappa.

    f(x) = sum_p x_p a_p c_p v_p; gamma_net^2 = sum_p (c_p v_p)^2; kappa1 = dG/d(w^2);
    kappa1 + kappa2 = 1/2 d^2 gamma_net^2 / dw^2.
    """
    network = ps.trace(model, inputs)
    assert network.num_classes == classes
    paths = ps.paths.enumerate_paths(network)
    ours = paths.output(network.parameters, ps.paths.activity(network, inputs))
    torch.testing.assert_close(
        ours, call(model, inputs).reshape(ours.shape), rtol=1e-10, atol=1e-10
    )
    weights = {key: p.detach().clone().requires_grad_() for key, p in network.parameters.items()}
    known = (paths.factor * paths.values(weights)).square().sum()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(known.item(), rel=1e-12)
    slopes = torch.autograd.grad(
        known, list(weights.values()), materialize_grads=True, allow_unused=True, create_graph=True
    )
    first, both = ps.paths.kappa(network), ps.paths.kappa(network, second_term=True)
    for (key, p), slope in zip(weights.items(), slopes, strict=True):
        # p dG/dp = 2 p^2 kappa1
        torch.testing.assert_close(2 * p * first[key], slope, rtol=1e-10, atol=1e-12)
        curvatures = [
            torch.autograd.grad(one, p, retain_graph=True)[0].flatten()[i] / 2
            for i, one in enumerate(slope.flatten())
        ]
        torch.testing.assert_close(
            both[key].flatten(), torch.stack(curvatures), rtol=1e-9, atol=1e-12
        )


def check_rescaling(model, inputs, makers) -> None:
    """Powers of two change no bit of what the model returns, nor of what an optimizer makes of it."""
    rescaled = copy.deepcopy(model)
    network, before = ps.trace(rescaled, inputs), call(model, inputs)
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(call(rescaled, inputs), before)
    if not network.num_classes:
        return  # nothing to see
    assert any(
        not torch.equal(a, b)
        for a, b in zip(model.parameters(), rescaled.parameters(), strict=True)
    )
    for make in makers:
        report = ps.rescaling.check_invariance(
            model,
            inputs,
            lambda out: out.square().mean(),
            lambda m, n, make=make: make(m.parameters(), n),
            steps=3,
        )
        assert report.passed, report


def check_measure(model, inputs) -> None:
    """The norm on data is the same in every member of the rescaling class."""
    network = ps.trace(model, inputs)
    norms = []
    for _ in range(2):
        norms += [
            ps.paths.data_dependent_norm(
                network, inputs, alpha=alpha, statistic="second_moment"
            ).item()
            for alpha in (0.5, 1.0)
        ]
        ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(1))
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-9)
    assert norms[0] > 0
