"""Time and memory of a ReLU recurrent layer relative to torch.nn.RNN, forward and backward.

Copies of one layer take turns of a few passes in one process, as steps of one training follow each
other; the speed is the median of the ratios of neighbouring turns, torch.nn.RNN's time to ours,
without the first pass of either. That one finds the caches full of the other layer's numbers and
instructions, and has a speed of its own (--turn 1 has no other). GFLOP/s counts the products alone,
T B H (6 H + 4 D); those of the loops leave out Python and autograd around them. The peak is what
fused multiplications of registers reach right after, on the same clock, in one thread. The ceiling
is the speed of a layer whose products reach it and that costs nothing else: the rest of a pass is
left. ``--clock cpu`` counts the process's own time, which others on the machine do not count in.
Prints one JSON line per size.

    python benchmarks/rnn_layer.py --output benchmarks/results/rnn-layer-cpu.json --figure docs/images/rnn-layer.png
    python benchmarks/rnn_layer.py --instructions avx2

With ``--instructions avx2`` a child process is told so before it loads anything, PyTorch's
libraries too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import paired
import pathspace as ps

SIZES = [
    (64, 32, 100, 2), (64, 32, 400, 2), (100, 64, 28, 28), (100, 64, 784, 1), (48, 64, 50, 28),
    (112, 64, 28, 28), (128, 64, 50, 28), (256, 64, 50, 28), (512, 64, 20, 28), (16, 4, 10, 4), (64, 1, 100, 8),
]  # fmt: skip
"""H units, B sequences, T steps, D inputs."""
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx,+bmi,+bmi2,+sse4.2,+popcnt,+f16c",
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def layers(size: tuple[int, int, int, int]) -> tuple[torch.nn.RNN, ps.nn.RNN]:
    """PyTorch's layer and ours, with the same parameters."""
    H, _, _, D = size
    torch.manual_seed(0)
    plain = torch.nn.RNN(D, H, nonlinearity="relu", batch_first=True)
    ours = ps.nn.RNN(D, H, nonlinearity="relu", batch_first=True)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def passes(layer: torch.nn.RNN, size: tuple[int, int, int, int]) -> Callable[[], None]:
    """Forward and backward from the last step, as a classifier has them."""
    H, B, T, D = size
    x, weights = torch.randn(B, T, D), torch.randn(B, H)

    def run() -> None:
        layer.zero_grad()
        (layer(x)[0][:, -1] * weights).sum().backward()

    return run


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return states

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return None, *map(torch.empty_like, ctx.parameters)


class Nothing(torch.nn.RNN):
    """A layer whose states lie ready and whose gradients are any numbers: a pass without what a layer costs."""

    states: torch.Tensor

    def forward(self, *_: Any):  # type: ignore[override]
        return _Ready.apply(self.states, *self._flat_weights), None


def around(size: tuple[int, int, int, int]) -> Callable[[], None]:
    """A pass without what a layer costs."""
    H, B, T, D = size
    layer = Nothing(D, H)
    layer.states = torch.randn(T, B, H).transpose(0, 1)
    return passes(layer, size)


@cache
def peak(clock: Callable[[], float]) -> Callable[[], float]:
    """A function that returns the GFLOP/s of fused multiplications that wait for nothing."""
    from llvmlite import ir
    from numba import njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from pathspace.nn.kernels import compiled, tile

    sums, times, lanes = 12, 20000, compiled.WIDTH // 4  # more sums than are on their way at once

    @intrinsic
    def multiply(_typing: Any, numbers: Any, times: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, b: Any, _signature: Any, arguments: Any) -> Any:
            zero, whole, row = (ir.Constant(ir.IntType(64), i) for i in (0, lanes, 4 * lanes))
            block = tile.Block(b, sums, 1, False, compiled.WIDTH, whole)
            factor = block._load(arguments[0], 0)
            fma = block._function("fma", ir.FunctionType(block.vector, [block.vector] * 3))
            with cgutils.for_range(b, arguments[1]):
                for (each,) in block.sums:
                    b.store(b.call(fma, [factor, factor, b.load(each)]), each)
            block.finish(zero, zero, zero, arguments[0], row)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def loop(numbers: int, times: int) -> None:
        multiply(numbers, times)  # type: ignore[call-arg]

    room = torch.zeros(sums, lanes)
    loop(room.data_ptr(), 1)

    def measure() -> float:
        begin = clock()
        loop(room.data_ptr(), times)
        return 2e-9 * times * sums * lanes / (clock() - begin)

    return measure


def in_loops(run: Callable[[], None], clock: Callable[[], float], passes: int = 25) -> float:
    """The median of the seconds that a pass spends in the compiled loops, without Python and autograd around them."""
    from pathspace.nn.kernels import compiled

    spent, before = [0.0], (compiled.forward, compiled.backward)

    def watched(loop: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            begin = clock()
            loop(*arguments)
            spent[-1] += clock() - begin

        return call

    compiled.forward, compiled.backward = map(watched, before)
    try:
        for _ in range(passes):
            run()
            spent.append(0.0)
    finally:
        compiled.forward, compiled.backward = before
    return statistics.median(spent[:-1])


def memory(size: tuple[int, int, int, int]) -> list[int]:
    """Bytes that a forward pass keeps for the backward one, of torch.nn.RNN and of ours."""
    _, B, T, D = size
    kept = []
    for layer in layers(size):
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = layer(torch.randn(B, T, D))[0]
        kept.append(sum(seen.values()))
        del result
    return kept


def in_turn(
    run: Callable[[], None], clock: Callable[[], float], turn: int
) -> tuple[Callable[[], float], list[float]]:
    """A function that makes a turn of passes and returns the seconds of one, and those of each turn's first pass."""
    step, first = paired.timed(run, clock, cuda=False), []

    def passes() -> float:
        first.append(step())
        return statistics.median(step() for _ in range(turn - 1)) if turn > 1 else first[-1]

    return passes, first


def measure(
    size: tuple[int, int, int, int], clock: Callable[[], float], seconds: float, turn: int
) -> dict[str, Any]:
    """The figures of one size."""
    H, B, T, D = size
    plain, ours = layers(size)
    (theirs, their_first), (mine, my_first) = (
        in_turn(passes(layer, size), clock, turn) for layer in (plain, ours)
    )
    rest, _ = in_turn(around(size), clock, max(turn, 2))
    top = peak(clock)
    mine()
    pairs = max(7, min(300, int(seconds / max(turn * theirs(), 1e-4))))
    ratios, times = paired.alternate(mine, theirs, pairs)
    firsts = [t / m for t, m in zip(their_first[-pairs:], my_first[-pairs:], strict=True)]
    surroundings = statistics.median(rest() for _ in range(9))
    ours_seconds = [r * t for r, t in zip(ratios, times, strict=True)]
    rate = T * B * H * (6 * H + 4 * D) * 1e-9
    reachable = statistics.median(top() for _ in range(9))
    least = surroundings + rate / reachable / torch.get_num_threads()
    compiled = ours.kernel.startswith("compiled")  # not where torch.nn.RNN is the faster one
    loops = rate / in_loops(passes(ours, size), clock, max(5, min(25, pairs))) if compiled else None
    reached = rate / statistics.median(ours_seconds)
    speeds = sorted(1 / ratio for ratio in ratios)
    kept = memory(size)
    return {
        "benchmark": "rnn_layer", "H": H, "B": B, "T": T, "D": D, "pairs": pairs, "kernel": ours.kernel,
        "plain_milliseconds": paired.milliseconds(times), "milliseconds": paired.milliseconds(ours_seconds),
        "speed": round(statistics.median(speeds), 2),
        "quartiles": [round(speeds[len(speeds) // 4], 2), round(speeds[3 * len(speeds) // 4], 2)],
        "gflops": round(reached, 1), "plain_gflops": round(rate / statistics.median(times), 1),
        "turn": turn, "speed_of_first_pass": round(statistics.median(firsts), 2),
        "milliseconds_around": round(1e3 * surroundings, 3),
        "ceiling": round(statistics.median(times) / least, 2),
        "peak_gflops": round(reachable, 1),
        "loops_gflops": loops and round(loops, 1),
        "loops_part_of_peak": loops and round(loops / reachable, 3),
        "saved_bytes": kept[1], "plain_saved_bytes": kept[0], "threads": torch.get_num_threads(),
        **paired.versions(),
    }  # fmt: skip


def draw(figures: list[dict[str, Any]], path: Path) -> None:
    """The roofline: GFLOP/s over the operations for each byte that a pass must move."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    marks = {"AVX-512": "o", "AVX2": "s"}
    for name, mark in marks.items():
        some = [f for f in figures if f["kernel"].endswith(name) and f["loops_gflops"]]
        if not some:
            continue
        # states are written and read, inputs read twice, and matrices stay in the caches
        per_byte = [
            (6 * f["H"] + 4 * f["D"]) * f["H"] / (4 * (3 * f["H"] + 2 * f["D"])) for f in some
        ]
        axes.plot(
            per_byte, [f["gflops"] for f in some], mark, color="C0", label=f"ps.nn.RNN, {name}"
        )
        axes.plot(
            per_byte,
            [f["loops_gflops"] for f in some],
            mark,
            color="C2",
            label=f"its loops alone, {name}",
        )
        axes.plot(per_byte, [f["plain_gflops"] for f in some], mark, color="C1", mfc="none",
                  label=f"torch.nn.RNN, {name}")  # fmt: skip
        axes.axhline(statistics.median(f["peak_gflops"] for f in some), color="0.6", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations per byte", ylabel="GFLOP/s, one thread",
             title="Forward and backward of one layer; lines: the processor's peak")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def table(figures: list[dict[str, Any]]) -> str:
    """The rows of docs/rnn.md: AVX-512 where a size has it, and AVX2 beside it."""
    sizes = {}
    for f in figures:
        sizes.setdefault((f["H"], f["B"], f["T"], f["D"]), []).append(f)
    keys = ("speed", "speed_of_first_pass", "ceiling", "loops_gflops", "loops_part_of_peak")
    return "\n".join(
        f"| {', '.join(map(str, size))} | {both[0]['plain_milliseconds']:.3g} | "
        + " | ".join(str(f[key] or "\N{EN DASH}") for f in both for key in keys)
        + " |"
        for size, both in sizes.items()
    )


def child(command: list[str]) -> list[dict[str, Any]]:
    """The figures that a process with AVX2 prints, which are printed here too; its errors go where ours do."""
    process = subprocess.run(command, env={**os.environ, **AVX2}, stdout=subprocess.PIPE, text=True)
    print(process.stdout, end="", flush=True)
    if process.returncode:
        raise SystemExit(
            f"the measurements with AVX2 ended with status {process.returncode}; see above"
        )
    return [json.loads(line) for line in process.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--instructions", nargs="+", choices=["best", "avx2"], default=["best", "avx2"]
    )
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=2.0, help="of torch.nn.RNN, for each size")
    parser.add_argument(
        "--turn", type=int, default=10, help="passes of one layer that follow each other"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--figure", type=Path, help="draw the roofline into this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = []
    for instructions in options.instructions:
        if instructions == "avx2" and "NUMBA_CPU_NAME" not in os.environ:
            command = [sys.executable, __file__, "--instructions", "avx2", "--clock", options.clock]
            command += ["--seconds", str(options.seconds), "--threads", str(options.threads)]
            command += ["--turn", str(options.turn)]
            figures += child(command)
            continue
        for size in SIZES:
            measured = measure(size, CLOCKS[options.clock], options.seconds, options.turn)
            figures.append({**measured, "clock": options.clock})
            print(json.dumps(figures[-1]), flush=True)
    paired.write(figures, options.output)
    if "NUMBA_CPU_NAME" not in os.environ:
        print(table(figures), file=sys.stderr)
    if options.figure is not None:
        draw(figures, options.figure)


if __name__ == "__main__":
    main()
