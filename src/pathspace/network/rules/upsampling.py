"""Upsampling: by repetition, which moves values, or by weighing neighbours, which are fixed edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pathspace.network.reasons import SIGNED
from pathspace.network.recorder import Recorder
from pathspace.network.rules.movement import move_one


def interpolate(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``nearest`` repeats; ``linear``, ``bilinear`` and ``trilinear`` weigh, one dimension after the other."""
    if mode in ("nearest", "nearest-exact"):
        given = {"size": size, "scale_factor": scale_factor, "recompute_scale_factor": recompute_scale_factor}
        return move_one(recorder, name, func, input, **given, mode=mode)
    if mode == "bicubic" or antialias:
        recorder.refuse(
            name, f"mode '{mode}' weighs neighbours with both signs: {SIGNED}", "Use mode='bilinear'"
        )
    if mode not in ("linear", "bilinear", "trilinear"):
        recorder.refuse(name, f"mode '{mode}' is not known", "Use 'nearest', 'bilinear' or average pooling")
    given = recorder.value(input)
    if given.kind == "input":
        options = {"size": size, "scale_factor": scale_factor, "mode": mode, "align_corners": align_corners}
        options["recompute_scale_factor"] = recompute_scale_factor
        return recorder.preprocess(func, (input,), options, [given])
    x = recorder.as_units(input)
    space = x.labels.dim() - 2
    if x.batch is not None and x.batch > 1:
        recorder.wrong_batch(name)

    def of_dimension(value: Any, d: int) -> Any:
        return value[d] if isinstance(value, (tuple, list)) else value

    weights = []  # M^2 of every dimension, M [in, out] what interpolation does to unit vectors
    for d in range(space):
        units = torch.eye(x.shape[2 + d], dtype=torch.float64).unsqueeze(1)
        made = F.interpolate(
            units,
            of_dimension(size, d),
            of_dimension(scale_factor, d),
            "linear",
            align_corners,
            recompute_scale_factor,
        )
        weights.append(made.squeeze(1).square())
    channels = recorder.scales.unify_over(x.labels, (0, 1))
    shape = [*x.shape[:2], *(m.shape[1] for m in weights)]
    labels = channels.reshape(*x.shape[:2], *[1] * space).expand(shape)

    def squared(h: Tensor) -> Tensor:
        for m in weights:  # each takes the first dimension of space and puts its own last
            h = h.movedim(2, -1) @ m.to(dtype=h.dtype, device=h.device)
        return h

    out = recorder.emit(squared, [x], labels, name=name, dtype=input.dtype, batch=x.batch, kind=x.kind)
    return recorder.note_linear(out)


RULES: dict[str, Callable[..., Any]] = {"interpolate": interpolate, "upsample": interpolate}
