"""The record of attention; ``builtin`` adds the rule that finds it in programs."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.attention import builder, primitives, workload
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.attention_backward_sm80 import ATTENTION_BACKWARD_SM80
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90
from tracea_jax.variants.attention_cpu import ATTENTION_CPU
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.attention_decode_sm90 import ATTENTION_DECODE_SM90
from tracea_jax.variants.attention_sm80 import ATTENTION_SM80
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90

ATTENTION = Op(
    name="attention",
    summary="softmax(q k') v, for each head",
    problem=AttentionProblem,
    variants=(
        ATTENTION_DECODE_SM90,
        ATTENTION_SM90,
        ATTENTION_BACKWARD_SM90,
        ATTENTION_BACKWARD_SM80,
        ATTENTION_SM80,
        ATTENTION_CUDNN,
        ATTENTION_CPU,
        XLA,
    ),
    primitives=primitives.PLANNED,
    bench=functools.partial(OpBench, workload.ATTENTION),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
