"""The page on published defects shows what its program prints, and each defect is one."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def printed():
    out = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / "docs/gallery/published_defects.py"))
    return out.getvalue()


def figures(text):
    return [float(x) for x in re.findall(r"(?<![\w-])\d+\.?\d*(?![\w-])", text)]


def test_the_page_shows_what_the_program_prints(printed):
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/defects.md").read_text(), re.S).group(1)
    number = re.compile(r"\d+\.?\d*")
    assert number.sub("#", shown).split() == number.sub("#", printed).split()
    # a divergence depends on the machine's rounding; the other figures hardly
    (*ours, _, _), (*theirs, _, _) = figures(shown), figures(printed)
    assert ours == pytest.approx(theirs, rel=0.02, abs=0.06)


def test_each_defect_is_one(printed):
    assert "generator: True" in printed
    assert re.search(r"list: +False", printed)
    assert "never cleared: 1, 2, 3" in printed
    assert all(float(size) > 5 for size in re.findall(r"size ([\d.]+) times", printed))
    right, *wrong, from_ones = (float(x) for x in re.findall(r"([\d.]+) %", printed))
    assert right < 0.1
    assert all(x > 20 for x in wrong)
    assert from_ones < 0.1  # a precondition, not a slip
    adam, path_adam = (float(x) for x in re.findall(r"^   Adam .* ([\d.e+-]+)$", printed, re.M))
    assert adam > 0.1
    assert path_adam == 0
