"""The path norm as a regularizer of any optimizer: it does not depend on how the weights are scaled."""

import torch

import pathspace as ps

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
x, y = torch.randn(40, 5), torch.randn(40, 1)
network = ps.trace(model, x)
for strength in (0.0, 1e-3):
    torch.manual_seed(1)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        fit = torch.nn.functional.mse_loss(model(x), y)
        (fit + strength * ps.paths.squared_path_norm(network)).backward()
        optimizer.step()
    norm = ps.paths.squared_path_norm(network).item()
    print(f"strength {strength}: training error {fit.item():.4f}, gamma_net^2 {norm:.1f}")
