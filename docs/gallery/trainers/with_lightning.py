"""Lightning: bfloat16 autocast, two batches a step, a compiled model, a moving average, resumed from a checkpoint."""

import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)


class Classifier(lightning.LightningModule):
    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 3),
        )
        self.model.compile(backend=backend)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        network = ps.trace(self.model, X[:1])  # here, so that the model is where it will be trained
        return ps.optim.PathAdam(self.model.parameters(), network, lr=0.01, clip_norm=1.0)


def train(folder, epochs=2, resume=None, start=lambda network: None, backend="inductor"):
    """Train in a folder, from a checkpoint if there is one; return the averaged model."""
    module = Classifier(backend)
    start(ps.trace(module.model, X[:1]))  # nothing but in a test, which rescales the network
    trainer = lightning.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=None,  # the default: the optimizer clips, in the metric
        callbacks=[
            EMAWeightAveraging(decay=0.9),
            # While it fits: afterwards the weights are the average, from which training does not go
            # on.
            ModelCheckpoint(folder, save_last=True),
        ],
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=64), ckpt_path=resume)
    return module.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder, epochs=1)
        model = train(folder, epochs=2, resume=f"{folder}/last.ckpt")
        print(f"loss {torch.nn.functional.cross_entropy(model(X), Y).item():.4f}")
