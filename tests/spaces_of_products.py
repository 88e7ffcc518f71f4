"""Products and devices whose search spaces are looked at."""

from __future__ import annotations

from typing import Any

from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.problem import GemmProblem

H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=4)


def problem(m: int = 4096, n: int = 4096, k: int = 4096, **fields: Any) -> GemmProblem:
    dtype = "bfloat16"
    return GemmProblem(m=m, n=n, k=k, lhs=dtype, rhs=dtype, out=dtype, **fields)


def accepts(variant: Any, asked: GemmProblem, config: Any, device: Any) -> bool:
    try:
        variant.check(asked, config, device)
    except ValueError:
        return False
    return True
