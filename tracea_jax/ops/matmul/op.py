"""The record of matmul; ``builtin`` adds the rule that finds it in programs."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.matmul import builder, primitive, workload
from tracea_jax.problem import GemmProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.gemm_sm80 import GEMM_SM80
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED, GEMM_SM90_SPLIT

MATMUL = Op(
    name="matmul",
    summary="activation(a @ b + bias) + residual",
    problem=GemmProblem,
    variants=(
        GEMM_SM90,
        GEMM_SM90_PADDED,
        GEMM_SM90_SPLIT,
        GEMM_SM80,
        GEMM_CPU,
        XLA,
    ),
    primitives=primitive.PLANNED,
    bench=functools.partial(OpBench, workload.MATMUL),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
