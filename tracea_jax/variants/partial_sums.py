"""The gradient of weights in two steps: partial sums, then their sum.

Sums over all pixels of all images are cut into parts, so that all multiprocessors have
some; which part is first must not change the result. Callers: the variants that compute
gradients of a convolution's weights.
"""

from __future__ import annotations

import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import sum_of_parts
from tracea_jax.emit.kernel import Kernel
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants.steps import Buffer, Launch, Steps

SOURCE = "cuda/sum_of_parts.cuh"


def summed(
    kernel: Kernel, parts: int, shape: tuple[int, ...], dtype: str, device: CudaDevice
) -> Steps:
    """A kernel and the sum of what it leaves.

    Args:
      kernel: reads x and dy, and writes (parts, *shape) of float32.
      parts: how many sums of each weight there are; they are added in a fixed order.
      shape, dtype: of the gradient, which has an even number of entries.
      device: what it runs on.
    """
    partial = Buffer(name="partial_sums", shape=(parts, *shape), dtype="float32")
    total = sum_of_parts.kernel(parts, math.prod(shape), dtype, device)
    return Steps(
        operands=("x", "dy"),
        results=("dw",),
        scratch=(partial,),
        steps=(
            Launch(
                name="products",
                kernel=kernel,
                reads=("x", "dy"),
                writes=(partial.name,),
            ),
            Launch(name="sum", kernel=total, reads=(partial.name,), writes=("dw",)),
        ),
    )


def summed_depthwise(
    kernel: Kernel, parts: int, problem: Conv2dProblem, device: CudaDevice
) -> Steps:
    """The same for the gradient of a depthwise convolution's weights."""
    p = problem
    shape = (p.kernel_height, p.kernel_width, 1, p.out_channels)
    return summed(kernel, parts, shape, p.out, device)
