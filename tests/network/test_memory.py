"""Tensors that share memory: writing into one of them changes the others.

The oracle lists every path, by running the model on real tensors, whose memory says what is shared.
"""
# ruff: noqa: ARG005

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


def a_part_is_replaced_by_what_has_a_dimension_of_one_before_it(m, x):
    h = m.a(x).view(-1, 2, 2)
    seen = h.view(-1, 4)
    h[:, 1] = m.b(x)[None, :, :2]
    return m.out(seen.relu())


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
    (a_part_is_replaced_by_what_has_a_dimension_of_one_before_it, (2, 3)),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("function", "shape"), FOLLOWED, ids=lambda item: getattr(item, "__name__", "")
)
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


ZEROS = torch.zeros(4, **DOUBLE)


def times_zeros(m, x):
    h = m.a(x).relu()
    h.mul_(ZEROS)
    return m.out(h)


def times_zeros_by_an_operator(m, x):
    h = m.a(x).relu()
    h *= ZEROS
    return m.out(h.relu() + m.b(x).relu())


def a_view_times_zeros(m, x):
    h = m.a(x).relu()
    h[:, :3].mul_(ZEROS[:3])
    return m.out(h)


def a_view_times_zero(m, x):
    h = m.a(x).relu()
    h[:, :3].mul_(0)
    return m.out(h)


def the_owner_times_zeros(m, x):
    h = m.a(x).relu()
    seen = h[:, 1:3]
    h *= torch.tensor([1.0, 1.0, 0.0, 0.0], **DOUBLE)
    return m.out(torch.cat([seen, h[:, :2]], 1))


def units_times_new_zeros(m, x):
    h = m.a(x).relu()
    return m.out(h * torch.zeros_like(h) + m.b(x).relu())


def zeros_times_units(m, x):
    h = m.a(x).relu()
    y = torch.zeros_like(h)
    y.mul_(h)
    return m.out(y + m.b(x).relu())


def plus_zeros(m, x):
    h = m.a(x).relu()
    h[:, :2].add_(ZEROS[:2])
    return m.out(h)


def divided_by_infinities(m, x):
    h = m.a(x).relu()
    h[:, 1:].div_(torch.full((3,), torch.inf, **DOUBLE))
    return m.out(h)


def zeros_assigned(m, x):
    h = m.a(x).relu()
    h[:, [0, 2]] = 0
    h[:, 1:2] = ZEROS[:1]
    return m.out(h)


def masked_with_zeros(m, x):
    h = m.a(x).relu()
    h[:, 1:].masked_fill_(torch.tensor([True, False, True]), 0.0)
    return m.out(h)


def indices_changed_after_a_read(m, x):
    h, places = m.a(x).relu(), torch.arange(4)
    moved = h[:, places]
    places.zero_()
    return m.out(moved)


def indices_changed_after_a_write(m, x):
    h, places = m.a(x).relu(), torch.tensor([0, 1])
    h[:, places] = m.b(x)[:, 2:].relu()
    places += 2
    return m.out(h)


def indices_changed_after_a_gather(m, x):
    h = m.a(x).relu()
    places = torch.arange(4).repeat(len(h), 1)
    moved = h.gather(1, places)
    places.zero_()
    return m.out(moved)


ZEROS_WRITTEN = [
    times_zeros, times_zeros_by_an_operator, a_view_times_zeros, a_view_times_zero, the_owner_times_zeros,
    units_times_new_zeros, zeros_times_units, plus_zeros, divided_by_infinities, zeros_assigned, masked_with_zeros,
    indices_changed_after_a_read, indices_changed_after_a_write, indices_changed_after_a_gather,
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("function", ZEROS_WRITTEN, ids=lambda item: item.__name__)
def test_writes_of_zeros_and_changed_indices_are_those_of_the_model(function):
    """The constants are zeros and ones, so the model itself on squared weights and ones is the squared network."""
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(2, 3, **DOUBLE)
    network = ps.trace(model, x)
    before = model(x)
    squares = {name: p.detach().square() for name, p in model.named_parameters()}

    def mass(**changed):
        ones = torch.ones(1, 3, **DOUBLE)
        with torch.no_grad():
            return torch.func.functional_call(model, squares | changed, (ones,)).sum()

    total = mass()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(total.item(), rel=1e-12)
    # no path has a weight twice: the mass is linear in each
    for name, kappa in ps.paths.kappa(network).items():
        q, unit = squares[name], torch.eye(kappa.numel(), **DOUBLE)
        slopes = torch.stack([mass(**{name: q + one.reshape(q.shape)}) - total for one in unit])
        torch.testing.assert_close(kappa.flatten(), slopes, rtol=1e-10, atol=1e-12, msg=name)
    paths = ps.paths.enumerate_paths(network)
    known = (paths.factor * paths.values(network.parameters)).square().sum().item()
    assert known == pytest.approx(total.item(), rel=1e-12)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(x), before)
    assert ps.paths.data_dependent_norm(network, x, alpha=0.5).item() > 0


def test_refuses_a_view_of_what_a_softmax_was_written_into():
    def careless(m, x):
        h = m.a(x).relu()
        seen = h[:, :2]
        h.mul_(h.softmax(1))
        return m.out(torch.cat([seen, seen], 1))

    with pytest.raises(ps.UntraceableError, match=r"'mul_'.*shares memory"):
        ps.trace(Model(careless), torch.randn(2, 3, **DOUBLE), strict=True)


def test_refuses_to_guess_whether_memory_is_shared():
    """``reshape`` copies or not, depending on how the values lie in memory."""

    def guess(m, x):
        h = m.a(x)
        seen = h.reshape(-1, 2, 2)
        h += m.b(x)
        return m.out(seen.relu().flatten(1))

    with pytest.raises(ps.UntraceableError, match=r"share memory.*h = h \+ x"):
        ps.trace(Model(guess), torch.randn(2, 3, **DOUBLE))


CHANGES = {
    "a row": lambda w: w[0].mul_(0.5),
    "all of it": lambda w: w.mul_(0.5),
    "its data": lambda w: w.data.mul_(0.5),
    "by zeros": lambda w: w.mul_(torch.zeros(3, **DOUBLE)),
    "elements": lambda w: w.__setitem__((0, slice(None)), 0.0),
    "masked": lambda w: w.masked_fill_(torch.eye(4, 3).bool(), 0.0),
    "relu": lambda w: torch.relu_(w),
    "relu by an option": lambda w: torch.nn.functional.relu(w, inplace=True),
    "clamped": lambda w: w.clamp_(min=0),
    "through the same type": lambda w: w.to(torch.float64).mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refuses_to_change_a_parameter(change):
    def careless(m, x):
        CHANGES[change](m.a.weight)
        return m.out(m.a(x).relu())

    with pytest.raises(ps.UntraceableError, match=r"changes the parameter 'a\.weight' in place"):
        ps.trace(Model(careless), torch.randn(2, 3, **DOUBLE))


def test_a_copy_of_a_parameter_may_be_changed():
    model = Model(
        lambda m, x: m.out(torch.nn.functional.linear(x, m.a.weight.clone().mul_(2.0)).relu())
    )
    network = ps.trace(model, torch.randn(2, 3, **DOUBLE))
    squares = {name: p.detach().square() for name, p in model.named_parameters()}
    hidden = 4 * squares["a.weight"].sum(1)
    expected = (squares["out.weight"] @ hidden + squares["out.bias"]).sum().item()
    assert ps.paths.squared_path_norm(network).item() == pytest.approx(expected)


REPLACED = {
    "set_": (lambda m, h: h.set_(h.flip(1)), "'set_'.*memory of a tensor"),
    "swapped": (lambda m, h: torch.utils.swap_tensors(h, h.flip(1)), "'swap_tensors'.*memory of a tensor"),
    "its data": (lambda m, h: setattr(h, "data", h.flip(1)), r"data\.__set__.*memory of a tensor"),
    "resized": (lambda m, h: h.resize_(h.shape[0], 4), "'resize_'.*memory of a tensor"),
    "a parameter's data": (
        lambda m, h: setattr(m.step.weight, "data", m.step.weight.data.t()), r"data\.__set__.*memory of a tensor",
    ),
    "a parameter's data, by a constant": (
        lambda m, h: setattr(m.step.weight, "data", torch.zeros(4, 4, **DOUBLE)), r"data\.__set__.*memory",
    ),
    "a parameter set": (lambda m, h: m.step.weight.set_(m.step.weight.t()), "'set_'.*parameter 'step.weight'"),
    "a parameter set to a constant": (lambda m, h: m.step.weight.set_(torch.zeros(4, 4, **DOUBLE)), "'set_'.*memory"),
    "parameters swapped": (
        lambda m, h: torch.utils.swap_tensors(m.a.weight, m.b.weight), "'swap_tensors'.*parameter '[ab].weight'",
    ),
    "another parameter": (
        lambda m, h: setattr(m.step, "weight", nn.Parameter(torch.zeros(4, 4, **DOUBLE), requires_grad=False)),
        r"replaces the parameter 'step\.weight' by another",
    ),
    "strides": (lambda m, h: h.as_strided_((h.shape[0], 4), (0, 1)), "as_strided_"),
    "storage": (lambda m, h: h.untyped_storage().fill_(0), "untyped_storage"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_refuses_to_lose_sight_of_memory_that_is_replaced(name):
    change, message = REPLACED[name]

    def careless(m, x):
        h = m.a(x).relu()
        change(m, h)
        return m.out(m.step(h) + m.a(x) + m.b(x))

    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(Model(careless), torch.randn(2, 3, **DOUBLE))


def test_inference_mode_is_no_obstacle():
    with torch.inference_mode():
        model = Model(lambda m, x: m.out(m.a(x).relu()))
        assert ps.trace(model, torch.zeros(2, 3, **DOUBLE)).num_classes == 4
