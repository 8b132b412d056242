"""SOAP for matrices, Adam in the eigenbasis of the averages of G G^T and G^T G, and AdamW for all other parameters.

Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, "SOAP: Improving and Stabilizing
Shampoo using Adam", 2024, with the conventions of the code that its authors published. Torch has no
SOAP. Letters: G gradient, a matrix [n, m]; L and R the averages of G G^T and G^T G; Q_L and Q_R
their eigenvectors in columns; M and V the moments, in the eigenbasis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pathspace.optim.rules.division import DividedRule, compute_in_shares, divides
from pathspace.optim.rules.moments import adam_direction, cast_state, step_decayed_
from pathspace.rescaling.optimizer_states import State

_SIDES = ("rows", "columns")
_MATRICES = tuple(f"{kind}_{side}" for kind in ("gram", "basis") for side in _SIDES)
# beside the largest entry, far below what the products of float64 matrices still hold
_NOTHING = 2.0**-80


class SOAP(DividedRule):
    """Adam in the eigenbasis of the averages of G G^T and G^T G; AdamW for parameters that are no matrices.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        betas: decay rates of the two moments; the averages decay with the second.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of every parameter, times lr.
        precondition_frequency: steps between two updates of the basis.
        max_precondition_size: sides longer than this keep the standard basis.
        maximize: ascend instead.
        process_group: processes that have the same weights and gradients, over which updates of
            bases are divided; ``"default"``: those of torch.distributed, where it is initialised;
            None: each process does all of them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        precondition_frequency: int = 10,
        max_precondition_size: int = 4096,
        maximize: bool = False,
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_size": max_precondition_size,
            "maximize": maximize,
        }
        super().__init__(params, defaults, process_group)

    def _take(self) -> None:
        self._expect_equal_once(p for group in self.param_groups for p in group["params"])
        due: list[dict[str, Any]] = []
        for group in self.param_groups:
            betas = group["betas"]
            eps = group["eps"]
            frequency = group["precondition_frequency"]
            largest = group["max_precondition_size"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if p.dim() < 2:
                    direction = adam_direction(g, state, betas, eps)
                else:
                    d = soap_direction(g.flatten(1), state, betas, eps, frequency, largest, due)
                    direction = d.reshape(p.shape)
                step_decayed_(p, direction, group)
        refresh_bases(due, self.process_group)


def soap_direction(
    G: Tensor,
    state: State,
    betas: tuple[float, float],
    eps: float,
    frequency: int,
    largest: int,
    due: list[dict[str, Any]],
) -> Tensor:
    """Take G into the averages and return the direction Q_L Adam(Q_L^T G Q_R) Q_R^T.

    The first gradient only measures the basis and gets the direction 0: in its own eigenbasis it
    would be diagonal, and Adam would magnify the rounding errors off the diagonal to the size of
    the rest.

    Args:
        G: gradient, ``[n, m]``; it is not kept.
        state: where the averages are kept: ``gram_rows`` L, ``basis_rows`` Q_L, the same for
            columns, and Adam's.
        betas: decay rates of the two moments; L and R decay with the second.
        eps: added to the root of the second moment.
        frequency: steps between two updates of the basis.
        largest: sides longer than this keep the standard basis.
        due: the state is appended if its basis is to be updated after the step.

    Returns:
        A new tensor ``[n, m]``.
    """
    # Gradients through many steps of time leave digits lost near zero. They depend on the scales of
    # the weights, and a basis of the directions that have had no gradient so far would turn on
    # them.
    G = torch.where(G.abs() < _NOTHING * G.abs().amax(), 0.0, G) if G.numel() else G
    if "step" not in state:
        for side, size in zip(_SIDES, G.shape, strict=True):
            if size <= largest:
                state[f"gram_{side}"] = G.new_zeros(size, size)
        _average_(G, state, betas[1])
        # the moments stand there from the beginning: tools that load a state ask a first step what
        # it will hold
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(G)
        state["exp_avg_sq"] = torch.zeros_like(G)
        due.append(state)
        return torch.zeros_like(G)
    cast_state(state, G.dtype, _MATRICES)
    direction = from_basis(adam_direction(to_basis(G, state), state, betas, eps), state)
    # after the step, so that a gradient never chooses the basis that it is seen in
    _average_(G, state, betas[1])
    if state["step"] % frequency == 0:
        due.append(state)
    return direction


def refresh_bases(states: Sequence[dict[str, Any]], process_group: Any = None) -> None:
    """Update the bases of parameters by the averages in their states, or find the first ones.

    Args:
        states: of the parameters.
        process_group: the processes that divide the work, if any.
    """
    jobs = [(state, side) for state in states for side in _SIDES if f"gram_{side}" in state]

    def compute(some: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [_new_basis(*jobs[job]) for job in some]

    if divides(process_group):
        results = [_room(*job) for job in jobs]
        costs = [len(state[f"gram_{side}"]) ** 3 for state, side in jobs]
        compute_in_shares(compute, costs, results, process_group)
    else:
        results = compute(range(len(jobs)))
    found = iter(results)
    for state in states:
        bases = {side: next(found) for side in _SIDES if f"gram_{side}" in state}
        _turn_(state, bases)


def _new_basis(state: Mapping[str, Any], side: str) -> tuple[Tensor, Tensor]:
    """Return the new basis of a side, and the order in which it continues the old columns."""
    P = state[f"gram_{side}"]
    Q = state.get(f"basis_{side}")
    if Q is None:
        return eigenvectors(P), torch.arange(len(P), device=P.device)
    return refined(P, Q)


def _room(state: Mapping[str, Any], side: str) -> tuple[Tensor, Tensor]:
    """Return tensors for what :func:`_new_basis` returns, in the same layout."""
    P = state[f"gram_{side}"]
    basis = torch.empty_like(P)
    order = torch.empty(len(P), dtype=torch.int64, device=P.device)
    # QR leaves column after column, and the layout decides how later products round
    return basis.mT if f"basis_{side}" in state else basis, order


def to_basis(G: Tensor, state: State) -> Tensor:
    """Q_L^T G Q_R; a side without a basis stays as it is."""
    if "basis_rows" in state:
        G = state["basis_rows"].T @ G
    return G @ state["basis_columns"] if "basis_columns" in state else G


def from_basis(G: Tensor, state: State) -> Tensor:
    """Q_L G Q_R^T."""
    if "basis_rows" in state:
        G = state["basis_rows"] @ G
    return G @ state["basis_columns"].T if "basis_columns" in state else G


def eigenvectors(P: Tensor) -> Tensor:
    """Orthonormal eigenvectors of a symmetric matrix in columns, the largest eigenvalue first."""
    # what is wrong shows in the parameters; a basis is no place to fail
    if not bool(torch.isfinite(P.sum())):
        return torch.eye(P.shape[0], dtype=P.dtype, device=P.device)
    return torch.linalg.eigh(_without_ties(P)).eigenvectors.flip(1).contiguous()


def refined(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration from the basis Q towards the eigenvectors of P, orthonormalised by QR (Algorithm 4).

    Returns:
        The new basis, and the order in which it continues the columns of Q: by decreasing q^T P q.
    """
    if not bool(torch.isfinite(P.sum())):
        return Q, torch.arange(Q.shape[1], device=Q.device)
    PQ = _without_ties(P) @ Q
    order = torch.argsort((Q * PQ).sum(0), descending=True, stable=True)
    return torch.linalg.qr(PQ[:, order]).Q, order


def _without_ties(P: Tensor) -> Tensor:
    """P with a faint slope on its diagonal: where eigenvalues are equal, rounding would choose the basis."""
    n = P.shape[0]
    slope = torch.linspace(1.0, 0.5, n, dtype=P.dtype, device=P.device)
    return P + torch.diag(slope * (P.diagonal().mean() * 1e-6))


def _average_(G: Tensor, state: State, beta: float) -> None:
    """L = beta L + (1 - beta) G G^T and R = beta R + (1 - beta) G^T G."""
    if "gram_rows" in state:
        state["gram_rows"].lerp_(G @ G.T, 1 - beta)
    if "gram_columns" in state:
        state["gram_columns"].lerp_(G.T @ G, 1 - beta)


def _turn_(state: State, bases: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Take new bases; M turns with them, V, which has no meaning beyond its basis, keeps its entries.

    Args:
        state: of a parameter.
        bases: of each side that has one: the basis, and the order in which it continues the old one.
    """
    M = from_basis(state["exp_avg"], state)
    for dim, side in enumerate(_SIDES):
        if side in bases:
            state[f"basis_{side}"], order = bases[side]
            state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
    state["exp_avg"] = to_basis(M, state)
