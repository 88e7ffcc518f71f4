"""group_norm_sm90: a group norm and its activation in one pass, and its gradients.

XLA takes a pass for the sums and another one for the result, at least. Here a cluster
of blocks reads a slab of an image once and has it in shared memory until its sums are
known, if it fits; else it is read again, mostly from the L2 cache. So the time is that
of the bytes, and the default config is the one whose blocks keep all multiprocessors
busy with them.

Here are the reasons that refuse problems, the rules that refuse configs, and the
default; the kernels' text is written in ``emit.group_norm_sm90``. Caller: the op's
record (``ops.group_norm.op``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import group_norm_sm90 as emit
from tracea_jax.emit.group_norm_sm90 import GroupNormConfig
from tracea_jax.emit.norms import pack
from tracea_jax.problem import ITEMSIZE, GroupNormProblem
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import INT32_MAX
from tracea_jax.variants.norms import DTYPES, norm_call, refused_arrays
from tracea_jax.variants.space import (
    Rule,
    Space,
    check_choices,
    check_rules,
    first_refusal,
)

_CLUSTERS, _THREADS = (1, 2, 4, 8), (128, 256, 512)
CHOICES: dict[str, tuple[Any, ...]] = {
    "cluster": _CLUSTERS,
    "threads": _THREADS,
    "keeps": (True, False),
}
_SLABS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32)  # in least ones
_MOST_LANES = 512
_FEWEST, _PIXELS = 2**20, (256, 2**14)  # elements; pixels of an image


@dataclasses.dataclass(frozen=True, slots=True)
class GroupNormSm90:
    """The variant group_norm_sm90; see ``variants.base.Variant``."""

    name: str = "group_norm_sm90"
    config_type: type = GroupNormConfig
    sources: tuple[str, ...] = (
        "cuda/group_norm_sm90.cuh",
        "cuda/group_norm_backward_sm90.cuh",
    )

    def why_not(self, problem: GroupNormProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: GroupNormProblem, config: GroupNormConfig, device: Device
    ) -> None:
        check_choices(config, CHOICES)
        check_rules(LEGAL, problem, config, device)

    def space(self, problem: GroupNormProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return Space.of(*_legal(problem, device))

    def heuristic(self, problem: GroupNormProblem, device: Device) -> GroupNormConfig:
        assert isinstance(device, CudaDevice)
        legal = _legal(problem, device)
        return min(legal, key=lambda config: modelled_us(problem, config, device))

    def expects_to_win(self, problem: GroupNormProblem, device: Device) -> bool:
        """Returns whether the kernel was measured to beat XLA on such problems.

        XLA reads an image again in each of its passes, while here it stays in shared
        memory. XLA was slower on an H100 for 1 to 16 images of so many pixels, and 128
        to 1280 channels. Of these no results are kept but those of a block with two
        such norms, ``programs_vision.json``.
        """
        p = problem
        return (
            isinstance(device, CudaDevice)
            and device.capability == (9, 0)
            and ITEMSIZE[p.dtype] == 2
            and p.size >= _FEWEST
            and _PIXELS[0] <= p.pixels <= _PIXELS[1]
        )

    def doubt(self, problem: GroupNormProblem, device: Device) -> str | None:
        return (
            "timed were 16-bit arrays of 2^20 elements and more on Hopper, of "
            f"{_PIXELS[0]} to {_PIXELS[1]} pixels; XLA was faster with more of them"
        )

    def call(
        self, problem: GroupNormProblem, config: GroupNormConfig, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = emit.kernel(problem, config, device)
        return norm_call(problem, kernel, problem.images)


GROUP_NORM_SM90 = GroupNormSm90()


def _reasons(problem: GroupNormProblem, device: Device) -> Iterator[str]:
    """Why the problem cannot be served, each as a sentence."""
    p = problem
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
        return
    if device.capability < (9, 0):
        yield f"clusters of blocks exist since sm_90; the device is {device.arch}"
    if p.dtype not in DTYPES:
        yield from refused_arrays(p)
        return
    yield from refused_arrays(p)
    if emit.least_slab(p) > _MOST_LANES * pack(p):
        yield (
            f"groups of {p.of_group} channels; {emit.least_slab(p)} are the fewest of "
            f"whole groups and packs, and a block has {_MOST_LANES * pack(p)}"
        )
    if max(p.pixels, p.images * p.channels) > INT32_MAX // 8:
        yield "it has more pixels, or more blocks, than a launch counts"


LEGAL = (
    Rule(
        code="slab",
        refuses=lambda p, c, d: (
            c.slab < 1
            or c.slab % emit.least_slab(p) != 0
            or emit.lanes(p, c) > c.threads
        ),
        why=lambda p, c, d: (
            f"slab={c.slab} must be a multiple of {emit.least_slab(p)} channels, up to "
            f"{c.threads * pack(p)}"
        ),
    ),
    Rule(
        code="smem",
        refuses=lambda p, c, d: emit.smem_bytes(p, c) > d.smem_per_block_bytes,
        why=lambda p, c, d: (
            f"it needs {emit.smem_bytes(p, c)} bytes of shared memory; a block has "
            f"{d.smem_per_block_bytes}"
        ),
    ),
)


def _legal(problem: GroupNormProblem, device: CudaDevice) -> list[GroupNormConfig]:
    least = emit.least_slab(problem)
    most = -(-problem.channels // least)
    slabs = [n * least for n in dict.fromkeys(min(n, most) for n in _SLABS)]
    configs: list[GroupNormConfig] = []
    for slab, keeps in itertools.product(slabs, CHOICES["keeps"]):
        configs += [
            GroupNormConfig(slab=slab, cluster=cluster, threads=threads, keeps=keeps)
            for cluster, threads in itertools.product(_CLUSTERS, _THREADS)
        ]
    return [c for c in configs if first_refusal(LEGAL, problem, c, device) is None]


# Fitted to 350 times of 19 problems on an H100.
_BYTES_PER_US, _AGAIN_BYTES_PER_US = 32_000, 31_000  # of a multiprocessor; read again
_CYCLES = {"forward": 19, "gradients": 63}  # of a lane for each element
_LANE_CYCLES_PER_US = 128 * 1700.0
_ENOUGH_WARPS = 9
_LAUNCH_US, _WAVE_US, _SUM_US = 2.0, 4.3, 0.5  # sums: 256 channels by 256 threads
_SECTOR = 80  # bytes that the end of a row of a slab costs
# Blocks of a cluster share a part of the GPU, which does not divide into large ones.
_SHARE_OF_SMS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.85}


def modelled_us(
    problem: GroupNormProblem, config: GroupNormConfig, device: CudaDevice
) -> float:
    """Predicted time: waves of blocks, each bound by its bytes or its arithmetic."""
    p, c = problem, config
    sms = int(device.sm_count * _SHARE_OF_SMS[c.cluster])
    blocks = emit.blocks(p, c)
    resident = min(emit.resident_blocks(p, c, device), -(-blocks // sms))
    waves = blocks / (resident * sms)
    waves = math.ceil(waves) if waves <= 2 else waves + 0.5
    elements = resident * -(-p.pixels // c.cluster) * c.slab  # of a multiprocessor
    itemsize = ITEMSIZE[p.dtype]
    of_row = c.slab * itemsize
    whole = min(1.0, (of_row + _SECTOR) / (128 + _SECTOR))
    arrays = emit.arrays(p)
    moving = elements * itemsize * (arrays + 1) / _BYTES_PER_US / whole
    if not c.keeps:
        moving += elements * itemsize * arrays / _AGAIN_BYTES_PER_US
    idle = c.threads / (emit.rows(p, c) * emit.lanes(p, c))
    waiting = max(1.0, _ENOUGH_WARPS / (resident * c.threads / 32))
    cycles = elements * _CYCLES[p.direction] * idle * waiting
    summing = resident * _SUM_US * c.slab / c.threads
    busy = max(moving, cycles / _LANE_CYCLES_PER_US)
    return _LAUNCH_US + waves * (busy + _WAVE_US + summing)
