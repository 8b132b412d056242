"""Training that goes on for very long: memory stays flat, and so does what Python and torch keep."""

import json
import subprocess
import sys

import pytest

STEPS, SETTLED = 100_000, 10_000

# In a process of its own: the peak of memory is that of the whole process.
LONG = """
import gc, json, resource, sys
import torch
import pathspace as ps
from torch.nn import functional

torch.set_num_threads(1)
torch.manual_seed(0)

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.RNN(2, 8, nonlinearity="relu", batch_first=True)
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])

def kept():
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return {"peak": peak // 1024 if sys.platform == "darwin" else peak, "tensors": tensors, "objects": len(objects)}

name, settled, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Recurrent()
x, y = torch.randn(64, 4, 2), torch.randn(64, 1)
optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), lr=1e-3)
first = functional.mse_loss(model(x), y).item()
for step in range(steps):
    some = torch.randint(64, (4,))
    optimizer.zero_grad()
    functional.mse_loss(model(x[some]), y[some]).backward()
    optimizer.step()
    if step == settled:
        early = kept()
print(json.dumps({"early": early, "late": kept(), "loss": [first, functional.mse_loss(model(x), y).item()]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "PathSOAP", "DDPSGD", "GSGD", "GAdam"])
def test_memory_is_flat(name):
    command = [sys.executable, "-c", LONG, name, str(SETTLED), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(name, found)
    early, late = found["early"], found["late"]
    assert late["tensors"] == early["tensors"]
    # a step that kept one object would have kept 90,000
    assert late["objects"] - early["objects"] < 100
    assert late["peak"] - early["peak"] < 2048  # KiB: 22 bytes a step
    assert found["loss"][1] < found["loss"][0]
