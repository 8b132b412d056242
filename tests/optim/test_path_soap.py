"""PathSOAP: every option against SOAP written out plainly, and SOAP itself where there is nothing to rescale."""

import copy
import itertools
import math

import pytest
import torch
from plain_metric import PlainMetric
from torch import nn
from torch.testing import assert_close

import pathspace as ps
from cases import BY_NAME, call, in_turn, mlp, traced
from pathspace.optim.rules.soap import SOAP, eigenvectors, refined

# in the published setting entries of rounding size take full steps, and two computations need not
# agree
SAFE = {"lr": 0.01, "eps": 1e-2, "precondition_frequency": 2}


class PlainSOAP:
    """SOAP of one matrix (Vyas et al. 2024, Algorithm 3), momentum kept in the original space."""

    def __init__(self, beta1, beta2, eps, frequency, largest):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.frequency, self.largest, self.t = frequency, largest, -1

    def direction(self, G):
        n, m = G.shape
        self.t += 1
        if self.t == 0:
            self.L, self.R = (1 - self.beta2) * G @ G.T, (1 - self.beta2) * G.T @ G
            self.QL = self.eigenbasis(self.L) if n <= self.largest else None
            self.QR = self.eigenbasis(self.R) if m <= self.largest else None
            self.M, self.V = 0 * G, 0 * G
            return 0 * G
        QL = torch.eye(n, dtype=G.dtype) if self.QL is None else self.QL
        QR = torch.eye(m, dtype=G.dtype) if self.QR is None else self.QR
        self.M = self.beta1 * self.M + (1 - self.beta1) * G
        projected = QL.T @ G @ QR
        self.V = self.beta2 * self.V + (1 - self.beta2) * projected**2
        N = (QL.T @ self.M @ QR / (1 - self.beta1**self.t)) / (
            (self.V / (1 - self.beta2**self.t)).sqrt() + self.eps
        )
        self.L = self.beta2 * self.L + (1 - self.beta2) * G @ G.T
        self.R = self.beta2 * self.R + (1 - self.beta2) * G.T @ G
        if self.t % self.frequency == 0:
            if self.QL is not None:
                self.QL, order = self.iterated(self.L, self.QL)
                self.V = self.V[order]
            if self.QR is not None:
                self.QR, order = self.iterated(self.R, self.QR)
                self.V = self.V[:, order]
        return QL @ N @ QR.T

    def sloped(self, P):
        n = len(P)
        slope = [1 - i / (2 * (n - 1)) if n > 1 else 1.0 for i in range(n)]
        return P + 1e-6 * P.trace() / n * torch.diag(torch.tensor(slope, dtype=P.dtype))

    def eigenbasis(self, P):
        # of a positive matrix: its eigenvectors, by decreasing value
        U, S, _ = torch.linalg.svd(self.sloped(P))
        assert (S[:-1] >= S[1:]).all()
        return U

    def iterated(self, P, Q):
        P = self.sloped(P)
        order = sorted(range(len(P)), key=lambda i: -(Q[:, i] @ P @ Q[:, i]).item())
        columns = []
        for i in order:  # Gram-Schmidt, twice for accuracy
            q = P @ Q[:, i]
            for _ in range(2):
                for other in columns:
                    q = q - (other @ q) * other
                q = q / q.norm()
            columns.append(q)
        return torch.stack(columns, 1), order


class Plain:
    """PathSOAP, one obvious line after the other."""

    def __init__(self, case, model, **options):
        self.model = model
        self.options = {
            "betas": (0.95, 0.95),
            "weight_decay": 0.0,
            "max_precondition_size": 4096,
            "clip_norm": math.inf,
            "maximize": False,
        } | options
        damping = 0.0 if options.get("normalization") == "none" else 0.1
        self.metric = PlainMetric(case, model, {"damping": damping} | options) if case else None
        self.t, self.rules, self.m, self.v = 0, {}, {}, {}

    @torch.no_grad()
    def step(self):
        options = self.options
        parameters = dict(self.model.named_parameters())
        metric = {name: torch.ones_like(p) for name, p in parameters.items()}
        if self.metric:
            metric = self.metric.advance()
        beta1, beta2 = options["betas"]
        self.t += 1
        sign = -1 if options["maximize"] else 1
        h = {
            name: (sign * p.grad / metric[name].sqrt()).nan_to_num(0.0)
            for name, p in parameters.items()
        }
        shrink = min(
            1.0, options["clip_norm"] / math.sqrt(sum(value.square().sum() for value in h.values()))
        )
        for name, p in parameters.items():
            g = shrink * h[name]
            if p.dim() > 1:
                if name not in self.rules:
                    self.rules[name] = PlainSOAP(
                        beta1,
                        beta2,
                        options["eps"],
                        options["precondition_frequency"],
                        options["max_precondition_size"],
                    )
                d = self.rules[name].direction(g.reshape(len(g), -1)).reshape(g.shape)
            else:
                m = self.m[name] = beta1 * self.m.get(name, 0.0) + (1 - beta1) * g
                v = self.v[name] = beta2 * self.v.get(name, 0.0) + (1 - beta2) * g**2
                d = m / (1 - beta1**self.t) / ((v / (1 - beta2**self.t)).sqrt() + options["eps"])
            d = (d / metric[name].sqrt()).nan_to_num(0.0, posinf=0.0, neginf=0.0)
            p.copy_((1 - options["lr"] * options["weight_decay"]) * p - options["lr"] * d)


OPTIONS = {
    "default": {},
    "betas": {"betas": (0.7, 0.9)},
    "rarely": {"precondition_frequency": 4},
    "one side": {"max_precondition_size": 2},
    "no side": {"max_precondition_size": 0},
    "weight decay": {"weight_decay": 0.3},
    "clipped": {"clip_norm": 0.02},
    "stale, raw": {"refresh_every": 3, "normalization": "none"},
    "frozen": {"normalization": "frozen"},
    "second term": {"second_term": True},
    "damped": {"damping": 0.5},
    "undamped": {"damping": 0.0},
    "power": {"power": 0.5},
    "maximize": {"maximize": True},
}
CASES = ["mlp", "rnn", "small resnet"]


def train(rule, model, case, steps=6):
    for step in range(steps):
        model.zero_grad()
        case.loss(call(model, case.example(8, torch.float64, seed=step))).backward()
        rule.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("chosen", "name"), in_turn(OPTIONS, CASES))
def test_option_is_the_rule_written_out(chosen, name):
    case = BY_NAME[name]
    options = SAFE | OPTIONS[chosen]
    (ours, network), theirs = traced(case, torch.float64), case.model(torch.float64)
    optimizer = ps.optim.PathSOAP(ours.parameters(), network, **options)
    expected = train(Plain(case, theirs, **options), theirs, case)
    assert_close(train(optimizer, ours, case), expected, rtol=1e-6, atol=1e-7)


def test_every_option_has_an_effect():
    case = BY_NAME["rnn"]
    ends = []
    for options in OPTIONS.values():
        model, network = traced(case, torch.float64)
        optimizer = ps.optim.PathSOAP(model.parameters(), network, **(SAFE | options))
        ends.append(torch.cat([p.flatten() for p in train(optimizer, model, case).values()]))
    pairs = itertools.combinations(range(len(ends)), 2)
    assert [
        (i, j) for i, j in pairs if torch.allclose(ends[i], ends[j], rtol=1e-6, atol=1e-6)
    ] == []


def test_without_freedom_it_is_soap():
    """One linear layer has no unit to rescale, and its kappa is 1."""
    case = BY_NAME["rnn"]
    ours, theirs = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.01, "eps": 1e-4, "precondition_frequency": 3, "weight_decay": 0.1}
    network = ps.trace(ours, torch.zeros(1, 5).double())
    optimizer = ps.optim.PathSOAP(ours.parameters(), network, damping=0.0, **options)
    plain = Plain(None, theirs, **options)
    for _ in range(8):
        x = torch.randn(9, 5, dtype=torch.float64)
        for model, rule in ((ours, optimizer), (theirs, plain)):
            model.zero_grad()
            case.loss(model(x)).backward()
            rule.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_directions_of_small_gradients_take_steps_as_long(dtype):
    """They were taken for rounding from 1/256 of the largest on, and long memory was not learned."""
    left, right = (torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q for _ in range(2))
    p = nn.Parameter(torch.zeros(3, 3, dtype=dtype))
    rule = SOAP([p], lr=1.0)
    for _ in range(5):
        p.grad = (left @ torch.tensor([1.0, 1e-2, 1e-4]).double().diag() @ right.T).to(dtype)
        rule.step()
    moved = (left.T @ p.detach().double() @ right).diagonal()  # the first step only measures
    assert_close(moved, torch.full((3,), -4.0).double(), rtol=1e-2, atol=0)


# --- the basis ------------------------------------------------------------------------------------


def covariance(n, rank):
    A = torch.randn(n, rank, dtype=torch.float64)
    return A @ A.T


def test_power_iterations_converge_to_the_eigenvectors():
    P = covariance(6, 6)
    Q = torch.eye(6, dtype=torch.float64)
    for _ in range(400):
        Q, _ = refined(P, Q)
    assert_close(
        (Q.T @ eigenvectors(P)).abs(), torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_basis_is_orthonormal_and_does_not_depend_on_rounding(rank):
    """Where eigenvalues are equal, any basis of their space would do; the choice must not hang on the last bit."""
    P = covariance(5, rank) if rank else torch.zeros(5, 5, dtype=torch.float64)
    noise = 1e-15 * torch.randn(5, 5, dtype=torch.float64)
    disturbed = P * (1 + noise + noise.T)
    Q, R = eigenvectors(P), eigenvectors(disturbed)
    for _ in range(3):
        assert_close(Q.T @ Q, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
        assert_close((Q.T @ R).abs(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-6)
        (Q, _), (R, _) = refined(P, Q), refined(disturbed, R)


@pytest.mark.parametrize("good_steps", [0, 1, 2])
def test_gradients_that_are_no_numbers_show_in_the_parameters(good_steps):
    """They must not end in an error of the eigenvalue routine, on a GPU, where PathSOAP does not look at them."""
    model = mlp(3, 4, 2)
    optimizer = SOAP(model.parameters(), precondition_frequency=1)
    for number in (*[1.0] * good_steps, torch.nan):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() * number).backward()
        optimizer.step()
    assert model[2].bias.isnan().all()


@pytest.mark.parametrize(
    "options",
    [
        {"precondition_frequency": 0},
        {"max_precondition_size": -1},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"power": -1.0},
        {"clip_norm": 0.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    model = mlp(3, 4, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        ps.optim.PathSOAP(model.parameters(), ps.trace(model, torch.zeros(1, 3)), **options)


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.readout = (
            nn.RNN(2, 64, nonlinearity="relu", batch_first=True),
            nn.Linear(64, 1),
        )

    def forward(self, inputs):
        return self.readout(self.rnn(inputs)[0][:, -1])


class InTwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.read(x.to(self.read.weight.dtype)).relu().to(self.out.weight.dtype))


def test_parameters_of_another_type_take_the_steps_that_they_would_take_in_one():
    """Their coordinates have memory of their own, in which the step before must not be left."""
    torch.manual_seed(0)
    one, x = InTwoTypes().double(), torch.randn(64, 4, dtype=torch.float64)
    two = copy.deepcopy(one)
    two.read.float()
    for model in (one, two):
        optimizer = ps.optim.PathSOAP(model.parameters(), ps.trace(model, x), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
    assert_close(two.out.weight, one.out.weight, rtol=1e-3, atol=1e-4)


def test_digits_lost_near_zero_do_not_turn_the_basis():
    # gradients through 100 steps end below 1e-38, where float32 keeps few digits: how many depends
    # on the scales
    def losses(*, rescaled: bool) -> list[float]:
        torch.manual_seed(0)
        model = LastStep()
        inputs, targets = torch.rand(12, 4, 100, 2), torch.rand(12, 4, 1)
        network = ps.trace(model, inputs[0])
        if rescaled:
            generator = torch.Generator().manual_seed(1)
            ps.rescaling.random_rescale_(
                network, 2**-6, 2**6, powers_of_two=True, generator=generator
            )
        optimizer = ps.optim.PathSOAP(model.parameters(), network, lr=0.01)
        found, smallest = [], []
        for x, y in zip(inputs, targets, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            smallest.append(min(p.grad[p.grad != 0].abs().min() for p in model.parameters()))
        assert min(smallest) < torch.finfo(torch.float32).tiny, (
            "this network does not show what is tested"
        )
        return found

    assert losses(rescaled=False) == losses(rescaled=True)
