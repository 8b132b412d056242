"""Tensors that share memory: writing into one of them changes the others.

The oracle lists every path, by running the model on real tensors, whose memory says what is shared.
"""

import pytest
import torch
from torch import nn

import pathspace as ps

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, **DOUBLE), nn.Linear(3, 4, **DOUBLE)
        self.step, self.out = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 2, **DOUBLE)
        self._function = function

    def forward(self, x):
        return self._function(self, x)


def a_view_is_changed(m, x):
    h = m.a(x).view(-1, 2, 2)
    h += m.b(x).view(-1, 2, 2)
    return m.out(h.relu().flatten(1))


def the_owner_is_changed_and_a_view_is_read(m, x):
    h = m.a(x)
    seen = h.view(-1, 2, 2).transpose(1, 2)
    h += m.b(x)
    return m.out(seen.relu().flatten(1))


def a_view_is_changed_and_the_owner_is_read(m, x):
    h = m.a(x)
    h[:, 1:3].add_(m.b(x)[:, :2])
    return m.out(h.relu())


def one_half_is_changed_and_both_are_read(m, x):
    h = m.a(x)
    left, right = h[:, :2], h[:, 2:]
    left += m.b(x)[:, 2:]
    return m.out(torch.cat([left.relu(), right], 1))


def a_view_of_a_view_is_scaled(m, x):
    h = m.a(x)
    h.t()[1:].t()[:, :2].mul_(3.0)
    return m.out(h.relu())


def steps_are_added_to(m, xs):
    seen = m.a(xs)
    h = seen[:, 0].relu()
    for t in range(1, xs.shape[1]):
        now = seen[:, t]
        now += m.step(h)
        h = now.relu()
    return m.out(h)


def steps_are_assigned(m, xs):
    seen = m.a(xs)
    for t in range(1, xs.shape[1]):
        seen[:, t] += m.step(seen[:, t - 1].relu())
    return m.out(seen[:, -1].relu() + seen[:, 0].relu())


def an_element_is_replaced_while_a_view_waits(m, x):
    h = m.a(x)
    seen = h.view(-1, 2, 2)
    h[:, 1] = m.b(x)[:, 0]
    return m.out(seen.flatten(1).relu())


def a_relu_in_place_of_a_view(m, x):
    h = m.a(x)
    h[:, :2].relu_()
    return m.out(h)


def a_copy_is_not_changed(m, x):
    h = m.a(x)
    kept = h.flip(-1)
    h += m.b(x)
    return m.out(h.relu() + kept.relu())


def a_reshaped_tensor_is_changed_and_its_origin_is_not_read(m, x):
    h = m.a(x).reshape(-1, 2, 2)
    h *= 0.5
    return m.out(h.relu().flatten(1))


FOLLOWED = [
    (a_view_is_changed, (2, 3)), (the_owner_is_changed_and_a_view_is_read, (2, 3)),
    (a_view_is_changed_and_the_owner_is_read, (2, 3)), (one_half_is_changed_and_both_are_read, (2, 3)),
    (a_view_of_a_view_is_scaled, (2, 3)), (steps_are_added_to, (2, 3, 3)), (steps_are_assigned, (2, 3, 3)),
    (an_element_is_replaced_while_a_view_waits, (2, 3)), (a_relu_in_place_of_a_view, (2, 3)),
    (a_copy_is_not_changed, (2, 3)), (a_reshaped_tensor_is_changed_and_its_origin_is_not_read, (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shape"), FOLLOWED, ids=lambda item: getattr(item, "__name__", ""))
def test_follows_writes_into_shared_memory(function, shape):
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(shape, **DOUBLE)
    network = ps.trace(model, x)
    before = model(x)
    paths = ps.paths.enumerate_paths(network)
    flow = ps.paths.activity(network, x)
    torch.testing.assert_close(
        paths.output(network.parameters, flow), before.reshape(2, -1), rtol=1e-10, atol=1e-10
    )
    known = (paths.factor * paths.values(network.parameters)).square().sum().item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(known, rel=1e-12)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), before)
    assert network.num_classes > 0


def test_refuses_to_guess_whether_memory_is_shared():
    """``reshape`` copies or not, depending on how the values lie in memory."""

    def guess(m, x):
        h = m.a(x)
        seen = h.reshape(-1, 2, 2)
        h += m.b(x)
        return m.out(seen.relu().flatten(1))

    with pytest.raises(ps.UntraceableError, match=r"share memory.*h = h \+ x"):
        ps.trace(Model(guess), torch.randn(2, 3, **DOUBLE))


def test_refuses_to_change_a_parameter():
    def careless(m, x):
        m.a.weight[0].mul_(0.5)
        return m.out(m.a(x).relu())

    with pytest.raises(ps.UntraceableError, match="parameter in place"):
        ps.trace(Model(careless), torch.randn(2, 3, **DOUBLE))
