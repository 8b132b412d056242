"""All paths of a small recurrent network: its output is their sum, and few of them determine the rest."""

import torch

import pathspace as ps


class LastStep(torch.nn.Module):
    """A ReLU recurrence read at its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = torch.nn.RNN(2, 3, nonlinearity="relu", bias=False, batch_first=True)
        self.out = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


torch.manual_seed(0)
model, x = LastStep().double(), torch.randn(60, 5, 2, dtype=torch.float64)
network = ps.trace(model, x)
paths, flow = ps.paths.enumerate_paths(network), ps.paths.activity(network, x)
difference = (paths.output(network.parameters, flow) - model(x)).abs().max().item()
print(f"{len(paths)} paths; their sum is the output to {difference:.0e}")

skeleton = ps.paths.skeleton(network)
basis = ps.paths.express(network, skeleton, paths)
longest = int((paths.weights >= 0).sum(1).argmax())
print("a longest path:", " . ".join(f"{name}{list(index)}" for name, index in paths.edges[longest]))
powers = {
    int(basis.edges[n]): int(basis.exponents[longest, n])
    for n in basis.exponents[longest].nonzero()
}
graph = paths.reduction
print(
    "its value is",
    " ".join(f"v({graph.edge(e)[0]}{list(graph.edge(e)[1])})^{k}" for e, k in powers.items()),
)

print(f"{graph.num_edges} weights, {network.num_classes} classes, {len(basis.edges)} basis paths")
print("degrees of freedom on the data:", ps.paths.degrees_of_freedom(network, x))
with torch.no_grad():
    model.rnn.weight_ih_l0[0] = 0  # nothing enters the first unit
    model.rnn.weight_hh_l0[0] = -1
print("dead units:", ps.paths.dead_units(network, x).tolist())
print("degrees of freedom then:", ps.paths.degrees_of_freedom(network, x))
