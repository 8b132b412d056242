"""What a package of the library promises: types, citations, how to contribute, and an import that costs nothing."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pathspace as ps

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAPERS = (
    "Path-Normalized Optimization of Recurrent Neural Networks with ReLU Activations",
    "Data-Dependent Path Normalization in Neural Networks",
    "Path Space for Recurrent Neural Networks with ReLU Activations",
    "Riemannian metrics for neural networks II",
)


def test_the_import_loads_neither_torch_nor_anything_else_of_the_library() -> None:
    """So that it takes no longer than `import torch`; what is used is loaded when it is used."""
    code = (
        "import sys, pathspace; "
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('pathspace', 'torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == ["pathspace"]


def test_the_package_is_typed_and_the_wheel_takes_all_of_it() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/pathspace"]}
    assert (ROOT / "src" / "pathspace" / "py.typed").read_text() == ""
    # what the wheel leaves out is what git ignores
    ignored = (ROOT / ".gitignore").read_text().split()
    assert not [line for line in ignored if line.endswith(("typed", ".toml", ".jinja"))]


def test_the_citation_names_the_version_and_the_four_papers() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(ps.__version__)}$", text, re.M)
    assert PROJECT["project"]["version"] == ps.__version__
    assert re.search(rf"^license: {PROJECT['project']['license']}$", text, re.M)
    titles = re.findall(r'^    title: "?(.*?)"?$', text, re.M)
    assert len(titles) == len(PAPERS)
    assert all(title.startswith(paper) for title, paper in zip(titles, PAPERS, strict=True))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md"])
def test_what_contributors_are_told_to_open_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / target).read_text(), re.M)
            slugs = ["#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in slugs
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists() or path.endswith("path_name.py"), path
    for file, name in (
        ("tests/conformance.py", "REGISTRY"),
        ("src/pathspace/experiments/methods.py", "GROUPS"),
        ("src/pathspace/network/rules/__init__.py", "RULES"),
        ("src/pathspace/experiments/tasks/__init__.py", "TASKS"),
    ):
        assert f"`{name}`" in text
        assert re.search(rf"^{name}\b", (ROOT / file).read_text(), re.M), (file, name)
