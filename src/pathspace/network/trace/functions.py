"""Torch functions by name, and the families of them that tracing treats alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

_NAMES: dict[Any, str] = {}
# second names that torch has for a function
_ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "spmm": "mm",
    "true_divide": "div",
}
# the functions behind Python's operators; those that take their operands in the other order, such
# as 2 / x, keep their names
_OPERATORS = {
    "abs": "abs",
    "add": "add",
    "and": "bitwise_and",
    "div": "div",
    "eq": "eq",
    "floordiv": "floor_divide",
    "ge": "ge",
    "gt": "gt",
    "invert": "bitwise_not",
    "le": "le",
    "lt": "lt",
    "matmul": "matmul",
    "mod": "remainder",
    "mul": "mul",
    "ne": "ne",
    "neg": "neg",
    "or": "bitwise_or",
    "pow": "pow",
    "sub": "sub",
    "truediv": "div",
    "xor": "bitwise_xor",
}
_REFLECTED = {
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rdiv__": "__rtruediv__",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rsub__": "rsub",
    "__rxor__": "bitwise_xor",
}
_BY_OPERATOR = {
    **{f"__{name}__": of for name, of in _OPERATORS.items()},
    **{f"__i{name}__": f"{of}_" for name, of in _OPERATORS.items()},
    **_REFLECTED,
}
_OTHER_ORDER = (
    "batch_norm",
    "embedding",
    "embedding_bag",
    "instance_norm",
)


def short_name(func: Callable[..., Any]) -> str:
    """Return the operation's name: ``add`` for torch.add, Tensor.add and ``x + y`` alike, ``add_`` for ``x += y``."""
    name = _NAMES.get(func)
    if name is None:
        operator = getattr(func, "overloadpacket", func)
        is_operator = isinstance(operator, OpOverloadPacket)
        full = (
            str(operator)
            if is_operator
            else resolve_name(func) or getattr(func, "__name__", str(func))
        )
        *before, last = parts = full.split(".")
        # others' operators may have any name; torch.batch_norm(x, weight, ...) is not
        # F.batch_norm(x, mean, ...)
        whole = (is_operator and before != ["aten"]) or (
            last in _OTHER_ORDER and before[-1:] != ["functional"]
        )
        name = full if whole else ".".join(parts[-2:]) if last in ("__get__", "__set__") else last
        name = _BY_OPERATOR.get(name, name)
        stem = name.removesuffix("_")
        _NAMES[func] = name = _ALIASES.get(stem, stem) + name[len(stem) :]
    return name


ARITHMETIC = frozenset(
    ["add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "__rtruediv__"]
)
"""Sums and products, which take a constant for a number."""
CHOICES = ("where", "masked_fill", "masked_fill_")
"""Functions that select one of two values; a constant may influence the choice alone."""
PLAIN = (int, float, bool, str, slice, torch.dtype, torch.device, type(None), type(Ellipsis))
"""Types of arguments that are neither tensors nor containers."""


def tensors_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors among arguments, in order."""
    result: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            result.append(value)
        elif not isinstance(value, PLAIN):
            result += [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return result


_IN_ORDER = (
    "condition",
    "input",
    "self",
    "tensor",
    "tensors",
    "mat1",
    "batch1",
    "mat",
    "other",
    "mat2",
    "batch2",
    "vec",
)
"""Names of leading arguments in torch's signatures, in their order."""


_LAYERS = frozenset(
    ["linear", "embedding", *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3))]
)


def by_position(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments without ``out=None``, and leading ones by position even if they were given by name."""
    of_numpy = {"axis": "dim", "keepdims": "keepdim"}  # which torch takes, too
    kwargs = {
        of_numpy.get(k, k): value for k, value in kwargs.items() if k != "out" or value is not None
    }
    order = (*_IN_ORDER, "weight", "bias") if name in _LAYERS else _IN_ORDER
    leading = [key for key in order if key in kwargs]
    if not leading:
        return args, kwargs
    rest = {key: value for key, value in kwargs.items() if key not in leading}
    return (*args, *(kwargs[key] for key in leading)), rest


def fits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether a function accepts these arguments."""
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


METADATA = {
    "size",
    "dim",
    "ndim.__get__",
    "shape.__get__",
    "dtype.__get__",
    "device.__get__",
    "layout.__get__",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_cuda.__get__",
    "is_nested.__get__",
    "is_sparse.__get__",
    "is_meta.__get__",
    "requires_grad.__get__",
    "is_leaf.__get__",
    "grad_fn.__get__",
    "get_device",
    "is_cpu.__get__",
    "_set_grad_enabled",
    "__len__",
    "is_quantized.__get__",
    "is_mkldnn.__get__",
    "names.__get__",
    "element_size",
    "is_tensor",
    "is_storage",
    "_parse_to",
    "_has_compatible_shallow_copy_type",
    "is_grad_enabled",
    "flatten_parameters",
    "storage_offset",
    "type_as_dtype",
    "__hash__",
    "requires_grad_",
    "requires_grad.__set__",
    "_cdata.__get__",
    "_version.__get__",
    "is_inference",
}
"""Functions that read metadata of a tensor, such as its shape, never its values."""

SHAPED_FACTORIES = frozenset(
    [
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
    ]
)
"""New tensors that take no more than the form of another."""

OF_FORM = frozenset(["view_as", "expand_as", "reshape_as", "type_as", "to"])
"""Functions that read no values of their second tensor, only its shape and type."""

READS = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__contains__",
    "equal",
    "allclose",
    "is_nonzero",
    "__array__",
    "cpu_item",
    "nonzero",
    "masked_select",
    "unique",
}
"""Functions that turn tensor values into Python values, so that Python code may depend on them."""

CHECKS = frozenset(
    ["_assert", "_assert_async", "_is_all_true", "_nested_tensor_from_mask_left_aligned"]
)
"""What a program asks only to raise an error if it is not so: where it goes on, it was. (Torch's TransformerEncoder
asks whether a mask fits its fast path, which it then does not take, because of who looks.)"""

UNSEEN = {
    "grad",
    "data.__set__",
    "grad.__set__",
    "resize_",
    "resize_as_",
    "set_",
    "swap_tensors",
    "backward",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "share_memory_",
    "apply_",
    "map_",
    "map2_",
    "as_strided_",
    "storage",
    "untyped_storage",
    "data_ptr",
    "__dlpack__",
}
"""Functions with effects that tracing does not see, besides returning tensors."""

NORMALIZATIONS = frozenset(["batch_norm", "instance_norm", "group_norm"])
"""What returns a tensor of its first argument's shape, but wants more than one value to take statistics of."""


def changes(name: str) -> bool:
    """Return whether a function writes into its first argument, judging by its name."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


CLAMPS = frozenset(
    f"{kind}{end}" for kind in ("clamp", "clamp_min", "clamp_max") for end in ("", "_")
)
"""Bounds; one alone, at zero, is piecewise linear."""

ENDINGS = {
    "softmax",
    "log_softmax",
    "sigmoid",
    "tanh",
    "logsigmoid",
    "softplus",
    "softsign",
    "erf",
    "sin",
    "cos",
    "exp",
    "expm1",
    "log",
    "log1p",
    "round",
    "floor",
    "ceil",
    "relu6",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "clamp",
    "clamp_min",
    "clamp_max",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "softmin",
    "sqrt",
    "rsqrt",
    "square",
    "pow",
    "reciprocal",
    "prod",
    "logsumexp",
    "logaddexp",
    "normalize",
    "norm",
    "vector_norm",
    "linalg_vector_norm",
    "linalg_norm",
    "var",
    "std",
    "cosine_similarity",
    "cdist",
    "pairwise_distance",
    "dot",
    "inner",
    "outer",
    "einsum",
    "tensordot",
    "mul",
    "matmul",
    "mm",
    "mv",
    "bmm",
    "div",
    "__rtruediv__",
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "kl_div",
    "ctc_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "poisson_nll_loss",
    "huber_loss",
    "gaussian_nll_loss",
    "margin_ranking_loss",
    "triplet_margin_loss",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "soft_margin_loss",
}
"""Functions of outputs, and losses: allowed after the last parameter even if they break scaling."""


def with_sizes(
    args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace tensors in sizes, as in ``(n, torch.div(m, 2) - 1)``, by numbers."""

    def number(x: Any) -> Any:
        return int(x) if isinstance(x, Tensor) and x.dim() == 0 and not x.is_meta else x

    def sizes(a: Any) -> Any:
        among = isinstance(a, (tuple, list)) and any(type(x) is int for x in a)
        return tuple(map(number, a)) if among else a

    return tuple(map(sizes, args)), {key: sizes(value) for key, value in kwargs.items()}


def without_values(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of a function of tensors without values, of which only the shape is needed."""
    if any(t.is_meta for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
        args, kwargs = pytree.tree_map_only(Tensor, _emptied, (args, kwargs))  # constants too
    if name in NORMALIZATIONS:  # with one example there may be a single value, which torch refuses
        return torch.empty_like(args[0] if args else kwargs["input"])
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        result = None if says_meta(error) else on_zeros(func, args, kwargs)
        if result is None:
            raise
    return pytree.tree_map_only(Tensor, lambda t: _emptied(t) if t.is_meta else t, result)


def says_meta(error: Exception) -> bool:
    """Return whether torch raised an error because values are missing."""
    return "meta" in str(error) or isinstance(error, NotImplementedError)


def of_missing_values(error: Exception) -> bool:
    """Return whether an error is torch's because a tensor has no values."""
    return re.search(r"\bmeta\b", str(error)) is not None


def on_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the shape and type of a function without a kernel for the meta device; None if they depend on values."""
    zeros, others = (on_zeros(func, args, kwargs, step) for step in (0, 1))
    forms = [
        [t.shape for t in pytree.tree_leaves(r) if isinstance(t, Tensor)] for r in (zeros, others)
    ]
    return zeros if others is not None and forms[0] == forms[1] else None


def on_zeros(func: Callable[..., Any], args: Any, kwargs: Any, step: int = 0) -> Any:
    """Return the shape and type of a function of zeros, if only the meta device refuses it; else None.

    None also where it writes into its arguments. A ``step`` of 1 gives 1, 2, ..., 7, 1, ...: they
    may count rows.
    """

    def numbers(t: Tensor) -> Tensor:
        return torch.arange(t.numel()).remainder(7).add(1).mul(step).reshape(t.shape).to(t.dtype)

    args, kwargs = pytree.tree_map_only(Tensor, numbers, (args, kwargs))
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    try:
        with torch.random.fork_rng(devices=[]):  # a trace draws nothing
            result = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not given or any(t._version for t in given):
        return None
    return pytree.tree_map_only(Tensor, _emptied, result)


def _emptied(t: Tensor) -> Tensor:
    """Return the tensor without values; a sparse one loses its layout, too."""
    dense = t.layout is torch.strided
    return t if t.is_meta and dense else torch.empty(t.shape, dtype=t.dtype, device="meta")
