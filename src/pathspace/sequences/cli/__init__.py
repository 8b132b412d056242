"""The command ``pathspace sequence``: models of text and byte files."""

from __future__ import annotations

import typer

from . import fit, tasks, use

app = typer.Typer(
    help="""Learn, sample, score and compress symbol sequences.

    \b
    Examples:
      pathspace sequence fit log.txt -o log.safetensors --seconds 60
      pathspace sequence bits log.safetensors other.txt
      pathspace sequence compress log.safetensors other.txt
      pathspace sequence generate-task xor -o xor.txt
    """,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in (fit.fit, use.sample, use.bits, use.predict, use.compress, use.decompress):
    app.command()(command)
app.command("generate-task")(tasks.generate_task)
app.command()(tasks.baseline)
