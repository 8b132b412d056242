"""The demo says the same on every machine: its finding does not depend on how the processor rounds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PLAIN, INVARIANT = {"SGD", "AdamW", "Muon"}, {"Path-SGD", "Path-Adam", "PathMuon"}
SETS = [pytest.param(name, id=name) for name in ("default", "avx2")]


def names(text: str, before: str) -> set[str]:
    """The methods that a list after some words names."""
    found = re.search(rf"{re.escape(before)} ([\w, -]+)[.;]", text)
    return set(found[1].split(", ")) if found else set()


@pytest.mark.slow
@pytest.mark.parametrize("instructions", SETS)
def test_the_demo_finds_the_same_under_every_instruction_set(
    instructions: str, tmp_path: Path
) -> None:
    """`make demo` at its full size: two to three minutes on two cores that are free."""
    if instructions == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    command = [sys.executable, "-m", "pathspace", "compare", "--output", str(tmp_path / "demo")]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    # the finding, in the words of the conclusion: the invariant rules do not notice ...
    assert names(told, "The same training curve from every start, to the last bit:") == INVARIANT
    assert names(told, "Another curve from another start of the same function:") == PLAIN
    _, balanced, rescaled = told.split("From the ")
    # ... from the balanced start nothing is told apart ...
    assert balanced.startswith("balanced start")
    assert (
        names(balanced, "worse (the intervals lie apart):") | names(balanced, "diverged:") == set()
    )
    # ... and from the rescaled one SGD is worse, as AdamW and Muon may be, and no invariant rule is
    assert rescaled.startswith("rescaled start")
    assert rescaled.split()[2] in INVARIANT
    worse = names(rescaled, "worse (the intervals lie apart):") | names(rescaled, "diverged:")
    assert {"SGD"} <= worse <= PLAIN
