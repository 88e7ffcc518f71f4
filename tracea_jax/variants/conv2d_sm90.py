"""conv2d_sm90: convolutions on Hopper as implicit products, by TMA im2col and wgmma.

    forward       y = activation(conv(x, w) + bias + residual)
    input_grad    dx, stride by stride where the convolution has one

Operands are bfloat16 or float16, or float32 as TF32: its weights are transposed before
a forward convolution. Here are the reasons that refuse problems, the legal configs, and
the choice of one without measurements; the kernel's text is in ``emit.conv2d_sm90``.
Caller: the op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_sm90 as emit
from tracea_jax.emit.conv2d_sm90 import OUT_DTYPES, Conv2dSm90Config
from tracea_jax.emit.conv_axes import refused_walks, walks
from tracea_jax.emit.conv_operands import DTYPES, DTYPES_16, along_k
from tracea_jax.problem import ITEMSIZE, Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.conv_weights import reading_weights
from tracea_jax.variants.cuda_gemm import EXACT_PRECISIONS, INT32_MAX
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.space import (
    Rule,
    Space,
    grid,
    legal_space,
)

UNIT_BYTES = 16  # of which pixels and rows of weights are multiples
_MOST_PHASES = 2  # of an axis
MOST_PIXELS = INT32_MAX - 1023  # with those of a tile beyond the edge
_MOST_ACCUMULATORS = {1: 128, 2: 128, 3: 96}  # by consumers, that leave registers
_CHOICES = {
    "tile_m": (64, 128, 192, 256),
    "tile_n": (64, 96, 128, 160, 192, 256),
    "consumers": (1, 2, 3),
    "ping_pong": (False, True),
    "cluster": (1, 2),
}
# A stage is released when the next one's products are issued, so that one is too few.
_RANGES = {"stages": (2, emit.MAX_STAGES)}
# Cycles of a multiprocessor, see ``_cost``. A step is 128 bytes of k, of which a row is
# copied for each pixel and channel of a tile. All multiprocessors copy from one cache,
# so that each is faster where some have no tile, down to a share of the time.
_PRODUCTS_A_CYCLE = 2048 / 64
_CYCLES_A_PIXEL, _CYCLES_A_CHANNEL = 2.9, 1.5
_TAIL_FACTOR, _SHARED_TAIL_FACTOR = 1.16, 1.08
_SHALLOW_FACTOR = 1.65  # two stages leave nothing in flight while one is multiplied
_LEAST_SHARE = 0.64
_OVERLAP = 9  # power of a mean of copies and products, which is near the larger one
_CYCLES_A_STEP, _CYCLES_A_CLUSTER, _CYCLES_A_TILE = 56, 700, 650
_STORED_BYTES_A_CYCLE = 22
_SCATTER_FACTOR = 2.9  # of stores to every other pixel
_FEWEST_FLOPS, _FEWEST_FLOPS_1X1 = 3 << 26, 2**32
_STAGES = tuple(range(2, emit.MAX_STAGES + 1))


def _splits_unevenly(p: Conv2dProblem, c: Any, d: CudaDevice) -> Any:
    return c.tile_m % (emit.SLAB * c.tile_consumers) != 0


def _spills(p: Conv2dProblem, c: Any, d: CudaDevice) -> Any:
    limit = np.select(
        [c.consumers == n for n in _MOST_ACCUMULATORS],
        list(_MOST_ACCUMULATORS.values()),
    )
    return c.accumulators > limit


LEGAL = (
    Rule(
        code="turns",
        refuses=lambda p, c, d: c.ping_pong & (c.consumers != 2),
        why=lambda p, c, d: f"two consumers take turns, not consumers={c.consumers}",
    ),
    Rule(
        code="consumers",
        refuses=_splits_unevenly,
        why=lambda p, c, d: (
            f"consumers={c.consumers} must share tile_m={c.tile_m} in slabs of "
            f"{emit.SLAB} pixels"
        ),
    ),
    Rule(
        code="registers",
        refuses=_spills,
        why=lambda p, c, d: (
            f"a thread would hold {c.accumulators} sums; with consumers={c.consumers} "
            f"it can hold {_MOST_ACCUMULATORS[c.consumers]}"
        ),
    ),
    images.NARROW,
    images.memory_rule(emit.smem_bytes),
)


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    columns = grid(
        tile_m=_CHOICES["tile_m"],
        tile_n=_CHOICES["tile_n"],
        stages=_STAGES,
        consumers=_CHOICES["consumers"],
        ping_pong=_CHOICES["ping_pong"],
        cluster=_CHOICES["cluster"],
    )
    return legal_space(
        columns, Conv2dSm90Config, (*LEGAL, *_WORTHWHILE), problem, device
    )


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[Conv2dSm90Config, ...]:
    """Those configs that the model finds fastest."""
    space = _space(problem, device)
    return images.ranked(space, problem, device, _cost, count)


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d.json`` of an H100 cuDNN took 1.14 to 1.4 times as long for 3 x 3 kernels
    of 128 to 512 channels on 64 images of ResNets, 1.65 to 2.4 times with a stride of
    2, 1.09 to 1.5 times for pixels with a stride or a residual, and 1.15 to 1.6 times
    for U-Nets. In float32 it took 1.03 to 1.35 times as long for 3 x 3 kernels, 1.25 to
    2.1 times with a stride of 2, and 1.01 to 1.24 times for pixels of many channels.
    With a stride of 2 it was slower on one image and on eight, too, and took 1.03 to 4
    times as long for the gradients of 1 x 1 and 2 x 2 kernels; no results are kept.
    """
    p = problem
    if not images.is_measured(p, device, (2, 4)):
        return False
    return images.is_dense_3x3(p) or _is_measured_1x1(p) or _scatters(p)


def _call(problem: Conv2dProblem, config: Conv2dSm90Config, device: CudaDevice) -> Call:
    return reading_weights(problem, emit.kernel(problem, config, device))


def _is_measured_1x1(p: Conv2dProblem) -> bool:
    return (
        (p.kernel_height, p.kernel_width) == (1, 1)
        and p.direction == "forward"
        and p.padding == ((0, 0), (0, 0))
        and p.strides in ((1, 1), (2, 2))
        and p.in_channels % 64 == 0 == p.out_channels % 64
        and p.flops >= _fewest_flops_1x1(p)
        and (_has_deep_pixels(p) if p.lhs == "float32" else _has_passes(p))
    )


def _fewest_flops_1x1(p: Conv2dProblem) -> int:
    """With a stride, 16 bits win on few images, too: cuDNN passes over them first."""
    passes_first = p.strides == (2, 2) and p.lhs != "float32"
    return _FEWEST_FLOPS if passes_first else _FEWEST_FLOPS_1X1


def _scatters(p: Conv2dProblem) -> bool:
    """Returns whether this is a gradient by phases such as those that were measured."""
    return (
        p.direction == "input_grad"
        and p.lhs != "float32"
        and p.strides == (2, 2)
        and p.dilation == (1, 1)
        and p.groups == 1
        and p.kernel_height == p.kernel_width <= 3
        and p.in_channels % 32 == 0 == p.out_channels % 32
        and p.flops >= _FEWEST_FLOPS
    )


def _has_passes(p: Conv2dProblem) -> bool:
    """Returns whether cuDNN passes over pixels before or behind its convolution."""
    return p.strides == (2, 2) or p.epilogue.residual


def _has_deep_pixels(p: Conv2dProblem) -> bool:
    """True if products of float32 take longer than their pixels, and weights less."""
    few, many = sorted((p.in_channels, p.out_channels))
    fewest = 128 if p.strides == (1, 1) else 512
    return few >= fewest and many >= 512 and 2 * images.pixels(p) >= 3 * many


def _has_tail(p: Conv2dProblem, c: Any) -> Any:
    """Tests whether the last slab of weights is a narrow one, which is slow to copy."""
    return (c.tile_n % emit.SLAB != 0) & (not along_k(p))


# A ring as deep as shared memory allows hides most latency: shallower ones were not
# measured, and are left out to keep the search small. Pairs of blocks were slower where
# each can copy its weights well.
_WORTHWHILE = (
    Rule(
        code="scattered",
        refuses=lambda p, c, d: c.ping_pong & (len(_taps_of_phases(p)) > 1),
        why=lambda p, c, d: "turns do not hide stores to every other pixel",
    ),
    Rule(
        code="alone",
        refuses=lambda p, c, d: (c.cluster > 1) & ~_has_tail(p, c),
        why=lambda p, c, d: f"cluster={c.cluster} pays only for narrow slabs",
    ),
    Rule(
        code="shallow",
        refuses=lambda p, c, d: (
            c.stages != images.deepest_ring(emit.smem_bytes, p, c, d, _STAGES)
        ),
        why=lambda p, c, d: f"stages={c.stages} leave shared memory unused",
    ),
)


def _cost(problem: Conv2dProblem, config: Any, device: CudaDevice) -> Any:
    """Cycles of the rounds of tiles, and at least those of a tile with the most taps.

    Of 1110 problems of 16 bits that were measured on an H100 and an H200, each with
    some of its configs, the cheapest took 0.8 % longer than the fastest, on average.
    """
    c = config
    blocks = emit.tile_count(problem, c) * c.cluster
    rounds = -(-blocks // device.sm_count)
    step = _cycles_of_step(problem, c, blocks / (rounds * device.sm_count))
    taps = _taps_of_phases(problem)
    multiplied: Any = emit.k_steps(problem) / len(taps) * step
    longest = emit.k_steps(problem) * max(taps) / sum(taps) * step
    bytes_stored = c.tile_m * c.tile_n * ITEMSIZE[problem.out]
    stored: Any = bytes_stored / _STORED_BYTES_A_CYCLE + _CYCLES_A_TILE
    stored = stored + np.where(c.cluster > 1, _CYCLES_A_CLUSTER, 0)
    stored = stored * (_SCATTER_FACTOR if len(taps) > 1 else 1)
    # In turns, one consumer stores while the other multiplies.
    hidden: Any = np.maximum(multiplied, stored)
    in_turns, together = rounds * hidden, rounds * (multiplied + stored) - stored
    taken = c.ping_pong * in_turns + (1 - c.ping_pong) * together
    return np.maximum(taken, longest) + stored


def _cycles_of_step(problem: Conv2dProblem, c: Any, busy: Any) -> Any:
    """Cycles of a step's copies and products, which overlap.

    Args:
      busy: the share of multiprocessors that have a block.
    """
    products = c.tile_m * c.tile_n / _PRODUCTS_A_CYCLE
    copied = _CYCLES_A_PIXEL * c.tile_m + _CYCLES_A_CHANNEL * c.tile_n
    copied = copied * _copying_factor(problem, c) * np.maximum(busy, _LEAST_SHARE)
    return (products**_OVERLAP + copied**_OVERLAP) ** (1 / _OVERLAP) + _CYCLES_A_STEP


def _taps_of_phases(problem: Conv2dProblem) -> list[int]:
    rows, columns = walks(problem)
    return [row.taps * column.taps for row in rows for column in columns]


def _copying_factor(p: Conv2dProblem, c: Any) -> Any:
    """By how much copies of a step are slower than their rows tell."""
    tail = np.where(c.cluster == 1, _TAIL_FACTOR, _SHARED_TAIL_FACTOR)
    return np.where(_has_tail(p, c), tail, 1) * np.where(
        c.stages == 2, _SHALLOW_FACTOR, 1
    )


def refused_problems(
    problem: Conv2dProblem, device: Device, dtypes: Sequence[str] = DTYPES_16
) -> Iterator[str]:
    """Why no kernel of convolutions for Hopper serves the problem; first those of all.

    The formulas of the kernels are for problems that have none of these reasons.

    Args:
      problem, device: what to compute, and where.
      dtypes: of operands.
    """
    p = problem
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
        return
    if device.capability != (9, 0):
        yield f"wgmma exists only on sm_90a; the device is {device.arch}"
    if p.direction == "weight_grad":
        yield "it computes no gradients of weights"
        return
    if p.layout != "nhwc":
        yield f"its images are {p.layout}; it reads nhwc"
    if p.lhs not in dtypes or p.lhs != p.rhs:
        yield (
            f"operands of dtype {p.lhs} and {p.rhs}; it takes two of "
            f"{' or '.join(dtypes)}"
        )
        return
    yield from _refused_results(p)
    yield from images.refused_tf32(p)
    if p.precision not in EXACT_PRECISIONS:
        yield f"precision {p.precision} names an algorithm only XLA has"
    if 0 in p.elements:
        yield "its arrays are empty"
    if p.groups != 1:
        yield f"it has {p.groups} groups; the product is of one"


def channel_unit(problem: Conv2dProblem) -> int:
    """Channels that are 16 bytes of the operands, and no less of the result."""
    return UNIT_BYTES // min(ITEMSIZE[problem.lhs], ITEMSIZE[problem.out])


def reasons_of_pixels(
    problem: Conv2dProblem, device: Device, dtypes: Sequence[str] = DTYPES_16
) -> Iterator[str]:
    """Why pixels and weights cannot be copied as they are; first those of all."""
    p = problem
    if refused := tuple(refused_problems(p, device, dtypes)):
        yield from refused
        return
    unit = channel_unit(p)
    for name in ("in_channels", "out_channels"):
        if (count := getattr(p, name)) % unit:
            yield (
                f"{name}={count} is not a multiple of {unit}, so that pixels or "
                f"weights are not aligned to {UNIT_BYTES} bytes for TMA"
            )
    yield from refused_walks(p)


def reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    """All reasons why not; those that hold for every problem come first."""
    p = problem
    if refused := tuple(reasons_of_pixels(p, device, DTYPES)):
        yield from refused
        return
    if p.direction == "input_grad" and max(map(len, walks(p))) > _MOST_PHASES:
        yield (
            f"the gradient of strides {p.strides} has more than {_MOST_PHASES} phases "
            "of an axis"
        )
    if emit.pixels(p) > MOST_PIXELS:
        yield f"its result has more than {MOST_PIXELS} pixels"


def _refused_results(problem: Conv2dProblem) -> Iterator[str]:
    """Why output, bias and residual cannot have their dtypes."""
    allowed = ", ".join(OUT_DTYPES)
    epilogue = problem.epilogue
    if problem.out not in OUT_DTYPES:
        yield f"output of dtype {problem.out}; it gives {allowed}"
        return
    for role in ("bias", "residual"):
        dtype = getattr(epilogue, f"{role}_dtype")
        if dtype not in (None, *OUT_DTYPES):
            yield f"{role} of dtype {dtype}; it takes {allowed}"
            return
    residual = epilogue.residual_dtype or problem.out
    if epilogue.residual and ITEMSIZE[residual] != ITEMSIZE[problem.out]:
        yield (
            f"residual of dtype {residual}; it must be as wide as the output, "
            f"{problem.out}"
        )


CONV2D_SM90 = KernelVariant(
    name="conv2d_sm90",
    config_type=Conv2dSm90Config,
    sources=("cuda/conv2d_sm90.cuh",),
    reasons=reasons,
    choices=_CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=_call,
)
