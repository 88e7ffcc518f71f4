"""The record of max pooling. ``rewrite.max_pool`` finds it."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.max_pool import primitive, workload
from tracea_jax.problem import MaxPoolProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.max_pool import MAX_POOL_CUDA

MAX_POOL = Op(
    name="max_pool",
    summary="maxima of windows of images",
    problem=MaxPoolProblem,
    variants=(MAX_POOL_CUDA, XLA),
    primitives=(primitive.PLANNED, primitive.PLANNED_GRADIENT),
    bench=functools.partial(OpBench, workload.WORKLOAD),
    build=MaxPoolProblem,
    arguments=(),
    is_called=False,
)
