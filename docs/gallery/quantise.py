"""Rounding weights to int8, one step size for each tensor: bad scales ruin it, balancing mends that."""

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
            torch.nn.Linear(48, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 48)
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
print("                        test errors of 397    change of the scores")
print("                         float    int8          by rounding")
scores = model(x_test)
for title in ("as trained", "badly scaled", "balanced"):
    if title == "badly scaled":
        ps.rescaling.random_rescale_(
            network, 1 / 16, 16, powers_of_two=True, generator=torch.Generator().manual_seed(0)
        )
    if title == "balanced":
        ps.rescaling.balance_(network, x_test)  # raises if a score moves
    rounded = quantized(model)(x_test)
    wrong = [int((s.argmax(1) != y_test).sum()) for s in (model(x_test), rounded)]
    change = (rounded - scores).norm() / scores.norm()
    print(f"{title:22s} {wrong[0]:7d} {wrong[1]:7d} {100 * change:19.1f} %")
