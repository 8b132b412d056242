"""The same function, scaled badly: SGD diverges, Path-SGD does not notice."""

import copy

import torch

import pathspace as ps

torch.manual_seed(0)
x = torch.randn(256, 10)
y = x[:, :1] * x[:, 1:2]


def train(model, make_optimizer, steps=200):
    optimizer = make_optimizer(model, ps.trace(model, x))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


good = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
bad = copy.deepcopy(good)
ps.rescaling.random_rescale_(ps.trace(bad, x), 2**-7, 2**7, powers_of_two=True)
assert torch.equal(good(x), bad(x))

methods = {
    "SGD": lambda m, network: torch.optim.SGD(m.parameters(), lr=0.05),
    "Path-SGD": lambda m, network: ps.optim.PathSGD(m.parameters(), network, lr=0.05),
}
for name, make_optimizer in methods.items():
    losses = [train(copy.deepcopy(model), make_optimizer) for model in (good, bad)]
    print(f"{name:10s} loss from the good start {losses[0]:.4f}, from the bad one {losses[1]:.4f}")
