"""The record of elementwise functions. No rule finds them: XLA fuses those of jnp."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.elementwise import builder, primitive, workload
from tracea_jax.problem import ElementwiseProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.elementwise import ELEMENTWISE_CPU, ELEMENTWISE_CUDA

ELEMENTWISE = Op(
    name="elementwise",
    summary="a function of each element of one or two arrays",
    problem=ElementwiseProblem,
    variants=(ELEMENTWISE_CUDA, ELEMENTWISE_CPU, XLA),
    primitives=(primitive.PLANNED,),
    bench=functools.partial(OpBench, workload.ELEMENTWISE),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
