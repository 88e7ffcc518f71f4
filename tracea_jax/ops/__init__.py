"""The ops: what JAX programs call."""

from tracea_jax.ops.attention import workload as _attention_bench  # noqa: F401
from tracea_jax.ops.attention.public import attention
from tracea_jax.ops.common.export import export_checks
from tracea_jax.ops.common.remat import remat_policy
from tracea_jax.ops.conv2d import workload as _conv2d_bench  # noqa: F401
from tracea_jax.ops.conv2d.primitive import conv2d
from tracea_jax.ops.gated_matmul import workload as _gated_bench  # noqa: F401
from tracea_jax.ops.gated_matmul.primitive import gated_matmul
from tracea_jax.ops.matmul import workload as _bench  # noqa: F401  how to measure
from tracea_jax.ops.matmul.primitive import matmul

__all__ = [
    "attention",
    "conv2d",
    "export_checks",
    "gated_matmul",
    "matmul",
    "remat_policy",
]
