"""Accelerate: bfloat16, two batches a step, a compiled model, a moving average, resumed from a saved state."""

import tempfile

import accelerate
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)


def train(folder, epochs=2, resume=False, start=lambda network: None, backend="inductor"):
    """Train in a folder, from the saved state if that is asked for; return the averaged model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    model.to(accelerator.device)
    network = ps.trace(model, X[:1].to(accelerator.device))  # before prepare, of the bare model
    start(network)
    optimizer = ps.optim.PathAdam(model.parameters(), network, lr=0.01, clip_norm=1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model.compile(backend=backend)
    batches = DataLoader(TensorDataset(X, Y), batch_size=64)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    accelerator.register_for_checkpointing(average)
    if resume:
        accelerator.load_state(f"{folder}/state")
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                # no accelerator.clip_grad_norm_: the optimizer clips, in the metric
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update_parameters(model)
    accelerator.save_state(f"{folder}/state")
    return average.module


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder, epochs=1)
        model = train(folder, epochs=1, resume=True)
        print(f"loss {torch.nn.functional.cross_entropy(model(X), Y).item():.4f}")
