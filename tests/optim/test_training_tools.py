"""The optimizers beside what else PyTorch has for training: each tool works, and invariance stays what it was."""

import copy
import functools
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pathspace as ps
from cases import Recurrent, mlp

OPTIONS = {
    "PathSGD": {"lr": 0.05, "momentum": 0.9},
    "PathAdam": {"lr": 0.01},
    "PathSOAP": {"lr": 0.01, "precondition_frequency": 3, "eps": 1e-6},
    "PathMuon": {"lr": 0.01},
    "GSGD": {"lr": 0.05, "momentum": 0.9},
    "GAdam": {"lr": 0.01},
}
ALL = pytest.mark.parametrize("name", OPTIONS)
FACTORS = 2.0 ** torch.randint(-4, 5, (20,), generator=torch.Generator().manual_seed(0)).double()


def batch(i=0):
    generator = torch.Generator().manual_seed(i % 4)
    return torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)


@functools.cache
def traced(dtype):
    torch.manual_seed(0)
    model = mlp(4, 12, 8, 3).to(dtype)
    return model, ps.trace(model, torch.zeros(1, 4, dtype=dtype))


class Training:
    """A model, its network, its optimizer, from the given start or from a rescaling of it."""

    def __init__(self, name, factors=None, dtype=torch.float32, **options):
        self.model, self.network = copy.deepcopy(traced(dtype))
        torch.manual_seed(0)
        if factors is not None:
            ps.rescaling.rescale_(self.network, factors)
        options = {**OPTIONS[name], **options}
        self.optimizer = getattr(ps.optim, name)(self.model.parameters(), self.network, **options)
        self.outputs = []

    def loss(self, i=0, run=None):
        x, y = batch(i)
        output = (run or self.model)(x.to(next(self.model.parameters()).dtype))
        self.outputs.append(output.detach().float())
        return functional.cross_entropy(output.float(), y)

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def plain(self, steps=12):
        for i in range(steps):
            self.optimizer.zero_grad()
            self.loss(i).backward()
            self.optimizer.step()
        return self


def same_from_both_starts(name, train, **options):
    """Train both; their outputs must be bitwise the same along the way, finite, and move."""
    runs = [Training(name, factors, **options) for factors in (None, FACTORS)]
    for run in runs:
        train(run)
    ours, theirs = (torch.stack(run.outputs) for run in runs)
    assert torch.isfinite(ours).all()
    assert (ours[0] - ours[-1]).abs().max() > 0.01
    return torch.equal(ours, theirs)


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@ALL
def test_autocast_to_bfloat16(name):
    def train(run):
        for i in range(12):
            run.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run.loss(i)
            loss.backward()
            run.optimizer.step()
        assert all(p.dtype == torch.float32 for p in run.model.parameters())

    assert same_from_both_starts(name, train)


@pytest.mark.sample(2)
@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_half_precision(name, dtype):
    def train(run):
        run.plain()
        assert all(p.dtype == dtype for p in run.model.parameters())
        assert any(
            t.dtype == torch.float32
            for state in run.optimizer.state.values()
            for t in state.values()
            if torch.is_tensor(t)
        )

    # below 6e-5 float16 has fewer digits, so there powers of two do round
    assert same_from_both_starts(name, train, dtype=dtype) or dtype == torch.float16


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "clip"),
    [("PathSGD", "clip_norm"), ("PathSGD", "clip_step"), ("QuasiDiagonal", "clip_norm")],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_directions_that_float16_does_not_hold_are_clipped_in_a_type_that_does(
    name, clip, momentum
):
    moved = []
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        model, x = mlp(4, 6, 3), torch.randn(8, 4).to(dtype)
        # next to no path leaves a unit: 1 / D is as large as damping lets it be
        with torch.no_grad():
            model[2].weight[:, 0] = 1e-4
        model = model.to(dtype)
        options = {"lr": 0.1, "momentum": momentum, "damping": 1e-4, clip: 1.0}
        optimizer = getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), **options)
        before = [p.detach().clone() for p in model.parameters()]
        model(x)  # which QuasiDiagonal sees
        for p in model.parameters():
            p.grad = torch.full_like(p, 100.0, requires_grad=False)
        optimizer.step()
        moved.append(
            [(p.detach() - old).float() for p, old in zip(model.parameters(), before, strict=True)]
        )
    assert_close(*moved, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("name", ["PathSGD", "PathGradientAdam"])
def test_gradients_whose_square_float16_does_not_hold_are_clipped_and_not_lost(name):
    moved = []
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        model = mlp(4, 6, 3).to(dtype)
        network = ps.trace(model, torch.zeros(1, 4, dtype=dtype))
        optimizer = getattr(ps.optim, name)(model.parameters(), network, lr=0.1, clip_norm=1.0)
        before = model[2].weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.full_like(p, 300.0, requires_grad=False)
        optimizer.step()
        moved.append((model[2].weight.detach() - before).float())
    assert_close(*moved, rtol=0.02, atol=1e-3)


@ALL
@pytest.mark.sample(3)
def test_a_step_inside_autocast_is_the_same_step(name):
    runs = [Training(name).plain(2), Training(name).plain(2)]
    runs[0].plain(4)
    for i in range(4):
        runs[1].optimizer.zero_grad()
        runs[1].loss(i).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            runs[1].optimizer.step()
    assert_close(runs[0].weights(), runs[1].weights(), rtol=0, atol=0)


@pytest.mark.parametrize("build", [lambda: mlp(4, 5, 2), lambda: Recurrent(inputs=4, num_layers=2)])
def test_path_geometry_is_not_rounded_by_autocast(build):
    torch.manual_seed(0)
    model = build()
    example = torch.zeros(3, 2, 4)

    def everything(dtype=None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            network = ps.trace(model, example, batch_dim=1)
            # as a regularizer of a loss computed in less precision
            norm = ps.paths.squared_path_norm(network)
            kappa = ps.paths.kappa(network, second_term=True)
        return [
            norm.detach(),
            *torch.autograd.grad(norm, list(model.parameters())),
            *kappa.values(),
        ]

    assert_close(everything(torch.bfloat16), everything(), rtol=0, atol=0)


@ALL
@pytest.mark.sample(3)
def test_grad_scaler_scales_back_and_skips_what_overflowed(name):
    scaled, plain = Training(name), Training(name).plain(5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    for i in range(5):
        scaled.optimizer.zero_grad()
        scaler.scale(scaled.loss(i)).backward()
        scaler.step(scaled.optimizer)
        scaler.update()
    # a power of two: nothing was rounded
    assert_close(scaled.weights(), plain.weights(), rtol=0, atol=0)

    weights, state = scaled.weights(), copy.deepcopy(scaled.optimizer.state_dict())
    scaled.optimizer.zero_grad()
    scaler.scale(scaled.loss()).backward()
    next(scaled.model.parameters()).grad[0, 0] = torch.inf
    scaler.step(scaled.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert_close(scaled.weights(), weights, rtol=0, atol=0)
    assert_close(scaled.optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


@pytest.mark.sample(2)
@ALL
def test_grad_scaler_with_autocast_to_float16_and_unscaled_gradients(name):
    run = Training(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    before, skipped = run.weights(), 0
    for i in range(40):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.loss(i)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        norm = clip_grad_norm_(run.model.parameters(), 1.0)
        old = scaler.get_scale()
        scaler.step(run.optimizer)
        scaler.update()
        skipped += scaler.get_scale() < old
        assert torch.isfinite(norm) or scaler.get_scale() < old
    assert 5 < skipped < 39
    assert all(torch.isfinite(p).all() for p in run.weights())
    assert not any(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@ALL
def test_gradients_may_be_accumulated(name):
    def train(run):
        for i in range(8):
            run.optimizer.zero_grad()
            for part in range(3):
                (run.loss(3 * i + part) / 3).backward()
            run.optimizer.step()

    assert same_from_both_starts(name, train)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "foreach"), [(n, bool(i % 2)) for i, n in enumerate(OPTIONS)])
@pytest.mark.filterwarnings("ignore:.* different gradients of the same norm")
def test_clipping_the_plain_norm_breaks_what_the_invariant_clip_keeps(name, foreach):
    def clipped(run):
        for i in range(12):
            run.optimizer.zero_grad()
            run.loss(i).backward()
            clip_grad_norm_(run.model.parameters(), 0.05, foreach=foreach)
            run.optimizer.step()

    assert not same_from_both_starts(name, clipped)
    assert same_from_both_starts(name, Training.plain, clip_norm=0.05)
    assert not torch.equal(
        torch.stack(Training(name, clip_norm=0.05).plain().outputs),
        torch.stack(Training(name).plain().outputs),
    )


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant, sequential):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = mlp(4, 6, 5), nn.Linear(5, 3)
        self.use_reentrant, self.sequential, self.used = use_reentrant, sequential, True

    def forward(self, x):
        if not self.used:
            x = self.body(x)
        elif self.sequential:
            x = checkpoint_sequential(self.body, 2, x, use_reentrant=self.use_reentrant)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return self.head(x.relu())


@pytest.mark.sample(3)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("name", "sequential"), [(n, bool(i % 2)) for i, n in enumerate(OPTIONS)])
def test_checkpointing_changes_nothing(name, use_reentrant, sequential):
    ends = []
    for used in (True, False):
        model = Checkpointed(use_reentrant=use_reentrant, sequential=sequential)
        model.used = used
        network = ps.trace(model, torch.zeros(1, 4))
        assert (network.num_classes, network.outside) == (11, ())
        optimizer = getattr(ps.optim, name)(model.parameters(), network, **OPTIONS[name])
        for i in range(4):
            optimizer.zero_grad()
            x, y = batch(i)
            functional.cross_entropy(model(x.requires_grad_()), y).backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert_close(ends[0], ends[1], rtol=0, atol=0)


# --- schedules and averages -----------------------------------------------------------------------


def _halved(i):
    return 0.5**i


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.LambdaLR(o, _halved)],
        milestones=[3],
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "scheduler"),
    [(n, s) for i, n in enumerate(OPTIONS) for j, s in enumerate(SCHEDULERS) if (i + j) % 2 == 0],
)
def test_schedulers(name, scheduler):
    rates = []

    def train(run):
        schedule = SCHEDULERS[scheduler](run.optimizer)
        for i in range(12):
            run.optimizer.zero_grad()
            loss = run.loss(i)
            loss.backward()
            run.optimizer.step()
            rates.append(run.optimizer.param_groups[0]["lr"])
            schedule.step(*([float(i)] if scheduler == "plateau" else []))

    assert same_from_both_starts(name, train)
    assert len(set(rates)) > 3


@ALL
@pytest.mark.sample(3)
def test_the_rate_of_a_schedule_is_the_rate_of_the_step(name):
    run = Training(name).plain(3)
    weights = run.weights()
    schedule = lr_scheduler.LambdaLR(run.optimizer, lambda _: 0.0)
    run.plain(2)
    assert_close(run.weights(), weights, rtol=0, atol=0)
    schedule.lr_lambdas = [lambda _: 1.0]
    schedule.step()
    assert any(not torch.equal(a, b) for a, b in zip(run.plain(1).weights(), weights, strict=True))


@pytest.mark.sample(2)
@ALL
def test_an_average_of_weights_does_not_see_the_scale(name):
    """Weights are averaged at fixed factors, so the average is rescaled like them."""
    averages = []

    def train(run):
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        for i in range(12):
            run.optimizer.zero_grad()
            run.loss(i).backward()
            run.optimizer.step()
            average.update_parameters(run.model)
        averages.append(average)

    assert same_from_both_starts(name, train)
    x, _ = batch()
    ours, theirs = (average(x) for average in averages)
    assert torch.equal(ours, theirs)
    network = ps.trace(averages[0], x)  # a model like any other
    assert set(ps.paths.kappa(network)) == {
        f"module.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")
    }


@ALL
@pytest.mark.sample(3)
def test_hooks_and_tensor_rates(name):
    seen = []
    run, other = Training(name, lr=torch.tensor(0.01)), Training(name, lr=0.01)
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run.plain(2), other.plain(2)
    assert seen == ["before", "after"] * 2
    assert_close(run.weights(), other.weights())


# --- torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    # torch's own compiler warns of things that are none of ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


class CompiledForward(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return self.inner(x)


def _in_place(model):
    model.compile(backend="aot_eager")
    return model


def _parts(model):
    model[2] = torch.compile(model[2], backend="aot_eager")
    model[0].compile(backend="aot_eager")
    return model


COMPILED = {
    "wrapped": lambda model: torch.compile(model, backend="aot_eager"),
    "in place": _in_place,
    "parts": _parts,
    "function": CompiledForward,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_are_traced_as_what_they_compile(how, called):
    torch.manual_seed(0)
    model = mlp(4, 12, 8, 3)
    plain, parameters = copy.deepcopy(model), list(model.parameters())
    compiled = COMPILED[how](model)
    x, _ = batch()
    if called:
        compiled(x)
    network = ps.trace(compiled, x)
    assert [id(p) for p in network.parameters.values()] == [id(p) for p in parameters]
    kappa = ps.paths.kappa(ps.trace(plain, x))
    assert_close(list(ps.paths.kappa(network).values()), list(kappa.values()), rtol=0, atol=0)


@pytest.mark.sample(1)
@ALL
@pytest.mark.usefixtures("fresh_compiler")
def test_training_a_compiled_model(name):
    def train(run):
        compiled = torch.compile(run.model, backend="aot_eager")
        for i in range(12):
            run.optimizer.zero_grad()
            run.loss(i, run=compiled).backward()
            run.optimizer.step()

    assert same_from_both_starts(name, train)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_training_with_inductor():
    def train(run):
        compiled = torch.compile(run.model)
        try:
            compiled(batch()[0])
        except Exception as error:
            pytest.skip(f"no working compiler: {type(error).__name__}")
        for i in range(12):
            run.optimizer.zero_grad()
            run.loss(i, run=compiled).backward()
            run.optimizer.step()

    assert same_from_both_starts("PathSGD", train)


# --- data parallelism -----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "GSGD"])
def test_replicas_of_data_parallel_training(name, tmp_path):
    """One process stands for many: the wrapper is the same, and kappa depends on the weights alone."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert_close(_weights_of_a_replica(name), Training(name).plain(3).weights(), rtol=0, atol=0)
    finally:
        # a wrapper that outlives the group ends its threads while it holds the interpreter's lock
        gc.collect()
        torch.distributed.destroy_process_group()


def _weights_of_a_replica(name):
    run = Training(name)
    replica = nn.parallel.DistributedDataParallel(run.model)
    x, _ = batch()
    network = ps.trace(replica, x)
    assert network.model is run.model
    run.optimizer = getattr(ps.optim, name)(replica.parameters(), network, **OPTIONS[name])
    for i in range(3):
        run.optimizer.zero_grad()
        run.loss(i, run=replica).backward()
        run.optimizer.step()
    return run.weights()
