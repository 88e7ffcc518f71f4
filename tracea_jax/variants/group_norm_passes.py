"""group_norm_passes: a group norm and its activation in two passes, since sm_90.

The first sums parts of images, the second writes the result; where the L2 cache keeps
the image between them, both run at the rate of memory. ``group_norm_sm90`` reads an
image once, but its blocks wait for each other.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernels' text is written in ``emit.group_norm_passes``. Caller: the op's
record (``ops.group_norm.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import group_norm_passes as emit
from tracea_jax.emit.group_norm_passes import GroupNormPassesConfig
from tracea_jax.emit.norms import pack
from tracea_jax.problem import GroupNormProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.norms import refused_arrays
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_ranges,
    check_rules,
    first_refusal,
)
from tracea_jax.variants.steps import Buffer, Launch, Steps

CHOICES: dict[str, tuple[int, ...]] = {"threads": (256, 512)}
_RANGES = {"parts": (1, INT32_MAX), "blocks": (1, INT32_MAX)}
_MOST_THREADS = max(CHOICES["threads"])
_BLOCKS_OF_SM = (2, 4, 1, 8)  # of the first pass; so many times as many of the second
_TIMES = (1, 2, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupNormPasses:
    """The variant group_norm_passes; see ``variants.base.Variant``."""

    name: str = "group_norm_passes"
    config_type: type = GroupNormPassesConfig
    sources: tuple[str, ...] = (
        "cuda/group_norm_sums.cuh",
        "cuda/group_norm_apply.cuh",
    )

    def why_not(self, problem: GroupNormProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: GroupNormProblem, config: GroupNormPassesConfig, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        check_ranges(config, _RANGES)
        check_rules(LEGAL, problem, config, device)

    def space(self, problem: GroupNormProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return Space.of(*_grid(problem, device))

    def heuristic(
        self, problem: GroupNormProblem, device: Device
    ) -> GroupNormPassesConfig:
        assert isinstance(device, CudaDevice)
        return next(_grid(problem, device))

    def expects_to_win(self, problem: GroupNormProblem, device: Device) -> bool:
        return False

    def call(
        self, problem: GroupNormProblem, config: GroupNormPassesConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        shape = (problem.images * config.parts, problem.groups)
        read, left = emit.PARTS
        return Steps(
            operands=("x", "scale", "bias"),
            results=("y", "mean", "inverse"),
            scratch=tuple(Buffer(name=n, shape=shape, dtype="float32") for n in left),
            steps=(
                Launch(
                    name="sums",
                    kernel=emit.sums(problem, config, device),
                    reads=read,
                    writes=left,
                ),
                Launch(
                    name="apply",
                    kernel=emit.apply(problem, config, device),
                    reads=("x", "scale", "bias", *left),
                    writes=("y", "mean", "inverse"),
                ),
            ),
        )


GROUP_NORM_PASSES = GroupNormPasses()


def _reasons(problem: GroupNormProblem, device: Device) -> Iterator[str]:
    """Why the problem cannot be served, each as a sentence."""
    p = problem
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
        return
    if device.capability < (9, 0):
        yield f"it sums as clusters do, since sm_90; the device is {device.arch}"
    if p.direction != "forward":
        yield f"direction {p.direction}; it computes forward"
    if refused := tuple(refused_arrays(p)):
        yield from refused
        return
    most = _MOST_THREADS * pack(p)
    if p.channels > most:
        yield f"{p.channels} channels; a block has a thread for each pack of {most}"
    if max(p.pixels, p.images * p.channels) > INT32_MAX // 8:
        yield "it has more pixels, or more blocks, than a launch counts"
    smallest = GroupNormPassesConfig(parts=1, blocks=1, threads=_MOST_THREADS)
    if emit.smem_bytes(p, smallest) > device.smem_per_block_bytes:
        yield f"sums of {p.channels} channels do not fit shared memory"


LEGAL = (
    Rule(
        code="parts",
        refuses=lambda p, c, d: p.pixels % c.parts != 0,
        why=lambda p, c, d: f"parts={c.parts} must divide {p.pixels} pixels",
    ),
    Rule(
        code="blocks",
        refuses=lambda p, c, d: c.blocks > p.pixels,
        why=lambda p, c, d: f"blocks={c.blocks} have {p.pixels} pixels",
    ),
    Rule(
        code="threads",
        refuses=lambda p, c, d: (
            emit.lanes(p) > c.threads or emit.smem_bytes(p, c) > d.smem_per_block_bytes
        ),
        why=lambda p, c, d: (
            f"threads={c.threads}; a pixel has {emit.lanes(p)} packs, and sums of so "
            f"many threads need {emit.smem_bytes(p, c)} bytes of shared memory"
        ),
    ),
)


def _grid(
    problem: GroupNormProblem, device: CudaDevice
) -> Iterator[GroupNormPassesConfig]:
    """The legal configs, the likely ones first."""
    p = problem
    divisors = [n for n in range(1, min(p.pixels, 4096) + 1) if p.pixels % n == 0]
    seen: set[GroupNormPassesConfig] = set()
    for of_sm, times, threads in itertools.product(_BLOCKS_OF_SM, _TIMES, (512, 256)):
        most = max(1, of_sm * device.sm_count // p.images)
        parts = max(n for n in divisors if n <= most)
        blocks = min(most * times, p.pixels)
        config = GroupNormPassesConfig(parts=parts, blocks=blocks, threads=threads)
        if config not in seen and not first_refusal(LEGAL, p, config, device):
            seen.add(config)
            yield config
