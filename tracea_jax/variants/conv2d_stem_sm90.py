"""conv2d_stem_sm90: first convolutions of networks, of images with few channels.

    y = activation(conv(x, w) + bias + residual)

for a stride of 2 along lines and at most four channels, as steps: the image with four
channels, the weights as a matrix, and the kernel, which gathers nothing, see
kernels/cuda/conv2d_stem_sm90.cuh. Caller: the op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_stem_sm90 as emit
from tracea_jax.emit.conv2d_stem_sm90 import Conv2dStemSm90Config
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.conv2d_sm90 import channel_unit, refused_problems
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.space import (
    Rule,
    Space,
    first_refusal,
    grid,
    legal_space,
)
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps

_MOST_ACCUMULATORS = 128
_MOST_DEPTH = 512  # rows of weights
_FEWEST_FLOPS = 2**27  # about those of one image
_CHOICES = {
    "lines": (2, 4, 8),
    "line_slabs": (1, 2),
    "tile_n": (64, 128),
    "stages": (2, 3, 4),
}


LEGAL = (
    Rule(
        code="registers",
        refuses=lambda p, c, d: c.accumulators > _MOST_ACCUMULATORS,
        why=lambda p, c, d: (
            f"a thread would hold {c.accumulators} sums; it can hold "
            f"{_MOST_ACCUMULATORS}"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return legal_space(grid(**_CHOICES), Conv2dStemSm90Config, LEGAL, problem, device)


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[Conv2dStemSm90Config, ...]:
    """Those of fewest slabs beyond the edge, and most lines of a stage."""
    legal = _space(problem, device).configs()
    preference = functools.partial(_preference, problem)
    return tuple(heapq.nsmallest(count, legal, key=preference))


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d.json`` of an H100 cuDNN took 7 times as long for a 7 x 7 kernel
    of 3 channels in steps of two on 64 images of 224 x 224, and 2 times on one.
    """
    p = problem
    return (
        images.is_measured(p, device)
        and (p.kernel_height, p.kernel_width) == (7, 7)
        and p.strides == (2, 2)
        and p.in_channels == 3
        and p.out_channels % 64 == 0
        and p.flops >= _FEWEST_FLOPS
    )


def _preference(problem: Conv2dProblem, config: Conv2dStemSm90Config) -> Any:
    """Fewest slabs beyond the edge, then most lines of a stage, three stages."""
    computed = emit.tile_count(problem, config) * config.lines * config.line_slabs
    waste = -(-problem.out_channels // config.tile_n) * config.tile_n * computed
    return waste, config.tile_n, -config.accumulators, abs(config.stages - 3)


def reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    """All reasons why not; those that hold for every problem come first."""
    p = problem
    if refused := tuple(refused_problems(p, device)):
        yield from refused
        return
    if p.direction != "forward":
        yield "it computes no gradients"
        return
    if p.in_channels > emit.CHANNELS:
        yield f"images of {p.in_channels} channels; it reads {emit.CHANNELS} at most"
    if p.strides[1] != emit.STRIDE:
        yield f"a stride of {p.strides[1]} along lines; its stride is {emit.STRIDE}"
    if p.dilation[1] != 1:
        yield "its kernel is dilated along lines"
    if p.out_channels % (unit := channel_unit(p)):
        yield (
            f"out_channels={p.out_channels} is not a multiple of {unit}, so "
            "that pixels of the result are not aligned to 16 bytes for TMA"
        )
    if emit.depth(p) > _MOST_DEPTH:
        yield (
            f"{emit.depth(p)} weights of a result with those of padding; it keeps "
            f"{_MOST_DEPTH}"
        )
    if max(p.batch, *p.out_size) * p.strides[0] > INT32_MAX // 4:
        yield "its images are too large for 32-bit coordinates"
    if not any(
        first_refusal(LEGAL, p, config, device) is None
        for config in Space(
            config_type=Conv2dStemSm90Config, columns=grid(**_CHOICES)
        ).configs()
    ):
        yield "lines of the image that a result needs do not fit in shared memory"


def _steps(
    problem: Conv2dProblem, config: Conv2dStemSm90Config, device: CudaDevice
) -> Steps:
    p, epilogue = problem, problem.epilogue
    rest = ("bias",) * (epilogue.bias != "none") + ("residual",) * epilogue.residual
    results = ("y", "z") if epilogue.save_preactivation else ("y",)
    width = emit.padded_width(p)
    image = Buffer(
        name="pixels", shape=(p.batch, p.height, width, emit.CHANNELS), dtype=p.lhs
    )
    matrix = Buffer(name="taps", shape=(emit.depth(p), p.out_channels), dtype=p.rhs)
    return Steps(
        operands=("x", "w", *rest),
        results=results,
        scratch=(image, matrix),
        steps=(
            Expression(
                name="widen",
                function=padded_pixels,
                reads=("x",),
                writes=("pixels",),
                arguments=(
                    *(("lead", emit.lead(p)), ("width", width)),
                    ("channels", emit.CHANNELS),
                ),
            ),
            Expression(
                name="flatten",
                function=padded_taps,
                reads=("w",),
                writes=("taps",),
                arguments=(("width", emit.window(p)), ("channels", emit.CHANNELS)),
            ),
            Launch(
                name="convolve",
                kernel=emit.kernel(p, config, device),
                reads=("pixels", "taps", *rest),
                writes=results,
            ),
        ),
    )


def padded_pixels(module: Any, x: Any, *, lead: int, width: int, channels: int) -> Any:
    """The image with zeros around its lines, ``lead`` in front, and behind channels."""
    behind = width - lead - x.shape[2]
    return module.pad(x, ((0, 0), (0, 0), (lead, behind), (0, channels - x.shape[3])))


def padded_taps(module: Any, w: Any, *, width: int, channels: int) -> Any:
    """The weights (R, S, C, K) as (R * width * channels, K), with zeros."""
    pads = ((0, 0), (0, width - w.shape[1]), (0, channels - w.shape[2]), (0, 0))
    return module.pad(w, pads).reshape(-1, w.shape[3])


CONV2D_STEM_SM90 = KernelVariant(
    name="conv2d_stem_sm90",
    config_type=Conv2dStemSm90Config,
    sources=("cuda/conv2d_stem_sm90.cuh",),
    reasons=reasons,
    choices=_CHOICES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=_steps,
)
