"""A default device that is not the model's: no tensor of ours may land there. ``meta`` stands for a GPU."""

import copy

import pytest
import torch
from torch import nn

import pathspace as ps
from cases import mlp

OPTIMIZERS = (
    "PathSGD",
    "PathAdam",
    "PathSOAP",
    "PathMuon",
    "PathGradientAdam",
    "GSGD",
    "GAdam",
    "DDPSGD",
    "DDPAdam",
    "QuasiDiagonal",
)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(4, 6, 2, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def images():
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


CASES = {
    "vectors": (lambda: mlp(4, 12, 3), (5, 4)),
    "sequences": (Reader, (5, 30, 4)),
    "images": (images, (5, 1, 6, 6)),
}


@pytest.fixture(params=CASES)
def model_and_data(request):
    build, shape = CASES[request.param]
    torch.manual_seed(0)
    found = build(), torch.randn(shape)
    torch.set_default_device("meta")
    yield found
    torch.set_default_device(None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(model_and_data, name):
    model, x = model_and_data
    optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(p.device.type == "cpu" and torch.isfinite(p).all() for p in model.parameters())


def test_functions(model_and_data):
    model, x = model_and_data
    network = ps.trace(model, x)
    assert ps.paths.squared_path_norm(network).isfinite()
    kappa = ps.paths.kappa(network, second_term=True)
    assert all(k.device.type == "cpu" for k in kappa.values())
    assert ps.rescaling.random_rescale_(network, 0.5, 2.0).device.type == "cpu"
    ps.rescaling.random_rescale_(network, 0.5, 2.0, True, torch.Generator("cpu"))
    assert ps.rescaling.balance_(network, x).device.type == "cpu"
    skeleton = ps.paths.skeleton(network, "random")
    assert len(ps.paths.basis_paths(network, skeleton)) > 1
    assert all(v.isfinite().any() for v in ps.paths.basis_values(network, skeleton).values())
    ps.paths.reduction_graph(network)


def test_lists_of_paths(model_and_data):
    model, x = model_and_data
    if not isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Linear):
        pytest.skip("one network is enough")
    network = ps.trace(model, x)
    paths, skeleton = ps.paths.enumerate_paths(network), ps.paths.skeleton(network)
    exponents = ps.paths.express(network, skeleton, paths).exponents
    assert paths.counts.sum(1).max() == 2
    assert exponents.device == paths.counts.device == torch.device("cpu")
    assert ps.paths.path_rank(ps.paths.path_jacobian(network)) == ps.paths.degrees_of_freedom(
        network
    )
    assert bool((paths.counts.double() @ ps.paths.reduction_graph(network).exponents() == 0).all())
    again = ps.paths.Skeleton.from_edges(network, skeleton.incoming, skeleton.outgoing)
    assert torch.equal(again.edges, skeleton.edges)
    flow = ps.paths.activity(network, x)
    torch.testing.assert_close(paths.output(network.parameters, flow), flow.outputs)
    assert ps.paths.degrees_of_freedom(network, x) > 1
    assert ps.paths.dead_units(network, x).sum() < network.num_classes


def test_normalization(model_and_data):
    model, x = model_and_data
    if isinstance(model, Reader) or isinstance(model[0], nn.Conv2d):
        pytest.skip("one network is enough")
    normalized = ps.nn.ddp_normalize(model, ps.trace(model, x))
    assert ps.nn.fold(normalized)(x).device.type == normalized(x).device.type == "cpu"
