"""The record of two sums of each channel. ``rewrite.channel_sums`` finds moments."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.channel_sums import primitive, workload
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.problem import ChannelSumsProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.channel_sums import CHANNEL_SUMS_CUDA

CHANNEL_SUMS = Op(
    name="channel_sums",
    summary="two sums of each channel, as of batch norms",
    problem=ChannelSumsProblem,
    variants=(CHANNEL_SUMS_CUDA, XLA),
    primitives=(primitive.PLANNED,),
    bench=functools.partial(OpBench, workload.WORKLOAD),
    build=ChannelSumsProblem,
    arguments=(),
    is_called=False,
)
