"""Whatever the documentation tells a reader to run, runs, and prints what the page says."""

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pathspace

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CORE = ("metrics", "network", "nn", "optim", "paths", "rescaling")
REFERENCE = re.compile(r"^::: (\S+)$", re.M)  # a name whose docstring the site shows there
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

# Documented commands take minutes; a test runs them in full with a budget of seconds.
TINY = ["--epochs", "1"]
TINY_COMPARISON = [*TINY, "--seeds", "1", "--learning-rates", "0.01", "--workers", "1"]
TINY_TASKS = {
    "pathspace compare": {
        "model_options.hidden": 8,
        "tuning_seeds": 1,
        "tuning_epochs": 1,
        "batch_size": 200,
        "methods": '["sgd", "path-sgd"]',
    },
    "language-models": {
        "task_options.train_size": 5000,
        "task_options.validation_size": 2000,
        "task_options.test_size": 2000,
        "model_options.hidden": 8,
        "model_options.embedding": 8,
        "methods": '["sgd", "g-sgd"]',
    },
    "mnist": {"task_options.train_size": 200, "task_options.validation_size": 50},
    "recurrent-cnn": {
        "task_options.train_size": 64,
        "task_options.validation_size": 32,
        "task_options.test_size": 32,
        "model_options.maps": 2,
        "methods": '["path-sgd", "g-adam"]',
    },
    "smnist": {"methods": '["path-sgd", "lstm-adam"]', "model_options.hidden": 8},
    "algorithm-2": {"methods": '["g-sgd-published", "sgd"]'},  # after smnist, which it is, too
    "adding": {
        "task_options.train_size": 200,
        "task_options.validation_size": 50,
        "task_options.test_size": 50,
        "task_options.length": 5,
    },
    "long-400": {"method_rates.path-sgd-published": [1e-9]},
    "char-lm": {
        "task_options.train_size": 2000,
        "task_options.validation_size": 200,
        "task_options.test_size": 200,
        "model_options.hidden": 8,
    },
    "reproduce transformer": {
        "task_options.length": 8,
        "task_options.train_size": 200,
        "task_options.validation_size": 100,
        "task_options.test_size": 100,
        "model_options.hidden": 8,
        "methods": '["adamw", "path-muon"]',
        "baselines": '["adamw"]',
    },
    "reproduce cost": {
        "task_options.train_size": 64,
        "task_options.validation_size": 32,
        "model_options.hidden": 8,
        "methods": '["sgd", "g-sgd"]',
    },
    "second-term": {
        "task_options.train_size": 500,
        "task_options.validation_size": 100,
        "task_options.test_size": 100,
        "task_options.vocabulary": 20,
        "model_options.hidden": 8,
    },
}
TINY_STUDIES = {"cost": {"rounds": 2, "steps": 1}, "second-term": {"lengths": [3], "hidden": [4]}}
TINY_WINNER = [
    "--set", 'methods=["sgd", "path-soap"]', "--set", 'baselines=["sgd"]', "--set", "batch_size=4",
    "--set", "task_options.train_size=400", "--set", "task_options.validation_size=300",
    "--set", "model_options.hidden=8",
]  # fmt: skip


TINY_MEMORY = [
    "--methods", "path-muon,balanced-adamw", "--seeds", "1", "--learning-rates", "0.01", "--workers", "1",
    "--set", "tuning_seeds=1", "--set", "lengths=[3]", "--set", "hidden=[3]", "--set", "test_size=20",
]  # fmt: skip


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text())


@pytest.fixture(autouse=True)
def _untouched_random_state():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_on_a_page_runs_and_prints_what_it_says(page):
    scope: dict[str, object] = {}
    printed = None
    for language, text in blocks(page):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(page), "exec"), scope)
            printed = out.getvalue()
        elif language == "text" and printed:
            assert printed.strip() == text.strip()
            printed = None
    assert not printed, "a program on the page prints something that the page does not show"


def commands() -> list[str]:
    """Every command that some page tells a reader to type, once."""
    texts = [text for page in PAGES for language, text in blocks(page) if language == "console"]
    lines = [
        line[2:] for text in texts for line in text.splitlines() if line.startswith("$ pathspace ")
    ]
    return list(dict.fromkeys(lines))


# `make test` executes one command of each kind, the cheapest; `make test-all` executes all of them.
EXECUTED = {
    "pathspace compare",
    "pathspace train --resume --output runs/one",
    "pathspace reproduce --list",
    "pathspace reproduce adding",  # generated data
    "pathspace reproduce smnist-28-98 --size long-28 --epochs 100 --seeds 10 --methods g-sgd,sgd,g-adam,adam "
    "--data-dir data",  # data from a folder, and a size
    "pathspace reproduce cost --data-dir data --workers 1",  # a study after the comparison
    "pathspace reproduce long-memory",  # an engine of its own
    "pathspace sweep adding --methods sgd,path-sgd-short --seeds 3",
    "pathspace check-invariance --networks mlp,rnn --steps 20",
    "pathspace paths mlp --rule cyclic --picture mlp.png",
}


def executed() -> list[Any]:
    return [
        pytest.param(line, marks=() if line in EXECUTED else pytest.mark.slow)
        for line in commands()
    ]


class Begun(Exception):  # noqa: N818
    """Stands for the work that a command begins once it is content with all that it was told."""


@pytest.mark.parametrize("line", commands())
def test_commands_on_a_page_are_understood(line, tmp_path, monkeypatch):
    """Options, settings, recipe and size are checked as ever, and no data is read, nothing computed."""

    def begin(*_, **__):
        raise Begun

    from pathspace.cli import app

    monkeypatch.setattr("pathspace.experiments.configuration.check_task_of", lambda *_: None)
    for work in (
        "execution.compare", "invariance.check_all", "diagnosis.summarize",
        "diagnosis.imbalance",
        "execution.StoredCell", "sweep.sweep",
    ):  # fmt: skip
        monkeypatch.setattr(f"pathspace.experiments.{work}", begin)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    if "--resume" in words:  # what is to be continued
        begun = CliRunner().invoke(app, [word for word in words if word != "--resume"])
        assert isinstance(begun.exception, Begun)
    result = CliRunner().invoke(app, words)
    if "--list" in words:
        assert result.exit_code == 0, result.output
    else:
        assert isinstance(result.exception, Begun), result.output


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("line", executed())
def test_commands_on_a_page_run(line, tmp_path, monkeypatch, request):
    from pathspace.cli import app
    from pathspace.experiments.recipes import Recipe

    words = shlex.split(line)[1:]
    command = words[0]
    if "--data-dir" in words or "mnist" in line or "winner" in line:
        folder = os.environ.get("PATHSPACE_DATA")
        if not folder:
            pytest.skip("needs MNIST: set PATHSPACE_DATA to the folder that contains mnist/")
        if "--data-dir" in words:
            words[words.index("--data-dir") + 1] = folder
    monkeypatch.chdir(tmp_path)
    if line in EXECUTED - {"pathspace compare"}:
        request.getfixturevalue("no_pictures")
    if "--resume" in words:
        first = [w for w in words if w != "--resume"]
        assert CliRunner().invoke(app, [*first, *TINY]).exit_code == 0
    elif command == "train":
        words += TINY if "--epochs" not in words else []
        if "--epochs" in words:
            words[words.index("--epochs") + 1] = "1"
    elif "long-memory" in line:
        words += TINY_MEMORY
    elif command in ("compare", "sweep") or (command == "reproduce" and len(words) > 1):
        words += TINY_COMPARISON
        tiny = [
            item for name, changes in TINY_TASKS.items() if name in line for item in changes.items()
        ]
        for key, value in tiny:
            if not ("--methods" in words and key in ("methods", "baselines")):
                words += ["--set", f"{key}={value}"]
        words += TINY_WINNER if "winner" in line else []
    elif command == "check-invariance":
        words += ["--steps", "2"]
        if line in EXECUTED:  # the page of all optimizers and networks is for `make test-all`
            words += ["--optimizers", "sgd,path-sgd,path-muon,g-adam,ddp-sgd"]
    monkeypatch.setattr(
        Recipe, "study_options", lambda recipe, _: TINY_STUDIES.get(recipe.study["name"], {})
    )
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_what_is_executed_stands_on_some_page():
    assert set(commands()) >= EXECUTED


def test_commands_on_the_page_of_sequences_run_in_order(tmp_path, monkeypatch):
    from pathspace.cli import app

    monkeypatch.chdir(tmp_path)
    Path("log.txt").write_text("2026-11-01 sold 3 shells\n2026-11-02 sold 5 shells\n" * 20)
    Path("other.txt").write_text("2026-11-03 sold 5 shells\n" * 4)
    page = (ROOT / "docs/sequences.md").read_text()
    lines = next(text for language, text in FENCE.findall(page) if language == "sh").splitlines()
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["pathspace", "sequence"]
        more = ["--passes", "2"] if words[2] == "fit" else []
        result = CliRunner().invoke(app, [*words[1:], *more])
        assert result.exit_code == 0, (line, result.output)
    assert Path("back.txt").read_bytes() == Path("other.txt").read_bytes()


# test_defects.py runs the first one, test_gallery.py the other
ELSEWHERE = {ROOT / "docs/gallery/published_defects.py", ROOT / "docs/gallery/pictures.py"}
GALLERY = sorted(set(ROOT.glob("docs/gallery/*.py")) - ELSEWHERE)


# What they train is the same; the page has it ten times as long and longer.
SHORTER = {
    "badly_scaled": ("steps=200", "steps=20"),
    "path_regularizer": ("range(300)", "range(20)"),
    "path_space": ("EPOCHS, BATCH, TRAIN = 5, 32, 1300", "EPOCHS, BATCH, TRAIN = 1, 32, 320"),
    "quantise": ("range(300)", "range(20)"),
}


@pytest.mark.parametrize("program", GALLERY, ids=lambda path: path.stem)
def test_gallery_runs(program):
    out, text = io.StringIO(), program.read_text()
    if program.stem in SHORTER:
        asked, short = SHORTER[program.stem]
        assert text.count(asked) == 1
        text = text.replace(asked, short)
    with contextlib.redirect_stdout(out):
        exec(compile(text, str(program), "exec"), {"__name__": "__main__"})
    assert out.getvalue()


def test_excerpts_on_the_page_of_trainers_stand_in_its_programs():
    """Those programs need libraries that the tests do without; `tests/optim/test_trainers.py` runs them."""
    programs = [path.read_text().splitlines() for path in ROOT.glob("docs/gallery/trainers/*.py")]
    excerpts = [text for language, text in blocks(ROOT / "docs/trainers.md") if language == "py"]
    assert len(excerpts) >= len(programs) == 6
    for text in excerpts:
        lines = text.splitlines()
        places = [
            textwrap.dedent("\n".join(program[i : i + len(lines)])).splitlines()
            for program in programs
            for i in range(len(program))
        ]
        assert lines in places, text


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings, as docs/site.py makes them on the site, and names of the reference."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return set(REFERENCE.findall(prose)) | {
        re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings
    }


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(place), f"{page.name} links to {target}#{anchor}"


def core_modules() -> list[str]:
    packages = [importlib.import_module(f"pathspace.{n}") for n in CORE]
    names = [p.__name__ for p in packages]
    for package in packages:
        names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    return names


@pytest.mark.parametrize("name", core_modules())
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failures == 0


@pytest.mark.parametrize("package", CORE)
def test_public_names_have_examples_and_say_what_they_return(package):
    module = importlib.import_module(f"pathspace.{package}")
    for name in module.__all__:
        documentation = (
            getattr(module, name).__doc__ if callable(getattr(module, name)) else "constant"
        )
        assert documentation, f"{package}.{name} has no docstring"


@pytest.mark.parametrize("package", [*CORE, "sequences"])
def test_every_public_name_stands_in_the_reference_once(package: str) -> None:
    """The site puts the docstring in the place of each `::: name`."""
    listed = REFERENCE.findall((ROOT / f"docs/api/{package}.md").read_text())
    names = importlib.import_module(f"pathspace.{package}").__all__
    assert sorted(listed) == sorted(f"pathspace.{package}.{name}" for name in names)
    assert f"({package}.md)" in (ROOT / "docs/api/README.md").read_text()


def navigation() -> list[str]:
    """Pages of the site's navigation. index.md is the README of the repository, pages.md is docs/README.md."""
    entries = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"(\S+\.md)$", entries, re.M)


def test_the_navigation_is_short_and_every_page_is_reached_from_it() -> None:
    entries = navigation()
    assert len(entries) <= 25
    home, *listed = entries
    assert home == "index.md"
    waiting = [ROOT / "docs" / entry.replace("pages.md", "README.md") for entry in listed]
    reached = set()
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        linked = re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text())
        waiting += [(page.parent / target).resolve() for target in linked]
    pages = {path for path in ROOT.glob("docs/**/*.md") if "trainers" not in path.parts}
    assert pages - reached == set()


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("install", "README.md"),
        ("anomaly", "docs/sequences.md"),
        ("anomaly", "docs/howto.md"),
        ("tensorboard", "docs/diagnosing.md"),
        ("tensorboard", "docs/howto.md"),
    ],
)
def test_words_that_readers_search_for_stand_on_the_page_for_them(word: str, page: str) -> None:
    assert re.search(rf"\b{word}\b", (ROOT / page).read_text(), re.I)


def test_the_core_is_reached_from_the_package():
    assert set(pathspace.__all__) <= set(dir(pathspace))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        pathspace.nonsense  # noqa: B018
