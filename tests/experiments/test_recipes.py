import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
from rich.console import Console

from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import laid_over
from pathspace.experiments.recipes import (
    ENGINES,
    listing,
    load_published,
    load_recipe,
    recipe_names,
)
from pathspace.experiments.report import LINE_COLOURS, print_table, published_section
from pathspace.experiments.settings import settings_from
from pathspace.experiments.studies import check_study

COMPARISONS = [name for name in recipe_names() if not load_recipe(name).engine]


def lines(name: str) -> list[str]:
    text = (
        files("pathspace.experiments")
        .joinpath("recipes", f"{name}.toml")
        .read_text(encoding="utf-8")
    )
    return text.splitlines()


@pytest.mark.parametrize("name", recipe_names())
def test_every_size_of_every_recipe_can_be_run(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.title
    assert recipe.measured.keys() <= set(recipe.sizes or ["default"])
    assert bool(recipe.paper) == bool(recipe.distance)
    assert {*recipe.study} <= {"name", *recipe.sizes}
    assert not (recipe.engine and (recipe.study or recipe.parts))
    for size in recipe.sizes or ("",):
        if recipe.engine:
            laid_over(import_module(ENGINES[recipe.engine]).Protocol, recipe.layers(size))
            continue
        settings_from(*recipe.layers(size))
        if recipe.study:
            check_study(recipe.study["name"], recipe.study_options(size), name)


@pytest.mark.parametrize("name", load_recipe("winner").parts)
def test_parts_have_baselines_which_their_panels_of_the_picture_need(name: str) -> None:
    recipe = load_recipe(name)
    assert all(settings_from(*recipe.layers(size)).baselines for size in recipe.sizes)


@pytest.mark.parametrize("name", recipe_names())
def test_every_setting_of_a_recipe_has_its_reason(name: str) -> None:
    for line in lines(name):
        if "=" in line and not line.startswith(("title", "distance")):
            assert re.search(r"# \S+ \S+", line), f"no reason: {line}"


@pytest.mark.parametrize("name", COMPARISONS)
def test_published_numbers_name_methods_of_ours(name: str) -> None:
    published = load_published(name)
    if published is not None:
        recipe = load_recipe(name)
        named = {result.method for result in published.results} - {""}
        sizes = [settings_from(*recipe.layers(size)) for size in recipe.sizes or [""]]
        assert named <= {method for settings in sizes for method in settings.methods}
        assert {method for pair in published.pairs for method in pair} <= named


def test_no_table_of_numbers_is_printed_where_a_paper_has_none() -> None:
    for name, there in (("ddp", False), ("mnist-rows", True)):
        published = load_published(name)
        assert published is not None
        table = published_section(published).table
        assert bool(table.rows) == there
        console = Console(record=True, width=120)
        print_table(table, console)
        assert ("value" in console.export_text()) == there


def test_every_expected_file_belongs_to_a_recipe() -> None:
    folder = files("pathspace.experiments").joinpath("expected")
    assert {item.name.removesuffix(".toml") for item in folder.iterdir()} <= set(recipe_names())


def test_the_published_numbers_are_those_of_the_papers() -> None:
    rows = load_published("mnist-rows")
    assert rows is not None
    assert {result.label: result.words for result in rows.results} == {
        "SGD": "1.59",
        "Path-SGD": "1.75",
        "G-SGD": "1.50",
        "Adam": "1.72",
    }
    adding = load_published("adding")
    assert adding is not None
    by_label = {result.label: result.value for result in adding.results}
    assert [by_label[f"RNN-Path, T = {length}"] for length in (100, 400, 750)] == [0, 0, 0]
    assert [by_label[f"IRNN, T = {length}"] for length in (100, 400, 750)] == [0, 0, 0.167]
    assert [by_label[f"LSTM, T = {length}"] for length in (100, 400, 750)] == [0, 0.02, 0.167]
    others = {
        "IRNN of Le et al. (2015)": (0.167, 0.167),
        "uRNN of Arjovsky et al. (2015)": (0.03, 0.167),
    }
    for label, values in others.items():
        assert tuple(by_label[f"{label}, T = {length}"] for length in (400, 750)) == values


def test_a_number_stands_beside_every_method_that_is_the_papers_and_is_printed_once() -> None:
    adding, recipe = load_published("adding"), load_recipe("adding")
    assert adding is not None
    labels = [result.label for result in adding.rows]
    assert len(labels) == len(set(labels)) == 17
    assert labels[:2] == ["RNN-Path, T = 100", "RNN-Path, T = 400"]
    ours = settings_from(*recipe.layers("p16-750"))
    numbers = {name: adding.result(ours, name) for name in ours.methods}
    assert {name: None if number is None else number.value for name, number in numbers.items()} == {
        "path-sgd-weights": 0,
        "sgd": 0.167,
        "lstm-adam": 0.167,
    }
    # SGD from another start is not the paper's IRNN
    assert adding.result(settings_from(*recipe.layers("long-100")), "sgd") is None


def test_the_published_numbers_of_the_other_tables() -> None:
    pixels = load_published("smnist-784")
    assert pixels is not None
    assert {result.label: result.words for result in pixels.results} == {
        "RNN-Path": "3.1",
        "IRNN": "7.1",
        "LSTM": "1.8",
        "uRNN": "4.9",
        "np-RNN": "3.1",
        "IRNN of Le et al. (2015)": "5.0",
    }
    characters = load_published("char-lm")
    assert characters is not None
    # the paper's two rows of the same network are both trained by Adam, one of them on path
    # gradients
    assert [r.method for r in characters.results[:2]] == ["path-gradient-adam", "adam"]
    values = {result.label: result.value for result in characters.results}
    names = ("RNN-Path", "ReLU RNN", "tanh RNN", "LSTM")
    assert [values[f"{name}, Penn Treebank"] for name in names] == [1.47, 1.55, 1.58, 1.41]
    assert [values[f"{name}, text8"] for name in names] == [1.58, 1.65, 1.70, 1.52]
    cost = load_published("cost")
    assert cost is not None
    seconds = {result.label: result.value for result in cost.results}
    assert seconds["SGD, PTB characters, seconds per epoch"] == 61.5
    assert seconds["G-SGD, PTB characters, seconds per epoch"] == 63.8
    assert seconds["G-SGD, seconds per epoch beside SGD, least"] == round(63.8 / 61.5, 3) == 1.037


def test_what_is_said_to_have_been_run_stands_on_its_page() -> None:
    results = Path(__file__).parents[2] / "docs/results"
    for name in recipe_names():
        for size, known in load_recipe(name).measured.items():
            if not known.page:  # its cost alone is known
                assert known.core_hours, (name, size)
                assert not known.part, (name, size)
                continue
            text = (results / known.page).read_text(encoding="utf-8")
            command = "pathspace compare" if name == "digits" else f"pathspace reproduce {name}"
            assert command in text, (name, size)


def test_the_list_has_the_paper_the_sizes_their_cost_and_what_was_run() -> None:
    lines = listing(100)
    at = next(number for number, line in enumerate(lines) if line.startswith("adding: "))
    assert lines[at + 1] == "    paper: P16, Table 2 and Fig. 3: the addition problem"
    assert lines[at + 2].startswith("    distance: the paper's start in p16-... alone")
    assert lines[at + 4 : at + 7] == [
        "    small         0.1  docs/results/adding.md",
        "    paper-100       2  docs/results/adding.md",
        "    paper-400       6  docs/results/adding.md (3 of 8 tuning runs, 1 of 6 runs)",
    ]
    text = "\n".join(lines)
    assert all(f"{name}: " in text for name in recipe_names())
    assert "    default     0.1  docs/results/compare.md" in text
    assert "small  see winner-mnist, winner-characters, winner-adding" in text


def test_unknown_recipes_and_sizes_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match="Unknown recipe 'nothing' in reproduce: choose from adding, char-lm, cost, ddp, digits",
    ):
        load_recipe("nothing")
    with pytest.raises(
        ConfigurationError, match="Unknown size 'huge' in --size of the recipe 'adding'"
    ):
        load_recipe("adding").layers("huge")


def test_the_published_numbers_of_g_sgd_stand_beside_the_right_sizes() -> None:
    published = load_published("recurrent-cnn")
    assert published is not None
    # label: G-SGD or SGD, data set, maps
    by_label = {result.label: result for result in published.results}
    assert by_label["G-SGD, MNIST, 32 maps"].value == 0.36
    assert by_label["SGD, CIFAR-100, 160 maps"].value == 29.67
    assert by_label["SGD of Liang and Hu (2015), CIFAR-10, 128 maps"].value == 7.24
    recipe = load_recipe("recurrent-cnn")
    for size in ("paper-mnist-32", "paper-cifar10-128", "paper-cifar100-160"):
        settings = settings_from(*recipe.layers(size))
        _, data, maps = size.split("-")
        fits = [
            result
            for result in published.results
            if result.task_options.get("data") == settings.task_options["data"] == data
            and result.model_options["maps"] == settings.model_options["maps"] == int(maps)
        ]
        assert {result.method for result in fits} == {"g-sgd", "sgd"}
        # appendix A.3
        assert (settings.epochs, settings.batch_size, settings.schedule) == (200, 64, "steps")
        assert settings.weight_decays == (1e-4,)
    rows = load_published("smnist-28-98")
    assert rows is not None
    g_adam = {result.label: result.value for result in rows.results if result.method == "g-adam"}
    for size in ("paper-28", "paper-98", "paper-28-permuted", "paper-98-permuted"):
        settings = settings_from(*load_recipe("smnist-28-98").layers(size))
        assert (settings.epochs, settings.seeds, settings.batch_size) == (400, 3, 64)
        assert not settings.task_options.get("standardize", False)
        assert {result.method for result in rows.results} < set(settings.methods)
        raw = [name for name in settings.methods if name.endswith("-published")]
        assert sorted(settings.method_rates) == sorted(raw) != []
    assert list(g_adam.values()) == [1.50, 2.49, 3.73, 5.42]


def test_every_method_of_a_recipe_has_a_colour_of_its_own() -> None:
    recipes = [load_recipe(name) for name in COMPARISONS]
    settings = [
        settings_from(*recipe.layers(size)) for recipe in recipes for size in recipe.sizes or ("",)
    ]
    assert (
        12
        <= max(len(one.methods) for one in settings)
        <= len(set(LINE_COLOURS))
        == len(LINE_COLOURS)
    )
