"""What a user may write for outside=, and what a strict trace tells the user to write."""

import ast
import re

import pytest
import torch
from torch import nn

import pathspace as ps

X = torch.randn(4, 3)


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 5), nn.LayerNorm(5)
        self.activation, self.outer = activation, nn.Linear(5, 3)

    def forward(self, x):
        return x + self.outer(self.activation(self.norm(self.inner(x)).relu()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [Block(nn.GELU()), Block(nn.Identity()), Block(nn.GELU()), Block(nn.Tanh())]
        )
        self.norm = nn.LayerNorm(3)
        self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def names(model, *kinds):
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("outside", "meant"),
    [
        (
            nn.LayerNorm,
            ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "blocks.3.norm", "norm"],
        ),
        ([nn.GELU, nn.Tanh], ["blocks.0.activation", "blocks.2.activation", "blocks.3.activation"]),
        ("blocks.*.norm", ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "blocks.3.norm"]),
        (["blocks.[01].*", "norm"], None),
        ("norm", ["norm"]),
    ],
)
def test_classes_and_patterns_mean_the_modules_that_they_name(outside, meant):
    model = Model()
    network = ps.trace(model, X, outside=outside)
    if meant is None:
        meant = [p for p, _ in model.named_modules() if re.match(r"blocks\.[01]\.", p)] + ["norm"]
    same = ps.trace(model, X, outside=meant)
    assert network.call.outside == same.call.outside == set(meant)
    assert network.outside == same.outside
    assert network.num_classes == same.num_classes


def test_a_model_is_no_part_of_itself():
    model = Model()
    assert ps.trace(model, X, outside="*[0-9]").call.outside == {
        p for p, _ in model.named_modules() if p[-1:].isdigit()
    }
    with pytest.raises(ValueError, match="Model is no module of the model"):
        ps.trace(model, X, outside=Model)


def test_a_module_whose_name_is_a_pattern_is_meant_by_its_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.add_module("a[0]", nn.Linear(3, 3))
    model.add_module("a0", nn.Linear(3, 3))
    assert ps.trace(model, X, outside="a[0]").call.outside == {"a[0]"}


@pytest.mark.parametrize(("outside", "shown"), [(nn.LSTM, "LSTM"), ("layers.*", r"'layers\.\*'")])
def test_what_names_nothing_is_refused(outside, shown):
    with pytest.raises(
        ValueError, match=rf"outside={shown} is no module of the model; its modules are 'blocks'"
    ):
        ps.trace(Model(), X, outside=outside)


def pasted(message):
    (found,) = re.findall(r"^outside=(\[.*\])$", message, re.M)
    return ast.literal_eval(found)


def test_a_strict_trace_lists_all_obstacles_to_paste():
    model = Model()
    with pytest.raises(ps.UntraceableError) as caught:
        ps.trace(model, X, strict=True)
    assert (caught.value.operation, caught.value.module) == ("gelu", "blocks.0.activation")
    message = str(caught.value)
    assert "'gelu' in 'blocks.0.activation', 'blocks.2.activation': " in message
    assert "'tanh' in 'blocks.3.activation': " in message
    assert pasted(message) == names(model, nn.GELU, nn.Tanh)
    ps.trace(model, X, strict=True, outside=pasted(message))


def test_what_is_outside_already_stays_in_the_list():
    model = Model()
    with pytest.raises(ps.UntraceableError) as caught:
        ps.trace(model, X, strict=True, outside=nn.Tanh)
    assert sorted(pasted(str(caught.value))) == names(model, nn.GELU, nn.Tanh)


def test_hooks_are_obstacles_too():
    model = Model()
    model.head[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ps.UntraceableError, match="forward hook") as caught:
        ps.trace(model, X, strict=True)
    assert sorted(pasted(str(caught.value))) == sorted([*names(model, nn.GELU, nn.Tanh), "head.0"])
    ps.trace(model, X, strict=True, outside=pasted(str(caught.value)))


def test_one_obstacle_is_told_as_it_is():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with pytest.raises(ps.UntraceableError, match=r"outside=\['1'\]\.$"):
        ps.trace(model, X, strict=True)


def test_what_the_model_does_itself_ends_the_list():
    class Last(Model):
        def forward(self, x):
            return self.head(super().forward(x)[:, :1].sigmoid() * x)

    with pytest.raises(ps.UntraceableError) as caught:
        ps.trace(Last(), X, strict=True)
    assert "The last one ('sigmoid') stands in" in str(caught.value)
    assert "in forward: " in str(caught.value)
