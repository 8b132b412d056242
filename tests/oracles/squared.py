"""The squared network of a real `nn.Module`, by running its own forward on squared parameters.

The model's code runs as it stands under a `TorchFunctionMode` that replaces the few operations
which differ in the squared network: ReLU and its kin disappear, a maximum becomes a sum of what it
compares, fixed averaging weights are squared, normalisation by running statistics becomes fixed
edges, one by statistics of what enters a division by its mean with that mean held, and an embedding
reads a one-hot input of ones. Everything else (matrix products, convolutions, additions, reshaping)
is what it was.

    G(q) = sum over the outputs of one example,  q = p o p,   h_0 = 0,   ones at the inputs
    kappa1 = dG/dq,   kappa1 + kappa2 = 1/2 d^2 G(p o p)/dp^2
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

IDENTITIES = {
    "relu",
    "relu_",
    "leaky_relu",
    "leaky_relu_",
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "clamp",
    "clamp_min",
    "clamp_",
}
SCALINGS = {
    "mul",
    "__mul__",
    "__rmul__",
    "mul_",
    "__imul__",
    "div",
    "true_divide",
    "__truediv__",
    "div_",
}
SUMMED = {f"{kind}_pool{n}d" for kind in ("max", "adaptive_max") for n in (1, 2, 3)}
AVERAGED = {f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3)}


def _as_matrix(
    pool: Callable[[Tensor], Tensor], x: Tensor, spatial: int
) -> tuple[Tensor, torch.Size]:
    """What a pool does to one channel, found by showing it every image that is one at a single pixel.

    For averaging these are its weights; for a maximum, whether the pixel lies in the window.
    """
    shape = x.shape[-spatial:]
    basis = torch.eye(shape.numel(), dtype=x.dtype).reshape(-1, 1, *shape)
    image = pool(basis)
    return image.flatten(1), image.shape[-spatial:]


def _linear_pool(matrix: Tensor, out_shape: torch.Size, x: Tensor) -> Tensor:
    spatial = len(out_shape)
    return (x.flatten(-spatial) @ matrix).reshape(*x.shape[:-spatial], *out_shape)


def _rnn(x, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    """`nn.RNN` written out: one loop per layer and direction, without the nonlinearity."""
    if batch_first:
        x = x.transpose(0, 1)
    each = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    last = []
    for layer in range(num_layers):
        sequences = []
        for direction in range(directions):
            at = (layer * directions + direction) * each
            w_in, w_rec = weights[at], weights[at + 1]
            b = weights[at + 2] + weights[at + 3] if has_biases else x.new_zeros(w_in.shape[0])
            h = hx[layer * directions + direction]
            states: list[Tensor] = [h] * x.shape[0]
            steps = range(x.shape[0])
            for t in reversed(steps) if direction else steps:
                h = x[t] @ w_in.T + h @ w_rec.T + b
                states[t] = h
            last.append(h)
            sequences.append(torch.stack(states))
        x = torch.cat(sequences, -1)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(last)


def _gained(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


class SquaredNetwork(TorchFunctionMode):
    """Inside this mode the forward of a model with squared parameters computes its squared network."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        if not name.startswith("__"):
            name = name.lstrip("_")
        if name in IDENTITIES:
            return args[0]
        if name in ("maximum", "minimum"):
            return args[0] + args[1]  # a path may leave through either
        if name in SUMMED or name in AVERAGED:
            x, rest = args[0], args[1:]
            matrix, shape = _as_matrix(lambda image: func(image, *rest, **kwargs), x, int(name[-2]))
            return _linear_pool(matrix if name in SUMMED else matrix**2, shape, x)
        if name in SCALINGS and isinstance(args[1], (int, float)):
            return func(args[0], args[1] ** 2)  # multiplication by a fixed number: one fixed edge
        if name == "mean":
            total = torch.sum(*args, **kwargs)
            return total / (args[0].numel() // total.numel()) ** 2
        if name == "batch_norm":
            return self.batch_norm(*args, **kwargs)
        if name in ("layer_norm", "rms_norm"):
            return self.layer_norm(*args, **kwargs)
        if name == "group_norm":
            return self.group_norm(*args, **kwargs)
        if name == "embedding":
            return self.embedding(*args, **kwargs)
        if name == "rnn_relu":
            return _rnn(*args)
        if name == "rnn_relu_cell":
            x, h, w_in, w_rec, b_in, b_rec = args
            linear = x @ w_in.T + h @ w_rec.T
            return linear if b_in is None else linear + b_in + b_rec
        return func(*args, **kwargs)

    @staticmethod
    def batch_norm(x, mean, var, weight=None, bias=None, training=False, eps=1e-5, **_):
        # y = gamma ((x - mean) / sigma) + beta: fixed edges 1/sigma from x and mean/sigma from the
        # bias node
        shape = (1, -1) + (1,) * (x.dim() - 2)
        if training:
            over = [d for d in range(x.dim()) if d != 1]
            return _gained(
                x / x.mean(over, keepdim=True).detach(),
                *(None if p is None else p.reshape(shape) for p in (weight, bias)),
            )
        mean, var = mean.to(x.dtype).reshape(shape), var.to(x.dtype).reshape(shape)
        y = x / (var + eps) + mean**2 / (var + eps)
        if weight is not None:
            y = y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    @staticmethod
    def layer_norm(x, features, weight=None, bias=None, *_, **__):
        over = tuple(range(-len(features), 0))
        bias = bias if isinstance(bias, Tensor) else None  # eps, in the place of a bias
        return _gained(x / x.mean(over, keepdim=True).detach(), weight, bias)

    @staticmethod
    def group_norm(x, groups, weight=None, bias=None, *_, **__):
        parts = x.reshape(x.shape[0], groups, -1)
        n = (parts / parts.mean(2, keepdim=True).detach()).reshape(x.shape)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return _gained(n, *(None if p is None else p.reshape(shape) for p in (weight, bias)))

    @staticmethod
    def embedding(indices, weight, *_, **__):
        # one-hot inputs, all ones in the squared network: every row counts once, at every position
        return weight.sum(0).expand(*indices.shape, weight.shape[1])


class _Run(nn.Module):
    """A model together with the way to run it in the squared mode."""

    def __init__(self, model, run) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self):
        with SquaredNetwork():
            return self.run(self.model)


def _ones(value):
    if isinstance(value, Tensor):
        return torch.ones_like(value, dtype=torch.float64) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _ones(item) for key, item in value.items()}
    return type(value)(_ones(item) for item in value)


class Oracle:
    """Path norm and kappa of `model` on one example.

    `call(model, example)` runs it and `output` picks what counts as emitted.
    """

    def __init__(self, model: nn.Module, example, call=None, output=None) -> None:
        self.model = copy.deepcopy(model).double()
        self.example = _ones(example)
        self.call = call or (lambda module, value: module(value))
        self.output = output or (lambda value: value)
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def outputs(self, squares: dict[str, Tensor]) -> Tensor:
        """The outputs of the squared network, as a function of the squared parameters."""
        run = _Run(self.model, lambda model: self.output(self.call(model, self.example)))
        return torch.func.functional_call(
            run, {f"model.{name}": q for name, q in squares.items()}, ()
        )

    def squared_path_norm(self, weights: dict[str, Tensor] | None = None) -> Tensor:
        weights = self.weights if weights is None else weights
        return self.outputs({name: p**2 for name, p in weights.items()}).sum()

    def kappa1(self) -> dict[str, Tensor]:
        squares = {name: (p**2).requires_grad_() for name, p in self.weights.items()}
        return self._gradient(self.outputs(squares).sum(), squares)

    def kappa(self) -> dict[str, Tensor]:
        """kappa1 + kappa2 as half the diagonal of the Hessian, one entry at a time."""
        weights = {name: p.clone().requires_grad_() for name, p in self.weights.items()}
        first = self._gradient(self.squared_path_norm(weights), weights, create_graph=True)
        total = {}
        for name, p in weights.items():
            entries = []
            for k, slope in enumerate(first[name].flatten()):
                curvature = None
                if slope.requires_grad:
                    (curvature,) = torch.autograd.grad(
                        slope, p, retain_graph=True, allow_unused=True
                    )
                entries.append(
                    slope.new_zeros(()) if curvature is None else curvature.flatten()[k] / 2
                )
            total[name] = torch.stack(entries).reshape(p.shape).detach()
        return total

    def kappa2(self) -> dict[str, Tensor]:
        kappa1 = self.kappa1()
        return {name: value - kappa1[name] for name, value in self.kappa().items()}

    def symmetries(self, seed: int = 0) -> int:
        """How many independent rescalings of single weights leave every path's value unchanged.

        With v_i the logarithms of the factors, the sum of v_i over the edges of every path must
        vanish. The paths' monomials are linearly independent functions: that is, sum_i v_i p_i
        dG/dp_i = 0 at every p. Weights on no path (a recurrent matrix that is left after one step)
        are not counted.
        """
        generator = torch.Generator().manual_seed(seed)
        number = sum(p.numel() for p in self.weights.values())
        rows = []
        for _ in range(number + 10):
            squares = {
                name: torch.exp(
                    torch.randn(p.shape, generator=generator, dtype=p.dtype)
                ).requires_grad_()
                for name, p in self.weights.items()
            }
            total = self.outputs(squares).sum()
            gradient = self._gradient(total / total.detach(), squares)
            rows.append(
                torch.cat([(gradient[name] * q.detach()).flatten() for name, q in squares.items()])
            )
        matrix = torch.stack(rows)
        matrix = matrix[:, matrix.norm(dim=0) > 0]
        matrix = matrix / matrix.norm(dim=0)
        return matrix.shape[1] - int(torch.linalg.matrix_rank(matrix, rtol=1e-11))

    @staticmethod
    def _gradient(value, leaves, create_graph=False):
        slopes = torch.autograd.grad(
            value,
            list(leaves.values()),
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(leaves, slopes, strict=True))
