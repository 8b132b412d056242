"""The table of claims says only what can be looked up: a verdict of four, a command that there is."""

import re
from pathlib import Path

import pytest

from pathspace.experiments.recipes import load_recipe

PAGE = Path(__file__).parents[2] / "docs/claims.md"
COLUMNS = ["claim", "paper", "verdict", "share of the paper's size", "seeds", "effect", "command"]


def rows() -> list[list[str]]:
    lines = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows()[2:], ids=lambda row: row[0])
def test_every_claim_has_a_verdict_and_a_command(row: list[str]) -> None:
    _, paper, verdict, share, seeds, effect, command = row
    assert paper in {"P16", "D16", "S19", "O13"}
    assert verdict in {"confirmed", "refuted", "not decided", "not decidable here"}
    if verdict == "not decidable here":
        assert "because" in effect
    if share.startswith("not run"):
        assert verdict.startswith("not deci")
        assert seeds == "\N{EN DASH}"
        assert effect.startswith("published")
    if match := re.fullmatch(r"`pathspace reproduce (\S+)(?: --size (\S+))?.*`", command):
        recipe, size = match.groups()
        load_recipe(recipe).layers(size or "")
    else:
        program = command.strip("`").split()[1]
        assert (PAGE.parents[1] / program).exists()


def test_the_table_has_its_columns() -> None:
    assert rows()[0] == COLUMNS
