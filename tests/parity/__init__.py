"""Proof that the device headers compute what the Python algebra says.

``kernel()`` is a translation unit of ``static_assert``s: each ``Case`` is a C++
expression of ``n`` and the values that Python computes for n = 0, 1, ... Compiling it
proves the agreement; no GPU, no run and no tolerance is involved. A disagreement fails
to compile and names the case and the first n that differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from parity import proof
from parity.division import divisor_cases
from parity.layouts import (
    fragment_cases,
    register_operand_cases,
    staging_cases,
    swizzle_cases,
)
from parity.operands import operand_cases, operand_reads, tile_copies
from parity.pipelines import pipeline_cases
from parity.proof import Case
from tracea_jax.emit.kernel import Kernel

# Header -> what is claimed of it, and of others at the same time.
CLAIMS_OF: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {
    "tile/fast_divide.cuh": (divisor_cases,),
    "tile/fragment.cuh": (fragment_cases, staging_cases, register_operand_cases),
    "tile/operand_map.cuh": (operand_cases,),
    "tile/pipeline.cuh": (pipeline_cases,),
    "tile/register_operand_map.cuh": (register_operand_cases,),
    "tile/swizzle.cuh": (swizzle_cases, operand_cases),
}
HEADERS = tuple(CLAIMS_OF)


@functools.cache  # takes seconds
def cases(*headers: str) -> tuple[Case, ...]:
    """Every claim about headers of ``kernels/cuda/tile``: of these, or of all."""
    claimed = (make for header in headers or HEADERS for make in CLAIMS_OF[header])
    return tuple(case for make in dict.fromkeys(claimed) for case in make())


def kernel(claims: Iterable[Case] | None = None, *, arch: str = "sm_90a") -> Kernel:
    """The kernel that compiles if all claims hold: ``cases()`` if omitted."""
    return proof.kernel(HEADERS, cases() if claims is None else claims, arch)


__all__ = [
    "CLAIMS_OF",
    "HEADERS",
    "Case",
    "cases",
    "kernel",
    "operand_reads",
    "tile_copies",
]
