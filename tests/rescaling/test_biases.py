"""Bias correction: the means of every layer afterwards, by an independent computation."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, bias=False)
        self.scores = nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.scores(torch.relu(x[:, :, 1:-1, 1:-1] + self.depthwise(x)).mean((2, 3)))


def rounded(model, levels=3):
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.dim() > 1:
                step = parameter.abs().max() / levels
                parameter.copy_((parameter / step).round() * step)
    return result


def means(model, x):
    """The mean of each channel of each layer, hooks apart: by calling the layers one after the other."""
    first = model.first(x)
    second = model.depthwise(torch.relu(first))
    h = torch.relu(torch.relu(first)[:, :, 1:-1, 1:-1] + second).mean((2, 3))
    return [first.mean((0, 2, 3)), second.mean((0, 2, 3)), model.scores(h).mean(0)]


def test_layers_have_the_means_of_the_reference():
    torch.manual_seed(0)
    reference, x = Model().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    model = rounded(reference)
    weights = [p.detach().clone() for p in model.parameters() if p.dim() > 1]
    shifts = ps.rescaling.correct_biases_(model, reference, x)
    assert list(shifts) == ["first", "depthwise", "scores"]
    for ours, theirs in zip(means(model, x), means(reference, x), strict=True):
        assert_close(ours, theirs)
    assert_close([p.detach() for p in model.parameters() if p.dim() > 1], weights, rtol=0, atol=0)
    assert isinstance(model.depthwise.bias, nn.Parameter)


def test_nothing_moves_where_nothing_was_rounded():
    torch.manual_seed(0)
    reference, x = Model(), torch.randn(8, 3, 8, 8)
    model = copy.deepcopy(reference).train()
    for shift in ps.rescaling.correct_biases_(model, reference, x).values():
        assert_close(shift, torch.zeros_like(shift))
    assert model.training
    assert model.first.training
    assert not model.first._forward_hooks


def test_a_layer_that_runs_twice_is_left_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(torch.relu(self.shared(torch.relu(self.shared(x)))))

    reference = Twice()
    model = rounded(reference)
    assert list(ps.rescaling.correct_biases_(model, reference, torch.randn(5, 3))) == ["last"]


class WithToken(nn.Module):
    """Adds to every example what a layer makes of one learned vector, which has no batch."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(3))
        self.of_token, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(torch.relu(x + self.of_token(self.token)))


def test_a_layer_may_run_without_a_batch():
    torch.manual_seed(0)
    reference = WithToken().double()
    model, x = rounded(reference), torch.randn(5, 3, dtype=torch.float64)
    assert list(ps.rescaling.correct_biases_(model, reference, x)) == ["of_token", "last"]
    assert_close(model.of_token(model.token), reference.of_token(reference.token))
    assert_close(model(x).mean(0), reference(x).mean(0))


def test_biases_are_absorbed_from_a_layer_without_a_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    x = torch.rand(2, dtype=torch.float64)
    with torch.no_grad():
        model[0].bias.fill_(9.0)
        before = model(x)
        least = model[0](x)
        assert_close(ps.rescaling.absorb_biases_(model, [("0", "2")], x)["0"], least)
        assert_close(model(x), before)


def test_other_models_and_data_are_refused():
    x = torch.randn(5, 3, 8, 8)
    with pytest.raises(ValueError, match="only one of them has depthwise, first, scores"):
        ps.rescaling.correct_biases_(Model(), nn.Flatten(), x)
    with pytest.raises(ValueError, match="neither has any"):
        ps.rescaling.correct_biases_(nn.ReLU(), nn.ReLU(), x)
    model = Model()
    before = model.first.bias.detach().clone()
    with pytest.raises(ValueError, match="the mean of 'first' is not finite"):
        ps.rescaling.correct_biases_(model, copy.deepcopy(model), x * float("inf"))
    assert_close(model.first.bias.detach(), before, rtol=0, atol=0)


def high(padding=0):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=padding, groups=2), nn.ReLU()),
        *(nn.Conv2d(4, 2, 1, bias=False), nn.ReLU(), nn.Flatten()),
    ).double()
    with torch.no_grad():
        model[0].bias += torch.tensor([5.0, -5.0, 0.0, 8.0])
        model[2].bias += 20
    return model, torch.randn(6, 3, 8, 8, dtype=torch.float64)


def test_a_convolution_with_valid_padding_is_not_padded():
    model, x = high(padding="valid")
    before = model(x)
    assert list(ps.rescaling.absorb_biases_(model, [("0", "2")], x)) == ["0"]
    assert_close(model(x), before)


def test_high_biases_are_absorbed_and_the_outputs_stay():
    model, x = high()
    before, first = model(x), model[0](x).detach().amin((0, 2, 3))
    absorbed = ps.rescaling.absorb_biases_(model, [("0", "2"), ("2", "4")], x)
    assert_close(absorbed["0"], first.clamp_min(0))
    assert absorbed["0"][1] == 0
    assert_close(model(x), before)
    assert_close(
        model[0](x).detach().amin((0, 2, 3)).clamp_min(0), torch.zeros(4, dtype=torch.float64)
    )


def test_statistics_of_batch_norm_say_how_much_is_absorbed():
    model, _ = high()
    bias, weight = model[0].bias.detach().clone(), model[2].weight.detach()
    lowest = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    other = model[2].bias.detach().clone()
    ps.rescaling.absorb_biases_(model, [("0", "2")], lowest={"0": lowest})
    c = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    assert_close(model[0].bias.detach(), bias - c)
    sums = weight.sum((2, 3))
    expected = torch.stack([sums[0] @ c[:2], sums[1] @ c[:2], sums[2] @ c[2:], sums[3] @ c[2:]])
    assert_close(model[2].bias.detach(), other + expected)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([("0", "1")], "'1' is no linear layer or convolution: give two of 0, 2, 4"),
        ([("4", "0")], "'4' has no bias to absorb"),
        ([("2", "0")], "'0' does not read the 4 channels of '2'"),
        ([("0", "4")], "nothing but a ReLU between"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(pairs, says):
    model, x = high()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        ps.rescaling.absorb_biases_(model, pairs, x)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_padding_and_missing_data_are_refused():
    model, x = high(padding=1)
    with pytest.raises(ValueError, match="'2' is padded or transposed"):
        ps.rescaling.absorb_biases_(model, [("0", "2")], x)
    with pytest.raises(ValueError, match="give either calibration data or the lowest values"):
        ps.rescaling.absorb_biases_(model, [("0", "2")])
