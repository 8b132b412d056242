"""Four mistakes that published code and papers make with path geometry, re-created in a few lines each."""

import copy
import itertools

import torch

import pathspace as ps

# 1. A generator that was read once: Path-SGD that is SGD ------------------------------------------

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))


def train(m, make_rule, steps=100):
    rule, network = make_rule(m), ps.trace(m, x)
    for _ in range(steps):
        m.zero_grad()
        torch.nn.functional.cross_entropy(m(x), y).backward()
        rule(ps.paths.kappa(network).values())
        for p in m.parameters():
            p.data -= 0.01 * p.grad
    return torch.cat([p.detach().flatten() for p in m.parameters()])


def dividing(parameters):
    def rule(kappa):
        length = sum(p.grad.norm() for p in parameters)  # a generator is exhausted here ...
        for p, k in zip(parameters, kappa, strict=False):
            p.grad.div_(k)  # ... and never comes here
        return length

    return rule


plain = train(copy.deepcopy(model), lambda m: lambda kappa: None)
once = train(copy.deepcopy(model), lambda m: dividing(m.parameters()))
kept = train(copy.deepcopy(model), lambda m: dividing(list(m.parameters())))
print("1. weights after 100 steps, bitwise those of SGD")
print("   parameters kept as a generator:", torch.equal(once, plain))
print("   parameters kept as a list:     ", torch.equal(kept, plain))

squared = copy.deepcopy(model)
for p in squared.parameters():
    p.data.square_()
sizes = []
for _ in range(3):
    squared(
        torch.ones(1, 8)
    ).sum().backward()  # kappa, if the gradient of the last step was cleared
    sizes.append(squared[0].weight.grad.mean().item())
print("   kappa of the same weights at steps 1, 2, 3, gradients never cleared:", end=" ")
print(", ".join(f"{size / sizes[0]:.0f}" for size in sizes))

# 2. Skeleton weights set to one: another network --------------------------------------------------

print("2. outputs after setting skeleton weights to one, relative to what they were")
for widths in ((784, 100, 100, 10), (784, 64, 64, 64, 64, 10)):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    deep = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())][:-1])
    images = torch.randn(100, 784)
    before = deep(images)
    for layer in layers:
        ones = torch.eye(*layer.weight.shape)
        layer.weight.data = layer.weight.data * (1 - ones) + ones
    change, size = (
        (deep(images) - before).norm() / before.norm(),
        deep(images).norm() / before.norm(),
    )
    print(f"   {'-'.join(map(str, widths)):22s} size {size:.1f} times, change {change:.1f} times")

# 3. A step in path space that is none -------------------------------------------------------------

D = torch.float64
torch.manual_seed(0)
W = {
    "in": torch.randn(4, 3, dtype=D),
    "rec": torch.randn(4, 4, dtype=D) / 4,
    "out": torch.randn(2, 4, dtype=D),
}
inputs, targets = torch.randn(16, 6, 3, dtype=D), torch.randn(16, 2, dtype=D)
# the skeleton: largest weights
incoming, outgoing = (
    W["in"].abs().argmax(1),
    W["out"].abs().argmax(0),
)
units, eta = torch.arange(4), 1e-4
in_mask = torch.zeros_like(W["in"], dtype=torch.bool).index_put(
    (units, incoming), torch.tensor(True)
)
out_mask = torch.zeros_like(W["out"], dtype=torch.bool).index_put(
    (outgoing, units), torch.tensor(True)
)


def loss(w):
    h = torch.zeros(16, 4, dtype=D)
    for t in range(6):
        h = torch.relu(inputs[:, t] @ w["in"].T + h @ w["rec"].T)
    return (h @ w["out"].T - targets).square().mean()


def path_values(w):
    s, o = w["in"][units, incoming], w["out"][outgoing, units]
    recurrent = w["rec"] * o.unsqueeze(1) * s
    return torch.cat(
        [(w["in"] * o.unsqueeze(1)).flatten(), recurrent.flatten(), (w["out"] * s)[~out_mask]]
    )


def step(w, g, slip=None):
    s, o = w["in"][units, incoming], w["out"][outgoing, units]
    if slip == "skeleton outputs taken to be 1":
        o = torch.ones_like(o)
    # what a change of s_j has to make up for: all other paths that begin with s_j
    others = torch.ones_like(out_mask) if slip == "no mask in the sum" else ~out_mask
    axis = 1 if slip == "sum over the wrong axis" else 0
    through = (w["out"] * g["out"] * others).sum(0) + (w["rec"] * g["rec"]).sum(axis)
    R = 1 - eta * (s * g["in"][units, incoming] - through) / (s * o).square()
    enter = w["in"] - eta * g["in"] / o.square().unsqueeze(1)
    leave = (w["out"] - eta * g["out"] / s.square()) / R
    return {
        "in": torch.where(in_mask, w["in"] * R.unsqueeze(1), enter),
        "rec": (w["rec"] - eta * g["rec"] / (o.unsqueeze(1) * s).square()) / R,
        "out": torch.where(out_mask, w["out"], leave),
    }


def distance(w, slip):
    leaves = {name: weight.clone().requires_grad_() for name, weight in w.items()}
    g = dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))
    # the gradient in path space, by brute force: dL/dw = J^T dL/dv with J the derivative of the
    # path values
    J = torch.autograd.functional.jacobian(
        lambda *weights: path_values(dict(zip(w, weights, strict=True))), tuple(w.values())
    )
    J = torch.cat([j.flatten(1) for j in J], 1)
    wanted = (
        -eta * torch.linalg.lstsq(J.T, torch.cat([part.flatten() for part in g.values()])).solution
    )
    taken = path_values(step(w, g, slip)) - path_values(w)
    return 100 * (taken - wanted).norm() / wanted.norm()


print("3. a step of the path values of a recurrent layer, its distance from -eta dL/dv")
for slip in (
    None,
    "no mask in the sum",
    "sum over the wrong axis",
    "skeleton outputs taken to be 1",
):
    print(f"   {slip or 'as it should be':31s} {distance(W, slip):8.1f} %")
ones = {**W, "out": W["out"].masked_fill(out_mask, 1.0)}
print(f"   {'... and they are 1':31s} {distance(ones, 'skeleton outputs taken to be 1'):8.1f} %")

# 4. Adam fed with g / kappa -----------------------------------------------------------------------

print("4. outputs of two members of a rescaling class in 100 steps, largest relative difference")
rules = {
    "PathGradientAdam": "Adam fed with g / kappa",
    "PathAdam": "Adam in the coordinates w sqrt(kappa)",
}
for name, rule in rules.items():
    report = ps.rescaling.check_invariance(
        model,
        x,
        lambda out: torch.nn.functional.cross_entropy(out, y),
        lambda m, network, name=name: getattr(ps.optim, name)(m.parameters(), network, lr=0.01),
    )
    print(f"   {rule:38s} {report.largest_output_difference:5.2g}")
