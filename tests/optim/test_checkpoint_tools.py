"""States that travel by torch.distributed.checkpoint, as docs/optim.md tells it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import pathspace as ps
from cases import BY_NAME, OPTIMIZERS, slow_besides
from conformance import REGISTRY, start
from processes import in_processes

DATA = ["DDPSGD", "DDPAdam", "QuasiDiagonal"]
OPTIONS = {
    "GSGD with momentum": ("GSGD", {"momentum": 0.9}),
    "GAdam with amsgrad": ("GAdam", {"amsgrad": True}),
    "PathSGD with momentum": ("PathSGD", {"momentum": 0.9}),
    "Invariant": ("Invariant", {"rule": torch.optim.NAdam}),
    "Invariant of SGD": ("Invariant", {"rule": torch.optim.SGD}),
}
EVERY = sorted({*OPTIMIZERS, *OPTIONS})
OF_EACH_KIND = ["PathSGD with momentum", "Invariant", "PathSOAP", "GAdam with amsgrad", "DDPSGD"]

# of torch, about a single process
ONE_PROCESS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def pair(name, x, weights=None):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Softsign(), nn.Linear(6, 2)
    )
    if weights is not None:
        model.load_state_dict(weights)
    kind, options = OPTIONS.get(name, (name, {}))
    network = ps.trace(model, x, outside=["4"])
    return model, getattr(ps.optim, kind)(model.parameters(), network, lr=0.01, **options)


def train(model, optimizer, x, steps=3, run=None):
    for _ in range(steps):
        optimizer.zero_grad()
        (run or model)(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def resumed(name):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model, optimizer = pair(name, x)
    train(model, optimizer, x)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resuming = pair(name, x, model.state_dict())
    if name in DATA:
        with pytest.raises(RuntimeError, match=r"has seen no batch.*observe"):
            set_optimizer_state_dict(other, resuming, saved)
        resuming.observe(x)
    set_optimizer_state_dict(other, resuming, saved)
    return train(model, optimizer, x), train(other, resuming, x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EVERY)
def test_resumes_bitwise(name):
    ours, theirs = resumed(name)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def content(pairs):
    """What is saved of several models and optimizers, or has room for it."""
    return {
        name: {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        for name, (model, optimizer) in pairs.items()
    }


def load(folder, names, x):
    """What is loaded is what a state has room for after one empty step."""
    pairs = {name: pair(name, x) for name in names}
    for name in {*DATA} & pairs.keys():
        pairs[name][1].observe(x)
    room = content(pairs)
    checkpoint.load(room, checkpoint_id=folder)
    for name, (model, optimizer) in pairs.items():
        model.load_state_dict(room[name]["model"])
        set_optimizer_state_dict(model, optimizer, room[name]["optimizer"])
    return pairs


# two processes resume all of them from disk
@pytest.mark.sample(2)
@ONE_PROCESS
@pytest.mark.parametrize("name", slow_besides(OF_EACH_KIND, EVERY))
def test_resumes_bitwise_from_disk(name, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    model, optimizer = pair(name, x)
    train(model, optimizer, x, 5)
    checkpoint.save(content({name: (model, optimizer)}), checkpoint_id=tmp_path)
    ours, theirs = train(model, optimizer, x), train(*load(tmp_path, [name], x)[name], x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def example():
    torch.manual_seed(1)
    return torch.randn(16, 4)


def trained_on(pairs, x, steps):
    """Ends of replicas that train on parts of a batch."""
    return {
        name: train(model, optimizer, x, steps, nn.parallel.DistributedDataParallel(model))
        for name, (model, optimizer) in pairs.items()
    }


def saves_on_the_way(rank, folder, names):
    part = example()[8 * rank : 8 * rank + 8]
    torch.manual_seed(0)
    pairs = {name: pair(name, part) for name in names}
    trained_on(pairs, part, 5)
    checkpoint.save(content(pairs), checkpoint_id=folder / "of two")
    return trained_on(pairs, part, 3)


def goes_on(rank, folder, names):
    part = example()[8 * rank : 8 * rank + 8]
    return trained_on(load(folder / "of one", names, part), part, 3)


@ONE_PROCESS
@pytest.mark.parametrize(
    "names",
    [OF_EACH_KIND, pytest.param(EVERY, marks=pytest.mark.slow)],
    ids=["of each kind", "all"],
)
def test_two_processes_to_one_and_back(tmp_path, names):
    """To the last bit."""
    straight = in_processes(2, saves_on_the_way, tmp_path, names)
    pairs = load(tmp_path / "of two", names, example())
    checkpoint.save(content(pairs), checkpoint_id=tmp_path / "of one")
    resumed = in_processes(2, goes_on, tmp_path, names)
    for name in names:
        ends = [ends[name] for ends in straight + resumed]
        assert all(all(map(torch.equal, ends[0], end)) for end in ends[1:]), name


# --- before the first step
#
# The tools take a step of rate 0 along gradients of 0 then, to see what a state will hold.

FULL = [entry for entry in REGISTRY if entry.is_plain or entry.name.endswith("everything")]
ENTRIES = pytest.mark.parametrize(
    "entry",
    slow_besides([e for e in REGISTRY if e in FULL or e.kind == "Invariant"], REGISTRY),
    ids=str,
)


def fresh(entry):
    run = start(entry, BY_NAME["mlp"])
    if entry.kind in DATA:
        run.optimizer.observe(run.example())
    return run


def save_early(run):
    return copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer))


def alike(ours, theirs):
    assert all(map(torch.equal, ours.outputs, theirs.outputs))
    assert ours.weights().keys() == theirs.weights().keys()
    assert all(torch.equal(w, theirs.weights()[name]) for name, w in ours.weights().items())


@pytest.mark.sample(3)
@ENTRIES
def test_a_state_that_is_asked_for_before_the_first_step_changes_no_training(entry):
    run, other = fresh(entry), fresh(entry)
    assert save_early(other)["state"]
    run.advance(12)
    other.advance(12)
    alike(run, other)


@pytest.mark.sample(4)
@ENTRIES
def test_a_network_may_be_rescaled_after_it(entry):
    runs = []
    for early in (False, True):
        run = fresh(entry)
        if early:
            save_early(run)
        factors = 2.0 ** (torch.arange(run.network.num_classes) % 5 - 2)
        ps.rescaling.rescale_(run.network, factors)
        runs.append(run.advance(6))
    alike(*runs)


@pytest.mark.sample(3)
@ENTRIES
@pytest.mark.parametrize("left_over", [False, True])
def test_a_state_of_no_steps_is_loaded_as_one(entry, left_over):
    """With gradients left over, nothing is saved but options, which is all there is."""
    run = fresh(entry)
    if left_over:
        run.gradients()
        run.outputs.clear()
    saved = save_early(run)
    other = fresh(entry)
    set_optimizer_state_dict(other.model, other.optimizer, saved)
    ps.rescaling.rescale_(other.network, torch.full((other.network.num_classes,), 2.0))
    ps.rescaling.rescale_(other.network, torch.full((other.network.num_classes,), 0.5))
    alike(run.advance(6), other.advance(6))


@pytest.mark.sample(4)
@ONE_PROCESS
@ENTRIES
def test_with_gradients_left_over_nothing_is_lost_without_a_word(entry, tmp_path):
    run = fresh(entry).advance(3)
    checkpoint.save(
        {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}, checkpoint_id=tmp_path
    )
    other = fresh(entry)
    other.model.load_state_dict(run.model.state_dict())
    other.steps = run.steps
    other.gradients()
    other.outputs.clear()
    room = {"optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
    # of GSGD and GAdam with moments torch says that a key is missing
    refused = r"did not arrive|nothing of it but the options arrived.*zero_grad\(\) before|Missing key in checkpoint"
    with pytest.raises((ValueError, CheckpointException), match=refused):
        load_into(other, room, tmp_path)
    other.optimizer.zero_grad()
    room = {"optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
    load_into(other, room, tmp_path)
    run.outputs.clear()
    alike(run.advance(3), other.advance(3))


def load_into(run, room, folder):
    checkpoint.load(room, checkpoint_id=folder)
    set_optimizer_state_dict(run.model, run.optimizer, room["optimizer"])


@ENTRIES
def test_a_first_step_of_rate_zero_along_a_gradient_is_a_step(entry):
    """As with a warm-up that begins at 0: moments see its gradient, as those of plain rules do."""
    run = fresh(entry)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    before = run.weights()
    run.advance()
    if entry.name != "Invariant Rprop":  # which takes no notice of rates
        assert all(torch.equal(w, before[name]) for name, w in run.weights().items())
    assert run.optimizer._rehearsal is None


def test_optimizers_that_share_a_metric_each_ask_before_their_first_steps():
    def trained_by_two(early):
        torch.manual_seed(0)
        x = torch.randn(16, 4)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        network, metric = ps.trace(model, x), ps.metrics.Path(refresh_every=3)
        halves = [
            ps.optim.Invariant(
                model[i].parameters(), network, torch.optim.AdamW, lr=0.01, metric=metric
            )
            for i in (0, 2)
        ]
        for half in halves if early else ():
            get_optimizer_state_dict(model, half)
        ps.rescaling.rescale_(network, torch.full((network.num_classes,), 4.0))
        for _ in range(8):
            model.zero_grad()
            model(x).square().mean().backward()
            for half in halves:
                half.step()
        return list(model.parameters())

    assert all(map(torch.equal, trained_by_two(early=False), trained_by_two(early=True)))


def test_a_skeleton_that_was_chosen_before_stays():
    run = fresh(next(entry for entry in REGISTRY if entry.name == "GSGD momentum"))
    chosen = run.optimizer.choose_skeleton("cyclic")
    save_early(run)
    run.advance()
    assert run.optimizer.skeleton is chosen


def test_adagrad_begins_with_what_it_began_with():
    torch.manual_seed(0)
    ends = []
    for early in (False, True):
        torch.manual_seed(0)
        x = torch.randn(16, 4)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        rule = {"rule": torch.optim.Adagrad, "lr": 0.1, "initial_accumulator_value": 0.3}
        optimizer = ps.optim.Invariant(model.parameters(), ps.trace(model, x), **rule)
        if early:
            get_optimizer_state_dict(model, optimizer)
            model, optimizer = copy.deepcopy((model, optimizer))
        ends.append(train(model, optimizer, x))
    assert all(map(torch.equal, *ends))
