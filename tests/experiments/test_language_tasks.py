import gzip
import math
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.conftest import WORD_FILES, asked, digests
from pathspace.experiments.engine import run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.tasks import build_task, corpora
from pathspace.experiments.tasks.task import NOT_COUNTED, Task, windows


def test_windows_predict_every_symbol_once_and_leave_out_the_rest() -> None:
    text = torch.arange(12)
    plain = windows(text, length=4)
    assert plain.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plain.targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    late = windows(text, length=4, context=3)
    assert late.inputs.tolist() == [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9, 10]]
    skipped = [NOT_COUNTED] * 3
    assert late.targets.tolist() == [[*skipped, 4, 5, 6, 7], [*skipped, 8, 9, 10, 11]]


@pytest.mark.parametrize("within", [".", "ptb"])
def test_characters_are_read_without_the_spaces_between_them(
    tiny_corpora: Path, within: str
) -> None:
    task = build_task("characters", {"length": 3, "context": 2}, data_dir=tiny_corpora / within)
    alphabet = "\n_ab"
    assert task.input_size == task.output_size == 4
    assert ["".join(alphabet[i] for i in row) for row in task.train.inputs.tolist()] == [
        "a_b",
        "ab_",
    ]
    assert ["".join(alphabet[i] for i in row) for row in task.train.targets.tolist()] == [
        "_ba",
        "b_\n",
    ]
    assert ["".join(alphabet[i] for i in row) for row in task.test.inputs.tolist()] == ["bba_a"]


def test_every_line_of_words_ends_a_sentence(tiny_corpora: Path) -> None:
    task = build_task("words", {"length": 3, "context": 1}, data_dir=tiny_corpora)
    vocabulary = sorted(["the", "cat", "<unk>", "end", "<eos>"])
    assert task.input_size == 5
    read = [
        vocabulary[i]
        for i in [*task.train.inputs.flatten().tolist(), int(task.train.targets[-1, -1])]
    ]
    assert read == ["the", "cat", "<unk>", "<eos>", "<eos>", "the", "end"]


def evaluated(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return task.reported(task.errors(outputs, targets).mean().item())


def test_an_answer_that_knows_nothing_costs_all_its_bits_and_words(tiny_corpora: Path) -> None:
    characters = build_task("characters", {"length": 3, "context": 2}, data_dir=tiny_corpora)
    split = characters.test
    assert evaluated(
        characters, torch.zeros(*split.targets.shape, 4), split.targets
    ) == pytest.approx(2.0)
    words = build_task("words", {"length": 3, "context": 1}, data_dir=tiny_corpora)
    split = words.test
    assert evaluated(words, torch.zeros(*split.targets.shape, 5), split.targets) == pytest.approx(
        5.0
    )


def test_only_predictions_after_the_context_count(tiny_corpora: Path) -> None:
    task = build_task("characters", {"length": 2, "context": 3}, data_dir=tiny_corpora)
    targets = task.test.targets
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*targets.shape, 4, generator=generator)
    # by hand, in the order of the text
    chosen = outputs.double().log_softmax(-1)[:, 3:].gather(2, targets[:, 3:, None])
    expected = -chosen.mean().item()
    assert task.loss(outputs, targets).item() == pytest.approx(expected, rel=1e-6)
    assert evaluated(task, outputs, targets) == pytest.approx(expected / math.log(2), rel=1e-6)
    changed = outputs.clone()
    changed[:, :3] = torch.randn(len(outputs), 3, 4, generator=generator)
    assert evaluated(task, changed, targets) == evaluated(task, outputs, targets)


def test_a_model_that_reads_the_last_step_is_refused_with_the_remedy(tiny_corpora: Path) -> None:
    task = build_task("characters", {"length": 3, "context": 2}, data_dir=tiny_corpora)
    with pytest.raises(ConfigurationError, match=r"set model_options.output to 'every'"):
        task.loss(torch.zeros(2, 4), task.train.targets)


def test_language_models_train_alike_from_both_starts(tiny_corpora: Path) -> None:
    settings = asked(
        {
            "task": "words",
            "task_options": {
                "length": 2,
                "context": 1,
                "train_size": 0,
                "validation_size": 0,
                "test_size": 0,
            },
            "model_options": {"hidden": 6, "embedding": 4},
            "batch_size": 2,
            "epochs": 4,
        }
    )
    task = build_task("words", settings.task_options, data_dir=tiny_corpora)
    balanced, rescaled = (
        run(settings.run_config("path-sgd", start, 0.1, 0, evaluate_test=True), task)
        for start in ("balanced", "rescaled")
    )
    assert balanced.losses == rescaled.losses
    assert balanced.test_error == rescaled.test_error
    assert balanced.losses[-1] < balanced.losses[0]
    # validations report what the test does: the perplexity, which is the exponential of the loss
    last = balanced.validations[-1]
    assert last.error == pytest.approx(math.exp(last.loss), rel=1e-5)


def test_a_smaller_vocabulary_keeps_the_most_frequent_words(tiny_corpora: Path) -> None:
    task = build_task("words", {"vocabulary": 3, "length": 3, "context": 1}, data_dir=tiny_corpora)
    # "the" is the most frequent word; "cat" and "end" become unknown
    names = ["<eos>", "<unk>", "the"]
    assert task.input_size == 3
    read = [
        names[i] for i in [*task.train.inputs.flatten().tolist(), int(task.train.targets[-1, -1])]
    ]
    assert read == ["the", "<unk>", "<unk>", "<eos>", "<eos>", "the", "<unk>"]


def test_another_text_under_the_same_name_is_refused(tiny_corpora: Path) -> None:
    (tiny_corpora / "ptb" / "ptb.valid.txt").write_text(" the cat \n")
    with pytest.raises(
        ConfigurationError, match=r"'ptb.valid.txt' is not the file that published results"
    ):
        build_task("words", data_dir=tiny_corpora)


@pytest.mark.parametrize("packed", ["", ".gz", ".zip"])
def test_bytes_are_read_as_they_are_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str
) -> None:
    # The first cut goes through the two bytes of the letter, and the last part has a byte that no
    # other part has.
    content = "abé ba ab b".encode() + b"\xff ba"
    corpus = replace(
        corpora.CHARACTERS["enwik8"], digests=digests(content), cuts=(3, 8, len(content))
    )
    monkeypatch.setitem(corpora.CHARACTERS, "enwik8", corpus)
    path = tmp_path / f"enwik8{packed}"
    if packed == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("enwik8", content)
    else:
        path.write_bytes(gzip.compress(content) if packed else content)
    task = build_task(
        "characters", {"dataset": "enwik8", "length": 2, "stream": True}, data_dir=tmp_path
    )
    alphabet = sorted(set(content))
    assert task.input_size == len(alphabet) == 6
    assert [alphabet[i] for i in task.train.inputs.flatten()] == list(content[:2])
    assert [alphabet[i] for i in task.train.targets.flatten()] == list(content[1:3])
    assert [alphabet[i] for i in task.test.inputs.flatten()] == list(content[8:14])


def test_a_zip_without_the_file_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("another", b"text")
    with pytest.raises(ConfigurationError, match=r"Cannot read .*text8.zip.*'text8'"):
        build_task("characters", {"dataset": "text8"}, data_dir=tmp_path)


def test_a_broken_file_is_named(tiny_corpora: Path) -> None:
    name = corpora.CHARACTERS["ptb"].files[2]
    (tiny_corpora / "ptb" / name).write_bytes(b"no gzip")
    with pytest.raises(ConfigurationError, match=f"{name}.*download the file again"):
        build_task("characters", data_dir=tiny_corpora)


def test_missing_texts_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    for folder in (None, tmp_path):
        for name, options in (
            ("characters", {}),
            ("characters", {"dataset": "text8-prefix"}),
            ("words", {}),
            ("words", {"dataset": "wikitext-2"}),
        ):
            with pytest.raises(ConfigurationError, match="--data-dir or PATHSPACE_DATA"):
                build_task(name, options, data_dir=folder)


@pytest.mark.parametrize("stripped", [False, True])
def test_words_are_downloaded_where_there_is_no_folder(
    tiny_corpora: Path, monkeypatch: pytest.MonkeyPatch, stripped: bool
) -> None:
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)
    asked = []

    def load_dataset(
        dataset: str, configuration: str, *, split: str, revision: str
    ) -> dict[str, list[str]]:
        asked.append((dataset, configuration, split, revision))
        text = WORD_FILES[("train", "validation", "test").index(split)].decode()
        lines = text.splitlines(keepends=not stripped)
        return {"sentence": [line.strip() if stripped else line for line in lines]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    downloaded = build_task("words", {"length": 2, "context": 1})
    assert asked[0] == (
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        "train",
        "refs/convert/parquet",
    )
    stored = build_task("words", {"length": 2, "context": 1}, data_dir=tiny_corpora)
    assert torch.equal(downloaded.train.inputs, stored.train.inputs)


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATHSPACE_DATA", raising=False)

    def load_dataset(*_: Any, **__: Any) -> None:
        raise OSError("no network\nand more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ConfigurationError, match=r"download failed \(OSError: no network\)"):
        build_task("words")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("characters", {"dataset": "ptv"}, "choose from ptb, text8, enwik8, text8-prefix"),
        ("words", {"dataset": "text8"}, "choose from ptb, wikitext-2"),
        (
            "characters",
            {"length": 0},
            "'length' of the task 'characters' is 0: give 1 or more",
        ),
        ("words", {"context": -1}, "'context' of the task 'words' is -1"),
        ("words", {"stream": 1}, "'stream' of the task 'words' is 1: give true or false"),
        ("words", {"vocabulary": 1}, "a whole number from 2 to 5, the number of types"),
        ("characters", {"length": 3, "context": 2, "train_size": 3}, "from 6 .one window. to 8 "),
        (
            "words",
            {"length": 2, "context": 1, "test_size": 99},
            "'test_size' of the task 'words' is 99",
        ),
    ],
)
def test_impossible_options_of_language_tasks_are_refused(
    tiny_corpora: Path, name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build_task(name, options, data_dir=tiny_corpora)


def test_the_real_texts_have_the_known_sizes() -> None:
    folder = corpora.data_folder(None)
    if folder is None or not (folder / "ptb").exists():
        pytest.skip("PATHSPACE_DATA does not name a folder with the real texts")
    characters = build_task("characters")
    assert (characters.input_size, len(characters.train)) == (50, 5_017_481 // 50)
    words = build_task("words")
    assert (words.input_size, len(words.train)) == (10_000, 929_588 // 20)
