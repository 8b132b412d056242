"""Hugging Face Trainer: its clipping off, bfloat16, two batches a step, a compiled model, an average, resumed."""

import os
import tempfile

import torch
import transformers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pathspace as ps

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.ReLU(),
            torch.nn.Linear(16, 8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 3),
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Average(transformers.TrainerCallback):
    """A moving average of the weights, saved and loaded beside each checkpoint."""

    def __init__(self, model):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, _args, _state, _control, model=None, **_):
        self.average.update_parameters(model)

    def on_save(self, args, state, _control, **_):
        torch.save(
            self.average.state_dict(),
            f"{args.output_dir}/checkpoint-{state.global_step}/average.pt",
        )

    def on_train_begin(self, args, state, _control, **_):
        if state.global_step:
            path = f"{args.output_dir}/checkpoint-{state.global_step}/average.pt"
            self.average.load_state_dict(torch.load(path, weights_only=True))


def train(folder, epochs=2, resume=False, start=lambda network: None, backend="inductor"):
    """Train in a folder, from the last checkpoint if that is asked for; return the averaged model."""
    torch.manual_seed(0)
    model = Classifier()
    network = ps.trace(model.layers, X[:1])
    start(network)
    optimizer = ps.optim.PathAdam(model.parameters(), network, lr=0.01, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        # its default is 1.0, the norm of plain gradients: the optimizer clips, in the metric
        max_grad_norm=0,
        bf16=True,
        gradient_accumulation_steps=2,
        torch_compile_backend=backend,
        per_device_train_batch_size=64,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    average = Average(model)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)],
        optimizers=(optimizer, schedule),
        callbacks=[average],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return average.average.module.layers


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        train(folder, epochs=1)
        model = train(folder, epochs=2, resume=True)
        print(f"loss {torch.nn.functional.cross_entropy(model(X), Y).item():.4f}")
