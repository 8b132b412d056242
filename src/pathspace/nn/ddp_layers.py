"""Linear and convolutional layers normalized by R = alpha S + (1 - alpha) D; see :func:`pathspace.nn.ddp_normalize`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import handle_torch_function, has_torch_function

from pathspace.nn.ddp_function import Normalized, Product, Rule, normalized_apart, squared_gamma
from pathspace.squared.precision import widened

if TYPE_CHECKING:
    _Base = nn.Module
    _Convolution = nn.modules.conv._ConvNd
else:
    _Base = _Convolution = object


class _DDPNormalized(_Base):
    """Base of the layers: their weight and bias are w~ and b~, their buffers the measure D and running statistics.

    In training the statistics are the batch's (over examples and positions) and are averaged into
    the running ones; in evaluation the running ones stand for them, and gamma~ still follows w~
    through the D term.
    """

    weight: Tensor
    bias: Tensor | None
    ddp_measure: Tensor
    running_mean: Tensor | None
    running_statistic: Tensor | None
    num_batches_tracked: Tensor | None
    ddp_rule: Rule
    momentum: float | None
    # examples, and how many of them, the last ones, are measured; None: all
    _sample: tuple[int, int] | None = None

    def _normalize(self, rule: Rule, measure: Tensor, momentum: float | None) -> None:
        """Turn a plain layer, whose class was replaced by this one, into a normalized layer."""
        weight = self.weight.detach()
        self.ddp_rule = rule
        self.momentum = momentum
        self.register_buffer("ddp_measure", measure.to(weight))
        zeros = weight.new_zeros(weight.shape[0])
        self.register_buffer("running_mean", zeros.clone() if rule.centred else None)
        self.register_buffer(
            "running_statistic", torch.ones_like(zeros) if rule.alpha > 0 else None
        )
        count = torch.zeros((), dtype=torch.long, device=weight.device)
        self.register_buffer("num_batches_tracked", count if rule.needs_mean else None)

    def forward(self, input: Tensor) -> Tensor:
        """z = (W~ x - c mean + b~) / gamma~."""
        return ddp_normalized(input, self.weight, self)

    def _forward(self, input: Tensor) -> Tensor:
        # half-precision statistics would be of little use
        with torch.autocast(input.device.type, enabled=False):
            x = input.to(self.weight.dtype)
            if not self.training:
                return self._plain(x, *self.folded())
            if not x.numel():  # torch's kernel would say less
                self._check_count(0, x)
            z, mean, statistic = self._batch(x)
            n = z.numel() // len(mean)
            self._track(mean, statistic, n if self._sample is None else self._last(n), x)
            return z

    def folded(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight w~ / gamma~ and the bias (b~ - c mean) / gamma~ of evaluation mode, differentiable."""
        rule = self.ddp_rule
        gamma2 = squared_gamma(
            rule, self.running_statistic, self.weight, self.bias, self.ddp_measure
        )
        scale = gamma2.rsqrt()
        shift = self.bias
        if self.running_mean is not None:
            shift = -self.running_mean if shift is None else shift - self.running_mean
        weight = self.weight * scale.reshape(-1, *[1] * (self.weight.dim() - 1))
        return weight, None if shift is None else shift * scale

    @abstractmethod
    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the plain layer with given parameters."""

    @abstractmethod
    def _batch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Z of a batch, the mean of a and the statistic S per channel."""

    def _normalized(self, x: Tensor, product: Product) -> tuple[Tensor, Tensor, Tensor]:
        """Return the autograd function on a batch ``[n, in, ...]``."""
        bias = None if self.bias is None else widened(self.bias)
        # float16 holds no square of what is beyond 256
        given = (
            widened(x),
            widened(self.weight),
            bias,
            widened(self.ddp_measure),
            product,
            self.ddp_rule,
        )
        func = peek_interpreter_stack()  # takes operations alone
        if self._sample is not None or func is not None:
            last = len(x) if self._sample is None else self._last(len(x))
            z, mean, statistic = normalized_apart(*given, last)
        else:
            z, mean, statistic = Normalized.apply(*given)  # pyright: ignore[reportGeneralTypeIssues]
        return z.to(x.dtype), mean, statistic

    def _last(self, n: int) -> int:
        """Return how many of n values belong to the examples that are measured."""
        assert self._sample is not None
        examples, last = self._sample
        if n % examples:
            raise ValueError(
                f"{type(self).__name__} reads {n} rows, and there are {examples} examples: statistics of another "
                "sample need the examples in the first dimension of every layer's input"
            )
        return n // examples * last

    def _check_count(self, n: int, x: Tensor) -> None:
        """Refuse a batch that is too small for the statistics."""
        rule = self.ddp_rule
        # a variance of one value is zero
        least = 2 if rule.centred or not rule.second_moment else 1
        if rule.needs_mean and n < least:
            raise ValueError(
                f"{type(self).__name__} in training needs at least {least} values per channel for its batch "
                f"statistics, got {n} from an input of shape {list(x.shape)}; use a larger batch or eval()"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, statistic: Tensor, n: int, x: Tensor) -> None:
        """Average the statistics of ``n`` values per channel into the running ones as BatchNorm does."""
        rule = self.ddp_rule
        count = self.num_batches_tracked
        if count is None:
            return
        self._check_count(n, x)
        count.add_(1)
        weight = self.momentum if self.momentum is not None else count.to(mean.dtype).reciprocal()
        if self.running_mean is not None:
            self.running_mean.copy_(widened(self.running_mean).lerp(mean, weight))
        if self.running_statistic is not None:
            if not rule.second_moment:
                statistic = statistic * (n / (n - 1))  # the unbiased variance
            self.running_statistic.copy_(widened(self.running_statistic).lerp(statistic, weight))

    def extra_repr(self) -> str:
        rule = self.ddp_rule
        statistic = "second_moment" if rule.second_moment else "covariance"
        own = f"alpha={rule.alpha}, statistic={statistic}, centred={rule.centred}"
        return f"{super().extra_repr()}, {own}"  # type: ignore[misc]


def ddp_normalized(input: Tensor, weight: Tensor, layer: _DDPNormalized) -> Tensor:
    """Return what a normalized layer computes, as one operation under its own name (which tracing then refuses)."""
    if has_torch_function((input, weight)):
        return handle_torch_function(ddp_normalized, (input, weight), input, weight, layer)
    return layer._forward(input)


def normalized_layers(model: nn.Module, so: str) -> list[_DDPNormalized]:
    """Return the layers of a model that :func:`pathspace.nn.ddp_normalize` made; without any it is refused."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = [module for module in modules if isinstance(module, _DDPNormalized)]
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no layer made by ddp_normalize; {so}")
    return layers


class DDPLinear(_DDPNormalized, nn.Linear):
    """A linear layer normalized by its batch; made by :func:`pathspace.nn.ddp_normalize`.

    All dimensions of its input but the last count as examples.
    """

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _batch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        if self._sample is not None:
            self._last(len(x))  # rows would not show that the examples are in another dimension
        z, mean, statistic = self._normalized(rows, Product())
        return z.reshape(*x.shape[:-1], len(mean)), mean, statistic


class _DDPConvolution(_DDPNormalized, _Convolution):
    """A convolution; examples and positions count alike in its statistics."""

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)  # pyright: ignore[reportAttributeAccessIssue]

    def _batch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        space = len(self.stride)
        if x.dim() == space + 1:  # a single example
            z, mean, statistic = self._batch(x.unsqueeze(0))
            return z.squeeze(0), mean, statistic
        padding: Any = (0,) * space if self.padding == "valid" else self.padding
        if self.padding_mode != "zeros" or padding == "same":
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x = F.pad(x, self._reversed_padding_repeated_twice, mode)
            padding = (0,) * space
        return self._normalized(x, Product(self.stride, padding, self.dilation, self.groups))


class DDPConv1d(_DDPConvolution, nn.Conv1d):
    """A one-dimensional convolution normalized by its batch; made by :func:`pathspace.nn.ddp_normalize`."""


class DDPConv2d(_DDPConvolution, nn.Conv2d):
    """A two-dimensional convolution normalized by its batch; made by :func:`pathspace.nn.ddp_normalize`."""


class DDPConv3d(_DDPConvolution, nn.Conv3d):
    """A three-dimensional convolution normalized by its batch; made by :func:`pathspace.nn.ddp_normalize`."""


NORMALIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: DDPLinear,
    nn.Conv1d: DDPConv1d,
    nn.Conv2d: DDPConv2d,
    nn.Conv3d: DDPConv3d,
}
"""Plain layer -> normalized layer; the two have the same parameters under the same names."""
