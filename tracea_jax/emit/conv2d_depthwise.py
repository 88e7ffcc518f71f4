"""conv2d_depthwise as text: its Traits, its launch, and how rows and columns meet.

The formulas here say how a problem's strides, padding and dilation become those of the
kernel, see ``kernels/cuda/conv2d_depthwise.cuh``. Callers: ``variants``' module of the
same name, and tests.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import sources
from tracea_jax.emit.epilogue import CXX_TYPE, SHORT, cxx
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import ITEMSIZE, Conv2dProblem

_BANKS_BYTES = 128
_REGISTERS, _THREADS = 65536, 2048  # of a multiprocessor
_MOST_KEPT_TAPS = 25  # weights of so many taps stay in registers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseConfig:
    """How the work is cut; what a thread computes follows.

    Attributes:
      channels: of a block, two of each thread.
      strips: of a block, next to each other along the width.
      tile_w: columns of the result in a strip.
      rows: of the result in a block.
      stages: rows of the image in shared memory, one of them being read.
    """

    channels: int
    strips: int
    tile_w: int
    rows: int
    stages: int

    @property
    def threads(self) -> int:
        return self.channels // 2 * self.strips

    def __str__(self) -> str:
        return (
            f"c{self.channels} s{self.strips} w{self.tile_w} r{self.rows} "
            f"st{self.stages}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Rows or columns: what is read and what is written, and how they meet.

    Attributes:
      read, result: extents of the image that is read, and of the result.
      taps: of the kernel.
      step: from one entry of the image to the next that a class of results reads.
      classes: of results that share no entries, and the step within one.
      class_stride: from the first entry of a class to that of the next.
      stride: of a class, in units of ``step``.
      between: 1, or the stride whose gradient this is: result + tap = entry * between.
      first_read, first_result: of the first block; the result may be below zero.
    """

    read: int
    result: int
    taps: int
    step: int
    classes: int
    class_stride: int
    stride: int
    between: int
    first_read: int
    first_result: int

    @property
    def slots(self) -> int:
        """Results that are open at a time, see ``kernels/cuda/tile/axis_taps.cuh``."""
        if self.between > 1:
            return -(-self.taps // self.between) * self.between
        return (self.taps - 1) // self.stride + 1

    def entries(self, results: int) -> int:
        """Entries of a class that so many of its results are made of."""
        return ((results - 1) * self.stride + self.taps - 1) // self.between + 1

    def span(self, results: int) -> int:
        """Entries from the first to the last that neighbouring results are made of."""
        steps = (results - 1) * self.class_stride + (self.taps - 1) * self.step
        return steps // self.between + 1

    def blocks(self, results: int) -> int:
        """Blocks of so many results of a class."""
        of_class = -(-(self.result - self.first_result) // self.classes)
        return self.classes * -(-of_class // results)


@functools.lru_cache(maxsize=256)  # each config of a space asks
def axes(problem: Conv2dProblem) -> tuple[Axis, Axis]:
    """Rows and columns of a forward convolution, or of the gradient of x."""
    p = problem
    rows, columns = (
        _axis(p.direction, *sizes)
        for sizes in zip(
            (p.height, p.width),
            p.out_size,
            (p.kernel_height, p.kernel_width),
            p.strides,
            p.dilation,
            (before for before, _ in p.padding),
            strict=True,
        )
    )
    return rows, columns


def _axis(
    direction: str,
    image: int,
    out: int,
    taps: int,
    stride: int,
    dilation: int,
    before: int,
) -> Axis:
    if direction == "input_grad":
        # The taps in reverse: result + dilation * tap = entry * stride + first.
        first = before - (taps - 1) * dilation
        begin = first // stride
        return Axis(
            read=out,
            result=image,
            taps=taps,
            step=dilation,
            classes=dilation,
            class_stride=1,
            stride=1,
            between=stride,
            first_read=begin,
            first_result=begin * stride - first,
        )
    common = math.gcd(stride, dilation)
    return Axis(
        read=image,
        result=out,
        taps=taps,
        step=dilation,
        classes=dilation // common,
        class_stride=stride,
        stride=stride // common,
        between=1,
        first_read=-before,
        first_result=0,
    )


def copy_bytes(problem: Conv2dProblem) -> int:
    """Bytes of a copy: the most that all pixels are multiples of, 4 to 16."""
    return math.gcd(16, problem.in_channels * ITEMSIZE[problem.lhs])


def units_of_pixel(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """Copies that make a pixel of a block."""
    return config.channels * ITEMSIZE[problem.lhs] // copy_bytes(problem)


def keeps_weights(problem: Conv2dProblem) -> bool:
    """Whether a thread has its weights in registers, else in shared memory."""
    return problem.kernel_height * problem.kernel_width <= _MOST_KEPT_TAPS


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
    """About as many as a thread needs: sums, a window, weights, and addresses."""
    rows, columns = axes(problem)
    taps = problem.kernel_height * problem.kernel_width
    window = columns.entries(config.tile_w)
    if problem.direction == "weight_grad":
        return 2 * (taps + window + config.tile_w) + 40
    weights = taps if keeps_weights(problem) else problem.kernel_width
    return 2 * (rows.slots * config.tile_w + window + weights) + 40


def kernel(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> Kernel:
    """The kernel of a forward convolution, or of the gradient of x.

    Of the gradient of weights, the one that leaves ``parts`` partial sums.
    """
    return Kernel(
        entry=_entry(problem, config),
        source=_source(problem, config),
        headers=sources.headers(f"{_template(problem)}.cuh"),
        arch=device.arch,
        grid=(blocks(problem, config, device), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=smem_bytes(problem, config),
        params=_params(problem, config, device),
    )


def _template(problem: Conv2dProblem) -> str:
    is_weights = problem.direction == "weight_grad"
    return "conv2d_depthwise" + "_weights" * is_weights


def blocks(problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice) -> int:
    channel_blocks = _channel_blocks(problem, config)
    if problem.direction == "weight_grad":
        return channel_blocks * parts(problem, config, device)
    return channel_blocks * _tiles(problem, config)


def parts(problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice) -> int:
    """Partial sums of each weight: of as many blocks as run at once, each its tiles."""
    tiles = _tiles(problem, config)
    at_once = device.sm_count * resident_blocks(problem, config, device)
    most = max(at_once // _channel_blocks(problem, config), 1)
    return -(-tiles // -(-tiles // most))


def resident_blocks(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> int:
    """Blocks that share a multiprocessor."""
    of_block = config.threads * round_up(registers(problem, config), 8)
    return max(
        min(
            _REGISTERS // of_block,
            device.smem_per_block_bytes // smem_bytes(problem, config),
            _THREADS // config.threads,
        ),
        1,
    )


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _tiles(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """Pieces of images that a block walks down."""
    rows, columns = _blocks(problem, config)
    return problem.batch * rows * columns


def _channel_blocks(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    return -(-problem.in_channels // config.channels)


def _blocks(problem: Conv2dProblem, config: DepthwiseConfig) -> tuple[int, int]:
    rows, columns = axes(problem)
    wide = config.strips * config.tile_w
    return rows.blocks(config.rows), -(-(columns.result - columns.first_result) // wide)


def _entry(problem: Conv2dProblem, config: DepthwiseConfig) -> str:
    p = problem
    rows, columns = axes(p)
    geometry = f"{p.kernel_height}x{p.kernel_width}"
    geometry += f"_s{rows.stride}x{columns.stride}" * (rows.stride * columns.stride > 1)
    geometry += f"_u{rows.between}x{columns.between}" * (
        rows.between * columns.between > 1
    )
    geometry += f"_d{columns.step}" * (columns.step > 1)
    types = f"{SHORT[p.lhs]}_{SHORT[p.out]}"
    steps = epilogues.name_parts(p.epilogue)
    flips = ("dx",) if p.direction == "input_grad" else ()
    shape = f"c{config.channels}_s{config.strips}_w{config.tile_w}_st{config.stages}"
    name = (_template(p), *flips, types, geometry, *steps, f"v{copy_bytes(p)}")
    return "_".join((*name, shape))


_AXIS = (
    *("in", "out", "first_in", "first_out"),
    *("class_stride", "in_step", "classes", "blocks"),
)


def _params(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> tuple[Param, ...]:
    epilogue = problem.epilogue
    count = 2 + epilogues.has_bias(epilogue) + epilogue.residual
    count += 1 + epilogue.save_preactivation
    scalars = [problem.in_channels, _channel_blocks(problem, config)]
    for axis, many in zip(axes(problem), _blocks(problem, config), strict=True):
        scalars += [axis.read, axis.result, axis.first_read, axis.first_result]
        scalars += [axis.class_stride, axis.step, axis.classes, many]
    scalars.append(config.rows)
    if problem.direction == "weight_grad":
        scalars += [_tiles(problem, config), parts(problem, config, device)]
    return (
        *(Pointer(operand=i) for i in range(count)),
        *(Scalar(value=value) for value in scalars),
    )


def _signature(problem: Conv2dProblem) -> tuple[str, str]:
    """Parameters of the entry, and the fields of its struct that are made of them."""
    epilogue = problem.epilogue
    is_weights = problem.direction == "weight_grad"
    inputs = ["x", "w", *["bias"] * epilogues.has_bias(epilogue)]
    inputs += ["residual"] * epilogue.residual
    results = ["out", *["z"] * epilogue.save_preactivation]
    named = {axis: [f"{axis}_{name}" for name in _AXIS] for axis in ("rows", "columns")}
    scalars = ["channels", "channel_blocks", *named["rows"], *named["columns"]]
    scalars += ["block_rows", *["tiles", "parts"] * is_weights]
    parameters = [f"const void* {name}" for name in inputs]
    parameters += [f"{'float' if is_weights else 'void'}* {name}" for name in results]
    parameters += [f"int {name}" for name in scalars]
    z, bias, residual = (
        name if name in inputs + results else "nullptr"
        for name in ("z", "bias", "residual")
    )
    rows, columns = (", ".join(named[axis]) for axis in ("rows", "columns"))
    fields = "x, w, out" if is_weights else f"x, w, {bias}, {residual}, out, {z}"
    fields += f", channels, channel_blocks, {{{rows}}}, {{{columns}}}, block_rows"
    return ", ".join(parameters), fields + ", tiles, parts" * is_weights


def _after(problem: Conv2dProblem) -> str:
    """The members of Traits that say what becomes of weights and sums."""
    if problem.direction == "weight_grad":
        return ""
    flips, keeps = problem.direction == "input_grad", keeps_weights(problem)
    return f"""\
  static constexpr bool kFlips = {cxx(flips)}, kWeightsInRegisters = {cxx(keeps)};
{epilogues.traits(problem)}
"""


def _source(problem: Conv2dProblem, config: DepthwiseConfig) -> str:
    p = problem
    rows, columns = axes(p)
    signature, arguments = _signature(p)
    types = f"{p.lhs} -> {p.out}"
    return f"""\
// {_template(p)} | {p.kernel_height}x{p.kernel_width} {p.direction} {types}, \
epilogue {p.epilogue} | {config}
#include "{_template(p)}.cuh"

namespace {{
struct Traits {{
  using Element = {CXX_TYPE[p.lhs]};
  static constexpr int kTapsH = {rows.taps}, kTapsW = {columns.taps};
  static constexpr int kStrideH = {rows.stride}, kStrideW = {columns.stride};
  static constexpr int kBetweenH = {rows.between}, kBetweenW = {columns.between};
  static constexpr int kStepW = {columns.step}, kClassesW = {columns.classes}, \
kClassStrideW = {columns.class_stride};
  static constexpr int kReadStrideW = {columns.class_stride}, \
kReadColumns = {columns.span(config.strips * config.tile_w)};
  static constexpr int kChannels = {config.channels}, kStrips = {config.strips}, \
kTileW = {config.tile_w}, kStages = {config.stages};
  static constexpr int kCopyBytes = {copy_bytes(p)}, \
kPitchBytes = {pitch_bytes(p, config)};
  static constexpr int kThreads = {config.threads}, \
kSmemBytes = {smem_bytes(p, config)};
{_after(p)}}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{_entry(p, config)}({signature}) {{
  tracea::{_template(p)}<Traits>({{{arguments}}});
}}
"""
