"""Problems, epilogues and a usual config for the tests of gemm_sm90."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracea_jax.device import NAMED
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import Epilogue, GemmProblem

H200 = NAMED["H200"]
WIDE = GemmSm90Config(tile_m=128, tile_n=256, stages=4, cluster_m=2)
SHAPE_FIELDS = ("tile_m", "tile_n", "consumers", "cluster_m", "cluster_n", "ping_pong")
BITS_16 = ("bfloat16", "float16")
GATE = Epilogue(
    activation="silu", residual=True, residual_op="multiply", save_preactivation=True
)
GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)
# The derivative with most constants.
GRADIENT_EXACT = dataclasses.replace(GRADIENT, activation="gelu_exact")


def problem(
    m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "bfloat16", **fields: Any
) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype} | fields
    return GemmProblem(m=m, n=n, k=k, **fields)
