"""Ray Tune: rates of PathAdam on a cluster, here on this machine; a trial that is moved goes on from its checkpoint."""

import os
import tempfile

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from ray import tune

import pathspace as ps

RATES = [0.001, 0.01, 0.1]


def train(config):
    """Train a network at the rate of a trial."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    network = ps.trace(model, x[:1])
    config["start"](network)
    optimizer = ps.optim.PathAdam(model.parameters(), network, lr=config["rate"], clip_norm=1.0)
    step, earlier = 0, tune.get_checkpoint()
    if earlier is not None:
        with earlier.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < config["steps"]:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            with tempfile.TemporaryDirectory() as folder:
                states = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(states, f"{folder}/state.pt")
                checkpoint = tune.Checkpoint.from_directory(folder)
                tune.report({"loss": loss.item()}, checkpoint=checkpoint)


def search(folder, start=lambda network: None):
    """Return the results by rate."""
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"rate": tune.grid_search(RATES), "steps": 20, "start": start},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(
            storage_path=folder, failure_config=tune.FailureConfig(max_failures=2), verbose=0
        ),
    )
    return {result.config["rate"]: result.metrics["loss"] for result in tuner.fit()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        losses = search(folder)
    best = min(losses, key=losses.get)
    print(f"loss {losses[best]:.4f} at the rate {best:.3g}")
    ray.shutdown()
