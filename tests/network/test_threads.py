"""Networks are traced and measured in several threads at once; nothing of the process changes."""

import threading
import warnings

import pytest
import torch
from torch import nn

import pathspace as ps


class Makes(nn.Module):
    """Constants in the forward pass: they are made in the type of the copy that runs."""

    def __init__(self):
        super().__init__()
        self.read, self.step, self.out = (
            nn.Linear(3, 4),
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = torch.relu(self.read(x[:, t]) * torch.tensor(0.1) + self.step(h))
        return self.out(h * torch.full((4,), 0.3) + h.sum(1, keepdim=True, dtype=torch.float32))


MODELS = {
    "rows": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (2, 4)),
    "images": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), (2, 1, 3, 3)),
    "steps": (Makes, (2, 3, 3)),
    "layer": (lambda: nn.RNN(3, 2, nonlinearity="relu", batch_first=True), (2, 3, 3)),
}  # fmt: skip


def results(model, x):
    network = ps.trace(model, x)
    found = {
        "norm": ps.paths.squared_path_norm(network).detach(),
        "jacobian": ps.paths.path_jacobian(network),
    }
    found |= ps.paths.kappa(network, second_term=True)
    found["on data"] = ps.paths.data_dependent_norm(network, x, alpha=0.5)
    found["sum over paths"] = ps.paths.enumerate_paths(network).output(
        network.parameters, ps.paths.activity(network, x)
    )
    found["degrees"] = torch.tensor(ps.paths.degrees_of_freedom(network, x))
    return {name: t.detach().clone() for name, t in found.items()}


def process_state():
    from torch._dynamo import eval_frame

    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.get_rng_state().tolist(),
        warnings.filters, list(warnings.filters), eval_frame._stance.stance, torch.is_grad_enabled(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch._dynamo")
def test_threads_find_what_one_finds_and_leave_the_process_as_it_was():
    torch.manual_seed(0)
    made = [(build(), torch.randn(shape)) for build, shape in MODELS.values()]
    alone, before = [results(*one) for one in made] * 2, process_state()
    made *= 2  # every model in two threads
    found, start = {}, threading.Barrier(len(made))

    def work(i):
        start.wait()
        for _ in range(2):
            found[i] = results(*made[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process_state() == before
    for i, known in enumerate(alone):
        for name, value in known.items():
            torch.testing.assert_close(found[i][name], value, rtol=0, atol=0, msg=f"{name} of {i}")


@pytest.mark.parametrize(
    "call", [ps.paths.path_jacobian, ps.paths.unroll, ps.paths.enumerate_paths]
)
def test_a_failure_leaves_the_process_as_it_was(call):
    broken = []

    class Breaks(nn.ReLU):
        def forward(self, input):
            if broken:
                raise OSError("on purpose")
            return super().forward(input)

    model = nn.Sequential(nn.Linear(3, 4), Breaks(), nn.Linear(4, 2))
    network = ps.trace(model, torch.zeros(2, 3))
    broken.append(True)
    before = process_state()
    with pytest.raises(OSError, match="on purpose"):
        call(network)
    assert process_state() == before


def test_numbers_are_as_exact_as_the_weights_beside_them():
    """0.1 in float32 is not 0.1: the sum over paths would miss the model in float64 by 1e-9."""
    torch.manual_seed(0)
    model, x = Makes(), torch.randn(2, 3, 3)
    network = ps.trace(model, x)
    ours = ps.paths.enumerate_paths(network).output(
        network.parameters, ps.paths.activity(network, x)
    )
    double, h = Makes().double(), torch.zeros(2, 4, dtype=torch.float64)
    double.load_state_dict(model.state_dict())
    for t in range(3):
        h = torch.relu(double.read(x[:, t].double()) * 0.1 + double.step(h))
    expected = double.out(h * 0.3 + h.sum(1, keepdim=True))
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)
