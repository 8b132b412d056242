"""DDP-Normalization measured on a separate sample, against its definition."""

import pytest
import torch
from torch import nn

import pathspace as ps
from oracles import ddp_normalization as oracle

RULES = [
    (alpha, statistic, centred)
    for alpha in (0.0, 0.4, 1.0)
    for statistic in ("second_moment", "covariance")
    for centred in (False, True)
]
SHAPES = {"linear": (4,), "linear over time": (3, 4), "conv1d": (2, 5), "groups": (4, 3, 3)}


def build(name):
    torch.manual_seed(2)
    first, last = {
        "linear": (nn.Linear(4, 3), nn.Linear(3, 2)),
        "linear over time": (nn.Linear(4, 3), nn.Linear(3, 2)),
        "conv1d": (nn.Conv1d(2, 3, 2), nn.Conv1d(3, 1, 1)),
        "groups": (nn.Conv2d(4, 6, 2, groups=2), nn.Conv2d(6, 1, 1)),
    }[name]
    model = nn.Sequential(first, nn.ReLU(), last).double()
    return model, *(torch.randn(n, *SHAPES[name], dtype=torch.float64) for n in (3, 5))


@pytest.mark.sample(16)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_nodes_and_gradients_are_what_the_definition_says(name, rule):
    alpha, statistic, centred = rule
    model, x, sample = build(name)
    options = {"alpha": alpha, "statistic": statistic, "centred": centred, "eps": 0.0}
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x), **options)
    parameters = list(normal.parameters())
    out = ps.nn.measured_on(normal, x, sample)
    d = torch.ones(normal[0].weight[0].numel(), dtype=torch.float64)
    z = oracle.normalized(normal[0], x, alpha, statistic, centred, d, sample)
    last = normal[2]
    expected = z.relu() @ last.weight.flatten(1).T + last.bias
    rows = (
        out.reshape(-1, 2)
        if name.startswith("linear")
        else out.flatten(2).transpose(1, 2).flatten(0, 1)
    )
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
    seed = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(v, parameters, seed) for v in (rows, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    # D16 Theorem 1 holds: the length of w~ (with its bias) does not matter
    dots = (ours[0] * parameters[0]).flatten(1).sum(1) + ours[1] * parameters[1]
    assert dots.abs().max() < 1e-10 * ours[0].abs().max()


def test_two_layers_an_input_does_not_depend_on_the_others_and_averages_follow_the_sample():
    torch.manual_seed(3)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)]
    model = nn.Sequential(*layers).double()
    x, sample = torch.randn(7, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    options = {"alpha": 0.5, "statistic": "covariance"}
    one, other = (ps.nn.ddp_normalize(model, ps.trace(model, x), **options) for _ in range(2))
    out = ps.nn.measured_on(one, x, sample)
    for i in range(len(x)):
        torch.testing.assert_close(ps.nn.measured_on(one, x[i : i + 1], sample)[0], out[i])
    torch.testing.assert_close(
        ps.nn.measured_on(one, sample, sample), one(sample), rtol=1e-11, atol=1e-12
    )
    # the averages are those of a pass of the sample alone
    one = ps.nn.ddp_normalize(model, ps.trace(model, x), **options)
    ps.nn.measured_on(one, x, sample)
    other(sample)
    for a, b in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_what_cannot_be_measured_is_refused():
    model, x, sample = build("linear")
    normal = ps.nn.ddp_normalize(model, ps.trace(model, x))
    with pytest.raises(ValueError, match="no layer made by ddp_normalize"):
        ps.nn.measured_on(model, x, sample)
    with pytest.raises(ValueError, match="this NoneType has no layer made by ddp_normalize"):
        ps.nn.measured_on(None, x, sample)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inputs and sample must be tensors"):
        ps.nn.measured_on(normal, (x,), sample)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one shape"):
        ps.nn.measured_on(normal, x, sample[:, :2])
    with pytest.raises(ValueError, match="at least one of each"):
        ps.nn.measured_on(normal, x, sample[:0])
    with pytest.raises(ValueError, match=r"call train\(\)"):
        ps.nn.measured_on(normal.eval(), x, sample)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = normal.train()

        def forward(self, x):
            return self.layers(x[:2])

    with pytest.raises(ValueError, match="examples in the first dimension"):
        ps.nn.measured_on(First(), x, sample)
    assert normal[0]._sample is None  # nothing stays behind

    class TimeFirst(First):
        def forward(self, x):
            return self.layers(x.transpose(0, 1)).transpose(0, 1)

    sequences = [torch.randn(n, 6, x.shape[1], dtype=x.dtype) for n in (3, 2)]
    with pytest.raises(ValueError, match="reads 6 rows, and there are 5 examples"):
        ps.nn.measured_on(TimeFirst(), *sequences)
    variance = ps.nn.ddp_normalize(model, ps.trace(model, x), alpha=1.0, statistic="covariance")
    with pytest.raises(ValueError, match="at least 2 values"):
        ps.nn.measured_on(variance, x, sample[:1])
