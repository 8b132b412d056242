"""G-SGD on the digits of scikit-learn: what skeletons and units have to do with whether it trains.

Every run starts from the same weights and sees the same batches. "multipliers" are 1 / (A_u B_v)^2,
by which the raw rule multiplies the gradients of the balanced network; loss and error are those
after five epochs.
"""

from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import pathspace as ps

EPOCHS, BATCH, TRAIN = 5, 32, 1300
pixels, digits = load_digits(return_X_y=True)
order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
images = torch.tensor(pixels, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits)[order]


def train(make) -> tuple[torch.optim.Optimizer, float, float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))
    network = ps.trace(model, images[:1])
    ps.rescaling.balance_(network)
    optimizer = make(model, network)
    generator = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAIN, generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        loss = cross_entropy(model(images[:TRAIN]), labels[:TRAIN]).item()
        wrong = (model(images[TRAIN:]).argmax(1) != labels[TRAIN:]).float().mean().item()
    return optimizer, loss, 100 * wrong


def multipliers(model, network, rule: Literal["largest", "cyclic", "random"]) -> str:
    optimizer = ps.optim.GSGD(model.parameters(), network)
    optimizer.choose_skeleton(rule)
    smallest, _, largest = optimizer.diagnostics()["multipliers"]
    return f"{smallest:.0e} to {largest:.0e}"


def best(make, rates: tuple[float, ...]) -> str:
    """The smallest training loss over a grid of rates."""
    runs = [(*train(lambda m, n, lr=lr: make(m, n, lr))[1:], lr) for lr in rates]
    loss, wrong, lr = min(
        (r for r in runs if r[0] == r[0]), default=(float("nan"), float("nan"), 0)
    )
    return f"rate {lr:<6g} loss {loss:5.2f}  error {wrong:4.1f} %"


def g_sgd(**options):
    return lambda model, network, lr: ps.optim.GSGD(model.parameters(), network, lr=lr, **options)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    network = ps.trace(model, images[:1])
    rules: tuple[Literal["largest", "cyclic", "random"], ...] = ("largest", "cyclic", "random")
    for rule in rules:
        print(f"multipliers, {rule:8s}", multipliers(model, network, rule))
    usual, small = (0.1, 0.3), (1e-6, 1e-5)
    sgd = best(lambda m, _, lr: torch.optim.SGD(m.parameters(), lr=lr), usual)
    print("SGD, balanced once            ", sgd)
    print("G-SGD                         ", best(g_sgd(), usual))
    print("G-SGD, cyclic skeleton        ", best(g_sgd(skeleton="cyclic"), usual))
    print("G-SGD, full skeleton rate     ", best(g_sgd(skeleton_rate=1.0), usual))
    print("G-SGD, no units               ", best(g_sgd(units="none"), small))
    print("G-SGD, no units, clipped      ", best(g_sgd(units="none", clip_norm=1.0), (1e-3, 1e-2)))
    print(
        "G-SGD, no units, cyclic       ", best(g_sgd(units="none", skeleton="cyclic"), (1e-9, 1e-7))
    )
    adam = best(lambda m, _, lr: torch.optim.Adam(m.parameters(), lr=lr), (0.003, 0.01))
    print("Adam, balanced once           ", adam)

    def g_adam(model, network, lr):
        return ps.optim.GAdam(model.parameters(), network, lr=lr)

    print("G-Adam                        ", best(g_adam, (0.003, 0.01)))


if __name__ == "__main__":
    main()
