"""conv2d_depthwise in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/conv2d_depthwise.cuh`` and ``conv2d_depthwise_weights.cuh``. Callers:
the variant of the same name, and tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.image_axis import axes
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.row_walk import (
    RowWalk,
    channel_blocks,
    copy_bytes,
    tiles,
)
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

_BANKS_BYTES = 128
# Registers for addresses and what is on its way, those of gradients of weights that
# read rows of dy again or keep them, for what is added to sums, and for further images.
_ADDRESSES, _ADDRESSES_OF_WEIGHTS, _ADDRESSES_OF_ROWS = 18, 28, 30
_EPILOGUE, _IMAGES = 2, 14
_ON_THEIR_WAY = 3  # columns of a window that is read while it is used
_MOST_KEPT_TAPS = 25  # weights of so many taps stay in registers
_MOST_KEPT_ROWS = 3  # of taps, where the rows of dy that meet them stay in registers
_WEIGHTS_ON_THEIR_WAY = 96  # registers that the compiler takes to read others early


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseConfig:
    """Partition of the work; the share of a thread follows from it.

    Attributes:
      channels: of a block, two of each thread.
      strips: of a block, next to each other along the width.
      tile_w: columns of the result in a strip.
      rows: of the result in a block.
      stages: rows of the image in shared memory, one of them being read.
      blocks: that a multiprocessor holds; fewer leave more registers to a thread.
    """

    channels: int
    strips: int
    tile_w: int
    rows: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        return self.channels // 2 * self.strips

    def __str__(self) -> str:
        return (
            f"c{self.channels} s{self.strips} w{self.tile_w} r{self.rows} "
            f"st{self.stages} b{self.blocks}"
        )


def units_of_pixel(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """Copies that make a pixel of a block."""
    return config.channels * ITEMSIZE[problem.lhs] // copy_bytes(problem)


def keeps_weights(problem: Conv2dProblem) -> bool:
    """Returns whether a thread has its weights in registers, else in shared memory."""
    return problem.kernel_height * problem.kernel_width <= _MOST_KEPT_TAPS


def keeps_rows(problem: Conv2dProblem) -> bool:
    """Returns whether a gradient of weights keeps rows of dy for all taps, widened."""
    return ITEMSIZE[problem.lhs] == 2 and problem.kernel_height <= _MOST_KEPT_ROWS


def pitch_bytes(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """Bytes from pixel to pixel in shared memory.

    Strips that share a warp read different banks: the pixels of one strip begin where
    those of the other end.
    """
    _, columns = axes(problem)
    pixel = config.channels * ITEMSIZE[problem.lhs]
    copied = copy_bytes(problem)
    step = config.tile_w * columns.stride // columns.between * columns.step
    for pad in range(0, _BANKS_BYTES, max(copied, 2 * ITEMSIZE[problem.lhs])):
        apart = step * (pixel + pad) % _BANKS_BYTES
        if pixel % _BANKS_BYTES == 0 or apart in (pixel, _BANKS_BYTES - pixel):
            return pixel + pad
    return pixel


def smem_bytes(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """Bytes of a block: rows of images, and the weights unless threads have them."""
    rows, columns = axes(problem)
    wide = config.strips * config.tile_w
    taps = problem.kernel_height * problem.kernel_width
    pitch = pitch_bytes(problem, config)
    ring = config.stages * columns.span(wide) * pitch
    if problem.direction == "weight_grad":
        meeting = (rows.taps + config.stages - 2) // rows.stride + 1
        return max(ring + meeting * wide * pitch, 4 * taps * config.channels)
    return ring + (0 if keeps_weights(problem) else 4 * taps * config.channels)


def registers(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """The fewest that a thread can do with: sums, a window, weights, addresses."""
    rows, columns = axes(problem)
    taps = problem.kernel_height * problem.kernel_width
    window = columns.entries(config.tile_w)
    if problem.direction == "weight_grad":
        if keeps_rows(problem):
            kept = taps + rows.slots * config.tile_w + min(window, _ON_THEIR_WAY)
            return 2 * kept + _ADDRESSES_OF_ROWS
        return 2 * (taps + window + config.tile_w) + _ADDRESSES_OF_WEIGHTS
    weights = taps if keeps_weights(problem) else problem.kernel_width
    needed = 2 * (rows.slots * config.tile_w + window + weights) + _ADDRESSES
    epilogue = problem.epilogue
    needed += 0 if epilogue.is_identity else _EPILOGUE
    needed += _IMAGES if epilogue.residual or epilogue.save_preactivation else 0
    return needed if keeps_weights(problem) else max(needed, _WEIGHTS_ON_THEIR_WAY)


def kernel(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> Kernel:
    """The kernel of a forward convolution, or of the gradient of x.

    Of the gradient of weights, the one that leaves ``parts`` partial sums.
    """
    is_weights = problem.direction == "weight_grad"
    flips, keeps = problem.direction == "input_grad", keeps_weights(problem)
    traits = f"""\
  static constexpr bool kFlips = {cxx(flips)}, kWeightsInRegisters = {cxx(keeps)};
{epilogues.traits(problem)}"""
    rows = f"  static constexpr bool kKeepsRows = {cxx(keeps_rows(problem))};"
    walk = RowWalk(
        template="conv2d_depthwise" + "_weights" * is_weights,
        problem=problem,
        **dataclasses.asdict(config),
        threads=config.threads,
        pitch_bytes=pitch_bytes(problem, config),
        smem_bytes=smem_bytes(problem, config),
        traits=rows if is_weights else traits,
        parts=parts(problem, config, device) if is_weights else 0,
    )
    return walk.kernel(device)


def blocks(problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice) -> int:
    is_weights = problem.direction == "weight_grad"
    each = parts(problem, config, device) if is_weights else _tiles(problem, config)
    return each * channel_blocks(problem, config.channels)


def parts(problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice) -> int:
    """Partial sums of each weight: of as many blocks as run at once, each its tiles."""
    pieces = _tiles(problem, config)
    at_once = device.sm_count * resident_blocks(problem, config, device)
    most = max(at_once // channel_blocks(problem, config.channels), 1)
    return -(-pieces // -(-pieces // most))


def _tiles(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    return tiles(problem, config.strips * config.tile_w, config.rows)


def resident_blocks(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> int:
    """Blocks that share a multiprocessor."""
    in_memory = device.blocks_in_smem(smem_bytes(problem, config))
    return max(min(config.blocks, in_memory), 1)
