"""Optuna: the rate of PathAdam, by a study in a journal file that several processes may share."""

import tempfile

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import pathspace as ps

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(512, 8, generator=generator), torch.randint(3, (512,), generator=generator)


def loss_after_training(rate, start=lambda network: None, told=lambda step, loss: None):
    """Train a network at a rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    network = ps.trace(model, X[:1])
    start(network)
    optimizer = ps.optim.PathAdam(model.parameters(), network, lr=rate, clip_norm=1.0)
    for step in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        told(step, loss.item())
    return loss.item()


def search(file, trials=5, start=lambda network: None):
    """Return the study, of five more trials."""

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)

        def told(step, loss):
            trial.report(loss, step)
            if trial.should_prune():
                raise optuna.TrialPruned

        return loss_after_training(rate, start, told)

    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(file)),
        study_name="PathAdam",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        study = search(f"{folder}/study.journal")
        print(f"loss {study.best_value:.4f} at the rate {study.best_params['rate']:.3g}")
