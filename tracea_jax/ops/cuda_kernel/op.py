"""The record of users' kernels: one op, whose problems name the kernel."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from tracea_jax.catalogue import Op
from tracea_jax.ops.common.bench import OpBench
from tracea_jax.ops.cuda_kernel.primitive import PLANNED
from tracea_jax.ops.cuda_kernel.workload import WORKLOAD
from tracea_jax.problem.cuda_kernel import CudaKernelProblem
from tracea_jax.variants.cuda_kernel import CUDA_KERNEL, REFERENCE


def _build(*sizes: Any, **how: Any) -> NoReturn:
    raise ValueError("problems of kernels come from functions that call them")


CUDA_KERNEL_OP = Op(
    name="cuda_kernel",
    summary="a CUDA kernel of the user's",
    problem=CudaKernelProblem,
    variants=(CUDA_KERNEL, REFERENCE),
    primitives=(PLANNED,),
    bench=functools.partial(OpBench, WORKLOAD),
    build=_build,
    arguments=(),
    is_called=False,
)
