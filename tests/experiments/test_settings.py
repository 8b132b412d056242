import shlex
from typing import Any

import pytest

from experiments.conftest import asked
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.layers import parse_settings, plain_values
from pathspace.experiments.methods import METHODS
from pathspace.experiments.models import MODELS, build_model
from pathspace.experiments.recipes import load_recipe
from pathspace.experiments.settings import Settings, settings_from
from pathspace.experiments.tasks import preset


def test_later_layers_win_and_options_are_merged() -> None:
    settings = settings_from(
        (
            "a recipe",
            {"task": "mnist", "task_options": {"steps": 98}, "epochs": 7, "methods": ["sgd"]},
        ),
        ("the command line", {"epochs": 8, "task_options": {"permuted": True}}),
    )
    assert settings.epochs == 8
    assert settings.methods == ("sgd",)
    assert settings.task_options == {
        **preset("mnist")["task_options"],
        "steps": 98,
        "permuted": True,
    }
    assert settings.batch_size == preset("mnist")["batch_size"]
    assert settings.momentum == preset("mnist")["momentum"] != Settings.momentum
    assert settings.rescale_exponent == Settings.rescale_exponent


def test_rates_are_chosen_by_no_longer_runs_than_a_command_asks_for() -> None:
    recipe = ("a recipe", {"epochs": 20, "tuning_epochs": 10})
    for given, expected in (
        ({"epochs": 5}, 0),
        ({"epochs": 40}, 10),
        ({"epochs": 5, "tuning_epochs": 8}, 8),
        ({}, 10),
    ):
        assert settings_from(recipe, ("the command line", given)).tuning_epochs == expected
    assert settings_from(("the command line", {"task": "digits", "epochs": 1})).tuning_epochs == 0


def test_settings_survive_json() -> None:
    settings = asked({"task": "adding", "learning_rates": [0.1, 1]})
    assert settings_from(("config.json", plain_values(settings))) == settings


def test_methods_bring_their_own_models_along() -> None:
    settings = asked(
        {
            "methods": ["sgd", "irnn-sgd", "lstm-adam"],
            "starts": ["default"],
            "model_options": {"hidden": 7, "start": "identity-recurrent"},
        }
    )
    models = [
        settings.run_config(name, "default", 0.1, 0, evaluate_test=False)
        for name in settings.methods
    ]
    assert [(config.model, config.model_options) for config in models] == [
        ("relu-rnn", {"hidden": 7, "start": "identity-recurrent"}),
        ("relu-rnn", {"hidden": 7, "start": "identity"}),
        ("lstm", {"hidden": 7}),  # which has no such start
    ]


def test_a_method_may_have_options_of_its_own() -> None:
    own = {"lstm-adam": {"hidden": 3, "start": "orthogonal"}, "tanh-adam": {"hidden": 9}}
    settings = settings_from(
        (
            "a recipe",
            {"methods": ["adam", "lstm-adam"], "starts": ["default"], "method_options": own},
        ),
        ("another", {"model_options": {"hidden": 7, "start": "uniform", "start_limit": 0.2}}),
    )
    assert settings.model_of("adam") == (
        "relu-rnn",
        {"hidden": 7, "start": "uniform", "start_limit": 0.2},
    )
    assert settings.model_of("lstm-adam") == ("lstm", {"hidden": 3, "start": "orthogonal"})


def test_what_a_command_says_of_one_method_leaves_what_a_recipe_says_of_it_and_of_others() -> None:
    recipe = {
        "methods": ["adam", "path-sgd-published", "lstm-adam"],
        "starts": ["default"],
        "learning_rates": [0.1, 0.2],
        "method_rates": {"path-sgd-published": [1e-9, 1e-8], "adam": [1, 2]},
        "method_options": {"lstm-adam": {"hidden": 3}},
    }
    given = ["method_rates.adam=[0.3, 0.4]", "method_options.lstm-adam={start = 'orthogonal'}"]
    settings = settings_from(("a recipe", recipe), ("the command line", parse_settings(given)))
    assert settings.rates_of("adam") == (0.3, 0.4)
    assert settings.rates_of("path-sgd-published") == (1e-9, 1e-8)
    assert settings.model_of("lstm-adam") == ("lstm", {"hidden": 3, "start": "orthogonal"})


def test_grids_of_methods_that_do_not_run_may_have_any_number_of_rates() -> None:
    own = {"path-sgd-published": [1e-9, 1e-8], "adam": [0.1, 0.2, 0.3]}
    options = {"methods": ["sgd", "adam"], "learning_rates": [0.1, 0.2, 0.3], "method_rates": own}
    settings = asked(options)
    assert settings.rates_of("adam") == (0.1, 0.2, 0.3)
    says = (
        r"has a grid of 2 for 'path-sgd-published', and learning_rates one of 3: give as many, such as "
        r"`--set 'method_rates.path-sgd-published=\[1e-09, 1e-08, ...\]'`, or leave the method out by --methods.$"
    )
    with pytest.raises(ConfigurationError, match=says):
        asked({**options, "methods": ["sgd", "path-sgd-published"]})


def test_what_a_grid_of_its_own_is_refused_with_can_be_typed() -> None:
    layers = [
        *load_recipe("adding").layers("long-400"),
        ("the command line", {"learning_rates": [0.01]}),
    ]
    with pytest.raises(
        ConfigurationError, match=r"a grid of 5 .* learning_rates one of 1:"
    ) as refused:
        settings_from(*layers)
    option, given = shlex.split(str(refused.value).split("`")[1])
    assert option == "--set"
    settings = settings_from(*layers, ("the command line", parse_settings([given])))
    assert settings.rates_of("path-sgd-published") == (1e-7,)


@pytest.mark.parametrize("size", ["paper-ptb", "paper-text8"])
def test_the_paper_s_lstm_on_characters_has_half_the_units(size: str) -> None:
    settings = settings_from(*load_recipe("char-lm").layers(size))
    hidden = {name: settings.model_of(name)[1]["hidden"] for name in settings.methods}
    assert hidden.pop("lstm-adam") == 1024
    assert set(hidden.values()) == {2048}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method_options": {"lstm": {}}}, "Unknown method 'lstm' in the setting 'method_options'"),
        (
            {"task": "characters", "model": "transformer", "methods": ["sgd", "g-sgd"]},
            "The method 'g-sgd' cannot train the model 'transformer': it multiplies activations, so that its outputs "
            "are no sums over paths. Choose another method, or set model to one that it can train: relu-rnn, mlp.$",
        ),
        (
            {"method_options": {"adam": 3}},
            "'method_options.adam' is 3: give a table",
        ),
        ({"method_options": {"sgd": {"start": "zero"}}}, "Unknown value 'zero'"),
        ({"method_rates": 3}, "The setting 'method_rates' is 3: give a table"),
        ({"method_rates": {"lstm": [0.1]}}, "Unknown method 'lstm' in the setting 'method_rates'"),
        (
            {"method_rates": {"sgd": [0.1]}},
            r"'method_rates' has a grid of 1 for 'sgd', and learning_rates one of \d+: give as many",
        ),
        ({"method_rates": {"sgd": 0.1}}, "'method_rates.sgd' is 0.1: give a list"),
        (
            {"learning_rates": [0.1], "method_rates": {"adam": [-1]}},
            "'method_rates.adam' is .*give more than 0 each",
        ),
        ({"epoch": 3}, "Unknown setting 'epoch' in a test: choose from task, task_options"),
        ({"epochs": 0}, "'epochs' is 0: give 1 or more"),
        ({"seeds": 2.0}, "'seeds' is 2.0: give a whole number"),
        ({"threads": True}, "'threads' is True: give a whole number"),
        ({"momentum": 1.0}, "'momentum' is 1.0: give less than 1"),
        ({"clip_norm": -1}, "'clip_norm' is -1: give 0 or more"),
        ({"learning_rates": []}, "give at least one"),
        ({"learning_rates": [0.1, -1]}, "give more than 0 each"),
        ({"learning_rates": 0.1}, "give a list"),
        ({"learning_rates": ["fast"]}, "give a number each"),
        (
            {"learning_rates": [0.1, 1e300]},
            r"'learning_rates' is \[0.1, 1e\+300\]: give at most 1e\+30 each",
        ),
        ({"weight_decays": [1e300]}, r"at most 1e\+30 each"),
        ({"damping": 1e300}, r"'damping' is 1e\+300: give at most 1e\+30"),
        *(
            ({name: 10**400}, f"'{name}' is 10*: give")
            for name in ("epochs", "tuning_epochs", "rescale_factor")
        ),
        ({"methods": ["sgd", "sgd"]}, "each one once"),
        # two runs of one configuration would write to one folder at a time
        ({"learning_rates": [0.1, 0.3, 0.1]}, "each one once"),
        ({"weight_decays": [0.0, 0.0]}, "each one once"),
        ({"methods": ["lion"]}, "Unknown method 'lion'"),
        ({"starts": ["somewhere"]}, "Unknown start 'somewhere' in the setting 'starts'"),
        ({"starts": []}, "at least one"),
        ({"weight_decays": [-0.1]}, "give 0 or more each"),
        ({"weight_decays": 0.1}, "give a list"),
        ({"schedule": "linear"}, "Unknown schedule 'linear'"),
        ({"warmup": 1.0}, "'warmup' is 1.0: give less than 1"),
        (
            {"tuning": "random"},
            "'tuning' is 'random': give 'grid', 'one standard error' or 'in turn'",
        ),
        ({"tuning_epochs": -1}, "'tuning_epochs' is -1: give 0 or more"),
        ({"refresh_every": 0}, "'refresh_every' is 0: give 1 or more"),
        ({"rescale_factor": 0.5}, "'rescale_factor' is 0.5: give 0, or 1 or more"),
        ({"baselines": ["soap"]}, "give some of the methods"),
        ({"task": "chess"}, "Unknown task 'chess'"),
        ({"task": 3}, "give the name of one task"),
        ({"task_options": 3}, "give a table"),
        ({"model": "perceptron"}, "Unknown model 'perceptron'"),
        (
            {"methods": ["batch-norm"], "model": "mlp", "batch_size": 1},
            "'batch-norm' takes the variance of a batch, and the batch size is 1: give 2 or more",
        ),
        (
            {"methods": ["batch-norm"]},
            "'batch-norm' cannot train the model 'relu-rnn': only the nodes of .* one that it can train: mlp.$",
        ),
        (
            {"task": "images", "model": "recurrent-cnn", "methods": ["ddp-norm"]},
            "'ddp-norm' cannot train the model 'recurrent-cnn': .* by a batch. Choose another method.$",
        ),
        *(
            (
                {"model_options": option},
                "of the task 'digits' are numbers, answered at their end: leave out",
            )
            for option in ({"output": "every"}, {"embedding": 3})
        ),
        ({"model_options": {"hidden": 0}}, "option 'hidden' of the model 'relu-rnn' is 0"),
        ({"model_options": {"width": 3}}, "Unknown option 'width' in model_options"),
        ({"task_options": {"width": 3}}, "Unknown option 'width' in task_options"),
        *(
            (
                {"model": model, "methods": [name]},
                f"'{name}' cannot train the model '{model}': its units cannot be rescaled. .* relu-rnn, mlp.$",
            )
            for model, name in (
                ("lstm", "path-sgd"),
                ("tanh-rnn", "g-sgd"),
                ("lstm", "balanced-adam"),
            )
        ),
        (
            {"task": "characters", "model": "transformer", "methods": ["natural"]},
            "'natural' cannot train the model 'transformer': it has no single answer for each example",
        ),
        ({"methods": ["lstm-adam"], "starts": ["balanced"]}, "set starts to .'default'."),
        (
            {
                "model": "tanh-rnn",
                "methods": ["sgd"],
                "starts": ["default"],
                "model_options": {"start": "identity"},
            },
            "Unknown value 'identity' in the option 'start' of the model 'tanh-rnn': choose from default, uniform",
        ),
        (
            {"methods": ["lstm-sgd"], "starts": ["default"], "model_options": {"width": 3}},
            "Unknown option 'width' in model_options of the model 'relu-rnn'",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        asked(change)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_refuses_what_it_needs_a_network_for_and_nothing_else(name: str) -> None:
    chosen, model = METHODS[name], build_model("lstm", 2, 3, {"hidden": 4})
    run = Settings().run_config(name, "default", 0.1, 0, evaluate_test=False)
    assert {*chosen.refuses} < {*MODELS}
    if "lstm" not in chosen.refuses:
        assert not chosen.balances_first
        assert not chosen.normalizes
        chosen.build(model, None, run)
    elif not (chosen.balances_first or chosen.normalizes):
        with pytest.raises((AttributeError, TypeError)):
            chosen.build(model, None, run).step()


def test_settings_of_the_command_line_are_written_as_in_toml() -> None:
    assignments = [
        "momentum=0.9",
        "task=mnist",
        "task_options.steps=98",
        "task_options.permuted=true",
    ]
    assert parse_settings([*assignments, 'starts=["balanced"]']) == {
        "momentum": 0.9,
        "task": "mnist",
        "task_options": {"steps": 98, "permuted": True},
        "starts": ["balanced"],
    }
    table, entry = "model_options={hidden = 3}", "model_options.layers=2"
    for both in ([table, entry], [entry, table]):
        assert parse_settings(both) == {"model_options": {"hidden": 3, "layers": 2}}
    # numbers that --search takes, too
    assert parse_settings(["momentum=.9", "damping=1.", "clip_norm=1.e-4"]) == {
        "momentum": 0.9,
        "damping": 1.0,
        "clip_norm": 1e-4,
    }
    assert parse_settings(["learning_rates=[.1, 1e-2]"]) == {"learning_rates": [0.1, 0.01]}
    assert parse_settings(["task=" + "[" * 99_999]) == {"task": "[" * 99_999}
    assert parse_settings(["task=infinity", "size= small "]) == {
        "task": "infinity",
        "size": "small",
    }
    digits = "1" * 5000  # more than Python reads as a number
    assert parse_settings([f"epochs={digits}"]) == {"epochs": digits}
    with pytest.raises(ConfigurationError, match="--set 'momentum' has no value"):
        parse_settings(["momentum"])
    with pytest.raises(ConfigurationError, match="'task_options' is given both"):
        parse_settings(["task_options=3", "task_options.steps=98"])
