"""The ops: what JAX programs call."""

from tracea_jax.ops import matmul_bench as _bench  # noqa: F401  how to measure
from tracea_jax.ops.export import export_checks
from tracea_jax.ops.matmul import matmul
from tracea_jax.ops.remat import remat_policy

__all__ = ["export_checks", "matmul", "remat_policy"]
