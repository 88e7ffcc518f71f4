"""The words that users choose from, as types: what editors complete and checkers know.

    from tracea_jax.typing import Activation, Effort, Goal, Implementation, OnMiss

Checks while a program runs are made of the same types by ``typing.get_args``, each in
the module that knows what the words mean. Callers: these modules and users.
"""

from __future__ import annotations

from typing import Literal

Activation = Literal["none", "relu", "gelu", "gelu_exact", "silu"]
Effort = Literal["none", "quick", "default", "max"]
Goal = Literal["latency", "throughput", "balanced"]
OnMiss = Literal["heuristic", "tune", "error"]

# Those of all ops of this package that run in programs, as doctor prints them. An op
# takes its own; settings take all, and the variants of ops that a program registers.
Implementation = Literal[
    "xla",
    "tracea",
    "gemm_sm90",
    "gemm_sm90_padded",
    "gemm_sm90_split",
    "gemm_sm80",
    "gemm_cpu",
    "gated_sm90",
    "gated_fused",
    "gated_unfused",
    "conv2d_bands",
    "conv2d_cpu",
    "conv2d_depthwise",
    "conv2d_grouped",
    "conv2d_grouped_images",
    "conv2d_product",
    "conv2d_strips_sm90",
    "conv2d_sm90",
    "conv2d_stem_sm90",
    "conv2d_weights_sm90",
    "conv2d_stem_weights",
    "conv2d_sm80",
    "cudnn",
    "attention_cpu",
    "attention_decode_sm90",
    "attention_sm80",
    "attention_sm90",
    "attention_backward_sm80",
    "attention_backward_sm90",
    "paged_attention_sm90",
    "elementwise_cpu",
    "elementwise_cuda",
    "channel_sums_cuda",
    "layer_norm",
    "group_norm_sm90",
    "max_pool_cuda",
    "cuda_kernel",
]

__all__ = ["Activation", "Effort", "Goal", "Implementation", "OnMiss"]
