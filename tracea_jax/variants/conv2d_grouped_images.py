"""conv2d_grouped_images: small images in groups of 16 or 32 channels, since sm_80.

Forward, and the gradient of x without steps. A block has some whole images in shared
memory, so that the image must be small; ``conv2d_grouped`` walks down larger ones.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernel's text is written in ``emit.conv2d_grouped_images``. Caller: the
op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_grouped_images as emit
from tracea_jax.emit.conv2d_grouped import group
from tracea_jax.emit.conv2d_grouped_images import GroupedImagesConfig
from tracea_jax.emit.row_walk import available_registers
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
GROUPS = (16, 32)  # channels of one
CHOICES: dict[str, tuple[int, ...]] = {
    "channels": (16, 32, 64, 128),
    "tiles": (1, 2, 4),
    "threads": (64, 128, 256, 512),
    "parts": (1, 2, 4),
}
_RANGES = {"images": (1, 64), "blocks": (1, 8)}
_MOST_REGISTERS = 240
_IMAGES = (16, 8, 4, 2, 1)
_MEASURED_GROUP, _MOST_PIXELS, _FEWEST_BYTES = 32, 64, 2**23


def _space(problem: Conv2dProblem, device: CudaDevice) -> Space:
    return Space.of(*_grid(problem, device))


def _likely(
    problem: Conv2dProblem, device: CudaDevice, count: int
) -> tuple[GroupedImagesConfig, ...]:
    """Those configs first whose blocks keep all multiprocessors busy."""
    return tuple(itertools.islice(_grid(problem, device), count))


def _wins(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the kernel was measured to beat cuDNN on such problems.

    By ``conv2d_earlier.json`` of an H100 cuDNN took 1.8 and, for the gradient, 1.6
    times as long for 3 x 3 kernels of 32 channels a group on 64 images of 7 x 7 pixels.
    """
    p = problem
    return (
        images.is_measured(p, device)
        and images.is_grouped_3x3(p)
        and group(p) == _MEASURED_GROUP
        and p.height * p.width <= _MOST_PIXELS
        and p.bytes >= _FEWEST_BYTES
    )


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if p.direction == "weight_grad":
        yield "direction weight_grad; it computes forward, and the gradient of x"
    if p.in_channels != p.out_channels or group(p) not in GROUPS:
        yield (
            f"groups of {p.in_channels // p.groups} channels give "
            f"{p.out_channels // p.groups}; it takes as many out as in, "
            f"{', '.join(map(str, GROUPS))} of them"
        )
        return
    yield from images.refused_arrays(p, DTYPES)
    yield from images.refused_sizes(p)
    if p.batch * p.groups > INT32_MAX:
        yield "it has more blocks than a launch counts"
    if p.direction == "input_grad" and p.strides != (1, 1):
        yield f"the gradient of strides {p.strides}; it takes none"
        return
    smallest = GroupedImagesConfig(
        channels=group(p), images=1, parts=1, tiles=1, threads=64, blocks=1
    )
    if emit.registers(p, smallest) > _MOST_REGISTERS:
        yield (
            f"weights of {p.kernel_height}x{p.kernel_width} taps; a warp has no "
            "registers for so many"
        )
    if emit.smem_bytes(p, smallest) > device.smem_per_block_bytes:
        yield (
            f"an image needs {emit.smem_bytes(p, smallest)} bytes of shared memory; a "
            f"block has {device.smem_per_block_bytes}"
        )


LEGAL = (
    Rule(
        code="groups",
        refuses=lambda p, c, d: c.channels % group(p) != 0,
        why=lambda p, c, d: f"channels={c.channels} must be whole groups",
    ),
    Rule(
        code="threads",
        refuses=lambda p, c, d: c.threads % (32 * c.channels // group(p)) != 0,
        why=lambda p, c, d: (
            f"each group must have as many warps of {c.threads} threads"
        ),
    ),
    Rule(
        code="parts",
        refuses=lambda p, c, d: c.parts > c.images,
        why=lambda p, c, d: f"{c.images} images cannot arrive in {c.parts} parts",
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            emit.registers(p, c) > available_registers(c.threads, c.blocks)
        ),
        why=lambda p, c, d: (
            f"tiles={c.tiles} takes {emit.registers(p, c)} registers; {c.blocks} "
            f"blocks of {c.threads} threads leave "
            f"{available_registers(c.threads, c.blocks)}"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)


def _most_blocks(
    p: Conv2dProblem, config: GroupedImagesConfig, device: CudaDevice
) -> int:
    """Blocks for which a multiprocessor has shared memory and registers."""
    of_smem = device.blocks_in_smem(emit.smem_bytes(p, config))
    needed = emit.registers(p, config)
    fitting = (
        blocks
        for blocks in range(_RANGES["blocks"][1], 1, -1)
        if available_registers(config.threads, blocks) >= needed
    )
    return max(1, min(of_smem, next(fitting, 1)))


def _grid(problem: Conv2dProblem, device: CudaDevice) -> Iterator[GroupedImagesConfig]:
    """The legal configs; first those that keep all multiprocessors busy."""
    few: list[GroupedImagesConfig] = []
    for count, channels, threads, parts, tiles in itertools.product(
        _IMAGES, (32, 64, 128, 16), (256, 128, 64, 512), (1, 2, 4), (1, 2, 4)
    ):
        config = GroupedImagesConfig(
            channels=channels,
            images=count,
            parts=parts,
            tiles=tiles,
            threads=threads,
            blocks=1,
        )
        most = _most_blocks(problem, config, device)
        config = dataclasses.replace(config, blocks=most)
        if first_refusal(LEGAL, problem, config, device):
            continue
        if emit.blocks(problem, config) >= 0.9 * device.sm_count:
            yield config
        else:
            few.append(config)
    yield from sorted(few, key=lambda config: -emit.blocks(problem, config))


CONV2D_GROUPED_IMAGES = KernelVariant(
    name="conv2d_grouped_images",
    config_type=GroupedImagesConfig,
    sources=("cuda/conv2d_grouped_images.cuh",),
    reasons=_reasons,
    choices=CHOICES,
    ranges=_RANGES,
    rules=LEGAL,
    configs=_space,
    rank=_likely,
    wins=_wins,
    calls=emit.kernel,
)
