"""Reasons why operations have no rule, by the operation's name."""

from __future__ import annotations

BOUNDED = "it is not positively homogeneous: f(s x) differs from s f(x), so no unit before it can be rescaled"
_CURVED = (
    "it scales with its input, but it is not piecewise linear, so what it returns is no sum over paths; a maximum, a "
    "mean or a sum of absolute values is"
)
GATED = "it multiplies two activations, so scaling both by s scales the product by s^2"
_NORMALIZED = (
    "it divides by a statistic of its own input, which removes the scale that path geometry follows"
)
_RECURRENT_GATES = "its gates are sigmoids and products, which are not positively homogeneous"
OF_PARAMETERS = (
    "it multiplies two parameters: what they make is no parameter, so no set of edges",
    "Apply them to the activations one after the other",
)
ROUNDED = "it rounds activations to whole numbers (or makes them complex)"
_SPARSE = "sparse tensors are not known; a dense matrix, index_add and scatter_add are"
INDICES = "its indices depend on activations, so the network has no single graph"

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
            "clamp",
            "clamp_",
            "clamp_max",
            "clamp_min",
            "round",
            "floor",
            "ceil",
            "__rtruediv__",
            "softmax",
            "log_softmax",
            "softmin",
            "gumbel_softmax",
            "logsumexp",
            "logaddexp",
            "logcumsumexp",
            "huber_loss",
            "smooth_l1_loss",
        ],
        BOUNDED,
    ),
    **dict.fromkeys(
        [
            "local_response_norm",
            "normalize",
            "cosine_similarity",
            "var",
            "std",
            "var_mean",
            "std_mean",
        ],
        _NORMALIZED,
    ),
    **dict.fromkeys(["lstm", "lstm_cell", "gru", "gru_cell"], _RECURRENT_GATES),
    **dict.fromkeys(
        [
            "short",
            "char",
            "byte",
            "cfloat",
            "cdouble",
            "chalf",
            "trunc",
            "fix",
            "frac",
            "fmod",
            "floor_divide",
            "floor_divide_",
            "remainder",
        ],
        ROUNDED,
    ),
    **dict.fromkeys(
        [
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
            "_transformer_encoder_layer_fwd",
            "_native_multi_head_attention",
        ],
        "attention multiplies activations with activations and takes a softmax, which are not positively homogeneous",
    ),
    **dict.fromkeys(["bilinear", "cumprod", "prod", "cdist", "cross", "outer"], GATED),
    **dict.fromkeys(
        [
            "norm",
            "vector_norm",
            "linalg_vector_norm",
            "linalg_norm",
            "lp_pool1d",
            "lp_pool2d",
            "lp_pool3d",
        ],
        _CURVED,
    ),
    **dict.fromkeys(
        ["max_unpool1d", "max_unpool2d", "max_unpool3d", "mode", "searchsorted", "bucketize"],
        INDICES,
    ),
    **dict.fromkeys(
        [
            "bernoulli",
            "bernoulli_",
            "multinomial",
            "normal",
            "poisson",
            "alpha_dropout",
            "feature_alpha_dropout",
        ],
        "the numbers it draws do not scale with the units beside them",
    ),
    **dict.fromkeys(
        [
            "_sparse_mm",
            "sparse_mm",
            "_sparse_addmm",
            "sparse_coo_tensor",
            "sparse_csr_tensor",
            "to_sparse",
            "spmm",
            "hspmm",
            "sspaddmm",
            "smm",
            "sampled_addmm",
        ],
        _SPARSE,
    ),
    **dict.fromkeys(
        ["data.__set__", "resize_", "resize_as_"], "it replaces the memory of a tensor"
    ),
    **dict.fromkeys(["grad", "backward"], "a trace has no gradients; trace what is differentiated"),
    "ddp_normalized": "its weights depend on the batch; trace the model before ps.nn.ddp_normalize, or ps.nn.fold it",
}
INPUTS_READ = "the forward pass depends on the data it sees, on values of its inputs, so it has no single graph"
OF_INPUTS = (
    "Leave an input that may be left out (a mask) out of the example, and keep what is fixed (the edges of a graph) as "
    "a buffer of the model, whose values a trace reads"
)
DRAWS_READ = "random numbers that it draws decide which steps the forward pass takes, so it has no single graph"
OF_DRAWS = (
    "Trace it in evaluation form (model.eval()), turn the draw off (layerdrop=0), or multiply by the random numbers "
    "instead of choosing by them"
)
