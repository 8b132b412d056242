"""The compiled recurrent layer against ``torch.nn.RNN``, in float64 and through everything that looks at layers."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

import pathspace as ps

pytest.importorskip("numba")
if ps.nn.RNN(1, 1, nonlinearity="relu").kernel.startswith("torch"):
    pytest.skip("no loops for this processor", allow_module_level=True)


FEWEST = ps.nn.rnn.FEWEST


@pytest.fixture(autouse=True)
def _any_number_of_steps(monkeypatch):
    monkeypatch.setattr("pathspace.nn.rnn.FEWEST", 1)


def pair(*sizes: int, **options) -> tuple[ps.nn.RNN, nn.RNN]:
    """A layer, and PyTorch's with the same parameters."""
    fast = ps.nn.RNN(*sizes, nonlinearity="relu", **options)
    plain = nn.RNN(*sizes, nonlinearity="relu", **options)
    plain.load_state_dict(fast.state_dict())
    return fast, plain


def results(layer: nn.RNN, x, hx=None, weigh=(1.0, 1.0)) -> list[torch.Tensor]:
    """States, last states, and all gradients of a weighted sum of both."""
    packed = isinstance(x, nn.utils.rnn.PackedSequence)
    data = (x.data if packed else x).detach().requires_grad_()
    start = None if hx is None else hx.detach().requires_grad_()
    x = nn.utils.rnn.PackedSequence(data, *x[1:]) if packed else data
    states, last = layer(x, start)
    states = states.data if packed else states
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        c * (v * torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype)).sum()
        for c, v in zip(weigh, (states, last), strict=True)
        if c
    )
    wanted = [data, *([] if start is None else [start]), *layer.parameters()]
    return [states.detach(), last.detach(), *torch.autograd.grad(loss, wanted)]


def agree(
    fast: nn.RNN, plain: nn.RNN, x, hx=None, weigh=(1.0, 1.0), tolerance: float = 1e-5
) -> None:
    mine, theirs = results(fast, x, hx, weigh), results(plain, x, hx, weigh)
    assert fast.kernel.startswith("compiled")
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


@pytest.mark.sample(6)
@pytest.mark.parametrize("T", [1, 2, 28])
@pytest.mark.parametrize("B", [1, 3, 17, 100, 130])
@pytest.mark.parametrize("H", [1, 3, 17, 64, 100, 130])
def test_equals_a_reference_in_float64(T, B, H):
    """Both types against PyTorch's float64, at sizes that leave every kind of rest in the blocks."""
    fast, plain = pair(3, H, dtype=torch.float64)
    x, hx = torch.randn(T, B, 3, dtype=torch.float64), torch.randn(1, B, H, dtype=torch.float64)
    agree(fast, plain, x, hx, tolerance=1e-13)
    reference = results(plain, x.float().double(), hx.float().double())
    for a, b in zip(results(fast.float(), x.float(), hx.float()), reference, strict=True):
        # the sum over T B terms of a float32 product has the error of a random walk
        assert (a - b).abs().max() <= 1e-6 * math.sqrt(T * B) * (1 + b.abs().max())


def test_equals_a_reference_over_a_thousand_steps():
    fast, plain = pair(2, 33, dtype=torch.float64)
    with torch.no_grad():
        for layer in (fast, plain):
            layer.weight_hh_l0.copy_(torch.eye(33))
    agree(fast, plain, torch.randn(1000, 5, 2, dtype=torch.float64) / 100, tolerance=1e-12)


@pytest.mark.sample(12)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("begin", [False, True])
def test_has_every_form(batch_first, bidirectional, layers, bias, begin):
    fast, plain = pair(
        5,
        9,
        layers,
        bias=bias,
        batch_first=batch_first,
        bidirectional=bidirectional,
        dtype=torch.float64,
    )
    hx = torch.randn(layers * (1 + bidirectional), 4, 9, dtype=torch.float64) if begin else None
    x = torch.randn((4, 7, 5) if batch_first else (7, 4, 5), dtype=torch.float64)
    for weigh in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        agree(fast, plain, x, hx, weigh, 1e-13)
    assert fast(x, hx)[0].stride() == plain(x, hx)[0].stride()
    agree(fast, plain, x[0], None if hx is None else hx[:, 0], tolerance=1e-13)
    sequences = [torch.randn(n, 5, dtype=torch.float64) for n in (3, 7, 1, 7)]
    agree(fast, plain, pack_sequence(sequences, enforce_sorted=False), hx, tolerance=1e-13)


def test_reads_inputs_as_they_lie():
    fast, plain = pair(6, 20, batch_first=True, dtype=torch.float64)
    base = torch.randn(11, 8, 12, dtype=torch.float64)
    for x in (base[:, :, ::2], base.transpose(0, 1)[..., :6], base[:1, :, :6].expand(5, -1, -1),
              base[:, :1, :1].expand(-1, 9, 6), base.flip(0)[1:, 2:, 3:9]):  # fmt: skip
        agree(fast, plain, x, tolerance=1e-13)
    start = torch.randn(1, 1, 20, dtype=torch.float64).expand(-1, 11, -1)
    agree(fast, plain, base[..., 6:], start, tolerance=1e-13)


def test_reads_gradients_as_they_lie():
    fast, plain = pair(2, 7, batch_first=True, dtype=torch.float64)
    x, grads = torch.randn(3, 5, 2, dtype=torch.float64), []
    for layer in (fast, plain):
        states, _ = layer(x)
        losses = [
            states.sum(),
            states[:, -1].square().sum(),
            (states.mT @ states).sum(),
            states[..., ::2].sum(),
        ]
        grads.append(
            [torch.autograd.grad(loss, layer.parameters(), retain_graph=True) for loss in losses]
        )
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "where", ["input", "state", "weight_ih_l0", "weight_hh_l0", "bias_hh_l0", "gradient"]
)
def test_lets_nan_and_infinity_through(where, value):
    fast, plain = pair(3, 19, dtype=torch.float64)
    x, hx = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(1, 5, 19, dtype=torch.float64)
    if where == "input":
        x[1, 2, 1] = value
    elif where == "state":
        hx[0, 2, 1] = value
    elif where != "gradient":
        for layer in (fast, plain):
            layer.get_parameter(where).data.flatten()[2] = value
    for start in (hx, None):
        seen = []
        for layer in (fast, plain):
            states, last = layer(x, start)
            gradient = torch.ones_like(states)
            if where == "gradient":
                gradient[2, 1, 3] = value
            seen.append([states, last, *torch.autograd.grad(states, layer.parameters(), gradient)])
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-12, atol=1e-12)


def test_powers_of_two_go_through_bitwise():
    model = nn.Sequential(ps.nn.RNN(3, 21, nonlinearity="relu", batch_first=True))
    x = torch.randn(4, 9, 3)
    network = ps.trace(model, x)
    before = model(x)[0]
    factors = torch.exp2(torch.randint(-3, 4, (21,)).float())
    layer = model[0]
    with torch.no_grad():
        layer.weight_ih_l0.mul_(factors[:, None])
        layer.weight_hh_l0.mul_(factors[:, None]).div_(factors)
        layer.bias_ih_l0.mul_(factors)
        layer.bias_hh_l0.mul_(factors)
    assert torch.equal(model(x)[0], before * factors)
    assert layer.kernel.startswith("compiled")
    assert network.num_classes == 0 or network.unit_classes


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_gradcheck_of_both_orders(options):
    D, H = (1, 2) if "num_layers" in options else (2, 3)
    fast = ps.nn.RNN(D, H, nonlinearity="relu", dtype=torch.float64, **options)
    x = torch.randn(3, 2, D, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(
        fast.num_layers * (1 + fast.bidirectional), 2, H, dtype=torch.float64, requires_grad=True
    )

    def run(x, hx, *parameters):
        named = dict(zip(dict(fast.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(fast, named, (x, hx))

    arguments = (x, hx, *fast.parameters())
    assert torch.autograd.gradcheck(run, arguments)
    assert fast.kernel.startswith("compiled")
    assert torch.autograd.gradgradcheck(run, arguments)
    packed = pack_sequence([x[:, 0], x[:2, 1]])
    second = []
    for layer in (fast, nn.RNN(D, H, nonlinearity="relu", dtype=torch.float64, **options)):
        layer.load_state_dict(fast.state_dict())
        loss = layer(packed)[0].data.square().sum()
        first = torch.autograd.grad(loss, tuple(layer.parameters()), create_graph=True)
        second.append(
            torch.autograd.grad(sum(g.square().sum() for g in first), tuple(layer.parameters()))
        )
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_what_depends_on_each_other(again):
    """First states made of the input, and one layer called twice, whose weights made its second input."""
    fast, plain = pair(3, 3, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def loss(layer):
        return layer(layer(x, x.sum(0, keepdim=True))[0])[0].square().sum()

    seen = [
        torch.autograd.grad(loss(layer), (x, *layer.parameters()), create_graph=again)
        for layer in (fast, plain)
    ]
    torch.testing.assert_close(*seen)
    assert fast.kernel.startswith("compiled")


def test_many_gradients_at_once():
    fast, plain = pair(3, 4, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    of = torch.autograd.functional
    for make in (
        of.jacobian,
        lambda run, x, **how: of.hessian(lambda x: run(x).square().sum(), x, **how),
    ):
        seen = [
            make(lambda x, layer=layer: layer(x)[1], x, vectorize=True) for layer in (fast, plain)
        ]
        torch.testing.assert_close(*seen)
    assert fast.kernel.startswith("compiled")


@pytest.mark.parametrize("batch_first", [False, True])
def test_what_is_saved_may_come_back_in_other_memory(batch_first):
    """As `torch.autograd.graph.save_on_cpu(pin_memory=True)` keeps it."""
    fast, plain = pair(3, 4, 2, dtype=torch.float64, batch_first=batch_first, bidirectional=True)
    x, seen = torch.randn(5, 3, 3, dtype=torch.float64), []
    for layer in (fast, plain):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t), lambda t: t
        ):
            states = layer(x)[0]
        weights = torch.arange(states.numel()).view(states.shape)
        seen.append(torch.autograd.grad((states * weights).sum(), tuple(layer.parameters())))
    torch.testing.assert_close(*seen)
    assert fast.kernel.startswith("compiled")


def test_parameters_that_change_type_before_the_gradient():
    fast, _ = pair(3, 4, dtype=torch.float64)
    loss = fast(torch.randn(5, 2, 3, dtype=torch.float64))[0].sum()
    fast.float()
    with pytest.raises(RuntimeError, match="changed its type or device before"):
        loss.backward()


def test_numbers_that_are_negated_when_they_are_read():
    fast, plain = pair(3, 4)
    x = torch.randn(5, 2, 3)
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(fast(negated), plain(-x))


@pytest.mark.parametrize("place", [0, 1])  # all states, or the last ones
def test_gradients_that_are_negated_when_they_are_read(place):
    fast, plain = pair(3, 1)  # one number is contiguous in any case
    slopes = []
    for layer in (fast, plain):
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(0.5)
        h = layer(torch.ones(1, 1, 3))[place]
        torch.complex(torch.zeros_like(h), h).conj().imag.sum().backward()
        slopes.append(layer.weight_ih_l0.grad)
    torch.testing.assert_close(*slopes)
    assert slopes[1].max() < 0


def test_dropout_lies_between_layers():
    fast, plain = pair(3, 8, 2, dropout=0.5)
    x, seen = torch.randn(6, 4, 3), []
    for layer in (fast, plain):
        torch.manual_seed(3)
        seen.append(layer(x)[0])
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(fast.eval()(x), plain.eval()(x))


def test_trains_as_pytorch_does():
    """A hundred steps of both from one start stay together to rounding."""
    fast, plain = pair(4, 40, batch_first=True)
    x, y = torch.randn(50, 12, 4), torch.randn(50, 40)
    losses = []
    for layer in (fast, plain):
        rule = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
        for _ in range(100):
            rule.zero_grad()
            loss = (layer(x)[0][:, -1] - y).square().mean()
            loss.backward()
            rule.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_sequences(threads):
    fast, plain = pair(40, 120, dtype=torch.float64)
    torch.set_num_threads(threads)
    try:
        agree(fast, plain, torch.randn(30, 43, 40, dtype=torch.float64), tolerance=1e-12)
        packed = pack_sequence([torch.randn(n, 40, dtype=torch.float64) for n in range(60, 10, -1)])
        agree(fast, plain, packed, tolerance=1e-12)
    finally:
        torch.set_num_threads(1)


def test_eight_threads_may_use_one_layer():
    fast, plain = pair(5, 30, dtype=torch.float64)
    inputs = [torch.randn(20, 10, 5, dtype=torch.float64) for _ in range(16)]

    def run(x):
        states, _ = fast(x)
        return states.detach(), torch.autograd.grad(states.sum(), tuple(fast.parameters()))

    with ThreadPoolExecutor(8) as pool:
        for x, (states, grads) in zip(inputs, pool.map(run, inputs), strict=True):
            expected = plain(x)[0]
            torch.testing.assert_close(states, expected.detach())
            torch.testing.assert_close(
                grads, torch.autograd.grad(expected.sum(), tuple(plain.parameters()))
            )


def _in_child(queue, layer, x):
    torch.set_num_threads(2)
    with torch.no_grad():
        queue.put(float(layer(x)[0].numpy().sum()))  # PyTorch's own threads do not survive a fork


def test_forked_workers_have_threads_of_their_own():
    fast, plain = pair(60, 100, dtype=torch.float64)
    x = torch.randn(40, 40, 60, dtype=torch.float64)
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            fast(x)  # starts the threads of this process
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            with warnings.catch_warnings():
                # Python's about threads and fork
                warnings.simplefilter("ignore", DeprecationWarning)
                worker = context.Process(target=_in_child, args=(queue, fast, x), daemon=True)
                worker.start()
            worker.join(60)
            if worker.is_alive():
                worker.kill()
            assert worker.exitcode == 0
            assert queue.get() == pytest.approx(plain(x)[0].sum().item(), rel=1e-12)
    finally:
        torch.set_num_threads(1)


def test_writes_nothing_beyond_its_matrices():
    """Numbers around the inputs, the parameters and the states are neither read nor written."""
    from pathspace.nn.kernels import compiled

    T, B, D, H, edge = 3, 7, 5, 11, 64
    import numpy as np

    def room(*shape):
        whole = torch.full((2 * edge + math.prod(shape),), math.nan)
        return whole, whole[edge:-edge].view(shape)

    shapes = {
        "x": (T, B, D), "w_in": (H, D), "w_rec": (H, H), "b": (H,), "b2": (H,),
        "h0": (B, H), "out": (T, B, H), "last": (B, H),
        "g_out": (T, B, H), "g_last": (B, H), "g_x": (T, B, D), "g_h0": (B, H), "g_in": (H, D),
        "g_rec": (H, H), "g_bias": (H,),
    }  # fmt: skip
    whole, part = {}, {}
    for name, shape in shapes.items():
        whole[name], part[name] = room(*shape)
        if name not in ("out", "last", "g_x", "g_h0", "g_in", "g_rec", "g_bias"):
            part[name].normal_()
    at = {name: tensor.data_ptr() for name, tensor in part.items()}
    w_in, w_rec = (at["w_in"], 4 * D, 4), (at["w_rec"], 4 * H, 4)
    call = (
        np.float32(1), (4, D, H), np.full(T, B), np.arange(T) * B, 0, (at["x"], 4 * B * D, 0, 4 * D, 4), w_in, w_rec,
        (at["h0"], 4 * H),
    )  # fmt: skip
    compiled.forward(call, at["b"], at["b2"], at["out"], at["last"], 0, B)
    compiled.backward(
        call, at["out"], (at["g_out"], 4 * B * H, 0, 4 * H), at["g_last"], at["g_x"], at["g_h0"], at["g_in"],
        at["g_rec"], at["g_bias"], 2, 0, B,
    )  # fmt: skip
    for name in shapes:
        assert part[name].isfinite().all(), name
        assert whole[name][:edge].isnan().all(), name
        assert whole[name][-edge:].isnan().all(), name


KEPT = """
import sys, torch
from pathspace.nn.kernels import recurrent
torch.manual_seed(0)
x, plain = torch.randn(20, 4, 2), torch.nn.RNN(2, 8, nonlinearity="relu")
w = tuple(plain.parameters())
if sys.argv[1] == "forward":
    with torch.no_grad():
        recurrent.layer(x, None, w)
else:
    ours, theirs = (
        torch.autograd.grad(states.square().sum(), w) for states in (recurrent.layer(x, None, w)[0], plain(x)[0])
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow  # compiles everything twice
def test_loops_that_several_processes_kept_go_together(tmp_path):
    """One process keeps the way forward on disk, the next one the way back, and a third takes both from there."""
    root = str(Path(ps.__file__).parents[1])
    for what in ("forward", "both", "both"):
        done = subprocess.run(
            [sys.executable, "-c", KEPT, what], capture_output=True, text=True, check=False,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": root},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_refuses_what_pytorch_refuses():
    fast, plain = pair(3, 4)
    wrong = [
        (torch.zeros(0, 2, 3), None), (torch.zeros(2, 3, 5), None), (torch.zeros(3), None),
        (torch.zeros(2, 2, 3), torch.zeros(1, 3, 4)), (torch.zeros(2, 3), torch.zeros(1, 1, 4)),
        (torch.zeros(2, 2, 3).double(), None),
    ]  # fmt: skip
    for x, hx in wrong:
        messages = []
        for layer in (fast, plain):
            with pytest.raises((ValueError, RuntimeError)) as refused:
                layer(x, hx)
            messages.append(str(refused.value))
        assert messages[0] == messages[1]


def test_tells_why_it_runs_as_pytorch(monkeypatch):
    x = torch.randn(4, 2, 3)
    assert "tanh" in ps.nn.RNN(3, 4).kernel
    assert "bfloat16" in ps.nn.RNN(3, 4, nonlinearity="relu", dtype=torch.bfloat16).kernel
    assert "meta" in ps.nn.RNN(3, 4, nonlinearity="relu", device="meta").kernel
    assert "units" in ps.nn.RNN(3, 600, nonlinearity="relu").kernel
    fast, plain = pair(3, 4)
    expected = plain(x)[0]

    def check(values, why):
        torch.testing.assert_close(values, expected, rtol=1e-2, atol=1e-2)
        assert fast.kernel.startswith("torch.nn.RNN: "), fast.kernel
        assert why in fast.kernel

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(fast(x)[0].float(), "autocast")
    torch.func.grad(lambda x: fast(x)[0].sum())(x)
    assert "torch.func" in fast.kernel
    with FlopCounterMode(display=False) as counter:
        check(fast(x)[0], "dispatch mode")
    assert counter.get_total_flops() > 0
    with torch.autograd.forward_ad.dual_level():
        check(fast(x)[0], "forward-mode")
    fast(x)
    assert fast.kernel.startswith("compiled")


def test_runs_as_pytorch_where_that_is_faster(monkeypatch):
    """With fewer than 6 steps, or more than 512 units, 256 of them with AVX2."""
    monkeypatch.setattr("pathspace.nn.rnn.FEWEST", FEWEST)
    layer = ps.nn.RNN(3, 4, nonlinearity="relu")
    packed = [pack_sequence([torch.randn(n, 3), torch.randn(2, 3)]) for n in (6, 5)]
    for long, short in ((torch.randn(6, 2, 3), torch.randn(5, 2, 3)), packed):
        layer(long)
        assert layer.kernel.startswith("compiled")
        layer(short)
        assert layer.kernel == "torch.nn.RNN: 5 steps, and PyTorch is faster below 6"
    layer(packed[0])
    largest = 512 if "AVX-512" in layer.kernel else 256
    assert ps.nn.RNN(1, largest, nonlinearity="relu").kernel.startswith("compiled")
    why = f"torch.nn.RNN: {largest + 1} units, and PyTorch is faster above {largest}"
    assert ps.nn.RNN(1, largest + 1, nonlinearity="relu").kernel == why


class Last(nn.Module):
    """A layer of PyTorch's read at its last step."""

    def __init__(self, **options):
        super().__init__()
        self.rnn = nn.RNN(3, 6, nonlinearity="relu", batch_first=True, **options)
        self.out = nn.Linear(self.rnn.hidden_size * (1 + self.rnn.bidirectional), 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_traces_and_moves_like_pytorchs(options):
    plain = Last(**options)
    fast = copy.deepcopy(plain)
    assert ps.nn.fast_(fast) == ["rnn"]
    x = torch.randn(4, 7, 3)
    networks = [ps.trace(model, x) for model in (fast, plain)]
    assert repr(networks[0]) == repr(networks[1])
    for mine, theirs in zip(*(n.unit_classes for n in networks), strict=True):
        assert mine == theirs or repr(mine) == repr(theirs)
    kappas = [ps.paths.kappa(n) for n in networks]
    for name in kappas[0]:
        assert torch.equal(kappas[0][name], kappas[1][name])
    torch.testing.assert_close(fast(x), plain(x))
    assert fast.rnn.kernel.startswith("compiled")
    for moved in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(moved(x), fast(x))
        assert type(moved.rnn) is ps.nn.RNN
    assert fast.state_dict().keys() == plain.state_dict().keys()
    with warnings.catch_warnings():
        # PyTorch's, of any nn.RNN
        warnings.filterwarnings("ignore", message="The tensor attributes")
        exported = torch.export.export(fast, (x,))
    torch.testing.assert_close(exported.module()(x), plain(x))


@pytest.mark.parametrize("name", ["PathSGD", "PathAdam", "DDPSGD", "GSGD"])
def test_optimizers_step_as_with_pytorchs(name):
    plain = Last().double()
    fast = copy.deepcopy(plain)
    ps.nn.fast_(fast)
    x = torch.randn(4, 7, 3, dtype=torch.float64)
    for model in (fast, plain):
        rule = getattr(ps.optim, name)(model.parameters(), ps.trace(model, x), lr=0.01)
        for _ in range(4):
            rule.zero_grad()
            model(x).square().mean().backward()
            rule.step()
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_fast_names_what_it_replaces():
    class Child(nn.RNN):
        pass

    shared = nn.RNN(2, 2, nonlinearity="relu")
    model = nn.ModuleDict({
        "a": shared, "b": nn.Sequential(shared, nn.RNN(2, 2, nonlinearity="relu")), "c": nn.RNN(2, 2),
        "d": Child(2, 2, nonlinearity="relu"), "e": nn.LSTM(2, 2),
    })  # fmt: skip
    parameters = list(model.parameters())
    assert ps.nn.fast_(model) == ["a", "b.1"]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert ps.nn.fast_(model) == []
    assert ps.nn.fast_(nn.RNN(2, 2, nonlinearity="relu")) == [""]


def test_compiles_as_pytorchs():
    fast, plain = pair(3, 4)
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(torch.compile(fast, backend="eager")(x), plain(x))


def test_runs_as_pytorch_without_numba(monkeypatch):
    from pathspace.nn import rnn

    fast, plain = pair(3, 4)
    x = torch.randn(4, 2, 3)
    monkeypatch.setattr(rnn, "find_spec", lambda _name: None)
    rnn._missing.cache_clear()
    try:
        assert torch.equal(fast(x)[0], plain(x)[0])
        assert "pip install -e '.[fast]' in a clone" in fast.kernel
    finally:
        rnn._missing.cache_clear()


def test_what_is_no_module_has_no_layers_to_replace():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        ps.nn.fast_([nn.RNN(2, 3, nonlinearity="relu")])  # type: ignore[arg-type]
