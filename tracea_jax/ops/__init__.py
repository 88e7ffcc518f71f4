"""The ops: what JAX programs call."""

from tracea_jax.ops import attention_bench as _attention_bench  # noqa: F401
from tracea_jax.ops import conv2d_bench as _conv2d_bench  # noqa: F401
from tracea_jax.ops import gated_bench as _gated_bench  # noqa: F401
from tracea_jax.ops import matmul_bench as _bench  # noqa: F401  how to measure
from tracea_jax.ops.attention import attention
from tracea_jax.ops.conv2d import conv2d
from tracea_jax.ops.export import export_checks
from tracea_jax.ops.gated_matmul import gated_matmul
from tracea_jax.ops.matmul import matmul
from tracea_jax.ops.remat import remat_policy

__all__ = [
    "attention",
    "conv2d",
    "export_checks",
    "gated_matmul",
    "matmul",
    "remat_policy",
]
