"""Rounding weights to int8 and int4, one step size for each tensor: bad scales ruin it, balancing mends that."""

import copy

import torch
from sklearn.datasets import load_digits

import pathspace as ps


class Reader(torch.nn.Module):
    """Two recurrent layers over the rows of an image, a residual block with BatchNorm, ten scores."""

    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.RNN(8, 48, 2, nonlinearity="relu", batch_first=True)
        self.block = torch.nn.Sequential(
            torch.nn.Linear(48, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 48),
        )
        self.scores = torch.nn.Linear(48, 10)

    def forward(self, rows):
        states = self.rnn(rows)[0][:, -1]
        return self.scores(torch.relu(states + self.block(states)))


def quantized(model, bits=8):
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            step = parameter.data.abs().max() / (2 ** (bits - 1) - 1)
            parameter.data = (parameter.data / step).round() * step
    return model


images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8)[order] / 16
y = torch.tensor(labels)[order]
(x, x_test), (y, y_test) = x.split([1400, 397]), y.split([1400, 397])

torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(300):
    batch = torch.randint(len(x), (64,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()

model.eval()
network = ps.trace(model, x)
print("                          test errors of 397      change of the scores, %")
print("                         float   int8   int4          int8      int4")
scores = model(x_test).detach()
for title in ("as trained", "badly scaled", "path", "range"):
    if title == "badly scaled":
        ps.rescaling.random_rescale_(
            network, 1 / 16, 16, powers_of_two=True, generator=torch.Generator().manual_seed(0)
        )
    elif title != "as trained":
        ps.rescaling.balance_(network, x_test, criterion=title)  # raises if a score moves
    members = [
        model(x_test).detach(),
        *(quantized(model, bits)(x_test).detach() for bits in (8, 4)),
    ]
    wrong = [int((s.argmax(1) != y_test).sum()) for s in members]
    change = [100 * float((s - scores).norm() / scores.norm()) for s in members]
    print(f"{title:22s} {wrong[0]:7d}{wrong[1]:7d}{wrong[2]:7d}{change[1]:14.1f}{change[2]:10.1f}")
