"""What a package of the library promises: types, citations, how to contribute, and an import that costs nothing."""

import ast
import os
import re
import resource
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import pathspace as ps
from pathspace.extras import EXTRA_OF, install, missing_package

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


def test_what_a_part_does_not_need_is_not_loaded() -> None:
    """One process imports more and more: the core, the commands and their help, the engine of a machine alone."""
    code = (
        "import sys\n"
        "def loaded(*names): print([name for name in names if name in sys.modules])\n"
        "import pathspace.network, pathspace.optim, pathspace.paths, pathspace.rescaling\n"
        "loaded('numba', 'hmmlearn', 'safetensors', 'pathspace.sequences')\n"
        "import pathspace.cli\n"
        "loaded('matplotlib', 'sklearn', 'jinja2', 'pathspace.experiments.engine', 'pathspace.sequences.cli')\n"
        "from pathspace.experiments.runner import Runner; Runner('local', 2)\n"
        "loaded('ray', 'optuna')\n"
        "import jinja2; loaded('jinja2')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "[]", "['jinja2']"]


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
            slugs = [
                "#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
                for heading in headings
            ]
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


SMOKE = {
    "": """
        import sys, torch, pathspace as ps
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = ps.optim.PathSGD(model.parameters(), ps.trace(model, torch.zeros(1, 4)), lr=0.1)
        model(torch.ones(3, 4)).square().sum().backward()
        before = model[0].weight.clone()
        optimizer.step()
        assert not torch.equal(before, model[0].weight)
        assert ps.__file__.startswith(sys.prefix), ps.__file__
    """,
    "fast": """
        import torch, pathspace as ps
        model = torch.nn.Sequential(torch.nn.RNN(3, 8, nonlinearity="relu"))
        x = torch.randn(5, 2, 3)
        before = model(x)[0]
        assert ps.nn.fast_(model)
        torch.testing.assert_close(model(x)[0], before)
    """,
    "download": "import datasets",
    "ray": "import ray",
    "onnx": """
        import onnx, torch
        from pathlib import Path
        from onnx import helper
        from pathspace.experiments.model_source import load_onnx
        ends = [helper.make_tensor_value_info(name, 1, [1, 3]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", ends[:1], ends[1:])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), "relu.onnx")
        model, x = load_onnx(Path("relu.onnx"), None)
        assert torch.equal(model(x), x.relu())
    """,
    "sweep": "import optuna",
    "experiments": """
        import subprocess, sys
        for words in ("check-invariance --networks mlp --steps 2", "paths mlp --picture mlp.png", "compare --list"):
            subprocess.run([sys.executable, "-m", "pathspace", *words.split()], check=True)
    """,
    "sequences": """
        import subprocess, sys
        from pathlib import Path
        Path("log.txt").write_text("sold 3 shells, sold 5 shells; " * 40)
        for words in ("fit log.txt -o log.safetensors --passes 2", "bits log.safetensors log.txt"):
            subprocess.run([sys.executable, "-m", "pathspace", "sequence", *words.split()], check=True)
    """,
}
"""What each extra is for, in a few lines; the first needs the library alone."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clean environment that has torch alone, the sdist and the wheel, and a wheel of the sdist."""
    folder = tmp_path_factory.mktemp("packages")
    python = _environment(folder / "base")
    _pip(python, "install", "hatchling", _torch())
    build = "import sys; from hatchling import build; build.build_sdist(sys.argv[1]); build.build_wheel(sys.argv[1])"
    subprocess.run([python, "-c", build, str(folder / "dist")], cwd=ROOT, check=True)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    _pip(
        python,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder / "again"),
        str(sdist),
    )
    return folder


def _torch() -> str:
    """The version that the tests run with, or another that a release has to work with: PATHSPACE_TORCH=2.9.*."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned
    return f"torch=={os.environ.get('PATHSPACE_TORCH', pinned[1])}"


def _environment(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def _pip(python: str, *words: str) -> None:
    """Run pip; a machine without packages at hand is a reason to skip, whatever else goes wrong is none."""
    done = subprocess.run([python, "-m", "pip", "--quiet", *words], capture_output=True, text=True)
    if done.returncode and re.search(
        r"No matching distribution found for (?!pathspace)|NewConnectionError", done.stderr
    ):
        pytest.skip(f"needs an index of packages: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.mark.slow
def test_the_sdist_holds_all_that_the_wheel_does(built: Path) -> None:
    (ours,), (again,) = (list((built / part).glob("*.whl")) for part in ("dist", "again"))
    assert _names(ours) == _names(again)
    source = {
        f"pathspace/{p.relative_to(ROOT / 'src/pathspace')}"
        for p in (ROOT / "src/pathspace").rglob("*.*")
    }
    assert {name for name in source if "__pycache__" not in name} <= set(_names(ours))


@pytest.mark.slow
@pytest.mark.parametrize("extra", SMOKE, ids=lambda extra: extra or "library")
def test_every_extra_works_in_a_clean_environment(built: Path, tmp_path: Path, extra: str) -> None:
    python = _environment(tmp_path / "clean")
    # torch is large, and the same for all of them
    (site,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    (base,) = (built / "base").glob("lib/python*/site-packages")
    (site / "base.pth").write_text(str(base) + "\n")
    (wheel,) = (built / "dist").glob("*.whl")
    _pip(python, "install", f"{wheel}[{extra}]" if extra else str(wheel), _torch())
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = textwrap.dedent(SMOKE[extra])
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_extra_for_users_has_a_smoke_test() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert extras == {*SMOKE, "docs", "tools", "dev"} - {""}


@pytest.mark.slow
def test_the_import_takes_no_longer_than_that_of_torch() -> None:
    """The median of ratios of processor time, of processes that are started in turn."""
    seconds: list[float] = []
    for _ in range(7):
        for program in ("import torch", "import torch, pathspace"):
            before = _processor_time()
            subprocess.run([sys.executable, "-c", program], check=True)
            seconds.append(_processor_time() - before)
    ratios = sorted(ours / theirs for theirs, ours in zip(seconds[::2], seconds[1::2], strict=True))
    assert ratios[3] < 1.1, ratios


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_no_message_tells_to_install_what_is_in_no_registry() -> None:
    """`pip install pathspace` installs nothing, or a stranger's package; in a clone the folder is named."""
    found = [
        f"{path}:{number}: {line}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"pathspace\[|pip install (?!-e '\.\[)", line) and path.name != "extras.py"
    ]
    assert found == []
    assert (
        install("experiments", "ray")
        == "pip install -e '.[experiments,ray]' in a clone of pathspace"
    )


def test_every_extra_that_a_message_names_is_one() -> None:
    known = set(PROJECT["project"]["optional-dependencies"])
    named = re.compile(r"install\(([^)]*)\)|pip install -e '\.\[([a-z,]+)\]'")
    for path in (ROOT / "src").rglob("*.py"):
        for call, words in named.findall(path.read_text()):
            extras = words.split(",") if words else re.findall(r"['\"]([a-z]+)['\"]", call)
            assert set(extras) <= known, path
    assert set(EXTRA_OF.values()) <= known


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
import pathspace
try:
    {}
except ModuleNotFoundError as error:
    print(error.name, error)
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("package", ["numpy", "safetensors", "threadpoolctl", "numba"])
@pytest.mark.parametrize("code", ["pathspace.sequences.PCNN", "import pathspace.sequences.text"])
def test_sequences_without_their_packages_say_what_to_install(package: str, code: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(code), package]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"{package} pathspace.sequences needs the package '{package}', which is not installed: "
        "pip install -e '.[sequences]' in a clone of pathspace\n"
    )


def test_a_hidden_markov_model_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pathspace.sequences.baselines import HiddenMarkov

    monkeypatch.setitem(sys.modules, "hmmlearn.hmm", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"HiddenMarkov needs the package .* pip install -e '.\[sequences\]'",
    ):
        HiddenMarkov(2).fit([0, 1, 0], 2)


def test_a_module_of_ours_that_is_missing_is_no_extra() -> None:
    error = ModuleNotFoundError("No module named 'pathspace.none'", name="pathspace.none")
    assert missing_package("a part", error, "sweep") is error
