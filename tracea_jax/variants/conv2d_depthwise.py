"""conv2d_depthwise: convolutions of each channel alone, on every GPU since sm_80.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernels' texts are written in ``emit.conv2d_depthwise``. Caller: the op's
record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_depthwise as emit
from tracea_jax.emit import image_axis, row_walk
from tracea_jax.emit.conv2d_depthwise import DepthwiseConfig
from tracea_jax.problem import ITEMSIZE, Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.partial_sums import SOURCE, summed_depthwise
from tracea_jax.variants.space import (
    Rule,
    Space,
    first_refusal,
)

DTYPES = ("float32", "bfloat16", "float16")
CHOICES: dict[str, tuple[int, ...]] = {
    "channels": (16, 32, 48, 64, 96, 128, 144, 192, 240, 256),
    "tile_w": (1, 2, 3, 4, 6, 7, 8),
}
MOST_STRIPS, MOST_STAGES = 32, 8
_MOST_BLOCKS = 32  # of a multiprocessor
_RANGES = {
    "strips": (1, MOST_STRIPS),
    "rows": (1, INT32_MAX),
    "stages": (2, MOST_STAGES),
    "blocks": (1, _MOST_BLOCKS),
}
_MOST_SUMS = 81  # taps whose sums fit the registers of a thread
# Taps and strides of square kernels that were measured to win in all directions, on so
# many bytes.
_FEWEST_BYTES = {
    **dict.fromkeys(((3, 1), (3, 2)), 2**24),
    **dict.fromkeys(((5, 1), (5, 2), (7, 1)), 2**23),
}
# Those of 3 x 3 kernels win on fewer, too, if memory alone takes not much less time.
_FEWEST_FAST_BYTES, _FAST = 2**23, 2.4
_MOST_THREADS = 512
_MOST_COPIES = 32  # of a thread for each row


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    configs = itertools.chain(
        _likely(problem, device, 1),
        _legal(_grid(problem), problem, device),
        _legal(_without_rest(problem), problem, device),
    )
    return Space.of(*dict.fromkeys(configs))


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[DepthwiseConfig, ...]:
    """Those legal configs that a count of cycles finds fastest.

    Blocks of all sorts of channels are counted where they were measured.
    """
    configs = dict.fromkeys(_grid(problem))
    if _is_copy(problem, device):
        configs |= dict.fromkeys(_without_rest(problem))
    cost = functools.partial(cycles, problem, device=device)
    return tuple(heapq.nsmallest(count, _legal(configs, problem, device), key=cost))


def _legal(
    configs: Iterable[DepthwiseConfig], problem: Conv2dProblem, device: CudaDevice
) -> Iterator[DepthwiseConfig]:
    for config in configs:
        if first_refusal(LEGAL, problem, config, device) is None:
            yield config


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d.json`` of an H100 and of an H200, and ``conv2d_earlier.json`` of an
    H100, cuDNN took 1.3 to 4.8 times as long for batches of 64 of EfficientNet's
    convolutions, and by ``conv2d_earliest.json`` 68 times for the gradient of 7 x 7
    weights on images of 7 x 7, by ``conv2d_bands``. On few bytes it is
    faster, but for 3 x 3 kernels where this one is predicted to be near what memory
    allows.
    """
    p = problem
    taps, stride = p.kernel_height, p.strides[0]
    fewest = _FEWEST_BYTES.get((taps, stride))
    return (
        images.is_measured(p, device)
        and fewest is not None
        and (p.kernel_width, p.strides[1]) == (taps, stride)
        and p.dilation == (1, 1)
        and (p.bytes >= fewest or _is_small_but_fast(p, device))
    )


def _is_small_but_fast(problem: Conv2dProblem, device: Device) -> bool:
    p = problem
    if p.bytes < _FEWEST_FAST_BYTES or p.kernel_height != 3:
        return False
    assert isinstance(device, CudaDevice)
    taken = cycles(p, _likely(p, device, 1)[0], device)
    return taken <= _FAST * _memory_cycles(p, device)


def _call(problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice) -> Call:
    kernel = emit.kernel(problem, config, device)
    if problem.direction != "weight_grad":
        return kernel
    parts = emit.parts(problem, config, device)
    return summed_depthwise(kernel, parts, problem, device)


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if not p.in_channels == p.out_channels == p.groups > 1:
        yield (
            f"it takes a group for each channel; {p.in_channels} channels give "
            f"{p.out_channels} in {p.groups} groups"
        )
    if p.in_channels % 2:
        yield f"{p.in_channels} channels; a thread takes two, so they must be even"
    yield from images.refused_arrays(p, DTYPES)
    yield from images.refused_sizes(p)
    taps = p.kernel_height * p.kernel_width
    if p.direction == "weight_grad" and taps > _MOST_SUMS:
        yield f"the gradient of {taps} taps; a thread has registers for {_MOST_SUMS}"


# --- configs --------------------------------------------------------------------------


def _copies(p: Conv2dProblem, c: DepthwiseConfig) -> int:
    """Copies of a thread for each row."""
    _, columns = image_axis.axes(p)
    units = columns.span(c.strips * c.tile_w) * emit.units_of_pixel(p, c)
    return -(-units // c.threads)


LEGAL = (
    Rule(
        code="threads",
        refuses=lambda p, c, d: c.threads % 32 != 0 or c.threads > _MOST_THREADS,
        why=lambda p, c, d: (
            f"{c.threads} threads, channels / 2 * strips; they must be a multiple of "
            f"32 up to {_MOST_THREADS}"
        ),
    ),
    Rule(
        code="strips",
        refuses=lambda p, c, d: (
            c.strips % image_axis.axes(p)[1].classes != 0
            or c.tile_w % image_axis.axes(p)[1].between != 0
            or c.rows % image_axis.axes(p)[0].between != 0
        ),
        why=lambda p, c, d: (
            f"strips={c.strips}, tile_w={c.tile_w}, rows={c.rows} must be multiples of "
            f"{image_axis.axes(p)[1].classes}, {image_axis.axes(p)[1].between} and "
            f"{image_axis.axes(p)[0].between}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            emit.registers(p, c) > row_walk.available_registers(c.threads, c.blocks)
        ),
        why=lambda p, c, d: (
            f"tile_w={c.tile_w} takes {emit.registers(p, c)} registers; {c.blocks} "
            f"blocks of {c.threads} threads leave "
            f"{row_walk.available_registers(c.threads, c.blocks)}"
        ),
    ),
    Rule(
        code="copies",
        refuses=lambda p, c, d: _copies(p, c) > _MOST_COPIES,
        why=lambda p, c, d: f"a thread would copy {_copies(p, c)} pieces of a row",
    ),
    images.memory_rule(emit.smem_bytes),
)


def _grid(problem: Conv2dProblem) -> Iterator[DepthwiseConfig]:
    rows, columns = image_axis.axes(problem)
    of_class = -(-(rows.result - rows.first_result) // rows.classes)
    for channels, tile_w, threads in itertools.product(
        (32, 64, 128), CHOICES["tile_w"], (64, 128, 256)
    ):
        most = -(-(columns.result - columns.first_result) // tile_w)
        strips = min(threads * 2 // channels, most)
        strips = row_walk.round_up(max(strips, 1), columns.classes)
        for cut, stages in itertools.product((1, 2, 4), (3, 5)):
            config = DepthwiseConfig(
                channels=channels,
                strips=strips,
                tile_w=tile_w,
                rows=row_walk.round_up(-(-of_class // cut), rows.between),
                stages=stages,
                blocks=1,
            )
            blocks = _most_blocks(problem, config)
            yield dataclasses.replace(config, blocks=blocks)


def _without_rest(problem: Conv2dProblem) -> Iterator[DepthwiseConfig]:
    """Blocks of channels that the image has a multiple of: no thread is without any."""
    rows, columns = image_axis.axes(problem)
    of_class = -(-(rows.result - rows.first_result) // rows.classes)
    for channels, tile_w in itertools.product(CHOICES["channels"], CHOICES["tile_w"]):
        if problem.in_channels % channels:
            continue
        warps = 32 // math.gcd(32, channels // 2)  # strips of whole warps
        strips = math.lcm(warps, columns.classes)
        for count, cut, stages in itertools.product((1, 2), (1, 2, 4), (3, 5)):
            config = DepthwiseConfig(
                channels=channels,
                strips=count * strips,
                tile_w=tile_w,
                rows=row_walk.round_up(-(-of_class // cut), rows.between),
                stages=stages,
                blocks=1,
            )
            if config.threads <= _MOST_THREADS:
                blocks = _most_blocks(problem, config)
                yield dataclasses.replace(config, blocks=blocks)


def _most_blocks(problem: Conv2dProblem, config: DepthwiseConfig) -> int:
    """As many as leave a thread the registers that it needs, and hold its threads."""
    of_thread = emit.registers(problem, config)
    return min(row_walk.most_blocks(config.threads, of_thread), _MOST_BLOCKS)


def cycles(
    problem: Conv2dProblem, config: DepthwiseConfig, device: CudaDevice
) -> float:
    """Predicted cycles: those of the busiest processor's schedulers, or of memory.

    A scheduler that has few warps finds none that is ready in some cycles.
    """
    c = config
    rows, columns = image_axis.axes(problem)
    results = min(c.rows, -(-rows.result // rows.classes))
    steps = rows.entries(results)
    inside = _rows_inside(rows, c.rows, steps)
    taps = rows.taps / rows.stride * columns.taps  # of an entry
    kept = emit.keeps_weights(problem)
    of_row = _MULTIPLY * 2 * taps * c.tile_w / columns.between
    of_row += 0 if kept else taps
    of_result = c.tile_w * (
        _STORE + (_ACTIVATE if problem.epilogue.activation != "none" else 0)
    )
    of_step = _STEP + _COPY * _copies(problem, c)
    instructions = inside * of_row + steps * of_step + results * of_result + _BLOCK
    if problem.direction == "weight_grad":
        of_row += rows.taps / rows.stride * c.tile_w  # dy for each row of taps
        pieces = row_walk.tiles(problem, c.strips * c.tile_w, c.rows)
        each = -(-pieces // emit.parts(problem, c, device))
        kept_sums = 3 * rows.taps * columns.taps * c.strips
        instructions = each * (inside * of_row + steps * of_step + _BLOCK) + kept_sums
    blocks = emit.blocks(problem, c, device)
    warps = c.threads // 32
    resident = emit.resident_blocks(problem, c, device)
    of_sm = -(-blocks // device.sm_count)
    ready = min(of_sm, resident) * warps / _SCHEDULERS
    issue = of_sm * instructions * warps / _SCHEDULERS / min(1.0, ready / _ENOUGH_WARPS)
    memory, together = _memory_cycles(problem, device), _TOGETHER
    if _is_copy(problem, device):
        memory = _copy_cycles(problem, c, min(of_sm, resident), device)
        together *= _ENOUGH_WARPS / ready
    return max(issue, memory) + together * min(issue, memory)


def _is_copy(problem: Conv2dProblem, device: CudaDevice) -> bool:
    """True if the memory behind L2 takes most of the time, as far as was measured."""
    p = problem
    few = max(p.kernel_height, p.kernel_width) <= 3
    return few and p.strides == p.dilation == (1, 1) and p.bytes > device.l2_bytes


def _memory_cycles(problem: Conv2dProblem, device: CudaDevice) -> float:
    return problem.bytes / device.sm_count / _BYTES_PER_CYCLE


def _copy_cycles(
    problem: Conv2dProblem, config: DepthwiseConfig, at_once: int, device: CudaDevice
) -> float:
    """Cycles of memory beyond L2 for so many blocks of a processor that copy rows.

    Of the rows that two blocks read, some come from memory twice. Few bytes on their
    way leave memory idle, many crowd it; pieces of pixels are slower than whole ones.
    """
    p, c = problem, config
    is_weights = p.direction == "weight_grad"
    pixel = min(c.channels, p.in_channels) * ITEMSIZE[p.lhs]
    flight = at_once * (c.stages - 1) * _copied_pixels(p, c) * pixel
    bytes_of_sm = p.bytes / device.sm_count
    read = bytes_of_sm if is_weights else bytes_of_sm / 2
    streamed = (bytes_of_sm + _AGAIN * _read_twice(p, c) * read) / _COPIED_BYTES
    if c.channels < p.in_channels:
        streamed *= 1 + _PIECE / pixel
    wide = c.strips * c.tile_w
    streamed *= 1 + _BESIDE * (_copied_pixels(p, c) / wide - 1 - is_weights)
    waited = read / flight * (_LATENCY_OF_READS if is_weights else _LATENCY)
    crowd = min(max(flight / _ENOUGH_BYTES - 1, 0), 1)
    return (streamed**3 + waited**3) ** (1 / 3) * (1 + _CROWD * crowd)


def _copied_pixels(p: Conv2dProblem, c: DepthwiseConfig) -> int:
    """Pixels of a stage: a row of x, and one of dy for the gradient of weights."""
    wide = c.strips * c.tile_w
    _, columns = image_axis.axes(p)
    return columns.span(wide) + (wide if p.direction == "weight_grad" else 0)


def _read_twice(p: Conv2dProblem, c: DepthwiseConfig) -> float:
    """Share of the rows read by a block that the block below reads again."""
    rows, _ = image_axis.axes(p)
    results = min(c.rows, -(-rows.result // rows.classes))
    entries = rows.entries(results)
    below = 1 - rows.classes / rows.blocks(c.rows)
    return max(entries - rows.stride * results / rows.between, 0) / entries * below


def _rows_inside(rows: image_axis.Axis, of_block: int, steps: int) -> float:
    """Average number of rows of the image among those that a block steps over."""
    most = min(steps, -(-rows.read // rows.step))
    if rows.stride > 1 or rows.between > 1:
        return most
    blocks = -(-(rows.result - rows.first_result) // rows.classes // of_block)
    return min(most, (rows.read / rows.step + (blocks - 1) * (rows.taps - 1)) / blocks)


# Cycles of a scheduler for a multiplication, a row in the ring, a copy, a column of the
# result and its activation, and a block: fitted to the times of 200 configs on an H200.
_MULTIPLY, _STEP, _COPY, _STORE, _ACTIVATE, _BLOCK = 1.7, 150, 30, 6, 20, 1000
_SCHEDULERS, _ENOUGH_WARPS, _BYTES_PER_CYCLE, _TOGETHER = 4, 2, 18, 0.1
# Of copies beyond L2: bytes of a processor in a cycle, and those on their way that are
# enough; cycles that a copy waits, and one of two that are read alone; what rows that
# are read twice, columns too, short pieces and crowds lose. Fitted to the times of 80
# configs on an H100.
_COPIED_BYTES, _ENOUGH_BYTES, _LATENCY, _LATENCY_OF_READS = 12.5, 36 << 10, 2450, 1850
_AGAIN, _BESIDE, _PIECE, _CROWD = 0.4, 0.15, 2.6, 0.08


CONV2D_DEPTHWISE = KernelVariant(
    name="conv2d_depthwise",
    config_type=DepthwiseConfig,
    sources=(
        "cuda/conv2d_depthwise.cuh",
        "cuda/conv2d_depthwise_weights.cuh",
        SOURCE,
    ),
    reasons=_reasons,
    choices=CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=_call,
)
