"""conv2d_strips_sm90: convolutions of stride 1 on Hopper whose taps share one copy.

    forward       y = activation(conv(x, w) + bias + residual)
    input_grad    dx

Here are the reasons that refuse problems, the legal configs, and the choice of one
without measurements; the kernel's text is in ``emit.conv2d_strips_sm90``. Caller: the
op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_strips_sm90 as emit
from tracea_jax.emit.conv2d_strips_sm90 import Conv2dStripsSm90Config
from tracea_jax.emit.conv_operands import DTYPES
from tracea_jax.problem import ITEMSIZE, Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.conv2d_sm90 import MOST_PIXELS, reasons_of_pixels
from tracea_jax.variants.conv_weights import reading_weights
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.space import (
    Rule,
    Space,
    grid,
    legal_space,
)

_MOST_ACCUMULATORS = 128
_TILE = 128  # pixels and channels of what conv2d_sm90 computes at a time
_WIDE_TILES = (128, 192)  # channels of its tiles of whole slabs
_MANY = 2**17  # pixels
_MOST_STAGES = 40
_RING = range(2, 9)  # stages, unless all weights stay
_CHOICES = {
    "tile_m": (64, 128, 192, 256, 384),
    "tile_n": (64, 128, 192, 256),
    "resident": (False, True),
    "ping_pong": (False, True),
}
_RANGES = {"stages": (2, _MOST_STAGES)}
# What counts, see ``_cost``: products of 64 channels, which read most shared memory for
# their size, weights that are copied, stores behind which nothing is multiplied and
# those in turns, and the last tile. By bytes of an element.
_WEIGHED = {2: (1.2, 0.3, 0.5, 0.17, 0.12), 4: (1.0, 0.1, 0.1, 0.2, 0.25)}


LEGAL = (
    Rule(
        code="consumers",
        refuses=lambda p, c, d: c.tile_m % (emit.SLAB * c.tile_consumers) != 0,
        why=lambda p, c, d: (
            f"two consumers must share tile_m={c.tile_m} in slabs of {emit.SLAB} pixels"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: c.accumulators > _MOST_ACCUMULATORS,
        why=lambda p, c, d: (
            f"a thread would hold {c.accumulators} sums; it can hold "
            f"{_MOST_ACCUMULATORS}"
        ),
    ),
    images.NARROW,
    Rule(
        code="resident",
        refuses=lambda p, c, d: c.resident & (c.stages != emit.all_weights(p)),
        why=lambda p, c, d: (
            f"stages={c.stages} must be {emit.all_weights(p)}, those of all weights, "
            "to be resident"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)


_WORTHWHILE = (
    Rule(
        code="shallow",
        refuses=lambda p, c, d: (
            ~c.resident
            & (c.stages != images.deepest_ring(emit.smem_bytes, p, c, d, _RING))
        ),
        why=lambda p, c, d: f"stages={c.stages} leave shared memory unused",
    ),
)


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return legal_space(
        _grid(problem),
        Conv2dStripsSm90Config,
        (*LEGAL, *_WORTHWHILE),
        problem,
        device,
    )


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[Conv2dStripsSm90Config, ...]:
    """Those configs that the model finds fastest."""
    space = _space(problem, device)
    return images.ranked(space, problem, device, _cost, count)


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN and conv2d_sm90.

    By ``conv2d.json`` of an H100 cuDNN took 1.48 to 1.61 times as long, and conv2d_sm90
    1.25 to 1.41 times, for 3 x 3 kernels of 64 channels on 64 images of 56 x 56; in
    float32 1.4 to 1.7 and 1.34 to 1.5 times. On 8 images of ResNets, most of which are
    too few tiles for conv2d_sm90, cuDNN took 1.5 to 1.95 times as long, and conv2d_sm90
    1.15 to 1.42 times, in float32 1.09 to 2.3 and 1.12 to 1.46 times; on one image 1.49
    to 1.84 and 1.06 to 1.22 times. Of 128 channels on 200704 pixels, and of results of
    320 and 448, where tiles of conv2d_sm90 have a narrow slab, both took longer, too;
    no results are kept.
    """
    p = problem
    return (
        images.is_measured(p, device, (2, 4))
        and images.is_dense_3x3(p)
        and p.strides == (1, 1)
        and (_is_narrow(p) or _is_small(p, device) or _is_ragged(p))
    )


def _call(
    problem: Conv2dProblem, config: Conv2dStripsSm90Config, device: CudaDevice
) -> Call:
    return reading_weights(problem, emit.kernel(problem, config, device))


def _is_narrow(problem: Conv2dProblem) -> bool:
    """Returns whether a tile is as wide as the result."""
    p = problem
    if p.lhs == "float32":
        return emit.channels_out(p) == emit.SLAB
    widths = [emit.SLAB, 2 * emit.SLAB] if images.pixels(p) >= _MANY else [emit.SLAB]
    return p.in_channels == p.out_channels and p.out_channels in widths


def _is_small(problem: Conv2dProblem, device: Device) -> bool:
    """True if tiles of conv2d_sm90 are too few to keep all multiprocessors busy."""
    p = problem
    if p.flops < images.MANY_FLOPS // 2:
        return True
    assert isinstance(device, CudaDevice)
    tiles = -(-images.pixels(p) // _TILE) * -(-emit.channels_out(p) // _TILE)
    return p.lhs == "float32" and tiles < device.sm_count


def _is_ragged(problem: Conv2dProblem) -> bool:
    """True if no tile of whole slabs divides the channels, which conv2d_sm90 needs."""
    p = problem
    wide = emit.channels_out(p)
    return (
        p.lhs != "float32"
        and p.direction == "forward"
        and wide > 4 * emit.SLAB
        and all(wide % tile for tile in _WIDE_TILES)
    )


def _grid(problem: Conv2dProblem) -> dict[str, np.ndarray]:
    """Every combination of the choices, of rings and of all weights."""
    stages = sorted({*_RING, min(emit.all_weights(problem), _MOST_STAGES)})
    return grid(
        tile_m=_CHOICES["tile_m"],
        tile_n=_CHOICES["tile_n"],
        stages=stages,
        resident=_CHOICES["resident"],
        ping_pong=_CHOICES["ping_pong"],
    )


def _cost(problem: Conv2dProblem, config: Any, device: CudaDevice) -> Any:
    """Time of the rounds of tiles, in the time of 64 x 64 results at full speed.

    Of 133 problems of 16 bits that it is for and that were measured on an H100 and an
    H200, each with some of its configs, the cheapest took 0.4 % longer than the
    fastest, on average. Of float32 it fits measurements on an H200.
    """
    narrow, of_copies, together, in_turns, last = _WEIGHED[ITEMSIZE[problem.lhs]]
    rounds = -(-emit.tile_count(problem, config) // device.sm_count)
    area = config.tile_m * config.tile_n / emit.SLAB**2
    area = area * np.where(config.tile_n == emit.SLAB, narrow, 1)
    copied = np.where(config.resident, 0, of_copies * config.tile_n / emit.SLAB)
    # In turns, some of a store is hidden behind the next tile, but not the last one.
    stored = np.where(config.ping_pong, in_turns, together)
    return rounds * (area + copied + stored) + last * area


def reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    """All reasons why not; those that hold for every problem come first."""
    p = problem
    if refused := tuple(reasons_of_pixels(p, device, DTYPES)):
        yield from refused
        return
    if p.strides != (1, 1):
        yield f"its strides are {p.strides}; taps share a strip where they are 1"
        return
    if p.kernel_height * p.kernel_width == 1:
        yield "its kernel is one tap, which shares its pixels with none"
        return
    axes = emit.strip_axes(p)
    if any(min(axis.before, axis.behind) < 0 for axis in axes):
        yield "its image is cropped, or its gradient is; strips begin with the image"
        return
    if any(axis.extent > axis.counted for axis in axes):
        yield "its result is larger than the image with the padding of one side"
        return
    if emit.computed_pixels(p) > MOST_PIXELS:
        yield f"it has more than {MOST_PIXELS} pixels with those of its padding"
    smallest = Conv2dStripsSm90Config(
        tile_m=128, tile_n=128 // ITEMSIZE[p.out], stages=2
    )
    smallest = dataclasses.replace(smallest, tile_n=max(64, smallest.tile_n))
    if emit.smem_bytes(p, smallest) > device.smem_per_block_bytes:  # type: ignore
        yield "the lines that the taps of a tile see do not fit in shared memory"


CONV2D_STRIPS_SM90 = KernelVariant(
    name="conv2d_strips_sm90",
    config_type=Conv2dStripsSm90Config,
    sources=("cuda/conv2d_strips_sm90.cuh",),
    reasons=reasons,
    choices=_CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=_call,
)
