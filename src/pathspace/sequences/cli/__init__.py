"""The command ``pathspace sequence``: models of text and byte files."""

from __future__ import annotations

import typer

from . import fit, tasks, use

app = typer.Typer(
    help="Learn, sample, score and compress symbol sequences.", no_args_is_help=True, add_completion=False
)
for command in (fit.fit, use.sample, use.bits, use.predict, use.compress, use.decompress):
    app.command()(command)
app.command("generate-task")(tasks.generate_task)
app.command()(tasks.baseline)
