"""A recurrent layer that computes what ``torch.nn.RNN`` does, several times as fast on a processor.

Letters: T time, B batch, D input, H hidden, l layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # type: ignore[attr-defined]
from torch._C._functorch import peek_interpreter_stack
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pathspace.extras import install
from pathspace.network.errors import expect_module

FEWEST = 6
"""Steps below which PyTorch is the faster one."""
LARGEST = {"AVX-512": 512, "AVX2": 256}
"""Units above which it is."""


class RNN(nn.RNN):
    r"""A ``torch.nn.RNN`` whose ReLU layers run in compiled loops on a processor.

    .. code-block:: text

        h_t = relu(W_in x_t + b_in + W_rec h_{t-1} + b_rec)

    Constructor, parameters, state dict, shapes and results are those of ``torch.nn.RNN``, results
    to rounding. A step of all sequences is one product that stays in registers, with its biases and
    its ReLU, and the graph has one node per layer and direction. See docs/rnn.md for what that
    gains, and where it gains nothing.

    The loops need Numba (``pip install -e '.[fast]'`` in a clone) and a processor with AVX2. Where
    they do not apply, the layer runs as ``torch.nn.RNN``: with tanh, on a GPU, in other types than
    float32 and float64, with more than 512 units (256 with AVX2) or fewer than 6 steps, for second
    derivatives, and under ``torch.func``, ``torch.compile``, ``torch.export``, ``torch.jit.trace``,
    autocast and whatever else looks at operations, as ``pathspace.trace`` does. :attr:`kernel` says
    which it was.

    States are saved for the gradient as they are returned: to change them in place before the
    gradient is computed (``nn.Dropout(inplace=True)``) is refused by autograd.

    Args:
        *args: as of ``torch.nn.RNN``; mind that its ``nonlinearity`` is tanh unless it is given.
        **kwargs: the same.

    Raises:
        ValueError: as ``torch.nn.RNN`` does.

    Example:
        >>> import torch, pathspace as ps
        >>> rnn = ps.nn.RNN(4, 8, nonlinearity="relu", batch_first=True)
        >>> states, last = rnn(torch.randn(2, 5, 4))
        >>> states.shape, last.shape
        (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
        >>> ps.nn.RNN(4, 8).kernel
        'torch.nn.RNN: the nonlinearity is tanh'
    """

    _ran: str | None = None

    @property
    def kernel(self) -> str:
        """The kernel of the latest call, or of calls to come: compiled loops, or ``torch.nn.RNN`` and the reason."""
        reason = self._refusal(self._weights()[0]) if self._ran is None else self._ran
        return f"compiled, {_loops().instructions()}" if not reason else f"torch.nn.RNN: {reason}"

    def forward(self, input: Tensor | PackedSequence, hx: Tensor | None = None):  # type: ignore[override] - as nn.RNN
        """Run the layers; see ``torch.nn.RNN``.

        Args:
            input: ``[T, B, D]``, ``[B, T, D]`` with ``batch_first``, ``[T, D]``, or packed
                sequences.
            hx: where the layers start, ``[layers * directions, B, H]`` or ``[layers * directions,
                H]``; zero if None.

        Returns:
            The states of the last layer, in the form of the input, and the last state of every
            layer.
        """
        if torch.compiler.is_compiling():
            return super().forward(input, hx)
        weights = self._weights()
        x, batch_sizes = (
            (input.data, input.batch_sizes) if isinstance(input, PackedSequence) else (input, None)
        )
        reason = (
            self._refusal(weights[0]) or _looked_at() or self._unfit(x, hx, batch_sizes, weights)
        )
        self.__dict__["_ran"] = reason or ""  # past the checks that modules do
        if reason:
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            start = None if hx is None else self.permute_hidden(hx, input.sorted_indices)
            states, last = self._layers(x, start, weights, input.batch_sizes)
            packed = PackedSequence(
                states, input.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
            return packed, self.permute_hidden(last, input.unsorted_indices)
        if x.dim() == 2:
            states, last = self._layers(
                x.unsqueeze(1), None if hx is None else hx.unsqueeze(1), weights
            )
            return states.squeeze(1), last.squeeze(1)
        return self._layers(x, hx, weights, batch_first=self.batch_first)

    def _layers(
        self, x: Tensor, start: Tensor | None, weights: Sequence[Tensor], batch_sizes: Tensor | None = None,
        batch_first: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run all layers from ``[layers * directions, B, H]``.

        The input is ``[T, B, D]``, ``[B, T, D]`` with ``batch_first``, or packed ``[N, D]``.
        """
        run = _loops().layer
        directions = 1 + self.bidirectional
        size = 2 + 2 * self.bias
        last = []
        for layer in range(self.num_layers):
            states = []
            for i in range(directions * layer, directions * (layer + 1)):
                own = tuple(weights[size * i : size * (i + 1)])
                begin = None if start is None else start[i]
                every, end = run(x, begin, own, batch_sizes, i % directions == 1, batch_first)  # type: ignore[arg-type]
                states.append(every)
                last.append(end)
            if len(states) == 1:
                x = states[0]
            elif batch_first:  # what is kept lies step by step, as PyTorch keeps it
                x = torch.cat([each.transpose(0, 1) for each in states], -1).transpose(0, 1)
            else:
                x = torch.cat(states, -1)
            if self.dropout and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        return x, torch.cat(last) if len(last) > 1 else last[0]

    def _weights(self) -> list[Tensor]:
        """Return all parameters, in the order of `torch.nn.RNN`."""
        parameters = self._parameters  # as attributes they are found after a search, at each step
        weights = [parameters.get(name) for name in self._flat_weights_names]
        if any(weight is None for weight in weights):  # parametrized
            self._update_flat_weights()
            weights = self._flat_weights
        return weights  # type: ignore[return-value]

    def _refusal(self, weight: Tensor) -> str | None:
        """Return why no call of this layer may run in the compiled loops."""
        if self.mode != "RNN_RELU":
            return f"the nonlinearity is {self.nonlinearity}"
        if type(weight) not in (Tensor, nn.Parameter):
            return "weights are not plain tensors"
        if not weight.is_cpu:
            return f"parameters are on {weight.device}"
        if weight.dtype not in (torch.float32, torch.float64):
            return f"parameters are of {weight.dtype}"
        missing = _missing()
        if missing:
            return missing
        largest = _largest()
        many = f"{self.hidden_size} units, and PyTorch is faster above {largest}"
        return many if self.hidden_size > largest else None

    def _unfit(
        self, x: Tensor, hx: Tensor | None, batch_sizes: Tensor | None, weights: Sequence[Tensor]
    ) -> str | None:
        """Return why a call may not, of a layer that may; what `torch.nn.RNN` refuses is among it."""
        start = () if hx is None else (hx,)
        reason = _not_plain((x, *start, *weights), weights[0].dtype)
        if reason is not None:
            return reason
        shapes = _shapes(
            self.input_size, self.hidden_size, self.num_layers, self.bidirectional, self.bias
        )
        if [tensor.shape for tensor in weights] != shapes:
            return "the parameters have other shapes than they began with"
        if not self._takes(x, batch_sizes):
            return f"the input has the shape {list(x.shape)}"
        if batch_sizes is None:
            steps = x.shape[x.dim() == 3 and self.batch_first]
            rows = x.shape[1 - self.batch_first :][: x.dim() - 2]
        else:
            steps = len(batch_sizes)
            rows = (int(batch_sizes[0]),)
        states = (self.num_layers * (1 + self.bidirectional), *rows, self.hidden_size)
        if hx is not None and hx.shape != states:
            return f"the first states have the shape {list(hx.shape)}"
        return None if steps >= FEWEST else f"{steps} steps, and PyTorch is faster below {FEWEST}"

    def _takes(self, x: Tensor, batch_sizes: Tensor | None) -> bool:
        """Return whether an input has a shape that this layer reads, and is not empty."""
        if x.shape[-1] != self.input_size or 0 in x.shape:
            return False
        if batch_sizes is None:
            return x.dim() in (2, 3)
        return x.dim() == 2 and bool(batch_sizes.sum() == len(x))


def _not_plain(tensors: Iterable[Tensor], dtype: torch.dtype) -> str | None:
    """Return why the compiled loops cannot read some tensors; None if they can."""
    for tensor in tensors:
        if (type(tensor) is not Tensor and type(tensor) is not nn.Parameter) or tensor.is_neg():
            return "an argument or a parameter is not a plain tensor"
        if tensor.dtype is not dtype or not tensor.is_cpu or tensor.layout is not torch.strided:
            return "inputs and parameters differ in type or device"
    return None


def fast_(model: nn.Module) -> list[str]:
    """Make every ReLU ``torch.nn.RNN`` of a model a :class:`RNN`, in place.

    Layers stay the same objects, with their parameters, hooks and modes; subclasses of
    ``torch.nn.RNN`` and layers with tanh are left as they are.

    Args:
        model: any module.

    Returns:
        The names of these layers in the model; that of the model itself is "".

    Raises:
        TypeError: it is no module.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.RNN(4, 8, nonlinearity="relu"), torch.nn.RNN(8, 8))
        >>> ps.nn.fast_(model)
        ['0']
    """
    expect_module(model)
    names = [n for n, m in model.named_modules() if type(m) is nn.RNN and m.mode == "RNN_RELU"]
    for name in names:
        model.get_submodule(name).__class__ = RNN
    return names


@cache
def _shapes(D: int, H: int, layers: int, bidirectional: bool, bias: bool) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters."""
    shapes = []
    for layer in range(layers):
        inputs = H * (1 + bidirectional) if layer else D
        shapes += [(H, inputs), (H, H), *[(H,)] * (2 * bias)] * (1 + bidirectional)
    return shapes


def _looked_at() -> str | None:
    """Return why the operations of a call must be PyTorch's: something looks at them."""
    # each is asked at every step, from caches that hold other things by then: few and direct calls
    if torch._C._len_torch_function_stack() and any(
        not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()
    ):
        return "a torch function mode looks at operations"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode looks at operations"
    if peek_interpreter_stack() is not None:
        return "torch.func transforms operations"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if get_eval_frame_callback() is not None:
        return "torch.compile"
    if torch._C._is_tracing():
        return "torch.jit traces operations"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    return None


@cache
def _missing() -> str | None:
    """Return what the compiled loops lack on this machine."""
    if find_spec("numba") is None:
        return f"Numba is not installed ({install('fast')})"
    try:
        instructions = _loops().instructions()
    except Exception as error:
        # an installation that does not work must not keep the layer from doing so
        return f"Numba does not work here ({type(error).__name__}: {error})"
    return None if instructions else "the loops need a processor with AVX2 and fused multiplication"


@cache
def _largest() -> int:
    """Units above which PyTorch is faster on this processor."""
    return LARGEST[_loops().instructions()]


@cache
def _loops() -> ModuleType:
    from pathspace.nn.kernels import recurrent

    return recurrent
