"""Rules and formulas that the prebuilt CPU kernels share: operands and blocking.

Whether a small product is worth a call is decided in ``cpu_calls``. Callers:
``gemm_cpu``, ``conv2d_cpu`` and ``attention_cpu``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tracea_jax.device import CpuDevice, Device
from tracea_jax.problem import Conv2dProblem, GemmProblem
from tracea_jax.variants.space import Columns

DTYPES = ("float32", "bfloat16", "float16")
# All three precisions give the same results: products are summed in float32.
PRECISIONS = ("default", "high", "highest")
_SHORT_FLOPS = 1.5e8  # for each core: less than a millisecond of work
# Above this, four tasks a thread; measured on twice as many cores, shared with others.
_FEW_CORES = 8


def refuses_device(device: Device) -> str | None:
    """Why the kernels cannot run on the device, or None."""
    if isinstance(device, CpuDevice):
        return None
    return f"it runs on CPUs; the device is {device.platform}"


def refuses_dtype(role: str, dtype: str | None) -> str | None:
    """Why an array of this role, such as "operands", cannot have the dtype, or None."""
    if dtype in DTYPES:
        return None
    return f"{role} of dtype {dtype}; it takes {', '.join(DTYPES)}"


def refuses_product(problem: GemmProblem | Conv2dProblem, device: Device) -> str | None:
    """Why no shape of the problem's dtypes can be computed on the device, or None."""
    if reason := refuses_device(device):
        return reason
    if problem.lhs != problem.rhs:
        return f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
    reason = refuses_dtype("operands", problem.lhs)
    if reason := reason or refuses_dtype("output", problem.out):
        return reason
    for role in ("bias", "residual"):
        dtype = getattr(problem.epilogue, f"{role}_dtype") or problem.out
        if reason := refuses_dtype(f"a {role}", dtype):
            return reason
    if problem.precision not in PRECISIONS:
        return f"precision {problem.precision} names an algorithm only XLA has"
    return None


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up, of integers or of columns of integers."""
    return -(-a // b)


def tasks_of_thread(flops: int, device: CpuDevice) -> int:
    """Number of tasks for each thread, if nothing is measured.

    A long product has two: if a core is slower than the others, or is taken away for a
    while, the other threads take over its second task. A short product has one, because
    packing operands twice would cost more. On many cores there are four, because some
    of many cores are always slower than others.
    """
    if device.cores > _FEW_CORES:
        return 4
    return 1 if flops <= _SHORT_FLOPS * device.cores else 2


def blocking_features(
    device: CpuDevice, *, depth: int, width: int, kc: Any, nc: Any, panel_bytes: Any
) -> Columns:
    """Fit of a blocking to a product and the caches, for a surrogate model.

    Args:
      device: has the caches.
      depth, width: terms of each sum, and columns of the result.
      kc, nc: columns with the actual depth and width of the blocks.
      panel_bytes: column with the bytes of a packed block.
    """
    return {
        "log2_panel_per_l2": np.log2(panel_bytes / device.l2_bytes),
        "log2_depth_blocks": np.log2(np.maximum(ceil_div(depth, kc), 1)),
        "log2_strips": np.log2(np.maximum(ceil_div(width, nc), 1)),
    }
