"""layer_norm in numbers: its config, what follows from it, and its kernels.

See ``kernels/cuda/layer_norm.cuh`` and ``layer_norm_backward.cuh``. Callers: the
variant of the same name, tests.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import norms
from tracea_jax.emit.kernel import Kernel
from tracea_jax.emit.norms import SM_REGISTERS, SM_THREADS, pack
from tracea_jax.problem import GroupNormProblem

_BASE = {"forward": 40, "gradients": 64}  # registers of addresses and the like


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig:
    """Assignment of rows to threads.

    Attributes:
      lanes: threads that share a row.
      threads: of a block.
    """

    lanes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.lanes} of {self.threads}"


def packs(problem: GroupNormProblem, config: LayerNormConfig) -> int:
    """Packs of a row that a thread has."""
    return -(-problem.channels // (pack(problem) * config.lanes))


def rows(config: LayerNormConfig) -> int:
    """Rows that a block has at a time."""
    return config.threads // config.lanes


def registers(problem: GroupNormProblem, config: LayerNormConfig) -> int:
    """That a thread can do with: arrays as they are, and numbers of each channel."""
    of_channel = 2 if problem.direction == "forward" else 3
    of_channel += problem.direction == "gradients" and problem.activation != "none"
    arrays = 4 if problem.direction == "forward" else 8
    each = arrays + of_channel * pack(problem)
    return _BASE[problem.direction] + each * packs(problem, config)


def resident_blocks(problem: GroupNormProblem, config: LayerNormConfig) -> int:
    """Blocks that a multiprocessor holds."""
    of_thread = -(-registers(problem, config) // 8) * 8
    of_registers = SM_REGISTERS // (of_thread * config.threads)
    return max(1, min(of_registers, SM_THREADS // config.threads))


def blocks(
    problem: GroupNormProblem, config: LayerNormConfig, device: CudaDevice
) -> int:
    """Blocks of a launch: as many as run at once, if there are enough rows."""
    most = -(-problem.images // rows(config))
    return min(most, device.sm_count * resident_blocks(problem, config))


def kernel(
    problem: GroupNormProblem, config: LayerNormConfig, device: CudaDevice
) -> Kernel:
    """One launch, see ``norms.NormKernel``."""
    p, c = problem, config
    norm = norms.NormKernel(
        problem=p,
        template="layer_norm",
        suffix="",
        name=f"l{c.lanes}_p{packs(p, c)}_t{c.threads}",
        traits=f"kLanes = {c.lanes}, kPacks = {packs(p, c)}, kThreads = {c.threads}",
        sizes={"rows": p.images, "channels": p.channels},
        launch=norms.Shape(
            blocks=blocks(p, c, device),
            threads=c.threads,
            resident=resident_blocks(p, c),
        ),
    )
    return norm.kernel(device)
