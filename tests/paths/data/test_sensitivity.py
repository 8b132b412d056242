"""Measured sensitivities against derivatives taken one by one, and the importance of weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, mlp, traced


def known(case, model, network, data):
    """Mean over examples of the sum over outputs of squared derivatives, by one Jacobian for each example."""
    total = {name: torch.zeros_like(p) for name, p in network.parameters.items()}
    for x in data.split(1):

        def outputs(weights, x=x):
            return case.picked(torch.func.functional_call(model, weights, (x,))).reshape(-1)

        weights = {name: p.detach() for name, p in network.parameters.items()}
        for name, J in torch.func.jacrev(outputs)(weights).items():
            total[name] += J.square().sum(0) / len(data)
    return total


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["mlp", "cnn 2d", "same layer twice", "layer norm", "gated", "batch norm"]
)
def test_equals_the_squared_jacobian(name):
    case = BY_NAME[name]
    model, network = traced(case, torch.float64)
    data = case.example(4, torch.float64)
    for key, value in ps.paths.sensitivity(network, data).items():
        assert_close(value, known(case, model, network, data)[key], rtol=1e-9, atol=1e-14)


def test_equals_kappa_on_data_where_nothing_is_cut():
    case = BY_NAME["mlp"]
    network = traced(case, torch.float64)[1]
    data = case.example(5, torch.float64)
    theirs = ps.paths.data_dependent_kappa(network, data, alpha=1.0, estimator="exact")
    for key, value in ps.paths.sensitivity(network, data).items():
        assert_close(value, theirs[key])


def test_goes_through_cuts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    network = ps.trace(model, torch.zeros(1, 3).double())
    assert network.cuts
    x = torch.randn(1, 3).double()
    J = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)).reshape(-1))(
        {name: p.detach() for name, p in model.named_parameters()}
    )
    for name, value in ps.paths.sensitivity(network, x).items():
        assert_close(value, J[name].square().sum(0))


def test_signs_are_right_in_the_mean():
    case = BY_NAME["mlp"]
    network = traced(case, torch.float64)[1]
    data = case.example(2, torch.float64)
    exact = ps.paths.sensitivity(network, data)
    drawn = ps.paths.sensitivity(network, data, estimator="signs", draws=400)
    for name, value in drawn.items():
        assert (value - exact[name]).norm() < 0.15 * exact[name].norm()
    again = ps.paths.sensitivity(network, data, estimator="signs", draws=400)
    assert all(torch.equal(value, again[name]) for name, value in drawn.items())


@pytest.mark.parametrize("estimator", ["exact", "signs"])
def test_importance_does_not_see_scales(estimator):
    case = BY_NAME["mlp"]
    network = traced(case)[1]
    data = case.example(3)
    before = [ps.paths.importance(network, data, estimator=estimator), ps.paths.importance(network)]
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    after = [ps.paths.importance(network, data, estimator=estimator), ps.paths.importance(network)]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_importance_is_what_a_weight_adds_to_linear_outputs():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    network, x = ps.trace(model, torch.zeros(1, 3).double()), torch.randn(7, 3).double()
    value = ps.paths.importance(network, x)["weight"][1, 2]
    before = model(x)
    with torch.no_grad():
        model.weight[1, 2] = 0
    assert value.item() == pytest.approx((model(x) - before).square().sum(1).mean().item())


def test_prunes_with_torch():
    torch.manual_seed(0)
    model = mlp(4, 8, 2)
    x = torch.randn(16, 4)
    scores = {}
    for name, score in ps.paths.importance(ps.trace(model, x), x).items():
        path, _, leaf = name.rpartition(".")
        scores[model.get_submodule(path), leaf] = score
    weights = [key for key in scores if key[1] == "weight"]
    prune.global_unstructured(weights, prune.L1Unstructured, importance_scores=scores, amount=0.5)
    kept = torch.cat([module.weight_mask.flatten() for module, _ in weights]).bool()
    values = torch.cat([scores[key].flatten() for key in weights])
    assert kept.sum() == 24
    assert values[kept].min() >= values[~kept].max()


def test_leaves_the_model_alone():
    case = BY_NAME["batch norm"]
    model, network = traced(case)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ps.paths.sensitivity(network, case.example(2))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_refuses_what_it_cannot_measure():
    network = traced(BY_NAME["mlp"])[1]
    x = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match="estimator must be 'exact', 'signs' or 'auto', got 'none'"
    ):
        ps.paths.sensitivity(network, x, estimator="none")
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        ps.paths.sensitivity(network, x, draws=0)
    with pytest.raises(ValueError, match="not of the form of the example input"):
        ps.paths.sensitivity(network, torch.zeros(2, 3, 1))
