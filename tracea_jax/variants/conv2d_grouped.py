"""conv2d_grouped: convolutions of few channels a group, on every GPU since sm_80.

Forward, and the gradient of x without steps. Groups of fewer than 8 channels are
multiplied with zeros for the others of their 8: where a pixel has an entry that is
infinite or NaN, those channels' results are NaN.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernel's text is written in ``emit.conv2d_grouped``. Caller: the op's
record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_grouped as emit
from tracea_jax.emit import image_axis, row_walk
from tracea_jax.emit.conv2d_grouped import GroupedConfig
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.kernel_variant import KernelVariant
from tracea_jax.variants.space import (
    Rule,
    Space,
    first_refusal,
)

DTYPES = ("bfloat16", "float16")
GROUPS = (2, 4, 8, 16, 32)  # channels of one
CHOICES: dict[str, tuple[int, ...]] = {
    "channels": (16, 32, 64, 128, 256),
    "tile_w": (16, 32),
}
_MOST_BLOCKS = 16  # of a multiprocessor
_WAVES = 2  # blocks that each multiprocessor has at the least, if there are so many
_RANGES = {
    "strips": (1, 32),
    "rows": (1, INT32_MAX),
    "stages": (2, 8),
    "blocks": (1, _MOST_BLOCKS),
}
_FEWEST_BYTES = 2**24  # of a problem
_MOST_THREADS, _MOST_REGISTERS, _MOST_COPIES = 512, 230, 32


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return Space.of(*dict.fromkeys(_grid(problem, device)))


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[GroupedConfig, ...]:
    """The first configs of the space, where those are that were fastest."""
    return tuple(itertools.islice(_grid(problem, device), count))


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d_earlier.json`` of an H100 cuDNN took 2.3 and 2.5 times as long for 3 x 3
    kernels of 4 and of 8 channels a group, and 1.8 times for 16, on 64 images.
    Infinities and NaN of groups of 4 reach others of their 8 channels, so the kernel is
    worth naming where operands are finite.
    """
    p = problem
    return (
        images.is_measured(p, device)
        and images.is_grouped_3x3(p)
        and emit.group(p) in (8, 16)
        and p.bytes >= _FEWEST_BYTES
    )


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if p.direction == "weight_grad":
        yield "direction weight_grad; it computes forward, and the gradient of x"
    if p.in_channels != p.out_channels or emit.group(p) not in GROUPS:
        yield (
            f"groups of {p.in_channels // p.groups} channels give "
            f"{p.out_channels // p.groups}; it takes as many out as in, "
            f"{', '.join(map(str, GROUPS))} of them"
        )
        return
    if p.in_channels % max(emit.SIDE, emit.group(p)):
        yield f"{p.in_channels} channels; it takes multiples of {emit.SIDE}"
    yield from images.refused_arrays(p, DTYPES)
    yield from images.refused_sizes(p)
    if p.direction == "input_grad" and p.strides != (1, 1):
        yield f"the gradient of strides {p.strides}; it takes none"
        return
    smallest = GroupedConfig(
        channels=32, strips=1, tile_w=16, rows=1, stages=2, blocks=1
    )
    if emit.registers(p, smallest) > _MOST_REGISTERS:
        yield (
            f"weights of {p.kernel_height}x{p.kernel_width} taps; a warp has no "
            "registers for so many"
        )


# --- configs --------------------------------------------------------------------------


def _copies(p: Conv2dProblem, c: GroupedConfig) -> int:
    """Copies of a thread for each row."""
    _, columns = image_axis.axes(p)
    units = columns.span(c.strips * c.tile_w) * c.channels * 2
    return -(-units // row_walk.copy_bytes(p) // c.threads)


LEGAL = (
    Rule(
        code="threads",
        refuses=lambda p, c, d: c.threads > _MOST_THREADS,
        why=lambda p, c, d: f"{c.threads} threads; they may be {_MOST_THREADS}",
    ),
    Rule(
        code="channels",
        refuses=lambda p, c, d: c.channels % max(emit.group(p), emit.SIDE) != 0,
        why=lambda p, c, d: f"channels={c.channels} must be whole groups",
    ),
    Rule(
        code="strips",
        refuses=lambda p, c, d: c.strips % image_axis.axes(p)[1].classes != 0,
        why=lambda p, c, d: (
            f"strips={c.strips} must be a multiple of {image_axis.axes(p)[1].classes}"
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


def _grid(problem: Conv2dProblem, device: CudaDevice) -> Iterator[GroupedConfig]:
    """The legal configs; first those that were fastest where they have blocks enough.

    A block that walks down more of an image loads its weights less often.
    """
    rows, columns = image_axis.axes(problem)
    high = -(-rows.result // rows.classes)
    few: list[GroupedConfig] = []
    for tile_w, cut, strips, channels, stages in itertools.product(
        CHOICES["tile_w"], (1, 2, 4), (1, 2), (64, 32, 128), (4, 6)
    ):
        config = GroupedConfig(
            channels=channels,
            strips=row_walk.round_up(strips, columns.classes),
            tile_w=tile_w,
            rows=-(-high // cut),
            stages=stages,
            blocks=1,
        )
        most = row_walk.most_blocks(config.threads, emit.registers(problem, config))
        config = dataclasses.replace(config, blocks=min(most, _MOST_BLOCKS))
        if first_refusal(LEGAL, problem, config, device):
            continue
        if _blocks(problem, config) >= _WAVES * device.sm_count:
            yield config
        else:
            few.append(config)
    yield from sorted(few, key=lambda config: -_blocks(problem, config))


def _blocks(problem: Conv2dProblem, config: GroupedConfig) -> int:
    tiles = row_walk.tiles(problem, config.strips * config.tile_w, config.rows)
    return tiles * row_walk.channel_blocks(problem, config.channels)


CONV2D_GROUPED = KernelVariant(
    name="conv2d_grouped",
    config_type=GroupedConfig,
    sources=("cuda/conv2d_grouped.cuh",),
    reasons=_reasons,
    choices=CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=emit.kernel,
)
