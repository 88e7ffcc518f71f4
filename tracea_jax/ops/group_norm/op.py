"""The record of group norms, which a rule finds in programs; nobody calls them."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.group_norm import primitive, workload
from tracea_jax.problem import GroupNormProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.group_norm_sm90 import GROUP_NORM_SM90
from tracea_jax.variants.layer_norm import LAYER_NORM


def _build(*sizes: Any, **how: Any) -> NoReturn:
    raise ValueError("problems of group norms come from functions that have them")


GROUP_NORM = Op(
    name="group_norm",
    summary="each image's groups of channels with mean 0 and variance 1",
    problem=GroupNormProblem,
    variants=(LAYER_NORM, GROUP_NORM_SM90, XLA),
    primitives=primitive.PLANNED,
    bench=functools.partial(OpBench, workload.GROUP_NORM),
    build=_build,
    arguments=(),
    is_called=False,
)
