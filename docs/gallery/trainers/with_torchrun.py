"""A loop of one's own under torchrun: bfloat16, two batches a step, a compiled model, a moving average, resumed.

torchrun --nproc-per-node 2 docs/gallery/trainers/with_torchrun.py
"""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pathspace as ps

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)
ACCUMULATED = 2


def train(file, epochs=2, start=lambda network: None, backend="inductor"):
    """Train in every process, from the checkpoint if there is one; return the averaged model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )
    network = ps.trace(model, X[:1])
    start(network)
    optimizer = ps.optim.PathAdam(model.parameters(), network, lr=0.01, clip_norm=1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    epoch = 0
    if os.path.exists(file):  # noqa: PTH110
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load_state_dict(saved["average"])
        epoch = saved["epoch"]
    replica = DistributedDataParallel(model)
    replica.compile(backend=backend)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for epoch in range(epoch, epochs):  # noqa: B020
        for i, (x, y) in enumerate(zip(X.split(64), Y.split(64), strict=True), 1):
            last = i % ACCUMULATED == 0
            with contextlib.nullcontext() if last else replica.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(replica(x[mine]), y[mine])
                (loss / ACCUMULATED).backward()
            if last:
                optimizer.step()  # which clips, in the metric
                optimizer.zero_grad()
                average.update_parameters(model)
        if dist.get_rank() == 0:
            states = {"model": model, "optimizer": optimizer, "average": average}
            torch.save({**{n: s.state_dict() for n, s in states.items()}, "epoch": epoch + 1}, file)
        dist.barrier()
    return average.module


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/checkpoint.pt"]
        dist.broadcast_object_list(names)  # all read what the first one writes
        train(names[0], epochs=1)
        model = train(names[0], epochs=2)
        if dist.get_rank() == 0:
            print(f"loss {torch.nn.functional.cross_entropy(model(X), Y).item():.4f}")
        dist.barrier()
    dist.destroy_process_group()
