"""conv2d_bands: convolutions of each channel alone on the tensor cores of Hopper.

Rows of taps are matrices with the taps along a band. Infinities and NaN stay where they
are: blocks that meet some compute their results again, slowly.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernels' texts are written in ``emit.conv2d_bands``. Caller: the op's
record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_bands as emit
from tracea_jax.emit import image_axis, row_walk
from tracea_jax.emit.conv2d_bands import BandsConfig
from tracea_jax.problem import Conv2dProblem
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

DTYPES = ("bfloat16", "float16")
CHOICES: dict[str, tuple[int, ...]] = {
    "channels": (16, 32, 48),
    "stages": (2, 3, 4, 6, 8),
}
_MOST_BLOCKS = 8  # of a multiprocessor
_RANGES = {
    "strips": (1, emit.STRIPS),
    "rows": (1, INT32_MAX),
    "blocks": (1, _MOST_BLOCKS),
}
_MOST_TAPS = 9  # of an axis
_OCTET = 8  # channels that are copied together
# Of square kernels that were measured to win, by taps; and sizes of images that lost.
_FEWEST_BYTES = {5: 2**22, 7: 2**21}
_SMALL = 7


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return Space.of(*_grid(problem, device))


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[BandsConfig, ...]:
    """Those legal configs that a count of cycles finds fastest."""
    cost = functools.partial(cycles, problem, device=device)
    return tuple(heapq.nsmallest(count, _grid(problem, device), key=cost))


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN and conv2d_depthwise.

    By ``conv2d.json`` of an H200 cuDNN took 1.9 to 4.3 times as long for 64 images of
    ConvNeXt's and EfficientNet's large convolutions. Kernels of 3 x 3, and of 5 x 5 on
    small images, are faster by conv2d_depthwise.
    """
    p = problem
    taps = p.kernel_height
    fewest = _FEWEST_BYTES.get(taps)
    return (
        images.is_measured(p, device)
        and fewest is not None
        and p.kernel_width == taps
        and p.bytes >= fewest
        and (taps == 7 or min(p.height, p.width) > _SMALL)
    )


def _call(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> Call:
    kernel = emit.kernel(problem, config, device)
    if problem.direction != "weight_grad":
        return kernel
    parts = emit.parts(problem, config)
    return summed_depthwise(kernel, parts, problem, device)


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if device.capability < (9, 0):
        yield f"{device.arch}; its stores of fragments need sm_90"
    if not p.in_channels == p.out_channels == p.groups > 1:
        yield (
            f"it takes a group for each channel; {p.in_channels} channels give "
            f"{p.out_channels} in {p.groups} groups"
        )
    if p.in_channels % _OCTET:
        yield f"{p.in_channels} channels; it takes multiples of {_OCTET}"
    yield from images.refused_arrays(p, DTYPES)
    yield from images.refused_sizes(p)
    if p.strides != (1, 1) or p.dilation != (1, 1):
        yield f"strides {p.strides} and dilation {p.dilation}; it takes none"
    if max(p.kernel_height, p.kernel_width) > _MOST_TAPS:
        yield (
            f"a kernel of {p.kernel_height}x{p.kernel_width}; a band has up to "
            f"{_MOST_TAPS}x{_MOST_TAPS}"
        )
    if p.direction != "weight_grad" and p.out != p.lhs:
        yield f"a result of {p.out}; it has the dtype of the operands, {p.lhs}"
    if p.epilogue.residual or p.epilogue.save_preactivation:
        yield "a residual or a saved preactivation; it adds a bias alone"


# --- configs --------------------------------------------------------------------------

LEGAL = (
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            emit.registers(p, c) > row_walk.available_registers(c.threads, c.blocks)
        ),
        why=lambda p, c, d: (
            f"{p.kernel_height} rows of taps take {emit.registers(p, c)} registers; "
            f"{c.blocks} blocks of {c.threads} threads leave "
            f"{row_walk.available_registers(c.threads, c.blocks)}"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)


def _grid(problem: Conv2dProblem, device: CudaDevice) -> Iterator[BandsConfig]:
    """Blocks of whole images, or as many as run at once, or some rounds of them."""
    rows, columns = image_axis.axes(problem)
    wide = -(-columns.result // emit.COLUMNS)
    fewest = -(-wide // emit.STRIPS)
    strips = [-(-wide // (fewest * cut)) for cut in (1, 2, 4)]
    few = {n for n in strips[1:] if emit.STRIPS // n > problem.batch}  # images
    found: dict[BandsConfig, None] = {}
    for channels, strip, stages in itertools.product(
        CHOICES["channels"], sorted({strips[0]} | {*strips} - few)[::-1], (4, 8)
    ):
        config = BandsConfig(
            channels=channels, strips=strip, rows=rows.result, stages=stages, blocks=1
        )
        most = row_walk.most_blocks(config.threads, emit.registers(problem, config))
        most = emit.resident_blocks(
            problem, dataclasses.replace(config, blocks=min(most, _MOST_BLOCKS)), device
        )
        slots = device.sm_count * most // emit.channel_blocks(problem, config)
        every = emit.all_rows(problem, config)
        for high in (rows.result, *(-(-every // max(slots * n, 1)) for n in (1, 2, 3))):
            config = dataclasses.replace(config, rows=high, blocks=most)
            if first_refusal(LEGAL, problem, config, device) is None:
                found[config] = None
    yield from found


def cycles(problem: Conv2dProblem, config: BandsConfig, device: CudaDevice) -> float:
    """Predicted cycles: those of the busiest processor and of memory, which overlap."""
    c, taps = config, problem.kernel_height
    rows, columns = image_axis.axes(problem)
    pieces = -(-c.rows // rows.result)
    if c.rows % rows.result and rows.result % c.rows:
        pieces += 1  # most blocks begin in the middle of an image
    steps = c.rows + pieces * (taps - 1 + _PIECE)
    blocks = emit.blocks(problem, c)
    resident = emit.resident_blocks(problem, c, device)
    at_once = min(resident, -(-blocks // device.sm_count))
    of_step = max(at_once * c.threads / 128 * (_ISSUE + _TAPS * taps), _LATENCY)
    rounds = -(-blocks // (device.sm_count * at_once))
    issue = rounds * (steps * of_step + _BLOCK)
    if problem.direction == "weight_grad":
        issue += _PART * emit.parts(problem, c)
    issue *= _FEWER_BLOCKS if c.channels > CHOICES["channels"][0] else 1
    memory = problem.bytes / device.sm_count / _BYTES_PER_CYCLE
    memory *= 1 + _PIXEL / c.channels
    memory *= 1 + _HALO * (columns.taps - 1) / (c.strips * emit.COLUMNS)
    return (issue**_OVERLAP + memory**_OVERLAP) ** (1 / _OVERLAP)


# Cycles of a scheduler for a row of a warp, and for each of its taps; those that a row
# takes at the least; rows that a piece of an image takes longer; cycles of a block, and
# of a partial sum; what fewer, larger blocks lose. Bytes of a processor in a cycle, and
# what short pieces of pixels, and columns that are read twice, lose. Fitted to times
# of 900 configs on an H200.
_ISSUE, _TAPS, _LATENCY, _PIECE, _BLOCK, _PART = 153, 15, 620, 0.4, 8800, 88
_FEWER_BLOCKS = 1.04
_BYTES_PER_CYCLE, _PIXEL, _HALO, _OVERLAP = 12.7, 1.5, 1.7, 2.5


CONV2D_BANDS = KernelVariant(
    name="conv2d_bands",
    config_type=BandsConfig,
    sources=(
        "cuda/conv2d_bands.cuh",
        "cuda/conv2d_bands_weights.cuh",
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
