"""Metrics of single units: solves against the full matrix, metrics against explicit derivatives, shifts of activity."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, mlp, trace
from pathspace.metrics import (
    quasi_diagonal_metric,
    solve_diagonal,
    solve_full,
    solve_quasi_diagonal,
)

TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def random_metric(units, size, seed=0):
    J = torch.randn(
        units, 3 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return J.transpose(1, 2) @ J


# --- solves ---------------------------------------------------------------------------------------


def test_full_solve_is_the_inverse():
    M, G = random_metric(4, 3), torch.randn(4, 3, dtype=torch.float64)
    assert_close((M @ solve_full(G, M).unsqueeze(-1)).squeeze(-1), G)


def test_quasi_diagonal_is_full_for_one_weight_and_a_bias():
    M, G = random_metric(5, 2), torch.randn(5, 2, dtype=torch.float64)
    d, d_0 = solve_quasi_diagonal(G[:, 1:], G[:, 0], M[:, 1:, 1], M[:, :1, 1], M[:, 0, 0])
    assert_close(torch.cat([d_0.unsqueeze(1), d], 1), solve_full(G, M))


def test_quasi_diagonal_is_full_where_weights_are_uncorrelated_given_the_bias():
    """The metric whose inverse has the quasi-diagonal's pattern: M_ij = M_0i M_0j / M_00 for i != j."""
    generator = torch.Generator().manual_seed(0)
    M_00, cross = (
        torch.tensor([2.0]).double(),
        torch.randn(1, 4, generator=generator, dtype=torch.float64),
    )
    remainder = torch.rand(1, 4, generator=generator, dtype=torch.float64) + 0.5
    inner = cross.t() @ cross / M_00 + torch.diag(remainder[0])
    M = torch.cat([torch.cat([M_00.unsqueeze(1), cross], 1), torch.cat([cross.t(), inner], 1)])
    G = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    d, d_0 = solve_quasi_diagonal(G[:, 1:], G[:, 0], inner.diagonal().unsqueeze(0), cross, M_00)
    assert_close(torch.cat([d_0.unsqueeze(1), d], 1), solve_full(G, M.unsqueeze(0)))


def test_quasi_diagonal_without_cross_terms_is_diagonal():
    G, M = torch.randn(3, 4), torch.rand(3, 4) + 0.1
    d, d_0 = solve_quasi_diagonal(G, G[:, 0], M, torch.zeros(3, 4), M[:, 1])
    assert_close(d, solve_diagonal(G, M))
    assert_close(d_0, G[:, 0] / M[:, 1])


def test_inputs_that_never_vary_and_units_without_data_stay_put():
    one = torch.ones(1, 1)
    # h = 2 always: M_11 = M_01^2 / M_00
    d, d_0 = solve_quasi_diagonal(one, one[0], 4 * one, 2 * one, one[0])
    assert d.item() == 0
    assert d_0.item() == 1
    d, d_0 = solve_quasi_diagonal(0 * one, one[0], 0 * one, 0 * one, 0 * one[0])
    assert (d.item(), d_0.item()) == (0, 0)


# --- the metric -----------------------------------------------------------------------------------

PAIRS = {
    "mlp": {"0.weight": "0.bias", "2.weight": "2.bias", "4.weight": "4.bias"},
    "cnn 1d": {"0.weight": "0.bias", "4.weight": "4.bias"},
    "rnn": {
        "rnn.weight_ih_l0": "rnn.bias_ih_l0",
        "rnn.weight_hh_l0": "rnn.bias_ih_l0",
        "rnn.bias_hh_l0": "rnn.bias_ih_l0",
        "out.weight": "out.bias",
    },
    "hand-written loop": {
        "read.weight": "read.bias",
        "step.weight": "read.bias",
        "out.weight": "out.bias",
    },
    "mlp without bias": {},
}


@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sample(5)
def test_metric_is_made_of_single_derivatives(name, statistic):
    case, n = BY_NAME[name], 4
    model, example = case.model(torch.float64), case.example(4, torch.float64)
    network = trace(case, model)
    metric = quasi_diagonal_metric(network, example, statistic=statistic)
    assert metric.bias_of == PAIRS[name]
    J = {key: [] for key, _ in model.named_parameters()}
    for i in range(n):
        for output in case.picked(call(model, example[i : i + 1])).reshape(-1):
            slopes = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            for key, slope in zip(J, slopes, strict=True):
                J[key].append(slope)
    J = {key: torch.stack(rows).reshape(n, -1, *rows[0].shape) for key, rows in J.items()}
    if statistic == "covariance":
        J = {key: j - j.mean(0) for key, j in J.items()}
    assert_close(
        dict(metric.diagonal), {key: j.square().mean(0).sum(0) for key, j in J.items()}, **TIGHT
    )
    for weight, bias in PAIRS[name].items():
        other = J[bias].reshape(*J[bias].shape, *[1] * (J[weight].dim() - 3))
        assert_close(metric.cross[weight], (J[weight] * other).mean(0).sum(0), **TIGHT)


def test_data_share_is_a_factor_of_the_cross_terms():
    case = BY_NAME["mlp"]
    network, x = trace(case, case.model(torch.float64)), case.example(4, torch.float64)
    metric = quasi_diagonal_metric(network, x, alpha=0.3)
    assert_close(dict(metric.diagonal), ps.paths.data_dependent_kappa(network, x, alpha=0.3))
    for weight, bias in metric.bias_of.items():
        bound = metric.diagonal[weight] * metric.diagonal[bias].unsqueeze(1)
        assert (metric.cross[weight].square() <= bound).all()
    with pytest.raises(ValueError, match="alpha must be positive"):
        quasi_diagonal_metric(network, x, alpha=0.0)


# --- shifts ---------------------------------------------------------------------------------------


def run_with_shift(make, shift, steps=12):
    """The outputs along a run on inputs that are shifted, with the shift taken out of the first biases."""
    torch.manual_seed(0)
    model, x = mlp(3, 5, 2).double(), torch.randn(16, 3, dtype=torch.float64)
    y = torch.randn(16, 2, dtype=torch.float64)
    with torch.no_grad():
        model[0].bias -= model[0].weight @ shift
    network = ps.trace(model, x)
    optimizer = make(model.parameters(), network)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x + shift)
        (out - y).square().mean().backward()
        optimizer.step()
        outputs.append(out.detach())
    return torch.stack(outputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "invariant"),
    [
        (
            lambda p, n: ps.optim.QuasiDiagonal(
                p, n, lr=0.02, damping=0.0, normalization="none", estimator="exact"
            ),
            True,
        ),
        (
            lambda p, n: ps.optim.QuasiDiagonal(
                p, n, lr=0.02, damping=0.0, normalization="none", estimator="signs"
            ),
            True,
        ),
        (lambda p, n: ps.optim.QuasiDiagonal(p, n, lr=0.02, normalization="none"), True),
        (
            lambda p, n: ps.optim.QuasiDiagonal(p, n, lr=0.02, damping=0.0),
            False,
        ),  # a mean of kappa is not
        (
            lambda p, n: ps.optim.DDPSGD(
                p, n, lr=0.02, alpha=1.0, normalization="none", estimator="exact"
            ),
            False,
        ),
        (lambda p, n: ps.optim.PathSGD(p, n, lr=0.02), False),
    ],
    ids=[
        "quasi-diagonal",
        "quasi-diagonal by signs",
        "by default",
        "normalized",
        "diagonal",
        "paths",
    ],
)
def test_shifts_of_the_input_do_not_matter(make, invariant):
    shift = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    apart = (run_with_shift(make, shift) - run_with_shift(make, 0 * shift)).abs().max().item()
    assert (apart < 1e-8) == invariant


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_second_bias_of_a_recurrent_layer_does_not_move(refresh_every):
    torch.manual_seed(0)
    model = nn.RNN(2, 3, nonlinearity="relu", batch_first=True).double()
    x = torch.randn(4, 5, 2, dtype=torch.float64)
    network = ps.trace(model, x, output=lambda r: r[0][:, -1])
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(),
        network,
        lr=0.01,
        damping=0.0,
        estimator="exact",
        refresh_every=refresh_every,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(4):
        optimizer.zero_grad()
        model(x)[0][:, -1].square().mean().backward()
        optimizer.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {"bias_hh_l0"}


def test_alpha_must_be_positive():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="without data the metric is diagonal"):
        ps.optim.QuasiDiagonal(model.parameters(), ps.trace(model, torch.zeros(1, 2)), alpha=0.0)


def test_an_estimator_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match="estimator must be 'exact', 'signs' or 'auto', got 'exakt'"
    ):
        quasi_diagonal_metric(
            ps.trace(nn.Linear(2, 1), torch.zeros(1, 2)), torch.ones(3, 2), estimator="exakt"
        )


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("statistic", ["second_moment", "covariance"])
def test_the_normalizer_is_the_mean_of_what_kappa_there_is(statistic, scale):
    """Output biases have none by the covariance, and count as zero."""
    torch.manual_seed(0)
    model, x = mlp(4, 6, 3).double(), scale * torch.randn(16, 4, dtype=torch.float64)
    network = ps.trace(model, x)
    optimizer = ps.optim.QuasiDiagonal(model.parameters(), network, lr=1e-9, statistic=statistic)
    exact = quasi_diagonal_metric(network, x, alpha=1.0, statistic=statistic)  # at the same weights
    model(x).square().mean().backward()
    optimizer.step()
    gauged = [optimizer.metric.gauge(n).times_(k.clone(), 2) for n, k in exact.diagonal.items()]
    mean = sum(k.sum() for k in gauged) / sum(k.numel() for k in gauged)
    for state in optimizer.metric.state.values():
        assert state["normalizer"] == pytest.approx(float(mean), rel=1e-9)


@pytest.mark.parametrize("normalization", ["refreshed", "network"])
def test_the_present_mean_normalizes_unless_it_is_frozen(normalization):
    """One normalizer serves all parameters, so that the two options are one."""
    torch.manual_seed(0)
    model, x = mlp(4, 6, 3).double(), torch.randn(16, 4, dtype=torch.float64)
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(), ps.trace(model, x), lr=0.0, alpha=1.0, normalization=normalization,
        refresh_every=1, estimator="exact",
    )  # fmt: skip
    found = []
    for scale in (1.0, 3.0):
        optimizer.zero_grad()
        model(scale * x).square().mean().backward()
        optimizer.step()
        (normalizer,) = {state["normalizer"] for state in optimizer.metric.state.values()}
        found.append(normalizer)
    assert found[1] > 2 * found[0]


@pytest.mark.parametrize("normalization", ["none", "frozen"])
def test_a_normalizer_that_stays_does_so_where_parameters_have_no_kappa(normalization):
    """Output biases by the covariance never have one, and a batch can turn all units off."""
    torch.manual_seed(0)
    model, x = mlp(4, 6, 3).double(), torch.rand(16, 4, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.zero_()
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(), ps.trace(model, x), lr=1e-9, statistic="covariance", normalization=normalization,
        refresh_every=1,
    )  # fmt: skip
    found = []
    for batch in (x, x.flip(0), -x, x):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        found += [(state["normalizer"], state["mean"]) for state in optimizer.metric.state.values()]
    ((normalizer, mean),) = set(found)  # damping is a share of one mean, too
    assert normalizer == (1 if normalization == "none" else mean)


@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_damping_bounds_the_steps_below_a_layer_of_zeros(lr):
    """After one step kappa below it is 1e-12 of its own: damped in proportion to that, weights took steps of 1."""
    torch.manual_seed(0)
    model = mlp(4, 8, 8, 3)
    with torch.no_grad():
        for p in model[-1].parameters():
            p.zero_()
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(), ps.trace(model, torch.zeros(1, 4)), lr=lr
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(12):
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert (p - before[name]).abs().max() < 10 * lr, name


@pytest.mark.parametrize("absent", ["weight", "bias"])
def test_what_comes_back_after_a_refresh_has_the_metric_of_that_refresh(absent):
    """M_0i of one time beside M_00 of another would leave a remainder of any size."""
    torch.manual_seed(0)
    model = mlp(3, 5, 2).double()
    network = ps.trace(model, torch.zeros(1, 3, dtype=torch.float64))
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(), network, lr=0.05, damping=0.0, estimator="exact", refresh_every=3
    )
    for step in range(8):
        x = torch.randn(16, 3, dtype=torch.float64) + step
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        for name, p in model.named_parameters():
            if step in (5, 6) and name.endswith(absent):
                p.grad = None
        if step == 6:  # where it is refreshed
            metric = quasi_diagonal_metric(network, x)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    for layer in ("0", "2"):
        w, b = f"{layer}.weight", f"{layer}.bias"
        g, g_0 = (network.parameters[name].grad for name in (w, b))
        assert g is not None
        assert g_0 is not None
        d = solve_quasi_diagonal(g, g_0, metric.diagonal[w], metric.cross[w], metric.diagonal[b])
        for name, direction in zip((w, b), d, strict=True):
            c = next(iter(optimizer.metric.state.values()))["normalizer"]
            assert_close(
                before[name] - network.parameters[name].detach(), 0.05 * c * direction, **TIGHT
            )


def test_it_has_a_metric_of_its_own():
    model = mlp(4, 6, 3)
    network = ps.trace(model, torch.zeros(1, 4))
    with pytest.raises(TypeError, match="metric is no option of QuasiDiagonal"):
        ps.optim.QuasiDiagonal(model.parameters(), network, metric=ps.metrics.DataDependent())


def test_clipping_survives_a_large_gradient():
    torch.manual_seed(0)
    model, x = mlp(3, 8, 2), torch.randn(6, 3)
    optimizer = ps.optim.QuasiDiagonal(
        model.parameters(), ps.trace(model, x), lr=0.05, clip_norm=1.0
    )
    for scale in (1.0, 1.0, 1e25):  # the products of the last gradients overflow float32
        optimizer.zero_grad()
        (scale * model(x).square().mean()).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert max(p.abs().max().item() for p in model.parameters()) < 10


@pytest.mark.parametrize("grouped", [False, True])
def test_path_decay_is_the_gradient_of_the_path_norm(grouped):
    ends = []
    for decay in (0.02, 0.0):
        torch.manual_seed(0)
        model, x = mlp(3, 5, 4, 2).double(), torch.randn(6, 3, dtype=torch.float64)
        network = ps.trace(model, x)
        given = {"path_decay": decay}
        params = [{"params": list(model.parameters()), **given}] if grouped else model.parameters()
        optimizer = ps.optim.QuasiDiagonal(
            params, network, lr=0.02, damping=0.01, **({} if grouped else given)
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if not decay:
                kappa1 = ps.paths.kappa(network, second_term=False)
                for name, p in network.parameters.items():
                    assert p.grad is not None
                    p.grad += 0.02 * kappa1[name] * p.detach()
            optimizer.step()
        ends.append(dict(model.named_parameters()))
    assert_close(*ends, **TIGHT)
