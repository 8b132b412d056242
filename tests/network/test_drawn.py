"""Random functions of constants: no draw of a trace decides on classes, path norm or kappa.

The oracle of kappa is the model in evaluation form. The oracle of unit classes are the outputs of a
rescaled copy under the same random state.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    """A hidden layer, and what a function makes of it and of a table in a buffer."""

    def __init__(self, function, shape):
        super().__init__()
        self.read, self.out = nn.Linear(3, 4, **DOUBLE), nn.Linear(4, 2, **DOUBLE)
        self.kernel = nn.Parameter(torch.ones(4, **DOUBLE))
        self.register_buffer(
            "table", torch.linspace(-1, 2, 16, **DOUBLE)[: torch.Size(shape).numel()].view(shape)
        )
        self.plain = self.table + 0.5  # an attribute
        self._function = function

    def forward(self, x):
        return self.out(self._function(self, self.read(x)).relu())


DRAWS = {
    "dropout": lambda t, m: functional.dropout(t, 0.5, m.training),
    "dropout by torch": lambda t, m: torch.dropout(t, 0.5, m.training),
    "dropout in place": lambda t, m: functional.dropout(t.clone(), 0.5, m.training, True),
    "dropout1d": lambda t, m: functional.dropout1d(t.view(1, 4, -1), 0.5, m.training).view(t.shape),
    "dropout2d": lambda t, m: functional.dropout2d(t.view(1, 4, 1, -1), 0.5, m.training).view(
        t.shape
    ),
    "alpha dropout": lambda t, m: functional.alpha_dropout(t, 0.5, m.training),
    "feature alpha dropout": lambda t, m: functional.feature_alpha_dropout(
        t.view(1, 4, -1), 0.5, m.training
    ).view(t.shape),
    "rrelu": lambda t, m: functional.rrelu(t, training=m.training),
    "attention": lambda t, m: functional.scaled_dot_product_attention(
        *[t.view(1, 2, -1)] * 3, dropout_p=0.5 * m.training
    ).view(t.shape),
    "a layer": lambda t, m: nn.Dropout(0.5).train(m.training)(t),
}
USES = {
    "times a parameter": ((4,), lambda m, h, draw: h + draw(m.table) * m.kernel),
    "times units": ((4,), lambda m, h, draw: h * draw(m.table)),
    "of an attribute": ((4,), lambda m, h, draw: h * draw(m.plain)),
    "of a constant": ((4,), lambda _, h, draw: h * draw(torch.arange(4.0, **DOUBLE))),
    "a matrix": ((4, 4), lambda m, h, draw: h.relu() @ draw(m.table)),
    "then a sum": ((4,), lambda m, h, draw: h * (draw(m.table) + 1)),
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_trace_depends_on_no_draw(draw, use):
    shape, function = USES[use]
    torch.manual_seed(0)
    model = Model(lambda m, h: function(m, h, lambda t: DRAWS[draw](t, m)), shape).train()
    x = torch.randn(5, 3, **DOUBLE)
    dry = ps.trace(copy.deepcopy(model).eval(), x)
    networks = [ps.trace(model, x) for _ in range(3)]
    for network in networks:
        assert network.num_classes == networks[0].num_classes
        for name, kappa in ps.paths.kappa(dry).items():
            torch.testing.assert_close(ps.paths.kappa(network)[name], kappa, rtol=1e-12, atol=0)
    rescaled = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    ps.rescaling.random_rescale_(ps.trace(rescaled, x), powers_of_two=True, generator=generator)
    for seed in range(5):
        outputs = []
        for one in (model, rescaled):
            torch.manual_seed(seed)
            outputs.append(one(x))
        assert torch.equal(*outputs)


CHOOSING = {
    "layerdrop": lambda m, h: h if torch.rand([]) < 0.5 else h + m.kernel,
    "one of several": lambda _, h: h if torch.rand_like(h[0, 0]) < 0.5 else h.tanh(),
    "an index": lambda m, h: h[:, functional.dropout(m.table, 0.5, m.training) > 0],
    "a question": lambda m, h: (
        h if functional.dropout(m.table, 0.5, m.training).sum() > 0 else h.abs()
    ),
    "a number": lambda m, h: h * float(functional.dropout(m.table, 0.5, m.training)[0]),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_no_draw_decides_on_steps(name):
    model = Model(CHOOSING[name], (4,)).train()
    with pytest.raises(ps.UntraceableError, match="random numbers that it draws decide"):
        ps.trace(model, torch.randn(5, 3, **DOUBLE))


def test_a_choice_by_a_draw_ties_both_branches():
    model = Model(
        lambda m, h: torch.where(
            functional.dropout(torch.ones(4), 0.5, m.training) > 0, h, h.flip(1)
        ),
        (4,),
    ).train()
    x = torch.randn(5, 3, **DOUBLE)
    network = ps.trace(model, x)
    assert network.num_classes == 2
    torch.manual_seed(3)
    before = model(x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    torch.manual_seed(3)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "make", [lambda h: functional.dropout(h, 0.5, False), lambda h: functional.dropout(h, 0.0)]
)
def test_a_dropout_that_drops_nothing_is_the_tensor_itself(make):
    """So a write into its result is one into what entered."""

    def written(_, h):
        h = h.clone()
        make(h)[:, 0] = 3.0
        return h

    model, x = Model(written, (4,)), torch.randn(5, 3, **DOUBLE)
    before = model(x)
    network = ps.trace(model, x)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), before)
