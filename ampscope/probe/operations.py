"""Kinds of operations, by the names that dispatch gives them."""

GARBAGE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_", "_efficientzerotensor",
}  # fmt: skip
"""Operations that return memory nobody has written."""
CONSTANTS = {
    "full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "new_full", "scalar_tensor", "where", "lift_fresh", "lift_fresh_copy",
    "index_fill", "index_fill_", "index_put", "index_put_", "masked_scatter", "triu", "tril", "constant_pad_nd", "copy_", "_local_scalar_dense",
    "scatter", "scatter_",
}  # fmt: skip
"""Operations that write a constant the user gave: an inf from them is meant (attention masks)."""
LOGS = {"log", "log2", "log10", "log1p", "logit", "xlogy", "special_xlogy", "special_log_ndtr", "log_", "log1p_"}
"""Operations with a pole: -inf from them may be meant, and exp heals it."""
MATMULS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm", "matmul", "addbmm", "mv", "addmv", "dot", "mkldnn_linear",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "mkldnn_convolution", "cudnn_convolution",
}  # fmt: skip
REDUCTIONS = {
    "sum",
    "mean",
    "norm",
    "linalg_vector_norm",
    "nansum",
    "prod",
    "cumsum",
    "var",
    "std",
    "var_mean",
    "logsumexp",
    "frobenius_norm",
    "index_add",
    "index_add_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "segment_reduce",
    "_embedding_bag",
    "trace",
}
NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")
VIEWS_KEEP = {
    "sqrt",
    "rsqrt",
    "reciprocal",
    "pow",
    "mul",
    "neg",
    "abs",
    "clone",
    "expand",
    "unsqueeze",
    "view",
    "_to_copy",
    "maximum",
}
FP16_FLUSH = 2.0**-25
"""FP16 rounds what is no larger to zero."""
