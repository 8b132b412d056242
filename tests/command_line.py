"""The command line, called in this process, and settings of a training that takes a hundredth of a second."""

from typing import Any

from typer.testing import CliRunner

from pathspace.cli import app

TINY = [
    "--batch-size", "16", "--set", "model_options.hidden=6", "--set", "task_options.length=6",
    "--set", "task_options.train_size=64", "--set", "task_options.validation_size=32",
    "--set", "task_options.test_size=32",
]  # fmt: skip


def call(*arguments: str) -> Any:
    """What a command returns and says."""
    return CliRunner().invoke(app, list(arguments))
