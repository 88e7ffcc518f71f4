"""group_norm_sm90 in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/group_norm_sm90.cuh`` and ``group_norm_backward_sm90.cuh``. Callers:
the variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CudaDevice
from tracea_jax.emit import norms
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.norms import PACK_BYTES, SM_REGISTERS, SM_THREADS, pack
from tracea_jax.problem import GroupNormProblem

_REGISTERS = {"forward": 96, "gradients": 120}  # that a thread can do with


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormConfig:
    """Partition of an image, and the part that stays in shared memory.

    Attributes:
      slab: channels of a cluster, whole groups of them.
      cluster: blocks that share a slab, by pixels.
      threads: of a block.
      keeps: whether a block keeps what it has read until the sums are known; else it is
        read twice.
    """

    slab: int
    cluster: int
    threads: int
    keeps: bool

    def __str__(self) -> str:
        keeps = " keeps" * self.keeps
        return f"slab {self.slab}, {self.cluster} x {self.threads}{keeps}"


def least_slab(problem: GroupNormProblem) -> int:
    """The fewest channels that are whole groups and whole packs."""
    return math.lcm(problem.of_group, pack(problem))


def lanes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return config.slab // pack(problem)


def rows(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Pixels that a block has at a time."""
    return config.threads // lanes(problem, config)


def shared_bytes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Bytes of the sums."""
    numbers = 2 * pack(problem) * (config.threads + 4) + 4 * config.slab
    groups = 2 * (config.slab // problem.of_group)
    return -(-4 * (numbers + groups) // PACK_BYTES) * PACK_BYTES


def smem_bytes(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    """Bytes of a block: the sums, and what stays."""
    if not config.keeps:
        return shared_bytes(problem, config)
    of_block = -(-problem.pixels // config.cluster)
    of_thread = -(-of_block // rows(problem, config)) * arrays(problem)
    return shared_bytes(problem, config) + of_thread * config.threads * PACK_BYTES


def arrays(problem: GroupNormProblem) -> int:
    """Arrays that are read: x, and dy."""
    return 1 if problem.direction == "forward" else 2


def slabs(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return -(-problem.channels // config.slab)


def blocks(problem: GroupNormProblem, config: GroupNormConfig) -> int:
    return problem.images * slabs(problem, config) * config.cluster


def resident_blocks(
    problem: GroupNormProblem, config: GroupNormConfig, device: CudaDevice
) -> int:
    """Blocks that a multiprocessor holds."""
    of_smem = device.blocks_in_smem(smem_bytes(problem, config))
    of_registers = SM_REGISTERS // (_REGISTERS[problem.direction] * config.threads)
    return max(1, min(of_smem, of_registers, SM_THREADS // config.threads))


def kernel(
    problem: GroupNormProblem, config: GroupNormConfig, device: CudaDevice
) -> Kernel:
    """One launch, see ``norms.NormKernel``."""
    p, c = problem, config
    keeps = "_keeps" * c.keeps
    norm = norms.NormKernel(
        problem=p,
        template="group_norm",
        suffix="_sm90",
        name=f"g{p.of_group}_s{c.slab}_c{c.cluster}_t{c.threads}{keeps}",
        traits=(
            f"kGroup = {p.of_group}, kLanes = {lanes(p, c)}, kThreads = {c.threads}, "
            f"kCluster = {c.cluster}, kArrays = {arrays(p)}, "
            f"kSharedBytes = {shared_bytes(p, c)}, kKeeps = {cxx(c.keeps)}"
        ),
        sizes={"pixels": p.pixels, "channels": p.channels},
        launch=norms.Shape(
            blocks=blocks(p, c),
            threads=c.threads,
            cluster=c.cluster,
            resident=resident_blocks(p, c, device),
            smem_bytes=smem_bytes(p, c),
        ),
    )
    return norm.kernel(device)
