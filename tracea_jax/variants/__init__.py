"""The catalogue: for each op its variants, our kernels first and XLA last."""

from __future__ import annotations

from tracea_jax.problem import GatedMatmulProblem, Problem
from tracea_jax.variants import gated
from tracea_jax.variants.attention_cpu import ATTENTION_CPU
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN
from tracea_jax.variants.base import (
    XLA,
    Call,
    Config,
    CpuCall,
    Inline,
    Variant,
    config_from_json,
    kernels_in,
)
from tracea_jax.variants.conv2d_cpu import CONV2D_CPU
from tracea_jax.variants.gated import GATED_FUSED, GATED_UNFUSED
from tracea_jax.variants.gated_sm90 import GATED_SM90
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.gemm_sm80 import GEMM_SM80
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED, GEMM_SM90_SPLIT
from tracea_jax.variants.space import Space
from tracea_jax.variants.steps import Buffer, Expression, Launch, Step, Steps

CATALOGUE: dict[str, tuple[Variant, ...]] = {
    "matmul": (GEMM_SM90, GEMM_SM90_PADDED, GEMM_SM90_SPLIT, GEMM_SM80, GEMM_CPU, XLA),
    "gated_matmul": (GATED_SM90, GATED_FUSED, GATED_UNFUSED, XLA),
    "conv2d": (CONV2D_CPU, XLA),
    "attention": (ATTENTION_CUDNN, ATTENTION_CPU, XLA),
}


def parts(problem: Problem) -> tuple[Problem, ...]:
    """Problems of other ops that variants of this one plan on their own."""
    return gated.parts(problem) if isinstance(problem, GatedMatmulProblem) else ()


def of(op: str) -> tuple[Variant, ...]:
    """All variants of an op."""
    return CATALOGUE[op]


def get(op: str, name: str) -> Variant:
    """The variant of this name.

    Raises:
      ValueError: naming the variants the op has.
    """
    for variant in of(op):
        if variant.name == name:
            return variant
    names = ", ".join(v.name for v in of(op))
    raise ValueError(f"{op} has no variant {name!r}; it has {names}")


def check_implementation(op: str, implementation: str | None) -> None:
    """Raises ValueError unless ``implementation`` is a value that the op accepts."""
    valid = ("tracea", *(v.name for v in of(op)))
    if implementation is not None and implementation not in valid:
        raise ValueError(
            f"implementation={implementation!r} is unknown; it must be None or one of "
            + ", ".join(valid)
        )


__all__ = [
    "CATALOGUE",
    "XLA",
    "Buffer",
    "Call",
    "Config",
    "CpuCall",
    "Expression",
    "Inline",
    "Launch",
    "Space",
    "Step",
    "Steps",
    "Variant",
    "check_implementation",
    "config_from_json",
    "get",
    "kernels_in",
    "of",
    "parts",
]
