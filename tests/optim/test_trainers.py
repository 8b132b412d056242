"""Trainers of other libraries: invariant with the lines of docs/trainers.md, and a warning without them."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps
from cases import mlp

# the libraries are no requirement of the tests, and take long to import
pytestmark = pytest.mark.slow

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(640, 4, generator=generator), torch.randint(3, (640,), generator=generator)
FACTORS = 2.0 ** torch.randint(-4, 5, (20,), generator=generator).double()


@pytest.fixture(autouse=True)
def accelerate_anew():
    """Accelerate holds all that follow in a process to its first settings."""
    for name in ("AcceleratorState", "GradientState", "PartialState"):
        if accelerate := sys.modules.get("accelerate.state"):
            getattr(accelerate, name)._reset_state()


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
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", enable_model_summary=False, **quiet, **clipping
    )
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
    transformers.Trainer(
        WithLoss(), arguments, train_dataset=data, optimizers=(optimizer, schedule)
    ).train()


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
    [
        (lightning, {"gradient_clip_val": None}),
        (hugging_face, {"max_grad_norm": 0}),
        (accelerate, {}),
    ],
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


# --- the programs of docs/trainers.md -------------------------------------------------------------

PROGRAMS = Path(__file__).parents[2] / "docs" / "gallery" / "trainers"
HERE = {
    "PYTHONPATH": os.pathsep.join([str(Path(ps.__file__).parents[1]), str(PROGRAMS)]),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
RESCALE = """
import pathspace as ps, torch
def rescale(network):
    generator = torch.Generator().manual_seed(1)
    ps.rescaling.random_rescale_(network, 1 / 16, 16, powers_of_two=True, generator=generator)
"""
scope = {}
exec(RESCALE, scope)
rescale = scope["rescale"]


def program(name, package):
    """Import a program; the library it shows may be missing."""
    pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    # torch.compile looks for it there
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def run_by(command, code, *arguments):
    """Run a program text by a command; what it says if it fails."""
    done = subprocess.run(
        [sys.executable, *command, code, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **HERE},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "package", "resumed"),
    [
        ("with_lightning", "lightning", {"epochs": 2, "resume": "{}/last.ckpt"}),
        ("with_transformers", "transformers", {"epochs": 2, "resume": True}),
        ("with_accelerate", "accelerate", {"epochs": 1, "resume": True}),
    ],
)
def test_a_trainer_with_everything_is_invariant_and_resumes(
    name, package, resumed, tmp_path, monkeypatch
):
    """bfloat16 autocast, accumulation, compile, a moving average: the same bits from a rescaled start, and resumed."""
    monkeypatch.chdir(tmp_path)
    trainer = program(name, package)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    compiled = {"backend": "aot_eager"}  # the default takes a C++ compiler a minute
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = trainer.train("whole", epochs=2, **compiled)(trainer.X)
        first = trainer.train("first", epochs=1, **compiled)(trainer.X)
        rescaled = trainer.train("rescaled", epochs=2, start=rescale, **compiled)(trainer.X)
        trainer.train("stopped", epochs=1, start=rescale, **compiled)
        if isinstance(resumed["resume"], str):
            resumed = {**resumed, "resume": resumed["resume"].format("stopped")}
        gone_on = trainer.train("stopped", start=rescale, **resumed, **compiled)(trainer.X)
    assert not any("same norm" in str(w.message) for w in caught)
    assert (whole - first).abs().max() > 1e-3
    assert torch.equal(whole, rescaled)
    assert torch.equal(whole, gone_on)


TORCHRUN = """
import sys, torch, torch.distributed as dist, with_torchrun as program
folder, options = sys.argv[1], {"backend": "aot_eager"}
dist.init_process_group("gloo")
outputs = [
    program.train(f"{folder}/whole.pt", **options)(program.X),
    program.train(f"{folder}/rescaled.pt", start=rescale, **options)(program.X),
    program.train(f"{folder}/stopped.pt", epochs=1, start=rescale, **options)(program.X),
    program.train(f"{folder}/stopped.pt", start=rescale, **options)(program.X),
]
torch.save(torch.stack(outputs).detach(), f"{folder}/outputs-{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_with_everything_are_invariant_and_resume(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESCALE + TORCHRUN)
    run_by(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], script, tmp_path
    )
    ours, theirs = (
        torch.load(tmp_path / f"outputs-{rank}.pt", weights_only=True) for rank in range(2)
    )
    whole, rescaled, first, resumed = ours
    assert torch.equal(ours, theirs)
    assert (whole - first).abs().max() > 1e-3
    assert torch.equal(whole, rescaled)
    assert torch.equal(whole, resumed)


def test_a_study_of_optuna_is_invariant_and_goes_on(tmp_path):
    optuna = program("with_optuna", "optuna")
    studies = [
        optuna.search(str(tmp_path / "plain"), 5),
        optuna.search(str(tmp_path / "rescaled"), 5, rescale),
    ]
    plain, rescaled = (
        [(t.state, t.params, t.intermediate_values) for t in study.trials] for study in studies
    )
    assert plain == rescaled
    assert len({value["rate"] for _, value, _ in plain}) == 5
    assert len(optuna.search(str(tmp_path / "plain"), 2).trials) == 7


RAY_TUNE = """
import json, sys
import ray, with_ray_tune as program
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
losses = [program.search(f"{sys.argv[1]}/plain"), program.search(f"{sys.argv[1]}/rescaled", rescale)]
ray.shutdown()
print("losses", json.dumps(losses))
"""


def test_trials_of_ray_tune_are_invariant(tmp_path):
    pytest.importorskip("ray.tune")
    script = tmp_path / "script.py"
    script.write_text(RESCALE + RAY_TUNE)
    (line,) = [
        line for line in run_by([], script, tmp_path).splitlines() if line.startswith("losses ")
    ]
    plain, rescaled = json.loads(line.removeprefix("losses "))
    assert plain == rescaled
    assert len(set(plain.values())) == 3
