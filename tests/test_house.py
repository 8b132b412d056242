"""The house: imports go one way, without circles, and files stand where their names say."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from pathlib import Path

import pytest
import torch

import pathspace as ps
from command_line import TINY, call

ROOT = Path(ps.__file__).parent
OUTSIDE = tuple(f"pathspace.{part}" for part in ("tools", "sequences", "experiments", "cli"))
FLOORS = [
    "squared",
    "graph",
    "network",
    "ops",
    "replay",
    "paths",
    "rescaling",
    "metrics",
    "nn",
    "optim",
]
FILES = {
    ".".join(("pathspace", *p.relative_to(ROOT).with_suffix("").parts)): p
    for p in ROOT.rglob("*.py")
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def imported(path: Path) -> set[str]:
    """The modules of the library that a file imports, type-checking and late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                m if (m := f"{node.module}.{a.name}") in MODULES else node.module
                for a in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


@functools.cache
def arrows() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in MODULES.items()}


def floor(module: str) -> int | None:
    name = module.split(".")[1] if module.startswith("pathspace.") else ""
    return FLOORS.index(name) if name in FLOORS else None


def test_imports_go_one_way():
    """Each floor of the core stands on those before it; what is built on the core is none of its business."""
    wrong = []
    for module, others in arrows().items():
        here = floor(module)
        if here is None:
            continue
        for other in others:
            there = floor(other)
            outside = other.startswith(OUTSIDE)
            if outside or (there is not None and there > here):
                wrong.append(f"{module} -> {other}")
    assert not wrong


def test_there_are_no_circles():
    # the package itself imports its parts on first use
    names = MODULES.keys() - {"pathspace"}
    left = {name: arrows()[name] & names - {name} for name in names}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_docstrings_name_things():
    """Their first word is a noun, a verb or a condition; ruff holds the verbs of functions."""
    pronouns = {"What", "Whether", "Where", "How", "Which", "Who", "Whose"}
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0] in pronouns
    ]
    assert found == []


def test_files_of_optim_are_its_public_classes():
    files = {p.stem.replace("_", "") for p in (ROOT / "optim").glob("[!_]*.py")}
    assert files == {name.lower().replace("_", "") for name in ps.optim.__all__}


@pytest.mark.parametrize("package", ["numba", "numpy"])
def test_the_core_needs_torch_alone(package: str):
    allowed = ("pathspace.nn.kernels", "pathspace.sequences", "pathspace.experiments")
    users = [
        name for name, others in arrows().items() if package in {b.split(".")[0] for b in others}
    ]
    assert [name for name in users if not name.startswith(allowed)] == []


class LastStep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize(("name", "between", "refresh"), [("PathSGD", 8, 22), ("DDPSGD", 9, 31)])
def test_a_step_passes_few_files(name, between, refresh):
    """Whoever reads what becomes of a gradient opens these files: with every check, of a step and of a refresh."""
    model, entered = LastStep(), set()
    optimizer = getattr(ps.optim, name)(
        model.parameters(), ps.trace(model, torch.zeros(1, 5, 3)), lr=0.01
    )

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            entered.add(frame.f_code.co_filename)

    counts = []
    for _ in range(12):  # the first ten refresh the metric, and so does the eleventh
        entered.clear()
        sys.setprofile(look)
        try:
            model(torch.ones(2, 5, 3)).square().sum().backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
        counts.append(len(entered))
    assert counts[-1] <= between
    assert counts[-2] <= refresh
    said = " ".join((Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split())
    between_and_with_one = {
        "PathSGD": f"a step enters {between} files of the library between two refreshes and {refresh} with one",
        "DDPSGD": f"`DDPSGD` {between} and {refresh} (`tests",
    }
    assert between_and_with_one[name] in said


def test_a_setting_of_a_recipe_passes_few_files(tmp_path, monkeypatch):
    """Whoever reads what becomes of a setting of `pathspace reproduce adding` opens these files of the lab."""
    monkeypatch.chdir(tmp_path)
    entered = set()

    def look(frame, event, _):
        # functions, and not the bodies of modules and classes
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            entered.add(frame.f_code.co_filename)

    few = ["--methods", "sgd,path-sgd-short", "--learning-rates", "0.01", "--seeds", "1"]
    sys.setprofile(look)
    try:
        done = call("reproduce", "adding", *TINY, *few, "--epochs", "1", "--workers", "1")
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0, done.output
    lab = [file for file in entered if file.startswith((f"{ROOT}/experiments", f"{ROOT}/cli"))]
    assert len(lab) <= 24
    said = " ".join((Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split())
    assert "a setting enters 24 files of the lab" in said
