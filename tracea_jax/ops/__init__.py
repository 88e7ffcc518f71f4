"""The ops: what JAX programs call.

Each has a folder: the function, its primitive with the rules of JAX's transformations,
how it is measured, and its record (``op.py``), by which the rest of the package knows
it; ``common`` holds what several share.
"""

from tracea_jax.ops import elementwise
from tracea_jax.ops.attention.public import attention
from tracea_jax.ops.attention.ring.order import zigzag
from tracea_jax.ops.common.export import export_checks
from tracea_jax.ops.common.remat import remat_policy
from tracea_jax.ops.conv2d.public import conv2d
from tracea_jax.ops.gated_matmul.primitive import gated_matmul
from tracea_jax.ops.linear_cross_entropy.public import linear_cross_entropy
from tracea_jax.ops.matmul.public import matmul
from tracea_jax.ops.paged_attention.public import paged_attention

__all__ = [
    "attention",
    "conv2d",
    "elementwise",
    "export_checks",
    "gated_matmul",
    "linear_cross_entropy",
    "matmul",
    "paged_attention",
    "remat_policy",
    "zigzag",
]
