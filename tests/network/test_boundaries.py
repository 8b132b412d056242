"""Operations without a rule: what enters them is an output of the network, what leaves them an input."""

import copy
import random

import numpy as np
import pytest
import torch
from same_bits import rescaled_unseen
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pathspace as ps
from cases import in_turn

DOUBLE = {"dtype": torch.float64}


class Model(nn.Module):
    """Three layers beside each other and one at the end, put together by a function."""

    def __init__(self, function, **more):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.o = (
            nn.Linear(n, m) for n, m in ((3, 4), (4, 4), (4, 4), (4, 2))
        )
        for layer in (self.a, self.b, self.c, self.o):
            nn.init.uniform_(layer.bias, 0.2, 0.6)  # no unit is dead
        for name, part in more.items():
            setattr(self, name, part)
        self._function = function
        self.double()

    def forward(self, x, *others):
        return self._function(self, x, *others)


def square(m):
    """The layers of a squared model as functions, by name."""
    return {
        name: lambda h, n=name: functional.linear(h, m[f"{n}.weight"], m[f"{n}.bias"])
        for name in "abco"
    }


def total(*parts):
    return sum(part.sum() for part in parts)


def ones(h):
    return torch.ones_like(h)


def gelu(m, x):
    return m.o(m.c(functional.gelu(m.b(m.a(x).relu()))).relu())


def gelu_squared(a, b, c, o, x):
    z = b(a(x))
    return total(z, o(c(ones(z))))


def gated(m, x):
    h = m.a(x).relu()
    return m.o(functional.silu(m.b(h)) * m.c(h))


def gated_squared(a, b, c, o, x):
    h = a(x)
    return total(b(h), o(c(h)))


def divided(m, x):
    h = m.a(x).relu()
    return m.o(m.b(h).relu() / (1 + m.c(h).abs().exp()))


def divided_squared(a, b, c, o, x):
    h = a(x)
    return total(c(h), o(b(h)))


def in_a_row(m, x):
    return m.o(torch.tanh(m.b(torch.sigmoid(m.a(x)))))


def in_a_row_squared(a, b, c, o, x):
    h, z = a(x), b(ones(a(x)))
    return total(h, z, o(ones(z)))


def branched(m, x):
    """One unit goes on and through a softmax."""
    h = m.a(x).relu()
    return m.o(m.b(h).relu() + m.c(h.softmax(-1)).relu())


def branched_squared(a, b, c, o, x):
    h = a(x)
    return total(h, o(b(h) + c(ones(h))))


def unused(m, x):
    h = m.a(x).relu()
    torch.softmax(h, -1)
    return m.o(m.b(h).relu())


def unused_squared(a, b, c, o, x):
    return total(o(b(a(x))))


def in_place(m, x):
    h = functional.relu6(m.a(x), inplace=True)
    return m.o(m.b(h).relu())


def in_place_squared(a, b, c, o, x):
    return total(a(x), o(b(ones(a(x)))))


def looped(m, x):
    h = x.new_zeros(len(x), 4)
    for _ in range(3):
        h = torch.tanh(m.a(x) + m.b(h))
    return m.o(m.c(h).relu())


def looped_squared(a, b, c, o, x):
    first, later = a(x) + b(0 * ones(a(x))), a(x) + b(ones(a(x)))
    return total(first, later, later, o(c(ones(later))))


def over_the_batch(m, x):
    return m.o(m.c(m.a(x).relu().softmax(0)).relu())


def over_the_batch_squared(a, b, c, o, x):
    return total(a(x), o(c(ones(a(x)))))


def chosen(m, x):
    """Where a maximum is does not depend on scales, so nothing is cut."""
    h = m.b(m.a(x).relu()).relu()
    return m.o(h * (1 + h.argmax(-1, keepdim=True)))


def chosen_squared(a, b, c, o, x):
    return total(o(b(a(x))))


def rounded(m, x):
    """A function without a kernel for tensors without values."""
    h = m.b(m.a(x).relu())
    return m.o(m.c(torch.fake_quantize_per_tensor_affine(h, 0.01, 0, -128, 127)).relu())


@torch.library.custom_op("path_tests::relu", mutates_args=())
def relu_in_name(x: torch.Tensor) -> torch.Tensor:
    """An operator without a form, and with a name that says nothing."""
    return x.tanh()


def keep_output(ctx, inputs, output):
    del inputs
    ctx.save_for_backward(output)


relu_in_name.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2), setup_context=keep_output
)


@torch.library.custom_op("path_tests::drop", mutates_args=())
def drop(x: torch.Tensor) -> torch.Tensor:
    """An operator that draws numbers."""
    return x * torch.bernoulli(torch.full_like(x, 0.5))


@torch.library.custom_op("path_tests::large", mutates_args=())
def large(x: torch.Tensor) -> torch.Tensor:
    """An operator whose form goes by values."""
    return x[x > 1].clone()


def operator(m, x):
    return m.o(m.c(torch.ops.path_tests.relu(m.b(m.a(x).relu()))).relu())


CASES = {
    "gelu": (gelu, gelu_squared, 8),
    "rounded": (rounded, gelu_squared, 8),
    "operator": (operator, gelu_squared, 8),
    "gated": (gated, gated_squared, 8),
    "divided": (divided, divided_squared, 8),
    "in a row": (in_a_row, in_a_row_squared, 0),
    "branched": (branched, branched_squared, 4),
    "unused": (unused, unused_squared, 8),
    "in place": (in_place, in_place_squared, 4),
    "looped": (looped, looped_squared, 4),
    "over the batch": (over_the_batch, over_the_batch_squared, 4),
    "chosen": (chosen, chosen_squared, 5),
}
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), **DOUBLE)


@pytest.mark.parametrize("name", CASES)
def test_the_squared_network_is_the_one_by_hand(name):
    function, squared, classes = CASES[name]
    model = Model(function)
    network = ps.trace(model, X)
    q = {name: p.detach().square().requires_grad_() for name, p in model.named_parameters()}
    norm = squared(**square(q), x=torch.ones(1, 3, **DOUBLE))
    kappa = torch.autograd.grad(norm, list(q.values()), materialize_grads=True)
    assert network.num_classes == classes
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm.detach(), rtol=1e-12, atol=0
    )
    by_name = dict(zip(q, kappa, strict=True))
    for parameter, found in ps.paths.kappa(network).items():
        torch.testing.assert_close(found, by_name[parameter], rtol=1e-12, atol=1e-14)
    assert not any(bool(by_name[parameter].any()) for parameter in network.outside)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
@pytest.mark.sample(6)
def test_rescaling_is_bitwise_invisible(name):
    model = Model(CASES[name][0])
    network = ps.trace(model, X)

    assert bool((rescaled_unseen(model, network, X) != 1).any())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_paths_are_those_between_the_cuts(name):
    model = Model(CASES[name][0])
    network = ps.trace(model, X)
    listed = ps.paths.enumerate_paths(network)
    squares = (listed.factor * listed.values(network.parameters)).square().sum()
    torch.testing.assert_close(
        squares.detach(), ps.paths.squared_path_norm(network).detach(), rtol=1e-12, atol=0
    )
    flow = ps.paths.activity(network, X)
    torch.testing.assert_close(
        listed.output(network.parameters, flow), flow.outputs, rtol=1e-12, atol=1e-12
    )
    if name != "chosen":  # units that are compared share a scale, which their paths do not know
        rank = ps.paths.path_rank(ps.paths.path_jacobian(network, listed))
        assert rank == ps.paths.degrees_of_freedom(network)


OPTIMIZERS = {
    "PathSGD": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.05, momentum=0.9),
    "PathAdam": lambda m, n: ps.optim.PathAdam(m.parameters(), n, lr=0.01),
    "second term": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.05, second_term=True),
    "GSGD": lambda m, n: ps.optim.GSGD(m.parameters(), n, lr=1e-3),
    "Invariant": lambda m, n: ps.optim.Invariant(m.parameters(), n, torch.optim.AdamW, lr=0.01),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "name"),
    in_turn(
        OPTIMIZERS, ["gelu", "gated", "divided", "branched", "looped"], everywhere=("PathSGD",)
    ),
)
def test_optimizers_are_bitwise_invariant(name, rule):
    model = Model(CASES[name][0]).float()
    report = ps.rescaling.check_invariance(
        model,
        X.float(),
        lambda y: y.square().mean(),
        OPTIMIZERS[rule],
        steps=10,
        low=2.0**-4,
        high=2.0**4,
    )
    assert report.passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gelu", "rounded", "operator", "gated", "branched", "looped"])
def test_the_optimizer_on_data_is_bitwise_invariant(name):
    def steps(network, model):
        optimizer = ps.optim.DDPSGD(
            model.parameters(), network, lr=0.05, alpha=0.5, statistic="second_moment"
        )
        for _ in range(5):
            optimizer.zero_grad()
            model(X.float()).square().mean().backward()
            optimizer.step()
        return model(X.float())

    ours = Model(CASES[name][0]).float()
    theirs = copy.deepcopy(ours)
    networks = [ps.trace(m, X.float()) for m in (ours, theirs)]
    ps.rescaling.random_rescale_(networks[1], 2.0**-4, 2.0**4, powers_of_two=True)
    assert torch.equal(steps(networks[0], ours), steps(networks[1], theirs))


@pytest.mark.parametrize("training", [False, True])
def test_functions_of_torch_with_other_arguments_than_those_of_functional_are_cuts(training):
    """torch.batch_norm(x, weight, bias, mean, variance, ...) and torch.embedding(weight, x)."""

    def function(m, x):
        h = torch.embedding(m.table.weight, x.long().abs().clamp(max=2)[:, 0])
        n = m.norm
        h = torch.batch_norm(
            m.a(x) + h, n.weight, n.bias, n.running_mean, n.running_var, training, 0.1, 1e-5, False
        )
        return m.o(m.b(h.relu()).relu())

    model = Model(function, table=nn.Embedding(3, 4), norm=nn.BatchNorm1d(4))
    network = ps.trace(model, X)
    assert [cut.operation for cut in network.cuts] == ["torch.embedding", "torch.batch_norm"]
    assert network.outside == ("c.weight", "c.bias", "table.weight", "norm.weight", "norm.bias")
    assert network.num_classes == 4
    assert bool((rescaled_unseen(model, network, X) != 1).any())


def test_an_operator_that_draws_numbers_draws_none_in_a_trace():
    model = Model(lambda m, x: m.o(torch.ops.path_tests.drop(m.a(x).relu())))
    before = torch.get_rng_state()
    assert len(ps.trace(model, X).cuts) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_operators_of_torch_are_followed():
    model = Model(
        lambda m, x: m.o(torch.ops.aten.relu.default(torch.ops.aten.linear(x, *m.a.parameters())))
    )
    network = ps.trace(model, X)
    assert (network.num_classes, network.cuts) == (4, ())


def test_balancing_keeps_the_function():
    model = Model(gated)
    network, before = ps.trace(model, X), model(X)
    ps.rescaling.random_rescale_(network)
    ps.rescaling.balance_(network)
    torch.testing.assert_close(model(X), before, rtol=1e-10, atol=1e-12)


# --- modules without a rule


def heads(m, x):
    return m.o(m.part(m.a(x).relu()[None])[0][0].relu())


PARTS = {
    "LSTM": lambda: nn.LSTM(4, 4),
    "GRU": lambda: nn.GRU(4, 4),
    "tanh RNN": lambda: nn.RNN(4, 4),
    "orthogonal": lambda: nn.Sequential(
        parametrizations.orthogonal(nn.Linear(4, 4)), nn.Unflatten(0, (1, 1))
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_its_parameters_take_the_plain_rule(name):
    model = Model(heads, part=PARTS[name]())
    network = ps.trace(model, X)
    own = {f"part.{key}" for key, _ in model.part.named_parameters()}
    own -= {key for key in own if name == "orthogonal" and key.endswith("bias")}
    assert own <= set(network.outside)
    assert not own & set(network.parameters)
    before = model(X)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(X), before)


def test_a_parameter_that_is_a_weight_and_enters_a_cut_keeps_its_values():
    def tied(m, x):
        return m.o((m.b(m.a(x).relu()) @ m.b.weight.tanh()).relu())

    model = Model(tied)
    network, before = ps.trace(model, X), model(X)
    assert "b.weight" in network.outside
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(X), before)


def test_an_output_that_is_not_picked_holds_its_scale_and_does_not_count():
    def two(m, x):
        h = m.a(x).relu()
        return m.o(m.b(h).relu()), m.c(h).tanh()

    picked = ps.trace(Model(two), X, output=lambda y: y[0])
    alone = ps.trace(Model(lambda m, x: m.o(m.b(m.a(x).relu()).relu())), X)
    assert ps.paths.squared_path_norm(picked).item() == ps.paths.squared_path_norm(alone).item()
    assert "c.weight" in picked.outside
    assert picked.num_classes == 4
    both = ps.trace(Model(two), X)
    assert ps.paths.squared_path_norm(both).item() > ps.paths.squared_path_norm(alone).item()


def test_what_a_module_keeps_for_its_next_call_holds_its_scale():
    def keeps(m, x):
        h = m.b(m.a(x).relu()).relu()
        m.last = h.softmax(-1)
        return m.o(h)

    assert ps.trace(Model(keeps), X).num_classes == 4


# --- what is said


def test_says_where_it_was_cut():
    layers = [
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.ReLU()) for _ in range(3)
    ]
    network = ps.trace(nn.Sequential(*layers, nn.Linear(4, 2), nn.Softmax(-1)), torch.zeros(1, 4))
    assert repr(network).splitlines() == [
        "Network(130 weights in 14 parameters, 12 unit classes)",
        "  cut at 'gelu' in '*.1', 3 times",
        "  cut at 'softmax' in '4'",
    ]
    assert [(cut.operation, cut.module) for cut in network.cuts[:2]] == [
        ("gelu", "0.1"),
        ("gelu", "1.1"),
    ]


def test_a_loop_is_reported_once():
    for steps in (3, 98):

        def loop(m, x, steps=steps):
            h = x.new_zeros(len(x), 4)
            for _ in range(steps):
                h = torch.tanh(m.a(x) + m.b(h))
            return m.o(m.c(h).relu())

        network = ps.trace(Model(loop), X)
        assert repr(network).splitlines()[1:] == [f"  cut at 'tanh', {steps} times"]
        assert network.num_classes == 4


def test_warns_of_a_network_without_classes_and_says_why():
    with pytest.warns(UserWarning, match=r"no unit class.*cut at 'sigmoid'; at 'tanh'"):
        ps.trace(Model(in_a_row), X)
    with pytest.warns(UserWarning, match=r"no unit class.*an input or an output"):
        ps.trace(nn.Linear(3, 2), torch.zeros(1, 3))


@pytest.mark.parametrize("name", ["gelu", "gated", "divided", "in place"])
def test_a_strict_trace_refuses(name):
    with pytest.raises(ps.UntraceableError, match=r"'(gelu|silu|div|__truediv__|exp|relu6)' in"):
        ps.trace(Model(CASES[name][0]), X, strict=True)


# --- what is refused as before: exactness is at stake


def write_through_a_view(m, x):
    h = m.a(x).relu()
    functional.relu6(h[:, :2], inplace=True)
    return m.o(h)


def write_beside_a_view(m, x):
    h = m.a(x).relu()
    seen = h[:, :2]
    h.clamp_(max=1.0)
    return m.o(h + functional.pad(seen, (0, 2)))


def mixed_after(m, x):
    h = m.b(m.a(x).tanh())
    return m.o(h.reshape(4, -1).t())


def mixed_inside(m, x):
    """All products of two examples, then a layer on each, whose examples nobody can tell apart."""
    h = m.a(x)
    return m.o(m.b((h @ h.t()).sigmoid().reshape(-1, 1).expand(-1, 4)).relu())


def renewed(m, x):
    h = m.a(x).relu()
    h.resize_(h.shape)
    return m.o(h.tanh())


def function_of_values(m, x):
    h = m.a(x).relu()
    return m.o(h.sigmoid()[h.sigmoid().sum(1) > 0])


def in_a_list(m, x):
    h = m.a(x).relu()
    torch._foreach_mul_([h], 0.5)
    return m.o(h)


REFUSED = {
    "a write through a view": (write_through_a_view, "'relu6'.*shares memory"),
    "a write beside a view": (write_beside_a_view, "'clamp_'.*shares memory"),
    "a branch on data": (lambda m, x: m.o(m.a(x) if m.a(x).tanh().sum() > 0 else m.b(m.a(x))), "depends on the data"),
    "an operator": (lambda m, x: m.o(torch.ops.path_tests.large(m.a(x))[:4]), "'path_tests.large'"),
    "a number": (lambda m, x: m.o(m.a(x) * m.a(x).tanh().max().item()), "depends on the data"),
    "a shape": (function_of_values, "no single graph|depends on"),
    "numpy": (lambda m, x: m.o(torch.from_numpy(m.a(x).detach().numpy())), "numpy"),
    "memory": (renewed, "'resize_'.*memory"),
    "a list that is written": (in_a_list, "no rule"),
    "a function of Python": (lambda m, x: m.o(m.a(x).detach().apply_(abs)), "'apply_'"),
    "a choice at random in Python": (
        lambda m, x: m.o(m.a(x) + m.b(m.a(x)) if random.random() < 0.5 else m.a(x)), "'random'.*evaluation form"),
    "a choice at random in NumPy": (
        lambda m, x: m.o(m.a(x) + m.b(m.a(x)) if np.random.rand() < 0.5 else m.a(x)), "'random'.*evaluation form"),  # noqa: NPY002
    "a gradient": (lambda m, x: torch.autograd.grad(m.a(x).relu().square().sum(), x)[0], "'grad'.*has no gradients"),
    "a backward pass": (lambda m, x: m.a(x).relu().sum(1).backward(torch.ones(5)), "'backward'.*has no gradients"),
    "another place": (lambda m, x: m.o(torch.add(m.a(x).tanh(), 1, out=torch.zeros(5, 4, **DOUBLE))), "out="),
    "examples mixed after it": (mixed_after, "mixes the examples"),
    "examples mixed in it": (mixed_inside, "mixes the examples|cannot be the batch"),
    "nothing": (lambda *_: None, "no tensor that the model returns.*it returns None"),
    "no tensor": (lambda *_: {"loss": 1.0}, "no tensor that the model returns.*a dict without tensors"),
    "a parameter": (lambda m, *_: m.a.bias * 2, "no tensor that the model returns.*the parameter 'a.bias' itself"),
    "nothing of the input": (lambda *_: torch.ones(5, 2), "no tensor that the model returns.*constants"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_exact_is_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(ps.UntraceableError, match=message):
        ps.trace(Model(function), X)


def test_an_input_of_another_structure_is_named():
    with pytest.raises(ValueError, match=r"example_input is a object.*give a tensor, a tuple"):
        ps.trace(Model(gelu), object())


class Batch:
    def __init__(self, values):
        self.values = values


def test_tensors_inside_an_object_are_no_inputs():
    """They would be constants, whatever the next batch holds."""
    model = Model(lambda m, x, batch: m.o(m.a(x + batch.values).relu()))
    with pytest.raises(
        ValueError,
        match=r"example_input holds a Batch, whose tensors.*module that takes the tensors",
    ):
        ps.trace(model, (X, Batch(X)))
    assert (
        ps.trace(Model(lambda m, x, _: m.o(m.a(x).relu())), (X, Batch("a name"))).num_classes == 4
    )


@pytest.mark.parametrize("of", ["inputs", "activations"])
def test_sizes_may_be_tensors(of):
    """As Longformer computes the number of its chunks; of a function without a rule."""

    def chunks(m, x):
        n = torch.div(torch.tensor(x.shape[1]), 2, rounding_mode="trunc") - 1
        if of == "inputs":
            x = x.as_strided(size=(len(x), 3 + n), stride=(3, 1))
        h = m.a(x).relu()
        h = h.as_strided((len(x), n + 4), (4, 1)) if of == "activations" else h
        return m.o(m.b(h).relu())

    model = Model(chunks)
    network, before = ps.trace(model, X), model(X)
    assert network.num_classes == (8 if of == "inputs" else 4)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(X), before)


RETURNED = {
    "as it is": lambda m: m.b.weight,
    "a row": lambda m: m.b.weight[0],
    "doubled": lambda m: [2 * m.b.weight],
    "detached": lambda m: {"weight": m.b.weight.detach()},
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_parameter_that_is_returned_keeps_its_values(name):
    model = Model(lambda m, x: (m.o(m.c(m.b(m.a(x).relu()).relu()).relu()), RETURNED[name](m)))
    network, before = ps.trace(model, X), model.b.weight.detach().clone()
    result = model(X)[0]
    assert "b.weight" in network.outside
    assert network.num_classes == 4  # between c and o
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model.b.weight, before)
    assert torch.equal(model(X)[0], result)


def test_what_asks_for_values_of_inputs_says_what_to_do():
    """A mask that is dropped where all of it is true, and edges of a graph of which some are left out."""

    def masked(m, x, mask=None):
        h = m.a(x).relu()
        return m.o(h if mask is None or bool(mask.all()) else h * mask)

    class Masked(Model):
        def forward(self, x, mask=None):
            return masked(self, x, mask)

    with pytest.raises(
        ps.UntraceableError, match=r"values of its inputs.*a mask\) out of the example"
    ):
        ps.trace(Masked(None), (X, torch.ones(len(X), 4)))
    assert ps.trace(Masked(None), X).num_classes == 4

    class Edges(Model):
        def __init__(self, edges=None):
            super().__init__(None)
            self.edges = None if edges is None else nn.Buffer(edges)

        def forward(self, x, edges=None):
            edges = self.edges if edges is None else edges
            source, target = edges[:, edges[0] != edges[1]]
            h = self.a(x)
            return self.o(torch.zeros_like(h).index_add(0, target, h[source]).relu())

    edges = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0]])
    with pytest.raises(ps.UntraceableError, match=r"edges of a graph\) as a buffer"):
        ps.trace(Edges(), (X, edges))
    assert ps.trace(Edges(edges), X).num_classes == 4


def test_what_a_program_asks_to_raise_an_error_is_true_where_it_goes_on():
    """Distributions look at their parameters, as in the policies of reinforcement learning."""

    def drawn(m, x):
        h = m.a(x).relu()
        distribution = torch.distributions.Categorical(logits=m.o(h), validate_args=True)
        action = distribution.sample()
        return action, distribution.log_prob(action), m.b(h)

    network = ps.trace(model := Model(drawn), X)
    assert network.num_classes == 4

    def seen():
        torch.manual_seed(0)
        return model(X)

    before = seen()
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert all(map(torch.equal, before, seen()))


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_a_model_that_is_a_cut_and_nothing_else_is_a_network_without_classes(build):
    model = build(4, 4)
    x = torch.randn(2, 4) if build in (nn.LSTMCell, nn.GRUCell) else torch.randn(5, 2, 4)
    with pytest.warns(UserWarning, match=r"no unit class.*it is cut at '\w+'"):
        network = ps.trace(model, x)
    assert (network.num_classes, dict(network.parameters)) == (0, {})
    assert set(network.outside) == {name for name, _ in model.named_parameters()}
    assert ps.paths.kappa(network) == {}
    assert ps.paths.squared_path_norm(network).item() == 0
    with pytest.raises(ps.UntraceableError, match="not positively homogeneous"):
        ps.trace(model, x, strict=True)
    with pytest.raises(ValueError, match="no parameter of the model is in the network"):
        ps.optim.Invariant(model.parameters(), network, torch.optim.AdamW, lr=0.01)


@torch.library.custom_op("pathspace_tests::half_only_on_meta", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    if x.dtype != torch.float16:  # as torch's product of groups does, which takes float32 on a CPU
        raise RuntimeError("Expected inputs of float16 type")
    return torch.empty_like(x)


@pytest.mark.parametrize("outside", [(), ["part"]])
def test_an_operation_that_the_meta_device_refuses_is_a_cut(outside):
    class Part(nn.Module):
        def forward(self, x):
            return doubled(x)

    model = Model(lambda m, x: m.o(m.c(m.part(m.b(m.a(x).relu()))).relu()), part=Part())
    network, before = ps.trace(model, X, outside=outside), model(X)
    assert network.num_classes == 8
    assert len(network.cuts) == (not outside)
    ps.rescaling.random_rescale_(network, powers_of_two=True)
    assert torch.equal(model(X), before)


def test_an_error_of_the_model_itself_stays_one():
    with pytest.raises(RuntimeError, match="broadcast"):
        ps.trace(Model(lambda m, x: m.o(torch.atan2(m.a(x), m.a(x)[:, :3]))), X)
