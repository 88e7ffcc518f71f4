"""What the prebuilt CPU kernels have in common: operands and blocking."""

from __future__ import annotations

from typing import Any

import numpy as np

from tracea_jax.device import CpuDevice, Device
from tracea_jax.problem import Conv2dProblem, GemmProblem
from tracea_jax.variants.space import Columns

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")  # alike: products are summed in float32
_SHORT_FLOPS = 1.5e8  # of a core: less than a millisecond
_FEW_CORES = 8  # with twice as many, shared, four tasks a thread were measured


def refuses_device(device: Device) -> str | None:
    """Why the kernels cannot run there, or None."""
    if isinstance(device, CpuDevice):
        return None
    return f"it runs on CPUs; the device is {device.platform}"


def refuses_dtype(role: str, dtype: str | None) -> str | None:
    """Why an array of this role, such as "operands", cannot have the dtype, or None."""
    if dtype in DTYPES:
        return None
    return f"{role} of dtype {dtype}; it takes {', '.join(DTYPES)}"


def refuses_product(problem: GemmProblem | Conv2dProblem, device: Device) -> str | None:
    """Why a sum of products cannot be computed there, whatever its shape, or None."""
    if reason := refuses_device(device):
        return reason
    if problem.lhs != problem.rhs:
        return f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
    reason = refuses_dtype("operands", problem.lhs)
    if reason := reason or refuses_dtype("output", problem.out):
        return reason
    if problem.precision not in PRECISIONS:
        return f"precision {problem.precision} names an algorithm only XLA has"
    return None


def ceil_div(a: Any, b: Any) -> Any:
    """The quotient of integers or columns of them, rounded up."""
    return -(-a // b)


def tasks_of_thread(flops: int, device: CpuDevice) -> int:
    """Into how many tasks a thread's part of a product is cut, if nothing is measured.

    Two of a long product: where a core is slower than others, or is taken away for a
    while, the other threads take over. A short one loses more by packing operands
    twice. Of many cores some are always slower than others.
    """
    if device.cores > _FEW_CORES:
        return 4
    return 1 if flops <= _SHORT_FLOPS * device.cores else 2


def blocking_features(
    device: CpuDevice, *, depth: int, width: int, kc: Any, nc: Any, panel_bytes: Any
) -> Columns:
    """How a blocking fits a product and the caches, for a surrogate model.

    Args:
      device: of the caches.
      depth, width: terms of each sum, and columns of the result.
      kc, nc: depth and width of the blocks as they are used, columns.
      panel_bytes: of a packed block.
    """
    return {
        "log2_panel_per_l2": np.log2(panel_bytes / device.l2_bytes),
        "log2_depth_blocks": np.log2(np.maximum(ceil_div(depth, kc), 1)),
        "log2_strips": np.log2(np.maximum(ceil_div(width, nc), 1)),
    }
