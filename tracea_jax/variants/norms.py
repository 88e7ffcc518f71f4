"""Shared code of norm kernels: reasons to refuse, and the steps of gradients.

Callers: the variants ``group_norm_sm90`` and ``layer_norm``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.norms import pack
from tracea_jax.problem import GroupNormProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps

DTYPES = ("bfloat16", "float16", "float32")


def refused_arrays(problem: GroupNormProblem) -> Iterator[str]:
    """Why dtypes or channels are refused."""
    p = problem
    if p.dtype not in DTYPES or p.parameters not in DTYPES:
        yield (
            f"arrays of {p.dtype}, scale and bias of {p.parameters}; it takes "
            f"{', '.join(DTYPES)}"
        )
    elif p.channels % pack(p):
        yield (
            f"{p.channels} channels; it takes multiples of {pack(p)}, which are 16 "
            "bytes"
        )
    if p.size == 0:
        yield "its arrays are empty"


def norm_call(problem: GroupNormProblem, kernel: Kernel, parts: int) -> Call:
    """A kernel's call; of gradients, the sums that it leaves in parts are added."""
    if problem.direction == "forward":
        return kernel
    reads = ("x", "scale", "bias", "mean", "inverse", "dy")
    shape = (parts, 2, problem.channels)
    sums = Buffer(name="sums", shape=shape, dtype="float32")
    return Steps(
        operands=reads,
        results=("dx", "dscale", "dbias"),
        scratch=(sums,),
        steps=(
            Launch(
                name="gradients",
                kernel=kernel,
                reads=reads,
                writes=("dx", sums.name),
            ),
            Expression(
                name="sum",
                function=over_parts,
                reads=(sums.name,),
                writes=("dscale", "dbias"),
                arguments=(("dtype", problem.parameters),),
            ),
        ),
    )


def over_parts(module: Any, sums: Any, *, dtype: str) -> tuple[Any, Any]:
    """The gradients of scale and bias from sums of parts, (parts, 2, channels)."""
    total = module.sum(sums, 0).astype(dtype)
    return total[0], total[1]
