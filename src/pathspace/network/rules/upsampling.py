"""Upsampling: by repetition, which moves values, or by weighing neighbours, which are fixed edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.rules.movement import move_one
from pathspace.network.trace.recorder import Recorder
from pathspace.squared.tape import raised


def interpolate(
    recorder: Recorder,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Trace interpolation: ``nearest`` repeats, ``area`` averages, other modes weigh neighbours by dimension."""
    if mode in ("nearest", "nearest-exact"):
        sizes = {
            "size": size,
            "scale_factor": scale_factor,
            "recompute_scale_factor": recompute_scale_factor,
        }
        return move_one(recorder, input, **sizes, mode=mode)
    if mode not in ("linear", "bilinear", "trilinear", "bicubic", "area"):
        recorder.no_rule(
            f"mode '{mode}' is not known", "Use 'nearest', 'bilinear' or average pooling"
        )
    value = recorder.value(input)
    if value.kind == "input":
        options = {
            "size": size,
            "scale_factor": scale_factor,
            "mode": mode,
            "align_corners": align_corners,
        }
        options |= {"recompute_scale_factor": recompute_scale_factor, "antialias": antialias}
        return recorder.preprocess(recorder.func, (input,), options)
    if mode == "area":
        shape = recorder.func(
            torch.empty(value.shape, device="meta"), size, scale_factor, mode
        ).shape[2:]
        pool = f"adaptive_avg_pool{len(shape)}d"
        return recorder.apply(pool, getattr(F, pool), input, shape)
    x = recorder.as_units(input)
    space = x.labels.dim() - 2
    if x.batch is not None and x.batch > 1:
        recorder.wrong_batch()

    def of_dimension(value: Any, d: int) -> Any:
        return value[d] if isinstance(value, (tuple, list)) else value

    def of_units(d: int) -> Tensor:
        """Apply interpolation along a dimension to unit vectors; ``[in, out]``."""
        units = torch.eye(x.shape[2 + d], dtype=torch.float64)
        n = of_dimension(size, d)
        f = of_dimension(scale_factor, d)
        if mode != "bicubic" and not antialias:
            units = units.unsqueeze(1)
            return F.interpolate(
                units, n, f, "linear", align_corners, recompute_scale_factor
            ).squeeze(1)
        # as the rows of an image: torch's antialiasing reads wrong places of columns
        sizes = None if n is None else (1, n)
        factors = None if f is None else (1.0, f)
        units = units[:, None, None, :]
        created = F.interpolate(
            units, sizes, factors, mode, align_corners, recompute_scale_factor, antialias=antialias
        )
        return created[:, 0, 0, :]

    weights = [of_units(d) for d in range(space)]
    channels = recorder.scales.unify_over(x.labels, (0, 1))
    shape = [*x.shape[:2], *(m.shape[1] for m in weights)]
    labels = channels.reshape(*x.shape[:2], *[1] * space).expand(shape)

    def squared(h: Tensor, power: float = 2.0) -> Tensor:
        for m in weights:  # each takes the first dimension of space and puts its own last
            h = h.movedim(2, -1) @ raised(m, power).to(dtype=h.dtype, device=h.device)
        return h

    out = recorder.emit(
        squared, [x], labels, dtype=input.dtype, batch=x.batch, kind=x.kind, fixed=True
    )
    return recorder.note_linear(out)


RULES: dict[str, Callable[..., Any]] = {"interpolate": interpolate, "upsample": interpolate}
