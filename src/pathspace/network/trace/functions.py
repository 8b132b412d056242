"""Torch functions by name, and the families of them that tracing treats alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import resolve_name

_NAMES: dict[Any, str] = {}


def short_name(func: Callable[..., Any]) -> str:
    """The operation's own name: ``relu`` for torch.relu, F.relu and Tensor.relu alike."""
    name = _NAMES.get(func)
    if name is None:
        full = resolve_name(func) or getattr(func, "__name__", str(func))
        parts = full.split(".")
        name = ".".join(parts[-2:]) if parts[-1] == "__get__" else parts[-1]
        _NAMES[func] = name
    return name


METADATA = frozenset(
    [
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
    ]
)
"""What reads the form of a tensor, never its values."""

SHAPED_FACTORIES = frozenset(
    ["new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"]
)
"""New tensors that take no more than the form of another."""

RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
    ]
)
"""What draws random numbers."""

READS = frozenset(
    [
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
    ]
)
"""What hands values to Python, so that the code can depend on them."""

AUGMENTED = frozenset(["__iadd__", "__imul__", "__isub__", "__itruediv__"])
"""Augmented assignments that write into their first operand."""

CLAMPS = frozenset(
    f"{kind}{end}" for kind in ("clamp", "clamp_min", "clamp_max", "clip") for end in ("", "_")
)
"""Bounds; one alone, at zero, is piecewise linear."""

ENDINGS = frozenset(
    [
        *(
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
        ),
        *(
            "relu6",
            "hardtanh",
            "hardsigmoid",
            "hardswish",
            "clamp",
            "clamp_min",
            "clamp_max",
            "clip",
            "round",
            "floor",
            "ceil",
        ),
        *("elu", "selu", "celu", "gelu", "silu", "mish", "tanhshrink", "softshrink", "hardshrink", "softmin"),
        *("sqrt", "rsqrt", "square", "pow", "__pow__", "reciprocal", "prod", "logsumexp", "logaddexp"),
        *(
            "normalize",
            "norm",
            "vector_norm",
            "linalg_vector_norm",
            "linalg_norm",
            "var",
            "std",
            "cosine_similarity",
        ),
        *("cdist", "pairwise_distance", "dot", "inner", "outer"),
        *(
            "mul",
            "multiply",
            "__mul__",
            "__rmul__",
            "matmul",
            "mm",
            "mv",
            "bmm",
            "__matmul__",
            "einsum",
            "tensordot",
        ),
        *("div", "true_divide", "__truediv__", "__rtruediv__", "__rdiv__"),
        *(
            "cross_entropy",
            "nll_loss",
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "kl_div",
            "ctc_loss",
        ),
        *(
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "poisson_nll_loss",
            "gaussian_nll_loss",
        ),
        *("margin_ranking_loss", "triplet_margin_loss", "cosine_embedding_loss", "hinge_embedding_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss"),
    ]
)
"""What may stand after the last parameter, whatever it does to scales: functions of outputs, and losses."""
