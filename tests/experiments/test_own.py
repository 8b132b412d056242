"""`pathspace compare FILE.py`: a model and data of the user's own."""

import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from pathspace.cli import app
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.own import examples_of, options_of_file
from pathspace.experiments.tasks import build_task

PAGE = (Path(__file__).parents[2] / "docs/experiments.md").read_text(encoding="utf-8")

MODEL = """
import torch
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
"""
BRANCHING = """
import torch
class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    def forward(self, x):
        hidden = self.first(x).relu()
        return self.last(hidden if hidden.sum() > 0 else -hidden)
def model(): return Branching()
"""
NORMALIZED = MODEL.replace("torch.nn.ReLU()", "torch.nn.BatchNorm1d(8), torch.nn.ReLU()")
TINY = [
    "--quick",
    "--quiet",
    "--workers",
    "1",
    "--methods",
    "sgd,path-sgd",
    "--learning-rates",
    "0.01",
    "--batch-size",
    "8",
]


def data(targets: str, inputs: str = "torch.randn(8, 4)", *, model: str = MODEL) -> str:
    return f"{model}\ndef batches():\n    for _ in range(5):\n        yield {inputs}, {targets}\n"


def compared(folder: Path, content: str, *more: str) -> Result:
    file = folder / "mine.py"
    file.write_text(content)
    return CliRunner().invoke(
        app, ["compare", str(file), "--output", str(folder / "out"), *TINY, *more]
    )


def on_page() -> tuple[str, list[str]]:
    """The file on the page, and the first command for it."""
    (content,) = [
        text
        for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
        if "batches" in text
    ]
    (command, *_) = re.findall(r"^pathspace compare mine.py.*$", PAGE, re.M)
    return content, shlex.split(command)


def test_the_example_of_the_page(tmp_path, monkeypatch, no_pictures):
    content, words = on_page()
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(content)
    result = CliRunner().invoke(
        app,
        [
            *words[1:],
            "--json",
            "--workers",
            "1",
            "--methods",
            "sgd,path-adam",
            "--learning-rates",
            "0.03",
        ],
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"] for row in rows} == {"sgd", "path-adam"}
    assert all(
        row["largest_difference"] == 0
        for row in rows
        if row["method"] == "path-adam" and row["start"] == "rescaled"
    )


def test_a_network_without_units_to_rescale_is_told_once(tmp_path, no_pictures):
    model = MODEL.replace("torch.nn.ReLU()", "torch.nn.Tanh()")
    result = compared(tmp_path, data("torch.randint(0, 2, (8,))", model=model))
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert told.count("nothing in this network is rescaled, so all starts are one") == 1
    assert "no unit class" not in told


@pytest.mark.parametrize(
    "content",
    [
        data("torch.randn(8, 2)"),
        data("torch.randint(0, 2, (8,))"),
        data("torch.randn(8)")
        + "\ndef loss(outputs, targets): return (outputs.sum(1) - targets).abs().mean()\n",
    ],
    ids=["real numbers", "classes", "a loss of its own"],
)
def test_trains_by_the_loss_that_fits(tmp_path, no_pictures, content):
    result = compared(tmp_path, content)
    assert result.exit_code == 0, result.output
    assert "Path-SGD" in result.output


def test_errors_are_means_over_all_numbers_of_an_example(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(data("torch.randn(8, 2)"))
    task = build_task("own", options_of_file(file))
    outputs, targets = torch.randn(6, 2), torch.randn(6, 2)
    pairs = zip(outputs.tolist(), targets.tolist(), strict=True)
    by_hand = [((a - c) ** 2 + (b - d) ** 2) / 2 for (a, b), (c, d) in pairs]
    assert task.errors(outputs, targets).tolist() == pytest.approx(by_hand)
    assert [len(split) for split in (task.train, task.validation, task.test)] == [28, 6, 6]
    every = torch.cat([split.inputs for split in (task.train, task.validation, task.test)])
    assert len(every.unique(dim=0)) == 40


def test_an_endless_loader_is_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr("pathspace.experiments.own.MOST_EXAMPLES", 30)
    file = tmp_path / "mine.py"
    file.write_text(
        f"{MODEL}\ndef batches():\n    while True: yield torch.randn(8, 4), torch.randn(8, 2)\n"
    )
    inputs, targets = examples_of(**options_of_file(file))
    assert (len(inputs), len(targets)) == (30, 30)


@pytest.mark.parametrize(
    "inputs",
    [
        "torch.randn(8, 4)",
        "torch.from_numpy(np.random.randn(8, 4)).float()",
        "torch.tensor([[random.random() for _ in range(4)] for _ in range(8)])",
        "next(iter(DataLoader(torch.arange(32.0).view(8, 4), 8, shuffle=True)))",
    ],
    ids=["torch", "numpy", "python", "a loader that shuffles"],
)
def test_every_run_reads_the_same_examples(tmp_path, inputs):
    file = tmp_path / "mine.py"
    imports = "import random, numpy as np\nfrom torch.utils.data import DataLoader\n"
    imports += "import torch\nDRAWN = torch.randn(3), np.random.randn(3), random.random()\n"
    file.write_text(imports + data("torch.randint(0, 2, (8,))", inputs))
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = examples_of(**options_of_file(file))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert random.getstate() == states[2]
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    again = examples_of(**options_of_file(file))
    assert all(map(torch.equal, first, again))


def test_a_changed_file_is_not_taken_for_the_one_of_the_runs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(data("torch.randn(8, 2)"))
    begun = options_of_file(file)
    file.write_text(data("torch.randn(8, 2)") + "\n# now another\n")
    assert options_of_file(file) != begun
    with pytest.raises(ConfigurationError, match="has changed since these runs began"):
        build_task("own", begun)


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        ("def batches(): return []", [], "has 0 examples: give 20 at least"),
        (MODEL, [], "has no function batches"),
        (
            "import numpy\nG = numpy.random.default_rng()\n"
            + data("torch.zeros(8, 2)", "torch.from_numpy(G.normal(size=(8, 4))).float()"),
            [],
            "yields other examples when it is called again",
        ),
        (
            data("torch.zeros(8, 2)", "torch.full((8, 4), float('nan'))"),
            [],
            "yields inputs with NaN or infinity in 40 of 40 examples, the first of which is number 0",
        ),
        (
            data("torch.tensor([0.0] * 7 + [float('inf')])")
            + "def loss(outputs, targets): return (outputs.sum(1) - targets).mean()\n",
            [],
            "yields targets with NaN or infinity in 5 of 40 examples, the first of which is number 7",
        ),
        (
            data("torch.arange(8)"),
            [],
            "has 2 outputs, and the targets of batches() have 8 classes, 0 to 7",
        ),
        (data("torch.randn(8, 2)").replace("model()", "other()"), [], "has no function model"),
        ("def model(): return 3\n" + data("torch.randn(8, 2)").replace(MODEL, "import torch"), [], "Expected"),
        (data("torch.randn(8, 2)", "torch.randn(8, 5)"), [], "the model' failed"),
        (data("torch.randn(8)"), [], "outputs of shape (2, 2) for targets of shape (2,): if"),
        (data("torch.randn(8, 2)", "torch.ones(8, 4, dtype=int)"), [], "inputs of torch.int64: if"),
        (data("torch.randn(8, 2)", model=BRANCHING), [], "The model of the file: cannot trace '__bool__'"),
        (data("torch.randn(8, 2)", model=NORMALIZED), ["--methods", "ddp-norm"], "Leave it out of --methods."),
        (data("torch.randn(7, 2)"), [], "as many examples each"),
        (data("torch.ones(8, 2, dtype=int)"), [], "define loss(outputs, targets)"),
        (data("torch.randn(8, 2)") + "\ndef loss(outputs, targets): return outputs\n", [], "one number"),
        (data("torch.randn(8, 2)"), ["--task", "digits"], "leave out --task"),
        (data("torch.randn(8, 2)"), ["--methods", "lstm-adam"], "does not go with the task 'own'"),
        ("raise RuntimeError('mine')", [], "RuntimeError: mine (line 1"),
    ],
)  # fmt: skip
def test_says_what_is_wrong_with_a_file(tmp_path, content, more, says):
    result = compared(tmp_path, content, *more)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())


def test_a_file_that_is_not_python(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text(data("torch.randn(8, 2)"))
    result = CliRunner().invoke(app, ["compare", str(file), *TINY])
    assert result.exit_code == 2
    assert "is no Python file: give one whose name ends in .py" in " ".join(result.output.split())


def test_no_file_and_no_task_of_that_name(tmp_path):
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "none.py")])
    assert result.exit_code == 2
    assert "There is no file" in result.output
    result = CliRunner().invoke(app, ["compare", "--task", "own"])
    assert "give it as `pathspace compare FILE.py`" in result.output
