"""The record of gated_matmul; ``builtin`` adds the rule that finds it in programs."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.gated_matmul import builder, primitive, workload
from tracea_jax.problem import GatedMatmulProblem
from tracea_jax.variants import XLA, gated
from tracea_jax.variants.gated_sm90 import GATED_SM90

GATED_MATMUL = Op(
    name="gated_matmul",
    summary="activation(x @ w_gate) * (x @ w_up)",
    problem=GatedMatmulProblem,
    variants=(GATED_SM90, gated.GATED_FUSED, gated.GATED_UNFUSED, XLA),
    primitives=primitive.PLANNED,
    bench=functools.partial(OpBench, workload.GATED_MATMUL),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
