"""The recurrent CNN against a written-out recurrence, and what of it can be rescaled."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps


def network_and_images(**options):
    torch.manual_seed(0)
    options = {"maps": 3, "layers": 2, "unfoldings": 2, **options}
    model = ps.nn.RecurrentCNN(1, 2, **options).double()
    images = torch.randn(4, 1, 6, 6, dtype=torch.float64)
    model(images)  # statistics that are not 0 and 1
    return model.eval(), images


@pytest.mark.parametrize("layers", [2, 4])
def test_it_is_the_recurrence(layers):
    model, images = network_and_images(layers=layers)
    x = images
    for number, layer in enumerate(model.layers):
        entering = functional.conv2d(x, layer.forth.weight, padding=1)
        h = None
        for norm in layer.norms:
            z = (
                entering
                if h is None
                else entering + functional.conv2d(h, layer.back.weight, padding=1)
            )
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
            h = (
                (z - norm.running_mean[:, None, None]) * scale[:, None, None]
                + norm.bias[:, None, None]
            ).clamp(min=0)
        x = functional.max_pool2d(h, 3, 2, 1) if number in (0, 2) else h
    assert_close(
        model(images), functional.linear(x.amax((2, 3)), model.readout.weight, model.readout.bias)
    )


@pytest.mark.parametrize("unfoldings", [1, 3])
def test_its_unit_classes(unfoldings):
    model, images = network_and_images(unfoldings=unfoldings)
    network = ps.trace(model, images)
    # per layer: the maps that are fed back, and those of the last unfolding
    assert network.num_classes == 2 * 2 * 3
    fed_back = [
        c for c in network.unit_classes if ("layers.0.back.weight", (0, 0, 0, 0)) in c.outgoing
    ]
    assert len(fed_back) == 1
    gains = {
        name for name, _ in fed_back[0].incoming if name.endswith("weight") and "norms" in name
    }
    assert gains == {f"layers.0.norms.{t}.weight" for t in range(unfoldings)}
    # the sums before BatchNorm have the fixed scale 1
    assert not bool(network.edges["layers.0.forth.weight"].target.any())


def test_rescaling_preserves_it_in_both_forms():
    model, images = network_and_images()
    network = ps.trace(model, images)
    before = model(images), model.train()(images)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0))
    assert_close(model.train()(images), before[1])
    model, images = network_and_images()
    network = ps.trace(model, images)
    ps.rescaling.random_rescale_(network, generator=torch.Generator().manual_seed(0))
    assert_close(model(images), before[0])


def test_path_sgd_trains_it_invariantly():
    model, images = network_and_images()
    report = ps.rescaling.check_invariance(
        model.float(),
        images.float(),
        lambda output: output.square().mean(),
        lambda model, network: ps.optim.PathSGD(model.parameters(), network, lr=0.01),
        steps=5,
    )
    assert report.passed


def test_dropout_lies_between_layers():
    model, images = network_and_images()
    dropping, _ = network_and_images(dropout=0.5)
    dropping.load_state_dict(model.state_dict())
    assert_close(dropping(images), model(images))
    kept = []
    dropping.train().layers[1].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    torch.manual_seed(1)
    dropping(images)
    torch.manual_seed(1)
    pooled = functional.max_pool2d(model.train().layers[0](images), 3, 2, 1)
    assert_close(kept[0], functional.dropout(pooled, 0.5))
    single, _ = network_and_images(layers=1, dropout=0.5)
    assert_close(single.train()(images), network_and_images(layers=1)[0].train()(images))


def test_dropout_leaves_training_invariant():
    model, images = network_and_images(dropout=0.5)
    report = ps.rescaling.check_invariance(
        model.float().train(),
        images.float(),
        lambda output: output.square().mean(),
        lambda model, network: ps.optim.PathSGD(model.parameters(), network, lr=0.01),
        steps=5,
    )
    assert report.passed


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="dropout"):
        ps.nn.RecurrentCNN(1, 2, dropout=1.0)
    with pytest.raises(ValueError, match="unfoldings must be a whole number"):
        ps.nn.RecurrentCNN(1, 2, unfoldings=0)
    with pytest.raises(ValueError, match="odd"):
        ps.nn.recurrent_cnn.RecurrentConvolution(1, 2, kernel=4)
