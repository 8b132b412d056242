"""Symbols per second of the passes over the four synthetic texts, and the ratio to a torch loop of the same passes.

A writing pass is states, output and the writing step; a transition pass is states, output,
backpropagation of gradient and modulus, the sums for the whole metric and its solution. The figure
is two texts over the time of one pass of each kind, on one thread, in float64, best of the
repetitions, in seconds of processor time, so that other users of the machine count as little as
possible. (Training is a little faster than that: a writing pass needs no new states.) The torch
loop does the same symbol by symbol, over a part of the text.

    python benchmarks/sequences.py
    python benchmarks/sequences.py --tasks xor --repetitions 9 --no-torch
    python benchmarks/sequences.py --processes 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from pathspace.sequences.graph import Graph
from pathspace.sequences.layout import Buffers
from pathspace.sequences.parameters import Parameters, start
from pathspace.sequences.passes import activities, forward, transition_direction, writing_direction
from pathspace.sequences.tasks import TASKS
from pathspace.sequences.text import Alphabet, Corpus
from pathspace.sequences.training import Settings, Training, train


@dataclass(frozen=True)
class Case:
    """A text and a network; ``target`` in symbols per second."""

    task: str
    units: int
    degree: int
    target: float


CASES = {
    "xor": Case("xor", 10, 10, 4.4e6),
    "alphabet": Case("alphabet", 64, 3, 0.5e6),
    "music": Case("music", 64, 3, 0.85e6),
    "anbn": Case("anbn", 11, 3, 4.0e6),
}


def prepare(case: Case) -> tuple[Parameters, Corpus]:
    """Return a network after four passes, so that no weight matrix is zero, and its text."""
    task = TASKS[case.task]
    text = task.generate(np.random.default_rng(0))
    alphabet = Alphabet.of([text])
    masks = None if task.mask is None else [task.mask(text)]
    corpus = Corpus.of([alphabet.encode(text)], len(alphabet), masks)
    rng = np.random.default_rng(1)
    full = case.degree == case.units
    graph = Graph.full(case.units) if full else Graph.random(case.units, case.degree, rng)
    model = start("pcnn", "tanh", graph, corpus, rng)
    return train(Training.begin(model), corpus, Settings(passes=4)).model, corpus


def writing_pass(model: Parameters, corpus: Corpus, buffers: Buffers) -> None:
    state = forward(model, corpus, activities(model, corpus, buffers), buffers)
    writing_direction(model, corpus, state)


def transition_pass(model: Parameters, corpus: Corpus, buffers: Buffers) -> None:
    state = forward(model, corpus, activities(model, corpus, buffers), buffers)
    transition_direction(model, corpus, state, "rbp", 1.0, buffers)


def best_seconds(work: Callable[[], None], repetitions: int) -> float:
    work()
    times = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def torch_passes(model: Parameters, corpus: Corpus, symbols: int) -> float:
    """Return the seconds of one pass of each kind by a loop over torch tensors, on the first symbols."""
    graph, N, A = model.graph, model.units, model.symbols
    x, chi = corpus.x[:symbols].tolist(), corpus.chi[:symbols].tolist()
    dense = np.zeros((A, N + 1, N + 1))
    dense[:, graph.sources, graph.targets] = model.tau
    tau, w = torch.from_numpy(dense), torch.from_numpy(model.w)
    widest = int(np.diff(graph.first).max())
    parents = torch.zeros(N + 1, widest, dtype=torch.long)
    exists = torch.zeros(N + 1, widest, dtype=torch.float64)
    for j in range(1, N + 1):
        into = graph.sources[graph.first[j] : graph.first[j + 1]]
        parents[j, : len(into)] = torch.from_numpy(into)
        exists[j, : len(into)] = 1.0
    eye = torch.eye(N + 1, dtype=torch.float64)
    eye[0, 0] = 0.0

    def states() -> tuple[torch.Tensor, list[torch.Tensor]]:
        V, a = torch.from_numpy(model.V0), []
        for y in [*x, 0]:
            now = torch.tanh(V)
            now[0] = 1.0
            a.append(now)
            V = V + now @ tau[y]
        a_all = torch.stack(a)
        return a_all, [torch.softmax(a[t] @ w, 0) if chi[t] else w[0] for t in range(len(x))]

    def writing() -> None:
        a, pi = states()
        W, h, h0 = (torch.zeros_like(w) for _ in range(3))
        for t, y in enumerate(x):
            if chi[t]:
                surprise = -pi[t]
                surprise[y] += 1
                spread = pi[t] * (1 - pi[t])
                W += torch.outer(a[t], surprise)
                h += torch.outer(a[t] ** 2, spread)
                h0 += torch.outer(a[t], spread)

    def transition() -> None:
        a, pi = states()
        B, m = torch.zeros(N + 1, dtype=torch.float64), torch.zeros(N + 1, dtype=torch.float64)
        G = torch.zeros(A, N + 1, widest, dtype=torch.float64)
        M = torch.zeros(A, N + 1, widest, widest, dtype=torch.float64)
        for t in range(len(x) - 1, -1, -1):
            y = x[t]
            into = a[t][parents] * exists
            G[y] += into * B[:, None]
            M[y] += into[:, :, None] * into[:, None, :] * m[:, None, None]
            slope = 1 - a[t] ** 2
            J = eye + tau[y] * slope[:, None]
            through_B, through_m = slope * (tau[y] @ B), (J**2) @ m
            if chi[t]:
                mean = w @ pi[t]
                through_B = through_B + slope * (w[:, y] - mean)
                through_m = through_m + slope**2 * ((w**2) @ pi[t] - mean**2)
            B, m = B + through_B, through_m
        damped = M + torch.eye(widest, dtype=torch.float64)
        torch.linalg.solve(damped, G)

    return best_seconds(writing, 1) + best_seconds(transition, 1)


def measure(name: str, repetitions: int, torch_symbols: int) -> dict[str, object]:
    case = CASES[name]
    with threadpool_limits(1):
        torch.set_num_threads(1)
        model, corpus = prepare(case)
        buffers = Buffers()
        T = len(corpus.x)
        writing = best_seconds(lambda: writing_pass(model, corpus, buffers), repetitions)
        transition = best_seconds(lambda: transition_pass(model, corpus, buffers), repetitions)
        rate = 2 * T / (writing + transition)
        figure: dict[str, object] = {
            "case": f"{name} N={case.units} d={case.degree}",
            "symbols": T,
            "writing_ms": round(1e3 * writing, 2),
            "transition_ms": round(1e3 * transition, 2),
            "symbols_per_second": round(rate),
            "target": round(case.target),
            "reached": bool(rate >= case.target),
        }
        if torch_symbols:
            loop = 2 * torch_symbols / torch_passes(model, corpus, torch_symbols)
            figure["torch_symbols_per_second"] = round(loop)
            figure["ratio_to_torch"] = round(rate / loop, 1)
    return figure


def _work(name: str, seconds: float, ready: Barrier, counts: Queue) -> None:
    with threadpool_limits(1):
        model, corpus = prepare(CASES[name])
        buffers, done = Buffers(), 0
        transition_pass(model, corpus, buffers)
        ready.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            writing_pass(model, corpus, buffers)
            transition_pass(model, corpus, buffers)
            done += 2 * len(corpus.x)
        counts.put(done / (time.perf_counter() - began))


def together(name: str, processes: int, seconds: float) -> float:
    """Return the symbols per second of several processes at the same time, added up."""
    context = multiprocessing.get_context("spawn")
    ready, counts = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(name, seconds, ready, counts)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    total = sum(counts.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--torch-symbols", type=int, default=2000, help="symbols of the torch loop")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument(
        "--processes", type=int, default=1, help="measure so many processes against one"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for --processes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = []
    for name in arguments.tasks:
        if arguments.processes > 1:
            # in turn, best of three each, as other users of the machine come and go
            pairs = [
                [together(name, count, arguments.seconds) for count in (1, arguments.processes)]
                for _ in range(3)
            ]
            one, several = (max(rates) for rates in zip(*pairs, strict=True))
            figure: dict[str, object] = {
                "case": name,
                "processes": arguments.processes,
                "speedup": round(several / one, 2),
            }
        else:
            figure = measure(
                name, arguments.repetitions, 0 if arguments.no_torch else arguments.torch_symbols
            )
        lines.append(json.dumps(figure))
        print(lines[-1], flush=True)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
