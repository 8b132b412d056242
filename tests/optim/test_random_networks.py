"""Random networks, options and factors: two members of a rescaling class train alike to the last bit."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import pathspace as ps
from cases import slow_besides

ACTIVATIONS = (
    functional.relu,
    torch.abs,
    lambda z: functional.leaky_relu(z, 0.25),
    lambda z: z * (z > 0),
)


class Vectors(nn.Module):
    """Layers in a chain, as residual blocks, as differences, or each reading all before it."""

    def __init__(self, draw):
        super().__init__()
        width, self.kind = (
            draw.randint(2, 7),
            draw.choice(("chain", "residual", "difference", "dense")),
        )
        self.first, self.activation = nn.Linear(3, width), draw.choice(ACTIVATIONS)
        depth, bias = draw.randint(1, 4), draw.random() < 0.7
        fan_in = [width * (i + 1) if self.kind == "dense" else width for i in range(depth + 1)]
        self.middle = nn.ModuleList(nn.Linear(n, width, bias=bias) for n in fan_in[:-1])
        self.out = nn.Linear(fan_in[-1], 2)

    def inputs(self, generator):
        return torch.randn(4, 3, generator=generator)

    def forward(self, x):
        x = self.activation(self.first(x))
        for layer in self.middle:
            y = self.activation(layer(x))
            made = {"chain": lambda _, y: y, "residual": torch.add, "difference": torch.sub}
            x = made[self.kind](x, y) if self.kind in made else torch.cat([x, y], -1)
        return self.out(x)


class Images(nn.Module):
    """Two convolutions, grouped and strided as it comes, with BatchNorm or without."""

    def __init__(self, draw):
        super().__init__()
        n = draw.randint(2, 6)
        options = {
            "stride": draw.choice((1, 2)),
            "groups": draw.choice((1, n)),
            "bias": draw.random() < 0.7,
        }
        self.layers = nn.Sequential(
            nn.Conv2d(1, n, 3, padding=1),
            nn.BatchNorm2d(n) if draw.random() < 0.3 else nn.Identity(),
            nn.ReLU(),
            nn.Conv2d(n, n, 3, padding=1, **options),
            nn.BatchNorm2d(n) if draw.random() < 0.3 else nn.Identity(),
            nn.ReLU(),
            draw.choice((nn.MaxPool2d, nn.AvgPool2d))(2),
            nn.Flatten(),
        )
        self.out = nn.LazyLinear(2)
        self(torch.zeros(2, 1, 6, 6))

    def inputs(self, generator):
        return torch.randn(4, 1, 6, 6, generator=generator)

    def forward(self, x):
        return self.out(self.layers(x))


class Sequences(nn.Module):
    """``nn.RNN`` in its forms, a loop over a cell, or two recurrent layers with a linear one between."""

    def __init__(self, draw):
        super().__init__()
        n, self.steps, self.last = (
            draw.randint(2, 7),
            draw.choice((1, 2, 3, 9, 40)),
            draw.random() < 0.5,
        )
        self.kind = draw.choice(("rnn", "rnn", "cell", "two"))
        options = {"num_layers": draw.randint(1, 3), "bidirectional": draw.random() < 0.3}
        if self.kind != "rnn":
            options = {"num_layers": 1, "bidirectional": False}
        self.rnn = nn.RNN(
            3, n, nonlinearity="relu", batch_first=True, bias=draw.random() < 0.7, **options
        )
        if self.kind == "cell":
            self.rnn = nn.RNNCell(3, n, nonlinearity="relu")
        elif draw.random() < 0.3:
            nn.init.eye_(self.rnn.weight_hh_l0)
        if self.kind == "two":
            self.middle, self.top = (
                nn.Linear(n, n),
                nn.RNN(n, n, nonlinearity="relu", batch_first=True),
            )
        self.out = nn.Linear(n * (1 + options["bidirectional"]), 2)

    def inputs(self, generator):
        return torch.randn(4, self.steps, 3, generator=generator)

    def forward(self, x):
        if self.kind == "cell":
            h = None
            for t in range(self.steps):
                h = self.rnn(x[:, t], h)
            return self.out(h)
        states = self.rnn(x)[0]
        if self.kind == "two":
            states = self.top(self.middle(states).relu())[0]
        return self.out(states[:, -1] if self.last else states)


def drawn_options(draw, name):
    options = {"lr": draw.choice((0.02, 0.1) if name in ("PathSGD", "GSGD") else (1e-3, 1e-2))}
    if name in ("PathSGD", "GSGD"):
        options["momentum"] = draw.choice((0.0, 0.9))
    shared = {"weight_decay": 0.05, "clip_norm": 0.3}
    of_kappa = {
        "refresh_every": draw.choice((2, 5)),
        "second_term": True,
        "normalization": "frozen",
        "damping": draw.choice((1e-6, 0.1)),
    }
    if name not in ("GSGD", "GAdam"):
        of_kappa["power"] = draw.choice((0.0, 0.25, 0.5))
    if name == "PathSOAP":
        options |= {"eps": 1e-6, "precondition_frequency": draw.choice((1, 4))}
    possible = shared if name in ("GSGD", "GAdam") else shared | of_kappa
    return options | {key: value for key, value in possible.items() if draw.random() < 0.3}


def train(start, name, options, factors, way, steps):
    model = copy.deepcopy(start)
    network = ps.trace(model, model.inputs(None))
    if factors is not None:
        ps.rescaling.rescale_(network, factors)
    make, parameters = getattr(ps.optim, name), list(model.parameters())
    optimizer = make(parameters[:-2] if way == "joins" else parameters, network, **options)
    outputs = []
    for step in range(steps):
        if step == 3 and way == "joins":
            optimizer.add_param_group({"params": parameters[-2:], "lr": 2 * options["lr"]})
        if step == 3 and way == "resumes":
            state, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
            network = ps.trace(model, model.inputs(None))
            optimizer = make(model.parameters(), network, **options)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = options["lr"] * (1 - step / steps)
        optimizer.zero_grad()
        outputs.append(model(model.inputs(torch.Generator().manual_seed(step))))
        # it ran away: soon one member is beyond float32, the other not yet
        if outputs[-1].abs().max() > 2.0**60:
            break
        (outputs[-1] - 1).square().mean().sqrt().backward()
        try:
            optimizer.step()
        except FloatingPointError:  # training diverged, which both must do at the same step
            break
    return [y.detach() for y in outputs], network, model


def alike(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def check(seed, largest, steps):
    draw = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = draw.choice((Vectors, Images, Sequences, Sequences))(draw).train(
            draw.random() < 0.5
        )
        name = draw.choice(("PathSGD", "PathAdam", "PathSOAP", "PathMuon", "GSGD", "GAdam"))
        options, way = drawn_options(draw, name), draw.choice(("plain", "joins", "resumes"))
        classes = ps.trace(start, start.inputs(None)).num_classes
        factors = 2.0 ** torch.randint(-largest, largest + 1, (classes,)).double()
        ours, _, model = train(start, name, options, None, way, steps)
        theirs, network, other = train(start, name, options, factors, way, steps)
    drawn = f"{start.__class__.__name__}, {name}, {options}, {way}"
    assert len(ours) == len(theirs), drawn
    assert not torch.equal(ours[0], model(model.inputs(torch.Generator().manual_seed(0)))), drawn
    assert all(alike(a, b) for a, b in zip(ours, theirs, strict=True)), drawn
    ps.rescaling.rescale_(network, 1 / factors)
    assert all(alike(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)), (
        drawn
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", slow_besides(range(13), range(20)))
def test_two_members_train_alike(seed):
    check(seed, largest=12, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_two_members_train_alike_for_longer(seed):
    check(seed, largest=12, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_two_members_train_alike_for_very_long(seed):
    check(seed, largest=10, steps=600)
