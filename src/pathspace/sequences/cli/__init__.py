"""The command ``pathspace sequence``: models of text and byte files."""

from __future__ import annotations

import typer

from pathspace.sequences.cli import fit, lines, tasks, use

app = typer.Typer(
    help="""Learn, sample, score and compress symbol sequences.

    \b
    Examples:
      pathspace sequence fit log.txt -o log.safetensors --seconds 60
      pathspace sequence bits log.safetensors other.txt
      pathspace sequence lines log.safetensors other.txt --top 20
      pathspace sequence compress other.txt
      pathspace sequence generate-task xor -o xor.txt
    """,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
# for the list of commands, where a longer first sentence of a docstring would be cut
for command, short_help in (
    (fit.fit, "Learn a file and write the model."),
    (use.sample, None),
    (use.bits, None),
    (use.predict, None),
    (lines.lines, "Score each line, show the most surprising."),
    (use.compress, "Compress a file with the model's predictions."),
    (use.decompress, "Bring back a compressed file."),
):
    app.command(short_help=short_help)(command)
app.command("generate-task", short_help="Write a synthetic text, print its true code length.")(
    tasks.generate_task
)
app.command(short_help="Score a file by bzip2, xz, context trees and two HMMs.")(tasks.baseline)
