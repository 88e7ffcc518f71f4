"""The ops of this package, registered with the rules that find them in programs.

The records are made in ``ops/<op>/op.py``, the rules in ``rewrite``, which is above the
ops: here they meet. Only ``catalogue`` imports this module, by name, when it is first
asked for an op.
"""

from __future__ import annotations

import dataclasses

from tracea_jax import catalogue
from tracea_jax.ops.attention.op import ATTENTION
from tracea_jax.ops.channel_affine.primitive import CHANNEL_AFFINE
from tracea_jax.ops.channel_sums.op import CHANNEL_SUMS
from tracea_jax.ops.conv2d.op import CONV2D
from tracea_jax.ops.cuda_kernel.op import CUDA_KERNEL_OP
from tracea_jax.ops.elementwise.op import ELEMENTWISE
from tracea_jax.ops.gated_matmul.op import GATED_MATMUL
from tracea_jax.ops.group_norm.op import GROUP_NORM
from tracea_jax.ops.linear_cross_entropy.primitive import LINEAR_CROSS_ENTROPY
from tracea_jax.ops.matmul.op import MATMUL
from tracea_jax.ops.max_pool.op import MAX_POOL
from tracea_jax.ops.paged_attention.op import PAGED_ATTENTION
from tracea_jax.ops.program import PROGRAM
from tracea_jax.rewrite import (
    attention,
    channel_affine,
    channel_sums,
    conv2d,
    cross_entropy,
    gated_matmul,
    group_norm,
    matmul,
    max_pool,
)

# Rules of later ops are tried first, see ``rewrite.rules``.
for _op, _rule in (
    (CHANNEL_AFFINE, channel_affine.CHANNEL_AFFINE),
    (CHANNEL_SUMS, channel_sums.MOMENTS),
    (GROUP_NORM, group_norm.GROUP_NORM),
    (MAX_POOL, max_pool.MAX_POOL),
    (MATMUL, matmul.MATMUL),
    (GATED_MATMUL, gated_matmul.GATED_MATMUL),
    (LINEAR_CROSS_ENTROPY, cross_entropy.LINEAR_CROSS_ENTROPY),
    (CONV2D, conv2d.CONV2D),
    (ATTENTION, attention.ATTENTION),
):
    catalogue.register(dataclasses.replace(_op, rules=(_rule,)))
catalogue.register(PAGED_ATTENTION)
catalogue.register(ELEMENTWISE)
catalogue.register(PROGRAM)
catalogue.register(CUDA_KERNEL_OP)
