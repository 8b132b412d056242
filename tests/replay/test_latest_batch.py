"""An optimizer sees the batches that its model is called with; and looking on changes nothing."""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import pathspace as ps
from cases import ZOO, call, mlp, of_each_kind, trace
from pathspace.network import UnmatchedForwardError


def made(*layers, x=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(layer() for layer in layers)).double()
        x = torch.randn(8, 3, dtype=torch.float64) if x is None else x
    return model, x


def plain():
    return made(
        lambda: nn.Linear(3, 5), nn.ReLU, lambda: nn.Linear(5, 4), nn.ReLU, lambda: nn.Linear(4, 12)
    )


def watched(model, x, **options):
    model.eval()
    network = ps.trace(model, x)
    model.train()
    return ps.optim.DDPSGD(model.parameters(), network, lr=0.05, **options)


# which cannot be followed on data
WATCHED = [case for case in ZOO if case.name != "rnn with a learned start"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", of_each_kind(WATCHED), ids=str)
def test_calls_of_every_kind_are_seen(case):
    found = []
    for look in (True, False):
        model, example = case.model(torch.float64), case.example(4, torch.float64)
        optimizer = ps.optim.DDPSGD(
            model.parameters(), trace(case, model), lr=0.05, watch=look, estimator="signs"
        )
        if not look:
            given = (example,) if isinstance(example, torch.Tensor) else example
            optimizer.observe(**given) if isinstance(given, dict) else optimizer.observe(*given)
        case.loss(call(model, example)).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_the_latest_call_with_gradients_counts():
    model, x = plain()
    last, found = torch.randn_like(x).requires_grad_(), []
    for given in (None, last, x):
        twin = copy.deepcopy(model)
        optimizer = watched(twin, x, watch=given is None)
        if given is None:
            twin(x)
            twin(input=last)
            with torch.no_grad():
                twin(x)
            copy.deepcopy(twin)(x)  # its hook does nothing
            assert not optimizer.metric._latest.inputs.kwargs[
                "input"
            ].requires_grad  # no graph is held
        else:
            optimizer.observe(given)
        for p in twin.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        found.append([p.detach() for p in twin.parameters()])
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert not torch.allclose(found[0][0], found[2][0])


@pytest.mark.parametrize("look", [True, False])
def test_activations_in_place_of_layers_that_return_views(look):
    """torch's linear layer on three dimensions, with a bias, returns a view of what it computed in two."""
    found, x = [], torch.randn(4, 6, 3, dtype=torch.float64)
    for in_place in (False, True):
        model, _ = made(lambda: nn.Linear(3, 5), nn.ReLU, lambda: nn.Linear(5, 2))
        model[1].inplace = in_place
        assert model[0](x)._is_view()
        optimizer = watched(model, x, watch=look)
        if not look:
            optimizer.observe(x)
        model(x).square().sum().backward()
        optimizer.step()
        kappa = ps.paths.data_dependent_kappa(ps.trace(model, x), x)
        found.append([kappa, *(p.detach().clone() for p in model.parameters())])
    assert bool(found[1][0]["0.weight"].any())
    assert_close(*found, rtol=1e-12, atol=1e-14)


# --- passes that differ from the evaluation form --------------------------------------------------


def frozen(model, x):
    model[0].weight.requires_grad_(False)
    return model(x)


def for_inputs(model, x):
    return model(x.clone().requires_grad_())


def in_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).double()


def backward_hook(model, x):
    model[2].register_full_backward_hook(lambda *_: None)
    return model(x)


def functional(model, x):
    return torch.func.functional_call(model, {n: p * 1 for n, p in model.named_parameters()}, (x,))


def changed_afterwards(model, x):
    return model(x)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "forward", [frozen, for_inputs, in_autocast, backward_hook, functional, changed_afterwards]
)
def test_batches_of_other_passes_are_those_that_observe_takes(forward):
    found = []
    # the gradients are those of a plain pass
    same = forward not in (
        in_autocast,
        changed_afterwards,
    )
    for look, run in (
        (True, forward),
        (False, forward),
        *([(True, nn.Module.__call__)] if same else []),
    ):
        model, x = plain()
        optimizer = watched(model, x, watch=look)
        if not look:
            optimizer.observe(x)
        run(model, x).square().mean().backward()
        if forward is changed_afterwards:
            with torch.no_grad():
                model[2].weight.mul_(2)
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert_close(found[0][1:], found[-1][1:], rtol=1e-12, atol=1e-14)  # the first may be frozen


class Shifted(nn.Module):
    """It takes the mean off its input, in place or not."""

    def __init__(self, in_place):
        super().__init__()
        self.layers, self.in_place = mlp(3, 5, 2), in_place

    def forward(self, x):
        x = x.sub_(0.5) if self.in_place else x - 0.5
        return self.layers(nn.functional.dropout(x, 0.5, self.training))


def test_a_model_that_writes_into_its_input_is_seen_with_what_it_was_given():
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model, x = Shifted(in_place).double(), torch.rand(8, 3, dtype=torch.float64)
        given, optimizer = x.clone(), watched(model, x)
        numbers = [ps.paths.data_dependent_norm(optimizer.network, x).item() for _ in range(2)]
        assert torch.equal(x, given)
        torch.manual_seed(1)
        model(x).square().mean().backward()
        torch.manual_seed(int(in_place))  # dropout is none of what the step computes on the batch
        optimizer.step()
        found.append([*numbers, *(p.detach().clone() for p in model.parameters())])
    assert_close(found[0], found[1], rtol=0, atol=0)


# --- looking on changes nothing -------------------------------------------------------------------


class Hooked(nn.Module):
    """Counts how often gradients pass an activation, in copies too, and keeps one."""

    seen: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 12)

    def forward(self, x):
        h = torch.relu(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: self.seen.append(len(g)))
            h.retain_grad()
            self.h = h
        return self.b(h)


def test_hooks_on_activations_run_once():
    model, x = Hooked().double(), torch.randn(8, 3, dtype=torch.float64)
    optimizer, before = watched(model, x), copy.deepcopy(model.state_dict())
    model.seen.clear()
    model(x).square().mean().backward()
    assert model.seen == [8]
    optimizer.step()
    assert model.seen == [8]
    twin = copy.deepcopy(Hooked().double())
    twin.load_state_dict(before)
    twin(x).square().mean().backward()
    assert_close(model.h.grad, twin.h.grad, rtol=0, atol=0)
    assert_close(model.a.weight.grad, twin.a.weight.grad, rtol=0, atol=0)


class Draws(nn.Sequential):
    """It draws a number that it does not use."""

    def forward(self, x):
        torch.rand(1)
        return super().forward(x)


def test_gradients_and_random_state_are_those_of_a_model_nobody_looks_at():
    model, x = plain()
    model = Draws(*model)
    twin = copy.deepcopy(model)
    optimizer = watched(model, x)
    torch.manual_seed(1)
    loss = model(x).square().mean()
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    optimizer.step()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    twin(x).square().mean().backward()
    assert torch.equal(state, torch.get_rng_state())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_an_optimizer_that_goes_during_a_call_leaves_nothing_behind():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.kept = nn.Linear(3, 12), []

        def forward(self, x):
            self.kept.clear()
            gc.collect()
            return self.layer(x)

    model, x = Drops().double(), torch.randn(8, 3, dtype=torch.float64)
    model.kept.append(watched(model, x))
    gone = weakref.ref(model.kept[0])
    model(x).square().mean().backward()
    gc.collect()
    assert gone() is None
    assert not model._forward_pre_hooks


def test_two_optimizers_may_watch_one_model():
    model, x = plain()
    first, second = watched(model, x), watched(model, x)
    model(x).square().mean().backward()
    second.step()
    before = [p.detach().clone() for p in model.parameters()]
    first.step()
    assert all(bool((p != q).any()) for p, q in zip(model.parameters(), before, strict=True))


def test_calls_under_vmap_are_no_batches():
    model, x = plain()
    optimizer = watched(model, x)
    torch.func.vmap(model)(x.unsqueeze(1)).square().mean().backward()
    with pytest.raises(RuntimeError, match="observe"):
        optimizer.step()
    optimizer.observe(x)
    optimizer.step()


def test_a_watched_model_may_be_traced_by_torch_jit():
    model, x = plain()
    optimizer = watched(model, x)
    program = torch.jit.trace(model, x)  # by two calls that must have the same operations
    model(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(program(x), model(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.reentrant = mlp(3, 5, 5), nn.Linear(5, 2), reentrant

    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=self.reentrant) if self.training else self.a(x)
        return self.b(torch.relu(h))


def test_checkpointed_models_train():
    found = []
    for training in (True, False):
        torch.manual_seed(0)
        model, x = Checkpointed(False).double(), torch.randn(8, 3, dtype=torch.float64)
        optimizer = watched(model, x)
        model.train(training)
        model(x).square().mean().backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


class Always(Checkpointed):
    def forward(self, x):
        return self.b(torch.relu(checkpoint(self.a, x, use_reentrant=self.reentrant)))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU()),
        lambda: (nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(inplace=True)),
        lambda: (nn.Linear(3, 10), nn.GLU()),
    ],
)
def test_layers_whose_steps_do_not_show_may_be_checkpointed(layers):
    """The backward pass computed them once more, as one operation, and torch refused what it saved."""
    found, x = [], torch.randn(8, 3, dtype=torch.float64)
    for make in (Always, Checkpointed):  # which is so in training alone
        torch.manual_seed(0)
        model = make(False).double()
        model.a = nn.Sequential(*layers()).double()
        found.append(ps.paths.data_dependent_kappa(ps.trace(model, x), x, alpha=0.5))
    assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_changes_nothing():
    found, x = [], torch.randn(8, 3, dtype=torch.float64)
    for reentrant in (True, False):
        torch.manual_seed(0)
        model = Always(reentrant).double()
        optimizer = watched(model, x)
        model(x.clone().requires_grad_()).square().mean().backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert_close(*found, rtol=1e-12, atol=1e-14)


class Appends(nn.Module):
    """As many tensors as there are steps meet a parameter; it returns its states if it is asked to."""

    def __init__(self):
        super().__init__()
        self.read, self.last, self.out = (
            nn.Linear(3, 3),
            nn.Parameter(torch.ones(1, 1, 3)),
            nn.Linear(3, 12),
        )

    def forward(self, x, states=False):
        h = self.read(x).relu()
        made = self.out(torch.cat([*h.split(1, 1), self.last.expand(len(x), 1, 3)], 1).amax(1))
        return (made, h) if states else made


def test_a_call_of_another_length_goes_on_and_the_step_says_what_is_wrong():
    model, x = Appends(), torch.randn(5, 4, 3)
    optimizer = watched(model, x)
    assert model(torch.randn(5, 6, 3)).shape == (5, 12)
    model(torch.randn(5, 6, 3)).sum().backward()
    with pytest.raises(
        UnmatchedForwardError, match=r"'split' .* returns 7 tensors, and 5 when it was traced"
    ):
        optimizer.step()


@pytest.mark.parametrize(
    "output", [None, lambda result: result[0] if isinstance(result, tuple) else result["other"]]
)
def test_a_call_that_returns_less_goes_on_and_the_step_says_what_is_wrong(output):
    model, x = Appends(), torch.randn(5, 4, 3)
    network = ps.trace(model, {"x": x, "states": True}, output=output)
    optimizer = ps.optim.DDPSGD(model.parameters(), network, lr=0.05)
    result = model(x)
    assert result.shape == (5, 12)
    result.sum().backward()
    error, says = (
        (UnmatchedForwardError, "returned 1 tensors") if output is None else (IndexError, "indices")
    )
    with pytest.raises(error, match=says):
        optimizer.step()


def test_compiled_models_train():
    model, x = plain()
    optimizer = watched(model, x)
    compiled = torch.compile(model, backend="eager")
    compiled(x).square().mean().backward()
    optimizer.observe(x)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(bool((p != q).any()) for p, q in zip(model.parameters(), before, strict=True))
