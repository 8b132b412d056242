"""Trainers of other libraries: invariant with the lines of docs/howto.md, and a warning without them."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps
from cases import mlp

pytestmark = pytest.mark.slow  # the libraries are no requirement of the tests, and take long to import

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(640, 4, generator=generator), torch.randint(3, (640,), generator=generator)
FACTORS = 2.0 ** torch.randint(-4, 5, (20,), generator=generator).double()


def invariant(train, clipping):
    """Whether training from two starts ends with the same bits, and how many runs warned."""
    outputs, warned = [], 0
    for factors in (None, FACTORS):
        torch.manual_seed(0)
        model = mlp(4, 12, 8, 3)
        network = ps.trace(model, torch.zeros(1, 4))
        if factors is not None:
            ps.rescaling.rescale_(network, factors)
        optimizer = ps.optim.PathAdam(model.parameters(), network, lr=0.01, clip_norm=0.05)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, clipping)
        warned += sum("same norm" in str(w.message) for w in caught)
        outputs.append(model(X).detach())
    return torch.equal(*outputs), warned


def lightning(model, optimizer, clipping):
    """Three epochs by Lightning."""
    pl = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = model

        def training_step(self, batch, _):
            return functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, **quiet, **clipping)
    trainer.fit(Module(), DataLoader(TensorDataset(X, Y), batch_size=64))


def hugging_face(model, optimizer, clipping):
    """Three epochs by the Trainer of Transformers."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, labels):
            output = self.inner(x)
            return {"loss": functional.cross_entropy(output, labels), "logits": output}

    arguments = transformers.TrainingArguments(
        output_dir="unused", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", num_train_epochs=3, per_device_train_batch_size=64, **clipping,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    transformers.Trainer(WithLoss(), arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()


def accelerate(model, optimizer, clipping):
    """Three epochs by a loop with Accelerate."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    batches = DataLoader(TensorDataset(X, Y), batch_size=64)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(x), y))
            if clipping:
                accelerator.clip_grad_norm_(model.parameters(), **clipping)
            optimizer.step()


@pytest.mark.parametrize(
    ("train", "clipping"),
    [(lightning, {"gradient_clip_val": None}), (hugging_face, {"max_grad_norm": 0}), (accelerate, {})],
)
def test_a_trainer_that_does_not_clip_is_invariant(train, clipping, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invariant(train, clipping) == (True, 0)


@pytest.mark.parametrize(
    ("train", "clipping"),
    [
        (lightning, {"gradient_clip_val": 0.05}),
        (hugging_face, {"max_grad_norm": 0.05}),
        (accelerate, {"max_norm": 0.05}),
    ],
)
def test_a_trainer_that_clips_is_told(train, clipping, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invariant(train, clipping) == (False, 2)
