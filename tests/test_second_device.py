"""Everything on another device than the CPU gives what it gives there, and mixes nothing of the two."""

import contextlib

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import pathspace as ps
from cases import BY_NAME, call
from second_device import DEVICE, SecondDevice

NAMES = [
    "mlp",
    "skip",
    "cnn 2d",
    "depthwise",
    "batch norm",
    "rnn",
    "bidirectional rnn",
    "characters",
]
PATHS = {
    "gradient of the path norm": lambda network, _: torch.autograd.grad(
        ps.paths.squared_path_norm(network), list(network.parameters.values())
    ),
    "kappa": lambda network, _: ps.paths.kappa(network),
    "second term": lambda network, _: ps.paths.second_term(network),
    "basis values": lambda network, _: ps.paths.basis_values(network, ps.paths.skeleton(network)),
    "degrees of freedom": lambda network, x: ps.paths.degrees_of_freedom(network, x),
    "data-dependent norm": ps.paths.data_dependent_norm,
    "data-dependent kappa": ps.paths.data_dependent_kappa,
    "balanced weights": lambda network, x: (
        ps.rescaling.balance_(network, x),
        network.model.state_dict(),
    ),
    "rescaled weights": lambda network, _: (
        ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0)),
        network.model.state_dict(),
    ),
}
RULES = {
    "PathSGD": {"momentum": 0.9, "clip_norm": 1.0, "second_term": True},
    "PathSGD with a short step": {
        "refresh_every": 3,
        "clip_step": 1.0,
        "damping": 0.01,
        "path_decay": 0.01,
    },
    "PathAdam": {"power": 0.5, "amsgrad": True},
    "PathGradientAdam": {},
    "PathSOAP": {},
    "PathMuon": {},
    "GSGD": {"momentum": 0.9, "clip_norm": 1.0},
    "GAdam": {},
    "DDPSGD": {},
    "DDPSGD by signs": {"statistic": "covariance", "estimator": "signs", "refresh_every": 2},
    "DDPAdam": {"estimator": "signs"},
    "QuasiDiagonal": {},
}


def moved(values, device):
    """Copies of all tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), values)


def on(device):
    return SecondDevice() if device == DEVICE else contextlib.nullcontext()


def built(name, device):
    case = BY_NAME[name]
    x = moved(case.example(4), device)
    model = case.model().to(device)
    return case, model, x, ps.trace(model, x)


def both(compute):
    results = []
    for device in (torch.device("cpu"), DEVICE):
        with on(device):
            results.append(moved(compute(device), "cpu"))
    return results


def test_the_device_refuses_to_be_mixed_with_the_cpu():
    with on(DEVICE):
        there = torch.ones(3, device=DEVICE)
        assert there.device == DEVICE
        assert torch.equal((2 * there).cpu(), torch.full((3,), 2.0))
        assert (there * torch.tensor(2.0)).device == DEVICE
        with pytest.raises(RuntimeError, match="mixes a tensor on cpu"):
            there + torch.ones(3)


# each of these is another one with more layers, groups or directions
LARGER = ("skip", "depthwise", "bidirectional rnn")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGER else ()) for n in NAMES]
)
def test_path_geometry_on_another_device(name):
    def compute(device):
        _, _, x, network = built(name, device)
        # in this order: the last two change the weights
        return {what: moved(quantity(network, x), "cpu") for what, quantity in PATHS.items()}

    here, there = both(compute)
    for what in PATHS:
        assert_close(
            there[what],
            here[what],
            rtol=1e-5,
            atol=1e-7,
            equal_nan=True,
            msg=lambda m, w=what: f"{w}: {m}",
        )


def trained(rule, name, device):
    case, model, x, network = built(name, device)
    optimizer = getattr(ps.optim, rule.split()[0])(
        model.parameters(), network, lr=1e-2, **RULES[rule]
    )
    for _ in range(3):
        optimizer.zero_grad()
        case.picked(call(model, x)).square().mean().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return model.state_dict()


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", ["DDPSGD", "DDPAdam", "QuasiDiagonal", "PathSGD"])
def test_processes_talk_about_tensors_of_the_device_alone(rule, monkeypatch):
    """NCCL refuses tensors on the CPU."""
    devices = []
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda t, *_, **__: devices.append(t.device))
    options = {"frame": ps.metrics.Frame("measure")} if rule == "PathSGD" else {}
    with on(DEVICE):
        _, model, x, network = built("mlp", DEVICE)
        optimizer = getattr(ps.optim, rule)(model.parameters(), network, lr=1e-2, **options)
        model(x).square().mean().backward()
        optimizer.step()
    assert set(devices) == {DEVICE}


AS_ANOTHER = {"PathGradientAdam": "PathAdam", "GAdam": "GSGD", "DDPAdam": "DDPSGD by signs"}


def pairs():
    """Every rule with a metric or a rule of its own on one of four kinds of networks, in turn; the others are slow."""
    kinds = "mlp", "rnn", "batch norm", "characters"
    for number, rule in enumerate(RULES):
        for place, name in enumerate(kinds):
            quick = place == number % len(kinds) and rule not in AS_ANOTHER
            marks = () if quick else pytest.mark.slow
            yield pytest.param(name, rule, marks=marks)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "rule"), list(pairs()))
def test_training_on_another_device(name, rule):
    here, there = both(lambda device: trained(rule, name, device))
    # PathSOAP's basis magnifies rounding, which here depends on how tensors lie in memory
    assert_close(there, here, rtol=1e-2 if rule == "PathSOAP" else 1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("PathSGD", "clip_norm"),
        ("PathSGD", "clip_step"),
        ("Invariant", "clip_norm"),
        ("GSGD", "clip_norm"),
    ],
)
@pytest.mark.sample(2)
def test_a_norm_is_that_of_parameters_on_both_devices(kind, bound, monkeypatch):
    """Of numbers, which the device lets mix, but a stack does not."""
    stack = torch.stack

    def strict(tensors, *args, **options):
        assert len({t.device for t in tensors}) == 1
        return stack(tensors, *args, **options)

    monkeypatch.setattr(torch, "stack", strict)
    with on(DEVICE):
        _, model, x, network = built("mlp", DEVICE)
        outside = torch.nn.Parameter(torch.ones(3))
        options = {bound: 1e-3} | ({"rule": torch.optim.SGD} if kind == "Invariant" else {})
        optimizer = getattr(ps.optim, kind)(
            [*model.parameters(), outside], network, lr=1.0, **options
        )
        (model(x).square().mean().cpu() + outside.square().sum()).backward()
        optimizer.step()
    assert 0 < float((outside.detach() - 1).norm()) <= 1.001e-3


@pytest.mark.parametrize("kind", ["covariance", "second_moment"])
def test_normalization_on_another_device(kind):
    def compute(device):
        _, model, x, network = built("mlp", device)
        model = ps.nn.ddp_normalize(model, network, alpha=0.5, statistic=kind)
        output = model.train()(x)
        output.square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        return output, gradients, ps.nn.fold(model.eval())(x)

    here, there = both(compute)
    assert_close(there, here, rtol=1e-5, atol=1e-7)


def test_a_model_is_checked_and_trained_further_where_it_was_moved():
    """The state follows with load_state_dict, as the error says."""
    with on(DEVICE):
        _, model, x, network = built("mlp", torch.device("cpu"))
        optimizer = ps.optim.PathSGD(
            model.parameters(), network, lr=0.01, momentum=0.9, refresh_every=2
        )
        for device in ("cpu", DEVICE):
            model.to(device)
            optimizer = _again(optimizer, model, network) if device == DEVICE else optimizer
            model(x.to(device)).square().mean().backward()
            optimizer.step()
        assert all(p.device == DEVICE for p in model.parameters())


def _again(optimizer, model, network):
    other = ps.optim.PathSGD(
        model.parameters(),
        ps.trace(model, torch.zeros(1, 3, device=DEVICE)),
        lr=0.01,
        momentum=0.9,
        refresh_every=2,
    )
    other.load_state_dict(optimizer.state_dict())
    return other


def test_a_model_that_was_moved_behind_its_network_is_refused():
    """Where moving makes other parameters, as from the meta device and to this one; on a GPU it keeps them."""
    _, model, x, network = built("mlp", torch.device("cpu"))
    optimizer = ps.optim.PathSGD(model.parameters(), network, lr=0.01)
    with on(DEVICE):
        model.to(DEVICE)
        model(x.to(DEVICE)).square().mean().backward()
        with pytest.raises(
            RuntimeError, match=r"'0\.weight' was replaced after tracing .* another kind of device"
        ):
            optimizer.step()
    with torch.device("meta"):
        model = BY_NAME["mlp"].model()
    network = ps.trace(model, x)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"another kind of device.*: trace the model again"):
        network.check_current()
