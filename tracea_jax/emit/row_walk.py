"""Kernels that walk down images, as text: their launch, and what all of them share.

See ``kernels/cuda/tile/row_walk.cuh``. Callers: the emitters of depthwise and of
grouped convolutions.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT
from tracea_jax.emit.image_axis import axes
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

_AXIS = (
    *("in", "out", "first_in", "first_out"),
    *("class_stride", "in_step", "classes", "blocks"),
)

# Of a multiprocessor: schedulers, each with registers of its own for its warps.
_SCHEDULERS, _REGISTERS_OF_SCHEDULER = 4, 16384
_MOST_WARPS = 16  # of a scheduler
_MOST_REGISTERS = 255  # of a thread


def copy_bytes(problem: Conv2dProblem) -> int:
    """Bytes of a copy: the most that all pixels are multiples of, 4 to 16."""
    return math.gcd(16, problem.in_channels * ITEMSIZE[problem.lhs])


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowWalk:
    """A kernel that walks down images.

    Attributes:
      template: its name, and that of its header.
      problem: what it computes.
      channels, strips, tile_w, rows, stages, blocks: as the configs have them.
      threads, pitch_bytes, smem_bytes: of a block.
      traits: further members of Traits.
      name: what they make of it, a word of the entry's name.
      parts: partial sums of each weight, which blocks that walk down several pieces of
        images leave; 0 if each block has one piece.
    """

    template: str
    problem: Conv2dProblem
    channels: int
    strips: int
    tile_w: int
    rows: int
    stages: int
    blocks: int
    threads: int
    pitch_bytes: int
    smem_bytes: int
    traits: str
    name: str = ""
    parts: int = 0

    def kernel(self, device: CudaDevice) -> Kernel:
        count = self.parts or tiles(self.problem, self.strips * self.tile_w, self.rows)
        return Kernel(
            entry=self._entry,
            source=self._source,
            headers=sources.headers(f"{self.template}.cuh"),
            arch=device.arch,
            grid=(count * channel_blocks(self.problem, self.channels), 1, 1),
            block=(self.threads, 1, 1),
            smem_bytes=self.smem_bytes,
            params=self._params,
        )

    @property
    def _entry(self) -> str:
        p = self.problem
        rows, columns = axes(p)
        parts = [
            self.template,
            self.name,
            "dx" if p.direction == "input_grad" else "",
            f"{SHORT[p.lhs]}_{SHORT[p.out]}_{p.kernel_height}x{p.kernel_width}",
        ]
        for letter, high, wide, usual in (
            ("s", rows.stride, columns.stride, 1),
            ("u", rows.between, columns.between, 1),
        ):
            parts.append("" if high == wide == usual else f"{letter}{high}x{wide}")
        parts.append("" if columns.step == 1 else f"d{columns.step}")
        parts += epilogues.name_parts(p.epilogue)
        parts.append(f"v{copy_bytes(p)}_c{self.channels}_s{self.strips}")
        parts.append(f"w{self.tile_w}_st{self.stages}_b{self.blocks}")
        return "_".join(filter(None, parts))

    @property
    def _params(self) -> tuple[Param, ...]:
        p, epilogue = self.problem, self.problem.epilogue
        count = 2 + epilogues.has_bias(epilogue) + epilogue.residual
        count += 1 + epilogue.save_preactivation
        wide = self.strips * self.tile_w
        scalars = [p.in_channels, channel_blocks(p, self.channels)]
        for axis, many in zip(axes(p), blocks_of(p, wide, self.rows), strict=True):
            scalars += [axis.read, axis.result, axis.first_read, axis.first_result]
            scalars += [axis.class_stride, axis.step, axis.classes, many]
        scalars.append(self.rows)
        if self.parts:
            scalars += [tiles(p, wide, self.rows), self.parts]
        return (
            *(Pointer(operand=i) for i in range(count)),
            *(Scalar(value=value) for value in scalars),
        )

    @property
    def _signature(self) -> tuple[str, str]:
        """Parameters of the entry, and the fields of its struct made of them."""
        epilogue = self.problem.epilogue
        inputs = ["x", "w", *["bias"] * epilogues.has_bias(epilogue)]
        inputs += ["residual"] * epilogue.residual
        results = ["out", *["z"] * epilogue.save_preactivation]
        rows, columns = (
            [f"{axis}_{name}" for name in _AXIS] for axis in ("row", "column")
        )
        more = ["tiles", "parts"] if self.parts else []
        scalars = ["channels", "channel_blocks", *rows, *columns, "block_rows", *more]
        parameters = [f"const void* {name}" for name in inputs]
        parameters += [
            f"{'float' if self.parts else 'void'}* {name}" for name in results
        ]
        parameters += [f"int {name}" for name in scalars]
        z, bias, residual = (
            name if name in inputs + results else "nullptr"
            for name in ("z", "bias", "residual")
        )
        arrays = "x, w, out" if self.parts else f"x, w, {bias}, {residual}, out, {z}"
        walks = f"{{{', '.join(rows)}}}, {{{', '.join(columns)}}}"
        fields = f"{arrays}, channels, channel_blocks, {walks}, block_rows"
        return ", ".join(parameters), ", ".join([fields, *more])

    @property
    def _source(self) -> str:
        p = self.problem
        rows, columns = axes(p)
        signature, arguments = self._signature
        types = f"{p.lhs} -> {p.out}"
        return f"""\
// {self.template} | {p.kernel_height}x{p.kernel_width} {p.direction} {types}, \
epilogue {p.epilogue}
#include "{self.template}.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  static constexpr int kTapsH = {rows.taps}, kTapsW = {columns.taps};
  static constexpr int kStrideH = {rows.stride}, kStrideW = {columns.stride};
  static constexpr int kBetweenH = {rows.between}, kBetweenW = {columns.between};
  static constexpr int kStepW = {columns.step}, kClassesW = {columns.classes}, \
kClassStrideW = {columns.class_stride};
  static constexpr int kReadColumns = {columns.span(self.strips * self.tile_w)};
  static constexpr int kChannels = {self.channels}, kStrips = {self.strips}, \
kTileW = {self.tile_w}, kStages = {self.stages};
  static constexpr int kCopyBytes = {copy_bytes(p)}, kPitchBytes = {self.pitch_bytes};
  static constexpr int kThreads = {self.threads}, kSmemBytes = {self.smem_bytes};
{self.traits}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({self.threads}, {self.blocks})
{self._entry}({signature}) {{
  tracea::{self.template}<Traits>({{{arguments}}});
}}
"""


def available_registers(threads: int, blocks: int) -> int:
    """Registers of a thread where a multiprocessor holds so many blocks."""
    warps = -(-threads * blocks // (32 * _SCHEDULERS))
    return min(_REGISTERS_OF_SCHEDULER // (32 * warps) // 8 * 8, _MOST_REGISTERS)


def most_blocks(threads: int, registers: int) -> int:
    """Blocks that leave so many registers to each of their threads, 1 at the least."""
    warps = _REGISTERS_OF_SCHEDULER // (32 * round_up(registers, 8))
    return max(min(warps, _MOST_WARPS) * _SCHEDULERS * 32 // threads, 1)


def channel_blocks(problem: Conv2dProblem, channels: int) -> int:
    return -(-problem.in_channels // channels)


def blocks_of(problem: Conv2dProblem, wide: int, high: int) -> tuple[int, int]:
    """Blocks of so many columns and rows of the result, along both axes of an image."""
    rows, columns = axes(problem)
    return rows.blocks(high), -(-(columns.result - columns.first_result) // wide)


def tiles(problem: Conv2dProblem, wide: int, high: int) -> int:
    """Pieces of all images that a block walks down."""
    return problem.batch * math.prod(blocks_of(problem, wide, high))
