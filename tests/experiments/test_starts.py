"""The start at which S19's Algorithm 2 begins, in runs, comparisons and recipes."""

from collections.abc import Callable

import pytest
import torch

import pathspace
from experiments.conftest import asked
from pathspace.experiments.compare import compare
from pathspace.experiments.engine import initial_state, run
from pathspace.experiments.errors import ConfigurationError
from pathspace.experiments.methods import METHODS, STARTS, move_to_start
from pathspace.experiments.models import build_model
from pathspace.experiments.recipes import load_recipe
from pathspace.experiments.report.comparison import conclusion
from pathspace.experiments.report.table import build_table
from pathspace.experiments.run import RunConfig
from pathspace.experiments.runner import Runs
from pathspace.experiments.settings import Settings, settings_from
from pathspace.experiments.tasks.task import Task

SIZES = {
    "relu-rnn": ({"hidden": 6}, (2, 4, 3)),
    "mlp": ({"hidden": 6, "layers": 3}, (2, 1, 3)),
    "recurrent-cnn": ({"maps": 4, "layers": 2}, (2, 3, 12, 12)),
    "language-model": ({"hidden": 5, "layers": 3, "embedding": 4}, None),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.sample(2)
def test_the_skeleton_is_ones_and_the_rest_as_initialised(name: str) -> None:
    options, shape = SIZES[name]
    ends = []
    for start in ("default", "skeleton-ones"):
        torch.manual_seed(0)
        model = build_model(name, 3, 3, options)
        x = torch.zeros(shape) if shape else torch.zeros(2, 4, dtype=torch.long)
        outside = ("embedding", "decoder") if name == "language-model" else ()
        network = pathspace.trace(model, x, outside=outside)
        move_to_start(network, start, seed=0, exponent=5)
        skeleton = pathspace.paths.skeleton(network, "cyclic")
        ends.append(skeleton.graph.flatten(network.parameters).detach())
    on = torch.zeros(len(ends[0]), dtype=torch.bool)
    on[skeleton.edges[skeleton.edges >= 0]] = True
    assert not skeleton.incomplete
    assert torch.equal(ends[1], torch.where(on, 1.0, ends[0]))
    assert not torch.equal(*ends)


def test_a_run_begins_there(tiny_config: Callable[..., RunConfig], tiny_task: Task) -> None:
    config = tiny_config("g-sgd-published", "skeleton-ones", 0.01)
    torch.manual_seed(0)
    state = initial_state(config, tiny_task, METHODS["g-sgd-published"])
    weights = dict(state.model.named_parameters())
    entering, leaving = weights["rnn.weight_ih_l0"], weights["readout.weight"]
    assert [entering[j, j % 2].item() for j in range(6)] == [1.0] * 6
    assert leaving.tolist() == [[1.0] * 6]
    result = run(config, tiny_task)
    assert not result.failed
    assert run(tiny_config("sgd", "skeleton-ones", 0.01), tiny_task).losses[0] == result.losses[0]


def test_models_without_a_skeleton_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="'transformer' has no skeleton: it multiplies activations"
    ):
        asked(
            {
                "task": "characters",
                "model": "transformer",
                "methods": ["sgd"],
                "starts": ["skeleton-ones"],
            }
        )
    with pytest.raises(ConfigurationError, match="whose units cannot be rescaled"):
        asked({"methods": ["lstm-adam"], "starts": ["skeleton-ones"]})


def test_tables_do_not_call_it_the_same_function(
    tiny_settings: Callable[..., Settings], tmp_path, no_pictures: None
) -> None:
    short = {"methods": ["sgd"], "learning_rates": [0.01], "epochs": 1, "seeds": 1}
    found = compare(tiny_settings(**short, starts=["skeleton-ones", "default"]), Runs(tmp_path))
    text = " ".join([*build_table(found, None).notes, *conclusion(found)])
    assert "same function" not in text
    assert "From skeleton-ones the network computes another function" in text
    one = compare(tiny_settings(**short, starts=["default", "rescaled"]), Runs(tmp_path / "b"))
    assert "Every start is the same function" in " ".join(build_table(one, None).notes)


@pytest.mark.parametrize(
    ("size", "permuted"), [("algorithm-2-28", False), ("algorithm-2-28-permuted", True)]
)
def test_the_recipe_of_algorithm_2_has_the_paper_s_protocol(size: str, permuted: bool) -> None:
    settings = settings_from(*load_recipe("smnist-28-98").layers(size))
    # S19, Section 5, 5.1 and A.1
    assert settings.learning_rates == (0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001, 0.00001)
    assert settings.task_options["standardize"] is True
    assert settings.task_options.get("permuted", False) is permuted
    assert (settings.momentum, settings.clip_norm, settings.schedule, settings.warmup) == (
        0,
        0,
        "constant",
        0,
    )
    assert (settings.epochs, settings.seeds, settings.batch_size) == (400, 3, 64)
    assert settings.model_options == {"hidden": 100}
    assert settings.starts == ("skeleton-ones",)
    assert settings.methods == ("g-sgd-published", "sgd", "g-adam-published", "adam")
    assert not settings.method_rates
    assert "skeleton-ones" in STARTS
