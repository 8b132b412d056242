"""Guards against numbers that are not finite, refusals in a model's own ``try``, and sizes computed from data."""
# ruff: noqa: ARG005

import numpy as np
import pytest
import torch
from torch import nn

import pathspace as ps

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.middle, self.out = (
            nn.Linear(*n, **DOUBLE) for n in ((3, 4), (4, 4), (4, 2))
        )
        self._function = function

    def forward(self, x):
        return self.out(self._function(self, self.read(x).relu(), x))


def check_kept(model, classes):
    """The trace has so many classes, and rescaling them changes no bit of the outputs."""
    x = torch.randn(5, 3, **DOUBLE)
    before = model(x)
    network = ps.trace(model, x)
    assert network.num_classes == classes
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(model(x), before)


def raises_unless(bad):
    def function(m, h, x):
        if bad(h):
            raise ValueError("not finite")
        return m.middle(h).relu()

    return function


GUARDS = {
    "nan": lambda h: torch.isnan(h).any(),
    "nan as a method": lambda h: h.isnan().any().item(),
    "not all finite": lambda h: not torch.isfinite(h).all(),
    "not as an operator": lambda h: (~torch.isfinite(h)).any(),
    "both": lambda h: torch.isnan(h).any() or torch.isinf(h).any(),
    "both at once": lambda h: (torch.isnan(h) | torch.isinf(h)).any(),
    "neither": lambda h: not (~h.isnan() & ~h.isinf()).all(),
    "a count": lambda h: torch.isnan(h).sum() > 0,
    "a count as a number": lambda h: torch.isnan(h).sum().item() != 0,
    "nonzero": lambda h: torch.isinf(h).count_nonzero() != 0,
    "unequal to itself": lambda h: (h != h).any(),
    "over a dimension": lambda h: h.isnan().any(-1).any(),
    "after a cut": lambda h: torch.isnan(h.softmax(-1)).any(),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_is_answered_as_finite_numbers_answer_it(name):
    check_kept(Model(raises_unless(GUARDS[name])), 8)


def test_an_assertion_is_a_guard():
    def checked(m, h, x):
        assert torch.isfinite(h).all()
        torch._assert(torch.isfinite(m.middle.weight).all(), "finite weights")
        torch._assert_async(h.isfinite().all())
        return h

    check_kept(Model(checked), 4)


def test_what_is_done_to_numbers_that_are_not_finite_is_not_done():
    def clamped(m, h, x):
        h = m.middle(h).relu()
        if torch.isinf(h).any() or torch.isnan(h).any():  # as in RT-DETR and Whisper
            h = torch.clamp(h, min=-3e38, max=3e38)
        return h

    check_kept(Model(clamped), 8)


def test_the_mask_of_a_guard_is_a_mask():
    check_kept(Model(lambda m, h, x: torch.where(h.isnan(), m.middle(h).relu(), h)), 4)


@pytest.mark.parametrize(
    "question", [lambda h: (h > 0).any(), lambda h: h.isnan().any() or (h > 1).all()]
)
def test_other_questions_about_activations_are_refused(question):
    with pytest.raises(ps.UntraceableError, match="depends on"):
        ps.trace(Model(raises_unless(question)), torch.randn(5, 3, **DOUBLE))


def swallowed(what):
    def function(m, h, x):
        try:
            what(h, x)
            h = h.tanh()
        except Exception:
            h = h.abs()
        return h

    return function


SWALLOWED = {
    "a number": lambda h, x: float(x[0, 0]),
    "a number of a unit": lambda h, x: h[0, 0].item(),
    "a list": lambda h, x: h.tolist(),
    "NumPy": lambda h, x: h.detach().numpy(),
    "places": lambda h, x: h[(h > 0).nonzero()],
    "a size": lambda h, x: x[:, : (x > 0).sum()],
    "an order of examples": lambda h, x: h.flip(0) + h,
    "out=": lambda h, x: torch.abs(h, out=h.clone()),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_refusal_in_a_model_s_own_try_is_a_refusal(name):
    with pytest.raises(ps.UntraceableError) as caught:
        ps.trace(Model(swallowed(SWALLOWED[name])), torch.randn(5, 3, **DOUBLE))
    assert type(caught.value) is ps.UntraceableError


def test_an_error_of_the_model_s_own_may_be_caught():
    def function(m, h, x):
        try:
            return h + x  # of other sizes
        except RuntimeError:
            return h

    check_kept(Model(function), 4)


COUNTED = {
    "a bound": lambda h, x, n: x[:, :n],
    "an index": lambda h, x, n: x[:, n],
    "a bound of units": lambda h, x, n: h[:, n:],
    "a step": lambda h, x, n: h[:, ::n],
    "arange": lambda h, x, n: torch.arange(n),
    "zeros": lambda h, x, n: x.new_zeros(n),
    "new zeros": lambda h, x, n: torch.zeros(n, 2),
    "narrow": lambda h, x, n: h.narrow(1, 0, n),
    "split": lambda h, x, n: h.split(n, 1)[0],
    "repeat": lambda h, x, n: h.repeat(1, n),
    "range": lambda h, x, n: sum(h[:, i] for i in range(n)),
    "dlpack": lambda h, x, n: torch.utils.dlpack.to_dlpack(h),
    "from dlpack": lambda h, x, n: torch.from_dlpack(h),
    "repeat_interleave": lambda h, x, n: h.repeat_interleave(n, 1),
    "masked_select": lambda h, x, n: h.masked_select(x[:, :1] > 0),
    "unique": lambda h, x, n: x.unique(),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_size_computed_from_data_is_refused_by_name(name):
    def function(m, h, x):
        made = COUNTED[name](h, x, (x > 0).sum().clamp(1, 3))
        return h + (made.sum() if isinstance(made, torch.Tensor) else 0)

    with pytest.raises(ps.UntraceableError) as caught:
        ps.trace(Model(function), torch.zeros(2, 3, **DOUBLE))
    assert type(caught.value) is ps.UntraceableError


@pytest.mark.parametrize(
    "name", ["a bound of units", "an index", "arange", "zeros", "narrow", "repeat"]
)
def test_a_size_that_is_a_constant_tensor_is_a_number(name):
    def function(m, h, x):
        made = COUNTED[name](h, x, torch.tensor(2))
        return h * (1 + 0 * made.detach().shape[0])

    check_kept(Model(function), 4)


def test_an_input_of_the_wrong_shape_is_named():
    with pytest.raises(
        RuntimeError, match=r"tensors of shape \(2, 5\). Give an input that the model itself takes"
    ):
        ps.trace(Model(lambda m, h, x: h), torch.zeros(2, 5, **DOUBLE))


INFINITY = float("-inf")


def written(m, h, x):
    h = h.clone()
    h[x[:, :1].expand_as(h) > 0] = INFINITY
    return h


def through(view):
    """An infinity that is written into one name of the memory, and asked for by another."""

    def function(m, h, x):
        h = h.clone()
        v = view(h)
        h[:, 0] = INFINITY
        return v

    return function


def into(view):
    def function(m, h, x):
        h = h.clone()
        view(h)[:] = INFINITY
        return h

    return function


def alias(h, write):
    v = h.view(-1)
    write(h)
    return v


def beside(m, h, x):
    h = h.clone()
    v = h.view(-1)
    h[:, 0] = INFINITY
    return v.view(h.shape)[:, :2] + 1


PUT_IN = {
    "masked_fill": lambda m, h, x: h.masked_fill(x[:, :1] > 0, INFINITY),
    "where": lambda m, h, x: torch.where(x[:, :1] > 0, h, INFINITY),
    "where with a tensor": lambda m, h, x: torch.where(x[:, :1] > 0, h, h.new_full((), INFINITY)),
    "an assignment": written,
    "padding": lambda m, h, x: nn.functional.pad(h, (1, 0), value=INFINITY),
    "a mask made of inputs": lambda m, h, x: h + (0 * x[:, :1]).masked_fill(x[:, :1] > 0, INFINITY),
    "a buffer": lambda m, h, x: h + m.limits,
    "a constant": lambda m, h, x: h + torch.full((4,), -INFINITY),
    "no number": lambda m, h, x: torch.where(x[:, :1] > 0, h, float("nan")),
    "a number of NumPy's": lambda m, h, x: h.masked_fill(x[:, :1] > 0, np.float32(INFINITY)),
    "a sum with a number of NumPy's": lambda m, h, x: h.add(np.float32(INFINITY)),
    "a number too large for the type": lambda m, h, x: h.float() * 1e40,
    "a view": through(lambda h: h.view(-1)),
    "a view of what is filled": lambda m, h, x: alias(
        h.clone(), lambda t: t.masked_fill_(x[:, :1] > 0, INFINITY)
    ),
    "a transposed view": through(lambda h: h.t()),
    "detached": through(lambda h: h.detach()),
    "a part": through(lambda h: h.chunk(2, -1)[0]),
    "what is made of a view": beside,
    "written into a part": into(lambda h: h.chunk(2, -1)[0]),
    "written into a row": into(lambda h: h.t()[1]),
    "an input that is computed further": lambda m, h, x: (
        h + (1 - (x[:, :1] > 0).double()) * INFINITY * 2
    ),
    "a softmax over what inputs mask": lambda m, h, x: h.masked_fill(
        x[:, :1] > 0, INFINITY
    ).softmax(-1),
    "a softmax over a row without a number": lambda m, h, x: (
        h + torch.full((4,), INFINITY)
    ).softmax(-1),
    "a softmax over the largest": lambda m, h, x: (h + m.limits.neg()).softmax(-1),
    "the logarithm of a softmax": lambda m, h, x: (h + m.limits).log_softmax(-1),
    "a softmax over the other dimension": lambda m, h, x: (h + m.limits).softmax(0),
    "a second mask": lambda m, h, x: (h + m.limits).masked_fill(x[:, :1] > 0, INFINITY).softmax(-1),
    "after a softmax": lambda m, h, x: (h + m.limits).softmax(-1) + m.limits,
    "what follows": lambda m, h, x: (
        h.masked_fill(x[:, :1] > 0, INFINITY).amax(-1, keepdim=True) + h
    ),
}


@pytest.mark.parametrize("name", PUT_IN)
def test_a_guard_on_an_infinity_of_the_model_s_own_is_refused(name):
    def function(m, h, x):
        z = PUT_IN[name](m, h, x)
        return m.middle(h).relu() if not torch.isfinite(z).all() else h

    model = Model(function)
    model.register_buffer("limits", torch.tensor([0.0, 0.0, INFINITY, 0.0], **DOUBLE))
    with pytest.raises(ps.UntraceableError, match="puts in a number that is not finite"):
        ps.trace(model, torch.randn(5, 3, **DOUBLE))


def assigned(s, places):
    s = s.clone()
    s[places] = INFINITY
    return s


CAUSAL = torch.full((4, 4), INFINITY, **DOUBLE).triu(1)
ENDED = {
    "a constant": lambda m, s: (s + torch.full((4, 4), INFINITY).triu(1)).softmax(-1),
    "a constant in place": lambda m, s: s.add_(CAUSAL).softmax(-1),
    "a buffer": lambda m, s: (s + m.causal).softmax(-1),
    "a part of a buffer": lambda m, s: nn.functional.softmax(s + m.causal[None, :4, :4], dim=-1),
    "a buffer that says where": lambda m, s: s.masked_fill(m.later[:4, :4], INFINITY).softmax(-1),
    "where": lambda m, s: torch.where(m.later, INFINITY, s).softmax(-1),
    "an assignment": lambda m, s: assigned(s, (..., CAUSAL.isinf())).softmax(-1),
    "in another type": lambda m, s: m.drop((s + m.causal).to(torch.float32)).softmax(-1).double(),
    "scaled": lambda m, s: ((s + m.causal) / 2**0.5).float().softmax(-1).double(),
    "heads": lambda m, s: (s[:, None] + m.causal).flatten(0, 1).softmax(-1),
    "the largest": lambda m, s: (s + m.causal).amax(-1, keepdim=True).expand_as(s),
    "the largest and its place": lambda m, s: (s + m.causal).max(-1, keepdim=True)[0].expand_as(s),
    "a bound": lambda m, s: torch.maximum(s, torch.full((4,), INFINITY, **DOUBLE)),
    "PyTorch's": lambda m, s: nn.functional.scaled_dot_product_attention(
        s, s, s, attn_mask=m.causal
    ),
}


class Attending(Model):
    def __init__(self, function):
        super().__init__(function)
        self.drop = nn.Dropout(0.5).eval()
        self.register_buffer("causal", CAUSAL.clone())
        self.register_buffer("later", CAUSAL.isinf())

    def forward(self, x):
        h = self.read(x).relu()
        w = self._function(self, h[:, :, None] * h[:, None])
        mixed = (w @ h[:, :, None])[..., 0]
        if not torch.isfinite(mixed).all():
            mixed = mixed.clamp(0, 0.1)
        return self.out(mixed)


@pytest.mark.parametrize("name", ENDED)
def test_an_infinity_whose_places_are_constant_ends_at_a_softmax(name):
    model = Attending(ENDED[name])
    x = torch.randn(5, 3, **DOUBLE)
    before = model(x)
    network = ps.trace(model, x)
    assert not any(o.name == "clamp" for o in network.program.operations)
    ps.rescaling.random_rescale_(
        network, powers_of_two=True, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(model(x), before)


def test_a_mask_by_which_a_guard_was_answered_is_watched():
    model = Attending(ENDED["a buffer"])
    network = ps.trace(model, torch.randn(5, 3, **DOUBLE))
    network.check_current()
    model.causal[0] = INFINITY
    with pytest.raises(RuntimeError, match="causal"):
        network.check_current()


def test_orders_and_bounds_may_be_infinite():
    def function(m, h, x):
        norm = torch.linalg.vector_norm(x, float("inf"))
        assert torch.isfinite(h.clamp(0, float("inf")) + norm).all()
        return h

    check_kept(Model(function), 4)


def test_a_refused_guard_names_where_the_infinity_is_put_in():
    class Masking(nn.Module):
        def forward(self, h, x):
            return h.masked_fill(x[:, :1] > 0, INFINITY)

    def function(m, h, x):
        assert torch.isfinite(m.masking(h, x).amax(-1)).all()
        return h

    model = Model(function)
    model.masking = Masking()
    with pytest.raises(
        ps.UntraceableError,
        match=r"at 'masked_fill' in module 'masking', and asks .* Use torch\.finfo",
    ):
        ps.trace(model, torch.randn(5, 3, **DOUBLE))


def test_a_guard_on_an_infinity_of_a_given_input_is_refused():
    class Scored(Model):
        def forward(self, x, mask):
            h, mask = self.read(x).relu(), mask[:, None].mul(2).squeeze(1)
            return self.out(self.middle(h).relu() if (h + mask).isinf().any() else h)

    mask = torch.zeros(5, 4, **DOUBLE)
    ps.trace(Scored(None), (torch.randn(5, 3, **DOUBLE), mask))
    mask[0, 0] = INFINITY
    with pytest.raises(
        ps.UntraceableError, match="the given input holds a number that is not finite"
    ):
        ps.trace(Scored(None), (torch.randn(5, 3, **DOUBLE), mask))


def test_a_guard_beside_an_infinity_of_the_model_s_own_is_answered():
    def function(m, h, x):
        h.masked_fill(x[:, :1] > 0, INFINITY)
        return m.middle(h).relu() if torch.isfinite(h).all() else h

    check_kept(Model(function), 8)
