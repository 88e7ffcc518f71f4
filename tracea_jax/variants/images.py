"""Refusals and measured limits that convolution kernels on GPUs share.

Callers: the variants of convolutions on GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.problem import ITEMSIZE, Conv2dProblem
from tracea_jax.variants.cuda_gemm import EXACT_PRECISIONS, INT32_MAX
from tracea_jax.variants.space import Rule, Space, as_config

MOST_TAPS, MOST_STRIDE, MOST_DILATION = 11, 4, 16
_MOST_PADDING = 2**20
# Of the 3 x 3 convolutions of 8 images of ResNets, and of 64.
FEW_FLOPS, MANY_FLOPS = 2**30, 2**33
_SMALL_FLOPS, _SMALL_PIXELS = 3 << 24, 49  # of those of 16 bits of a small image


def refused_arrays(problem: Conv2dProblem, dtypes: Sequence[str]) -> Iterator[str]:
    """Why layout, dtypes and precision are refused.

    Args:
      problem: the problem.
      dtypes: of operands; results, biases and residuals may also be float32.
    """
    p = problem
    if p.layout != "nhwc":
        yield f"layout {p.layout}; it takes nhwc"
    if p.lhs != p.rhs or p.lhs not in dtypes:
        yield f"operands {p.lhs} and {p.rhs}; it takes two of {', '.join(dtypes)}"
    results = tuple(dict.fromkeys((*dtypes, "float32")))
    for what in (p.out, p.epilogue.bias_dtype, p.epilogue.residual_dtype):
        if what not in (None, *results):
            yield (
                f"a result, bias or residual of dtype {what}; it takes "
                f"{', '.join(results)}"
            )
    if p.precision not in EXACT_PRECISIONS:
        yield f"precision {p.precision} names an algorithm only XLA has"
    if 0 in p.elements:
        yield "its arrays are empty"


def refused_tf32(problem: Conv2dProblem) -> Iterator[str]:
    """Why float32 is not multiplied as TF32, as XLA does at the default precision."""
    if problem.lhs == "float32" and problem.precision != "default":
        yield (
            f"precision {problem.precision} of float32 operands; it multiplies them as "
            "TF32, which is the default precision"
        )


def refused_sizes(problem: Conv2dProblem) -> Iterator[str]:
    """Why sizes are refused: each sentence names the limit."""
    p = problem
    if max(p.kernel_height, p.kernel_width) > MOST_TAPS:
        yield (
            f"a kernel of {p.kernel_height}x{p.kernel_width}; it takes up to "
            f"{MOST_TAPS}x{MOST_TAPS}"
        )
    if max(p.strides) > MOST_STRIDE:
        yield f"strides {p.strides}; they may be up to {MOST_STRIDE}"
    if max(p.dilation) > MOST_DILATION:
        yield f"dilation {p.dilation}; it may be up to {MOST_DILATION}"
    is_mixed = any(s > 1 < d for s, d in zip(p.strides, p.dilation, strict=True))
    if p.direction == "input_grad" and is_mixed:
        yield f"the gradient of strides {p.strides} with dilation {p.dilation}"
    if max(map(abs, sum(p.padding, ()))) > _MOST_PADDING:
        yield f"padding {p.padding}; it may be up to {_MOST_PADDING}"
    out_height, out_width = p.out_size
    if max(p.height * p.width, out_height * out_width) * p.in_channels > INT32_MAX:
        yield "an image has more than 2^31 - 1 elements"


SmemBytes = Callable[[Any, Any], Any]  # of a block, by problem and config or columns
NARROW = Rule(
    code="narrow",
    refuses=lambda p, c, d: c.tile_n * ITEMSIZE[p.out] < 128,
    why=lambda p, c, d: f"tile_n={c.tile_n} of {p.out} is less than 128 bytes",
)


def memory_rule(smem_bytes: SmemBytes) -> Rule:
    """Refuses what does not fit into the shared memory of a block."""
    return Rule(
        code="smem",
        refuses=lambda p, c, d: smem_bytes(p, c) > d.smem_per_block_bytes,
        why=lambda p, c, d: (
            f"it needs {int(smem_bytes(p, c))} bytes of shared memory; a block has "
            f"{d.smem_per_block_bytes}"
        ),
    )


def deepest_ring(
    smem_bytes: SmemBytes, p: Conv2dProblem, c: Any, d: CudaDevice, few: Iterable[int]
) -> Any:
    """The most ``stages``, of an ascending few, that fit; 0 if none do."""
    deepest = np.zeros_like(c.stages)
    for stages in few:
        fits = smem_bytes(p, dataclasses.replace(c, stages=stages))
        deepest = np.where(fits <= d.smem_per_block_bytes, stages, deepest)
    return deepest


def ranked(
    space: Space,
    problem: Conv2dProblem,
    device: CudaDevice,
    cost: Callable[[Conv2dProblem, Any, CudaDevice], Any],
    count: int,
) -> tuple[Any, ...]:
    """The cheapest configs of a space of columns; of equal ones the first."""
    columns = as_config(space.config_type, space.columns)
    order = np.argsort(cost(problem, columns, device), kind="stable")
    return tuple(space.config(int(i)) for i in order[:count])


def is_dense_3x3(problem: Conv2dProblem) -> bool:
    """Returns whether this is a 3 x 3 convolution such as those that were measured.

    They had as many channels out as in, 64 to 640, batches of 1, 8 and 64 images of
    ResNets and of 8 of U-Nets, and strides of 1 and 2. Those of float32 had batches of
    8 to 128 and up to 1024 channels.
    """
    p = problem
    is_wide = p.lhs == "float32"
    return (
        (p.kernel_height, p.kernel_width) == (3, 3)
        and p.strides in ((1, 1), (2, 2))
        and p.dilation == (1, 1)
        and p.groups == 1
        and p.in_channels % 64 == 0 == p.out_channels % 64
        and (p.flops >= FEW_FLOPS or (_is_measured_small(p) and not is_wide))
        and not (is_wide and _is_thin(p))
    )


def _is_measured_small(problem: Conv2dProblem) -> bool:
    return problem.flops >= _SMALL_FLOPS and pixels(problem) >= _SMALL_PIXELS


def pixels(problem: Conv2dProblem) -> int:
    """Pixels of the results of a forward convolution, over all images."""
    return problem.batch * math.prod(problem.out_size)


def _is_thin(problem: Conv2dProblem) -> bool:
    """True if pixels are so few for the channels that cuDNN was as fast in float32."""
    channels = max(problem.in_channels, problem.out_channels)
    return channels > 1024 or 4 * pixels(problem) < 3 * channels


def is_grouped_3x3(problem: Conv2dProblem) -> bool:
    """True if this is a 3 x 3 convolution of groups such as those that were measured.

    They had strides of 1, and as many channels out as in.
    """
    p = problem
    return (
        (p.kernel_height, p.kernel_width) == (3, 3)
        and p.strides == (1, 1) == p.dilation
        and 1 < p.groups < p.in_channels == p.out_channels
    )


def is_measured(
    problem: Conv2dProblem, device: Device, itemsizes: Sequence[int] = (2,)
) -> bool:
    """Returns whether device and dtypes are those that convolutions were measured with.

    Args:
      problem, device: what to compute, and where.
      itemsizes: bytes of the elements of operands, and of those of the result.
    """
    return (
        isinstance(device, CudaDevice)
        and device.capability == (9, 0)
        and ITEMSIZE[problem.lhs] == ITEMSIZE[problem.out]
        and ITEMSIZE[problem.lhs] in itemsizes
    )
