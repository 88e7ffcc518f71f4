"""conv2d_grouped in numbers: its config, what follows from it, and its kernel.

See ``kernels/cuda/conv2d_grouped.cuh``. Callers: the variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.image_axis import axes
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.row_walk import RowWalk
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

SIDE = 16  # channels, and columns, of a fragment
_WARP = 32
_UNIT_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig:
    """Partition of the work; the share of a warp follows from it.

    Attributes:
      channels: of a block, 16 of each warp.
      strips: of a block, next to each other along the width.
      tile_w: columns of the result in a strip, a multiple of 16.
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
        return _WARP * self.channels // SIDE * self.strips

    def __str__(self) -> str:
        return (
            f"c{self.channels} s{self.strips} w{self.tile_w} r{self.rows} "
            f"st{self.stages} b{self.blocks}"
        )


def group(problem: Conv2dProblem) -> int:
    """Channels of a group."""
    return problem.in_channels // problem.groups


def pitch_bytes(problem: Conv2dProblem, config: GroupedConfig) -> int:
    """Bytes from pixel to pixel in shared memory; 8 columns have banks of their own."""
    return config.channels * ITEMSIZE[problem.lhs] + _UNIT_BYTES


def smem_bytes(problem: Conv2dProblem, config: GroupedConfig) -> int:
    """Bytes of a block: rows of images, and the weights of groups of 16 and more."""
    rows, columns = axes(problem)
    read = columns.span(config.strips * config.tile_w)
    of_taps = rows.taps * columns.taps * group(problem) * (group(problem) >= SIDE)
    return (config.stages * read + of_taps) * pitch_bytes(problem, config)


def registers(problem: Conv2dProblem, config: GroupedConfig) -> int:
    """The fewest that a thread can do with: weights, sums, and addresses."""
    rows, columns = axes(problem)
    depth = max(group(problem) // SIDE, 1)
    weights = 4 * rows.taps * columns.taps * depth
    return weights + 8 * rows.slots * config.tile_w // SIDE + 48


def kernel(problem: Conv2dProblem, config: GroupedConfig, device: CudaDevice) -> Kernel:
    flips = problem.direction == "input_grad"
    traits = f"""\
  static constexpr bool kFlips = {cxx(flips)};
  static constexpr int kGroup = {group(problem)};
{epilogues.traits(problem)}"""
    walk = RowWalk(
        template="conv2d_grouped",
        problem=problem,
        **dataclasses.asdict(config),
        threads=config.threads,
        pitch_bytes=pitch_bytes(problem, config),
        smem_bytes=smem_bytes(problem, config),
        traits=traits,
        name=f"g{group(problem)}",
    )
    return walk.kernel(device)
