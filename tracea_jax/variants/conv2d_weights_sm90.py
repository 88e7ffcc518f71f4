"""conv2d_weights_sm90: the gradient of convolutions' weights on Hopper.

Of small groups, tiles of 64 channels by the same 64 are computed, and what joins two
groups is dropped: a waste of products, of which tensor cores have enough.

Where taps share copies of x, pixels are also multiplied with zeros behind lines of dy:
an entry of x that is infinite or NaN, at the edge of an image, reaches the weights of
all taps of a line, also of those that do not see it.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernel's text is written in ``emit.conv2d_weights_sm90``. Caller: the op's
record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_weights_sm90 as emit
from tracea_jax.emit.conv2d_weights_sm90 import ConvWeightsSm90Config
from tracea_jax.emit.conv_axes import CORNERS, refused_walks, strip_axes
from tracea_jax.problem import ITEMSIZE, Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import EXACT_PRECISIONS, INT32_MAX
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.partial_sums import SOURCE, summed
from tracea_jax.variants.space import (
    Rule,
    Space,
    first_refusal,
)

DTYPES = ("bfloat16", "float16")
OUT_DTYPES = ("float32", "bfloat16", "float16")
GROUPS = (2, 4, 8, 16, 32, 64)  # channels of one: whole groups in a slab
CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 128, 192, 256, 384, 512, 576),
    "consumers_m": (1, 2),
    "consumers_n": (1, 2, 3),
}
_RANGES = {"stages": (2, 10), "parts": (1, 4096), "taps": (1, 4)}
_MOST_COLUMNS, _MOST_ACCUMULATORS = 256, 192
_MOST_COPIED = 256  # pixels
_ROW_UNIT_BYTES = 16
_FEWEST_FLOPS = 2**27
# If there are more channels than so many; of 1 x 1 kernels with a stride; and how many
# channels of x by channels of y those without have at most.
_FEWEST_PIXELS, _MOST_OF_FEW_PIXELS = 3 << 10, 512
_FEWEST_STRIDED_PIXELS, _MOST_CHANNELS_1X1 = 196, 2**15
# Of problems with groups, by channels of one.
_FEWEST_BYTES = {**dict.fromkeys((4, 8, 16), 2**24), 32: 3 << 22, 64: 2**24}


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return Space.of(*dict.fromkeys(_grid(problem, device)))


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[ConvWeightsSm90Config, ...]:
    """Those configs that the model finds fastest."""
    configs = _space(problem, device).configs()
    cheapest = sorted(configs, key=lambda c: _cost(problem, c, device))
    return tuple(cheapest[:count])


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d.json`` and ``conv2d_earlier.json`` of an H100 cuDNN took 1.3 to 1.67
    times as long for 3 x 3 kernels of 64 to 512 channels on 64 images of ResNets, and
    1.55 to 3 times for groups of 4 to 32 channels on 64 images of ResNeXts. It was
    slower for groups of 64, too, of which no results are kept; on 8 images it was as
    fast for groups. On one image and on eight of ResNets it was slower; no results are
    kept.
    """
    p = problem
    if not images.is_measured(p, device):
        return False
    if p.groups > 1:
        fewest = _FEWEST_BYTES.get(p.in_channels // p.groups)
        return images.is_grouped_3x3(p) and fewest is not None and p.bytes >= fewest
    if (p.kernel_height, p.kernel_width) == (1, 1):
        return _is_measured_1x1(p)
    is_wide = max(p.in_channels, p.out_channels) > _MOST_OF_FEW_PIXELS
    fewest = _FEWEST_PIXELS if is_wide else 1
    is_large = p.flops >= _FEWEST_FLOPS and images.pixels(p) >= fewest
    return images.is_dense_3x3(p) and is_large


def _is_measured_1x1(p: Conv2dProblem) -> bool:
    """Returns whether pixels have a stride, or are many for the channels.

    By the answers of an H200 that ship XLA took 1.2 to 1.7 times as long for those with
    a stride, and 1.1 to 1.55 times for those of few channels: its products have few
    tiles, of which each sums over all pixels.
    """
    channels = p.in_channels * p.out_channels
    is_plain = p.dilation == (1, 1) and p.padding == ((0, 0), (0, 0))
    if not is_plain or p.in_channels % emit.SLAB or p.out_channels % emit.SLAB:
        return False
    if p.strides == (2, 2):
        is_large = p.flops >= _FEWEST_FLOPS
        return is_large and images.pixels(p) >= _FEWEST_STRIDED_PIXELS
    is_dense = p.strides == (1, 1) and images.pixels(p) >= _FEWEST_PIXELS
    return is_dense and channels <= _MOST_CHANNELS_1X1


def _call(
    problem: Conv2dProblem, config: ConvWeightsSm90Config, device: CudaDevice
) -> Call:
    p = problem
    inputs = p.in_channels // p.groups
    shape = (p.kernel_height, p.kernel_width, inputs, p.out_channels)
    kernel = emit.kernel(p, config, device)
    if config.parts == 1:
        return kernel
    return summed(kernel, config.parts, shape, p.out, device)


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
        return
    if device.capability != (9, 0):
        yield f"it needs compute capability 9.0; {device.name} has {device.capability}"
    if p.direction != "weight_grad":
        yield f"direction {p.direction}; it computes the gradient of weights"
        return
    if p.layout != "nhwc":
        yield f"layout {p.layout}; it takes nhwc"
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.groups != 1 and (inputs != outputs or inputs not in GROUPS):
        yield (
            f"groups of {inputs} channels give {outputs}; it takes one group, or as "
            f"many out as in, {', '.join(map(str, GROUPS))} of them"
        )
    if p.lhs != p.rhs or p.lhs not in DTYPES:
        yield f"operands {p.lhs} and {p.rhs}; it takes two of {', '.join(DTYPES)}"
    if p.out not in OUT_DTYPES:
        yield f"output of dtype {p.out}; it gives {', '.join(OUT_DTYPES)}"
    if p.precision not in EXACT_PRECISIONS:
        yield f"precision {p.precision} names an algorithm only XLA has"
    for name, channels in (("x", p.in_channels), ("dy", p.out_channels)):
        if channels * ITEMSIZE[p.lhs] % _ROW_UNIT_BYTES:
            yield (
                f"pixels of {name} have {channels * ITEMSIZE[p.lhs]} bytes; tensor "
                f"maps take multiples of {_ROW_UNIT_BYTES}"
            )
    if 0 in p.elements:
        yield "its arrays are empty"
        return
    yield from refused_walks(p)
    if p.batch * p.out_size[0] * (p.width + 2 * CORNERS[1]) > INT32_MAX - emit.PIXELS:
        yield "y has more than 2^31 - 1 pixels with those of padding"


# --- configs --------------------------------------------------------------------------


def _shares_wrongly(p: Conv2dProblem, c: ConvWeightsSm90Config) -> bool:
    if c.taps == 1:
        return False
    _, columns = strip_axes(p)
    return (
        p.strides[1] != 1
        or c.taps != p.kernel_width
        or c.columns != c.taps * emit.SLAB
        or min(columns.before, columns.behind) < 0
        or not 0 <= columns.counted - columns.extent <= CORNERS[1]
        or max(columns.before, columns.behind) > CORNERS[1]
        or emit.copied_pixels(p, c) > _MOST_COPIED
    )


LEGAL = (
    Rule(
        code="groups",
        refuses=lambda p, c, d: p.groups > 1 and c.tile_m != emit.SLAB,
        why=lambda p, c, d: f"tile_m={c.tile_m}; of groups it is {emit.SLAB}",
    ),
    Rule(
        code="taps",
        refuses=lambda p, c, d: _shares_wrongly(p, c),
        why=lambda p, c, d: (
            f"taps={c.taps} share a copy if they are a whole line of the kernel, the "
            "columns of one consumer, and of stride 1 over an image that is not cropped"
        ),
    ),
    Rule(
        code="consumers",
        refuses=lambda p, c, d: (
            c.tile_m % (emit.SLAB * c.consumers_m) != 0
            or c.tile_n % (emit.SLAB * c.consumers_n) != 0
            or c.consumers > 3
        ),
        why=lambda p, c, d: (
            f"{c.consumers_m}x{c.consumers_n} consumers of {c.tile_m}x{c.tile_n}; at "
            "most 3 may take whole slabs of 64"
        ),
    ),
    Rule(
        code="accumulators",
        refuses=lambda p, c, d: (
            c.accumulators > _MOST_ACCUMULATORS // (1 + (c.consumers == 3))
            or c.columns > _MOST_COLUMNS
        ),
        why=lambda p, c, d: f"{c.accumulators} accumulators a thread are too many",
    ),
    Rule(
        code="parts",
        refuses=lambda p, c, d: c.parts > emit.steps(p, c),
        why=lambda p, c, d: (
            f"parts={c.parts}; there are {emit.steps(p, c)} steps of {emit.PIXELS} "
            "pixels"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)
# Tiles and their consumers.
_SHAPES = (
    *((128, 192, 2, 1), (128, 256, 2, 1), (256, 128, 2, 1), (128, 128, 2, 1)),
    *((64, 192, 1, 1), (64, 576, 1, 3), (64, 384, 1, 2), (64, 192, 1, 3)),
    *((64, 128, 1, 1), (64, 64, 1, 1), (256, 64, 2, 1), (64, 256, 1, 2)),
)
_RINGS = 220 << 10, 110 << 10  # bytes, of a block or two on a multiprocessor
# What a multiprocessor does in a cycle, and the memory of all of them; the cycles of a
# step, of a tile and of each sum that a thread then stores, and of the launch that adds
# parts up: fitted to the times of 541 configs of 148 problems on an H200.
_PRODUCTS_A_CYCLE, _BYTES_A_CYCLE, _MEMORY_BYTES_A_CYCLE = 28, 55, 2400
_STEP, _TILE, _STORE, _SUM = 12, 3000, 60, 3000
_FEWEST_STAGES, _SHALLOW = 2, 1.5  # a ring of so few, and what steps then take


def _cost(
    problem: Conv2dProblem, config: ConvWeightsSm90Config, device: CudaDevice
) -> float:
    """Cycles of the blocks of a multiprocessor, and of what sums the parts.

    Two blocks that share a multiprocessor take turns on what it does.
    """
    p, c = problem, config
    blocks = math.prod(emit.tiles(p, c)) * c.parts
    together = min(emit.resident_blocks(p, c), -(-blocks // device.sm_count))
    rounds = -(-blocks // (device.sm_count * together))
    steps = -(-emit.steps(p, c) // c.parts)
    products = c.tile_m * c.tile_n / _PRODUCTS_A_CYCLE
    copied = (c.tile_m + emit.rows_b(p, c)) * 128 / _BYTES_A_CYCLE
    step = max(products, copied) * (_SHALLOW if c.stages == _FEWEST_STAGES else 1)
    multiplied = steps * (together * step + _STEP)
    inputs = p.in_channels // p.groups
    weights = p.kernel_height * p.kernel_width * inputs * p.out_channels
    partial = 2 * 4 * c.parts * weights  # written and read
    summed = partial / _MEMORY_BYTES_A_CYCLE + _SUM if c.parts > 1 else 0
    of_tile = _TILE + _STORE * c.accumulators
    return rounds * (multiplied + of_tile) + summed


def _shapes(problem: Conv2dProblem) -> Iterator[ConvWeightsSm90Config]:
    """Tiles without depth: those of slabs of their own, then of taps that share."""
    taps = problem.kernel_width
    line = taps * emit.SLAB
    shared = ((128, line, 2, 1), *((64, n * line, 1, n) for n in (1, 2, 3)))
    shapes = [(*shape, 1) for shape in _SHAPES]
    shapes += [(*shape, taps) for shape in shared] if taps > 1 else []
    for tile_m, tile_n, consumers_m, consumers_n, of_line in shapes:
        yield ConvWeightsSm90Config(
            tile_m=tile_m,
            tile_n=tile_n,
            consumers_m=consumers_m,
            consumers_n=consumers_n,
            stages=2,
            parts=1,
            taps=of_line,
        )


def _grid(
    problem: Conv2dProblem, device: CudaDevice
) -> Iterator[ConvWeightsSm90Config]:
    for shape in _shapes(problem):
        if shape.taps > 1 and _shares_wrongly(problem, shape):
            continue
        deep = dataclasses.replace(shape, stages=1)
        stage = emit.smem_bytes(problem, deep)
        tiles = math.prod(emit.tiles(problem, shape))
        for ring in _RINGS[: 2 if shape.consumers == 1 else 1]:
            for waves in (1, 2):
                parts = waves * device.sm_count // tiles
                config = dataclasses.replace(
                    shape,
                    stages=min(ring // stage, 8),
                    parts=max(min(parts, emit.steps(problem, shape)), 1),
                )
                is_ring = config.stages >= _RANGES["stages"][0]
                if is_ring and not first_refusal(LEGAL, problem, config, device):
                    yield config


CONV2D_WEIGHTS_SM90 = KernelVariant(
    name="conv2d_weights_sm90",
    config_type=ConvWeightsSm90Config,
    sources=("cuda/conv2d_weights_sm90.cuh", SOURCE),
    reasons=_reasons,
    choices=CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=_call,
)
