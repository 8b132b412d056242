"""Copies of one recurrent network with ReLU units, computed together: small matrices are slow in torch one by one.

The network is `models.ReluRNN`: h_t = relu(W_in x_t + W_rec h_{t-1} + 2 b), y = W_out h_T + b_out. Its two biases start
equal, have equal gradients and equal kappa, and so stay equal: b is each of them.

Letters: S copies, T time, B batch, D input, H hidden; h state, e = dL/d(input of the ReLU). In the squared network
(P16, Section 3): A = W_rec^2 elementwise, a what enters a unit at a step, m_t and delta_t = dG/dm_t its path masses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Parameters = dict[str, Tensor]
NAMES = ("input", "recurrent", "bias", "output", "output bias")
COUNTS = {"bias": 2}  # how often a tensor is in the network
_mask = torch.ops.aten.threshold_backward.grad_input


def starts(seeds: Sequence[int], hidden: int) -> Parameters:
    """Return the identity start of every seed, with PyTorch's own input and output weights.

    Returns:
        By name: input (S, H, D), recurrent (S, H, H), bias (S, H), output (S, 1, H), output bias (S, 1).
    """
    from pathspace.experiments.models import ReluRNN

    found = []
    for seed in seeds:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            found.append(ReluRNN(2, 1, hidden=hidden, start="identity-recurrent"))
    layers = [(model.rnn, model.readout) for model in found]
    columns = (
        [rnn.weight_ih_l0 for rnn, _ in layers],
        [rnn.weight_hh_l0 for rnn, _ in layers],
        [rnn.bias_ih_l0 for rnn, _ in layers],
        [readout.weight for _, readout in layers],
        [readout.bias for _, readout in layers],
    )
    with torch.no_grad():
        return {name: torch.stack(column) for name, column in zip(NAMES, columns, strict=True)}  # type: ignore[arg-type]


def taken(parameters: Parameters, index: Tensor) -> Parameters:
    """Return some of the copies."""
    return {name: p[index].contiguous() for name, p in parameters.items()}


def states(p: Parameters, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """Run all copies.

    Args:
        p: The parameters.
        x: Inputs with a one behind them, (T, S, B, D + 1).
        memory: Where the result goes.

    Returns:
        h_t, (T, S, B, H).
    """
    entering = torch.cat((p["input"], 2 * p["bias"][:, :, None]), 2).mT.contiguous()
    across = p["recurrent"].mT.contiguous()
    h = torch.matmul(x, entering, out=memory)
    before = h[0].relu_()
    for present in h.unbind()[1:]:
        before = present.baddbmm_(before, across).relu_()
    return h


def errors(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of every copy, (S,), on inputs (T, S, B, D + 1) with targets (S, B)."""
    return (_answers(p, states(p, x)[-1]) - y).square().mean(1)


def loss_and_gradients(
    p: Parameters, x: Tensor, y: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Parameters]:
    """Return the mean squared error of every copy, (S,), and its gradient by every parameter, written out by hand.

    Args:
        p: The parameters.
        x: Inputs with a one behind them, (T, S, B, D + 1).
        y: Targets, (S, B).
        memory: 2 T S B H numbers to work in: fresh pages for every step cost a fifth of it.
    """
    T, S, B, H = (*x.shape[:3], p["bias"].shape[1])
    space = x.new_empty(2 * T * S * B * H) if memory is None else memory
    h, e = space.view(2, T, S, B, H)
    h = states(p, x, h)
    wrong = _answers(p, h[-1]) - y
    out = (wrong * (2 / B))[:, None]  # dL/dy, (S, 1, B)
    recurrent = torch.zeros_like(p["recurrent"])
    backward = out.mT @ p["output"]
    for t in range(T - 1, -1, -1):
        _mask(backward, h[t], 0, grad_input=e[t])
        if t:
            recurrent.baddbmm_(e[t].mT, h[t - 1])
            torch.bmm(e[t], p["recurrent"], out=backward)
    entering = (e.mT @ x).sum(0)
    return wrong.square().mean(1), {
        "input": entering[:, :, :-1],
        "recurrent": recurrent,
        "bias": entering[:, :, -1],
        "output": out @ h[-1],
        "output bias": out.sum(2),
    }


def _answers(p: Parameters, last: Tensor) -> Tensor:
    return (p["output"] @ last.mT)[:, 0] + p["output bias"]


def path_masses(p: Parameters, length: int, entering: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return m_t and delta_t for t = 1..T, float64, (S, H, T) each; `entering` is how much of what enters units counts.

    .. code-block:: text

        m_t = a + A m_{t-1}          a = sum over inputs of W_in^2, and the squares of both biases
        delta_t = A^T delta_{t+1}    delta_T = W_out^2: only the last step is read
    """
    q = {name: v.double().square() for name, v in p.items()}
    across = entering * q["recurrent"]
    a = entering * (q["input"].sum(2) + 2 * q["bias"])[:, :, None]
    m, delta, back = [a], [q["output"].mT], across.mT
    for _ in range(length - 1):
        m.append(torch.baddbmm(a, across, m[-1]))
        delta.append(back @ delta[-1])
    return torch.cat(m, 2), torch.cat(delta[::-1], 2)


def kappa(p: Parameters, length: int) -> Parameters:
    """Return kappa1 of every parameter, float64, with its shape (P16 Section 3)."""
    m, delta = path_masses(p, length)
    leaving = delta.sum(2)
    return {
        "input": leaving[:, :, None].expand(p["input"].shape),
        "recurrent": delta[:, :, 1:] @ m[:, :, :-1].mT,
        "bias": leaving,
        "output": m[:, :, -1][:, None],
        "output bias": torch.ones_like(p["output bias"], dtype=torch.float64),
    }


def balanced(p: Parameters, length: int) -> Parameters:
    """Return the same functions, with as much path mass into every unit as out of it: `ps.rescaling.balance_`."""
    m, delta = path_masses(p, length, entering=0.5)  # of what enters a unit half is counted
    s = (delta.sum(2) / m.sum(2)).pow(0.25).to(p["bias"].dtype)
    return {
        "input": p["input"] * s[:, :, None],
        "recurrent": p["recurrent"] * s[:, :, None] / s[:, None],
        "bias": p["bias"] * s,
        "output": p["output"] / s[:, None],
        "output bias": p["output bias"],
    }
