"""layer_norm: a norm over channels and its activation, and its gradients, in one pass.

It serves norms of images of one pixel, whose channels are one group. A row stays in the
registers of a few threads; the gradients of scale and bias are added in the same pass
that computes that of x, for which XLA takes passes of their own.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernels' text is written in ``emit.layer_norm``. Caller: the op's record
(``ops.group_norm.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import layer_norm as emit
from tracea_jax.emit.layer_norm import LayerNormConfig
from tracea_jax.emit.norms import SM_REGISTERS, pack
from tracea_jax.problem import ITEMSIZE, GroupNormProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.gpus import refused_device
from tracea_jax.variants.norms import DTYPES, norm_call, refused_arrays
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_rules,
    first_refusal,
)

CHOICES: dict[str, tuple[int, ...]] = {
    "lanes": (1, 2, 4, 8, 16, 32),
    "threads": (128, 256, 512),
}
_CHANNELS, _FEWEST_ROWS = (96, 384), 64 * 14 * 14  # measured in programs
_MOST_PACKS, _MOST_REGISTERS, _WARP = 4, 232, 32
_FEWER = 32  # with which a thread does, where large blocks leave few, by loading again


@dataclasses.dataclass(frozen=True, slots=True)
class LayerNorm:
    """The variant layer_norm; see ``variants.base.Variant``."""

    name: str = "layer_norm"
    config_type: type = LayerNormConfig
    sources: tuple[str, ...] = ("cuda/layer_norm.cuh", "cuda/layer_norm_backward.cuh")

    def why_not(self, problem: GroupNormProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: GroupNormProblem, config: LayerNormConfig, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(LEGAL, problem, config, device)

    def space(self, problem: GroupNormProblem, device: Device) -> Space:
        return Space.of(*_legal(problem, device))

    def heuristic(self, problem: GroupNormProblem, device: Device) -> LayerNormConfig:
        """No lanes without packs, and blocks that leave registers to others."""
        threads = 256 if problem.direction == "forward" else 128

        def cost(config: LayerNormConfig) -> tuple[float, int, int]:
            packs = emit.packs(problem, config)
            lost = packs * config.lanes * pack(problem) / problem.channels
            return (lost, abs(packs - 2), abs(config.threads - threads))

        return min(_legal(problem, device), key=cost)

    def expects_to_win(self, problem: GroupNormProblem, device: Device) -> bool:
        """Returns whether programs were measured to be faster with the kernel.

        On an H200 blocks of ConvNeXt of 96 and of 384 channels took longer with XLA's
        norms, with and without gradients; the step of a whole model that has these
        norms is in ``programs_convnext_resnet50_inference.json``.
        """
        p = problem
        return (
            isinstance(device, CudaDevice)
            and device.capability == (9, 0)
            and ITEMSIZE[p.dtype] == 2
            and _CHANNELS[0] <= p.channels <= _CHANNELS[1]
            and p.images >= _FEWEST_ROWS
        )

    def doubt(self, problem: GroupNormProblem, device: Device) -> str | None:
        return (
            "XLA computes the sums of rows in the passes of what is before and after; "
            "programs were measured with many rows of 96 to 384 channels of 16 bits"
        )

    def call(
        self, problem: GroupNormProblem, config: LayerNormConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = emit.kernel(problem, config, device)
        return norm_call(problem, kernel, emit.blocks(problem, config, device))


LAYER_NORM = LayerNorm()


def _reasons(problem: GroupNormProblem, device: Device) -> Iterator[str]:
    """Why the problem cannot be served, each as a sentence."""
    p = problem
    yield from refused_device(device)
    if not isinstance(device, CudaDevice):
        return
    if (p.pixels, p.groups) != (1, 1):
        yield (
            f"images of {p.pixels} pixels and {p.groups} groups; it takes one pixel, "
            "and one group of all channels"
        )
    yield from refused_arrays(p)
    if p.dtype in DTYPES and p.channels > _MOST_PACKS * _WARP * pack(p):
        yield (
            f"{p.channels} channels; a warp has the registers for "
            f"{_MOST_PACKS * _WARP * pack(p)}"
        )
    if p.images > INT32_MAX // 2:
        yield f"{p.images} rows are more than the kernel counts"


LEGAL = (
    Rule(
        code="packs",
        refuses=lambda p, c, d: emit.packs(p, c) > _MOST_PACKS,
        why=lambda p, c, d: (
            f"{emit.packs(p, c)} packs of 16 bytes a thread; it takes {_MOST_PACKS}"
        ),
    ),
    Rule(
        code="registers",
        refuses=lambda p, c, d: emit.registers(p, c) > _most_registers(c),
        why=lambda p, c, d: (
            f"{emit.packs(p, c)} packs of 16 bytes take {emit.registers(p, c)} "
            f"registers of a thread; {c.threads} threads have {_most_registers(c)}"
        ),
    ),
)


def _most_registers(config: LayerNormConfig) -> int:
    return min(_MOST_REGISTERS, SM_REGISTERS // config.threads + _FEWER)


def _legal(problem: GroupNormProblem, device: Device) -> list[LayerNormConfig]:
    configs = [
        LayerNormConfig(lanes=lanes, threads=threads)
        for lanes, threads in itertools.product(*CHOICES.values())
    ]
    return [c for c in configs if first_refusal(LEGAL, problem, c, device) is None]
