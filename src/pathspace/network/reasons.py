"""Why operations without a rule have none, by the operation's name."""

from __future__ import annotations

_BOUNDED = (
    "it is not positively homogeneous: f(s x) differs from s f(x), so no unit before it can be rescaled"
)
_GATED = "it multiplies two activations, so scaling both by s scales the product by s^2"
_NORMALIZED = "it divides by a statistic of its own input, which removes the scale that path geometry follows"
_SIGNED = (
    "a path through it carries a fixed negative weight, "
    "which the squares of path geometry cannot tell from a positive one"
)
_RECURRENT_GATES = "its gates are sigmoids and products, which are not positively homogeneous"
_INDICES = "its indices depend on activations, so the network has no single graph"
_COMPARED = (
    "it compares activations, so what follows depends on the data in a way that tracing does not follow; write it as "
    "relu, leaky_relu, abs or maximum"
)

REASONS: dict[str, str] = {
    **dict.fromkeys(
        [
            "tanh",
            "tanh_",
            "sigmoid",
            "sigmoid_",
            "gelu",
            "silu",
            "mish",
            "elu",
            "selu",
            "celu",
            "softplus",
            "hardtanh",
            "hardsigmoid",
            "hardswish",
            "relu6",
            "logsigmoid",
            "softsign",
            "tanhshrink",
            "softshrink",
            "hardshrink",
            "exp",
            "log",
            "sqrt",
            "pow",
            "__pow__",
            "sin",
            "cos",
            "erf",
            "square",
            "rsqrt",
            "reciprocal",
            "log1p",
            "expm1",
            "glu",
            "rnn_tanh",
            "rnn_tanh_cell",
            "threshold",
            "rrelu",
            "sign",
            "clamp",
            "clamp_",
            "clamp_max",
            "clamp_min",
            "round",
            "floor",
            "ceil",
            "rdiv",
            "__rdiv__",
            "__rtruediv__",
        ],
        _BOUNDED,
    ),
    **dict.fromkeys(
        [
            "layer_norm",
            "group_norm",
            "instance_norm",
            "local_response_norm",
            "rms_norm",
            "normalize",
            "norm",
            "cosine_similarity",
            "_weight_norm",
            "var",
            "std",
            "var_mean",
            "std_mean",
        ],
        _NORMALIZED,
    ),
    **dict.fromkeys(
        [
            "sub",
            "sub_",
            "subtract",
            "rsub",
            "__rsub__",
            "__sub__",
            "__isub__",
            "neg",
            "neg_",
            "negative",
            "__neg__",
        ],
        _SIGNED,
    ),
    **dict.fromkeys(["lstm", "lstm_cell", "gru", "gru_cell"], _RECURRENT_GATES),
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "gumbel_softmax"], _BOUNDED),
    **dict.fromkeys(
        [
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
            "_transformer_encoder_layer_fwd",
            "_native_multi_head_attention",
        ],
        "attention multiplies activations with activations and takes a softmax, which are not positively homogeneous",
    ),
    "bilinear": _GATED,
    **dict.fromkeys(
        [
            *("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"),
            *("__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__", "heaviside", "logical_not"),
        ],
        _COMPARED,
    ),
    **dict.fromkeys(
        [
            *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
            *("topk", "sort", "argsort", "kthvalue", "median", "mode", "nanmedian", "cummax", "cummin"),
        ],
        _INDICES,
    ),
    **dict.fromkeys(
        ["rand_like", "randn_like", "randint_like", "alpha_dropout", "feature_alpha_dropout", "rrelu_"],
        "the numbers it draws do not scale with the units beside them",
    ),
    **dict.fromkeys(
        ["isfinite", "isnan", "isinf"],
        "what it returns depends on the data, so the forward pass has no single graph",
    ),
    "_pack_padded_sequence": "packed sequences have lengths that depend on the data; pad the sequences instead",
    "ddp_normalized": "its weights depend on the batch; trace the model before ps.nn.ddp_normalize, or ps.nn.fold it",
}
GATED, SIGNED, BOUNDED, INDICES = _GATED, _SIGNED, _BOUNDED, _INDICES
