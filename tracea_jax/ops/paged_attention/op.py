"""The record of paged_attention. No rule finds it in programs: they call it."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.paged_attention import builder, primitive, workload
from tracea_jax.problem import PagedAttentionProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.paged_attention_sm90 import PAGED_ATTENTION_SM90

PAGED_ATTENTION = Op(
    name="paged_attention",
    summary="attention of one query a sequence to keys and values in pages",
    problem=PagedAttentionProblem,
    variants=(PAGED_ATTENTION_SM90, XLA),
    primitives=(primitive.PLANNED,),
    bench=functools.partial(OpBench, workload.PAGED_ATTENTION),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
