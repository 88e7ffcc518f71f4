"""conv2d_grouped_images_weights: gradients of the weights of small images, since sm_80.

Of groups of 16 or 32 channels. A block has some whole images of x and dy in shared
memory, so that the images must be small; blocks leave partial sums, which are added.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernel's text is written in ``emit.conv2d_grouped_images_weights``. Caller:
the op's record (``ops.conv2d.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import conv2d_grouped_images_weights as emit
from tracea_jax.emit.conv2d_grouped import group
from tracea_jax.emit.conv2d_grouped_images_weights import GroupedImagesWeightsConfig
from tracea_jax.emit.row_walk import available_registers
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants import images
from tracea_jax.variants.base import Call
from tracea_jax.variants.conv2d_grouped_images import (
    BLOCK_BYTES,
    MOST_REGISTERS,
    SM_BYTES,
    refused_groups,
)
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.partial_sums import SOURCE, summed
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_ranges,
    first_refusal,
)

CHOICES: dict[str, tuple[int, ...]] = {
    "channels": (16, 32, 64, 128),
    "splits": (1, 2, 4),
    "parts": (1, 2, 4),
}
_RANGES = {"images": (1, 64), "blocks": (1, 8)}
_IMAGES = (16, 8, 4, 2, 1)
_MOST_THREADS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dGroupedImagesWeights:
    """The variant conv2d_grouped_images_weights; see ``variants.base.Variant``."""

    name: str = "conv2d_grouped_images_weights"
    config_type: type = GroupedImagesWeightsConfig
    sources: tuple[str, ...] = ("cuda/conv2d_grouped_images_weights.cuh", SOURCE)

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self,
        problem: Conv2dProblem,
        config: GroupedImagesWeightsConfig,
        device: Device,
    ) -> None:
        assert isinstance(device, CudaDevice)
        check_choices(config, CHOICES)
        check_ranges(config, _RANGES)
        if rule := first_refusal(LEGAL, problem, config, device):
            raise ValueError(rule.why(problem, config, device))

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return Space.of(*_grid(problem, device))

    def heuristic(
        self, problem: Conv2dProblem, device: Device
    ) -> GroupedImagesWeightsConfig:
        return self.likely(problem, device, 1)[0]

    def likely(
        self, problem: Conv2dProblem, device: Device, count: int
    ) -> tuple[GroupedImagesWeightsConfig, ...]:
        """Those configs first whose blocks keep all multiprocessors busy."""
        assert isinstance(device, CudaDevice)
        return tuple(itertools.islice(_grid(problem, device), count))

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        return False

    def call(
        self,
        problem: Conv2dProblem,
        config: GroupedImagesWeightsConfig,
        device: Device,
    ) -> Call:
        assert isinstance(device, CudaDevice)
        p = problem
        shape = (p.kernel_height, p.kernel_width, group(p), p.out_channels)
        kernel = emit.kernel(p, config, device)
        return summed(kernel, emit.parts(p, config), shape, p.out, device)


CONV2D_GROUPED_IMAGES_WEIGHTS = Conv2dGroupedImagesWeights()


def _reasons(problem: Conv2dProblem, device: Device) -> Iterator[str]:
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if p.direction != "weight_grad":
        yield f"direction {p.direction}; it computes the gradient of weights"
        return
    if refused := tuple(refused_groups(p)):
        yield from refused
        return
    smallest = _config(p, channels=group(p), images=1, parts=1, splits=1)
    if emit.registers(p) > MOST_REGISTERS:
        yield (
            f"weights of {p.kernel_height}x{p.kernel_width} taps; a warp has no "
            "registers for so many"
        )
    if (needed := emit.smem_bytes(p, smallest)) > device.smem_per_block_bytes:
        yield (
            f"an image of x and dy needs {needed} bytes of shared memory; a block has "
            f"{device.smem_per_block_bytes}"
        )


LEGAL = (
    Rule(
        code="groups",
        refuses=lambda p, c, d: c.channels % group(p) != 0,
        why=lambda p, c, d: f"channels={c.channels} must be whole groups",
    ),
    Rule(
        code="threads",
        refuses=lambda p, c, d: (
            c.threads > _MOST_THREADS or c.threads < c.channels // 8
        ),
        why=lambda p, c, d: f"{c.threads} threads; they may be {_MOST_THREADS}",
    ),
    Rule(
        code="parts",
        refuses=lambda p, c, d: c.parts > c.images,
        why=lambda p, c, d: f"{c.images} images cannot arrive in {c.parts} parts",
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: (
            emit.registers(p) > available_registers(c.threads, c.blocks)
        ),
        why=lambda p, c, d: (
            f"a thread takes {emit.registers(p)} registers; {c.blocks} blocks of "
            f"{c.threads} threads leave {available_registers(c.threads, c.blocks)}"
        ),
    ),
    images.memory_rule(emit.smem_bytes),
)


def _config(
    p: Conv2dProblem, channels: int, images: int, parts: int, splits: int
) -> GroupedImagesWeightsConfig:
    """The config with the most blocks of a multiprocessor."""
    config = GroupedImagesWeightsConfig(
        channels=channels, images=images, parts=parts, splits=splits, blocks=1
    )
    of_smem = SM_BYTES // (emit.smem_bytes(p, config) + BLOCK_BYTES)
    needed = emit.registers(p)
    counts = range(8, 1, -1)
    fitting = (n for n in counts if available_registers(config.threads, n) >= needed)
    return dataclasses.replace(config, blocks=max(1, min(of_smem, next(fitting, 1))))


def _grid(
    problem: Conv2dProblem, device: CudaDevice
) -> Iterator[GroupedImagesWeightsConfig]:
    """The legal configs; first those that keep all multiprocessors busy."""
    few: list[GroupedImagesWeightsConfig] = []
    for count, channels, splits, parts in itertools.product(
        _IMAGES, (32, 64, 16, 128), (4, 2, 1), (2, 1, 4)
    ):
        config = _config(
            problem, channels=channels, images=count, parts=parts, splits=splits
        )
        if first_refusal(LEGAL, problem, config, device):
            continue
        if emit.blocks(problem, config) >= 0.9 * device.sm_count:
            yield config
        else:
            few.append(config)
    yield from sorted(few, key=lambda config: -emit.blocks(problem, config))
