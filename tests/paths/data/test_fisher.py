"""The Fisher information against sums over labels and the divergence, the natural gradient against a dense solve."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import mlp


class EveryStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 3, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def nets():
    torch.manual_seed(7)
    return [
        (mlp(3, 4, 4, 3).double(), torch.randn(5, 3, dtype=torch.float64)),
        (EveryStep().double(), torch.randn(4, 3, 2, dtype=torch.float64)),
        (
            nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)).double(),
            torch.randn(4, 1, 4, dtype=torch.float64),
        ),
    ]


NETS = nets()
IDS = ["mlp", "rnn", "cnn"]


def score(model, network, x, label, place):
    """Grad of log p(label) of one example at one place, as one vector in the order of the network."""
    log_p = model(x)[0].log_softmax(-1)
    log_p = log_p[place] if log_p.dim() > 1 else log_p
    g = torch.autograd.grad(log_p[label], [network.parameters[name] for name in network.parameters])
    return torch.cat([part.reshape(-1) for part in g])


@pytest.mark.parametrize(("model", "x"), NETS, ids=IDS)
def test_softmax_is_the_mean_of_score_times_score_over_labels(model, x):
    network = ps.trace(model, x)
    known = 0.0
    for one in x.split(1):
        p = model(one)[0].softmax(-1).detach().reshape(-1, 3)
        for place, probabilities in enumerate(p):
            for label, probability in enumerate(probabilities):
                s = score(model, network, one, label, place)
                known = known + probability * torch.outer(s, s)
    assert_close(
        ps.paths.fisher(network, x, output="softmax"), known / len(x), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(("model", "x"), NETS, ids=IDS)
def test_softmax_is_the_second_derivative_of_the_divergence(model, x):
    network = ps.trace(model, x)
    names = list(network.parameters)
    p = model(x).log_softmax(-1).detach()

    def divergence(*values):
        q = torch.func.functional_call(model, dict(zip(names, values, strict=True)), x).log_softmax(
            -1
        )
        return (p.exp() * (p - q)).sum() / len(x)

    values = tuple(network.parameters[name].detach() for name in names)
    blocks = torch.autograd.functional.hessian(divergence, values)
    known = torch.cat(
        [
            torch.cat(
                [b.reshape(values[i].numel(), values[j].numel()) for j, b in enumerate(row)],
                1,
            )
            for i, row in enumerate(blocks)
        ]
    )
    assert_close(ps.paths.fisher(network, x, output="softmax"), known, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("model", "x"), NETS, ids=IDS)
def test_the_diagonal_for_a_gaussian_is_kappa_of_the_data_alone(model, x):
    network = ps.trace(model, x)
    kappa = ps.paths.data_dependent_kappa(network, x, alpha=1.0)
    diagonal = ps.paths.reduction_graph(network).unflatten(ps.paths.fisher(network, x).diagonal())
    for name, value in kappa.items():
        assert_close(diagonal[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("output", ["gaussian", "softmax"])
@pytest.mark.parametrize(("model", "x"), NETS, ids=IDS)
def test_degrees_of_freedom_are_the_rank(model, x, output):
    torch.manual_seed(0)
    more = torch.randn(30, *x.shape[1:], dtype=torch.float64)
    network = ps.trace(model, x)
    number = ps.paths.degrees_of_freedom(network, more, output=output)
    fisher = ps.paths.fisher(network, more, output=output)
    scale = fisher.diagonal().clamp(min=1e-300).rsqrt()
    assert number == int(torch.linalg.matrix_rank(scale[:, None] * fisher * scale, rtol=1e-9))
    gaussian = ps.paths.degrees_of_freedom(network, more)
    # a bias that all logits share is not seen, and so is a unit's common weight to all of them
    assert number == gaussian if output == "gaussian" else number < gaussian


def test_degrees_of_freedom_of_one_layer_with_a_softmax():
    model = nn.Linear(3, 4).double()
    network, x = ps.trace(model, torch.zeros(1, 3).double()), torch.randn(20, 3).double()
    assert ps.paths.degrees_of_freedom(network, x) == 16
    # one row of four is of no use
    assert ps.paths.degrees_of_freedom(network, x, output="softmax") == 12


def test_the_dimension_of_the_softmax():
    class Turned(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).transpose(1, 2)

    model, x = NETS[1]
    known = ps.paths.fisher(ps.trace(model, x), x, output="softmax")
    turned = ps.trace(Turned(model), x)
    assert_close(ps.paths.fisher(turned, x, output="softmax", dim=1), known)
    assert not torch.allclose(ps.paths.fisher(turned, x, output="softmax"), known)


@pytest.mark.sample(3)
@pytest.mark.parametrize("output", ["gaussian", "softmax"])
@pytest.mark.parametrize(("model", "x"), NETS, ids=IDS)
def test_the_natural_gradient_solves_the_dense_system(model, x, output):
    assert_natural_gradient_solves(model, x, output)


class Attention(nn.Module):
    """Heads of attention, in the one call whose gradient torch cannot differentiate again."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(2, 12), nn.Linear(4, 3)

    def forward(self, x):
        heads = self.inner(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_the_natural_gradient_through_fused_attention():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    assert_natural_gradient_solves(Attention().double(), x, "softmax")


def assert_natural_gradient_solves(model, x, output):
    network = ps.trace(model, x)
    torch.manual_seed(1)
    g = {name: torch.randn_like(p) for name, p in network.parameters.items()}
    graph = ps.paths.reduction_graph(network)
    kappa = graph.flatten(ps.paths.kappa(network))
    whole = ps.paths.fisher(network, x, output=output) + 0.1 * kappa.diag()
    known = graph.unflatten(torch.linalg.solve(whole, graph.flatten(g)))
    found = ps.paths.natural_gradient(network, x, g, damping=0.1, output=output)
    for name, value in known.items():
        assert_close(found[name], value, rtol=1e-8, atol=1e-10)


def test_conjugate_gradients_end_after_so_many_steps():
    """One of them goes along g / kappa, to the least of the quadratic form on that line."""
    model, x = NETS[0]
    network = ps.trace(model, x)
    g = {name: torch.ones_like(p) for name, p in network.parameters.items()}
    graph = ps.paths.reduction_graph(network)
    kappa, flat = graph.flatten(ps.paths.kappa(network)), graph.flatten(g)
    whole = ps.paths.fisher(network, x) + 0.1 * kappa.diag()
    along = flat / kappa
    one = along * (flat @ along) / (along @ whole @ along)
    for iterations, known in ((0, torch.zeros_like(one)), (1, one)):
        found = ps.paths.natural_gradient(network, x, g, damping=0.1, iterations=iterations)
        assert_close(graph.flatten(found), known, rtol=1e-10, atol=1e-14)


def test_the_natural_gradient_moves_all_members_of_a_class_alike():
    model, x = nets()[0]
    network = ps.trace(model, x)
    results = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1]))
        grads = torch.autograd.grad(loss, list(network.parameters.values()))
        d = ps.paths.natural_gradient(
            network,
            x,
            dict(zip(network.parameters, grads, strict=True)),
            output="softmax",
            iterations=7,
        )
        with torch.no_grad():
            for name, p in network.parameters.items():
                p.sub_(0.1 * d[name])
            results.append(model(x))
            for name, p in network.parameters.items():
                p.add_(0.1 * d[name])
        ps.rescaling.random_rescale_(
            network, powers_of_two=True, generator=torch.Generator().manual_seed(2)
        )
    assert_close(results[0], results[1], rtol=1e-12, atol=1e-13)


def test_weights_on_no_path_do_not_move_and_wrong_options_are_refused():
    model, x = nets()[0]
    with torch.no_grad():
        model[2].weight[:, 0] = 0.0
        model[2].bias.fill_(-1e3)  # all units dead
    network = ps.trace(model, x)
    d = ps.paths.natural_gradient(network, x, {"0.weight": torch.ones(4, 3, dtype=torch.float64)})
    assert float(d["0.weight"][0].abs().max()) == 0.0  # kappa is zero there
    assert all(math.isfinite(float(value.sum())) for value in d.values())
    assert float(d["4.bias"].abs().max()) == 0.0  # no gradient
    with pytest.raises(ValueError, match="damping must be positive"):
        ps.paths.natural_gradient(network, x, {}, damping=0.0)
    for tolerance in (-1.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"tolerance must be in \[0, 1\)"):
            ps.paths.natural_gradient(network, x, {}, tolerance=tolerance)
    for function in (ps.paths.fisher, ps.paths.degrees_of_freedom):
        with pytest.raises(ValueError, match="'gaussian' or 'softmax'"):
            function(network, x, output="poisson")


def test_gradients_are_of_the_parameters_shape_and_finite_and_may_be_missing():
    model, x = nets()[0]
    network = ps.trace(model, x)
    bias = torch.ones_like(model[4].bias)
    alone = ps.paths.natural_gradient(network, x, {"4.bias": bias})
    with_none = ps.paths.natural_gradient(
        network,
        x,
        {**dict.fromkeys(network.parameters), "4.bias": bias},  # type: ignore[arg-type]
    )
    assert all(torch.equal(alone[name], with_none[name]) for name in network.parameters)
    assert float(alone["4.bias"].abs().max()) > 0
    for value in (math.nan, math.inf):  # was zero, the natural gradient of nothing
        with pytest.raises(FloatingPointError, match="gradients are not finite"):
            ps.paths.natural_gradient(network, x, {"4.bias": bias * value})
    with pytest.raises(ValueError, match=r"'4.bias' has shape \(1,\)"):
        ps.paths.natural_gradient(network, x, {"4.bias": bias[:1]})
    with pytest.raises(
        ValueError, match=r"no parameter 'module\.4\.bias': give gradients by the names 0"
    ):
        # was that of no gradient at all
        ps.paths.natural_gradient(network, x, {"module.4.bias": bias})
    aside = ps.trace(model, x, outside=[model[0]])
    ps.paths.natural_gradient(
        aside, x, {"0.bias": torch.ones(4, dtype=torch.float64), "4.bias": bias}
    )


@pytest.mark.parametrize("dim", [0, 2, -3])
def test_a_softmax_along_no_classes_is_refused(dim):
    """Along the examples it would be over one of them, and all of it zero."""
    model, x = nn.Linear(2, 3), torch.ones(4, 2)
    network = ps.trace(model, x)
    for use in (
        lambda: ps.paths.fisher(network, x, output="softmax", dim=dim),
        lambda: ps.paths.degrees_of_freedom(network, x, output="softmax", dim=dim),
        lambda: ps.paths.natural_gradient(
            network, x, {"bias": torch.ones(3)}, output="softmax", dim=dim, damping=1.0
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"dim={dim} holds no classes: outputs of one example are \(1, 3\)"
        ):
            use()


def test_a_softmax_where_inputs_have_the_batch_elsewhere():
    """Steps first, as `nn.RNN` takes them, and classes last."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.RNN(2, 3, nonlinearity="relu"), nn.Linear(3, 4)

        def forward(self, x):
            return self.out(self.rnn(x)[0][-1])

    model, x = Last(), torch.randn(5, 6, 2)
    network = ps.trace(model, x, batch_dim=1)
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert ps.paths.fisher(network, x, output="softmax").any()
    assert any(
        g.any() for g in ps.paths.natural_gradient(network, x, gradients, output="softmax").values()
    )
    with pytest.raises(
        ValueError, match=r"dim=0 holds no classes: outputs of one example are \(1, 4\)"
    ):
        ps.paths.natural_gradient(network, x, gradients, output="softmax", dim=0)
