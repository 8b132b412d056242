"""The normalized product of DDP-Normalization and its gradient, in closed form (D16 Section 5).

    a = W~ h                           what the layer computes, without its bias
    y = a - c mean(a) + b~             c = 1 if centred, else 0
    gamma~^2 = alpha s + (1 - alpha) (sum_u D_u w~_u^2 + b~^2) + eps
    s = mean((a - mean(a))^2)          R = C, covariance
    s = mean((a + b~)^2)               R = M, second moment
    z = y / gamma~

With G = dL/dz per example, K = sum_i G_i z_i and dL/d(gamma~^2) = lambda = -K / (2 gamma~^2):

    dL/da_j = (G_j - c mean(G)) / gamma~ + 2 alpha lambda / n (a_j - mu),   mu = mean(a) for C, -b~ for M
    dL/db~  = sum_i G_i / gamma~ + 2 lambda ((1 - alpha) b~ + [M] alpha (mean(a) + b~))
    dL/dw~  = sum_j dL/da_j h_j + 2 lambda (1 - alpha) D o w~

For R = C, centred and without a bias the first line is (1/gamma~) [G_j - (1/n) sum_i G_i (1 + alpha
zhat_i zhat_j / gamma~^2)], zhat = a - mean(a). D16 Eq. (27) prints a minus there and misplaces
1/gamma~.

Letters: n examples (times positions), C channels; a tensor "per channel" has shape ``[C]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """R = alpha S + (1 - alpha) D with S = C or M, and whether z is centred."""

    alpha: float
    second_moment: bool
    centred: bool
    eps: float

    @property
    def needs_mean(self) -> bool:
        """True if z depends on statistics of the batch."""
        return self.centred or self.alpha > 0


@dataclass(frozen=True)
class Product:
    """A linear map ``[n, in] -> [n, C]``, or a convolution if ``stride`` is given."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x + b, without the bias if there is none."""
        if not self.stride:
            return F.linear(x, weight, bias)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def gradients(
        self, da: Tensor, x: Tensor, weight: Tensor, direct: Tensor | None, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients in x and in the weight; ``direct`` is added to the latter (and may be overwritten)."""
        if not self.stride:
            dx = da @ weight if needs[0] else None
            if not needs[1]:
                return dx, None
            return dx, da.t() @ x if direct is None else direct.addmm_(da.t(), x)
        none = [0] * len(self.stride)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            da, x, weight, None, self.stride, self.padding, self.dilation, False, none, self.groups, [*needs, False]
        )  # fmt: skip
        return dx, dw if direct is None or dw is None else dw.add_(direct)


def per_channel(a: Tensor, values: Tensor) -> Tensor:
    """``values`` ``[C]`` in a shape that broadcasts over ``a`` ``[n, C, ...]``."""
    return values.reshape(1, -1, *[1] * (a.dim() - 2))


def path_term(weight: Tensor, bias: Tensor | None, measure: Tensor) -> Tensor:
    """sum_u D_u w~_u^2 + b~^2 per channel; ``measure`` is D, broadcastable to the weight."""
    if measure.numel() == 1:
        total = torch.linalg.vector_norm(weight.flatten(1), dim=1).square() * measure.reshape(())
    else:
        total = (weight.square() * measure).flatten(1).sum(1)
    return total if bias is None else total + bias.square()


def squared_gamma(
    rule: Rule, statistic: Tensor | None, weight: Tensor, bias: Tensor | None, measure: Tensor
) -> Tensor:
    """gamma~^2 per channel."""
    total: Tensor | float = rule.eps
    if rule.alpha > 0:
        assert statistic is not None
        total = total + rule.alpha * statistic
    if rule.alpha < 1:
        total = total + (1 - rule.alpha) * path_term(weight, bias, measure)
    assert isinstance(total, Tensor)
    return total


def statistic_of(rule: Rule, mean: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
    """S per channel, from the mean and the (biased) variance of a."""
    if not rule.second_moment:
        return variance
    # M: mean((a + b)^2) = var(a) + (mean(a) + b)^2
    return variance + (mean if bias is None else mean + bias).square()


def normalized_apart(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    measure: Tensor,
    product: Product,
    rule: Rule,
    last: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Z of all rows, with the mean of a and the statistic S of the last ones alone; differentiable, S too."""
    a = product(x, weight)
    variance, mean = torch.var_mean(a[len(a) - last :], [0, *range(2, a.dim())], correction=0)
    statistic = statistic_of(rule, mean, variance, bias)
    gamma2 = squared_gamma(rule, statistic, weight, bias, measure)
    shift = torch.zeros_like(gamma2) if bias is None else bias
    if rule.centred:
        shift = shift - mean
    return (a + per_channel(a, shift)) * per_channel(a, gamma2.rsqrt()), mean, statistic


class Normalized(torch.autograd.Function):
    """(x, W~, b~) -> (z, mean of a, S), the last two without gradients of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        measure: Tensor,
        product: Product,
        rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute z; x is ``[n, in]`` for a linear map, ``[n, in, *space]`` for a convolution."""
        a = product(x, weight)
        if rule.needs_mean:  # the kernel of BatchNorm's training pass
            mean, variance = torch.batch_norm_update_stats(a, None, None, 0.0)
        else:
            mean = variance = a.new_zeros(a.shape[1])
        statistic = statistic_of(rule, mean, variance, bias)
        gamma2 = squared_gamma(rule, statistic, weight, bias, measure)
        taken = mean if rule.centred else torch.zeros_like(mean)
        if bias is not None:
            taken = taken - bias
        # z = (a - c mean + b) / gamma: the kernel of BatchNorm's evaluation pass
        z = torch.native_batch_norm(a, None, None, taken, gamma2, False, 0.0, 0.0)[0]
        ctx.save_for_backward(x, weight, bias, measure, a, mean, gamma2)
        ctx.product = product
        ctx.rule = rule
        ctx.mark_non_differentiable(mean, statistic)
        ctx.set_materialize_grads(False)
        return z, mean, statistic

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the closed form above; under ``create_graph`` the gradient of :func:`normalized_apart`."""
        g = grad_outputs[0]
        if g is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(ctx, g), None, None, None)
        x, weight, bias, measure, a, mean, gamma2 = ctx.saved_tensors
        rule = ctx.rule
        needs = ctx.needs_input_grad
        alpha = rule.alpha
        n = a.numel() // a.shape[1]
        p = gamma2.rsqrt()
        # sum_i G_i (a_i - mean) and sum_i G_i
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            g, a, None, None, None, mean, torch.ones_like(mean), True, 0.0, [False, True, True]
        )
        rest = torch.zeros_like(mean) if rule.centred else mean
        if bias is not None:
            rest = rest + bias
        slope = -(dot + rest * total) * p / gamma2  # 2 lambda = -K / gamma^2
        da = _of_product(rule, g, a, mean, bias, p, total / n, slope * (alpha / n))
        direct = None
        if alpha < 1 and needs[1]:
            direct = _of_path_term(weight, measure, slope * (1 - alpha))
        dx, dw = ctx.product.gradients(da, x, weight, direct, (needs[0], needs[1]))
        db = None
        if bias is not None and needs[2]:
            inner = (1 - alpha) * bias
            if rule.second_moment:
                inner = inner + alpha * (mean + bias)
            db = total * p + slope * inner
        return dx, dw, db, None, None, None


def _differentiable_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients in x, weight and bias, with a graph of their own."""
    x, weight, bias, measure, *_ = ctx.saved_tensors
    # x may have been computed from the weight: each is to have the gradient of this layer alone
    x = x.view_as(x)
    weight = weight.view_as(weight)
    bias = None if bias is None else bias.view_as(bias)
    needs = ctx.needs_input_grad[:3]
    wanted = [
        t for t, needed in zip((x, weight, bias), needs, strict=True) if t is not None and needed
    ]
    z, _, _ = normalized_apart(x, weight, bias, measure, ctx.product, ctx.rule, len(x))
    found = iter(torch.autograd.grad(z, wanted, g, create_graph=True))
    return tuple(next(found) if needed else None for needed in needs)


def _of_path_term(weight: Tensor, measure: Tensor, scale: Tensor) -> Tensor:
    """2 lambda (1 - alpha) D o w, from ``scale`` = 2 lambda (1 - alpha) per channel."""
    scale = scale.reshape(-1, *[1] * (weight.dim() - 1))
    if measure.numel() == 1:
        return weight * (scale * measure)
    return weight * measure * scale


def _of_product(
    rule: Rule,
    g: Tensor,
    a: Tensor,
    mean: Tensor,
    bias: Tensor | None,
    p: Tensor,
    g_mean: Tensor,
    q: Tensor,
) -> Tensor:
    """dL/da = (G - c mean(G)) p + (a - mu) q."""
    if rule.alpha == 0:
        da = g * per_channel(g, p)
        return da.sub_(per_channel(g, g_mean * p)) if rule.centred else da
    mu = mean
    if rule.second_moment:
        mu = torch.zeros_like(mean) if bias is None else -bias
    constant = -g_mean * p if rule.centred else None
    da = torch.native_batch_norm(a, q, constant, mu, torch.ones_like(mu), False, 0.0, 0.0)[0]
    return da.addcmul_(g, per_channel(g, p))
