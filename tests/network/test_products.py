"""Products of activations: gated units, powers and bilinear maps, their symmetry and their path mass."""

import math
from itertools import chain, product

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides
from oracles.products import ONE, Weights, masses, scalings, times

DOUBLE = {"dtype": torch.float64}


class Layers(nn.Module):
    """Linear layers by name, and a function of them and the input."""

    def __init__(self, function, **layers):
        super().__init__()
        for name, sizes in layers.items():
            setattr(self, name, nn.Linear(*sizes) if len(sizes) == 2 else nn.Bilinear(*sizes))
        self._function = function

    def forward(self, x):
        return self._function(self, x)


def reglu(m, x):
    return m.o(m.a(x).relu() * m.b(x))


def squared_relu(m, x):
    return m.o(m.a(x).relu() ** 2)


def itself(m, x):
    a = m.a(x)
    return m.o(a * a)


def cubed(m, x):
    return m.o(torch.pow(m.a(x).relu(), 3))


def deep(m, x):
    h = m.a(x).relu()
    return m.o(m.b(h).relu() * m.c(h))


def residual(m, x):
    """The stream is the product, so its units have no class of their own."""
    h = m.a(x).relu() * m.b(x)
    return m.o(h + m.c(x))


def powers_meet(m, x):
    """s_a^2 = s_b: a's scale generates that of b."""
    return m.o(m.a(x).relu().square() + m.b(x))


def squares_meet(m, x):
    """s_a^2 = s_b^2: one class for both."""
    return m.o(m.a(x).relu().square() + m.b(x).relu().square())


def inverse(m, x):
    """The product is an output, so s_a s_b = 1."""
    return m.a(x).relu() * m.b(x)


def three(m, x):
    return m.o(m.a(x).relu() * m.b(x) * m.c(x).abs())


def factored_out(m, x):
    """s_a s_b = s_a s_c."""
    a = m.a(x).relu()
    return m.o(a * m.b(x) + a * m.c(x))


def bilinear(m, x):
    return m.o((m.a(x).relu() * m.b(x)).sum(1, keepdim=True))


def in_place(m, x):
    h = m.a(x)
    h *= m.b(x).relu()
    return m.o(h)


def looped(m, x):
    h = m.a(x).relu()
    for _ in range(3):
        h = m.c(h).relu()
    return m.o(h * m.b(x))


def of_two(m, x):
    """What ``nn.Bilinear`` makes of two layers."""
    return m.o(m.c(m.a(x).relu(), m.b(x)))


def of_one(m, x):
    """Of a unit and itself: the weights of i and j and of j and i are two."""
    a = m.a(x).relu()
    return m.o(m.c(a, a))


def terms_of_two(w, x):
    return [times(a, b) for a, b in zip(w.linear("a", x), w.linear("b", x), strict=True)]


def terms_of_power(k):
    return lambda w, x: w.linear("o", [times(*[a] * k) for a in w.linear("a", x)])


def terms_of_deep(w, x):
    h = w.linear("a", x)
    return w.linear(
        "o", [times(b, c) for b, c in zip(w.linear("b", h), w.linear("c", h), strict=True)]
    )


def added(*lists):
    return [list(chain.from_iterable(terms)) for terms in zip(*lists, strict=True)]


def terms_of_factored(w, x):
    a, b, c = (w.linear(name, x) for name in "abc")
    return w.linear("o", [times(u, v) + times(u, t) for u, v, t in zip(a, b, c, strict=True)])


def terms_of_looped(w, x):
    h = w.linear("a", x)
    for _ in range(3):
        h = w.linear("c", h)
    return w.linear("o", [times(u, v) for u, v in zip(h, w.linear("b", x), strict=True)])


def terms_of_bilinear(w, x, names):
    a, b = (w.linear(name, x) for name in names)
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b))]
    rows = [
        added(
            *([times(w.of("c.weight", r, i, j), a[i], b[j])] for i, j in pairs), [w.of("c.bias", r)]
        )
        for r in range(2)
    ]
    return w.linear("o", [row[0] for row in rows])


A, B, C, OUT = {"a": (2, 3)}, {"b": (2, 3)}, {"c": (2, 3)}, {"o": (3, 2)}
CASES = {  # the function, its layers, its paths, how many unit classes
    "ReGLU": (reglu, A | B | OUT, lambda w, x: w.linear("o", terms_of_two(w, x)), 6),
    "squared ReLU": (squared_relu, A | OUT, terms_of_power(2), 3),
    "itself": (itself, A | OUT, terms_of_power(2), 3),
    "cubed": (cubed, A | OUT, terms_of_power(3), 3),
    "deep": (deep, {"a": (2, 2), "b": (2, 3), "c": (2, 3)} | OUT, terms_of_deep, 8),
    "residual": (
        residual,
        A | B | C | OUT,
        lambda w, x: w.linear("o", added(terms_of_two(w, x), w.linear("c", x))),
        6,
    ),
    "powers meet": (
        powers_meet,
        A | B | OUT,
        lambda w, x: w.linear(
            "o", added([times(a, a) for a in w.linear("a", x)], w.linear("b", x))
        ),
        3,
    ),
    "squares meet": (
        squares_meet,
        A | B | OUT,
        lambda w, x: w.linear(
            "o", added(*([times(a, a) for a in w.linear(name, x)] for name in ("a", "b")))
        ),
        3,
    ),
    "inverse": (inverse, A | B, terms_of_two, 3),
    "three": (
        three,
        A | B | C | OUT,
        lambda w, x: w.linear(
            "o", [times(*each) for each in zip(*(w.linear(n, x) for n in "abc"), strict=True)]
        ),
        9,
    ),
    "factored out": (factored_out, A | B | C | OUT, terms_of_factored, 6),
    "bilinear": (
        bilinear,
        A | B | {"o": (1, 2)},
        lambda w, x: w.linear("o", [list(chain.from_iterable(terms_of_two(w, x)))]),
        4,
    ),
    "of two": (
        of_two,
        A | {"b": (2, 2), "c": (3, 2, 2), "o": (2, 2)},
        lambda w, x: terms_of_bilinear(w, x, "ab"),
        3 + 2 + 2,
    ),
    "of one": (
        of_one,
        A | {"c": (3, 3, 2), "o": (2, 2)},
        lambda w, x: terms_of_bilinear(w, x, "aa"),
        3 + 2,
    ),
    "in place": (in_place, A | B | OUT, lambda w, x: w.linear("o", terms_of_two(w, x)), 6),
    "looped": (looped, A | B | {"c": (3, 3)} | OUT, terms_of_looped, 6),
}
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), **DOUBLE)


def made(name, dtype=torch.float64):
    function, layers, *_ = CASES[name]
    torch.manual_seed(0)
    return Layers(function, **layers).to(dtype)


@pytest.mark.sample(7)
@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # of torch, at bilinear maps
@pytest.mark.parametrize("name", CASES)
def test_finds_all_scalings_that_keep_the_function(name):
    model = made(name)
    network = ps.trace(model, X)
    found = ps.paths.reduction_graph(network).exponents()
    basis = scalings(model, [X])
    assert network.num_classes == found.shape[1] == CASES[name][3]
    if name != "looped":  # tied weights, in which classes are those of all uses
        assert basis.shape[1] == found.shape[1]
        assert ps.paths.degrees_of_freedom(network) == len(found) - basis.shape[1]
    torch.testing.assert_close(basis @ (basis.t() @ found), found, rtol=0, atol=1e-7)
    assert int(torch.linalg.matrix_rank(found)) == found.shape[1]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_masses_multiply(name):
    model = made(name)
    network, weights = ps.trace(model, X), Weights(model)
    norm, first, second = masses(weights, CASES[name][2](weights, [ONE, ONE]))
    flatten = ps.paths.reduction_graph(network).flatten
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm, rtol=1e-12, atol=0
    )
    torch.testing.assert_close(flatten(ps.paths.kappa(network)), first, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(
        flatten(ps.paths.second_term(network)), second, rtol=1e-10, atol=1e-12
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_rescaling_is_bitwise_invisible_and_kappa_follows_it(name):
    model = made(name)
    network = ps.trace(model, X)

    def seen():
        data = [
            ps.paths.data_dependent_norm(network, X, alpha=alpha, statistic=statistic)
            for alpha, statistic in (
                (0.0, "second_moment"),
                (0.5, "second_moment"),
                (0.5, "covariance"),
            )
        ]
        return [model(X), ps.paths.squared_path_norm(network), *data]

    def metrics():
        on_data = (
            ps.paths.data_dependent_kappa(network, X, alpha=alpha, statistic=statistic)
            for alpha, statistic in (
                (0.5, "second_moment"),
                (1.0, "second_moment"),
                (0.5, "covariance"),
            )
        )
        return [
            *(ps.paths.kappa(network, second_term=second) for second in (False, True)),
            *on_data,
        ]

    before, kappas = [t.detach().clone() for t in seen()], metrics()
    factors = ps.rescaling.random_rescale_(
        network, 2.0**-6, 2.0**6, powers_of_two=True, generator=torch.Generator().manual_seed(0)
    )
    assert bool((factors != 1).any())
    for then, now in zip(before, seen(), strict=True):
        assert torch.equal(then, now)
    for then, now in zip(kappas, metrics(), strict=True):
        for key, value in now.items():
            assert torch.equal(value * network.edge_factors(key, factors).square(), then[key])


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_the_gauge_follows_rescaling(name):
    network = ps.trace(made(name), X)
    before = ps.rescaling.balance.balancing_factors(network)
    factors = ps.rescaling.random_rescale_(network, 2.0**-6, 2.0**6, powers_of_two=True)
    assert torch.equal(ps.rescaling.balance.balancing_factors(network) * factors, before)
    assert bool((before != 1).any())


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", CASES)
def test_balancing_keeps_the_function_and_ends_at_one_member(name):
    model = made(name)
    network, before = ps.trace(model, X), model(X)
    ps.rescaling.balance_(network)
    torch.testing.assert_close(model(X), before, rtol=1e-9, atol=1e-11)
    balanced = [p.detach().clone() for p in model.parameters()]
    ps.rescaling.random_rescale_(network, 2.0**-4, 2.0**4)
    ps.rescaling.balance_(network)
    for p, q in zip(model.parameters(), balanced, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-9, atol=1e-11)


OPTIMIZERS = {
    "PathSGD": lambda m, n: ps.optim.PathSGD(m.parameters(), n, lr=0.02, momentum=0.9),
    "PathSGD with the second term": lambda m, n: ps.optim.PathSGD(
        m.parameters(), n, lr=0.02, second_term=True
    ),
    "PathAdam": lambda m, n: ps.optim.PathAdam(m.parameters(), n, lr=0.01),
    "PathMuon": lambda m, n: ps.optim.PathMuon(m.parameters(), n, lr=0.01),
    "Invariant": lambda m, n: ps.optim.Invariant(m.parameters(), n, torch.optim.AdamW, lr=0.01),
}


RULES_IN_TURN = [
    *((name, "PathSGD") for name in CASES),
    *((name, [*OPTIMIZERS][place % 5]) for place, name in enumerate(CASES) if place % 5),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "rule"), slow_besides(RULES_IN_TURN, product(CASES, OPTIMIZERS)))
def test_optimizers_are_bitwise_invariant(name, rule):
    report = ps.rescaling.check_invariance(
        made(name, torch.float32),
        X.float(),
        lambda y: y.square().mean(),
        OPTIMIZERS[rule],
        steps=8,
        low=2.0**-6,
        high=2.0**6,
    )
    assert report.passed


def test_edges_of_a_class_are_those_that_its_scale_moves():
    network = ps.trace(made("ReGLU"), X)
    first, other = (
        next(c for c in network.unit_classes if c.name == f"linear in '{n}'[1]") for n in "ab"
    )
    assert first.incoming == (("a.weight", (1, 0)), ("a.weight", (1, 1)), ("a.bias", (1,)))
    assert first.outgoing == other.outgoing == (("o.weight", (0, 1)), ("o.weight", (1, 1)))
    network = ps.trace(made("squared ReLU"), X)
    factors = torch.ones(3, **DOUBLE)
    factors[1] = 4
    assert network.edge_factors("o.weight", factors).tolist() == [[1, 1 / 16, 1]] * 2
    for wrong in (factors[1:], torch.cat([factors, factors])):
        with pytest.raises(
            ValueError, match=f"one scale for each of {network.num_classes} classes"
        ):
            network.edge_factors("o.weight", wrong)


def test_powers_without_a_common_generator_keep_the_scale_one():
    """s_a^2 = s_b^3 has the solutions s_a = t^3, s_b = t^2, which no variable generates."""
    model = Layers(lambda m, x: m.o(m.a(x).relu() ** 2 + m.b(x).relu() ** 3), **A, **B, **OUT)
    assert ps.trace(model, X.float(), batch_dim=0).num_classes == 0


def test_a_power_that_would_leave_every_type_keeps_the_scale_one():
    def many(m, x):
        h = m.a(x).relu()
        for _ in range(30):
            h = h * m.b(x).relu()
        return m.o(h)

    network = ps.trace(Layers(many, **A, **B, **OUT).double(), X)
    assert network.num_classes == 3  # those of a
    assert {c.name for c in network.unit_classes} == {f"linear in 'a'[{i}]" for i in range(3)}


@pytest.mark.parametrize("power", [0, -1, 0.5, 1.5, 40])
def test_other_powers_are_cuts(power):
    network = ps.trace(Layers(lambda m, x: m.o(m.a(x).relu() ** power), **A, **OUT), X.float())
    assert [cut.operation for cut in network.cuts] == ["pow"]


def test_division_by_an_activation_is_a_cut():
    network = ps.trace(
        Layers(lambda m, x: m.o(m.a(x) / (m.b(x).abs() + 1)), **A, **B, **OUT), X.float()
    )
    assert [cut.operation for cut in network.cuts] == ["div"]


def test_a_root_mean_square_is_no_product():
    def normed(m, x):
        h = m.a(x)
        return m.o(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

    network = ps.trace(Layers(normed, **A, **OUT).double(), X)
    assert not network.tape.product
    assert not network.cuts
    assert len(network.tape.normalizations) == 1


def test_a_square_that_ends_in_no_normalization_is_a_product():
    def variance(m, x):
        h = m.a(x)
        return m.o(h.pow(2).mean(-1, keepdim=True).expand(-1, 3))

    network = ps.trace(Layers(variance, **A, **OUT).double(), X)
    assert network.tape.product == "pow"
    assert network.num_classes == 1


def test_a_loss_written_out_is_a_cut():
    def loss(m, x):
        return ((m.o(m.a(x).relu()) - x) ** 2).mean()

    model = Layers(loss, **A, **OUT).double()
    plain = Layers(lambda m, x: m.o(m.a(x).relu()), **A, **OUT).double()
    plain.load_state_dict(model.state_dict())
    ours, theirs = (ps.trace(m, X) for m in (model, plain))
    assert [cut.operation for cut in ours.cuts] == ["pow"]
    for key, value in ps.paths.kappa(theirs).items():
        assert torch.equal(ps.paths.kappa(ours)[key], value)


def test_path_space_refuses_products_by_name():
    model = made("ReGLU")
    network = ps.trace(model, X)
    with pytest.raises(ValueError, match="multiplies two activations"):
        ps.optim.GSGD(model.parameters(), network, lr=0.01)
    with pytest.raises(ValueError, match="multiplies two activations"):
        ps.paths.basis_paths(network, ps.paths.skeleton(network))
    with pytest.raises(ps.UntraceableError, match="multiplies two activations"):
        ps.paths.unroll(network)


def test_a_power_is_a_product_too():
    model = made("cubed")
    with pytest.raises(ValueError, match=r"multiplies two activations or weights \(pow"):
        ps.optim.GSGD(model.parameters(), ps.trace(model, X), lr=0.01)


def test_a_class_whose_factor_is_dead_is_dead():
    model = made("ReGLU")
    with torch.no_grad():
        model.a.bias[1] = -100.0
    network = ps.trace(model, X)
    dead = {network.class_names[i] for i in ps.paths.dead_units(network, X).nonzero().flatten()}
    assert dead == {"linear in 'a'[1]", "linear in 'b'[1]"}


def test_factors_that_no_common_batch_has_are_refused():
    def mixed(m, x):
        return m.o((m.a(x)[:, None] * m.b(x)[None]).sum(1))

    with pytest.raises(ps.UntraceableError, match="mixes the examples"):
        ps.trace(Layers(mixed, **A, **B, **OUT), X.float())


def test_gated_units_as_they_are_in_use():
    """The gate of SwiGLU and GEGLU is cut; with a ReLU both sides are free."""
    for gate, classes in ((functional.silu, 3), (functional.gelu, 3), (torch.relu, 6)):
        network = ps.trace(
            Layers(lambda m, x, gate=gate: m.o(gate(m.a(x)) * m.b(x)), **A, **B, **OUT), X.float()
        )
        assert network.num_classes == classes


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(2, 6), nn.Linear(3, 2)

    def forward(self, x):
        return self.o(functional.glu(self.a(x)))


def test_the_linear_side_of_a_gated_linear_unit_is_free():
    model = GLU().double()
    network = ps.trace(model, X)
    basis, found = scalings(model, [X]), ps.paths.reduction_graph(network).exponents()
    assert network.num_classes == basis.shape[1] == 3
    torch.testing.assert_close(basis @ (basis.t() @ found), found, rtol=0, atol=1e-7)
    assert [cut.operation for cut in network.cuts] == ["glu"]
    q = {name: p.detach().square() for name, p in model.named_parameters()}
    h = q["a.weight"].sum(1) + q["a.bias"]
    norm = h[3:].sum() + (q["o.weight"] @ h[:3] + q["o.bias"]).sum()
    torch.testing.assert_close(
        ps.paths.squared_path_norm(network).detach(), norm, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_a_gated_linear_unit_on_data_is_the_one_written_out(statistic):
    class Written(GLU):
        def forward(self, x):
            a, b = self.a(x).chunk(2, -1)
            return self.o(a * b.sigmoid())

    ours, theirs = GLU().double(), Written().double()
    theirs.load_state_dict(ours.state_dict())
    kappas = [
        ps.paths.data_dependent_kappa(ps.trace(m, X), X, alpha=0.5, statistic=statistic)
        for m in (ours, theirs)
    ]
    for key, value in kappas[0].items():
        torch.testing.assert_close(value, kappas[1][key], rtol=1e-12, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_optimizers_of_a_gated_linear_unit_are_bitwise_invariant(rule):
    report = ps.rescaling.check_invariance(
        GLU(),
        X.float(),
        lambda y: y.square().mean(),
        OPTIMIZERS[rule],
        steps=12,
        low=2.0**-6,
        high=2.0**6,
    )
    assert report.passed


def test_scores_of_an_attention_without_softmax_keep_their_scale():
    """(relu(q) k^T) v: the scale of a score is that of the query times that of the key, the same in every dimension."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            return self.o(
                torch.relu(self.q(x)) @ self.k(x).transpose(1, 2) @ self.v(x) / math.sqrt(3)
            )

    model, x = Linear().double(), torch.randn(2, 4, 3, **DOUBLE)
    found = ps.paths.reduction_graph(ps.trace(model, x)).exponents()
    basis = scalings(model, [x], seeds=2)
    assert found.shape[1] == basis.shape[1]
    torch.testing.assert_close(basis @ (basis.t() @ found), found, rtol=0, atol=1e-7)


@pytest.mark.parametrize("normalize", [nn.LayerNorm, nn.RMSNorm])
def test_a_gain_of_one_plus_a_parameter_adds_paths_to_a_normalization(normalize):
    class Gained(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
            self.n = normalize(4, elementwise_affine=False)
            self.w = nn.Parameter(torch.randn(4))
            self.gain = gain

        def forward(self, x):
            return self.b(self.gain(self.n(self.a(x).relu()), self.w))

    torch.manual_seed(0)
    model = Gained(lambda h, w: h * (1 + w)).double()
    twin = Gained(lambda h, w: h + h * w).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(5, 3, **DOUBLE)
    networks = [ps.trace(m, x) for m in (model, twin)]
    assert not networks[0].program.cuts
    for measure in (
        ps.paths.kappa,
        ps.paths.path_norm,
        lambda net: ps.paths.data_dependent_norm(net, x),
    ):
        found, expected = map(measure, networks)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
