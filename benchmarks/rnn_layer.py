"""Time and memory of a ReLU recurrent layer relative to torch.nn.RNN, forward and backward.

Copies of one layer take turns in one process, and the speed is the median of the ratios of neighbouring passes,
torch.nn.RNN's time to ours. GFLOP/s counts the products alone, T B H (6 H + 4 D); those of the loops leave out Python
and autograd around them. The peak is what fused multiplications of the nearest cache reach right after, on the same
clock. ``--clock cpu`` counts the process's own time, which others on the machine do not count in. Prints one JSON line
per size.

    python benchmarks/rnn_layer.py --output benchmarks/results/rnn-layer-cpu.json --figure docs/images/rnn-layer.png
    python benchmarks/rnn_layer.py --instructions avx2

With ``--instructions avx2`` a child process is told so before it loads anything, PyTorch's libraries too.
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


@cache
def peak(clock: Callable[[], float]) -> Callable[[], float]:
    """A function that returns the GFLOP/s of fused multiplications that wait for no memory."""
    from numba import njit

    from pathspace.nn.kernels import compiled

    rows, terms = compiled._ROWS, 4096

    @njit(error_model="numpy")
    def loop(unit: Any, job: Any, times: int, rows: int, columns: int) -> None:
        for _ in range(times):
            compiled._do(unit, 4, job, rows, columns)

    import numpy as np

    columns = compiled._VECTORS * compiled.WIDTH // 4
    # every term reads the same numbers, from the nearest cache
    a, m, out = torch.ones(rows), torch.zeros(columns), torch.zeros(rows, columns)
    job = np.array(
        [out.data_ptr(), 4 * columns, 0, 0, 0, 0, 0, 0, 0, 1, a.data_ptr(), 4, 0, m.data_ptr(), 0, terms, 0]
    )
    loop(np.float32(1), job, 1, rows, columns)

    def measure() -> float:
        begin = clock()
        loop(np.float32(1), job, 20, rows, columns)
        return 20 * 2e-9 * terms * rows * columns / (clock() - begin)

    measure.keep = (a, m, out)  # type: ignore[attr-defined]
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


def measure(size: tuple[int, int, int, int], clock: Callable[[], float], seconds: float) -> dict[str, Any]:
    """The figures of one size."""
    H, B, T, D = size
    plain, ours = layers(size)
    theirs, mine = (paired.timed(passes(layer, size), clock, cuda=False) for layer in (plain, ours))
    top = peak(clock)
    mine()
    pairs = max(7, min(300, int(seconds / max(theirs(), 1e-4))))
    ratios, times = paired.alternate(mine, theirs, pairs)
    ours_seconds = [r * t for r, t in zip(ratios, times, strict=True)]
    rate = T * B * H * (6 * H + 4 * D) * 1e-9
    peaks = [top() for _ in range(9)]
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
        "peak_gflops": round(statistics.median(peaks), 1),
        "loops_gflops": loops and round(loops, 1),
        "loops_part_of_peak": loops and round(loops / statistics.median(peaks), 3),
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
        per_byte = [(6 * f["H"] + 4 * f["D"]) * f["H"] / (4 * (3 * f["H"] + 2 * f["D"])) for f in some]
        axes.plot(per_byte, [f["gflops"] for f in some], mark, color="C0", label=f"ps.nn.RNN, {name}")
        axes.plot(
            per_byte, [f["loops_gflops"] for f in some], mark, color="C2", label=f"its loops alone, {name}"
        )
        axes.plot(per_byte, [f["plain_gflops"] for f in some], mark, color="C1", mfc="none",
                  label=f"torch.nn.RNN, {name}")  # fmt: skip
        axes.axhline(statistics.median(f["peak_gflops"] for f in some), color="0.6", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations per byte", ylabel="GFLOP/s, one thread",
             title="Forward and backward of one layer; lines: the processor's peak")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def child(command: list[str]) -> list[dict[str, Any]]:
    """The figures that a process with AVX2 prints, which are printed here too; its errors go where ours do."""
    process = subprocess.run(command, env={**os.environ, **AVX2}, stdout=subprocess.PIPE, text=True)
    print(process.stdout, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"the measurements with AVX2 ended with status {process.returncode}; see above")
    return [json.loads(line) for line in process.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instructions", nargs="+", choices=["best", "avx2"], default=["best", "avx2"])
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--seconds", type=float, default=2.0, help="of torch.nn.RNN, for each size")
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
            figures += child(command)
            continue
        for size in SIZES:
            figures.append({**measure(size, CLOCKS[options.clock], options.seconds), "clock": options.clock})
            print(json.dumps(figures[-1]), flush=True)
    paired.write(figures, options.output)
    if options.figure is not None:
        draw(figures, options.figure)


if __name__ == "__main__":
    main()
