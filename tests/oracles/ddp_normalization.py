"""DDP-Normalization by its definition: R_v as a matrix, gamma~_v^2 = w~_v^T R_v w~_v, and autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def predecessors(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What enters a node: ``[groups, n, in]``, a row for each example and position; and the weights ``[out, in]``."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1]), layer.weight
    space = layer.weight.dim() - 2
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
        padding = (0,) * space
    else:
        padding = layer.padding
    if space == 1:  # as an image of one row
        x, kernel = x.unsqueeze(2), (1, *layer.kernel_size)
        stride, padding, dilation = (1, *layer.stride), (0, *padding), (1, *layer.dilation)
    else:
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    # [batch, positions, channels * taps]
    rows = F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2)
    rows = rows.reshape(-1, layer.groups, rows.shape[-1] // layer.groups).transpose(0, 1)
    return rows, layer.weight.flatten(1)


def measured(rows: Tensor, alpha: float, statistic: str, d: Tensor, *, with_bias: bool) -> Tensor:
    """R of one node, with the bias node as its last predecessor."""
    if with_bias:
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        d = torch.cat([d, torch.ones_like(d[:1])])
    centre = rows.mean(0) if statistic == "covariance" else torch.zeros_like(rows[0])
    s = (rows - centre).T @ (rows - centre) / len(rows)
    return alpha * s + (1 - alpha) * torch.diag(d)


def normalized(
    layer: nn.Module,
    x: Tensor,
    alpha: float,
    statistic: str,
    centred: bool,
    d: Tensor,
    sample: Tensor | None = None,
) -> Tensor:
    """The node values ``[n, out]`` of a layer; ``d`` is the path measure of its predecessors ``[in]``.

    A sample takes the place of the batch in R and in the mean.
    """
    values, weight = predecessors(layer, x)
    groups = values if sample is None else predecessors(layer, sample)[0]
    per_group = weight.shape[0] // len(groups)
    columns = []
    for v in range(weight.shape[0]):
        w = weight[v]
        if layer.bias is not None:
            w = torch.cat([w, layer.bias[v : v + 1]])
        r = measured(groups[v // per_group], alpha, statistic, d, with_bias=layer.bias is not None)
        gamma = (w @ r @ w).sqrt()
        z = values[v // per_group] @ weight[v]
        if layer.bias is not None:
            z = z + layer.bias[v]
        if centred:
            z = z - (groups[v // per_group] @ weight[v]).mean()
        columns.append(z / gamma)
    return torch.stack(columns, 1)
