"""A captured pass against the model itself: pure, whole where it is asked, and with the model's own values."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from pathspace.graph import capture as subject
from pathspace.graph.capture import Capture, KeepsWhole, plain, wrapped


class Writing(nn.Module):
    """Writes through views, asks for values, and holds a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.rnn = nn.RNN(4, 3, nonlinearity="relu", batch_first=True)

    def forward(self, x):
        h = torch.relu_(self.a(x))
        h.view(-1, 2, 4)[:, 0].mul_(2.0)
        h.add_(1.0 * h.roll(0, 1))
        if (x > 100).any() or x.sum().item() > 1000:
            h = h * 2
        return self.rnn(nn.functional.layer_norm(self.b(h), [4])[:, None])[0]


def captured(model, x, handler=lambda *_: NotImplemented):
    capture, given = Capture(), wrapped(x)
    capture.derived.add(id(plain(given)))
    state = {name: wrapped(p.detach()) for name, p in model.named_parameters()}
    with capture.running(), KeepsWhole(lambda *call: handler(capture, *call)):
        result = plain(functional_call(model, state, (given,)))
    return capture, result


def layer_norm_whole(capture, mode, func, args, kwargs):
    if resolve_name(func) != "torch.nn.functional.layer_norm":
        return NotImplemented
    return capture.whole("layer_norm", func, args, kwargs, None)


def test_a_pass_has_the_values_of_the_model():
    torch.manual_seed(0)
    model, x = Writing().double(), torch.randn(2, 6, dtype=torch.float64)
    before = [p.clone() for p in model.parameters()]
    capture, result = captured(model, x)
    assert torch.equal(result, model(x))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert id(result) in capture.derived


def test_steps_write_into_nothing_and_can_be_run_again():
    torch.manual_seed(0)
    capture, _ = captured(Writing().double(), torch.randn(2, 6, dtype=torch.float64))
    for step in capture.steps:
        assert not step.function._schema.is_mutable
        again = step.function(*step.args, **step.kwargs)
        for a, b in zip(*map(pytree.tree_leaves, (again, step.result)), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_function_is_kept_whole():
    torch.manual_seed(0)
    model, x = Writing().double(), torch.randn(2, 6, dtype=torch.float64)
    capture, result = captured(model, x, layer_norm_whole)
    names = [step.name for step in capture.steps]
    assert names.count("layer_norm") == 1
    assert "native_layer_norm" not in names
    assert torch.equal(result, model(x))


def test_what_depends_on_the_inputs_alone_is_known():
    capture = Capture()
    x, w = wrapped(torch.ones(2)), wrapped(torch.ones(2))
    capture.derived.add(id(plain(x)))
    capture.learned.add(id(plain(w)))
    with capture.running():
        moved, product, constant = x.flip(0), x * w, torch.ones(2)
        assert [capture.depends_on_inputs_alone(t) for t in (x, moved, product, constant, w)] == [
            True,
            True,
            False,
            False,
            False,
        ]


NAMES = [
    *("_enable", "_disable", "_to_functional", "_from_functional", "_is_functional", "_sync"),
    *(
        "_add_batch_dim",
        "_batch_dim",
        "_is_batched",
        "_level",
        "_set_fallback_warning",
        "_unwrapped",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_private_names_of_torch_are_there(name):
    """Without them nothing is captured: no path is written down, and nothing is measured on data."""
    assert callable(getattr(subject, name))
