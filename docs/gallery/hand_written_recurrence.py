"""A loop over shared layers is traced like nn.RNN; units are tied over time."""

import torch

import pathspace as ps


class Recurrence(torch.nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.enter = torch.nn.Linear(inputs, hidden)
        self.again = torch.nn.Linear(hidden, hidden, bias=False)
        self.leave = torch.nn.Linear(hidden, outputs)

    def forward(self, x):
        h = torch.zeros(x.shape[0], self.again.in_features, device=x.device)
        for t in range(x.shape[1]):
            h = torch.relu(self.enter(x[:, t]) + self.again(h))
        return self.leave(h)


torch.manual_seed(0)
model = Recurrence(2, 6, 1)
network = ps.trace(model, torch.zeros(1, 20, 2))
print(network)
print("gamma_net^2 =", round(ps.paths.squared_path_norm(network).item(), 4))
second, first = (
    ps.paths.second_term(network)["again.weight"],
    ps.paths.kappa(network)["again.weight"],
)
print("kappa2 / kappa1 of the recurrent weights, largest:", round((second / first).max().item(), 4))
