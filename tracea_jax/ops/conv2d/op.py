"""The record of conv2d; ``builtin`` adds the rule that finds it in programs."""

from __future__ import annotations

import functools

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.conv2d import builder, primitive, workload
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.conv2d_bands import CONV2D_BANDS
from tracea_jax.variants.conv2d_cpu import CONV2D_CPU
from tracea_jax.variants.conv2d_depthwise import CONV2D_DEPTHWISE
from tracea_jax.variants.conv2d_grouped import CONV2D_GROUPED
from tracea_jax.variants.conv2d_grouped_images import CONV2D_GROUPED_IMAGES
from tracea_jax.variants.conv2d_product import CONV2D_PRODUCT
from tracea_jax.variants.conv2d_sm80 import CONV2D_SM80
from tracea_jax.variants.conv2d_sm90 import CONV2D_SM90
from tracea_jax.variants.conv2d_stem_sm90 import CONV2D_STEM_SM90
from tracea_jax.variants.conv2d_stem_weights import CONV2D_STEM_WEIGHTS
from tracea_jax.variants.conv2d_strips_sm90 import CONV2D_STRIPS_SM90
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90

CONV2D = Op(
    name="conv2d",
    summary="a convolution of (BATCH, H, W, C) with (R, S, C / groups, K)",
    problem=Conv2dProblem,
    variants=(
        CONV2D_PRODUCT,
        CONV2D_STRIPS_SM90,
        CONV2D_SM90,
        CONV2D_STEM_SM90,
        CONV2D_BANDS,
        CONV2D_DEPTHWISE,
        CONV2D_GROUPED_IMAGES,
        CONV2D_GROUPED,
        CONV2D_WEIGHTS_SM90,
        CONV2D_STEM_WEIGHTS,
        CONV2D_SM80,
        CONV2D_CPU,
        XLA,
    ),
    primitives=primitive.PLANNED,
    bench=functools.partial(OpBench, workload.CONV2D),
    build=builder.build,
    arguments=builder.ARGUMENTS,
)
